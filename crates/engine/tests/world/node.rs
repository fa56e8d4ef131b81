//! One side: an engine, a fake model, and the memory both sides can reach.

use std::collections::{BTreeMap, VecDeque};

use baton_engine::fake::{FakeModel, KvMemory, SharedMemory};
use baton_engine::{Engine, EngineConfig, HOLE, Step};
use baton_types::{KvLayout, PoolGeometry, SeqId};

use super::client::VOCAB;

#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Fault {
    /// The runner stops at the end of a step.
    Error,
    /// The runner does nothing, not even the copies.
    Nothing,
    /// The runner forgets a token.
    Output,
}

#[derive(Clone, Debug)]
pub struct NodeSpec {
    pub config: EngineConfig,
    pub blocks: Vec<u32>,
    /// Ticks at which its runner fails.
    pub faults: Vec<(u64, Fault)>,
    /// Whether steps are launched behind others, and computed only when they are collected.
    pub ahead: bool,
    pub late: bool,
}

/// A step that was launched.
pub struct StepInFlight {
    pub step: Step,
    pub fault: Option<Fault>,
    /// Copies of eager transfers, made when it is done: client, epoch, byte offsets from and to, length.
    pub copies: Vec<(usize, u32, usize, usize, usize)>,
}

pub struct Node {
    pub engine: Engine,
    pub model: FakeModel<SharedMemory>,
    pub memory: SharedMemory,
    pub geometry: PoolGeometry,
    pub faults: Vec<(u64, Fault)>,
    pub clients: BTreeMap<SeqId, usize>,
    pub ahead: bool,
    pub flights: VecDeque<StepInFlight>,
}

impl Node {
    pub fn new(layout: KvLayout, spec: NodeSpec) -> Node {
        let geometry = PoolGeometry { layout, blocks: spec.blocks };
        let memory = SharedMemory::new(geometry.bytes());
        let engine = Engine::new(spec.config, &geometry).unwrap();
        let model = FakeModel::with_memory(geometry.clone(), VOCAB, memory.clone());
        let model = if spec.late { model.late() } else { model };
        let (clients, flights) = (BTreeMap::new(), VecDeque::new());
        Node { engine, model, memory, geometry, faults: spec.faults, clients, ahead: spec.ahead, flights }
    }

    /// Bytes of a sequence's blocks; of one that receives, of those that are lent.
    pub fn ranges(&self, seq: SeqId) -> Vec<(usize, usize)> {
        let mut ranges = Vec::new();
        for layer in 0..self.geometry.layout.layers() as u32 {
            let (group, inner) = self.geometry.layout.locate(layer).unwrap();
            let tables = self.engine.tables(seq).unwrap();
            let ours = self.engine.lent_from(seq).unwrap_or(0) as usize;
            let table = tables.get(group).map_or(&[][..], |table| table.blocks());
            for block in table.iter().skip(ours).filter(|block| **block != HOLE) {
                let range = self.geometry.block_range(group, inner, *block);
                ranges.push((range.start, range.len()));
            }
        }
        ranges
    }
}

/// Plays the transport.
pub fn copy(from: &SharedMemory, to: &mut SharedMemory, read: usize, write: usize, len: usize) {
    let mut bytes = vec![0; len];
    from.load(read, &mut bytes);
    to.store(write, &bytes);
}
