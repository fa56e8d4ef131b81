//! The conformance suite on the CPU backend: both instruction sets, any number of threads, and the same bits from all.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use baton_kernels::conformance::{DTYPES, Factory, Random, random_weight, run};
use baton_kernels::{Backend, CpuBackend, CpuOptions, HostPool, Isa, WeightSource};
use baton_types::{KvDtype, KvGroup, KvLayout, PoolGeometry};

struct Cpu(CpuOptions);

impl Factory for Cpu {
    type Backend = CpuBackend;
    fn make(&self, geometry: &PoolGeometry) -> CpuBackend {
        let mut memory = vec![0xffu8; geometry.bytes()];
        let (base, bytes) = (memory.as_mut_ptr(), memory.len());
        // SAFETY: the vector lives in the owner; 0xff bytes are NaN in every KV type.
        let pool = unsafe { HostPool::new(base, bytes, geometry.clone(), Arc::new(memory)) }.unwrap();
        CpuBackend::new(self.0, Arc::new(pool)).unwrap()
    }
}

#[test]
fn best_instruction_set_conforms() {
    for threads in [1, 2, 5] {
        run(&Cpu(CpuOptions { threads, isa: Isa::detect() }));
    }
}

#[test]
fn portable_code_conforms() {
    run(&Cpu(CpuOptions { threads: 2, isa: Isa::Portable }));
}

#[test]
fn instruction_sets_agree_to_the_bit() {
    let group = KvGroup { layers: vec![0], planes: 2, kv_heads: 1, head_dim: 8, window: None };
    let layout = KvLayout { version: 1, model: 0, dtype: KvDtype::F16, block_size: 16, groups: vec![group] };
    let geometry = PoolGeometry::uniform(layout, 2);
    let product = |isa: Isa, dtype| {
        let mut backend = Cpu(CpuOptions { threads: 1, isa }).make(&geometry);
        let mut random = Random(9);
        let data = random_weight(dtype, 24, 256, &mut random);
        let source = WeightSource { name: "w", dtype, rows: 24, cols: 256, data: &data, row_order: None };
        let weight = backend.weight(&source).unwrap();
        backend.reserve(5, 256).unwrap();
        let x = backend.upload(&random.vector(5 * 256)).unwrap();
        let mut out = backend.buffer(5 * 24).unwrap();
        backend.matmul(&weight, &x, 5, None, &mut out);
        out
    };
    for dtype in DTYPES {
        assert_eq!(product(Isa::detect(), dtype), product(Isa::Portable, dtype), "{dtype:?}");
    }
}

#[test]
fn a_weight_of_the_wrong_size_is_an_error_that_names_it() {
    let group = KvGroup { layers: vec![0], planes: 2, kv_heads: 1, head_dim: 8, window: None };
    let layout = KvLayout { version: 1, model: 0, dtype: KvDtype::F16, block_size: 16, groups: vec![group] };
    let mut backend = Cpu(CpuOptions::default()).make(&PoolGeometry::uniform(layout, 2));
    let source = |cols, data| WeightSource {
        name: "blk.0.q",
        dtype: baton_types::WeightDtype::Q4_0,
        rows: 8,
        cols,
        data,
        row_order: None,
    };
    for error in [backend.weight(&source(33, &[])).err(), backend.weight(&source(32, &[0; 143])).err()] {
        assert!(error.unwrap().to_string().contains("blk.0.q"));
    }
}
