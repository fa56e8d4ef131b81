//! The walk-through's recording: two short requests to the served model, and the KV that the engine has computed for them.
//!
//! The first prompt fills whole blocks, and its answer one more, so that all of its KV stays in the prefix caches and can be read there afterwards. The
//! second one begins like the first. Both have a cache salt that nobody else has, so they are computed, and nobody else's KV is found by them.

use std::collections::HashMap;
use std::time::Duration;

use baton_proto::v1::{ColumnsRequest, ColumnsResponse};
use baton_types::{RequestId, SamplingParams, WorkerId, random_u64};
use serde::{Deserialize, Serialize};
use tokio::sync::Mutex;
use tokio::time::Instant;
use tonic::{Code, Status};

use super::holders::prefix;
use crate::error::RequestError;
use crate::front::Front;
use crate::input::GenerateInput;
use crate::models::Served;
use crate::prompt::Prompt;
use crate::sink::EventKind;
use crate::standing::Standing;
use crate::trace::Shares;

/// What is asked. Enough for any tokenizer to fill both prompts.
const TEXT: &str = "A language model reads a prompt once. For each token it computes a key and a value in every layer, and keeps them. When it \
    writes the answer, each new token looks back at all keys and values before it. What was computed once need not be computed again, as long as \
    there is memory for it. So memory is what a server runs out of first, and it is kept in small blocks that are lent, shared and given back.";
/// What the second prompt goes on with.
const OTHER: &str = " Here another conversation goes on with words of its own. What came before them is the same, so its keys and values are the \
    same, and nobody computes them a second time.";
/// Fewest tokens of a prompt, and tokens that both prompts begin with; whole blocks of both.
const PROMPT: usize = 48;
const COMMON: usize = 32;
/// Tokens of the first answer that are shown.
const SHOWN: usize = 10;
/// A model's tokens of its two requests must come in this time.
const PATIENCE: Duration = Duration::from_secs(60);
/// Largest blocks that the tour knows how to fill, in tokens.
const BLOCK: usize = 64;

/// Which head's columns the page wants.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Wanted {
    /// Empty: the first model.
    model: String,
    /// None: the first layer that sees all tokens.
    layer: Option<u32>,
    head: u32,
}

/// A token and its text.
#[derive(Clone, Debug, Serialize)]
struct Token {
    id: u32,
    text: String,
}

/// One of the two requests.
#[derive(Clone, Debug)]
struct Asked {
    request: String,
    prompt: Vec<u32>,
    answer: Vec<u32>,
    /// Prompt tokens whose KV was there already.
    cached: u32,
    shares: Shares,
}

impl Asked {
    /// All tokens that have KV: the last one of the answer was not computed.
    fn computed(&self) -> Vec<u32> {
        let answer = &self.answer[..self.answer.len().saturating_sub(1)];
        self.prompt.iter().chain(answer).copied().collect()
    }
}

/// The two requests of a model.
#[derive(Clone, Debug)]
struct Recorded {
    salt: String,
    first: Asked,
    second: Asked,
}

/// One of the requests, for the page.
#[derive(Debug, Serialize)]
struct Told {
    request: String,
    prompt: Vec<Token>,
    answer: Vec<Token>,
    cached: u32,
}

/// KV at one worker, for the page: its block table, and for each token of these blocks the elements of K and V, one after the other.
#[derive(Debug, Serialize)]
struct Kept {
    worker: String,
    blocks: Vec<u32>,
    keys: Vec<f32>,
    values: Vec<f32>,
}

/// What the page gets.
#[derive(Debug, Serialize)]
pub(super) struct Tour {
    model: String,
    block_size: u32,
    layer: u32,
    head: u32,
    head_dim: u32,
    kv_type: String,
    /// Tokens of the first answer that are meant to be shown.
    shown: usize,
    first: Told,
    second: Told,
    /// Where the first prompt was computed, if that was not the decode worker.
    prefill: Option<Kept>,
    decode: Kept,
    /// Where the second one was answered.
    after: Kept,
}

/// Why there is no tour, for people.
#[derive(Debug)]
pub(super) enum NoTour {
    /// What was asked for is not there, in this recording or another.
    Wrong(String),
    /// Another recording may do better.
    Away(String),
}

impl From<Status> for NoTour {
    fn from(status: Status) -> NoTour {
        let why = status.message().to_owned();
        if status.code() == Code::InvalidArgument { NoTour::Wrong(why) } else { NoTour::Away(why) }
    }
}

impl From<RequestError> for NoTour {
    fn from(error: RequestError) -> NoTour {
        NoTour::Away(error.message)
    }
}

fn away(why: impl Into<String>) -> NoTour {
    NoTour::Away(why.into())
}

/// The recordings, by model. One is made at a time.
#[derive(Debug, Default)]
pub(super) struct Tours(Mutex<HashMap<String, Recorded>>);

impl Tours {
    /// A tour: of the recording that there is, or of a new one where its KV is gone.
    ///
    /// # Errors
    /// Why there is none.
    pub async fn take(&self, front: &Front, wanted: Wanted) -> Result<Tour, NoTour> {
        let served = front.models.named(&wanted.model).map_err(|error| NoTour::Wrong(error.message))?;
        let mut all = self.0.lock().await;
        if let Some(recorded) = all.get(served.model.id()) {
            match tour(served, recorded, &wanted).await {
                Err(NoTour::Away(_)) => {}
                told => return told,
            }
        }
        let recorded = record(front, served).await?;
        let told = tour(served, &recorded, &wanted).await;
        all.insert(served.model.id().to_owned(), recorded);
        told
    }
}

/// Has both requests answered.
async fn record(front: &Front, served: &Served) -> Result<Recorded, NoTour> {
    let block = served.workers.block_size() as usize;
    if block == 0 || block > BLOCK {
        return Err(away(format!("blocks of {block} tokens are not shown, only of 1 to {BLOCK}")));
    }
    let (length, common) = (PROMPT.next_multiple_of(block), COMMON.next_multiple_of(block));
    let prompt = tokens(served, TEXT, length).await?;
    let mut second = prompt[..common.min(length)].to_vec();
    second.extend(tokens(served, OTHER, length.max(common + block) - second.len()).await?);
    let salt = format!("tour-{:016x}", random_u64());
    let first = ask(front, served, &salt, prompt, block + 2).await?;
    let second = ask(front, served, &salt, second, 2).await?;
    Ok(Recorded { salt, first, second })
}

/// So many tokens of a text. Where a tokenizer makes fewer of it, it goes on from its beginning.
async fn tokens(served: &Served, text: &str, count: usize) -> Result<Vec<u32>, NoTour> {
    let ids = served.model.encode_bare(text.to_owned(), None).await?;
    match ids.is_empty() {
        true => Err(away("the tokenizer makes no tokens of the text")),
        false => Ok(ids.iter().copied().cycle().take(count).collect()),
    }
}

/// Asks for an answer of so many tokens, the same each time.
async fn ask(front: &Front, served: &Served, salt: &str, prompt: Vec<u32>, tokens: usize) -> Result<Asked, NoTour> {
    let request = format!("tour-{:016x}", random_u64());
    let received = Instant::now();
    let input = GenerateInput {
        model: served.model.id().to_owned(),
        prompts: vec![Prompt::Ids(prompt.clone())],
        n: 1,
        sampling: SamplingParams { temperature: 0.0, ..SamplingParams::default() },
        max_tokens: Some(tokens as u32),
        only_prompt: false,
        seed: Some(0),
        ignore_eos: true,
        stop: Vec::new(),
        wanted: None,
        tools: None,
        standing: Standing { cache_salt: salt.to_owned(), handed_over: true, ..Standing::default() },
        tenant: None,
        request_id: RequestId(request.clone()),
        deadline: received + PATIENCE,
        received,
        span: None,
    };
    let mut generation = front.generate(input).await?;
    let mut answer = Vec::with_capacity(tokens);
    while let Some(event) = generation.next().await {
        match event.kind {
            EventKind::Token { piece, .. } => answer.push(piece.token.id),
            EventKind::Failed(error) => return Err(error.into()),
            EventKind::Scored(_) | EventKind::Finished { .. } => {}
        }
    }
    let trace =
        served.workers.traces().choices(&request).pop().ok_or_else(|| away("the request was forgotten already"))?;
    Ok(Asked { request, prompt, answer, cached: trace.cached(), shares: trace.shares() })
}

/// Reads the KV of a recording.
async fn tour(served: &Served, recorded: &Recorded, wanted: &Wanted) -> Result<Tour, NoTour> {
    let Recorded { salt, first, second } = recorded;
    let block_size = served.workers.block_size();
    let kv = |worker: Option<WorkerId>, tokens: Vec<u32>| async move {
        let worker = worker.ok_or_else(|| away("no worker answered"))?;
        let full = tokens.len() / block_size.max(1) as usize;
        let (prefix, layer) = (Some(prefix(&tokens, salt)), wanted.layer);
        let asked = ColumnsRequest { prefix, layer, kv_head: wanted.head, only_blocks: false };
        let told = served.workers.columns(worker, asked).await?;
        match told.blocks.len() {
            held if held >= full => Ok((worker, told)),
            held => Err(away(format!("worker {worker} has {held} of {full} blocks of it left"))),
        }
    };
    let kept = |(worker, told): (WorkerId, ColumnsResponse)| {
        let ColumnsResponse { blocks, keys, values, .. } = told;
        Kept { worker: worker.to_string(), blocks, keys, values }
    };
    let prefill = match first.shares.prefill {
        Some(worker) => Some(kv(Some(worker), first.prompt.clone()).await.map(kept)?),
        None => None,
    };
    let decode = kv(first.shares.decode, first.computed()).await?;
    let after = kv(second.shares.decode, second.prompt.clone()).await.map(kept)?;
    let ColumnsResponse { head_dim, layer, kv_type, .. } = &decode.1;
    Ok(Tour {
        model: served.model.id().to_owned(),
        block_size,
        layer: *layer,
        head: wanted.head,
        head_dim: *head_dim,
        kv_type: kv_type.clone(),
        shown: SHOWN,
        first: told(served, first),
        second: told(served, second),
        prefill,
        decode: kept(decode),
        after,
    })
}

fn told(served: &Served, asked: &Asked) -> Told {
    let tokens = |ids: &[u32]| ids.iter().map(|id| Token { id: *id, text: served.model.token(*id).0 }).collect();
    let (prompt, answer) = (tokens(&asked.prompt), tokens(&asked.answer));
    Told { request: asked.request.clone(), prompt, answer, cached: asked.cached }
}
