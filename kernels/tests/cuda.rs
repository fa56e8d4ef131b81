//! The conformance suite on the GPU backend with its kernels compiled for the host, under a recorder that checks every access.

#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use baton_kernels::conformance::{Factory, Long, Promises, Random, run};
use baton_kernels::cuda::{
    CudaBackend, CudaOptions, Fp8, HostDevice, Memory, Nowhere, Recorded, Recorder, product_weight_bytes,
};
use baton_kernels::{
    AttentionShape, Backend, CpuBackend, CpuOptions, Draw, First, HostPool, Input, KernelError, Product, Ragged, Room,
    Rope, StepInputs, WeightSource,
};
use baton_types::{
    BlockId, KvDtype, KvGroup, KvLayout, PoolGeometry, SamplingParams, Seeded, SeededRows, WeightData, WeightDtype,
};

type Device = Recorder<HostDevice>;

struct Host {
    device: Arc<Device>,
    options: CudaOptions,
}

impl Factory for Host {
    type Backend = CudaBackend<Device>;

    fn make(&self, geometry: &PoolGeometry) -> CudaBackend<Device> {
        CudaBackend::new(Arc::clone(&self.device), geometry.clone(), self.options).unwrap()
    }

    fn block(&self, backend: &Self::Backend, group: usize, layer_in_group: usize, block: BlockId) -> Vec<u8> {
        backend.block_bytes(group, layer_in_group, block).unwrap()
    }

    fn promises(&self) -> Promises {
        Promises::of_gpu(self.options)
    }

    fn serves(&self, layout: &KvLayout) -> bool {
        CudaBackend::<Device>::check(&PoolGeometry::uniform(layout.clone(), 1)).is_ok()
    }

    /// A turn takes its time here: six of them, more than a ring has stages, and three splits.
    fn long(&self) -> Long {
        Long { behind: 660, chunk: 40, window: 150 }
    }
}

fn conforms(options: CudaOptions) {
    let Some(device) = HostDevice::for_tests() else { return };
    let device = Arc::new(Recorder::new(device));
    run(&Host { device: Arc::clone(&device), options });
    assert_eq!(device.problems(), [""; 0]);
    assert_eq!(device.live_bytes(), 0, "all memory was given back");
}

#[test]
fn kernels_conform() {
    conforms(CudaOptions { invariant: false, ..CudaOptions::default() });
}

/// Weights and rows of E4M3.
fn conforms_with_8_bit_floats(fp8: Fp8) {
    let Some(device) = HostDevice::for_tests() else { return };
    let device = Arc::new(Recorder::new(device.with_fp8(fp8)));
    let options = CudaOptions { invariant: true, fp8: true, ..CudaOptions::default() };
    run(&Host { device: Arc::clone(&device), options });
    let log = device.take_log();
    assert_eq!(device.problems(), [""; 0]);
    assert_eq!(device.live_bytes(), 0, "all memory was given back");
    assert!(log.contains(&Recorded::Launch("baton_quantise_rows")));
}

#[test]
#[ignore = "takes a minute, and products of 8-bit floats have tests of their own: just soak"]
fn kernels_conform_with_products_of_8_bit_floats_that_the_device_scales() {
    conforms_with_8_bit_floats(Fp8::Scaled);
}

#[test]
#[ignore = "differs from the one before in a kernel that has a test of its own: just soak"]
fn kernels_conform_with_products_of_8_bit_floats_that_a_kernel_scales() {
    conforms_with_8_bit_floats(Fp8::Plain);
}

/// A GPU without such products is refused by what asked for them.
#[test]
fn a_device_without_8_bit_products_is_refused_by_the_setting() {
    let device = Arc::new(Recorder::new(Nowhere::default()));
    let geometry = PoolGeometry::uniform(layout(KvDtype::F16, 64, 0), 4);
    let options = CudaOptions { fp8: true, ..CudaOptions::default() };
    let error = CudaBackend::new(Arc::clone(&device), geometry, options).err().unwrap().to_string();
    assert!(error.contains("compute capability 0.0") && error.contains("set quantization to none"), "{error}");
    assert_eq!(device.live_bytes(), 0);
}

/// One product is one launch more where a device leaves scales to a kernel or there is a bias, and none where neither is so. A matrix
/// whose sizes do not fit stays bf16.
#[test]
fn products_of_8_bit_floats_are_finished_where_the_device_has_not() {
    let Some(_) = HostDevice::for_tests() else { return };
    let launches = |fp8, rows: usize, with_bias: bool| {
        let device = Arc::new(Recorder::new(HostDevice::for_tests().unwrap().with_fp8(fp8)));
        let geometry = PoolGeometry::uniform(layout(KvDtype::F16, 64, 0), 4);
        let options = CudaOptions { fp8: true, ..CudaOptions::default() };
        let mut backend = CudaBackend::new(Arc::clone(&device), geometry, options).unwrap();
        let data: Vec<u8> = Random(7).vector(rows * 32).iter().flat_map(|x| x.to_le_bytes()).collect();
        let source =
            WeightSource { name: "w", dtype: WeightDtype::F32, rows, cols: 32, data: data[..].into(), row_order: None };
        let weight = backend.linear(&source).unwrap();
        assert_eq!(backend.weight_bytes(&weight) as u64, product_weight_bytes(rows, 32, true));
        let (mut x, bias) = (backend.upload(&Random(8).vector(64)).unwrap(), backend.upload(&vec![1.0; rows]).unwrap());
        let mut out = backend.buffer(2 * rows).unwrap();
        device.take_log();
        let bias = with_bias.then_some(&bias);
        let input = Input { x: &mut x, rows: 2, first: First::Nothing };
        backend.matmul(input, [Product { weight: &weight, bias, out: &mut out }]);
        backend.finish().unwrap();
        let log = device.take_log();
        let launched = log.iter().filter_map(|call| match call {
            Recorded::Launch(name) => Some(*name),
            _ => None,
        });
        let names: Vec<_> = launched.collect();
        let mut got = vec![0.0; 2 * rows];
        backend.read(&out, 0, &mut got);
        (names, got)
    };
    let (quantise, scale) = ("baton_quantise_rows", "baton_scale_products");
    let (names, plain) = launches(Fp8::Plain, 48, false);
    assert_eq!(names, [quantise, scale]);
    let (names, scaled) = launches(Fp8::Scaled, 48, false);
    assert_eq!(names, [quantise]);
    assert_eq!(plain, scaled, "the same scales by either way");
    assert_eq!(launches(Fp8::Scaled, 48, true).0, [quantise, scale]);
    assert_eq!(launches(Fp8::Plain, 48, true).1, launches(Fp8::Scaled, 48, true).1);
    assert_eq!(launches(Fp8::Plain, 40, true).0, ["baton_embed"], "40 is no multiple of 16");
    assert_eq!([product_weight_bytes(48, 32, true), product_weight_bytes(40, 32, true)], [48 * 36, 40 * 64]);
}

/// I1: not a bit depends on how a prompt is cut.
#[test]
fn kernels_conform_when_chunks_and_decode_rows_must_agree() {
    conforms(CudaOptions { invariant: true, ..CudaOptions::default() });
}

/// As on devices without Hopper's units.
#[test]
fn kernels_conform_without_those_for_hopper() {
    conforms(CudaOptions { invariant: true, hopper: false, ..CudaOptions::default() });
}

fn layout(dtype: KvDtype, head_dim: u32, sinks: u32) -> KvLayout {
    let group = KvGroup { layers: vec![0], planes: 2, kv_heads: 1, head_dim, window: Some(32), sinks };
    KvLayout { version: 1, model: 0, dtype, block_size: 16, groups: vec![group] }
}

fn nowhere(layout: KvLayout) -> Result<CudaBackend<Recorder<Nowhere>>, KernelError> {
    let device = Arc::new(Recorder::new(Nowhere::default()));
    CudaBackend::new(device, PoolGeometry::uniform(layout, 4), CudaOptions::default())
}

#[test]
fn a_pool_that_no_kernel_serves_is_refused_by_what_asked_for_it() {
    for (layout, named) in [
        (layout(KvDtype::Int4, 64, 0), "Int4; set kv_type"),
        (layout(KvDtype::F32, 64, 0), "F32; set kv_type"),
        (layout(KvDtype::F16, 64, 16), "attention_window"),
        (layout(KvDtype::F16, 512, 0), "head dimension 512"),
        (KvLayout { block_size: 8, ..layout(KvDtype::F16, 64, 0) }, "block size 8"),
    ] {
        let error = nowhere(layout).err().unwrap().to_string();
        assert!(error.contains(named), "{error}");
    }
}

/// What fails is told once, when the step ends; nothing is tried after it.
#[test]
fn an_operation_that_fails_is_told_when_the_step_is_finished() {
    let mut backend = nowhere(layout(KvDtype::F16, 64, 0)).unwrap();
    let mut x = backend.buffer(16).unwrap();
    let y = backend.buffer(16).unwrap();
    backend.device().refuse("baton_add");
    backend.add(&mut x, &y, 16);
    backend.device().take_log();
    backend.gather_rows(&y, 8, &[1, 0], &mut x);
    backend.read(&x, 0, &mut [0.0; 4]);
    assert_eq!(backend.device().take_log(), []);
    let error = backend.finish().unwrap_err();
    assert!(matches!(&error, KernelError::Device { operation, .. } if operation == "baton_add"), "{error}");
    backend.gather_rows(&y, 8, &[1, 0], &mut x);
    assert!(backend.finish().is_ok());
}

/// Of weights of a seed nothing crosses from the host: neither of bf16 nor of fp8, neither alone nor together.
#[test]
fn weights_of_a_seed_are_made_on_the_device() {
    for fp8 in [false, true] {
        let Some(host) = HostDevice::for_tests() else { return };
        let device = Arc::new(Recorder::new(host));
        let geometry = PoolGeometry::uniform(layout(KvDtype::F16, 64, 0), 4);
        let options = CudaOptions { fp8, ..CudaOptions::default() };
        let mut backend = CudaBackend::new(Arc::clone(&device), geometry, options).unwrap();
        let values = Seeded { key: 1, middle: 0.0, spread: 1.0 };
        let data = WeightData::Seeded(SeededRows { values, first: 0, stride: 64 });
        let source = WeightSource { name: "w", dtype: WeightDtype::Bf16, rows: 32, cols: 64, data, row_order: None };
        device.take_log();
        backend.weight(&source).unwrap();
        backend.linears([&source, &source]).unwrap();
        backend.finish().unwrap();
        let log = device.take_log();
        assert!(!log.iter().any(|call| matches!(call, Recorded::Write(_))), "{log:?}");
        let made = log.iter().filter(|call| **call == Recorded::Launch("baton_seeded_rows")).count();
        let quantised = log.iter().filter(|call| **call == Recorded::Launch("baton_quantise_rows")).count();
        assert_eq!((made, quantised), (3, if fp8 { 2 } else { 0 }));
    }
}

/// A weight's rows must be what kernels load together.
#[test]
fn a_weight_of_another_width_is_an_error_that_names_it() {
    let mut backend = nowhere(layout(KvDtype::F16, 64, 0)).unwrap();
    let source = |cols, data: &'static [u8]| WeightSource {
        name: "blk.0.q",
        dtype: WeightDtype::F32,
        rows: 2,
        cols,
        data: data.into(),
        row_order: None,
    };
    for error in [backend.weight(&source(12, &[0; 96])).err(), backend.weight(&source(8, &[0; 63])).err()] {
        assert!(error.unwrap().to_string().contains("blk.0.q"));
    }
}

/// Two layers of one group are given the batch once; decode rows and chunks take their own kernels.
#[test]
fn a_batch_goes_to_the_device_once_and_to_the_kernels_it_is_for() {
    let mut two = layout(KvDtype::F16, 64, 0);
    two.groups[0].layers = vec![0, 1];
    let mut backend = nowhere(two).unwrap();
    let mut batch = Ragged::default();
    batch.push(0, 20, &[BlockId(0), BlockId(1)]);
    batch.push(300, 1, &[BlockId(2); 19]);
    let q = backend.buffer(21 * 128).unwrap();
    let mut out = backend.buffer(21 * 128).unwrap();
    let run = |backend: &mut CudaBackend<Recorder<Nowhere>>, out: &mut _| {
        for layer in 0..2 {
            let shape = AttentionShape { group: 0, layer, heads: 2, scale: 1.0 };
            backend.attention(shape, &batch, &q, out);
        }
        backend.finish().unwrap();
        backend.device().take_log()
    };
    use baton_kernels::cuda::Recorded::{Launch, Write};
    run(&mut backend, &mut out);
    let log = run(&mut backend, &mut out);
    assert!(!log.iter().any(|call| matches!(call, Write(_))), "the same batch again: {log:?}");
    let launches: Vec<_> = log.iter().filter(|call| matches!(call, Launch(_))).collect();
    let of_layer = ["baton_attention_prefill_f16_64", "baton_attention_decode_f16_64"].map(Launch);
    assert_eq!(launches, of_layer.iter().chain(&of_layer).collect::<Vec<_>>());
    assert_eq!(backend.device().problems(), [""; 0]);
}

/// A step of rows of one token each, padded, that adds, attends and gathers.
fn decode_step(
    backend: &mut CudaBackend<Recorder<Nowhere>>,
    positions: &[usize],
    buffers: &mut [Memory<Recorder<Nowhere>>; 2],
) {
    let rows = backend.padded(positions.len(), 8).unwrap();
    let mut batch = Ragged::default();
    positions.iter().for_each(|&start| batch.push(start, 1, &vec![BlockId(0); start / 16 + 1]));
    batch.pad_to(rows);
    let all: Vec<u32> = (0..rows as u32).collect();
    let batches = std::slice::from_ref(&batch);
    let inputs = StepInputs { ids: &all, sampled: &all, batches, heads: 2, padded: true, draws: &[] };
    let [q, out] = buffers;
    backend.step(&inputs, |backend| {
        backend.add(q, out, 8);
        backend.attention(AttentionShape { group: 0, layer: 0, heads: 2, scale: 1.0 }, &batch, q, out);
        backend.gather_rows(q, 128, &all, out);
    });
}

fn for_graphs() -> (CudaBackend<Recorder<Nowhere>>, [Memory<Recorder<Nowhere>>; 2]) {
    let mut backend = nowhere(layout(KvDtype::F16, 64, 0)).unwrap();
    let room = Room { rows: 8, cols: 128, heads: 2, context: 2048, table_entries: 1024, samples: 8, vocab: 64 };
    backend.reserve(&room).unwrap();
    let buffers = [(); 2].map(|()| backend.buffer(8 * 128).unwrap());
    backend.device().take_log();
    (backend, buffers)
}

/// A size is done as it is, then captured, then replayed after one copy, however long its rows are; another number of rows is another graph.
#[test]
fn a_decode_step_of_a_size_that_was_there_is_one_launch() {
    use baton_kernels::cuda::Recorded::{
        Allocate, BeginCapture, EndCapture, Forget, Launch, Record, Replay, Settle, Write,
    };
    let (mut backend, mut buffers) = for_graphs();
    let mut log = |backend: &mut CudaBackend<Recorder<Nowhere>>, positions: &[usize]| {
        decode_step(backend, positions, &mut buffers);
        backend.finish().unwrap();
        let log = backend.device().take_log();
        assert!(!log.iter().any(|call| matches!(call, Allocate(_))), "{log:?}");
        log
    };
    let count = |log: &[Recorded], what: fn(&Recorded) -> bool| log.iter().filter(|call| what(call)).count();
    let first = log(&mut backend, &[40, 3, 17]);
    assert_eq!(count(&first, |call| matches!(call, Launch(_))), 3, "{first:?}");
    let second = log(&mut backend, &[41, 4, 18]);
    assert!(matches!(second[..4], [Write(_), Record(..), BeginCapture(_), Launch("baton_add")]), "{second:?}");
    assert!(matches!(second[6..8], [EndCapture(_), Replay(_)]), "{second:?}");
    for positions in [[42, 5, 19, 200], [256, 0, 0, 1], [2047, 700, 2, 3]] {
        let log = log(&mut backend, &positions);
        assert!(matches!(log[..], [Settle(_), Write(_), Record(..), Replay(_), Recorded::Synchronise(_)]), "{log:?}");
    }
    assert_eq!(count(&log(&mut backend, &[1; 5]), |call| matches!(call, Launch(_))), 3);
    assert!(matches!(log(&mut backend, &[0; 4])[..], [Settle(_), Write(_), Record(..), Replay(_), _]));
    let device = Arc::clone(backend.device());
    drop((backend, buffers));
    assert_eq!(count(&device.take_log(), |call| matches!(call, Forget(_))), 1);
    assert_eq!((device.problems(), device.live_graphs(), device.live_bytes()), (Vec::new(), 0, 0));
}

/// A graph gives the bits of single launches while its rows grow from one split to several, whether or not memory was reserved for that.
#[test]
fn a_graph_attends_to_rows_that_grow() {
    for reserved in [false, true] {
        let Some(host) = HostDevice::for_tests() else { return };
        let device = Arc::new(Recorder::new(host));
        let mut layout = layout(KvDtype::F16, 64, 0);
        layout.groups[0].window = None;
        let geometry = PoolGeometry::uniform(layout, 63);
        let mut backend = CudaBackend::new(Arc::clone(&device), geometry, CudaOptions::default()).unwrap();
        let tables: [Vec<BlockId>; 2] = [(0..44).map(BlockId).collect(), (44..63).map(BlockId).collect()];
        let (mut random, rows) = (Random(9), 704 + 304);
        let mut floats = |count: usize| backend.upload(&random.vector(count)).unwrap();
        let (mut q, k, v) = (floats(rows * 128), floats(rows * 64), floats(rows * 64));
        let rope = Rope { cos: floats(704 * 32), sin: floats(704 * 32) };
        let shape = AttentionShape { group: 0, layer: 0, heads: 2, scale: 0.1 };
        let mut prompt = Ragged::default();
        prompt.push(0, 704, &tables[0]);
        prompt.push(0, 304, &tables[1]);
        backend.rope_and_store_kv(shape, &prompt, &rope, &mut q, &k, &v);
        if reserved {
            let room = Room { rows: 4, cols: 128, heads: 2, context: 704, table_entries: 108, samples: 4, vocab: 64 };
            backend.reserve(&room).unwrap();
        }
        let [mut out, mut single] = [(); 2].map(|()| backend.buffer(4 * 128).unwrap());
        device.take_log();
        let steps = [[254, 9, 3], [255, 10, 4], [256, 255, 5], [257, 256, 6], [512, 257, 255], [703, 303, 256]];
        for positions in steps {
            let mut batch = Ragged::default();
            for (start, table) in positions.into_iter().zip([&tables[0], &tables[1], &tables[0]]) {
                batch.push(start, 1, &table[..start / 16 + 1]);
            }
            backend.attention(shape, &batch, &q, &mut single);
            batch.pad_to(backend.padded(3, 8).unwrap());
            let (all, batches) = ([0, 1, 2, 3], std::slice::from_ref(&batch));
            let inputs = StepInputs { ids: &all, sampled: &all, batches, heads: 2, padded: true, draws: &[] };
            backend.step(&inputs, |backend| backend.attention(shape, &batch, &q, &mut out));
            let mut got = [[0.0f32; 3 * 128]; 2];
            backend.read(&out, 0, &mut got[0]);
            backend.read(&single, 0, &mut got[1]);
            backend.finish().unwrap();
            assert!(got[0].iter().all(|x| x.is_finite()) && got[0] == got[1], "{positions:?}");
        }
        let replays = device.take_log().iter().filter(|call| matches!(call, Recorded::Replay(_))).count();
        assert!(if reserved { replays == steps.len() - 1 } else { replays > 0 }, "{replays}");
        drop((backend, q, k, v, rope, out, single));
        assert_eq!((device.problems(), device.live_bytes()), (Vec::new(), 0));
    }
}

/// A step is put behind another before that is collected, and each is collected in its turn by its own event.
#[test]
fn steps_are_submitted_behind_each_other_and_collected_in_turn() {
    use baton_kernels::cuda::Recorded::{Read, Record, Settle};
    let (mut backend, mut buffers) = for_graphs();
    let mut logits = backend.buffer(8 * 64).unwrap();
    let params = SamplingParams::default();
    let draw = |row| Draw { row, params: &params, index: 0, mask: None, changes: &[] };
    let mut submit = |backend: &mut CudaBackend<Recorder<Nowhere>>, draws: &[Draw<'_>]| {
        decode_step(backend, &[40], &mut buffers);
        backend.draw(&mut logits, 64, draws);
        backend.device().take_log();
        backend.submit().unwrap();
        backend.device().take_log()
    };
    let first = submit(&mut backend, &[draw(0), draw(1)]);
    let [Read(bytes), Record(one, _)] = first[..] else { panic!("{first:?}") };
    assert_eq!(bytes, 2 * 176, "one copy back, of what was drawn");
    let second = submit(&mut backend, &[]);
    let [Record(two, _)] = second[..] else { panic!("{second:?}") };
    assert!(backend.overlaps() && one != two);
    backend.collect().unwrap();
    assert_eq!(backend.device().take_log(), [Settle(one)]);
    assert!(backend.drawn(1, 5, None).failed.is_none() && backend.drawn(2, 5, None).failed.is_some());
    backend.collect().unwrap();
    assert_eq!(backend.device().take_log(), [Settle(two)]);
    assert!(backend.collect().is_err());
    // What went wrong with one step is told of that one.
    submit(&mut backend, &[draw(0)]);
    backend.device().refuse("baton_add");
    let mut others = [(); 2].map(|()| backend.buffer(8 * 128).unwrap());
    decode_step(&mut backend, &[40, 41], &mut others);
    assert!(backend.submit().unwrap_err().to_string().contains("baton_add"));
    backend.collect().unwrap();
    assert!(backend.collect().is_err(), "there was nothing to collect of that one");
    assert_eq!(backend.device().problems(), [""; 0]);
}

/// Memory that goes takes the graphs with it.
#[test]
fn a_graph_is_not_launched_when_memory_has_gone() {
    let (mut backend, mut buffers) = for_graphs();
    (0..3).for_each(|_| decode_step(&mut backend, &[1], &mut buffers));
    buffers[1] = backend.buffer(8 * 128).unwrap();
    backend.device().take_log();
    decode_step(&mut backend, &[1], &mut buffers);
    backend.finish().unwrap();
    let log = backend.device().take_log();
    assert!(!log.iter().any(|call| matches!(call, Recorded::Replay(_))), "{log:?}");
    assert_eq!((backend.device().problems(), backend.device().live_graphs()), (Vec::new(), 0));
}

/// A step that cannot be captured is done all the same, and no other is tried.
#[test]
fn what_cannot_be_captured_is_done_as_it_is() {
    let (mut backend, mut buffers) = for_graphs();
    decode_step(&mut backend, &[1], &mut buffers);
    backend.device().refuse_captured("baton_add");
    for _ in 0..3 {
        backend.device().take_log();
        decode_step(&mut backend, &[1], &mut buffers);
        backend.finish().unwrap();
        let log = backend.device().take_log();
        assert!(log.ends_with(&[Recorded::Launch("baton_embed"), log[log.len() - 1].clone()]), "{log:?}");
        assert!(!log.iter().any(|call| matches!(call, Recorded::Replay(_))), "{log:?}");
    }
    assert!(backend.graphs_refused().unwrap().to_string().contains("baton_add"));
    assert_eq!(backend.device().live_graphs(), 0);
}

/// Nothing to compute is nothing to launch.
#[test]
fn an_empty_batch_launches_nothing() {
    let mut backend = nowhere(layout(KvDtype::F16, 64, 0)).unwrap();
    let data = [0; 8 * 8 * 4];
    let weight =
        WeightSource { name: "w", dtype: WeightDtype::F32, rows: 8, cols: 8, data: data[..].into(), row_order: None };
    let weight = backend.weight(&weight).unwrap();
    let (mut x, mut out) = (backend.buffer(0).unwrap(), backend.buffer(0).unwrap());
    backend.device().take_log();
    let input = Input { x: &mut x, rows: 0, first: First::Nothing };
    backend.matmul(input, [Product { weight: &weight, bias: None, out: &mut out }]);
    backend.attention(AttentionShape { group: 0, layer: 0, heads: 1, scale: 1.0 }, &Ragged::default(), &x, &mut out);
    backend.finish().unwrap();
    let log = backend.device().take_log();
    use baton_kernels::cuda::Recorded::{Launch, Product as Multiply};
    assert!(!log.iter().any(|call| matches!(call, Launch(_) | Multiply(..))), "{log:?}");
}

/// Over a pool in host memory a GPU stores the bytes that the CPU does, and they are there once they are published.
#[test]
fn a_pool_on_the_host_gets_the_bytes_that_the_cpu_stores() {
    let Some(host) = HostDevice::for_tests() else { return };
    let device = Arc::new(Recorder::new(host));
    for dtype in [KvDtype::F16, KvDtype::Bf16, KvDtype::Q8, KvDtype::Fp8] {
        let geometry = PoolGeometry::uniform(layout(dtype, 24, 0), 3);
        let pools = [(); 2].map(|()| Arc::new(HostPool::in_memory(geometry.clone()).unwrap()));
        let [cpu, gpu] = [Arc::clone(&pools[0]), Arc::clone(&pools[1])];
        store_three_blocks(CpuBackend::new(CpuOptions::default(), cpu).unwrap());
        device.take_log();
        store_three_blocks(CudaBackend::over(Arc::clone(&device), gpu, CudaOptions::default()).unwrap());
        for block in (0..3).map(BlockId) {
            let [want, got] = [&pools[0], &pools[1]].map(|pool| pool.block_bytes(0, 0, block));
            assert!(got == want, "{dtype:?}, {block}");
        }
        let log = device.take_log();
        let at = |what: fn(&Recorded) -> bool| log.iter().rposition(what);
        let waited = at(|call| matches!(call, Recorded::Synchronise(_)));
        assert!(
            at(|call| matches!(call, Recorded::Launch(_))) < waited && waited < at(|call| *call == Recorded::Unmap),
            "{log:?}"
        );
    }
    assert_eq!(device.problems(), [""; 0]);
    assert_eq!(device.live_bytes(), 0);
}

/// Two sequences, one of a block and a half, one of a block.
fn store_three_blocks<B: Backend>(mut backend: B) {
    let mut random = Random(5);
    let mut rows = |floats: usize| backend.upload(&random.vector(floats)).unwrap();
    let (mut q, k, v) = (rows(44 * 48), rows(44 * 24), rows(44 * 24));
    let rope = Rope { cos: rows(64 * 12), sin: rows(64 * 12) };
    let mut batch = Ragged::default();
    batch.push(0, 28, &[BlockId(2), BlockId(0)]);
    batch.push(0, 16, &[BlockId(1)]);
    let shape = AttentionShape { group: 0, layer: 0, heads: 2, scale: 1.0 };
    backend.rope_and_store_kv(shape, &batch, &rope, &mut q, &k, &v);
    backend.publish();
    backend.finish().unwrap();
}
