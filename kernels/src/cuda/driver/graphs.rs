//! Captures of streams, and the driver's graphs made of them.
//!
//! A capture belongs to one thread: calls of other threads to the device do not end it. Copies from and to the host are refused during
//! a capture: the driver would keep the host address and use it again at each launch of the graph.

use std::collections::{HashMap, HashSet};

use cudarc::driver::result::{self, stream};
use cudarc::driver::sys;

use super::super::device::{Graph, Stream};
use super::{Driver, failed};
use crate::KernelError;

/// Streams that are being captured, and graphs ready to launch.
#[derive(Default)]
pub(super) struct Captures {
    open: HashSet<Stream>,
    graphs: HashMap<Graph, sys::CUgraphExec>,
    named: usize,
}

impl Captures {
    /// Frees all graphs.
    ///
    /// # Safety
    /// The context is current, and no graph is launched any more.
    pub unsafe fn destroy_all(&self) {
        for &graph in self.graphs.values() {
            // SAFETY: `end` made it, and nobody else destroys it.
            let _ = unsafe { result::graph::exec_destroy(graph) };
        }
    }
}

impl Driver {
    /// Returns an error while the stream is being captured.
    pub(super) fn refuse_captured(&self, operation: &str, stream: Stream) -> Result<(), KernelError> {
        if !self.made().captures.open.contains(&stream) {
            return Ok(());
        }
        Err(KernelError::Device { operation: operation.to_owned(), why: "not while its stream is captured".to_owned() })
    }

    pub(super) fn begin(&self, stream: Stream) -> Result<(), KernelError> {
        let raw = self.raw(stream)?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: a stream lives as long as `self`; it is not the legacy one.
        unsafe { stream::begin_capture(raw, mode) }.map_err(failed("capture"))?;
        self.made().captures.open.insert(stream);
        Ok(())
    }

    pub(super) fn end(&self, stream: Stream) -> Result<Graph, KernelError> {
        let raw = self.raw(stream)?;
        self.made().captures.open.remove(&stream);
        // SAFETY: as above. Even on failure the capture has ended.
        let template = unsafe { stream::end_capture(raw) }.map_err(failed("capture"))?;
        // SAFETY: the graph was captured just now and is instantiated without flags. It is not used after that.
        let ready = unsafe {
            let ready = result::graph::instantiate(template, sys::CUgraphInstantiate_flags(0));
            let _ = result::graph::destroy(template);
            ready
        };
        let ready = ready.map_err(failed("graph"))?;
        let mut made = self.made();
        made.captures.named += 1;
        let graph = Graph(made.captures.named);
        made.captures.graphs.insert(graph, ready);
        Ok(graph)
    }

    /// # Safety
    /// No memory that the graph touches was freed since it was captured.
    pub(super) unsafe fn launch_graph(&self, stream: Stream, graph: Graph) -> Result<(), KernelError> {
        let raw = self.raw(stream)?;
        let ready = self.made().captures.graphs.get(&graph).copied().ok_or_else(|| super::unknown("graph"))?;
        // SAFETY: both live as long as `self`; the caller vouches for the memory.
        unsafe { result::graph::launch(ready, raw) }.map_err(failed("graph"))
    }

    pub(super) fn destroy(&self, graph: Graph) {
        let ready = self.made().captures.graphs.remove(&graph);
        if let Some(ready) = ready.filter(|_| self.current().is_ok()) {
            // SAFETY: it was removed just now, so nobody launches it again. The driver frees it only after launches under way.
            let _ = unsafe { result::graph::exec_destroy(ready) };
        }
    }
}
