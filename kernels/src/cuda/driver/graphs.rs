//! Work captured from a stream, as graphs of the driver.
//!
//! A capture is of one thread: what other threads do to the device does not end it. Copies from and to the host are refused by us: the driver
//! would keep the address on the host and look there again at each launch.

use std::collections::{HashMap, HashSet};

use cudarc::driver::result::{self, stream};
use cudarc::driver::sys;

use super::super::device::{Graph, Stream};
use super::{Driver, failed};
use crate::KernelError;

/// Streams that are captured, and graphs ready to be launched.
#[derive(Default)]
pub(super) struct Captures {
    open: HashSet<Stream>,
    graphs: HashMap<Graph, sys::CUgraphExec>,
    named: usize,
}

impl Captures {
    /// # Safety
    /// The context is current, and nothing is launched any more.
    pub unsafe fn destroy_all(&self) {
        for &graph in self.graphs.values() {
            // SAFETY: made by `end` and destroyed by nobody else.
            let _ = unsafe { result::graph::exec_destroy(graph) };
        }
    }
}

impl Driver {
    /// An error while the stream is captured.
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
        // SAFETY: as above. Whatever it says, the stream is captured no longer.
        let template = unsafe { stream::end_capture(raw) }.map_err(failed("capture"))?;
        // SAFETY: the graph that was just captured, with no flags; it is done with when it is instantiated.
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
    /// All memory that it touches has been there since it was captured.
    pub(super) unsafe fn launch_graph(&self, stream: Stream, graph: Graph) -> Result<(), KernelError> {
        let raw = self.raw(stream)?;
        let ready = self.made().captures.graphs.get(&graph).copied().ok_or_else(|| super::unknown("graph"))?;
        // SAFETY: both live as long as `self`, and the caller's promise.
        unsafe { result::graph::launch(ready, raw) }.map_err(failed("graph"))
    }

    pub(super) fn destroy(&self, graph: Graph) {
        let ready = self.made().captures.graphs.remove(&graph);
        if let Some(ready) = ready.filter(|_| self.current().is_ok()) {
            // SAFETY: removed just now, so nobody launches it again; the driver waits for launches under way before it frees it.
            let _ = unsafe { result::graph::exec_destroy(ready) };
        }
    }
}
