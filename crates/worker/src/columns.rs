//! K and V of one head, for people who look: what the page's walk-through shows.
//!
//! A prefix is looked up in the prefix cache, so whoever asks must know its tokens and its cache salt. Its blocks are full, and nobody writes to them.
//! The engine thread reads them between two steps, so that nobody takes them meanwhile: some hundred KB at most.

use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::time::Duration;

use baton_engine::{Engine, Exchange as Prefix};
use baton_kernels::{KvSlice, convert_kv};
use baton_proto::v1::{ColumnsRequest, ColumnsResponse};
use baton_transfer::{DeviceError, Pool};
use baton_types::{BlockId, KvDtype, KvLayout, PoolGeometry};
use tokio::sync::oneshot;
use tonic::Status;

use crate::engine_thread::Message;
use crate::tiers::memory::{Memory, read};
use crate::{Commands, Node};

/// Most tokens of which columns are shown at once (I5).
const MOST: usize = 512;
/// How long who asks waits for the engine thread, which may be computing a long step.
const PATIENCE: Duration = Duration::from_secs(10);

/// A head of a layer, by layer group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Head {
    group: usize,
    layer_in_group: usize,
    head: usize,
    /// Its values are wanted.
    values: bool,
}

/// Somebody who looks.
pub(crate) struct Look {
    prefix: Prefix,
    head: Head,
    answer: oneshot::Sender<Result<ColumnsResponse, DeviceError>>,
}

/// Answers a question for columns.
pub(crate) type Asks =
    Box<dyn Fn(ColumnsRequest) -> Pin<Box<dyn Future<Output = Result<ColumnsResponse, Status>> + Send>> + Send + Sync>;

/// Asks the engine thread of this worker.
pub(crate) fn asks<C: Send + 'static>(node: Node, commands: Commands<C>) -> Asks {
    Box::new(move |asked| {
        let (node, commands) = (node.clone(), commands.clone());
        Box::pin(async move {
            let (look, answer) = wanted(&node, asked)?;
            let gone = || Status::unavailable("the worker ends");
            commands.post(Message::Look(look)).map_err(|_| gone())?;
            match tokio::time::timeout(PATIENCE, answer).await {
                Ok(told) => told.map_err(|_| gone())?.map_err(|error| Status::internal(error.to_string())),
                Err(_) => Err(Status::deadline_exceeded("the worker is busy")),
            }
        })
    })
}

type Answer = oneshot::Receiver<Result<ColumnsResponse, DeviceError>>;

/// Checks what is asked for (I8).
fn wanted(node: &Node, asked: ColumnsRequest) -> Result<(Look, Answer), Status> {
    let ColumnsRequest { prefix, layer, kv_head, only_blocks } = asked;
    let prefix = prefix.ok_or_else(|| Status::invalid_argument("prefix is missing"))?;
    if !only_blocks && prefix.tokens.len() > MOST + 1 {
        let many = prefix.tokens.len();
        return Err(Status::invalid_argument(format!(
            "prefix.tokens has {many} tokens; columns of {MOST} are shown at most"
        )));
    }
    let layout = &node.geometry.layout;
    let layer = layer.unwrap_or_else(|| usual(layout));
    let (group, layer_in_group) = layout.locate(layer).ok_or_else(|| {
        Status::invalid_argument(format!(
            "layer is {layer}; no layer of this number has KV, of {} that have",
            layout.layers()
        ))
    })?;
    let heads = layout.groups[group].kv_heads;
    if kv_head >= heads {
        return Err(Status::invalid_argument(format!("kv_head is {kv_head}; the layer has {heads}")));
    }
    let prefix = node.exchange(prefix, PATIENCE)?;
    let (answer, told) = oneshot::channel();
    Ok((
        Look { prefix, head: Head { group, layer_in_group, head: kv_head as usize, values: !only_blocks }, answer },
        told,
    ))
}

/// The first layer that sees all tokens, or the first of all.
fn usual(layout: &KvLayout) -> u32 {
    let group = layout.groups.iter().find(|group| group.window.is_none()).or(layout.groups.first());
    group.and_then(|group| group.layers.first()).copied().unwrap_or(0)
}

/// Reads columns out of a worker's pool.
pub(crate) struct Columns {
    pool: Pool,
    geometry: PoolGeometry,
}

impl Columns {
    pub fn of(node: &Node) -> Columns {
        Columns { pool: node.pool.clone(), geometry: node.geometry.clone() }
    }

    /// Answers somebody. Only on the engine thread, which alone gives blocks away.
    pub fn answer(&self, look: Look, engine: &Engine) {
        let Look { prefix, head, answer } = look;
        let blocks = engine.blocks_of(&prefix.prefix, &prefix.tokens, head.group);
        // Who asked may be gone.
        let _ = answer.send(self.read(&blocks, head));
    }

    fn read(&self, blocks: &[BlockId], head: Head) -> Result<ColumnsResponse, DeviceError> {
        let layout = &self.geometry.layout;
        let group = &layout.groups[head.group];
        let (plane, slice) = (layout.plane_bytes(head.group), layout.head_bytes(head.group));
        let of_head =
            |plane_at: usize| plane_at * plane + head.head * slice..plane_at * plane + (head.head + 1) * slice;
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        let shape = KvSlice { block_size: layout.block_size as usize, head_dim: group.head_dim as usize };
        let shown = if head.values { blocks } else { &[] };
        for bytes in self.bytes(shown, head)? {
            keys.extend(numbers(shape, layout.dtype, &bytes[of_head(0)]));
            if group.planes > 1 {
                values.extend(numbers(shape, layout.dtype, &bytes[of_head(1)]));
            }
        }
        let blocks = blocks.iter().map(|block| block.0).collect();
        let (kv_type, layer) = (layout.dtype.to_string(), group.layers[head.layer_in_group]);
        Ok(ColumnsResponse { blocks, head_dim: group.head_dim, keys, values, kv_type, layer })
    }

    /// One layer's part of each of these blocks.
    fn bytes(&self, blocks: &[BlockId], head: Head) -> Result<Vec<Vec<u8>>, DeviceError> {
        let range = |block: &BlockId| self.geometry.block_range(head.group, head.layer_in_group, *block);
        let ranges: Vec<Range<usize>> = blocks.iter().map(range).collect();
        let mut memory = Memory::of(&self.pool).map_err(|error| DeviceError(error.to_string()))?;
        match &mut memory {
            Memory::Host(segment) => {
                let copied = ranges.into_iter().map(|range| {
                    assert!(range.end <= segment.len(), "a block outside the pool");
                    // SAFETY: the range lies in the segment. The block is full and in the prefix cache, so nobody writes to it, and it stays
                    // there while the engine thread, which is here, does nothing else.
                    unsafe { std::slice::from_raw_parts(segment.as_ptr().add(range.start), range.len()) }.to_vec()
                });
                Ok(copied.collect())
            }
            Memory::Device(device) => {
                let after = device.memory.mark();
                let queue = device.queue()?;
                ranges
                    .iter()
                    .map(|range| {
                        queue.read(after, &[(range.start, range.len())])?;
                        Ok(read(queue)?.bytes().to_vec())
                    })
                    .collect()
            }
        }
    }
}

/// The rows of a head's slice, as attention reads them.
fn numbers(shape: KvSlice, dtype: KvDtype, slice: &[u8]) -> Vec<f32> {
    let mut wide = vec![0; shape.bytes(KvDtype::F32)];
    convert_kv(shape, dtype, KvDtype::F32, slice, &mut wide);
    wide.chunks_exact(4).map(|bytes| f32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use baton_engine::fake::tiny_layout;
    use baton_transfer::Segment;
    use baton_transfer::conformance::memory_over;
    use half::f16;

    use super::*;

    /// Out of a pool in host memory, and in a device's: each head's own numbers, those of K and of V, token by token.
    #[test]
    fn columns_are_the_pools_numbers() {
        let mut layout = tiny_layout(4);
        layout.groups.iter_mut().for_each(|group| group.head_dim = 8);
        let geometry = PoolGeometry::uniform(layout, 6);
        let segment = Arc::new(Segment::create("test", geometry.bytes()).unwrap());
        let bytes: Vec<u8> =
            (0..geometry.bytes() / 2).flat_map(|at| f16::from_f32((at % 1999) as f32).to_le_bytes()).collect();
        // SAFETY: nobody else has the segment.
        unsafe { segment.write(0, &bytes) };
        for pool in [Pool::Host(Arc::clone(&segment)), Pool::Device(memory_over(&segment))] {
            let columns = Columns { pool, geometry: geometry.clone() };
            for (at, group) in geometry.layout.groups.iter().enumerate() {
                let (last, dim) = (group.layers.len() - 1, group.head_dim as usize);
                let head = Head { group: at, layer_in_group: last, head: group.kv_heads as usize - 1, values: true };
                let blocks = [BlockId(4), BlockId(1)];
                let told = columns.read(&blocks, head).unwrap();
                assert_eq!((&told.blocks[..], told.layer), (&[4, 1][..], group.layers[last]));
                let of = |block: BlockId, plane: usize| {
                    let heads = group.kv_heads as usize;
                    let first = geometry.block_range(at, last, block).start / 2 + (plane * heads + head.head) * 4 * dim;
                    (first..first + 4 * dim).map(|at| (at % 1999) as f32)
                };
                let all = |plane| blocks.iter().flat_map(|block| of(*block, plane)).collect::<Vec<f32>>();
                assert_eq!((told.keys, told.values), (all(0), all(1)), "group {at}");
                let none = columns.read(&blocks, Head { values: false, ..head }).unwrap();
                assert_eq!((none.blocks.len(), none.keys.len(), none.values.len()), (2, 0, 0));
            }
        }
    }

    #[test]
    fn the_usual_layer_sees_all_tokens() {
        let mut layout = tiny_layout(4);
        let full = layout.groups.iter().find(|group| group.window.is_none()).unwrap().layers[0];
        assert_eq!(usual(&layout), full);
        layout.groups.iter_mut().for_each(|group| group.window = Some(8));
        assert_eq!(usual(&layout), layout.groups[0].layers[0]);
    }
}
