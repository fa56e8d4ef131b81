//! Which workers hold the KV of a choice's prompt, and by what they find it.

use std::sync::Arc;

use baton_types::WorkerId;

use super::{Mark, Trace, Traces};

/// Longest prompt of which this is remembered, in tokens (I5).
const LONGEST: usize = 8192;

/// By what workers find a prompt's KV.
#[derive(Clone, Debug)]
pub(crate) struct Kv {
    pub tokens: Arc<[u32]>,
    pub salt: String,
}

impl Kv {
    /// Of a prompt; none of a very long one.
    pub fn of(tokens: &Arc<[u32]>, salt: &str) -> Option<Kv> {
        (tokens.len() <= LONGEST).then(|| Kv { tokens: Arc::clone(tokens), salt: salt.to_owned() })
    }
}

/// The workers that a choice was sent to in the end.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Shares {
    /// Computed the prompt for the other one.
    pub prefill: Option<WorkerId>,
    pub decode: Option<WorkerId>,
}

impl Traces {
    /// The traces of a request's choices.
    pub fn choices(&self, request: &str) -> Vec<Arc<Trace>> {
        self.latest().into_iter().filter(|trace| trace.subject.request.0 == request).collect()
    }
}

impl Trace {
    /// By what its prompt's KV is found.
    pub fn kv(&self) -> Option<&Kv> {
        self.subject.kv.as_ref()
    }

    /// Its workers; the latest ones after a recovery.
    pub fn shares(&self) -> Shares {
        let mut shares = Shares::default();
        for (_, mark) in &self.state().marks {
            match mark {
                Mark::Decode { worker, .. } => shares.decode = Some(*worker),
                Mark::Prefill { worker, .. } => shares.prefill = Some(*worker),
                // The decode worker computes it after all.
                Mark::Started => shares.prefill = None,
                _ => {}
            }
        }
        shares
    }

    /// Prompt tokens whose KV was there already.
    pub fn cached(&self) -> u32 {
        self.state().cached
    }
}

#[cfg(test)]
mod tests {
    use baton_policy::{ChoiceInput, DecodeWord};

    use super::*;

    #[test]
    fn the_shares_are_those_of_the_last_attempt() {
        let trace = Traces::new(false).begin(crate::trace::tests::subject("a"));
        let of = |prefill: Option<u64>, decode: Option<u64>| Shares {
            prefill: prefill.map(WorkerId),
            decode: decode.map(WorkerId),
        };
        assert_eq!(trace.shares(), of(None, None));
        trace.opens_decode(WorkerId(1), false);
        trace.opens_prefill(WorkerId(2));
        assert_eq!(trace.shares(), of(Some(2), Some(1)));
        trace.opens_decode(WorkerId(3), true);
        trace.heard(&ChoiceInput::DecodeSaid(DecodeWord::Started { cached_tokens: 32 }), None);
        assert_eq!(
            (trace.shares(), trace.cached()),
            (of(None, Some(3)), 32),
            "it recovered, and computed the prompt itself"
        );
    }

    #[test]
    fn very_long_prompts_are_not_remembered() {
        let of = |tokens: usize| Kv::of(&vec![1; tokens].into(), "").is_some();
        assert_eq!((of(LONGEST), of(LONGEST + 1)), (true, false));
    }
}
