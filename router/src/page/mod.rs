//! The live page at `/` of the router's admin endpoint: its files, which are part of this program, and the data that it shows.
//!
//! Everything is behind the admin endpoint's guard, and nothing changes the cluster; a tour asks two short questions. Data: `feed` and `snapshot` (the cluster),
//! `/page/requests/ID` (one request, `holders`), `/page/tour` (`tour`), `calculator`. The page's files are in `router/page`; they load nothing from elsewhere, and the
//! browser is told to refuse it if they did.

mod calculator;
mod feed;
mod holders;
mod snapshot;
mod stats;
mod tour;

use std::sync::{Arc, OnceLock};

use axum::body::Body;
use axum::extract::rejection::JsonRejection;
use axum::extract::{Path, Request};
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use baton_policy::{Slo, Targets};
use baton_types::Class;
use serde_json::json;
use tokio::time::Instant;

use crate::config::RouterConfig;
use crate::front::Front;
use crate::models::Models;
use calculator::Asked;
use feed::Feed;
use tour::{NoTour, Tours, Wanted};

/// What serves requests, once the router has opened its models: the admin endpoint starts before.
pub(crate) type Opened = Arc<OnceLock<Arc<Front>>>;

/// What the page may load: its own files and data, nothing else. Nobody may show it in a frame.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; \
                      form-action 'none'; frame-ancestors 'none'";

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const SVG: &str = "image/svg+xml";

/// The page's files: name, type, content.
const FILES: [(&str, &str, &str); 12] = [
    ("style.css", CSS, include_str!("../../page/style.css")),
    ("icon.svg", SVG, include_str!("../../page/icon.svg")),
    ("app.js", SCRIPT, include_str!("../../page/app.js")),
    ("dom.js", SCRIPT, include_str!("../../page/dom.js")),
    ("charts.js", SCRIPT, include_str!("../../page/charts.js")),
    ("cluster.js", SCRIPT, include_str!("../../page/cluster.js")),
    ("requests.js", SCRIPT, include_str!("../../page/requests.js")),
    ("waterfall.js", SCRIPT, include_str!("../../page/waterfall.js")),
    ("calculator.js", SCRIPT, include_str!("../../page/calculator.js")),
    ("walk.js", SCRIPT, include_str!("../../page/walk.js")),
    ("walk-columns.js", SCRIPT, include_str!("../../page/walk-columns.js")),
    ("walk-model.js", SCRIPT, include_str!("../../page/walk-model.js")),
];
const INDEX: &str = include_str!("../../page/index.html");

/// All routes of the page.
pub(crate) fn routes(opened: &Opened, config: &RouterConfig) -> Router {
    let slo = Slo { first_token: config.reject_ttft, token: config.reject_itl, ..Slo::default() };
    let targets = Targets::of(&slo, Class::Interactive).unwrap_or(Targets::USUAL);
    let (feed, since, tours) = (Feed::new(), Instant::now(), Arc::<Tours>::default());
    let [of_feed, of_requests, of_model, of_estimate, of_tour] = [opened; 5].map(Arc::clone);
    Router::new()
        .route("/", get(|| async { file(HTML, INDEX) }))
        .route("/page/events", get(move || async move { events(&feed, models(&of_feed), targets, since) }))
        .route("/page/requests/{id}", get(move |id| async move { request(models(&of_requests), id).await }))
        .route(
            "/page/models",
            get(move || async move {
                models(&of_model).map_or_else(starting, |m| Json(calculator::known(m)).into_response())
            }),
        )
        .route("/page/estimate", post(move |asked| async move { estimated(models(&of_estimate), asked) }))
        .route("/page/tour", post(move |wanted| async move { tour(of_tour.get(), &tours, wanted).await }))
        .route("/page/{file}", get(asset))
        .layer(middleware::from_fn(protected))
}

fn models(opened: &Opened) -> Option<&Arc<Models>> {
    opened.get().map(|front| &front.models)
}

fn file(kind: &'static str, text: &'static str) -> Response {
    ([(header::CONTENT_TYPE, kind)], text).into_response()
}

async fn asset(Path(name): Path<String>) -> Response {
    match FILES.iter().find(|(own, ..)| *own == name) {
        Some((_, kind, text)) => file(kind, text),
        None => (StatusCode::NOT_FOUND, "the page has no such file\n").into_response(),
    }
}

fn starting() -> Response {
    (StatusCode::SERVICE_UNAVAILABLE, "starting\n").into_response()
}

fn events(feed: &Feed, models: Option<&Arc<Models>>, targets: Targets, since: Instant) -> Response {
    let Some(models) = models.cloned() else { return starting() };
    let take = move || {
        let models = Arc::clone(&models);
        async move { snapshot::take(&models, targets, since).await }
    };
    match feed.watch(take) {
        Some(stream) => ([(header::CONTENT_TYPE, "text/event-stream")], Body::from_stream(stream)).into_response(),
        None => (StatusCode::SERVICE_UNAVAILABLE, "too many watch already; close another page\n").into_response(),
    }
}

async fn request(models: Option<&Arc<Models>>, Path(id): Path<String>) -> Response {
    let Some(models) = models else { return starting() };
    let choices = holders::choices(models, &id).await;
    if choices.is_empty() {
        return (StatusCode::NOT_FOUND, Json(json!({"error": "this router does not remember such a request"})))
            .into_response();
    }
    Json(json!({"request": id, "choices": choices, "placements": models.explain(&id, None)})).into_response()
}

async fn tour(front: Option<&Arc<Front>>, tours: &Tours, wanted: Result<Json<Wanted>, JsonRejection>) -> Response {
    let Some(front) = front else { return starting() };
    let (status, wrong) = match wanted {
        Ok(Json(wanted)) => match tours.take(front, wanted).await {
            Ok(tour) => return Json(tour).into_response(),
            Err(NoTour::Away(why)) => (StatusCode::SERVICE_UNAVAILABLE, why),
            Err(NoTour::Wrong(why)) => (StatusCode::BAD_REQUEST, why),
        },
        Err(wrong) => (StatusCode::BAD_REQUEST, wrong.body_text()),
    };
    (status, Json(json!({"error": wrong}))).into_response()
}

fn estimated(models: Option<&Arc<Models>>, asked: Result<Json<Asked>, JsonRejection>) -> Response {
    let Some(models) = models else { return starting() };
    let told = asked.map_err(|error| error.body_text()).and_then(|Json(asked)| calculator::answer(asked, models));
    match told {
        Ok(told) => Json(told).into_response(),
        Err(wrong) => (StatusCode::BAD_REQUEST, Json(json!({"error": wrong}))).into_response(),
    }
}

/// Headers that every answer of the page has.
async fn protected(request: Request, next: Next) -> Response {
    let mut response = next.run(request).await;
    let own = [
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-store"),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    ];
    response.headers_mut().extend(own.map(|(name, value)| (name, HeaderValue::from_static(value))));
    response
}
