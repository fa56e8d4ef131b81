//! [`Recorder`]: a device around another one that logs every call and finds mistakes that a real device would not report. For tests.
//!
//! It finds:
//!
//! - memory used after it was freed or beyond its end, also by a graph;
//! - memory that is never freed;
//! - calls that are forbidden while a stream is being captured;
//! - work in two streams on the same bytes that no event puts in order.
//!
//! Order is tracked by vector clocks (Fidge 1988; Mattern 1989): each stream counts its work; an event copies its stream's clock; a
//! stream that waits for the event merges that clock into its own; the host merges the clock of a stream that it waits for.
//!
//! With [`super::Nowhere`] inside, nothing is computed.

mod device;
mod graphs;
mod sharing;
mod state;

use std::sync::{Mutex, MutexGuard, PoisonError};

use super::device::{Device, Event, Graph, Stream};
use crate::KernelError;
use state::{State, Waits};

/// One logged call.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Recorded {
    /// So many bytes were allocated.
    Allocate(usize),
    /// Memory was freed.
    Free,
    /// So many bytes of host memory were mapped.
    Map(usize),
    /// Host memory was unmapped.
    Unmap,
    /// So many bytes were filled.
    Fill(usize),
    /// So many bytes were copied from the host.
    Write(usize),
    /// So many bytes were copied to the host.
    Read(usize),
    /// A kernel was launched.
    Launch(&'static str),
    /// A product was launched: rows, outputs, inputs.
    Product(usize, usize, usize),
    /// An event was recorded in a stream.
    Record(Event, Stream),
    /// A stream was made to wait for an event.
    Wait(Stream, Event),
    /// The host waited for a stream.
    Synchronise(Stream),
    /// The host waited for an event.
    Settle(Event),
    /// Memory was exported.
    Export,
    /// So many bytes of another process's memory were imported.
    Import(usize),
    /// Writes from outside the process's streams were made visible.
    SeeForeignWrites,
    /// An import was closed.
    Close,
    /// So many bytes of host memory were pinned.
    Pin(usize),
    /// Pinned memory was freed.
    Unpin,
    /// The capture of a stream began.
    BeginCapture(Stream),
    /// A capture ended and became a graph.
    EndCapture(Graph),
    /// A graph was launched.
    Replay(Graph),
    /// A graph was freed.
    Forget(Graph),
}

/// A device that checks every call and passes it on to another device.
pub struct Recorder<D: Device> {
    inner: D,
    state: Mutex<State>,
}

impl<D: Device> Recorder<D> {
    /// A recorder around a device that was not used before.
    pub fn new(inner: D) -> Self {
        Recorder { inner, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes launches of this kernel fail from now on.
    pub fn refuse(&self, kernel: &'static str) {
        self.state().refused = Some(kernel);
    }

    /// Makes waiting for a stream or an event fail from now on, or succeed again.
    pub fn refuse_waits(&self, refused: bool) {
        self.state().waits = if refused { Waits::Fail } else { Waits::End };
    }

    /// Lets only so many more waits for streams and events return, as when a device stands still: later ones block for ever.
    pub fn stand_still_after(&self, waits: u64) {
        self.state().waits = Waits::Left(waits);
    }

    /// Called before each wait of the host: lets it pass, fail or block for ever.
    fn may_wait(&self) -> Result<(), KernelError> {
        let mut state = self.state();
        match &mut state.waits {
            Waits::End => return Ok(()),
            Waits::Fail => {
                let why = "refused by the recorder".to_owned();
                return Err(KernelError::Device { operation: "a wait".to_owned(), why });
            }
            Waits::Left(0) => drop(state),
            Waits::Left(left) => {
                *left -= 1;
                return Ok(());
            }
        }
        loop {
            std::thread::park();
        }
    }

    /// Names of the work that touches memory and that the host has not waited for.
    pub fn under_way(&self) -> Vec<&'static str> {
        let state = self.state();
        let known = |stream| state.host.get(stream).copied().unwrap_or(0);
        let touches = state.allocations.values().flat_map(|allocation| &allocation.touches);
        touches.filter(|touch| known(&touch.stream) < touch.work).map(|touch| touch.what).collect()
    }

    /// Makes captured launches of this kernel fail from now on.
    pub fn refuse_captured(&self, kernel: &'static str) {
        self.state().refused_captured = Some(kernel);
    }

    /// Returns the calls since the last time and clears the log.
    pub fn take_log(&self) -> Vec<Recorded> {
        std::mem::take(&mut self.state().log)
    }

    /// The mistakes found so far.
    pub fn problems(&self) -> Vec<String> {
        self.state().problems.clone()
    }

    /// Number of graphs that were not freed.
    pub fn live_graphs(&self) -> usize {
        self.state().graphs.len()
    }

    /// Number of allocated bytes that were not freed.
    pub fn live_bytes(&self) -> u64 {
        self.state().allocations.values().map(|allocation| allocation.bytes).sum()
    }
}

#[cfg(test)]
mod tests;
