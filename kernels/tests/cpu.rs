//! The conformance suite on the CPU backend: both instruction sets, any number of threads, and the same bits from all.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use baton_kernels::conformance::{DTYPES, Factory, Random, random_weight, run};
use baton_kernels::{
    AttentionShape, Backend, CpuBackend, CpuOptions, First, Gate, HostPool, Input, Isa, Norm, Operation, Product,
    Profiled, Ragged, Room, Rope, SharedProfile, WeightSource,
};
use baton_types::{BlockId, KvDtype, KvGroup, KvLayout, PoolGeometry, WeightDtype};

struct Cpu(CpuOptions);

impl Factory for Cpu {
    type Backend = CpuBackend;
    fn make(&self, geometry: &PoolGeometry) -> CpuBackend {
        let mut memory = vec![0xffu8; geometry.bytes()];
        let (base, bytes) = (memory.as_mut_ptr(), memory.len());
        // SAFETY: the vector lives in the owner; 0xff bytes are NaN in every KV type, as elements or as parameters.
        let pool = unsafe { HostPool::new(base, bytes, geometry.clone(), Arc::new(memory)) }.unwrap();
        CpuBackend::new(self.0, Arc::new(pool)).unwrap()
    }
    fn block(&self, backend: &CpuBackend, group: usize, layer_in_group: usize, block: BlockId) -> Vec<u8> {
        backend.pool().block_bytes(group, layer_in_group, block)
    }
}

struct ProfiledCpu(SharedProfile);

impl Factory for ProfiledCpu {
    type Backend = Profiled<CpuBackend>;
    fn make(&self, geometry: &PoolGeometry) -> Profiled<CpuBackend> {
        Profiled::new(Cpu(CpuOptions::default()).make(geometry), geometry.layout.clone(), self.0.clone())
    }
    fn block(&self, backend: &Self::Backend, group: usize, layer_in_group: usize, block: BlockId) -> Vec<u8> {
        backend.inner().pool().block_bytes(group, layer_in_group, block)
    }
}

#[test]
fn a_profiled_backend_conforms_and_counts() {
    let profile = SharedProfile::default();
    run(&ProfiledCpu(profile.clone()));
    let counted: Vec<_> = profile.take().tallies().map(|(operation, _)| operation).collect();
    for operation in [Operation::Attention, Operation::Norm, Operation::RopeAndStore] {
        assert!(counted.contains(&operation), "{operation} is missing in {counted:?}");
    }
    assert_eq!(profile.take().tallies().count(), 0, "taken once");
}

#[test]
fn a_profile_counts_what_must_move_and_be_computed() {
    let group = KvGroup { layers: vec![0], planes: 2, kv_heads: 1, head_dim: 8, window: Some(4), sinks: 0 };
    let layout = KvLayout { version: 1, model: 0, dtype: KvDtype::F16, block_size: 16, groups: vec![group] };
    let geometry = PoolGeometry::uniform(layout, 3);
    let profile = SharedProfile::default();
    let mut backend = ProfiledCpu(profile.clone()).make(&geometry);
    let dtype = baton_types::WeightDtype::F32;
    let weight =
        WeightSource { name: "w", dtype, rows: 16, cols: 8, data: [0; 16 * 8 * 4][..].into(), row_order: None };
    let weight = backend.weight(&weight).unwrap();
    let mut x = backend.upload(&[1.0; 3 * 16]).unwrap();
    let mut out = backend.buffer(3 * 16).unwrap();
    let input = Input { x: &mut x, rows: 3, first: First::Nothing };
    backend.matmul(input, [Product { weight: &weight, bias: None, out: &mut out }]);
    // What comes first: read, and a sum written, too.
    let other = backend.upload(&[1.0; 3 * 8]).unwrap();
    let norm = Norm { weight: backend.upload(&[1.0; 8]).unwrap(), eps: 1e-5 };
    backend.reserve(&Room { rows: 3, cols: 8, ..Room::default() }).unwrap();
    for first in [First::Norm(&norm), First::AddNorm(&other, &norm), First::Gate(Gate::Silu, &other)] {
        backend.matmul(Input { x: &mut x, rows: 3, first }, [Product { weight: &weight, bias: None, out: &mut out }]);
    }
    // Positions 3, 4 and 5 with a window of 4: each sees 4 tokens, together they see tokens 0 to 5.
    let mut batch = Ragged::default();
    batch.push(3, 3, &[BlockId(0)]);
    let shape = AttentionShape { group: 0, layer: 0, heads: 2, scale: 1.0 };
    backend.attention(shape, &batch, &x, &mut out);
    // Two rows that share their first 16 tokens: what they share moves once, and the window shows 4 tokens to each.
    let mut shared = Ragged::default();
    shared.push(17, 1, &[BlockId(0), BlockId(1)]);
    shared.push(16, 1, &[BlockId(0), BlockId(2)]);
    backend.attention(shape, &shared, &x, &mut out);
    let counted: Vec<_> = profile.take().tallies().map(|(o, t)| (o, t.calls, t.bytes, t.arithmetic)).collect();
    let floats = |n: u64| 4 * n;
    let matmul = Operation::Matmul { parts: [Some((dtype, 16)), None, None], cols: 8 };
    let tokens = 6 + (2 + 2 + 1 + 1);
    let attention = (tokens * 2 * 8 * 2 + floats(2 * 5 * 16), 4 * 16 * (12 + 8));
    assert_eq!(
        counted,
        [
            // Three more rows of 8 are read, and three sums of them written.
            (matmul, 4, 4 * (floats(16 * 8) + floats(3 * 24)) + floats((2 + 1) * 24), 4 * 2 * 3 * 16 * 8),
            (Operation::Attention, 2, attention.0, attention.1),
        ]
    );
}

#[test]
fn best_instruction_set_conforms() {
    for threads in [1, 2, 5] {
        run(&Cpu(CpuOptions { threads, ..CpuOptions::default() }));
    }
}

#[test]
fn every_instruction_set_conforms() {
    for isa in Isa::testable() {
        run(&Cpu(CpuOptions { threads: 2, isa, pinned: false }));
    }
}

/// The bits of each row alone with portable code, whatever the instruction set and the rows beside it: rows and outputs that fill no tile,
/// more groups than a chunk, more rows than a block.
#[test]
fn products_of_many_rows_have_the_bits_of_each_row_alone() {
    let group = KvGroup { layers: vec![0], planes: 2, kv_heads: 1, head_dim: 8, window: None, sinks: 0 };
    let layout = KvLayout { version: 1, model: 0, dtype: KvDtype::F16, block_size: 16, groups: vec![group] };
    let geometry = PoolGeometry::uniform(layout, 2);
    let product = |isa: Isa, source: &WeightSource<'_>, x: &[f32], at_once: usize| {
        let (threads, cols, outs) = (2, source.cols, source.rows);
        let mut backend = Cpu(CpuOptions { threads, isa, pinned: false }).make(&geometry);
        backend.reserve(&Room { rows: at_once, cols, ..Room::default() }).unwrap();
        let weight = backend.weight(source).unwrap();
        let bias = backend.upload(&Random(4).vector(outs)).unwrap();
        let mut all = Vec::new();
        for x in x.chunks(at_once * cols) {
            let (mut x, rows) = (backend.upload(x).unwrap(), x.len() / cols);
            // Nothing beside the output is written: what follows stays.
            let mut out = backend.upload(&vec![7.0; rows * outs + 32]).unwrap();
            let product = Product { weight: &weight, bias: Some(&bias), out: &mut out };
            backend.matmul(Input { x: &mut x, rows, first: First::Nothing }, [product]);
            assert_eq!(out[rows * outs..], [7.0; 32]);
            all.extend_from_slice(&out[..rows * outs]);
        }
        all
    };
    let agree = |dtype, (rows, cols, outs): (usize, usize, usize), data: &[u8], x: &[f32], counts: &[usize]| {
        let source = WeightSource { name: "w", dtype, rows: outs, cols, data: data.into(), row_order: None };
        let want = product(Isa::Portable, &source, x, 1);
        for isa in Isa::testable() {
            for &count in counts {
                let got = product(isa, &source, x, count);
                assert!(got == want, "{dtype:?}, {outs} x {cols}, {count} of {rows} rows, {}", isa.name());
            }
        }
    };
    let mut random = Random(11);
    for dtype in DTYPES {
        let wide = if dtype.block_elements() > 32 { 1792 } else { 1056 };
        for (rows, cols, outs, counts) in
            [(71, wide, 45, &[5, 12, 13, 40, 71][..]), (33, 256, 70, &[16, 31, 33]), (1100, 256, 8, &[1100])]
        {
            let (data, x) = (random_weight(dtype, outs, cols, &mut random), random.vector(rows * cols));
            agree(dtype, (rows, cols, outs), &data, &x, counts);
        }
    }
    // The largest sums of integers: 6-bit weights of -32 with scales of -128, 8-bit ones of -128, weights of 15 and 31 with scales and minima
    // of 63, and activations of 127 or -127.
    let extremes = [
        (WeightDtype::Q6K, 0..192, 0u8, 192..208, 0x80u8),
        (WeightDtype::Q8_0, 2..34, 0x80, 0..0, 0),
        (WeightDtype::Q4K, 16..144, 0xff, 4..16, 0xff),
        (WeightDtype::Q5K, 16..176, 0xff, 4..16, 0xff),
    ];
    for (dtype, weights, fill, scales, scale) in extremes {
        let (rows, cols, outs) = (65, 512, 32);
        let mut data = random_weight(dtype, outs, cols, &mut random);
        for block in data.chunks_exact_mut(dtype.block_bytes()) {
            block[weights.clone()].fill(fill);
            block[scales.clone()].fill(scale);
        }
        let x: Vec<f32> = (0..rows * cols).map(|i| if i / cols % 2 == 0 { 1.0 } else { -1.0 }).collect();
        agree(dtype, (rows, cols, outs), &data, &x, &[8, 16, rows]);
    }
}

#[test]
fn instruction_sets_agree_to_the_bit() {
    let group = KvGroup { layers: vec![0], planes: 2, kv_heads: 1, head_dim: 8, window: None, sinks: 0 };
    let layout = KvLayout { version: 1, model: 0, dtype: KvDtype::F16, block_size: 16, groups: vec![group] };
    let geometry = PoolGeometry::uniform(layout, 2);
    let product = |isa: Isa, dtype| {
        let mut backend = Cpu(CpuOptions { threads: 1, isa, pinned: false }).make(&geometry);
        let mut random = Random(9);
        // Rows in tiles of 8, 4, 2 and 1; outputs of two panels side by side, and of one alone that is not full.
        const ROWS: usize = 15;
        let data = random_weight(dtype, 21, 256, &mut random);
        let source = WeightSource { name: "w", dtype, rows: 21, cols: 256, data: data[..].into(), row_order: None };
        let weight = backend.weight(&source).unwrap();
        backend.reserve(&Room { rows: ROWS, cols: 256, ..Room::default() }).unwrap();
        let [mut x, other] = [(); 2].map(|()| backend.upload(&random.vector(ROWS * 256)).unwrap());
        let norm = Norm { weight: backend.upload(&random.vector(256)).unwrap(), eps: 1e-6 };
        let all = [First::Nothing, First::Norm(&norm), First::AddNorm(&other, &norm), First::Gate(Gate::Silu, &other)];
        all.map(|first| {
            let mut out = backend.buffer(ROWS * 21).unwrap();
            let product = Product { weight: &weight, bias: None, out: &mut out };
            backend.matmul(Input { x: &mut x, rows: ROWS, first }, [product]);
            out.to_vec()
        })
    };
    for dtype in DTYPES {
        for isa in Isa::testable() {
            assert_eq!(product(isa, dtype), product(Isa::Portable, dtype), "{dtype:?} {}", isa.name());
        }
    }
}

#[test]
fn instruction_sets_store_and_attend_alike_to_the_bit() {
    let run = |isa: Isa, dtype: KvDtype, head_dim: u32| {
        let group = KvGroup { layers: vec![0], planes: 2, kv_heads: 2, head_dim, window: None, sinks: 0 };
        let layout = KvLayout { version: 1, model: 0, dtype, block_size: 16, groups: vec![group] };
        let factory = Cpu(CpuOptions { threads: 1, isa, pinned: false });
        let mut backend = factory.make(&PoolGeometry::uniform(layout, 3));
        let (mut random, tokens, dim) = (Random(4), 45, head_dim as usize);
        let mut rows = |heads: usize, factor: f32| -> Vec<f32> {
            random.vector(tokens * heads * dim).into_iter().map(|x| x * factor).collect()
        };
        let (q, k, mut v, angles) = (rows(6, 1.0), rows(2, 1.0), rows(2, 30.0), rows(1, 1.0));
        // A row without a finite number is stored as something, and the same something.
        v[7 * dim..8 * dim].fill(f32::NAN);
        let mut out = backend.buffer(q.len()).unwrap();
        let [mut q, k, v, cos, sin] = [&q, &k, &v, &angles, &angles].map(|x| backend.upload(x).unwrap());
        let rope = Rope { cos, sin };
        let shape = AttentionShape { group: 0, layer: 0, heads: 6, scale: 0.3 };
        let (mut batch, table) = (Ragged::with_capacity(tokens, 3), [BlockId(2), BlockId(0), BlockId(1)]);
        batch.push(0, tokens, &table);
        backend.rope_and_store_kv(shape, &batch, &rope, &mut q, &k, &v);
        backend.attention(shape, &batch, &q, &mut out);
        let blocks: Vec<_> = (0..3).map(|b| factory.block(&backend, 0, 0, BlockId(b))).collect();
        // Which NaN it is may differ.
        let bits =
            |out: &[f32]| -> Vec<_> { out.iter().map(|x| if x.is_nan() { u32::MAX } else { x.to_bits() }).collect() };
        let out = bits(&out);
        // A row alone has few queries, which read K and V in another way.
        let width = 6 * dim;
        let (mut query, mut alone) = (vec![0.0; width], backend.buffer(width).unwrap());
        for position in 0..tokens {
            backend.read(&q, position * width, &mut query);
            let query = backend.upload(&query).unwrap();
            batch.clear();
            batch.push(position, 1, &table);
            backend.attention(shape, &batch, &query, &mut alone);
            let same = bits(&alone) == out[position * width..(position + 1) * width];
            assert!(same, "row {position} alone: {dtype:?} x {head_dim}, {}", isa.name());
        }
        (out, blocks)
    };
    for dtype in KvDtype::ALL {
        for head_dim in [8, 64, 72, 256] {
            let (out, blocks) = run(Isa::Portable, dtype, head_dim);
            for isa in Isa::testable() {
                let got = run(isa, dtype, head_dim);
                assert!(got.1 == blocks, "blocks differ: {dtype:?} x {head_dim}, {}", isa.name());
                assert!(got.0 == out, "attention differs: {dtype:?} x {head_dim}, {}", isa.name());
            }
        }
    }
}

#[test]
fn a_weight_of_the_wrong_size_is_an_error_that_names_it() {
    let group = KvGroup { layers: vec![0], planes: 2, kv_heads: 1, head_dim: 8, window: None, sinks: 0 };
    let layout = KvLayout { version: 1, model: 0, dtype: KvDtype::F16, block_size: 16, groups: vec![group] };
    let mut backend = Cpu(CpuOptions::default()).make(&PoolGeometry::uniform(layout, 2));
    let source = |cols, data: &'static [u8]| WeightSource {
        name: "blk.0.q",
        dtype: baton_types::WeightDtype::Q4_0,
        rows: 8,
        cols,
        data: data.into(),
        row_order: None,
    };
    for error in [backend.weight(&source(33, &[])).err(), backend.weight(&source(32, &[0; 143])).err()] {
        assert!(error.unwrap().to_string().contains("blk.0.q"));
    }
}
