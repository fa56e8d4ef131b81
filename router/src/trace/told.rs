//! Traces as JSON, for the admin page.

use std::time::Duration;

use baton_types::{FinishReason, WorkerId};
use serde_json::{Value, json};
use tokio::time::Instant;

use super::{End, Handoff, Mark, Subject, Trace};

impl Trace {
    /// The handoff, as JSON without its time.
    pub fn handoff(&self) -> Option<(Instant, Value)> {
        let handoff = self.state().handoff.clone()?;
        let at = self.subject.received + Duration::from_micros(handoff.at.into());
        let mut told = handoff.json();
        told["request"] = json!(self.subject.request.0);
        Some((at, told))
    }

    /// One line of a list, as JSON.
    pub fn brief(&self) -> Value {
        let state = self.state();
        let Subject { request, choice, class, prompt_tokens, .. } = &self.subject;
        let workers = state.marks.iter().rev().find_map(|(_, mark)| match mark {
            Mark::Placed { decode, prefill } => Some((decode.to_string(), prefill.map(|id| id.to_string()))),
            _ => None,
        });
        let (decode, prefill) = workers.unzip();
        json!({
            "request": request.0,
            "choice": choice,
            "class": class.as_str(),
            "prompt_tokens": prompt_tokens,
            "cached_tokens": state.cached,
            "tokens": state.count,
            "first_token_us": state.tokens.first(),
            "last_token_us": state.tokens.last(),
            "end_us": state.end.as_ref().map(|(at, _)| at),
            "outcome": state.end.as_ref().map_or("running", |(_, end)| end.word()),
            "recoveries": state.recoveries,
            "decode": decode,
            "prefill": prefill.flatten(),
        })
    }

    /// All of it, as JSON.
    pub fn whole(&self) -> Value {
        let mut told = self.brief();
        let state = self.state();
        told["marks"] = state.marks.iter().map(|(at, mark)| mark.json(*at)).collect();
        told["token_us"] = json!(state.tokens);
        told["handoff"] = state.handoff.as_ref().map_or(Value::Null, Handoff::json);
        told["age_us"] = json!(self.since(Instant::now()));
        if let Some((_, End::Failed { why, .. })) = &state.end {
            told["error"] = json!(why);
        }
        if let Some(prompt) = &self.subject.prompt {
            told["prompt"] = json!(prompt);
        }
        told
    }
}

impl Handoff {
    fn json(&self) -> Value {
        let id = |worker: Option<WorkerId>| worker.map(|id| id.to_string());
        json!({
            "at_us": self.at,
            "bytes": self.bytes,
            "seconds": self.seconds,
            "transport": self.transport,
            "from": id(self.from),
            "to": id(self.to),
        })
    }
}

impl End {
    pub(super) fn word(&self) -> &'static str {
        match self {
            End::Finished(FinishReason::Cancelled) => "cancelled",
            End::Finished(_) => "ok",
            End::Failed { .. } => "failed",
        }
    }
}

impl Mark {
    fn json(&self, at: u32) -> Value {
        let id = |worker: &WorkerId| worker.to_string();
        let mut told = match self {
            Mark::Begins => json!({"what": "begins"}),
            Mark::Placed { decode, prefill } => {
                json!({"what": "placed", "decode": id(decode), "prefill": prefill.as_ref().map(id)})
            }
            Mark::NotPlaced => json!({"what": "not placed"}),
            Mark::Decode { worker, local, .. } => json!({"what": "decode asked", "worker": id(worker), "local": local}),
            Mark::Prefill { worker, .. } => json!({"what": "prefill asked", "worker": id(worker)}),
            Mark::Reserved => json!({"what": "blocks reserved"}),
            Mark::Due => json!({"what": "turn is near"}),
            Mark::Started => json!({"what": "computed at the decode worker"}),
            Mark::FirstToken => json!({"what": "prompt computed"}),
            Mark::Transferred => json!({"what": "KV verified"}),
            Mark::Recovering { leg, cause } => json!({"what": "recovering", "leg": leg.as_str(), "why": cause}),
            Mark::Lost { leg, why } => json!({"what": "stream lost", "leg": leg.as_str(), "why": why}),
        };
        told["at_us"] = json!(at);
        told
    }
}
