//! Products, and what comes first with their rows.

use baton_types::{BlockId, KvDtype, Seeded, SeededRows, WeightData, WeightDtype};

use super::{DTYPES, Factory, Promises, Random, attention, close, geometry, random_weight, read};
use crate::backend::{AttentionShape, Backend, First, Gate, Input, Norm, Product, Ragged, Room};
use crate::cpu::element;
use crate::{RowOrder, WeightSource};

pub(super) fn run<F: Factory>(factory: &F) {
    matmul(factory);
    seeded(factory);
    products(factory);
    gates(factory);
    together(factory);
    attended(factory);
}

/// Products of every type against f64; rows alone and in any batch give the same bits.
fn matmul<F: Factory>(factory: &F) {
    let mut backend = factory.make(&geometry(KvDtype::F16, 1, 8, None, 16));
    let mut random = Random(1);
    let Promises { operands, linear, .. } = factory.promises();
    for dtype in DTYPES {
        for (outs, cols, only_products) in [(8, 256, false), (37, 512, false), (3, 256, false), (48, 256, true)] {
            let data = random_weight(dtype, outs, cols, &mut random);
            let order = |i: usize| (i * 5 + 1) % outs;
            let row_order: Option<RowOrder<'_>> = if outs == 37 { Some(&order) } else { None };
            let source = WeightSource { name: "w", dtype, rows: outs, cols, data: data[..].into(), row_order };
            let weight = if only_products { backend.linear(&source) } else { backend.weight(&source) }.expect("weight");
            let operands = if only_products { linear } else { operands };
            let rows = 13;
            backend.reserve(&Room { rows, cols, ..Room::default() }).expect("reserve");
            let x = random.vector(rows * cols);
            let bias = random.vector(outs);
            let (mut input, bias_buffer) = (backend.upload(&x).expect("x"), backend.upload(&bias).expect("bias"));
            let mut out = backend.buffer(rows * outs).expect("out");
            let (w, bias_of_all) = (&weight, Some(&bias_buffer));
            let product = Product { weight: w, bias: bias_of_all, out: &mut out };
            backend.matmul(Input { x: &mut input, rows, first: First::Nothing }, [product]);
            let got = read(&mut backend, &out, rows * outs);
            let stored = dtype.row_bytes(cols).expect("row bytes");
            let mut tolerance = vec![0.0f64; outs];
            let mut want = Vec::new();
            for t in 0..rows {
                for o in 0..outs {
                    let at = row_order.map_or(o, |f| f(o));
                    let row = &data[at * stored..][..stored];
                    let (mut sum, mut magnitude) = (bias[o] as f64, 0.0f64);
                    for k in 0..cols {
                        let w = element(dtype, row, k) as f64;
                        sum += w * x[t * cols + k] as f64;
                        magnitude += w * w;
                    }
                    want.push(sum);
                    // Rounding activations in [-1, 1] to 8 bits: uniform errors below 1/254 that do not conspire.
                    let step = if dtype.block_elements() > 1 { 6.0 / 254.0 } else { 1e-5 };
                    // Both operands' rounding likewise.
                    tolerance[o] = magnitude.sqrt() * f64::max(step, 3.0 * operands);
                }
            }
            for (i, (&g, &w)) in got.iter().zip(&want).enumerate() {
                assert!(
                    (g as f64 - w).abs() <= tolerance[i % outs] + 1e-5,
                    "{dtype:?} {outs}x{cols} [{i}]: {g}, reference {w}"
                );
            }
            for (first, count) in [(0, 1), (1, 2), (5, 7), (12, 1)] {
                let mut part = backend.upload(&x[first * cols..][..count * cols]).expect("part");
                let mut out = backend.buffer(count * outs).expect("out");
                let product = Product { weight: w, bias: bias_of_all, out: &mut out };
                backend.matmul(Input { x: &mut part, rows: count, first: First::Nothing }, [product]);
                let alone = read(&mut backend, &out, count * outs);
                assert_eq!(alone, got[first * outs..][..count * outs], "I1: {dtype:?} rows {first}+{count}");
            }
            if only_products {
                continue;
            }
            let mut embedded = backend.buffer(cols).expect("embedded");
            backend.embed(&weight, &[outs as u32 - 1], 2.0, &mut embedded);
            let at = row_order.map_or(outs - 1, |f| f(outs - 1));
            let want: Vec<f64> =
                (0..cols).map(|k| 2.0 * element(dtype, &data[at * stored..][..stored], k) as f64).collect();
            close("embed", &read(&mut backend, &embedded, cols), &want, f64::max(1e-6, operands));
        }
    }
}

/// What a seed makes is, bit for bit, what is stored when it has been made: parts of a tensor, alone and together, as tables and for products.
fn seeded<F: Factory>(factory: &F) {
    let mut backend = factory.make(&geometry(KvDtype::F16, 1, 8, None, 16));
    let (rows, cols, count, order) = (48, 256, 5, |i: usize| i ^ 1);
    backend.reserve(&Room { rows: count, cols, ..Room::default() }).expect("reserve");
    let x = Random(5).vector(count * cols);
    let values = Seeded { key: 11, middle: 0.0, spread: 0.1 };
    for (first, stride, row_order) in [(0, cols, false), (3, cols + 13, false), (8 * cols as u64, 2 * cols, true)] {
        let row_order: Option<RowOrder<'_>> = if row_order { Some(&order) } else { None };
        let made = SeededRows { values, first, stride };
        let data = WeightData::Seeded(made);
        let of_seed = WeightSource { name: "w", dtype: WeightDtype::Bf16, rows, cols, data, row_order };
        let mut bytes = vec![0; rows * cols * 2];
        bytes.chunks_mut(cols * 2).enumerate().for_each(|(row, out)| made.fill_row(row, out));
        let stored = WeightSource { data: bytes[..].into(), ..of_seed.clone() };
        let mut results = Vec::new();
        for source in [&of_seed, &stored] {
            let table = backend.weight(source).expect("table");
            let [alone, after] = backend.linears([source, source]).expect("matrices");
            let (mut embedded, mut got) = (backend.buffer(cols).expect("embedded"), Vec::new());
            backend.embed(&table, &[rows as u32 - 1], 1.0, &mut embedded);
            got.extend(read(&mut backend, &embedded, cols));
            for weight in [&table, &alone, &after] {
                let (mut input, mut out) = (backend.upload(&x).expect("x"), backend.buffer(count * rows).expect("out"));
                let product = Product { weight, bias: None, out: &mut out };
                backend.matmul(Input { x: &mut input, rows: count, first: First::Nothing }, [product]);
                got.extend(read(&mut backend, &out, count * rows));
            }
            results.push(got);
        }
        assert!(results[0] == results[1], "from {first} on, {stride} from row to row");
        assert!(results[0].iter().any(|&x| x != 0.0), "something was computed");
    }
}

/// Products of one input have the bits of each product alone, of what comes first done before.
fn products<F: Factory>(factory: &F) {
    let mut backend = factory.make(&geometry(KvDtype::F16, 1, 8, None, 16));
    let mut random = Random(3);
    let cols = 256;
    let quantised = [(WeightDtype::Q4K, 40), (WeightDtype::Q6K, 24), (WeightDtype::Q8_0, 8)];
    let dense = [(WeightDtype::F16, 40), (WeightDtype::F32, 9), (WeightDtype::Bf16, 8)];
    let even = [(WeightDtype::Q4K, 48), (WeightDtype::F32, 32), (WeightDtype::Q8_0, 24)];
    for of in [quantised, dense, [quantised[0], dense[0], quantised[2]], even] {
        let weights = of.map(|(dtype, rows)| {
            let data = random_weight(dtype, rows, cols, &mut random);
            backend
                .linear(&WeightSource { name: "w", dtype, rows, cols, data: data[..].into(), row_order: None })
                .expect("weight")
        });
        let norm = Norm { weight: backend.upload(&random.vector(cols)).expect("norm"), eps: 1e-5 };
        for rows in [1, 3, 70] {
            backend.reserve(&Room { rows, cols, ..Room::default() }).expect("reserve");
            let (x, y) = (random.vector(rows * cols), random.vector(rows * cols));
            let other = backend.upload(&y).expect("y");
            for first in [First::Nothing, First::Norm(&norm), First::AddNorm(&other, &norm)] {
                let buffer = |backend: &F::Backend, i: usize| backend.buffer(rows * of[i].1).expect("out");
                let mut before = backend.upload(&x).expect("before");
                if first.beside().is_some() {
                    backend.add(&mut before, &other, rows * cols);
                }
                let sums = read(&mut backend, &before, rows * cols);
                if first.norm().is_some() {
                    backend.rms_norm(&norm, &mut before, rows);
                }
                let mut input = backend.upload(&x).expect("x");
                let [mut a, mut b, mut c] = [0, 1, 2].map(|i| buffer(&backend, i));
                let outs = [(&weights[0], &mut a), (&weights[1], &mut b), (&weights[2], &mut c)];
                let products = outs.map(|(weight, out)| Product { weight, bias: None, out });
                backend.matmul(Input { x: &mut input, rows, first }, products);
                assert_eq!(read(&mut backend, &input, rows * cols), sums, "what is added stays, and nothing else");
                for (i, together) in [a, b, c].iter().enumerate() {
                    let mut out = buffer(&backend, i);
                    let product = Product { weight: &weights[i], bias: None, out: &mut out };
                    backend.matmul(Input { x: &mut before, rows, first: First::Nothing }, [product]);
                    let alone = read(&mut backend, &out, rows * of[i].1);
                    assert_eq!(read(&mut backend, together, rows * of[i].1), alone, "I1: {:?}, {rows} rows", of[i]);
                }
            }
        }
    }
}

/// act(x) · up, as a model has it.
fn gated(act: Gate, x: f32, up: f32) -> f64 {
    let (x, up) = (f64::from(x), f64::from(up));
    let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
    up * match act {
        Gate::Silu => x / (1.0 + (-x).exp()),
        Gate::GeluTanh => 0.5 * x * (1.0 + inner.tanh()),
    }
}

/// Gated rows, seen through products with the identity: of all that products read, and of rows alone (I1).
fn gates<F: Factory>(factory: &F) {
    let mut backend = factory.make(&geometry(KvDtype::F16, 1, 8, None, 16));
    let mut random = Random(5);
    let Promises { operands, linear, .. } = factory.promises();
    for (rows, width) in [(1, 16), (3, 64), (17, 48)] {
        backend.reserve(&Room { rows, cols: width, ..Room::default() }).expect("reserve");
        let data: Vec<u8> = (0..width * width).flat_map(|i| f32::from(i % (width + 1) == 0).to_le_bytes()).collect();
        let dtype = WeightDtype::F32;
        let source =
            WeightSource { name: "w", dtype, rows: width, cols: width, data: data[..].into(), row_order: None };
        let identity = backend.weight(&source).expect("weight");
        let products_alone = backend.linear(&source).expect("weight");
        let x: Vec<f32> = random.vector(rows * width).iter().map(|v| v * 8.0).collect();
        let y = random.vector(rows * width);
        for (weight, rounding) in [(&identity, operands), (&products_alone, linear)] {
            for act in [Gate::Silu, Gate::GeluTanh] {
                // What gate and up are, and what comes of them; rows as products leave them.
                let mut through = |first: usize, count: usize| {
                    let mut outputs = backend.outputs(count, [width, width]).expect("outputs");
                    for (out, all) in outputs.iter_mut().zip([&x, &y]) {
                        let mut part = backend.upload(&all[first * width..][..count * width]).expect("rows");
                        let product = Product { weight: &identity, bias: None, out };
                        backend.matmul(Input { x: &mut part, rows: count, first: First::Nothing }, [product]);
                    }
                    let before = outputs.each_ref().map(|rows| read(&mut backend, rows, count * width));
                    let [mut gate, up] = outputs;
                    let mut out = backend.buffer(count * width).expect("out");
                    let product = Product { weight, bias: None, out: &mut out };
                    backend.matmul(Input { x: &mut gate, rows: count, first: First::Gate(act, &up) }, [product]);
                    assert_eq!(read(&mut backend, &up, count * width), before[1], "what gates is written");
                    (before, read(&mut backend, &out, count * width))
                };
                let ([gate, up], got) = through(0, rows);
                let want: Vec<f64> = gate.iter().zip(&up).map(|(&x, &y)| gated(act, x, y)).collect();
                // A row of few bits is as exact as its largest element.
                let largest = want.iter().fold(1.0, |largest: f64, w| largest.max(w.abs()));
                close("gate", &got, &want, f64::max(2e-6, rounding * largest));
                let (_, last) = through(rows - 1, 1);
                assert_eq!(last, got[(rows - 1) * width..], "I1: a gated row alone");
            }
        }
    }
}

/// Weights and rows that a backend may lay side by side are what they are apart, with and without biases, and nothing is written beside them.
fn together<F: Factory>(factory: &F) {
    let mut backend = factory.make(&geometry(KvDtype::F16, 1, 8, None, 16));
    let mut random = Random(7);
    let (cols, outs, head) = (256, [48, 16, 32], 16);
    backend.reserve(&Room { rows: 5, cols, ..Room::default() }).expect("reserve");
    for dtypes in
        [[WeightDtype::F32; 3], [WeightDtype::Q8_0; 3], [WeightDtype::Bf16, WeightDtype::Q4K, WeightDtype::F16]]
    {
        let data: [_; 3] = std::array::from_fn(|i| random_weight(dtypes[i], outs[i], cols, &mut random));
        let sources: [_; 3] = std::array::from_fn(|i| WeightSource {
            name: "w",
            dtype: dtypes[i],
            rows: outs[i],
            cols,
            data: data[i][..].into(),
            row_order: None,
        });
        let weights = backend.linears(sources.each_ref()).expect("weights");
        let apart = sources.each_ref().map(|source| backend.linear(source).expect("weight"));
        let [bias, other_bias] = [outs[0], outs[2]].map(|len| backend.upload(&random.vector(len)).expect("bias"));
        let norm = Norm { weight: backend.upload(&random.vector(head)).expect("norm"), eps: 1e-5 };
        let x = random.vector(5 * cols);
        for (rows, bias) in [(5, None), (1, None), (5, Some(&bias))] {
            let mut input = backend.upload(&x[..rows * cols]).expect("x");
            let mut side = backend.outputs(5, outs).expect("outputs");
            let mut own = outs.map(|width| backend.buffer(5 * width).expect("buffer"));
            for (weights, into) in [(&weights, &mut side), (&apart, &mut own)] {
                let [a, b, c] = into;
                let of =
                    [(&weights[0], bias, a), (&weights[1], None, b), (&weights[2], bias.and(Some(&other_bias)), c)];
                let products = of.map(|(weight, bias, out)| Product { weight, bias, out });
                backend.matmul(Input { x: &mut input, rows, first: First::Nothing }, products);
                backend.rms_norm(&norm, &mut into[0], rows * outs[0] / head);
            }
            for (i, (side, own)) in side.iter().zip(&own).enumerate() {
                assert_eq!(backend.elements(side), 5 * outs[i]);
                // Products of other sizes may be done another way; units for 8 bits keep fewer bits of their sums.
                let Promises { operands, linear, .. } = factory.promises();
                let far = if linear > operands { linear / 16.0 } else { 1e-4 };
                let (got, want) = (read(&mut backend, side, 5 * outs[i]), read(&mut backend, own, 5 * outs[i]));
                let want: Vec<f64> = want.into_iter().map(f64::from).collect();
                close(&format!("side by side, {i} of {dtypes:?}, {rows} rows"), &got, &want, far);
            }
        }
    }
}

/// Attention to memory for products: these have the bits that they have of f32.
fn attended<F: Factory>(factory: &F) {
    let (dim, heads, rows) = (16, 4, 3);
    let mut backend = factory.make(&geometry(KvDtype::F16, 2, dim as u32, None, 16));
    let mut random = Random(11);
    let (width, kv) = (heads * dim, 2 * dim);
    backend.reserve(&Room { rows, cols: width, heads, context: 16, ..Room::default() }).expect("reserve");
    let rope = attention::rope(&backend, 16, dim);
    let mut batch = Ragged::default();
    batch.push(0, rows, &[BlockId(3)]);
    let shape = AttentionShape { group: 0, layer: 1, heads, scale: 0.25 };
    let mut vector = |backend: &F::Backend, width: usize| backend.upload(&random.vector(rows * width)).expect("rows");
    let (mut q, k, v) = (vector(&backend, width), vector(&backend, kv), vector(&backend, kv));
    backend.rope_and_store_kv(shape, &batch, &rope, &mut q, &k, &v);
    let data = random_weight(WeightDtype::F16, 32, width, &mut random);
    let source = WeightSource {
        name: "w",
        dtype: WeightDtype::F16,
        rows: 32,
        cols: width,
        data: data[..].into(),
        row_order: None,
    };
    let weight = backend.linear(&source).expect("weight");
    let attended = [backend.buffer(rows * width), backend.operand(rows * width)].map(|to| to.expect("buffer"));
    let results = attended.map(|mut to| {
        backend.attention(shape, &batch, &q, &mut to);
        let mut out = backend.buffer(rows * 32).expect("out");
        let product = Product { weight: &weight, bias: None, out: &mut out };
        backend.matmul(Input { x: &mut to, rows, first: First::Nothing }, [product]);
        assert_eq!(backend.elements(&to), rows * width);
        (read(&mut backend, &to, rows * width), read(&mut backend, &out, rows * 32))
    });
    let [floats, operands] = results;
    let want: Vec<f64> = floats.0.iter().map(|&x| f64::from(x)).collect();
    close("attention for products", &operands.0, &want, factory.promises().operands);
    assert_eq!(operands.1, floats.1, "products of what attention gave to them");
}
