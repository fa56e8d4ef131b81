//! [`Device`] for the recorder: each call is logged, checked and passed on.

use super::state::join;
use super::{Recorded, Recorder};
use crate::KernelError;
use crate::cuda::device::{
    Access, Address, Call, Device, Event, Gemm, Graph, Operands, Piece, Properties, Rows, Stream, TensorMap,
};

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
        // The memory is freed all the same: nobody could free it later.
        let _ = state.refuse("freeing memory", None);
        if state.forget(Recorded::Free, at) {
            self.inner.free(at);
        }
    }

    unsafe fn map(&self, base: *mut u8, bytes: usize) -> Result<Address, KernelError> {
        // SAFETY: the caller vouches for it.
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
        // SAFETY: the caller vouches for it.
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
        // SAFETY: the caller vouches for it.
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
