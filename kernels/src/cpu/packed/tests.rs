use std::os::unix::fs::FileExt;

use baton_types::{KvDtype, KvGroup, KvLayout, PROTOCOL_VERSION, PoolGeometry, WeightDtype};
use rustix::fs::{MemfdFlags, memfd_create};

use super::*;
use crate::conformance::{DTYPES, Random, random_weight};
use crate::{Backend, CpuBackend, CpuOptions, CpuWeight, HostPool, Packed};

/// Weights of a model for tests: name, type, outputs, inputs, data.
type Model = Vec<(String, WeightDtype, usize, usize, Vec<u8>)>;

fn model(shapes: &[(WeightDtype, usize, usize)]) -> Model {
    let mut random = Random(7);
    let made = shapes.iter().enumerate().map(|(i, &(dtype, rows, cols))| {
        (format!("Layer({i}, Q)"), dtype, rows, cols, random_weight(dtype, rows, cols, &mut random))
    });
    made.collect()
}

fn empty() -> File {
    memfd_create("packed", MemfdFlags::CLOEXEC).unwrap().into()
}

/// Takes all weights through a backend.
fn through(packed: Packed, model: &Model) -> Result<(Vec<CpuWeight>, Packed), KernelError> {
    let group = KvGroup { layers: vec![0], planes: 2, kv_heads: 1, head_dim: 8, window: None, sinks: 0 };
    let layout =
        KvLayout { version: PROTOCOL_VERSION, model: 0, dtype: KvDtype::F16, block_size: 16, groups: vec![group] };
    let pool = Arc::new(HostPool::in_memory(PoolGeometry::uniform(layout, 1))?);
    let mut backend = CpuBackend::new(CpuOptions { threads: 1, ..CpuOptions::default() }, pool)?.with_packed(packed);
    let weights = model.iter().map(|(name, dtype, rows, cols, data)| {
        let order = |i: usize| rows - 1 - i;
        let row_order: Option<crate::RowOrder<'_>> = if name.contains('3') { Some(&order) } else { None };
        let (dtype, rows, cols) = (*dtype, *rows, *cols);
        backend.weight(&WeightSource { name, dtype, rows, cols, data: data[..].into(), row_order })
    });
    let weights = weights.collect::<Result<_, _>>()?;
    Ok((weights, backend.into_packed()))
}

fn written(model: &Model) -> (File, Vec<CpuWeight>) {
    let file = empty();
    let writer = PackedWriter::new(file.try_clone().unwrap(), "a model");
    let (weights, Packed::Kept(writer)) = through(Packed::Kept(writer), model).unwrap() else { unreachable!() };
    writer.finish().unwrap();
    (file, weights)
}

fn open(file: &File, identity: &str) -> Result<PackedFile, PackedError> {
    PackedFile::open(file.try_clone().unwrap(), identity)
}

fn same(these: &[CpuWeight], those: &[CpuWeight]) -> bool {
    these.len() == those.len()
        && these
            .iter()
            .zip(those)
            .all(|(a, b)| *a.data == *b.data && (a.form, a.rows, a.cols) == (b.form, b.rows, b.cols))
}

#[test]
fn what_is_read_is_what_was_packed() {
    let mut shapes: Vec<_> = DTYPES.into_iter().map(|dtype| (dtype, 37, 512)).collect();
    // More than a chunk.
    shapes.push((WeightDtype::Bf16, 2500, 2048));
    shapes.push((WeightDtype::F32, 0, 8));
    let model = model(&shapes);
    let (file, packed) = written(&model);
    assert!(file.metadata().unwrap().len() > CHUNK as u64);
    let (anew, _) = through(Packed::Anew, &model).unwrap();
    assert!(same(&packed, &anew), "what is written beside is not changed by it");
    let read = || open(&file, "a model").unwrap();
    let copied = PackedFile { huge_percent: 0, ..read() }.settled().unwrap();
    let shared = PackedFile { huge_percent: 100, ..read() }.settled().unwrap();
    assert!(!copied.is_shared() && shared.is_shared());
    for found in [read(), copied, shared] {
        let (weights, _) = through(Packed::Found(Arc::new(found)), &model).unwrap();
        assert!(same(&weights, &anew));
        assert!(weights.iter().all(|weight| (weight.data.as_ptr() as usize).is_multiple_of(LINE)));
    }
}

#[test]
fn damage_in_any_byte_is_noticed() {
    let (file, _) = written(&model(&[(WeightDtype::Q4_1, 8, 32), (WeightDtype::F16, 3, 8)]));
    let len = file.metadata().unwrap().len();
    assert!(open(&file, "a model").is_ok());
    let mut byte = [0];
    for at in 0..len {
        file.read_exact_at(&mut byte, at).unwrap();
        for wrong in [byte[0] ^ 1, byte[0] ^ 0x80, !byte[0]] {
            file.write_all_at(&[wrong], at).unwrap();
            assert!(matches!(open(&file, "a model"), Err(PackedError::Damaged(_))), "byte {at}");
        }
        file.write_all_at(&byte, at).unwrap();
    }
    assert!(open(&file, "a model").is_ok());
    for shorter in (0..len).rev() {
        file.set_len(shorter).unwrap();
        assert!(matches!(open(&file, "a model"), Err(PackedError::Damaged(_))), "{shorter} of {len} bytes");
    }
    // As after a crash before the bytes were on disk.
    file.set_len(len).unwrap();
    assert!(matches!(open(&file, "a model"), Err(PackedError::Damaged(_))));
}

#[test]
fn a_file_of_something_else_is_not_read() {
    let shapes = [(WeightDtype::Q8_0, 40, 64), (WeightDtype::Q4K, 24, 256)];
    let (file, _) = written(&model(&shapes));
    let foreign = open(&file, "another model").err().unwrap();
    assert!(matches!(&foreign, PackedError::Foreign(found) if found.ends_with("of a model")), "{foreign}");
    let read = Arc::new(open(&file, "a model").unwrap());
    let refused = |other: Model| {
        let error = through(Packed::Found(read.clone()), &other).err().unwrap();
        assert!(matches!(error, KernelError::Packed { .. }), "{error}");
    };
    refused(model(&[(WeightDtype::Q8_0, 48, 64)]));
    refused(model(&[(WeightDtype::Q8_0, 40, 96)]));
    refused(model(&[(WeightDtype::Q4_0, 40, 64)]));
    refused(model(&[shapes[0], shapes[1], shapes[0]]));
    // One weight of the last row, and one of a row in the middle.
    for row in [39, 17] {
        let mut other = model(&shapes);
        other[0].4[row * 68 + 5] ^= 1;
        refused(other);
    }
    // The rows in another order.
    let mut other = model(&shapes);
    other[0].4.rotate_left(68);
    refused(other);
}

#[test]
fn a_full_disk_is_an_error() {
    let full = || File::options().write(true).open("/dev/full").unwrap();
    let small = PackedWriter::new(full(), "a model").finish().unwrap_err();
    assert_eq!(small.kind(), io::ErrorKind::StorageFull);
    let large = model(&[(WeightDtype::F32, 1100, 2048)]);
    let error = through(Packed::Kept(PackedWriter::new(full(), "a model")), &large).err().unwrap();
    assert!(matches!(&error, KernelError::Keep(e) if e.kind() == io::ErrorKind::StorageFull), "{error}");
}

/// What [`LAYOUT`] is the number of. Where this fails, packed bytes have changed: raise it.
#[test]
fn a_packed_byte_changes_only_with_the_number_of_the_layout() {
    let shapes: Vec<_> = DTYPES.into_iter().map(|dtype| (dtype, 21, 256)).collect();
    let (weights, _) = through(Packed::Anew, &model(&shapes)).unwrap();
    let digest = |weight: &CpuWeight| digest_block(&weight.data, 0);
    let found = weights.iter().map(digest).fold(0u64, |all, one| all.rotate_left(7) ^ one);
    assert_eq!((LAYOUT, found), (1, 0xb2d6_253f_bbbb_974c), "{found:#x}");
}
