//! KV of one type turned into another, for pools of two workers that differ: each row is read as attention reads it, and
//! rounded as a store rounds it. So a pool holds the same bytes, whether the rows came in f32 from the model by way of the
//! other type, or from another worker's pool.
//!
//! Bytes moved: a row of each type, from one cache and into one. Bound: in cache, by the arithmetic of widening and rounding, which
//! keeps ahead of every link but shared memory.

use baton_types::KvDtype;
use half::{bf16, f16};

use super::codes::Codes;
use super::isa::{Isa, dispatch};
use super::kv_row::{Fp8, Int4, KvRow, MAX_PARAMETERS, Q8, Row};
use super::simd::LANES;
use super::slots::MAX_DIM;

/// Shape of a head's slice of a plane: `block_size` rows of `head_dim` elements, and behind them their parameters.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KvSlice {
    /// Rows.
    pub block_size: usize,
    /// Elements of a row: a multiple of 8, up to 512.
    pub head_dim: usize,
}

impl KvSlice {
    /// Bytes of a slice of a type.
    pub fn bytes(self, dtype: KvDtype) -> usize {
        self.block_size * (dtype.row_bytes(self.head_dim) + 2 * dtype.row_parameters(self.head_dim))
    }

    /// A row of the slice that begins at `start`.
    ///
    /// # Safety
    /// The slice of that type is all there.
    unsafe fn row(self, dtype: KvDtype, start: *mut u8, slot: usize) -> Row {
        let (elements, parameters) = (dtype.row_bytes(self.head_dim), 2 * dtype.row_parameters(self.head_dim));
        // SAFETY: within the slice.
        unsafe {
            let behind = start.add(self.block_size * elements);
            Row { elements: start.add(slot * elements), parameters: behind.add(slot * parameters).cast() }
        }
    }
}

/// Turns slices of type `from` into slices of type `to`, as many as both sides hold.
///
/// # Panics
/// When the rows are longer than any pool's.
pub fn convert_kv(slice: KvSlice, from: KvDtype, to: KvDtype, source: &[u8], target: &mut [u8]) {
    let KvSlice { block_size, head_dim } = slice;
    assert!(head_dim <= MAX_DIM && head_dim.is_multiple_of(LANES), "rows of {head_dim} elements");
    let (isa, read, write) = (Isa::detect(), reader(from), writer(to));
    let slices = source.chunks_exact(slice.bytes(from).max(1)).zip(target.chunks_exact_mut(slice.bytes(to).max(1)));
    let mut row = [0.0f32; MAX_DIM];
    for (source, target) in slices {
        for slot in 0..block_size {
            // SAFETY: both slices are whole, the rows are no longer than the buffer, and a reader only reads.
            unsafe {
                let rounded = slice.row(from, source.as_ptr().cast_mut(), slot);
                read(isa, rounded, from.row_parameters(head_dim), head_dim, row.as_mut_ptr());
                write(isa, slice.row(to, target.as_mut_ptr(), slot), row.as_ptr(), head_dim);
            }
        }
    }
}

#[inline(always)]
unsafe fn read_kernel<S: Codes, T: KvRow>(_: S, row: Row, parameters: usize, dim: usize, out: *mut f32) {
    let mut widened = [0.0f32; MAX_PARAMETERS];
    // SAFETY: the row is readable, `out` has room for it.
    unsafe {
        for (i, parameter) in widened.iter_mut().enumerate().take(parameters) {
            *parameter = row.parameters.add(i).read_unaligned().to_f32() * T::UNIT;
        }
        for d in (0..dim).step_by(LANES) {
            S::store(out.add(d), T::load::<S>(row.elements, widened.as_ptr(), d));
        }
    }
}

#[inline(always)]
unsafe fn write_kernel<S: Codes, T: KvRow>(_: S, row: Row, x: *const f32, dim: usize) {
    // SAFETY: the row is writable and `x` has its elements.
    unsafe { T::store::<S>(row, x, dim) }
}

type Read = unsafe fn(Isa, Row, usize, usize, *mut f32);
type Write = unsafe fn(Isa, Row, *const f32, usize);

macro_rules! types {
    ($($dtype:ident: $ty:ty, $read:ident, $write:ident;)*) => {
        fn reader(dtype: KvDtype) -> Read {
            match dtype { $(KvDtype::$dtype => $read),* }
        }
        fn writer(dtype: KvDtype) -> Write {
            match dtype { $(KvDtype::$dtype => $write),* }
        }
        $(dispatch! {
            /// Widens a row.
            ///
            /// # Safety
            /// The row is readable with its parameters, and there is room for it.
            unsafe fn $read(row: Row, parameters: usize, dim: usize, out: *mut f32) = read_kernel::<_, $ty>
        }
        dispatch! {
            /// Rounds a row.
            ///
            /// # Safety
            /// The row is writable with its parameters, and its elements are there.
            unsafe fn $write(row: Row, x: *const f32, dim: usize) = write_kernel::<_, $ty>
        })*
    };
}
types! {
    F32: f32, read_f32, write_f32;
    F16: f16, read_f16, write_f16;
    Bf16: bf16, read_bf16, write_bf16;
    Q8: Q8, read_q8, write_q8;
    Fp8: Fp8, read_fp8, write_fp8;
    Int4: Int4, read_int4, write_int4;
}

#[cfg(test)]
mod tests {
    use baton_types::{KvGroup, KvLayout, PROTOCOL_VERSION};

    use super::*;
    use crate::conformance::kv::{read_row, rounding};

    fn layout(dtype: KvDtype, slice: KvSlice) -> KvLayout {
        let group = KvGroup {
            layers: vec![0],
            planes: 1,
            kv_heads: 3,
            head_dim: slice.head_dim as u32,
            window: None,
            sinks: 0,
        };
        let block_size = slice.block_size as u32;
        KvLayout { version: PROTOCOL_VERSION, model: 0, dtype, block_size, groups: vec![group] }
    }

    /// Three heads of f32 rows of different sizes, one of them zero.
    fn values(slice: KvSlice) -> Vec<f32> {
        let value = |i: usize| match i / slice.head_dim {
            2 => 0.0,
            row => ((i * 7919) as f32 * 0.37).sin() * (row + 1) as f32,
        };
        (0..3 * slice.block_size * slice.head_dim).map(value).collect()
    }

    fn converted(slice: KvSlice, from: KvDtype, to: KvDtype, source: &[u8]) -> Vec<u8> {
        let mut target = vec![0xaa; 3 * slice.bytes(to)];
        convert_kv(slice, from, to, source, &mut target);
        target
    }

    #[test]
    fn every_type_turns_into_every_other_as_storing_its_values_would() {
        for slice in [KvSlice { block_size: 16, head_dim: 64 }, KvSlice { block_size: 32, head_dim: 40 }] {
            let values = values(slice);
            let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
            for from in KvDtype::ALL {
                let stored = converted(slice, KvDtype::F32, from, &bytes);
                for to in KvDtype::ALL {
                    let (source, target) = (layout(from, slice), layout(to, slice));
                    assert_eq!(slice.bytes(to), target.head_bytes(0));
                    let got = converted(slice, from, to, &stored);
                    for (head, slot) in (0..3).flat_map(|h| (0..slice.block_size).map(move |s| (h, s))) {
                        // Read plainly, byte by byte: the values as the source's type holds them.
                        let want: Vec<f64> =
                            read_row(&source, 0, &stored, 0, head, slot).into_iter().map(f64::from).collect();
                        for (d, x) in read_row(&target, 0, &got, 0, head, slot).into_iter().enumerate() {
                            let off = (f64::from(x) - want[d]).abs();
                            assert!(off <= rounding(to, &want, d), "{from:?} to {to:?}: {x} for {}", want[d]);
                        }
                    }
                    // In two steps, with f32 between: the same bytes.
                    let widened = converted(slice, from, KvDtype::F32, &stored);
                    assert!(converted(slice, KvDtype::F32, to, &widened) == got, "{from:?} to {to:?}");
                }
            }
        }
    }

    #[test]
    fn slots_without_a_token_may_hold_anything() {
        let slice = KvSlice { block_size: 16, head_dim: 64 };
        for from in KvDtype::ALL {
            for to in KvDtype::ALL {
                converted(slice, from, to, &vec![0xff; 3 * slice.bytes(from)]);
            }
        }
    }
}
