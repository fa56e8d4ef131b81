//! [`Recorder`]: a device around another one that logs what is asked of it and finds what a real one would do wrong silently.
//!
//! Memory used after it was freed or beyond its end, by a graph too, memory never given back, what a stream that is captured must not be asked
//! for, and work in two streams on the same bytes that no event puts in order. Order is told by vector clocks (Fidge 1988; Mattern 1989):
//! each stream counts its work, an event takes a copy of what its stream knows, who waits for it knows that too, and the host knows all of a
//! stream that it has waited for. For tests; with [`super::Nowhere`] inside nothing is computed.

mod device;
mod graphs;
mod sharing;
mod state;

use std::sync::{Mutex, MutexGuard, PoisonError};

use super::device::{Device, Event, Graph, Stream};
use crate::KernelError;
use state::{State, Waits};

/// One call, as it is logged.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Recorded {
    /// Memory of so many bytes.
    Allocate(usize),
    /// Memory given back.
    Free,
    /// So many bytes of host memory mapped.
    Map(usize),
    /// Host memory seen no longer.
    Unmap,
    /// So many bytes set.
    Fill(usize),
    /// So many bytes from the host.
    Write(usize),
    /// So many bytes to the host.
    Read(usize),
    /// A kernel.
    Launch(&'static str),
    /// A product: rows, outputs, inputs.
    Product(usize, usize, usize),
    /// An event was set in a stream.
    Record(Event, Stream),
    /// A stream waits for an event.
    Wait(Stream, Event),
    /// The host waited for a stream.
    Synchronise(Stream),
    /// The host waited for an event.
    Settle(Event),
    /// Memory was exported.
    Export,
    /// So many bytes of another process's memory opened.
    Import(usize),
    /// What others wrote was waited for.
    SeeForeignWrites,
    /// Another process's memory closed.
    Close,
    /// So many bytes of host memory pinned.
    Pin(usize),
    /// Pinned memory given back.
    Unpin,
    /// A stream is captured from here on.
    BeginCapture(Stream),
    /// A capture became a graph.
    EndCapture(Graph),
    /// A graph was launched.
    Replay(Graph),
    /// A graph was given back.
    Forget(Graph),
}

/// Checks every call and passes it on.
pub struct Recorder<D: Device> {
    inner: D,
    state: Mutex<State>,
}

impl<D: Device> Recorder<D> {
    /// Around a device that nobody has used.
    pub fn new(inner: D) -> Self {
        Recorder { inner, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on launches of this kernel fail.
    pub fn refuse(&self, kernel: &'static str) {
        self.state().refused = Some(kernel);
    }

    /// From now on waiting for a stream or an event fails, or no longer.
    pub fn refuse_waits(&self, refused: bool) {
        self.state().waits = if refused { Waits::Fail } else { Waits::End };
    }

    /// Only so many waits for streams and events end from now on, as when a device stands still: no other ever returns.
    pub fn stand_still_after(&self, waits: u64) {
        self.state().waits = Waits::Left(waits);
    }

    /// Comes before each wait on the host.
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

    /// Work that the host has not waited for, by what it last was for each piece of memory.
    pub fn under_way(&self) -> Vec<&'static str> {
        let state = self.state();
        let known = |stream| state.host.get(stream).copied().unwrap_or(0);
        let touches = state.allocations.values().flat_map(|allocation| &allocation.touches);
        touches.filter(|touch| known(&touch.stream) < touch.work).map(|touch| touch.what).collect()
    }

    /// From now on this kernel cannot be captured.
    pub fn refuse_captured(&self, kernel: &'static str) {
        self.state().refused_captured = Some(kernel);
    }

    /// What was called since the last time.
    pub fn take_log(&self) -> Vec<Recorded> {
        std::mem::take(&mut self.state().log)
    }

    /// What was wrong so far.
    pub fn problems(&self) -> Vec<String> {
        self.state().problems.clone()
    }

    /// Graphs that nobody has given back.
    pub fn live_graphs(&self) -> usize {
        self.state().graphs.len()
    }

    /// Bytes that nobody has given back.
    pub fn live_bytes(&self) -> u64 {
        self.state().allocations.values().map(|allocation| allocation.bytes).sum()
    }
}

#[cfg(test)]
mod tests;
