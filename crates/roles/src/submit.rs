//! How a request comes in: under a ticket until the engine has taken it, as a sequence from then on.

use baton_engine::{Engine, EngineError, Event, NewSequence};
use baton_types::{BatonError, ErrorKind, SeqId};

/// The shell's name for a request that is neither taken nor refused yet.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Ticket(pub u64);

/// Why a worker does not take a request.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub enum Refused {
    /// It takes no new requests.
    #[error("the worker is draining; place the request elsewhere")]
    Draining,
    /// As many prefixes move already as may at a time.
    #[error("{begun} prefixes move already; compute this one instead")]
    Exchanges {
        /// How many.
        begun: usize,
    },
    /// It can never compute this, or its queue is full.
    #[error(transparent)]
    Engine(#[from] EngineError),
}

impl BatonError for Refused {
    fn kind(&self) -> ErrorKind {
        match self {
            Refused::Draining => ErrorKind::Unavailable,
            Refused::Exchanges { .. } => ErrorKind::ResourceExhausted,
            Refused::Engine(error) => error.kind(),
        }
    }
}

/// What a role works with while it handles a command.
#[derive(Debug)]
pub struct Desk<'a> {
    /// The engine.
    pub engine: &'a mut Engine,
    /// Where the engine's events go; they are handled right after the command.
    pub events: &'a mut Vec<Event>,
    /// No new requests are taken.
    pub draining: bool,
}

impl Desk<'_> {
    /// Hands a request to the engine.
    pub(crate) fn submit(&mut self, new: NewSequence) -> Result<SeqId, Refused> {
        if self.draining {
            return Err(Refused::Draining);
        }
        Ok(self.engine.submit(new)?)
    }
}

/// Frees blocks that nobody can reach any more.
pub(crate) fn clear(engine: &mut Engine, seq: SeqId) {
    if let Err(error) = engine.clear_quarantine(seq) {
        tracing::error!(%seq, %error, "quarantined blocks could not be freed");
    }
}
