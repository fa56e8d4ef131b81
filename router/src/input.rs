//! The form of a request that both front doors (HTTP and gRPC) produce, and the checks on it.
//!
//! All of this happens before any worker is involved. After [`GenerateInput::plan`] every field has a usable value.

use std::sync::Arc;

use baton_policy::Capacity;
use baton_runtime::traces::SpanPlace;
use baton_types::{RequestId, SamplingParams, random_u64};
use tokio::time::Instant;

use crate::error::RequestError;
use crate::model::ServedModel;
use crate::prompt::{Prompt, Wanted, json_weight};
use crate::standing::Standing;
use crate::tenant::Tenant;
use crate::tools::{Choice, Tools};

/// Maximum choices (answers) of one request, all prompts together.
pub(crate) const MAX_CHOICES: u32 = 128;
const MAX_STOPS: usize = 4;
const MAX_STOP_BYTES: usize = 1024;
const MAX_STOP_IDS: usize = 256;
const MAX_BIASES: usize = 1024;
/// Most prompt tokens whose log probabilities a request of several choices gets, all together: they are held until the answer is sent (I5).
const MAX_SCORED: u64 = 32 << 10;

/// One request, with one or more prompts.
#[derive(Clone, Debug)]
pub(crate) struct GenerateInput {
    /// Name of the requested model; empty: the one served.
    pub model: String,
    /// At least one prompt. Each is answered `n` times.
    pub prompts: Vec<Prompt>,
    /// Answers per prompt.
    pub n: u32,
    /// Sampling parameters with defaults for absent fields. The plan adds `max_tokens`, `seed`, `constraint` and end tokens.
    pub sampling: SamplingParams,
    /// Maximum tokens per answer; None: as many as fit.
    pub max_tokens: Option<u32>,
    /// The prompt alone is wanted, with its log probabilities: what is generated is not sent.
    pub only_prompt: bool,
    /// None: a random seed is used.
    pub seed: Option<u64>,
    /// The model's end tokens do not end an answer.
    pub ignore_eos: bool,
    /// Strings that end an answer.
    pub stop: Vec<String>,
    /// Constraint on the form of every answer.
    pub wanted: Option<Wanted>,
    /// Functions the model may call. Only for chats, and not together with `wanted`.
    pub tools: Option<Tools>,
    /// How it is cached and ranked, and what it is promised.
    pub standing: Standing,
    /// Who asks, where clients need a key.
    pub tenant: Option<Arc<Tenant>>,
    /// The client's id, or a generated one.
    pub request_id: RequestId,
    /// When the answer must be complete.
    pub deadline: Instant,
    /// When the request arrived.
    pub received: Instant,
    /// Its place in a trace that a collector gets, if that is kept.
    pub span: Option<SpanPlace>,
}

/// One prompt after checking and tokenising.
#[derive(Clone, Debug)]
pub(crate) struct Planned {
    /// Token ids, at least one.
    pub prompt: Arc<[u32]>,
    /// Sampling parameters of each choice. They differ only in the seed.
    pub choices: Vec<SamplingParams>,
}

impl GenerateInput {
    /// Checks everything that needs no tokenising.
    pub fn check(&self, model: &ServedModel) -> Result<(), RequestError> {
        self.check_counts()?;
        self.standing.check()?;
        self.check_ids(model.vocab_size())?;
        self.tools.as_ref().map_or(Ok(()), |tools| model.check_tools(tools))
    }

    /// Whether a constraint leaves an answer nothing but its own form, from its first token on.
    pub fn is_forced(&self) -> bool {
        self.wanted.is_some() || self.tools.as_ref().is_some_and(|tools| tools.choice != Choice::Auto)
    }

    /// About the bytes of what came as JSON inside of texts: arguments of calls and, over gRPC, parameters of tools.
    pub fn embedded(&self) -> usize {
        let tools = self.tools.iter().flat_map(|tools| &tools.specs[..]);
        self.prompts.iter().map(Prompt::arguments).sum::<usize>() + tools.map(json_weight).sum::<usize>()
    }

    /// Number of answers, all prompts together: 1 to [`MAX_CHOICES`] in a checked request.
    pub fn choices(&self) -> u32 {
        self.n * self.prompts.len() as u32
    }

    /// Tokenises a checked request, checks that it fits the context and the KV pool, and fills in every default.
    pub async fn plan(self, model: &Arc<ServedModel>, capacity: Capacity) -> Result<Vec<Planned>, RequestError> {
        let seed = self.seed.unwrap_or_else(random_u64);
        let line = self.tenant.as_deref().map(Tenant::line);
        let wanted = self.wanted.or_else(|| model.forced_calls(self.tools.as_ref()?));
        if let Some(wanted) = &wanted {
            if self.ignore_eos {
                let wrong = format!("ignore_eos cannot be used together with {}: its answers end", wanted.field);
                return Err(RequestError::invalid("ignore_eos", wrong));
            }
            model.check_constraint(wanted, line).await?;
        }
        let eos: &[u32] = if self.ignore_eos { &[] } else { model.eos_ids() };
        let mut planned = Vec::with_capacity(self.prompts.len());
        for prompt in self.prompts {
            let field = prompt.field();
            let ids = model.encode(prompt, self.tools.as_ref(), &self.standing.cache_salt, line).await?;
            // Whatever becomes of the request: it has cost this.
            self.tenant.iter().for_each(|tenant| tenant.charge(ids.len() as u32));
            let context = capacity.context().unwrap_or(model.context_tokens());
            let room = Room { field, prompt: ids.len() as u32, context, capacity };
            let max_tokens = room.max_tokens(self.max_tokens)?;
            let constraint = wanted.as_ref().map(|wanted| wanted.constraint.clone());
            let params = SamplingParams { max_tokens, seed, constraint, ..with_end_tokens(&self.sampling, eos) };
            params.validate()?;
            self.tenant.iter().try_for_each(|tenant| tenant.keep(&ids, &self.standing))?;
            // The same seed and prompt give the same n answers, whichever workers compute them (I1).
            let choices = (0..self.n).map(|i| SamplingParams { seed: seed.wrapping_add(i.into()), ..params.clone() });
            planned.push(Planned { prompt: ids.into(), choices: choices.collect() });
        }
        let tokens = |plan: &Planned| plan.prompt.len() as u64 * plan.choices.len() as u64;
        let scored: u64 = planned.iter().map(tokens).sum();
        let several = planned.iter().map(|plan| plan.choices.len()).sum::<usize>() > 1;
        if self.sampling.prompt_logprobs.is_some() && several && scored > MAX_SCORED {
            let wrong = format!(
                "log probabilities of {scored} prompt tokens are asked for; at most {MAX_SCORED} come with one request of several \
                 answers: send fewer prompts, or a smaller n"
            );
            return Err(RequestError::invalid("prompt", wrong));
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
        refuse("logit_bias", self.sampling.logit_bias.iter().map(|(id, _)| id).find(outside))?;
        refuse("stop_token_ids", self.sampling.stop_token_ids.iter().find(outside))
    }
}

/// The sizes that a prompt and its answer must fit into, in tokens.
struct Room {
    field: &'static str,
    prompt: u32,
    context: u32,
    capacity: Capacity,
}

impl Room {
    /// Maximum tokens of each answer. A number that the client asked for must fit. Without one, it is as many as fit.
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

/// The same parameters with the tokens `eos` added to the stop tokens, sorted and without duplicates.
fn with_end_tokens(sampling: &SamplingParams, eos: &[u32]) -> SamplingParams {
    let mut stop_token_ids = [&sampling.stop_token_ids[..], eos].concat();
    stop_token_ids.sort_unstable();
    stop_token_ids.dedup();
    SamplingParams { stop_token_ids, ..sampling.clone() }
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
    fn end_tokens_are_added_once_and_in_order() {
        let asked = SamplingParams { top_k: 4, stop_token_ids: vec![9, 3], ..SamplingParams::default() };
        let with = |eos: &[u32]| with_end_tokens(&asked, eos);
        assert_eq!(with(&[3, 1]), SamplingParams { stop_token_ids: vec![1, 3, 9], ..asked.clone() });
        assert_eq!(with(&[]).stop_token_ids, [3, 9]);
    }
}
