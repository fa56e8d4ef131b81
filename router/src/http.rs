//! The HTTP front door: routes, bodies, errors. `openai` builds the answer, and `sse.rs` streams it.

mod tokens;

use std::sync::{Arc, LazyLock};

use axum::body::{Body, Bytes};
use axum::extract::{Path, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use baton_policy::Left;
use baton_runtime::traces;
use baton_types::{ErrorKind, RequestId, random_u64};
use serde_json::json;
use tokio::time::Instant;

use crate::body::{Bodies, Held, Share};
use crate::error::RequestError;
use crate::front::{Front, Generation, unix_seconds};
use crate::heavy::{self, Line};
use crate::input::GenerateInput;
use crate::model::ServedModel;
use crate::models::Served;
use crate::openai::{
    self, Answer, Asked, Echo, Endpoint, Envelope, ErrorBody, Model, ModelList, Reader, Shape, UsageSum,
};
use crate::pieces::in_pieces;
use crate::sink::EventKind;
use crate::sse;
use crate::tenant::Tenant;

/// Length from which a body is parsed on a thread of its own, so that other requests do not wait for it.
pub(crate) const LARGE: usize = 64 << 10;
/// Bytes of a whole answer from which it is put together on a thread of its own.
const LARGE_ANSWER: usize = 1 << 20;
/// So many token ids take long to turn into text.
pub(crate) const MANY: usize = 4 << 10;
/// Longest request id of a client, bytes. Longer ones are replaced.
const MAX_ID: usize = 128;
const REQUEST_ID: &str = "x-request-id";
/// Asks for [`PLACEMENT`].
pub(crate) const TRACE: &str = "x-baton-trace";
/// Why the request was placed where it was, as JSON.
const PLACEMENT: &str = "x-baton-placement";

#[derive(Clone)]
struct Door {
    front: Arc<Front>,
}

/// All routes.
pub(crate) fn routes(front: Arc<Front>) -> Router {
    Router::new()
        .route("/v1/chat/completions", post(chat))
        .route("/v1/completions", post(completions))
        .route("/v1/responses", post(responses))
        .route("/v1/models", get(models))
        .route("/v1/models/{*id}", get(model))
        .route("/tokenize", post(tokens::tokenize))
        .route("/detokenize", post(tokens::detokenize))
        .route("/version", get(version))
        .route("/openapi.json", get(document))
        .route("/health", get(|| async { "alive\n" }))
        .route("/ready", get(ready))
        .fallback(no_route)
        .method_not_allowed_fallback(wrong_method)
        .with_state(Door { front })
}

async fn chat(State(door): State<Door>, request: Request) -> Response {
    serve(door.front, request, Endpoint::Chat).await
}

async fn completions(State(door): State<Door>, request: Request) -> Response {
    serve(door.front, request, Endpoint::Completions).await
}

async fn responses(State(door): State<Door>, request: Request) -> Response {
    serve(door.front, request, Endpoint::Responses).await
}

/// Handles one request from start to end.
async fn serve(front: Arc<Front>, request: Request, endpoint: Endpoint) -> Response {
    let received = Instant::now();
    let id = request_id(request.headers(), endpoint);
    let deadline = front.deadline(received, None);
    let span = traces::begin(request.headers().get("traceparent").and_then(|value| value.to_str().ok()));
    let tenant = tenant(&front, request.headers()).inspect_err(|error| front.refused(error));
    let traced = request.headers().get(TRACE).is_some_and(|value| value == "1").then(|| Arc::clone(&front));
    let answered = match tenant.clone() {
        Ok(tenant) => {
            let defaults = front.models.defaults();
            let request_id = RequestId(id.clone());
            let envelope = Envelope { request_id, tenant, received, deadline, defaults, span };
            answer(front, request.into_body(), endpoint, envelope).await
        }
        Err(error) => Err(error),
    };
    let mut response = answered.unwrap_or_else(|error| refusal(&error));
    if let Ok(value) = HeaderValue::from_str(&id) {
        response.headers_mut().insert(REQUEST_ID, value);
    }
    if let Some(placements) =
        traced.map(|front| front.models.explain(&id, Some(received))).filter(|placements| !placements.is_empty())
        && let Ok(value) = HeaderValue::try_from(serde_json::Value::from(placements).to_string())
    {
        response.headers_mut().insert(PLACEMENT, value);
    }
    if let Ok(Some(tenant)) = tenant {
        rate_limits(response.headers_mut(), &tenant);
    }
    response
}

/// Who asks; None where clients need no key.
fn tenant(front: &Front, headers: &HeaderMap) -> Result<Option<Arc<Tenant>>, RequestError> {
    front.tenant(headers.get(header::AUTHORIZATION).map(HeaderValue::as_bytes))
}

/// Says what is left of the tenant's limits.
fn rate_limits(headers: &mut HeaderMap, tenant: &Tenant) {
    let (requests, tokens) = tenant.left();
    for (what, left) in [("requests", requests), ("tokens", tokens)] {
        let Some(Left { limit, remaining, reset }) = left else { continue };
        let reset = format!("{:.3}s", reset.as_secs_f64());
        for (name, value) in [("limit", limit.to_string()), ("remaining", remaining.to_string()), ("reset", reset)] {
            let name = HeaderName::try_from(format!("x-ratelimit-{name}-{what}"));
            if let (Ok(name), Ok(value)) = (name, HeaderValue::try_from(value)) {
                headers.insert(name, value);
            }
        }
    }
}

async fn answer(
    front: Arc<Front>,
    body: Body,
    endpoint: Endpoint,
    envelope: Envelope,
) -> Result<Response, RequestError> {
    let id = envelope.request_id.0.clone();
    let read = async {
        // Refused before its body costs anything. The place itself is taken later, since a body may take a minute to arrive.
        front.has_room()?;
        envelope.tenant.as_ref().map_or(Ok(()), |tenant| tenant.has_room())?;
        let body = front.bodies.read(body).await?;
        let tenant = envelope.tenant.clone();
        let line = tenant.as_deref().map(Tenant::line);
        let (read, mut share) =
            parsed(&front, body, line, move |bytes| openai::read(endpoint, bytes, envelope)).await?;
        front.bodies.add(&mut share, read.0.embedded())?;
        Ok((read, share))
    };
    let ((input, asked, frame), share): ((GenerateInput, Asked, _), Share) = match read.await {
        Ok(read) => read,
        Err(error) => {
            front.refused(&error);
            return Err(error);
        }
    };
    let (tools, tenant) = (input.tools.clone(), input.tenant.clone());
    let line = tenant.as_deref().map(Tenant::line);
    let may_think = endpoint.shape() == Shape::Chat && !input.is_forced();
    let generation = front.generate(input).await.map_err(|error| endpoint.reworded(error))?;
    // From here on there are only tokens.
    drop(share);
    // Of a chat, which is one prompt.
    let Served { model, workers, .. } = &generation.served;
    let parser = tools.map(|tools| model.tool_parser(&tools));
    let prompt = generation.prompts.first().filter(|_| may_think);
    let reasoning = prompt.and_then(|prompt| model.reasoning(prompt));
    let (echoes, mut share) = match asked.echo {
        true => echoes(&front, model, &generation.prompts, line).await?,
        false => Default::default(),
    };
    let answer = Answer {
        shape: endpoint.shape(),
        id,
        created: unix_seconds(),
        model: Arc::clone(model),
        fingerprint: format!("fp_{:016x}", workers.fingerprint()),
        asked,
        prompts: generation.prompts.clone(),
        echoes,
        n: generation.n,
        class: generation.class,
        frame,
        reader: Reader::new(reasoning, !asked.reasoning, parser),
    };
    match asked.stream {
        true => {
            if asked.echo {
                // All its choices may begin at once.
                front.bodies.grow(&mut share, answer.weight_before())?;
            }
            sse::respond(generation, answer, share, front.limits.keep_alive).await
        }
        false => whole(generation, answer, &front.bodies, share, line).await,
    }
}

/// The prompts as their answers repeat them, and their share of the memory. Long ones are made on a thread of their own.
async fn echoes(
    front: &Arc<Front>,
    model: &Arc<ServedModel>,
    prompts: &[Arc<[u32]>],
    line: Option<&Line>,
) -> Result<(Vec<Echo>, Share), RequestError> {
    let (front, model, prompts) = (Arc::clone(front), Arc::clone(model), prompts.to_vec());
    let large = prompts.iter().map(|ids| ids.len()).sum::<usize>() >= MANY;
    let make = move || {
        let mut share = Share::default();
        front.bodies.add(&mut share, Echo::weights(&model, &prompts))?;
        Ok((prompts.iter().map(|ids| Echo::new(&model, ids)).collect(), share))
    };
    if large { heavy::run(line, make).await } else { make() }
}

/// Reads a body, a large one on a thread of its own. The share of the memory is that of what was read.
async fn parsed<T: Send + 'static>(
    front: &Arc<Front>,
    mut body: Held,
    line: Option<&Line>,
    read: impl FnOnce(&[u8]) -> Result<T, RequestError> + Send + 'static,
) -> Result<(T, Share), RequestError> {
    let (front, large) = (Arc::clone(front), body.bytes.len() >= LARGE);
    let read = move || {
        front.bodies.weigh(&mut body)?;
        Ok((read(&body.bytes)?, body.share))
    };
    if large { heavy::run(line, read).await } else { read() }
}

/// The answer as one object, whose bytes have their share of the memory for bodies.
async fn whole(
    mut generation: Generation,
    answer: Answer,
    memory: &Bodies,
    mut share: Share,
    line: Option<&Line>,
) -> Result<Response, RequestError> {
    let mut bytes = answer.weight_before();
    memory.grow(&mut share, bytes)?;
    let mut parts = answer.unopened();
    let mut readers = answer.readers();
    let mut usage = UsageSum::default();
    while let Some(event) = generation.next().await {
        bytes += answer.weight(&event.kind);
        memory.grow(&mut share, bytes)?;
        let part = &mut parts[event.choice as usize];
        match event.kind {
            EventKind::Token { piece, text } => {
                part.add(readers[event.choice as usize].push(text));
                answer.add(part, piece);
            }
            EventKind::Scored(tokens) => answer.add_scored(part, tokens),
            EventKind::Finished { reason, text, usage: own } => {
                part.add(readers[event.choice as usize].push(text));
                part.add(readers[event.choice as usize].finish());
                part.finish = Some(readers[event.choice as usize].finish_reason(reason));
                usage.thought += readers[event.choice as usize].thought();
                usage.add(event.choice, answer.n, own);
            }
            EventKind::Failed(error) => return Err(error),
        }
    }
    let write = move || {
        Ok(match (&answer.frame, &parts[..]) {
            (Some(_), [part]) => openai::whole_response(&answer, part, &usage),
            _ => answer.whole(parts, &usage),
        })
    };
    let body = if bytes >= LARGE_ANSWER { heavy::run(line, write).await? } else { write()? };
    Ok(([(header::CONTENT_TYPE, "application/json")], in_pieces(body, share)).into_response())
}

/// The client's id for the request if it is usable, otherwise a new one.
fn request_id(headers: &HeaderMap, endpoint: Endpoint) -> String {
    let given = headers.get(REQUEST_ID).and_then(|v| v.to_str().ok());
    match given.filter(|id| (1..=MAX_ID).contains(&id.len()) && id.bytes().all(|b| b.is_ascii_graphic())) {
        Some(id) => id.to_owned(),
        None => format!("{}{:016x}", endpoint.prefix(), random_u64()),
    }
}

/// The response for an error.
pub(crate) fn refusal(error: &RequestError) -> Response {
    let status = StatusCode::from_u16(error.kind.http_status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = (status, Json(ErrorBody::from(error))).into_response();
    if let Some(after) = error.retry_after_seconds() {
        response.headers_mut().insert(header::RETRY_AFTER, after.into());
    }
    if error.kind == ErrorKind::Unauthenticated {
        response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    response
}

async fn models(State(door): State<Door>, headers: HeaderMap) -> Response {
    match tenant(&door.front, &headers) {
        Ok(_) => {
            let front = &door.front;
            let ids = |served| served_names(served).map(move |id| model_object(front, served, id));
            Json(ModelList { object: "list", data: front.models.all().flat_map(ids).collect() }).into_response()
        }
        Err(error) => refusal(&error),
    }
}

async fn model(State(door): State<Door>, Path(id): Path<String>, headers: HeaderMap) -> Response {
    match tenant(&door.front, &headers).and_then(|_| door.front.models.named(&id)) {
        Ok(served) => {
            let asked = served_names(served).find(|name| *name == id);
            Json(model_object(&door.front, served, asked.unwrap_or(served.model.id()))).into_response()
        }
        Err(error) => refusal(&error),
    }
}

async fn document() -> Response {
    static DOCUMENT: LazyLock<Bytes> = LazyLock::new(|| openai::document().to_string().into());
    ([(header::CONTENT_TYPE, "application/json")], DOCUMENT.clone()).into_response()
}

async fn version() -> Response {
    Json(json!({"version": env!("CARGO_PKG_VERSION")})).into_response()
}

/// The names by which clients ask for a model.
fn served_names(served: &Served) -> impl Iterator<Item = &str> {
    served.model.ids().iter().map(String::as_str)
}

fn model_object<'a>(front: &Front, served: &Served, id: &'a str) -> Model<'a> {
    let max_model_len = served.context_tokens();
    Model { id, object: "model", created: front.started, owned_by: "baton", max_model_len }
}

async fn ready(State(door): State<Door>) -> Response {
    match door.front.not_ready() {
        None => "ready\n".into_response(),
        Some(reason) => (StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n")).into_response(),
    }
}

async fn no_route(request: Request) -> Response {
    let wrong = format!("there is no {} {}; see /v1/models", request.method(), request.uri().path());
    refusal(&RequestError::new(ErrorKind::NotFound, wrong).code("unknown_url"))
}

async fn wrong_method(request: Request) -> Response {
    let message = format!("{} does not take {}", request.uri().path(), request.method());
    let error =
        json!({"message": message, "type": "invalid_request_error", "param": null, "code": "method_not_allowed"});
    (StatusCode::METHOD_NOT_ALLOWED, Json(json!({ "error": error }))).into_response()
}
