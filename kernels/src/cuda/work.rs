//! Work that a [`super::HostDevice`] records during a capture and runs later. Pure.

use std::collections::HashMap;
use std::sync::Arc;

use super::device::{Address, Call, Graph, Launch, Stream};
use crate::KernelError;

/// One piece of work that can be put into a stream.
pub(super) enum Work {
    Fill {
        at: Address,
        bytes: usize,
        byte: u8,
    },
    Launch(Kept),
    Product {
        weight: Address,
        x: Address,
        bias: Option<Address>,
        out: Address,
        rows: u64,
        outs: u64,
        cols: u64,
        stride: u64,
    },
    /// A product of E4M3. The scales are those of the weight's rows and of x's.
    ProductE4m3 {
        weight: Address,
        x: Address,
        scales: Option<[Address; 2]>,
        out: Address,
        rows: u64,
        outs: u64,
        cols: u64,
        stride: u64,
    },
}

/// Bytes of parameters with the largest alignment that any kernel's parameters need.
#[repr(C, align(128))]
#[derive(Clone, Copy)]
struct Aligned([u8; 128]);

/// A launch that owns a copy of its parameters.
pub(super) struct Kept {
    pub kernel: &'static str,
    pub launch: Launch,
    params: Vec<Aligned>,
    pub bytes: usize,
}

impl Kept {
    /// Copies a call's parameters.
    ///
    /// # Safety
    /// `call.params` points to `call.bytes` bytes.
    pub unsafe fn of(call: &Call<'_>) -> Self {
        let mut params = vec![Aligned([0; 128]); call.bytes.div_ceil(size_of::<Aligned>())];
        // SAFETY: the caller vouches for the source, and there is room for as many bytes.
        unsafe { std::ptr::copy_nonoverlapping(call.params, params.as_mut_ptr().cast(), call.bytes) };
        Kept { kernel: call.kernel, launch: call.launch, params, bytes: call.bytes }
    }

    pub fn params(&self) -> *const u8 {
        self.params.as_ptr().cast()
    }
}

/// Streams that are being captured, and graphs.
#[derive(Default)]
pub(super) struct Captures {
    open: HashMap<Stream, Vec<Work>>,
    graphs: HashMap<Graph, Arc<[Work]>>,
}

fn error(operation: &str, why: &str) -> KernelError {
    KernelError::Device { operation: operation.to_owned(), why: why.to_owned() }
}

impl Captures {
    pub fn begin(&mut self, stream: Stream) -> Result<(), KernelError> {
        match self.open.insert(stream, Vec::new()) {
            None => Ok(()),
            Some(_) => Err(error("capture", "the stream is captured already")),
        }
    }

    pub fn end(&mut self, stream: Stream, graph: Graph) -> Result<Graph, KernelError> {
        let work = self.open.remove(&stream).ok_or_else(|| error("capture", "the stream is not captured"))?;
        self.graphs.insert(graph, work.into());
        Ok(graph)
    }

    /// Records work of a stream that is being captured. Returns other work, which is to be done now.
    pub fn put(&mut self, stream: Stream, work: Work) -> Option<Work> {
        match self.open.get_mut(&stream) {
            None => Some(work),
            Some(kept) => {
                kept.push(work);
                None
            }
        }
    }

    /// Returns an error while this stream is being captured; for None, while any stream is.
    pub fn refuse(&self, operation: &str, stream: Option<Stream>) -> Result<(), KernelError> {
        let open = stream.map_or(!self.open.is_empty(), |stream| self.open.contains_key(&stream));
        if open { Err(error(operation, "not while a stream is captured")) } else { Ok(()) }
    }

    pub fn work(&self, graph: Graph) -> Result<Arc<[Work]>, KernelError> {
        self.graphs.get(&graph).cloned().ok_or_else(|| error("graph", "there is no such graph"))
    }

    pub fn forget(&mut self, graph: Graph) {
        self.graphs.remove(&graph);
    }
}
