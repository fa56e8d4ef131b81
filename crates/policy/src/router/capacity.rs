//! What the workers of a model take: asked before a request is admitted, and told to clients as the context's length.

use baton_membership::{Member, Role};

/// KV tokens that a decode worker can hold, and the longest sequence.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Capacity {
    largest: u64,
    context: Option<u32>,
    /// What a sequence needs at once, however long it is.
    window: u64,
}

impl Capacity {
    /// Nothing is known; placement will say more.
    pub const UNKNOWN: Capacity = Capacity { largest: u64::MAX, context: None, window: u64::MAX };

    /// Of workers whose largest pool holds this many tokens.
    pub fn of(largest: u64) -> Capacity {
        Capacity { largest, ..Capacity::UNKNOWN }
    }

    /// The same for sequences that need this many tokens at once.
    pub fn with_window(self, window: u64) -> Capacity {
        Capacity { window, ..self }
    }

    /// What `members` take together: the workers of one model.
    pub(super) fn together<'a>(members: impl Iterator<Item = &'a Member> + Clone) -> Capacity {
        let context = members.clone().map(|m| m.context_tokens).filter(|tokens| *tokens > 0).min();
        let tokens = |m: &Member| u64::from(m.blocks) * u64::from(m.block_size);
        let decoders = || members.clone().filter(|m| m.role == Role::Decode);
        let largest = decoders().map(tokens).max().unwrap_or(0);
        let window = decoders().map(|m| if m.window_tokens == 0 { u64::MAX } else { m.window_tokens.into() }).max();
        match (largest, window) {
            (1.., Some(window)) => Capacity { largest, context, window },
            _ => Capacity { context, ..Capacity::UNKNOWN },
        }
    }

    /// Tokens that one answer may have in the pool of a decode worker, prompt included. Several answers of a request share
    /// what they have in common, and those for which there is no room wait for it.
    pub fn pool(&self) -> u32 {
        if self.window <= self.largest { u32::MAX } else { self.largest.try_into().unwrap_or(u32::MAX) }
    }

    /// Longest sequence that every worker takes, tokens; a request may be placed on any of them. Shorter than the model's
    /// context when a worker is set so, longer when they keep sinks and a window.
    pub fn context(&self) -> Option<u32> {
        self.context
    }
}
