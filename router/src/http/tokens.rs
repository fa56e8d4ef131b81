//! POST /tokenize and /detokenize. They need no worker, so what bounds them is the memory for their answers, and their tenants' limits.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::header;
use axum::response::{IntoResponse, Response};

use super::{Door, parsed, refusal, tenant};
use crate::body::{Held, Share};
use crate::error::RequestError;
use crate::heavy;
use crate::openai::{self, TokenizeInput, Unwritten};
use crate::pieces::in_pieces;
use crate::standing::Standing;
use crate::tenant::Pass;

/// The body of a request that needs no worker, and its tenant's permission, which counts as that of any other request.
async fn small(door: &Door, request: Request) -> Result<(Option<Pass>, Held), RequestError> {
    let tenant = tenant(&door.front, request.headers())?;
    let pass = tenant.map(|tenant| tenant.admit(1)).transpose()?;
    let body = door.front.bodies.read(request.into_body()).await?;
    Ok((pass, body))
}

pub(super) async fn tokenize(State(door): State<Door>, request: Request) -> Response {
    let answer = async {
        let (pass, body) = small(&door, request).await?;
        // The same tokens as those of the tenant's requests without a salt of their own.
        let standing = pass.as_ref().map(|pass| pass.tenant().standing(Standing::default())).transpose()?;
        let salt = standing.unwrap_or_default().cache_salt;
        let line = pass.as_ref().map(|pass| pass.tenant().line());
        let (input, mut share) = parsed(&door.front, body, line, TokenizeInput::read).await?;
        door.front.bodies.add(&mut share, input.prompt.arguments())?;
        let unwritten = openai::tokenize(input, &door.front.models, &salt, line).await?;
        written(&door, unwritten, pass, share).await
    };
    answered(&door, answer.await)
}

pub(super) async fn detokenize(State(door): State<Door>, request: Request) -> Response {
    let answer = async {
        let (pass, body) = small(&door, request).await?;
        let front = Arc::clone(&door.front);
        let read = move |bytes: &[u8]| openai::detokenize(bytes, &front.models);
        let line = pass.as_ref().map(|pass| pass.tenant().line());
        let (unwritten, share) = parsed(&door.front, body, line, read).await?;
        written(&door, unwritten, pass, share).await
    };
    answered(&door, answer.await)
}

/// The answer, a large one put together on a thread of its own. It has its share of the memory, and is its tenant's request, until it is sent.
async fn written(
    door: &Door,
    unwritten: Unwritten,
    pass: Option<Pass>,
    mut share: Share,
) -> Result<Response, RequestError> {
    let (front, large) = (Arc::clone(&door.front), unwritten.is_large());
    let write = move || unwritten.write(&front.bodies, &mut share).map(|json| (json, share));
    let (json, share) = match large {
        true => heavy::run(pass.as_ref().map(|pass| pass.tenant().line()), write).await?,
        false => write()?,
    };
    Ok(([(header::CONTENT_TYPE, "application/json")], in_pieces(json, (share, pass))).into_response())
}

fn answered(door: &Door, answer: Result<Response, RequestError>) -> Response {
    answer.unwrap_or_else(|error| {
        door.front.refused(&error);
        refusal(&error)
    })
}
