//! Attention of sequences that share blocks: each gets the bits it gets alone (I1), whatever they share, wherever they fork and
//! whoever stands beside them.

use baton_types::{BlockId, KvDtype, KvGroup, PoolGeometry};

use super::{Factory, Random, geometry, read};
use crate::backend::{AttentionShape, Backend, Ragged, Rope};

/// Sequences of a batch.
const SEQUENCES: usize = 10;
/// The most tokens of one.
const LONGEST: usize = 112;
const BLOCK: usize = 16;
const BLOCKS: u32 = (SEQUENCES * LONGEST / BLOCK) as u32;

/// A sequence of the batch: blocks of its own behind those of another.
struct Sequence {
    table: Vec<BlockId>,
    tokens: usize,
    /// Tokens whose blocks another sequence stored.
    shared: usize,
    /// Its last rows, which attend.
    rows: usize,
}

/// One backend with the K and V of its sequences.
struct Case<F: Factory> {
    backend: F::Backend,
    shape: AttentionShape,
    group: KvGroup,
    sequences: Vec<Sequence>,
    name: String,
}

/// Every type, every number of query heads for a KV head up to 8, with windows, with sinks too, and without; forks at random.
pub(super) fn run<F: Factory>(factory: &F) {
    let mut random = Random(17);
    for (i, dtype) in KvDtype::ALL.into_iter().enumerate() {
        for group in 1..=8 {
            let (dim, kv_heads) = ([64, 128, 256][(i + group) % 3], 1 + (i + group / 2) % 3);
            let window = [None, Some(40), None, Some(21)][(i / 2 + group) % 4];
            let mut geometry = geometry(dtype, kv_heads as u32, dim, window, BLOCK as u32);
            geometry.blocks = vec![BLOCKS];
            geometry.layout.groups[0].sinks = window.map_or(0, |_| [0, 3, BLOCK as u32][group % 3]);
            if factory.serves(&geometry.layout) {
                Case::new(factory, &geometry, group * kv_heads, &mut random).check(&mut random);
            }
        }
    }
}

/// How often a step rotates its queries: for the window, and for the sinks where there are any.
fn times(group: &KvGroup) -> usize {
    1 + usize::from(group.sinks > 0)
}

/// Forks of forks: a sequence goes on behind some blocks of one before it, or shares nothing.
fn sequences(random: &mut Random) -> Vec<Sequence> {
    let mut below = |n: usize| (random.bits() % n as u64) as usize;
    let mut free: Vec<BlockId> = (0..BLOCKS).map(BlockId).collect();
    let mut all: Vec<Sequence> = Vec::new();
    for i in 0..SEQUENCES {
        let tokens = 1 + below(LONGEST);
        let parent = (i > 0 && below(5) > 0).then(|| &all[below(i)]);
        let common = parent.map_or(0, |p| below(3).max(1) * p.tokens.min(tokens - 1) / 2 / BLOCK);
        let mut table = parent.map_or(Vec::new(), |p| p.table[..common].to_vec());
        table.extend((common..tokens.div_ceil(BLOCK)).map(|_| free.swap_remove(below(free.len()))));
        let shared = common * BLOCK;
        let rows = [1, 1, 1, 3, 40][below(5)].min(tokens - shared);
        all.push(Sequence { table, tokens, shared, rows });
    }
    all
}

impl<F: Factory> Case<F> {
    /// Stores every sequence's own tokens.
    fn new(factory: &F, geometry: &PoolGeometry, heads: usize, random: &mut Random) -> Self {
        let group = geometry.layout.groups[0].clone();
        let (kv_heads, dim) = (group.kv_heads as usize, group.head_dim as usize);
        let name = format!("{:?}, {heads} heads, {group:?}", geometry.layout.dtype);
        let shape = AttentionShape { group: 0, layer: 1, heads, scale: 0.2 };
        let (mut backend, sequences) = (factory.make(geometry), sequences(random));
        let angles: Vec<f32> = random.vector(LONGEST * dim / 2);
        let rope = Rope { cos: backend.upload(&angles).expect("cos"), sin: backend.upload(&angles).expect("sin") };
        for Sequence { table, tokens, shared, .. } in &sequences {
            let mut batch = Ragged::default();
            batch.push(*shared, tokens - shared, table);
            let mut rows = |heads: usize| backend.upload(&random.vector(batch.rows() * heads * dim)).expect("rows");
            let (mut q, k, v) = (rows(heads * times(&geometry.layout.groups[0])), rows(kv_heads), rows(kv_heads));
            backend.rope_and_store_kv(shape, &batch, &rope, &mut q, &k, &v);
        }
        Case { backend, shape, group, sequences, name }
    }

    /// All sequences together, then each alone, then all again in another order.
    fn check(&mut self, random: &mut Random) {
        let width = self.shape.heads * self.group.head_dim as usize;
        // As the window sees them, and as the sinks do.
        let mut queries = || self.sequences.iter().map(|s| random.vector(s.rows * width)).collect();
        let queries: [Vec<Vec<f32>>; 2] = [queries(), queries()];
        let mut order: Vec<usize> = (0..SEQUENCES).collect();
        let together = self.attend(&order, &queries);
        order.reverse();
        order.rotate_left(SEQUENCES / 3);
        let otherwise = self.attend(&order, &queries);
        for i in 0..SEQUENCES {
            let alone = self.attend(&[i], &queries).remove(0);
            let place = order.iter().position(|&at| at == i).expect("every sequence is in the order");
            for (got, how) in [(&together[i], "together"), (&otherwise[place], "in another order")] {
                let same = got.iter().zip(&alone).position(|(a, b)| a.to_bits() != b.to_bits() || a.is_nan());
                assert_eq!(same, None, "I1: sequence {i} {how} gets other bits ({})", self.name);
            }
        }
    }

    /// Output rows of these sequences in one batch.
    fn attend(&mut self, which: &[usize], queries: &[Vec<Vec<f32>>; 2]) -> Vec<Vec<f32>> {
        let width = self.shape.heads * self.group.head_dim as usize;
        let mut batch = Ragged::default();
        for s in which.iter().map(|&i| &self.sequences[i]) {
            let start = s.tokens - s.rows;
            // Sequences of an odd length no longer have what their windows have passed.
            let live = self.group.live(start as u32, BLOCK as u32);
            let hidden = if s.tokens % 2 == 1 { live.missing(0, s.table.len() as u32) } else { 0 };
            let (sinks, rest) = s.table.split_at(if hidden > 0 { live.sinks as usize } else { 0 });
            batch.push_around(start, s.rows, (sinks, &rest[hidden as usize..]), hidden as usize * BLOCK);
        }
        let seen = &queries[..times(&self.group)];
        let q: Vec<f32> = seen.iter().flat_map(|of| which.iter().flat_map(|&i| &of[i])).copied().collect();
        let q = self.backend.upload(&q).expect("q");
        let mut out = self.backend.buffer(batch.rows() * width).expect("out");
        self.backend.attention(self.shape, &batch, &q, &mut out);
        let all = read(&mut self.backend, &out, batch.rows() * width);
        let mut rest = all.as_slice();
        which.iter().map(|&i| rest.split_off(..self.sequences[i].rows * width).unwrap_or_default().to_vec()).collect()
    }
}
