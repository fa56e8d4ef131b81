//! How a worker leaves the cluster: in which order, and how long it waits.
//!
//! A worker that drains tells the registry and whoever asks for its health. Its engine takes no new requests and finishes those
//! it has. When nothing is left, or the time is over, the worker gives its lease back. Only then does it close its sockets, so that no
//! router sends requests to a closed socket.
//!
//! The shell owns the sockets, the lease and the clock. It feeds inputs, and carries out effects in order.

use std::collections::VecDeque;
use std::time::Instant;

use crate::Snapshot;

/// Input to a [`Drain`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DrainInput {
    /// The process is told to end. The drain takes until this time at most.
    Asked {
        /// The drain's deadline.
        until: Instant,
    },
    /// The process is told not to wait any longer. Changes nothing while the lease is given back, which has a bound of its own.
    Forced,
    /// The engine has ended or stands still. It will finish nothing.
    EngineEnded,
    /// What the engine holds now.
    Held(Snapshot),
    /// The time of [`Drain::next_wake`] may have come.
    Wake,
    /// Answer to [`DrainEffect::Revoke`].
    Revoked,
}

/// What the shell must do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DrainEffect {
    /// Tell the registry that the worker drains.
    Announce,
    /// Report the service as not serving to whoever asks for its health.
    Refuse,
    /// Feed [`crate::Input::Drain`] to the worker's core.
    DrainEngine,
    /// For logs: the worker leaves while so many sequences are in its engine.
    CutOff(u32),
    /// Give the lease back. Answer with [`DrainInput::Revoked`] once the registry has removed the worker or was asked for too long.
    Revoke,
    /// Close the sockets and end the process. The last effect.
    Close,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Stage {
    #[default]
    Serving,
    /// The engine finishes what it has.
    Draining {
        until: Instant,
    },
    /// The registry is asked to remove the worker.
    Revoking,
    Closed,
}

/// The drain of one worker, from its registration to its end.
#[derive(Clone, Debug, Default)]
pub struct Drain {
    stage: Stage,
    /// Sequences in the engine.
    sequences: u32,
    todo: VecDeque<DrainEffect>,
}

impl Drain {
    /// Whether the drain has not begun.
    pub fn serves(&self) -> bool {
        self.stage == Stage::Serving
    }

    /// When to feed [`DrainInput::Wake`] at the latest.
    pub fn next_wake(&self) -> Option<Instant> {
        match self.stage {
            Stage::Draining { until } => Some(until),
            _ => None,
        }
    }

    /// Takes one input.
    pub fn feed(&mut self, input: DrainInput, now: Instant) {
        use DrainInput::*;
        if let Held(snapshot) = input {
            self.sequences = snapshot.running + snapshot.waiting;
        }
        match (self.stage, input) {
            (Stage::Serving, Asked { until }) => self.begin(until),
            (Stage::Serving, Forced | EngineEnded) => {
                self.begin(now);
                self.cut_off();
            }
            // A snapshot from before the engine drained does not count: the engine may have taken a request since.
            (Stage::Draining { .. }, Held(snapshot)) if snapshot.draining && snapshot.idle => self.revoke(),
            (Stage::Draining { .. }, Forced | EngineEnded) => self.cut_off(),
            (Stage::Draining { until }, Held(_) | Wake) if now >= until => self.cut_off(),
            (Stage::Revoking, Revoked) => {
                self.stage = Stage::Closed;
                self.todo.push_back(DrainEffect::Close);
            }
            _ => {}
        }
    }

    /// The next effect to carry out.
    pub fn next_effect(&mut self) -> Option<DrainEffect> {
        self.todo.pop_front()
    }

    fn begin(&mut self, until: Instant) {
        self.stage = Stage::Draining { until };
        self.todo.extend([DrainEffect::Announce, DrainEffect::Refuse, DrainEffect::DrainEngine]);
    }

    fn cut_off(&mut self) {
        self.todo.push_back(DrainEffect::CutOff(self.sequences));
        self.revoke();
    }

    fn revoke(&mut self) {
        self.stage = Stage::Revoking;
        self.todo.push_back(DrainEffect::Revoke);
    }
}
