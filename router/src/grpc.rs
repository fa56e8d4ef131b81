//! The gRPC front door: `baton.v1.Inference`. Requests take the same path as over HTTP.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use baton_proto::v1;
use baton_proto::v1::generate_request::Input;
use baton_runtime::traces;
use baton_types::{Class, Constraint, ErrorKind, RequestId, SamplingParams, random_u64};
use futures::Stream;
use tokio::time::Instant;
use tonic::metadata::MetadataMap;
use tonic::{Request, Response, Status};

use crate::admission::Admitted;
use crate::body::Share;
use crate::conversation;
use crate::error::RequestError;
use crate::front::Front;
use crate::http::TRACE;
use crate::input::GenerateInput;
use crate::models::{Defaults, Served};
use crate::openai::{Reader, Said};
use crate::prompt::{Prompt, Wanted};
use crate::revocable::revocable;
use crate::sink::{Event, EventKind};
use crate::standing::{Standing, slo};
use crate::tools::Call;

/// Longest request id of a client, bytes. Longer ones are refused.
const MAX_ID: usize = 128;

/// The service `baton.v1.Inference`.
pub(crate) struct Inference {
    front: Arc<Front>,
}

impl Inference {
    /// A service that passes requests to `front`.
    pub fn new(front: Arc<Front>) -> Inference {
        Inference { front }
    }
}

type Answers = Pin<Box<dyn Stream<Item = Result<v1::GenerateResponse, Status>> + Send>>;

#[tonic::async_trait]
impl v1::inference_server::Inference for Inference {
    type GenerateStream = Answers;

    async fn generate(&self, mut request: Request<v1::GenerateRequest>) -> Result<Response<Answers>, Status> {
        let admitted = request.extensions_mut().remove::<Admitted>();
        let Admitted { tenant, received, .. } =
            &admitted.ok_or_else(|| Status::internal("the call was not admitted"))?;
        let deadline = self.front.deadline(*received, client_timeout(request.metadata()));
        let traced = request.metadata().get(TRACE).is_some_and(|value| value == "1");
        let span = traces::begin(request.metadata().get("traceparent").and_then(|value| value.to_str().ok()));
        let (traced, received) = (traced.then(|| Arc::clone(&self.front)), *received);
        let input = read(request.into_inner(), received, deadline, &self.front.models.defaults());
        let read = input.and_then(|input| {
            let mut share = Share::default();
            self.front.bodies.add(&mut share, input.embedded())?;
            Ok((input, share))
        });
        // Its memory, until there are only tokens.
        let (input, _share) = read.inspect_err(|e| self.front.refused(e)).map_err(|e| status(&e))?;
        let input = GenerateInput { tenant: tenant.clone(), span, ..input };
        let request_id = input.request_id.clone();
        let (tools, chat) = (input.tools.clone(), matches!(input.prompts[..], [Prompt::Chat(..)]));
        let may_think = chat && !input.is_forced();
        let mut generation = self.front.generate(input).await.map_err(|e| status(&e))?;
        let model = &generation.served.model;
        let prompt = generation.prompts.first().filter(|_| may_think);
        let mut reader = Reader::new(
            prompt.and_then(|prompt| model.reasoning(prompt)),
            false,
            tools.map(|tools| model.tool_parser(&tools)),
        );
        let class = match generation.class {
            Class::Interactive => v1::Class::Interactive,
            Class::Batch => v1::Class::Batch,
        };
        let slot = generation.slot();
        let id = request_id.0.clone();
        let answers: Answers = Box::pin(async_stream::stream! {
            let mut sent = 0;
            let mut next = generation.next().await;
            while let Some(event) = next.take() {
                match event.kind {
                    EventKind::Scored(tokens) if tokens.is_empty() => {}
                    EventKind::Scored(tokens) => {
                        let prompt = tokens.into_iter().map(Into::into).collect();
                        yield Ok(v1::GenerateResponse { prompt, ..Default::default() });
                    }
                    EventKind::Token { piece, text } => {
                        let mut response = said(reader.push(text));
                        response.tokens.push(piece.token.into());
                        // Tokens that are there by now go out in one message.
                        next = generation.next_ready();
                        while let Some(Event { kind: EventKind::Token { piece, text }, .. }) = next {
                            response.tokens.push(piece.token.into());
                            add(&mut response, reader.push(text));
                            next = generation.next_ready();
                        }
                        response.index = sent;
                        sent += response.tokens.len() as u32;
                        yield Ok(response);
                    }
                    EventKind::Finished { reason, text, usage } => {
                        let usage = v1::Usage {
                            prompt_tokens: usage.prompt_tokens,
                            completion_tokens: usage.completion_tokens,
                            cached_tokens: usage.cached_tokens,
                        };
                        let reason = v1::FinishReason::from(reason).into();
                        let placed = traced.as_ref().map(|front| front.models.explain(&id, Some(received)));
                        let placement = placed.map(|placed| serde_json::Value::from(placed).to_string()).unwrap_or_default();
                        let finish = Some(v1::Finish { reason, usage: Some(usage), class: class.into(), placement });
                        let mut response = said(reader.push(text));
                        add(&mut response, reader.finish());
                        yield Ok(v1::GenerateResponse { index: sent, finish, ..response });
                    }
                    EventKind::Failed(error) => yield Err(status(&error)),
                }
                if next.is_none() {
                    next = generation.next().await;
                }
            }
        });
        let given_up =
            RequestError::new(ErrorKind::Cancelled, "the answer was given up: its client read nothing of it");
        let (mut answers, revoke) = revocable(answers, Err(status(&given_up)));
        slot.when_given_back(revoke);
        let unread = answers.unread(self.front.limits.send_timeout);
        answers.until_dropped(async move {
            unread.await;
            tracing::info!(request = %request_id, "request given up: its client read nothing of its answer (--send-timeout)");
            slot.give_back();
        });
        Ok(Response::new(Box::pin(answers)))
    }

    async fn list_models(&self, _: Request<v1::ListModelsRequest>) -> Result<Response<v1::ListModelsResponse>, Status> {
        let info = |served: &Served| v1::ModelInfo {
            id: served.model.id().to_owned(),
            context_tokens: served.context_tokens(),
            vocab_size: served.model.vocab_size(),
            aliases: served.model.ids().iter().skip(1).cloned().collect(),
        };
        Ok(Response::new(v1::ListModelsResponse { models: self.front.models.all().map(info).collect() }))
    }
}

/// A message with what a choice said.
fn said(said: Said) -> v1::GenerateResponse {
    let mut response = v1::GenerateResponse::default();
    add(&mut response, said);
    response
}

fn add(response: &mut v1::GenerateResponse, said: Said) {
    let Said { reasoning, text, calls } = said;
    response.text += &text;
    response.reasoning += &reasoning;
    let call = |Call { id, name, arguments, .. }| v1::ToolCall { id, name, arguments };
    response.tool_calls.extend(calls.into_iter().map(call));
}

fn read(
    request: v1::GenerateRequest,
    received: Instant,
    deadline: Instant,
    defaults: &Defaults,
) -> Result<GenerateInput, RequestError> {
    let mut tools = None;
    let prompt = match request.input {
        Some(Input::Text(text)) => Prompt::Text(text),
        Some(Input::TokenIds(ids)) => Prompt::Ids(ids.ids),
        Some(Input::Chat(chat)) => {
            let (prompt, asked) = conversation::read(chat)?;
            tools = asked;
            prompt
        }
        None => return Err(RequestError::invalid("input", "input is missing; set text, token_ids or chat")),
    };
    if request.request_id.len() > MAX_ID {
        let wrong = format!("request_id has {} bytes; at most {MAX_ID} are allowed", request.request_id.len());
        return Err(RequestError::invalid("request_id", wrong));
    }
    let id = match request.request_id.is_empty() {
        true => format!("gen-{:016x}", random_u64()),
        false => request.request_id,
    };
    let class = match v1::Class::try_from(request.class) {
        Ok(v1::Class::Batch) => Class::Batch,
        Ok(v1::Class::Unspecified | v1::Class::Interactive) => Class::Interactive,
        Err(_) => {
            let wrong = format!("class is {}; it must be CLASS_INTERACTIVE or CLASS_BATCH", request.class);
            return Err(RequestError::invalid("class", wrong));
        }
    };
    let defaults = defaults.of(&request.model);
    let mut asked = request.sampling.unwrap_or_default();
    let only_prompt = asked.max_tokens == Some(0) && asked.prompt_logprobs.is_some();
    let field = "sampling.constraint";
    let constraint = asked.constraint.take().map(Constraint::try_from).transpose();
    let constraint = constraint.map_err(|e| RequestError::invalid(field, e.to_string()))?;
    Ok(GenerateInput {
        model: request.model,
        prompts: vec![prompt],
        n: 1,
        max_tokens: asked.max_tokens.map(|most| most.max(only_prompt.into())),
        only_prompt,
        seed: asked.seed,
        ignore_eos: asked.ignore_eos,
        sampling: sampling(asked, defaults),
        stop: request.stop,
        wanted: constraint.map(|constraint| Wanted { field, constraint: constraint.into() }),
        tools,
        standing: Standing {
            cache_salt: request.cache_salt,
            class,
            priority: request.priority,
            cache_keep_seconds: request.cache_keep_seconds,
            slo: slo(request.reject_ttft_ms, request.reject_itl_ms),
            ..Standing::default()
        },
        tenant: None,
        request_id: RequestId(id),
        deadline,
        received,
        span: None,
    })
}

/// Sampling parameters with defaults for absent fields.
fn sampling(asked: v1::Sampling, defaults: SamplingParams) -> SamplingParams {
    let mut logit_bias: Vec<(u32, f32)> = asked.logit_bias.into_iter().collect();
    logit_bias.sort_by_key(|(id, _)| *id);
    SamplingParams {
        temperature: asked.temperature.unwrap_or(defaults.temperature),
        top_p: asked.top_p.unwrap_or(defaults.top_p),
        top_k: asked.top_k.unwrap_or(defaults.top_k),
        min_p: asked.min_p.unwrap_or(defaults.min_p),
        presence_penalty: asked.presence_penalty.unwrap_or(defaults.presence_penalty),
        frequency_penalty: asked.frequency_penalty.unwrap_or(defaults.frequency_penalty),
        repetition_penalty: asked.repetition_penalty.unwrap_or(defaults.repetition_penalty),
        logit_bias,
        min_tokens: asked.min_tokens,
        top_logprobs: asked.top_logprobs,
        prompt_logprobs: asked.prompt_logprobs,
        stop_token_ids: asked.stop_token_ids,
        ..defaults
    }
}

/// The status for an error. Its metadata has the field at fault (`param`) and the retry delay (`retry-after`, seconds).
pub(crate) fn status(error: &RequestError) -> Status {
    let mut status = baton_proto::status_of(error);
    if let Some(after) = error.retry_after_seconds() {
        status.metadata_mut().insert("retry-after", after.into());
    }
    if let Some(param) = error.param.as_deref().and_then(|p| p.parse().ok()) {
        status.metadata_mut().insert("param", param);
    }
    status
}

/// The client's timeout from the header `grpc-timeout`: digits and a unit.
fn client_timeout(metadata: &MetadataMap) -> Option<Duration> {
    let text = metadata.get("grpc-timeout")?.to_str().ok()?;
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let count: u64 = digits.parse().ok()?;
    match unit {
        "H" => Some(Duration::from_secs(count.saturating_mul(3600))),
        "M" => Some(Duration::from_secs(count.saturating_mul(60))),
        "S" => Some(Duration::from_secs(count)),
        "m" => Some(Duration::from_millis(count)),
        "u" => Some(Duration::from_micros(count)),
        "n" => Some(Duration::from_nanos(count)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absent_sampling_fields_have_their_defaults() {
        let sampling = |asked| sampling(asked, SamplingParams::default());
        assert_eq!(sampling(v1::Sampling::default()), SamplingParams::default());
        let asked = v1::Sampling { top_p: Some(0.5), logit_bias: [(7, 1.0), (2, 3.0)].into(), ..Default::default() };
        let want = SamplingParams { top_p: 0.5, logit_bias: vec![(2, 3.0), (7, 1.0)], ..SamplingParams::default() };
        assert_eq!(sampling(asked), want);
    }

    #[test]
    fn timeouts_in_every_unit() {
        let read = |text: &str| {
            let mut metadata = MetadataMap::new();
            metadata.insert("grpc-timeout", text.parse().unwrap());
            client_timeout(&metadata)
        };
        assert_eq!(read("2H"), Some(Duration::from_secs(7200)));
        assert_eq!(read("3M"), Some(Duration::from_secs(180)));
        assert_eq!(read("250m"), Some(Duration::from_millis(250)));
        assert_eq!(read("7u"), Some(Duration::from_micros(7)));
        for bad in ["", "S", "5", "5x", "-1S", "1.5S"] {
            assert_eq!(read(bad), None, "{bad}");
        }
    }
}
