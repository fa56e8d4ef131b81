//! Calls that need no key: health and reflection (I5). Some never end by themselves, so they are few on each connection and do not keep its
//! place. Answers to reflection are large, so those are few on all connections together, and end.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Error;
use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use baton_runtime::places::holding;
use futures::{Stream, StreamExt, stream};
use hyper::HeaderMap;
use hyper::body::Frame;
use tokio::sync::Semaphore;
use tokio::time::sleep;
use tonic::Status;

use crate::held::Caller;
use crate::revocable::revocable;

const HEALTH: &str = "/grpc.health.v1.Health/";
/// Of v1 and v1alpha.
const REFLECTION: &str = "/grpc.reflection.";
/// Most of these calls in progress on one connection.
pub(crate) const CALLS: usize = 16;
/// Most calls of reflection in progress on all connections.
const REFLECTIONS: usize = 64;
/// Longest call of reflection.
const REFLECTION_TIME: Duration = Duration::from_secs(60);
/// How much later its requests end, so that its client reads why.
const REQUESTS_END: Duration = Duration::from_secs(1);

/// Whether a call needs no key.
pub(crate) fn is_keyless(path: &str) -> bool {
    path.starts_with(HEALTH) || path.starts_with(REFLECTION)
}

/// The calls of reflection on all connections.
#[derive(Clone)]
pub(crate) struct Reflections(Arc<Semaphore>);

impl Default for Reflections {
    fn default() -> Reflections {
        Reflections(Arc::new(Semaphore::new(REFLECTIONS)))
    }
}

/// Lets a call in, or refuses it if there are too many that need no key.
pub(crate) async fn bound(State(reflections): State<Reflections>, request: Request, next: Next) -> Response {
    let path = request.uri().path();
    if !is_keyless(path) {
        return next.run(request).await;
    }
    let reflects = path.starts_with(REFLECTION);
    let calls = request.extensions().get::<Caller>().map(|caller| Arc::clone(&caller.keyless));
    let Ok(call) = calls.map(Semaphore::try_acquire_owned).transpose() else {
        return full("the connection has as many calls of health and reflection as it may have; end some");
    };
    if !reflects {
        return next.run(request).await.map(|body| holding(body, call));
    }
    let Ok(reflection) = reflections.0.try_acquire_owned() else {
        return full("there are as many calls of reflection as there may be; retry later");
    };
    let late = || sleep(REFLECTION_TIME + REQUESTS_END);
    let request = request.map(|body| Body::new(Frames(frames(body).take_until(Box::pin(late())))));
    let answer = next.run(request).await;
    answer.map(|body| holding(ending(body, reflection), call))
}

/// An answer that ends in time, with a status, also if its client reads nothing. Then `what` is dropped, too.
fn ending(body: Body, what: impl Send + Unpin + 'static) -> Body {
    let mut trailers = HeaderMap::new();
    // Cannot fail: the message is a header's value as it is.
    let _ = Status::deadline_exceeded("a call of reflection ends after a minute").add_header(&mut trailers);
    let held = frames(body).map(move |frame| {
        let _ = &what;
        frame
    });
    let (mut answer, revoke) = revocable(held, Ok(Frame::trailers(trailers)));
    answer.until_dropped(async {
        sleep(REFLECTION_TIME).await;
        revoke();
    });
    Body::new(Frames(answer))
}

fn full(why: &str) -> Response {
    Status::resource_exhausted(why).into_http()
}

type Framed = Result<Frame<Bytes>, Error>;

fn frames(mut body: Body) -> impl Stream<Item = Framed> + Send + Unpin {
    stream::poll_fn(move |cx| Pin::new(&mut body).poll_frame(cx))
}

/// A body of these frames.
struct Frames<S>(S);

impl<S: Stream<Item = Framed> + Unpin> HttpBody for Frames<S> {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Framed>> {
        Pin::new(&mut self.0).poll_next(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::Router;
    use axum::middleware::from_fn_with_state;
    use axum::routing::any;
    use tower::ServiceExt;

    /// Answers with what the request sends.
    fn app(reflections: &Reflections) -> Router {
        let echo = any(|request: Request| async { Response::new(request.into_body()) });
        Router::new().route("/{*path}", echo).layer(from_fn_with_state(reflections.clone(), bound))
    }

    async fn call(app: &Router, path: &str) -> Response {
        let silent = Body::new(Frames(stream::pending()));
        app.clone().oneshot(Request::post(path).body(silent).unwrap()).await.unwrap()
    }

    fn code(headers: &HeaderMap) -> Option<&str> {
        headers.get("grpc-status").map(|code| code.to_str().unwrap())
    }

    #[tokio::test(start_paused = true)]
    async fn calls_of_reflection_are_few_and_end() {
        const INFO: &str = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo";
        let app = app(&Reflections::default());
        let mut answers = Vec::new();
        for _ in 0..REFLECTIONS {
            answers.push(call(&app, INFO).await);
        }
        assert!(answers.iter().all(|answer| code(answer.headers()).is_none()));
        assert_eq!(code(call(&app, INFO).await.headers()), Some("8"), "resource exhausted");
        assert_eq!(code(call(&app, "/grpc.health.v1.Health/Watch").await.headers()), None);
        assert_eq!(code(call(&app, "/baton.v1.Inference/Generate").await.headers()), None);
        // Nobody reads the answers.
        sleep(REFLECTION_TIME + REQUESTS_END).await;
        let again = call(&app, INFO).await;
        assert_eq!(code(again.headers()), None, "there is room again");
        let mut frames = frames(answers.pop().unwrap().into_body());
        let last = frames.next().await.unwrap().unwrap();
        assert_eq!(code(last.trailers_ref().unwrap()), Some("4"), "deadline exceeded");
        assert!(frames.next().await.is_none());
        let mut unended = self::frames(call(&app, "/grpc.health.v1.Health/Watch").await.into_body());
        assert!(tokio::time::timeout(REFLECTION_TIME * 9, unended.next()).await.is_err(), "a watch goes on");
    }
}
