//! Work of a [`super::HostDevice`] as a graph keeps it. Pure.

use std::collections::HashMap;
use std::sync::Arc;

use super::device::{Address, Call, Graph, Launch, Stream};
use crate::KernelError;

/// What can be put into a stream and done later.
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
    /// Of E4M3; scales of the weight's rows and of x's.
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

/// Bytes of parameters, aligned as the most demanding of them.
#[repr(C, align(128))]
#[derive(Clone, Copy)]
struct Aligned([u8; 128]);

/// A launch with parameters of its own.
pub(super) struct Kept {
    pub kernel: &'static str,
    pub launch: Launch,
    params: Vec<Aligned>,
    pub bytes: usize,
}

impl Kept {
    /// # Safety
    /// Its parameters are as many bytes as it says.
    pub unsafe fn of(call: &Call<'_>) -> Self {
        let mut params = vec![Aligned([0; 128]); call.bytes.div_ceil(size_of::<Aligned>())];
        // SAFETY: the caller's promise; there is room for as many bytes.
        unsafe { std::ptr::copy_nonoverlapping(call.params, params.as_mut_ptr().cast(), call.bytes) };
        Kept { kernel: call.kernel, launch: call.launch, params, bytes: call.bytes }
    }

    pub fn params(&self) -> *const u8 {
        self.params.as_ptr().cast()
    }
}

/// Streams that are captured, and graphs.
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

    /// Keeps work of a captured stream; other work is to be done now.
    pub fn put(&mut self, stream: Stream, work: Work) -> Option<Work> {
        match self.open.get_mut(&stream) {
            None => Some(work),
            Some(kept) => {
                kept.push(work);
                None
            }
        }
    }

    /// An error while this stream, or any, is captured.
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
