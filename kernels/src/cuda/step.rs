//! A step: its inputs brought to the device in one copy, and its operations done one by one or, for decode rows, as a graph.

use super::attention::{self, Chunks, Placed};
use super::backend::CudaBackend;
use super::batch::{Cut, SPLIT};
use super::device::{Device, Graph};
use super::graphs::{self, Graphs, Next, Size};
use super::inputs::Inputs;
use super::memory::Memory;
use super::pinned::Uploads;
use super::queue::{Queue, bytes_of};
use crate::backend::{AttentionShape, Ragged, Room, StepInputs};
use crate::{Draw, KernelError};

/// The latest step's inputs, and how steps of its size are done.
pub(super) struct Steps<D: Device> {
    pub inputs: Inputs,
    /// `inputs` on the device, at the same place as long as there is room.
    pub words: Option<Memory<D>>,
    uploads: Uploads<D>,
    /// Whether `words` has them.
    sent: bool,
    /// Splits that decode rows of the step under way are launched with.
    splits: Option<u32>,
    graphs: Graphs,
    /// What [`Queue::freed`] said when the graphs were made.
    freed: u64,
    /// Why none is captured any more.
    refused: Option<KernelError>,
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
    fn send(&mut self, queue: &Queue<D>) -> Result<(), KernelError> {
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

/// The size of a padded step.
fn size(inputs: &StepInputs<'_>, invariant: bool) -> Size {
    let spans = inputs.batches.iter().flat_map(Ragged::spans);
    let longest = spans.map(|span| span.start as u32 / SPLIT + 1).max().unwrap_or(1);
    // Without kernels of decode rows there are no splits.
    let splits = if invariant { 1 } else { graphs::splits(longest) };
    Size { rows: inputs.ids.len(), splits, draws: !inputs.draws.is_empty() }
}

impl<D: Device> CudaBackend<D> {
    pub(super) fn run_step(&mut self, inputs: &StepInputs<'_>, run: &mut dyn FnMut(&mut Self)) {
        let size = inputs.padded.then(|| size(inputs, self.options.invariant));
        self.steps.splits = size.map(|size| size.splits);
        self.attempt(|b| b.begin(inputs));
        match size {
            _ if self.failed.is_some() => {}
            Some(size) => {
                self.run_sized(size, run);
                self.sampling.replayed(inputs.draws.len());
            }
            None => run(self),
        }
        self.steps.splits = None;
    }

    fn run_sized(&mut self, size: Size, run: &mut dyn FnMut(&mut Self)) {
        if self.steps.freed != self.queue.freed() {
            self.forget_graphs();
            self.steps.freed = self.queue.freed();
        }
        match self.steps.graphs.next(size) {
            Next::Replay(graph) => {
                let freed = self.steps.freed;
                self.attempt(|b| b.queue.replay(graph, freed));
            }
            Next::Capture if self.steps.refused.is_none() => match self.capture(run) {
                Ok(graph) => {
                    self.keep(size, Some(graph));
                    let freed = self.steps.freed;
                    self.attempt(|b| b.queue.replay(graph, freed));
                }
                // Nothing of it was done. What cannot be captured can still be done.
                Err(error) => {
                    tracing::warn!(%error, "decode steps are done one launch at a time: they cannot be captured as graphs");
                    self.steps.refused = Some(error);
                    self.sampling.again();
                    run(self);
                }
            },
            Next::Capture | Next::Run => {
                run(self);
                self.keep(size, None);
            }
        }
    }

    fn capture(&mut self, run: &mut dyn FnMut(&mut Self)) -> Result<Graph, KernelError> {
        self.queue.begin_capture()?;
        run(self);
        // Whatever happened: the stream must not stay as it is.
        let ended = self.queue.end_capture();
        match self.failed.take() {
            None => ended,
            Some(error) => {
                ended.into_iter().for_each(|graph| self.queue.device.forget(graph));
                Err(error)
            }
        }
    }

    fn keep(&mut self, size: Size, graph: Option<Graph>) {
        if let Some(gone) = self.steps.graphs.done(size, graph) {
            self.queue.device.forget(gone);
        }
    }

    pub(super) fn forget_graphs(&mut self) {
        self.steps.graphs.clear().for_each(|graph| self.queue.device.forget(graph));
    }

    /// Why decode steps are not launched as graphs, where a capture failed.
    pub fn graphs_refused(&self) -> Option<&KernelError> {
        self.steps.refused.as_ref()
    }

    fn begin(&mut self, inputs: &StepInputs<'_>) -> Result<(), KernelError> {
        self.steps.inputs.set(inputs.ids, inputs.sampled);
        for (group, batch) in inputs.batches.iter().enumerate() {
            let cut = self.cut(group, inputs.heads);
            self.steps.inputs.renew(group, batch, cut);
        }
        self.steps.sent = false;
        self.steps.send(&self.queue)?;
        self.sampling.begin();
        if inputs.draws.is_empty() {
            return Ok(());
        }
        assert!(inputs.draws.iter().all(Draw::plain), "a step's draws have neither masks nor changes");
        self.sampling.send(&self.queue, inputs.draws, inputs.ids.len())
    }

    fn cut(&self, shape_group: usize, heads: usize) -> Cut {
        let layout = &self.pool.geometry().layout;
        let kv_heads = layout.groups[shape_group].kv_heads as usize;
        let (group, block_size) = (heads / kv_heads, layout.block_size as usize);
        assert_eq!(group * kv_heads, heads, "query heads for each KV head");
        let pairs = self.chunks(shape_group).pairs();
        Cut { group, block_size, decode: !self.options.invariant, pairs, splits: self.steps.splits }
    }

    /// The kernel of a group's chunks.
    fn chunks(&self, group: usize) -> Chunks {
        // Whether copy units take memory of the host is not known of all hosts, and its bus is slower than either kernel.
        let hopper = self.options.hopper && !self.pool.is_host();
        let hopper = hopper && self.queue.device.properties().capability == attention::HOPPER;
        Chunks::of(&self.pool.geometry().layout, group, hopper)
    }

    /// The batch of a layer on the device: a step brings it there; else it is brought now, unless it is the last one.
    pub(super) fn place(&mut self, shape: AttentionShape, batch: &Ragged) -> Result<(), KernelError> {
        let cut = self.cut(shape.group, shape.heads);
        self.steps.sent &= !self.steps.inputs.renew(shape.group, batch, cut);
        self.steps.send(&self.queue)
    }

    /// The batch of a layer where it was placed.
    pub(super) fn placed(&self, shape: AttentionShape) -> Option<Placed<'_, D>> {
        let inputs = &self.steps.inputs;
        let words = self.steps.words.as_ref()?.piece(0, inputs.len() * size_of::<u32>());
        let chunks = self.chunks(shape.group);
        Some(Placed { queue: &self.queue, pool: &self.pool, chunks, shape, inputs, words })
    }
}
