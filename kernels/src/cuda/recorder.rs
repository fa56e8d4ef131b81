//! [`Recorder`]: a device around another one that logs what is asked of it and finds what a real one would do wrong silently.
//!
//! Memory used after it was freed or beyond its end, by a graph too, memory never given back, what a stream that is captured must not be asked
//! for, and work in two streams on the same bytes that no event puts in order. Order is told by vector clocks (Fidge 1988; Mattern 1989):
//! each stream counts its work, an event takes a copy of what its stream knows, who waits for it knows that too, and the host knows all of a
//! stream that it has waited for. For tests; with [`super::Nowhere`] inside nothing is computed.

mod graphs;
mod sharing;

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::device::{
    Access, Address, Call, Device, Event, Gemm, Graph, Operands, Piece, Properties, Rows, Stream, TensorMap,
};
use crate::KernelError;
use graphs::Captured;

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

/// What a stream, an event or the host knows: of each stream, how much of its work is done before.
type Clock = HashMap<Stream, u64>;

struct Touch {
    bytes: Range<u64>,
    writes: bool,
    stream: Stream,
    /// Which of the stream's works it was.
    work: u64,
    what: &'static str,
}

struct Allocation {
    bytes: u64,
    touches: Vec<Touch>,
    /// Which of all allocations it is: another at its place is not the same.
    number: u64,
}

/// What becomes of the host's waits.
#[derive(Default)]
enum Waits {
    #[default]
    End,
    Fail,
    /// So many end, and no other.
    Left(u64),
}

#[derive(Default)]
struct State {
    log: Vec<Recorded>,
    problems: Vec<String>,
    allocations: BTreeMap<Address, Allocation>,
    /// Address and size of what was given back and not handed out again.
    freed: BTreeMap<Address, u64>,
    streams: HashMap<Stream, Clock>,
    events: HashMap<Event, Clock>,
    host: Clock,
    /// What was exported, by handle.
    exports: HashMap<Vec<u8>, Address>,
    /// What is imported, and of which exported memory if that is known.
    imports: HashMap<Address, Option<Address>>,
    refused: Option<&'static str>,
    /// Only while it is captured.
    refused_captured: Option<&'static str>,
    waits: Waits,
    allocated: u64,
    captures: HashMap<Stream, Vec<Captured>>,
    graphs: HashMap<Graph, Vec<Captured>>,
}

/// Checks every call and passes it on.
pub struct Recorder<D: Device> {
    inner: D,
    state: Mutex<State>,
}

fn join(into: &mut Clock, other: &Clock) {
    for (&stream, &work) in other {
        let known = into.entry(stream).or_default();
        *known = (*known).max(work);
    }
}

impl State {
    /// The stream's next work, after all that the host has waited for.
    fn work(&mut self, stream: Stream) -> u64 {
        let clock = self.streams.entry(stream).or_default();
        join(clock, &self.host);
        let own = clock.entry(stream).or_default();
        *own += 1;
        *own
    }

    /// New memory.
    fn note(&mut self, call: Recorded, at: Address, bytes: usize) {
        let end = at.0 + bytes as u64;
        self.freed.retain(|freed, size| freed.0 + *size <= at.0 || freed.0 >= end);
        self.allocated += 1;
        let (bytes, number) = (bytes as u64, self.allocated);
        self.allocations.insert(at, Allocation { bytes, touches: Vec::new(), number });
        self.log.push(call);
    }

    /// Memory that is no longer there; whether it was.
    fn forget(&mut self, call: Recorded, at: Address) -> bool {
        self.log.push(call);
        let Some(allocation) = self.allocations.remove(&at) else {
            self.problems.push("free: memory that is not allocated".to_owned());
            return false;
        };
        self.freed.insert(at, allocation.bytes);
        true
    }

    fn problem(&mut self, why: String) -> KernelError {
        self.problems.push(why.clone());
        KernelError::Device { operation: "recorded call".to_owned(), why }
    }

    /// The allocation that has all of a piece.
    fn allocation(&mut self, what: &'static str, piece: &Piece<'_>) -> Result<Address, KernelError> {
        let (first, end) = (piece.at(), piece.at().0 + piece.bytes() as u64);
        let before = self.allocations.range(..=first).next_back();
        if let Some((&at, found)) = before.filter(|(at, found)| first.0 < at.0 + found.bytes.max(1)) {
            if end <= at.0 + found.bytes {
                return Ok(at);
            }
            let (from, bytes) = (first.0 - at.0, found.bytes);
            return Err(self.problem(format!("{what}: {} bytes from {from} on, of {bytes}", piece.bytes())));
        }
        let freed = self.freed.range(..=first).next_back().is_some_and(|(at, bytes)| first.0 < at.0 + bytes);
        let why = if freed { "after it was freed" } else { "that nobody allocated" };
        Err(self.problem(format!("{what}: memory {why}")))
    }

    fn touch(&mut self, what: &'static str, stream: Stream, accesses: &[Access<'_>]) -> Result<(), KernelError> {
        if self.captures.contains_key(&stream) {
            return self.capture(what, stream, accesses);
        }
        let work = self.work(stream);
        let clock = self.streams.get(&stream).cloned().unwrap_or_default();
        for access in accesses {
            let (piece, writes) = match access {
                Access::Read(piece) => (piece, false),
                Access::Write(piece) => (piece, true),
            };
            let at = self.allocation(what, piece)?;
            let bytes = piece.at().0..piece.at().0 + piece.bytes() as u64;
            let Some(allocation) = self.allocations.get_mut(&at) else { continue };
            let unordered = allocation.touches.iter().find(|touch| {
                let meet = touch.bytes.start < bytes.end && bytes.start < touch.bytes.end && (touch.writes || writes);
                meet && clock.get(&touch.stream).copied().unwrap_or(0) < touch.work
            });
            let missing = unordered
                .map(|touch| format!("{what} in {stream:?} does not wait for {} in {:?}", touch.what, touch.stream));
            // What this one covers need not be remembered: who is ordered after this is ordered after that.
            allocation.touches.retain(|touch| {
                let inside = bytes.start <= touch.bytes.start && touch.bytes.end <= bytes.end;
                !(inside && touch.stream == stream && (writes || !touch.writes))
            });
            allocation.touches.push(Touch { bytes, writes, stream, work, what });
            if let Some(missing) = missing {
                self.problems.push(missing);
            }
        }
        Ok(())
    }

    fn wait_on_host(&mut self, stream: Stream) {
        let known = self.streams.get(&stream).cloned().unwrap_or_default();
        join(&mut self.host, &known);
    }
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

impl<D: Device> Device for Recorder<D> {
    fn properties(&self) -> &Properties {
        self.inner.properties()
    }

    fn free_memory(&self) -> Result<u64, KernelError> {
        self.inner.free_memory()
    }

    fn allocate(&self, bytes: usize) -> Result<Address, KernelError> {
        self.state().refuse("an allocation", None)?;
        let at = self.inner.allocate(bytes)?;
        self.state().note(Recorded::Allocate(bytes), at, bytes);
        Ok(at)
    }

    fn free(&self, at: Address) {
        let mut state = self.state();
        if state.imports.values().any(|exported| *exported == Some(at)) {
            state.problems.push("free: memory freed while it is imported".to_owned());
        }
        // It goes all the same: nobody could give it back later.
        let _ = state.refuse("freeing memory", None);
        if state.forget(Recorded::Free, at) {
            self.inner.free(at);
        }
    }

    unsafe fn map(&self, base: *mut u8, bytes: usize) -> Result<Address, KernelError> {
        // SAFETY: the caller's promise.
        let at = unsafe { self.inner.map(base, bytes) }?;
        self.state().note(Recorded::Map(bytes), at, bytes);
        Ok(at)
    }

    fn unmap(&self, base: *mut u8, at: Address) {
        if self.state().forget(Recorded::Unmap, at) {
            self.inner.unmap(base, at);
        }
    }

    fn stream(&self) -> Result<Stream, KernelError> {
        self.inner.stream()
    }

    fn event(&self) -> Result<Event, KernelError> {
        self.inner.event()
    }

    fn record(&self, event: Event, stream: Stream) -> Result<(), KernelError> {
        let mut state = self.state();
        state.log.push(Recorded::Record(event, stream));
        state.refuse("an event", Some(stream))?;
        let mut known = state.host.clone();
        join(&mut known, &state.streams.get(&stream).cloned().unwrap_or_default());
        state.events.insert(event, known);
        self.inner.record(event, stream)
    }

    fn wait(&self, stream: Stream, event: Event) -> Result<(), KernelError> {
        let mut state = self.state();
        state.log.push(Recorded::Wait(stream, event));
        state.refuse("an event's wait", Some(stream))?;
        let known = state.events.get(&event).cloned();
        match known {
            Some(known) => join(state.streams.entry(stream).or_default(), &known),
            None => state.problems.push(format!("{stream:?} waits for {event:?}, which was never recorded")),
        }
        self.inner.wait(stream, event)
    }

    fn fill(&self, stream: Stream, to: Piece<'_>, byte: u8) -> Result<(), KernelError> {
        let mut state = self.state();
        state.log.push(Recorded::Fill(to.bytes()));
        state.touch("fill", stream, &[Access::Write(to)])?;
        self.inner.fill(stream, to, byte)
    }

    fn write(&self, stream: Stream, to: Piece<'_>, from: &[u8]) -> Result<(), KernelError> {
        let mut state = self.state();
        state.log.push(Recorded::Write(from.len()));
        state.refuse("a copy from the host", Some(stream))?;
        state.touch("write", stream, &[Access::Write(to)])?;
        self.inner.write(stream, to, from)
    }

    fn read(&self, stream: Stream, from: Piece<'_>, to: &mut [u8]) -> Result<(), KernelError> {
        self.may_wait()?;
        let mut state = self.state();
        state.log.push(Recorded::Read(to.len()));
        state.refuse("a copy to the host", Some(stream))?;
        state.touch("read", stream, &[Access::Read(from)])?;
        state.wait_on_host(stream);
        self.inner.read(stream, from, to)
    }

    fn tensor_map(&self, rows: &Rows<'_>) -> Result<TensorMap, KernelError> {
        self.state().allocation("a tensor map", &rows.memory)?;
        self.inner.tensor_map(rows)
    }

    unsafe fn launch(&self, stream: Stream, call: &Call<'_>) -> Result<(), KernelError> {
        let mut state = self.state();
        state.log.push(Recorded::Launch(call.kernel));
        state.touch(call.kernel, stream, call.touches)?;
        let captured = state.captures.contains_key(&stream) && state.refused_captured == Some(call.kernel);
        if captured || state.refused == Some(call.kernel) {
            let why = "refused by the recorder".to_owned();
            return Err(KernelError::Device { operation: call.kernel.to_owned(), why });
        }
        // SAFETY: the caller's promise.
        unsafe { self.inner.launch(stream, call) }
    }

    fn product(&self, stream: Stream, gemm: &Gemm<'_>) -> Result<(), KernelError> {
        let mut state = self.state();
        state.log.push(Recorded::Product(gemm.rows, gemm.outs, gemm.cols));
        let inputs = [Access::Read(gemm.weight), Access::Read(gemm.x), Access::Write(gemm.out)];
        state.touch("product", stream, &inputs)?;
        if let Some(bias) = gemm.bias {
            state.touch("product", stream, &[Access::Read(bias)])?;
        }
        if let Operands::E4m3(Some(scales)) = gemm.operands {
            state.touch("product", stream, &[Access::Read(scales.weight), Access::Read(scales.x)])?;
        }
        self.inner.product(stream, gemm)
    }

    fn synchronise(&self, stream: Stream) -> Result<(), KernelError> {
        self.may_wait()?;
        let mut state = self.state();
        state.log.push(Recorded::Synchronise(stream));
        state.refuse("waiting", Some(stream))?;
        state.wait_on_host(stream);
        self.inner.synchronise(stream)
    }

    fn lost(&self) -> Option<KernelError> {
        self.inner.lost()
    }

    fn begin_capture(&self, stream: Stream) -> Result<(), KernelError> {
        let mut state = self.state();
        state.log.push(Recorded::BeginCapture(stream));
        state.refuse("a capture", Some(stream))?;
        self.inner.begin_capture(stream)?;
        state.captures.insert(stream, Vec::new());
        Ok(())
    }

    fn end_capture(&self, stream: Stream) -> Result<Graph, KernelError> {
        let mut state = self.state();
        let Some(captured) = state.captures.remove(&stream) else {
            return Err(state.problem("the end of a capture that did not begin".to_owned()));
        };
        let graph = self.inner.end_capture(stream)?;
        state.log.push(Recorded::EndCapture(graph));
        state.graphs.insert(graph, captured);
        Ok(graph)
    }

    unsafe fn replay(&self, stream: Stream, graph: Graph) -> Result<(), KernelError> {
        let mut state = self.state();
        state.log.push(Recorded::Replay(graph));
        state.replay(stream, graph)?;
        // SAFETY: the caller's promise.
        unsafe { self.inner.replay(stream, graph) }
    }

    fn forget(&self, graph: Graph) {
        let mut state = self.state();
        state.log.push(Recorded::Forget(graph));
        if state.graphs.remove(&graph).is_none() {
            state.problems.push(format!("{graph:?} is given back and is not there"));
            return;
        }
        self.inner.forget(graph);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::{Memory, Nowhere};
    use super::*;

    fn recorder() -> Arc<Recorder<Nowhere>> {
        Arc::new(Recorder::new(Nowhere::default()))
    }

    /// One stream fills half of a memory, another reads it back.
    fn handed_over(ordered: impl Fn(&Recorder<Nowhere>, Stream, Stream), from: usize) -> Vec<String> {
        let device = recorder();
        let (first, second) = (device.stream().unwrap(), device.stream().unwrap());
        let memory = Memory::new(&device, 64).unwrap();
        device.fill(first, memory.piece(0, 32), 1).unwrap();
        ordered(&device, first, second);
        device.read(second, memory.piece(from, 16), &mut [0; 16]).unwrap();
        device.problems()
    }

    #[test]
    fn a_missing_wait_is_found() {
        let through_event = |device: &Recorder<Nowhere>, first, second| {
            let event = device.event().unwrap();
            device.record(event, first).unwrap();
            device.wait(second, event).unwrap();
        };
        assert_eq!(handed_over(through_event, 16), [""; 0]);
        assert_eq!(handed_over(|device, first, _| device.synchronise(first).unwrap(), 16), [""; 0]);
        let late = |device: &Recorder<Nowhere>, first, second| {
            // Before the fill is put into its stream again.
            let event = device.event().unwrap();
            device.wait(second, event).unwrap();
            device.record(event, first).unwrap();
        };
        assert_eq!(handed_over(late, 16).len(), 2);
        let problems = handed_over(|_, _, _| (), 16);
        assert!(problems[0].contains("read") && problems[0].contains("does not wait for fill"), "{problems:?}");
        assert_eq!(handed_over(|_, _, _| (), 32), [""; 0], "other bytes need no order");
    }

    #[test]
    fn memory_past_its_end_or_its_life_is_found() {
        let device = recorder();
        let stream = device.stream().unwrap();
        let memory = Memory::new(&device, 64).unwrap();
        let other = Memory::new(&device, 8).unwrap();
        let at = memory.piece(0, 8).at();
        assert_eq!(device.live_bytes(), 72);
        drop(memory);
        assert_eq!((device.live_bytes(), device.problems().len()), (8, 0));
        device.free(at);
        assert_eq!(device.problems().len(), 1, "twice");
        // No piece can be made that reaches too far; a launch with parameters of its own could.
        let beyond = Address(other.piece(0, 8).at().0 + 4);
        for (at, why) in
            [(at, "after it was freed"), (beyond, "8 bytes from 4 on, of 8"), (Address(8), "nobody allocated")]
        {
            let piece = Piece::new(at, 8);
            assert!(device.fill(stream, piece, 0).unwrap_err().to_string().contains(why), "{why}");
        }
    }
}
