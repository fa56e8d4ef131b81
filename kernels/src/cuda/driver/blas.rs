//! Products by cuBLASLt, with the same bits for a row whatever stands beside it (I1).
//!
//! The library picks another algorithm for another number of rows, and some sum over parts of k that depend on it. So an algorithm is
//! chosen once for each shape of weight, as if for [`ROWS`] rows, among those that need no second pass over partial sums; every product
//! with such a weight uses it. That makes each output the same sum in the same order.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Mutex, PoisonError};

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys;
use cudarc::driver::sys::CUstream;

use super::super::device::Gemm;
use crate::KernelError;

/// Rows that algorithms are chosen for: a decode batch, where products take most of a step.
const ROWS: u64 = 64;

/// `CUBLAS_OP_T`.
const TRANSPOSED: i32 = 1;

/// (outputs, inputs, with bias) of a weight.
type Shape = (usize, usize, bool);

/// A handle and the algorithms chosen so far.
pub(super) struct Blas {
    handle: sys::cublasLtHandle_t,
    chosen: Mutex<HashMap<Shape, sys::cublasLtMatmulAlgo_t>>,
}

fn failed(error: CublasError) -> KernelError {
    KernelError::Device { operation: "product by cuBLASLt".to_owned(), why: format!("{:?}", error.0) }
}

/// Descriptors of a product, given back when it is dropped. cuBLASLt's matrices are column-major, so the weight `[outs, cols]` is a
/// transposed one, x `[rows, cols]` and out `[rows, outs]` are as they are.
struct Described {
    operation: sys::cublasLtMatmulDesc_t,
    layouts: [sys::cublasLtMatrixLayout_t; 3],
}

impl Described {
    fn new(gemm: &Gemm<'_>, rows: u64) -> Result<Self, CublasError> {
        use sys::cublasLtMatmulDescAttributes_t as A;
        use sys::cudaDataType_t::{CUDA_R_16BF, CUDA_R_32F};
        let (outs, cols) = (gemm.outs as u64, gemm.cols as u64);
        let operation = result::create_matmul_desc(sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, CUDA_R_32F)?;
        let mut described = Described { operation, layouts: [std::ptr::null_mut(); 3] };
        let shapes = [(CUDA_R_16BF, cols, outs), (CUDA_R_16BF, cols, rows), (CUDA_R_32F, outs, rows)];
        for (layout, (kind, height, width)) in described.layouts.iter_mut().zip(shapes) {
            *layout = result::create_matrix_layout(kind, height, width, height as i64)?;
        }
        described.set(A::CUBLASLT_MATMUL_DESC_TRANSA, &TRANSPOSED)?;
        if let Some(bias) = gemm.bias {
            described.set(A::CUBLASLT_MATMUL_DESC_EPILOGUE, &sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS)?;
            described.set(A::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias.at().0)?;
        }
        Ok(described)
    }

    fn set<T>(&self, attribute: sys::cublasLtMatmulDescAttributes_t, value: &T) -> Result<(), CublasError> {
        // SAFETY: the descriptor is there, and the attribute has as many bytes as its value.
        unsafe {
            result::set_matmul_desc_attribute(self.operation, attribute, (&raw const *value).cast(), size_of::<T>())
        }
    }
}

impl Drop for Described {
    fn drop(&mut self) {
        // SAFETY: made by `new` and used by nobody any more; those it did not come to are null.
        unsafe {
            for layout in self.layouts.into_iter().filter(|layout| !layout.is_null()) {
                let _ = result::destroy_matrix_layout(layout);
            }
            let _ = result::destroy_matmul_desc(self.operation);
        }
    }
}

/// The library's first choice for a product of [`ROWS`] rows without partial sums.
fn choose(handle: sys::cublasLtHandle_t, gemm: &Gemm<'_>) -> Result<sys::cublasLtMatmulAlgo_t, CublasError> {
    use sys::cublasLtMatmulPreferenceAttributes_t as P;
    let described = Described::new(gemm, ROWS)?;
    let preference = result::create_matmul_pref()?;
    let (workspace, reduction) = (0u64, sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_NONE as u32);
    // An odd number of outputs leaves rows of `out` on 4 bytes.
    let alignment = if gemm.outs.is_multiple_of(4) { 16u32 } else { 4 };
    let [a, b, d] = described.layouts;
    // SAFETY: all descriptors are there until the end, and each attribute has as many bytes as its value.
    unsafe {
        let set =
            |attribute, at: *const c_void, bytes| result::set_matmul_pref_attribute(preference, attribute, at, bytes);
        let found = set(P::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, (&raw const workspace).cast(), 8)
            .and_then(|()| set(P::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, (&raw const reduction).cast(), 4))
            .and_then(|()| set(P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, (&raw const alignment).cast(), 4))
            .and_then(|()| set(P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, (&raw const alignment).cast(), 4))
            .and_then(|()| result::get_matmul_algo_heuristic(handle, described.operation, a, b, d, d, preference));
        let _ = result::destroy_matmul_pref(preference);
        found.map(|found| found.algo)
    }
}

impl Blas {
    /// Opens the library.
    pub fn new() -> Result<Self, KernelError> {
        // SAFETY: the library's initialisers only set up its own state. Nothing of it may be called before.
        if !unsafe { sys::is_culib_present() } {
            let why = "this host has no cuBLAS (libcublasLt.so.13); install CUDA's libraries, or name their directory in LD_LIBRARY_PATH";
            return Err(KernelError::NoDevice(why.to_owned()));
        }
        Ok(Blas { handle: result::create_handle().map_err(failed)?, chosen: Mutex::default() })
    }

    /// Puts a product into a stream of the current context.
    pub fn product(&self, stream: CUstream, gemm: &Gemm<'_>) -> Result<(), KernelError> {
        let algorithm = self.algorithm(gemm)?;
        let described = Described::new(gemm, gemm.rows as u64).map_err(failed)?;
        let [a, b, d] = described.layouts;
        let (one, zero) = (1f32, 0f32);
        let at = |address: u64| address as usize as *mut c_void;
        let (weight, x, out) = (at(gemm.weight.at().0), at(gemm.x.at().0), at(gemm.out.at().0));
        // SAFETY: pieces lie inside memory that is still there, of the sizes that a `Gemm` has; descriptors are read before this returns.
        unsafe {
            result::matmul(
                self.handle,
                described.operation,
                (&raw const one).cast(),
                (&raw const zero).cast(),
                weight,
                a,
                x,
                b,
                out,
                d,
                out,
                d,
                &algorithm,
                std::ptr::null_mut(),
                0,
                stream.cast(),
            )
        }
        .map_err(failed)
    }

    fn algorithm(&self, gemm: &Gemm<'_>) -> Result<sys::cublasLtMatmulAlgo_t, KernelError> {
        let mut chosen = self.chosen.lock().unwrap_or_else(PoisonError::into_inner);
        let shape = (gemm.outs, gemm.cols, gemm.bias.is_some());
        if let Some(&algorithm) = chosen.get(&shape) {
            return Ok(algorithm);
        }
        let algorithm = choose(self.handle, gemm).map_err(failed)?;
        chosen.insert(shape, algorithm);
        Ok(algorithm)
    }

    /// Gives the handle back; nothing follows.
    pub fn close(&self) {
        // SAFETY: made by `new`; the driver closes once, when it is dropped.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}
