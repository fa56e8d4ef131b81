//! How long a sequence the workers of a model can take. Checked before a request is admitted, and reported to clients as the
//! context length.

use baton_membership::{Member, Role};

/// How many KV tokens a decode worker can hold, and the longest sequence it takes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Capacity {
    /// Tokens that the largest KV pool of a decode worker holds.
    largest: u64,
    /// Tokens of the longest sequence every worker takes, if known.
    context: Option<u32>,
    /// Most tokens one sequence has in the pool at once, however long it is; `u64::MAX`: all its tokens.
    window: u64,
}

impl Capacity {
    /// Nothing is known, so nothing is limited here. Placement decides.
    pub const UNKNOWN: Capacity = Capacity { largest: u64::MAX, context: None, window: u64::MAX };

    /// The capacity of workers whose largest pool holds this many tokens.
    pub fn of(largest: u64) -> Capacity {
        Capacity { largest, ..Capacity::UNKNOWN }
    }

    /// The same capacity, for sequences that have at most this many tokens in the pool at once.
    pub fn with_window(self, window: u64) -> Capacity {
        Capacity { window, ..self }
    }

    /// The capacity of `members`, the workers of one model, together.
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

    /// Most tokens of one answer that fit the pool of a decode worker, prompt included. Several answers of a request share
    /// their common prefix; an answer for which there is no room waits.
    pub fn pool(&self) -> u32 {
        if self.window <= self.largest { u32::MAX } else { self.largest.try_into().unwrap_or(u32::MAX) }
    }

    /// Tokens of the longest sequence that every worker takes; a request may be placed on any of them. Shorter than the
    /// model's context when a worker is configured so, longer when the workers keep sinks and a window.
    pub fn context(&self) -> Option<u32> {
        self.context
    }
}
