//! The store of K and V into the pool: rotates a token's q and k, and rounds its k and v to the pool's type. In a group with
//! sinks also rotates q as the sinks see it.
//!
//! Bytes moved per token: q, k and v once, and their rows in the pool. Bound: memory bandwidth.

use baton_types::{BlockId, KvDtype};
use half::{bf16, f16};

use super::codes::Codes;
use super::isa::{Isa, dispatch};
use super::kv_row::{Fp8, Int4, KvRow, Planes, Q8};
use super::slots::MAX_DIM;

/// K and V of one token and their rotation.
#[derive(Clone, Copy)]
pub struct StoreTask<'a> {
    pub planes: Planes,
    pub table: &'a [BlockId],
    /// Its slot is that of this position.
    pub place: usize,
    pub heads: usize,
    pub kv_heads: usize,
    /// This token's rows.
    pub q: *mut f32,
    pub k: *const f32,
    pub v: *const f32,
    /// `[head_dim / 2]` of this token's position.
    pub cos: *const f32,
    pub sin: *const f32,
    /// Where its queries go as the sinks see them, and the rotation for that.
    pub sinks: Option<SinkQueries>,
}

/// A token's queries as the sinks see them.
#[derive(Clone, Copy)]
pub struct SinkQueries {
    pub q: *mut f32,
    pub cos: *const f32,
    pub sin: *const f32,
}

/// Rotates the pairs (x[i], x[i + dim/2]).
#[inline(always)]
unsafe fn rotate(x: *const f32, out: *mut f32, cos: *const f32, sin: *const f32, dim: usize) {
    let half = dim / 2;
    for i in 0..half {
        // SAFETY: the vectors have `dim` and `dim / 2` elements.
        unsafe {
            let (a, b, c, s) = (*x.add(i), *x.add(half + i), *cos.add(i), *sin.add(i));
            *out.add(i) = a.mul_add(c, -(b * s));
            *out.add(half + i) = b.mul_add(c, a * s);
        }
    }
}

#[inline(always)]
unsafe fn store_kernel<S: Codes, T: KvRow>(_: S, task: &StoreTask<'_>) {
    let dim = task.planes.head_dim;
    let mut rotated = [0.0f32; MAX_DIM];
    // SAFETY: the rows are this token's; its slot is written by this task alone.
    unsafe {
        for h in 0..task.heads {
            let q = task.q.add(h * dim);
            if let Some(sinks) = task.sinks {
                rotate(q, sinks.q.add(h * dim), sinks.cos, sinks.sin, dim);
            }
            rotate(q, rotated.as_mut_ptr(), task.cos, task.sin, dim);
            std::ptr::copy_nonoverlapping(rotated.as_ptr(), q, dim);
        }
        for h in 0..task.kv_heads {
            rotate(task.k.add(h * dim), rotated.as_mut_ptr(), task.cos, task.sin, dim);
            let [key, value] = task.planes.rows(task.table, h, task.place);
            T::store::<S>(key, rotated.as_ptr(), dim);
            T::store::<S>(value, task.v.add(h * dim), dim);
        }
    }
}

/// The store of a KV type.
///
/// # Safety
/// Of what it returns: the token's slot in the pool and its rows are accessed by this task alone.
pub fn kernel(dtype: KvDtype) -> unsafe fn(Isa, &StoreTask<'_>) {
    match dtype {
        KvDtype::F32 => store_f32,
        KvDtype::F16 => store_f16,
        KvDtype::Bf16 => store_bf16,
        KvDtype::Q8 => store_q8,
        KvDtype::Fp8 => store_fp8,
        KvDtype::Int4 => store_int4,
    }
}

macro_rules! store {
    ($($name:ident: $ty:ty),*) => {
        $(dispatch! {
            /// Rotates and stores one token.
            ///
            /// # Safety
            /// See [`kernel`].
            unsafe fn $name(task: &StoreTask<'_>) = store_kernel::<_, $ty>
        })*
    };
}
store!(store_f32: f32, store_f16: f16, store_bf16: bf16, store_q8: Q8, store_fp8: Fp8, store_int4: Int4);
