//! What the engine tells its driver.

use baton_types::{FinishReason, RequestId, SeqId, TokenOut};

use crate::SequenceError;

/// One thing that happened to one sequence. Events come in the order in which they happened.
#[derive(Clone, PartialEq, Debug)]
pub enum Event {
    /// [`crate::Start::Receive`]: its blocks are lent, and a peer may be told where to write. See
    /// [`crate::Engine::tables`].
    Reserved {
        /// The sequence.
        seq: SeqId,
        /// Its request's id.
        request_id: RequestId,
        /// Leading tokens whose KV is here already: a multiple of the block size, and fewer than the sequence has. The
        /// blocks after them ([`crate::Engine::lent_from`]) are lent; the others must not be written to.
        cached_tokens: u32,
    },
    /// A parked sequence's turn is near ([`crate::NewSequence::parked`]). Said once.
    Due {
        /// The sequence.
        seq: SeqId,
    },
    /// Log probabilities of tokens of the prompt, when they were asked for. All of them come before the first token of
    /// the answer, in order, each once.
    Scored {
        /// The sequence.
        seq: SeqId,
        /// The tokens; `index` is the position in the prompt.
        tokens: Vec<TokenOut>,
    },
    /// A token of the answer, including the stop token that may end it.
    Token {
        /// The sequence.
        seq: SeqId,
        /// Its request's id.
        request_id: RequestId,
        /// The token, numbered without gaps (I4).
        token: TokenOut,
        /// Prompt tokens that were in the prefix cache when its computation started here, and so were not computed.
        cached_tokens: u32,
    },
    /// [`crate::Start::ComputeAndHold`]: the KV of all its tokens is in its blocks, which stay until
    /// [`crate::Engine::release`].
    Prefilled {
        /// The sequence.
        seq: SeqId,
        /// Its request's id.
        request_id: RequestId,
        /// The next token of the answer.
        token: TokenOut,
        /// Set when that token ends the answer; nobody needs the KV then.
        finish: Option<FinishReason>,
        /// As in [`Event::Token`].
        cached_tokens: u32,
    },
    /// The answer is complete and the sequence is gone. Its blocks are free at once, or with the last step in flight
    /// that has a row of it.
    Finished {
        /// The sequence.
        seq: SeqId,
        /// Its request's id.
        request_id: RequestId,
        /// What ended it.
        reason: FinishReason,
        /// As in [`Event::Token`].
        cached_tokens: u32,
    },
    /// The sequence is gone, as after [`Event::Finished`].
    Failed {
        /// The sequence.
        seq: SeqId,
        /// Its request's id.
        request_id: RequestId,
        /// Why.
        error: SequenceError,
        /// True: a peer or a transfer may still reach its blocks (I3), and nobody gets them. Fence it, then call
        /// [`crate::Engine::clear_quarantine`].
        quarantined: bool,
    },
}

impl Event {
    /// The sequence it is about.
    pub fn seq(&self) -> SeqId {
        match self {
            Event::Reserved { seq, .. }
            | Event::Due { seq }
            | Event::Scored { seq, .. }
            | Event::Token { seq, .. }
            | Event::Prefilled { seq, .. }
            | Event::Finished { seq, .. }
            | Event::Failed { seq, .. } => *seq,
        }
    }
}
