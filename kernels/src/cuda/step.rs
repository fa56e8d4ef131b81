//! A step's inputs on the device, brought there in one copy, and the graphs of steps by size.

use super::device::Device;
use super::graphs::Graphs;
use super::inputs::Inputs;
use super::memory::Memory;
use super::pinned::Uploads;
use super::queue::{Queue, bytes_of};
use crate::KernelError;
use crate::backend::Room;

/// The latest step's inputs, and the graphs that steps run as.
pub(super) struct Steps<D: Device> {
    pub inputs: Inputs,
    /// Device memory of `inputs`. It stays at the same address as long as it is large enough.
    pub words: Option<Memory<D>>,
    uploads: Uploads<D>,
    /// Whether `words` holds the present `inputs`.
    pub sent: bool,
    pub graphs: Graphs,
    /// The value of [`Queue::freed`] when the graphs were made.
    pub freed: u64,
    /// Why no more graphs are captured: the error of the failed capture.
    pub refused: Option<KernelError>,
}

impl<D: Device> Steps<D> {
    /// An empty one for `groups` layer groups.
    pub fn new(groups: usize) -> Self {
        let (inputs, graphs) = (Inputs::new(groups), Graphs::default());
        let (words, uploads) = (None, Uploads::default());
        Steps { inputs, words, uploads, sent: false, graphs, freed: 0, refused: None }
    }

    /// Reserves room for the inputs of all steps within these bounds.
    pub fn reserve(&mut self, queue: &Queue<D>, room: &Room, block_size: usize) -> Result<(), KernelError> {
        self.sent = false;
        let words = self.inputs.reserve(room, block_size);
        queue.at_least(&mut self.words, words.max(1) * size_of::<u32>())?;
        self.uploads.reserve(queue, words.max(1) * size_of::<u32>())
    }

    /// Index of the first word of these ids on the device, if they are the step's.
    pub fn ids(&self, ids: &[u32]) -> Option<usize> {
        self.inputs.ids(ids).filter(|_| self.sent)
    }

    /// Index of the first word of these rows on the device, if the step's rows to sample begin with them.
    pub fn sampled(&self, rows: &[u32]) -> Option<usize> {
        self.inputs.sampled(rows).filter(|_| self.sent)
    }

    /// Copies the inputs to the device, unless they are there already.
    pub fn send(&mut self, queue: &Queue<D>) -> Result<(), KernelError> {
        if self.sent {
            return Ok(());
        }
        let words = self.inputs.pack();
        queue.at_least(&mut self.words, size_of_val(words).max(1))?;
        if let Some(memory) = &self.words {
            self.uploads.send(queue, memory.piece(0, size_of_val(words)), bytes_of(words))?;
        }
        self.sent = true;
        Ok(())
    }
}
