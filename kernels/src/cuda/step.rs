//! A step's inputs, brought to the device in one copy, and the graphs of steps of its size.

use super::device::Device;
use super::graphs::Graphs;
use super::inputs::Inputs;
use super::memory::Memory;
use super::pinned::Uploads;
use super::queue::{Queue, bytes_of};
use crate::KernelError;
use crate::backend::Room;

/// The latest step's inputs, and how steps of its size are done.
pub(super) struct Steps<D: Device> {
    pub inputs: Inputs,
    /// `inputs` on the device, at the same place as long as there is room.
    pub words: Option<Memory<D>>,
    uploads: Uploads<D>,
    /// Whether `words` has them.
    pub sent: bool,
    /// Splits that decode rows of the step under way are launched with.
    pub splits: Option<u32>,
    pub graphs: Graphs,
    /// What [`Queue::freed`] said when the graphs were made.
    pub freed: u64,
    /// Why none is captured any more.
    pub refused: Option<KernelError>,
}

impl<D: Device> Steps<D> {
    /// For so many layer groups.
    pub fn new(groups: usize) -> Self {
        let (inputs, graphs) = (Inputs::new(groups), Graphs::default());
        let (words, uploads) = (None, Uploads::default());
        Steps { inputs, words, uploads, sent: false, splits: None, graphs, freed: 0, refused: None }
    }

    /// Room for all inputs of steps within these bounds.
    pub fn reserve(&mut self, queue: &Queue<D>, room: &Room) -> Result<(), KernelError> {
        self.sent = false;
        let words = self.inputs.reserve(room);
        queue.at_least(&mut self.words, words.max(1) * size_of::<u32>())?;
        self.uploads.reserve(queue, words.max(1) * size_of::<u32>())
    }

    /// The word at which these ids are on the device, if they are the step's.
    pub fn ids(&self, ids: &[u32]) -> Option<usize> {
        self.inputs.ids(ids).filter(|_| self.sent)
    }

    /// The word at which these rows are on the device, if those to sample begin with them.
    pub fn sampled(&self, rows: &[u32]) -> Option<usize> {
        self.inputs.sampled(rows).filter(|_| self.sent)
    }

    /// Brings the inputs to the device, unless they are there.
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
