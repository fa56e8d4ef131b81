//! What a call of the gRPC API passes before its message is decoded: the key of its client, room for it, memory for its message (I5).
//!
//! Without this, whoever has no key could make the router decode 8 MiB for each of thousands of calls.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::header;
use axum::http::request::Parts;
use axum::middleware::Next;
use axum::response::Response;
use tokio::time::Instant;

use crate::body::{Held, Share};
use crate::error::RequestError;
use crate::front::Front;
use crate::grpc::status;
use crate::heavy;
use crate::http::LARGE;
use crate::tenant::Tenant;

/// The calls of clients. Each has one message. Those of health and reflection need no key.
const CALLS: &str = "/baton.v1.Inference/";
/// The one that takes a place.
const GENERATE: &str = "/baton.v1.Inference/Generate";

/// A call that was let in.
#[derive(Clone)]
pub(crate) struct Admitted {
    /// Who asks; None where clients need no key.
    pub tenant: Option<Arc<Tenant>>,
    /// When it arrived.
    pub received: Instant,
    /// The memory for its message.
    _share: Arc<Share>,
}

/// Lets a call in, or answers why not.
pub(crate) async fn admit(State(front): State<Arc<Front>>, request: Request, next: Next) -> Response {
    if !request.uri().path().starts_with(CALLS) {
        return next.run(request).await;
    }
    let (mut parts, body) = request.into_parts();
    match read(&front, &parts, body).await {
        Ok((admitted, message)) => {
            let line = admitted.tenant.as_deref().map(|tenant| tenant.line().clone());
            parts.extensions.insert(admitted);
            let large = message.len() >= LARGE;
            let answered = next.run(Request::from_parts(parts, Body::from(message)));
            // It begins with the decoding of its message.
            if large { heavy::beginning(line.as_ref(), answered).await } else { answered.await }
        }
        Err(error) => {
            front.refused(&error);
            status(&error).into_http()
        }
    }
}

async fn read(front: &Arc<Front>, call: &Parts, body: Body) -> Result<(Admitted, Vec<u8>), RequestError> {
    let received = Instant::now();
    let tenant = front.tenant(call.headers.get(header::AUTHORIZATION).map(|value| value.as_bytes()))?;
    if call.uri.path() == GENERATE {
        front.has_room()?;
        tenant.as_ref().map_or(Ok(()), |tenant| tenant.has_room())?;
    }
    let mut held = front.bodies.read(body).await?;
    let Held { bytes, share } = match held.bytes.len() < LARGE {
        true => {
            front.bodies.weigh_message(&mut held)?;
            held
        }
        false => {
            let front = Arc::clone(front);
            let line = tenant.as_deref().map(Tenant::line);
            let weighed = heavy::run(line, move || front.bodies.weigh_message(&mut held).map(|()| held));
            weighed.await?
        }
    };
    Ok((Admitted { tenant, received, _share: Arc::new(share) }, bytes))
}
