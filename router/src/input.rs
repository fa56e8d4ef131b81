//! What a client wants, in the one form both front doors (HTTP and gRPC) turn it into, and the checks on it.
//!
//! Comes before anything is spent on a worker: after [`GenerateInput::plan`] every field has a value that can work.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;

use baton_model_files::ChatMessage;
use baton_policy::Capacity;
use baton_proto::v1;
use baton_types::{Constraint, MAX_CACHE_KEEP_SECONDS, MAX_CACHE_SALT, RequestId, SamplingParams};
use tokio::time::Instant;

use crate::error::RequestError;
use crate::model::ServedModel;
use crate::tools::Tools;

/// Most choices of one request.
pub(crate) const MAX_CHOICES: u32 = 128;
const MAX_STOPS: usize = 4;
const MAX_STOP_BYTES: usize = 1024;
const MAX_STOP_IDS: usize = 256;
const MAX_BIASES: usize = 1024;

/// What a request says about its place beside others; its answer does not depend on it (I1).
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Standing {
    /// Only requests with the same salt share cached prefixes.
    pub cache_salt: String,
    /// Lower goes first.
    pub priority: i32,
    /// How long its KV is kept before that of those that do not ask.
    pub cache_keep_seconds: u32,
}

/// The prompt as the client gave it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Prompt {
    /// Tokenised as is.
    Text(String),
    /// Used as they are.
    Ids(Vec<u32>),
    /// Rendered with the model's chat template.
    Chat(Vec<ChatMessage>),
}

impl Prompt {
    /// The field of a request it comes from.
    pub fn field(&self) -> &'static str {
        match self {
            Prompt::Text(_) | Prompt::Ids(_) => "prompt",
            Prompt::Chat(_) => "messages",
        }
    }
}

/// What every answer must look like.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Wanted {
    /// The field that asks for it.
    pub field: &'static str,
    /// What it asks for.
    pub constraint: Arc<Constraint>,
}

/// One request.
#[derive(Clone, Debug)]
pub(crate) struct GenerateInput {
    /// The model asked for; empty: the one served.
    pub model: String,
    /// At least one; each is answered `n` times.
    pub prompts: Vec<Prompt>,
    /// Answers a prompt.
    pub n: u32,
    /// Sampling as sent, absent fields unset.
    pub sampling: v1::Sampling,
    /// Strings that end an answer.
    pub stop: Vec<String>,
    /// What the answers must look like.
    pub wanted: Option<Wanted>,
    /// Functions the model may call; with a chat only, and not together with `wanted`.
    pub tools: Option<Tools>,
    /// Its place beside others.
    pub standing: Standing,
    /// The client's id, or one made up.
    pub id: RequestId,
    /// When the client must have its answer.
    pub deadline: Instant,
    /// When it came in.
    pub received: Instant,
}

/// One prompt, checked and tokenised.
#[derive(Clone, Debug)]
pub(crate) struct Planned {
    /// Token ids, at least one.
    pub prompt: Arc<[u32]>,
    /// One for each choice; they differ in the seed.
    pub choices: Vec<SamplingParams>,
}

impl GenerateInput {
    /// Checks what needs no tokenising.
    pub fn check(&self, model: &ServedModel) -> Result<(), RequestError> {
        model.check_name(&self.model)?;
        self.check_counts()?;
        self.check_ids(model.vocab_size())?;
        self.tools.as_ref().map_or(Ok(()), |tools| model.check_tools(tools))
    }

    /// Answers to be made, all prompts together. At least 1 and at most [`MAX_CHOICES`] once checked.
    pub fn choices(&self) -> u32 {
        self.n * self.prompts.len() as u32
    }

    /// Tokenises a checked request, sees whether it fits, and fills in every default.
    pub async fn plan(self, model: &Arc<ServedModel>, capacity: Capacity) -> Result<Vec<Planned>, RequestError> {
        let seed = self.sampling.seed.unwrap_or_else(random_u64);
        let wanted = self.wanted.or_else(|| model.forced_calls(self.tools.as_ref()?));
        if let Some(wanted) = &wanted {
            if self.sampling.ignore_eos {
                let wrong = format!("ignore_eos cannot be used together with {}: its answers end", wanted.field);
                return Err(RequestError::invalid("ignore_eos", wrong));
            }
            model.check_constraint(wanted).await?;
        }
        let mut planned = Vec::with_capacity(self.prompts.len());
        for prompt in self.prompts {
            let field = prompt.field();
            let ids = model.encode(prompt, self.tools.as_ref()).await?;
            let context = capacity.context().unwrap_or(model.context_tokens());
            let room = Room { field, prompt: ids.len() as u32, context, capacity };
            let max_tokens = room.max_tokens(self.sampling.max_tokens)?;
            let constraint = wanted.as_ref().map(|wanted| wanted.constraint.clone());
            let params =
                SamplingParams { constraint, ..sampling_params(&self.sampling, model.eos_ids(), max_tokens, seed) };
            params.validate()?;
            // The same seed and prompt give the same n answers, whatever the route (I1).
            let choices = (0..self.n).map(|i| SamplingParams { seed: seed.wrapping_add(i.into()), ..params.clone() });
            planned.push(Planned { prompt: ids.into(), choices: choices.collect() });
        }
        Ok(planned)
    }

    fn check_counts(&self) -> Result<(), RequestError> {
        let choices = u64::from(self.n) * self.prompts.len() as u64;
        if self.n == 0 || choices > MAX_CHOICES.into() {
            let asked = format!("{} prompts × n = {} is {choices} answers", self.prompts.len(), self.n);
            return Err(RequestError::invalid("n", format!("{asked}; a request may have 1 to {MAX_CHOICES}")));
        }
        if self.stop.len() > MAX_STOPS {
            let count = self.stop.len();
            return Err(RequestError::invalid(
                "stop",
                format!("stop has {count} strings; at most {MAX_STOPS} are allowed"),
            ));
        }
        let salt = self.standing.cache_salt.len();
        if salt > MAX_CACHE_SALT {
            let wrong = format!("cache_salt has {salt} bytes; at most {MAX_CACHE_SALT} are allowed");
            return Err(RequestError::invalid("cache_salt", wrong));
        }
        let keep = self.standing.cache_keep_seconds;
        if keep > MAX_CACHE_KEEP_SECONDS {
            let wrong = format!("cache_keep_seconds is {keep}; at most {MAX_CACHE_KEEP_SECONDS} are allowed");
            return Err(RequestError::invalid("cache_keep_seconds", wrong));
        }
        if let Some(bad) = self.stop.iter().find(|s| s.is_empty() || s.len() > MAX_STOP_BYTES) {
            let length = bad.len();
            let wrong = format!("stop has a string of {length} bytes; each must have 1 to {MAX_STOP_BYTES}");
            return Err(RequestError::invalid("stop", wrong));
        }
        let counts = [
            ("stop_token_ids", self.sampling.stop_token_ids.len(), MAX_STOP_IDS),
            ("logit_bias", self.sampling.logit_bias.len(), MAX_BIASES),
        ];
        match counts.into_iter().find(|(_, count, most)| count > most) {
            Some((field, count, most)) => {
                Err(RequestError::invalid(field, format!("{field} has {count} entries; at most {most} are allowed")))
            }
            None => Ok(()),
        }
    }

    fn check_ids(&self, vocab_size: u32) -> Result<(), RequestError> {
        let outside = |id: &&u32| **id >= vocab_size;
        let refuse = |field: &str, id: Option<&u32>| match id {
            Some(id) => {
                let wrong = format!("{field} has token id {id}; the model's ids are 0 to {}", vocab_size - 1);
                Err(RequestError::invalid(field, wrong))
            }
            None => Ok(()),
        };
        for prompt in &self.prompts {
            if let Prompt::Ids(ids) = prompt {
                refuse("prompt", ids.iter().find(outside))?;
            }
        }
        refuse("logit_bias", self.sampling.logit_bias.keys().find(outside))?;
        refuse("stop_token_ids", self.sampling.stop_token_ids.iter().find(outside))
    }
}

/// What a prompt and its answers have to fit into, all in tokens.
struct Room {
    field: &'static str,
    prompt: u32,
    context: u32,
    capacity: Capacity,
}

impl Room {
    /// Most tokens of each answer. What the client asked for must fit; where it asked for nothing, as many as do.
    fn max_tokens(&self, asked: Option<u32>) -> Result<u32, RequestError> {
        let (prompt, context) = (self.prompt, self.context);
        if prompt == 0 {
            return Err(RequestError::invalid(self.field, "the prompt has no tokens; it must have at least one"));
        }
        if prompt >= context {
            let wrong = format!("the context is {context} tokens, but the prompt has {prompt}; shorten it");
            return Err(RequestError::invalid(self.field, wrong).code("context_length_exceeded"));
        }
        let pool = self.capacity.pool();
        let too_large = |field: &str, wrong: String| {
            let wrong = format!("{wrong} do not fit the {pool} KV tokens of a decode worker");
            Err(RequestError::invalid(field, wrong).code("kv_capacity_exceeded"))
        };
        if prompt >= pool {
            return too_large(self.field, format!("the prompt's {prompt} tokens and an answer"));
        }
        let Some(asked) = asked else { return Ok((context - prompt).min(pool - prompt)) };
        if u64::from(prompt) + u64::from(asked) > context.into() {
            let wrong = format!(
                "the context is {context} tokens, but {} were asked for ({prompt} in the prompt, {asked} for \
                 the answer); shorten the prompt or lower max_tokens",
                u64::from(prompt) + u64::from(asked)
            );
            return Err(RequestError::invalid("max_tokens", wrong).code("context_length_exceeded"));
        }
        if prompt.saturating_add(asked) > pool {
            return too_large("max_tokens", format!("{prompt} tokens of the prompt and {asked} of the answer"));
        }
        Ok(asked)
    }
}

/// Sampling with every default filled in. The model's end tokens end the answer unless the client ignores them.
fn sampling_params(asked: &v1::Sampling, eos: &[u32], max_tokens: u32, seed: u64) -> SamplingParams {
    let defaults = SamplingParams::default();
    let mut logit_bias: Vec<(u32, f32)> = asked.logit_bias.iter().map(|(id, bias)| (*id, *bias)).collect();
    logit_bias.sort_by_key(|(id, _)| *id);
    let mut stop_token_ids = asked.stop_token_ids.clone();
    if !asked.ignore_eos {
        stop_token_ids.extend_from_slice(eos);
    }
    stop_token_ids.sort_unstable();
    stop_token_ids.dedup();
    SamplingParams {
        max_tokens,
        temperature: asked.temperature.unwrap_or(defaults.temperature),
        top_p: asked.top_p.unwrap_or(defaults.top_p),
        top_k: asked.top_k.unwrap_or(defaults.top_k),
        min_p: asked.min_p.unwrap_or(defaults.min_p),
        seed,
        presence_penalty: asked.presence_penalty.unwrap_or(defaults.presence_penalty),
        frequency_penalty: asked.frequency_penalty.unwrap_or(defaults.frequency_penalty),
        repetition_penalty: asked.repetition_penalty.unwrap_or(defaults.repetition_penalty),
        logit_bias,
        top_logprobs: asked.top_logprobs,
        stop_token_ids,
        constraint: None,
    }
}

/// 64 bits nobody can foresee: the standard library seeds each hasher from the system.
pub(crate) fn random_u64() -> u64 {
    RandomState::new().build_hasher().finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn room(prompt: u32, capacity: Capacity) -> Room {
        Room { field: "prompt", prompt, context: 100, capacity }
    }

    #[test]
    fn an_answer_fits_the_context_and_the_pools() {
        let pools = Capacity::of(64);
        let code = |room: Room, asked| room.max_tokens(asked).map_err(|e| (e.param.unwrap(), e.code));
        assert_eq!(code(room(10, Capacity::UNKNOWN), None), Ok(90), "as many as fit the context");
        assert_eq!(code(room(10, pools), None), Ok(54), "or the largest pool");
        assert_eq!(code(room(99, Capacity::UNKNOWN), Some(1)), Ok(1));
        let too_long = Some("context_length_exceeded");
        assert_eq!(code(room(99, Capacity::UNKNOWN), Some(2)), Err(("max_tokens".into(), too_long)));
        assert_eq!(code(room(100, Capacity::UNKNOWN), Some(1)), Err(("prompt".into(), too_long)));
        assert_eq!(code(room(1, Capacity::UNKNOWN), Some(u32::MAX)), Err(("max_tokens".into(), too_long)));
        let too_much = Some("kv_capacity_exceeded");
        assert_eq!(code(room(10, pools), Some(55)), Err(("max_tokens".into(), too_much)));
        assert_eq!(code(room(10, pools), Some(54)), Ok(54));
        assert_eq!(code(room(64, pools), None), Err(("prompt".into(), too_much)), "not an answer of no tokens");
        assert_eq!(code(room(10, pools.with_window(40)), Some(80)), Ok(80), "a window needs no more than its own");
        assert_eq!(code(room(0, pools), None), Err(("prompt".into(), None)));
    }

    #[test]
    fn defaults_and_end_tokens_are_filled_in() {
        let asked =
            v1::Sampling { stop_token_ids: vec![9, 3], logit_bias: [(7, 1.0), (2, 3.0)].into(), ..Default::default() };
        let params = sampling_params(&asked, &[3, 1], 5, 11);
        let want = SamplingParams {
            max_tokens: 5,
            seed: 11,
            stop_token_ids: vec![1, 3, 9],
            logit_bias: vec![(2, 3.0), (7, 1.0)],
            ..SamplingParams::default()
        };
        assert_eq!(params, want);
        let ignoring = v1::Sampling { ignore_eos: true, ..asked };
        assert_eq!(sampling_params(&ignoring, &[3, 1], 5, 11).stop_token_ids, [3, 9]);
    }
}
