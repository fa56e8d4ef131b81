//! Products by cuBLASLt: the choice of an algorithm for each product, and the calls.
//!
//! Left alone, the library picks its algorithm by the number of rows, and some algorithms split the sum over k by that number. So an
//! algorithm is chosen once for each shape of weight and each [`Alike`]:
//!
//! - It is the library's choice for one typical number of rows.
//! - The library confirms that it also takes a sample of the other numbers of rows.
//! - All products of the same [`Alike`] use it. So each output is the same sum in the same order.
//!
//! Products that must agree for any number of rows (I1) take no algorithm with a second pass over partial sums. The others may take
//! one; each stream has memory for its partial sums.

use std::collections::HashMap;
use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::sync::{Mutex, PoisonError};

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys;
use cudarc::driver::result as driver;
use cudarc::driver::sys::{CUdeviceptr, CUstream};

use super::super::device::{Address, Alike, FP8_MULTIPLE, Fp8, Gemm, Operands, Piece, RowScales};
use crate::KernelError;

/// Bytes of memory for partial sums of each stream: NVIDIA's advice for sm_90.
const WORKSPACE: usize = 32 << 20;

/// Most algorithms that are tried for a product, the library's favourite first.
const CANDIDATES: usize = 16;

/// `CUBLAS_OP_T`.
const TRANSPOSED: i32 = 1;

/// The oldest supported cuBLASLt: CUDA 13's.
const OLDEST: usize = 130_000;

/// Kind of a product's operands, as far as an algorithm depends on it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Kind {
    Bf16,
    E4m3,
    E4m3Scaled,
}

/// Key of an algorithm: (kind, outputs, inputs, whether there is a bias, f32 from one row of results to the next, which products are
/// alike).
type Shape = (Kind, usize, usize, bool, usize, Alike);

/// The library's handle, the algorithms chosen so far, and each stream's memory for partial sums.
pub(super) struct Blas {
    version: usize,
    handle: sys::cublasLtHandle_t,
    chosen: Mutex<HashMap<Shape, sys::cublasLtMatmulAlgo_t>>,
    workspaces: Mutex<HashMap<usize, CUdeviceptr>>,
}

fn failed(error: CublasError) -> KernelError {
    KernelError::Device { operation: "product by cuBLASLt".to_owned(), why: format!("{:?}", error.0) }
}

/// The same error with the sizes of the product.
fn failed_for(gemm: &Gemm<'_>) -> impl Fn(CublasError) -> KernelError {
    let operation = format!("product by cuBLASLt, {} x {} of {} rows", gemm.outs, gemm.cols, gemm.rows);
    move |error| KernelError::Device { operation: operation.clone(), why: format!("{:?}", error.0) }
}

/// Descriptors of a product, freed when dropped. cuBLASLt's matrices are column-major: to it the row-major x `[rows, cols]` and out
/// `[rows, outs]` are transposed already, so only the weight `[outs, cols]` is marked as transposed.
struct Described {
    operation: sys::cublasLtMatmulDesc_t,
    layouts: [sys::cublasLtMatrixLayout_t; 3],
}

impl Described {
    fn new(gemm: &Gemm<'_>, rows: u64) -> Result<Self, CublasError> {
        use sys::cublasLtMatmulDescAttributes_t as A;
        use sys::cudaDataType_t::{CUDA_R_8F_E4M3, CUDA_R_16BF, CUDA_R_32F};
        let operand = match gemm.operands {
            Operands::Bf16 => CUDA_R_16BF,
            Operands::E4m3(_) => CUDA_R_8F_E4M3,
        };
        let (outs, cols) = (gemm.outs as u64, gemm.cols as u64);
        let operation = result::create_matmul_desc(sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, CUDA_R_32F)?;
        let mut described = Described { operation, layouts: [std::ptr::null_mut(); 3] };
        let shapes = [(operand, cols, outs), (operand, cols, rows), (CUDA_R_32F, outs, rows)];
        let strides = [cols, cols, gemm.stride as u64];
        for ((layout, (kind, height, width)), stride) in described.layouts.iter_mut().zip(shapes).zip(strides) {
            *layout = result::create_matrix_layout(kind, height, width, stride as i64)?;
        }
        described.set(A::CUBLASLT_MATMUL_DESC_TRANSA, &TRANSPOSED)?;
        if let Some(bias) = gemm.bias {
            described.set(A::CUBLASLT_MATMUL_DESC_EPILOGUE, &sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS)?;
            described.set(A::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias.at().0)?;
        }
        // Without a pointer to scales a matrix of E4M3 has the scale 1. FAST_ACCUM stays off, so sums are kept in full f32.
        if let Operands::E4m3(Some(scales)) = gemm.operands {
            let mode = sys::cublasLtMatmulMatrixScale_t::CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
            described.set(A::CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &mode)?;
            described.set(A::CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &mode)?;
            described.set(A::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &scales.weight.at().0)?;
            described.set(A::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &scales.x.at().0)?;
        }
        Ok(described)
    }

    fn set<T>(&self, attribute: sys::cublasLtMatmulDescAttributes_t, value: &T) -> Result<(), CublasError> {
        // SAFETY: the descriptor is valid, and the size is that of the value.
        unsafe {
            result::set_matmul_desc_attribute(self.operation, attribute, (&raw const *value).cast(), size_of::<T>())
        }
    }
}

impl Drop for Described {
    fn drop(&mut self) {
        // SAFETY: `new` made them, and nobody uses them any more. Those that it did not make are null and are skipped.
        unsafe {
            for layout in self.layouts.into_iter().filter(|layout| !layout.is_null()) {
                let _ = result::destroy_matrix_layout(layout);
            }
            let _ = result::destroy_matmul_desc(self.operation);
        }
    }
}

/// Bytes of memory that a product may use for partial sums.
fn workspace(alike: Alike) -> usize {
    if alike == Alike::Always { 0 } else { WORKSPACE }
}

/// The library's candidate algorithms for a product, best first.
fn candidates(
    handle: sys::cublasLtHandle_t,
    gemm: &Gemm<'_>,
) -> Result<Vec<sys::cublasLtMatmulHeuristicResult_t>, CublasError> {
    use sys::cublasLtMatmulPreferenceAttributes_t as P;
    use sys::cublasLtReductionScheme_t::{CUBLASLT_REDUCTION_SCHEME_MASK, CUBLASLT_REDUCTION_SCHEME_NONE};
    let described = Described::new(gemm, gemm.alike.typical())?;
    let preference = result::create_matmul_pref()?;
    let workspace = workspace(gemm.alike) as u64;
    let reduction = match gemm.alike {
        Alike::Always => CUBLASLT_REDUCTION_SCHEME_NONE,
        Alike::UpTo(_) | Alike::Many => CUBLASLT_REDUCTION_SCHEME_MASK,
    } as u32;
    // `out` begins at a multiple of 8 f32. Its rows are aligned to 16 bytes only if the stride is a multiple of 4 f32.
    let alignment = if gemm.stride.is_multiple_of(4) { 16u32 } else { 4 };
    let [a, b, d] = described.layouts;
    let mut found: Vec<sys::cublasLtMatmulHeuristicResult_t> = Vec::with_capacity(CANDIDATES);
    let mut count = 0;
    // SAFETY: all descriptors are valid until the end, each attribute's size is that of its value, and `found` has room for the number of
    // results that is asked for. The library reports how many it has written.
    unsafe {
        let set =
            |attribute, at: *const c_void, bytes| result::set_matmul_pref_attribute(preference, attribute, at, bytes);
        let outcome = set(P::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, (&raw const workspace).cast(), 8)
            .and_then(|()| set(P::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, (&raw const reduction).cast(), 4))
            .and_then(|()| set(P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, (&raw const alignment).cast(), 4))
            .and_then(|()| set(P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, (&raw const alignment).cast(), 4))
            .and_then(|()| {
                let (most, to) = (CANDIDATES as i32, found.as_mut_ptr());
                let (of, how) = (described.operation, preference);
                sys::cublasLtMatmulAlgoGetHeuristic(handle, of, a, b, d, d, how, most, to, &mut count).result()
            });
        let _ = result::destroy_matmul_pref(preference);
        outcome?;
        found.set_len(usize::try_from(count).unwrap_or(0).min(CANDIDATES));
    }
    found.retain(|found| found.state.result().is_ok());
    Ok(found)
}

/// Whether an algorithm can do a product of so many rows within the memory for partial sums.
fn takes(
    handle: sys::cublasLtHandle_t,
    gemm: &Gemm<'_>,
    algorithm: &sys::cublasLtMatmulAlgo_t,
    rows: u64,
) -> Result<bool, CublasError> {
    let described = Described::new(gemm, rows)?;
    let [a, b, d] = described.layouts;
    let mut says = MaybeUninit::<sys::cublasLtMatmulHeuristicResult_t>::zeroed();
    // SAFETY: all descriptors are valid until the end, and there is room for the answer. It consists of numbers only, so all zeros are a
    // valid value.
    let (status, says) = unsafe {
        let (of, to) = (described.operation, says.as_mut_ptr());
        let status = sys::cublasLtMatmulAlgoCheck(handle, of, a, b, d, d, algorithm, to);
        (status, says.assume_init())
    };
    Ok(status.result().is_ok() && says.workspaceSize <= workspace(gemm.alike))
}

/// The library's best candidate that can do all products alike. If there is none, because results of so many rows could not even be
/// stored, the candidate that goes up to the most rows.
fn choose(handle: sys::cublasLtHandle_t, gemm: &Gemm<'_>) -> Result<sys::cublasLtMatmulAlgo_t, KernelError> {
    let failed = failed_for(gemm);
    let (samples, mut best) = (gemm.alike.samples(), (0, None));
    for candidate in candidates(handle, gemm).map_err(&failed)? {
        let mut taken = 0;
        while taken < samples.len() && takes(handle, gemm, &candidate.algo, samples[taken]).map_err(&failed)? {
            taken += 1;
        }
        if taken > best.0 {
            best = (taken, Some(candidate.algo));
        }
        if taken == samples.len() {
            break;
        }
    }
    // The library's own error when it has no algorithm.
    best.1.ok_or_else(|| failed(CublasError(sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED)))
}

/// Formats a version of cuBLASLt, given as 10,000 · major + 100 · minor + patch.
fn said(version: usize) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}

/// Refuses an older library: some of its constants differ, and the loader may find it by a name without a version.
fn check_version(version: usize) -> Result<(), KernelError> {
    if version >= OLDEST {
        return Ok(());
    }
    let (found, needed) = (said(version), said(OLDEST));
    let why = format!(
        "cuBLASLt is {found}, and products need {needed} or later: install CUDA 13's libraries, or name their directory in \
         LD_LIBRARY_PATH before the older ones"
    );
    Err(KernelError::NoDevice(why))
}

impl Blas {
    /// Opens the library.
    pub fn new() -> Result<Self, KernelError> {
        // SAFETY: the library's initialisers only set up its own state. No other function of it may be called before this check.
        if !unsafe { sys::is_culib_present() } {
            let why = "this host has no cuBLAS (libcublasLt.so.13); install CUDA's libraries, or name their directory in LD_LIBRARY_PATH";
            return Err(KernelError::NoDevice(why.to_owned()));
        }
        // SAFETY: the library is loaded, and the call takes no arguments.
        let version = unsafe { sys::cublasLtGetVersion() };
        check_version(version)?;
        let handle = result::create_handle().map_err(failed)?;
        Ok(Blas { version, handle, chosen: Mutex::default(), workspaces: Mutex::default() })
    }

    /// The library's version, as NVIDIA writes it.
    pub fn version(&self) -> String {
        said(self.version)
    }

    /// How matrices of E4M3 are multiplied on a device of this compute capability.
    ///
    /// The library's manual promises such products from 8.9 on, in the form used here (A transposed, f32 results, sizes that are multiples
    /// of 16), and scales of rows on 9.0. For the latter the library is also asked whether it has an algorithm within [`choose`]'s limits.
    pub fn fp8(&self, capability: (u32, u32)) -> Fp8 {
        if capability < (8, 9) {
            return Fp8::None;
        }
        if capability == (9, 0) && self.finds_row_scales() {
            return Fp8::Scaled;
        }
        Fp8::Plain
    }

    fn finds_row_scales(&self) -> bool {
        let (rows, outs, cols) = (64, 64 * FP8_MULTIPLE, 64 * FP8_MULTIPLE);
        // Nothing is computed, so any address that is not null will do.
        let piece = |bytes| Piece::new(Address(4096), bytes);
        let scales = RowScales { weight: piece(outs * 4), x: piece(rows * 4) };
        let (weight, x, operands, bias) = (piece(outs * cols), piece(rows * cols), Operands::E4m3(Some(scales)), None);
        // For rows of results one behind the other, and as columns of wider rows.
        let kinds = [Alike::Always, Alike::by_rows(rows)].map(|alike| [(alike, outs), (alike, 2 * outs)]);
        kinds.into_iter().flatten().all(|(alike, stride)| {
            let out = piece(((rows - 1) * stride + outs) * 4);
            choose(self.handle, &Gemm { operands, weight, x, bias, out, stride, rows, outs, cols, alike }).is_ok()
        })
    }

    /// Puts a product into a stream of the current context.
    pub fn product(&self, stream: CUstream, gemm: &Gemm<'_>) -> Result<(), KernelError> {
        let algorithm = self.algorithm(gemm)?;
        let described = Described::new(gemm, gemm.rows as u64).map_err(failed)?;
        let (workspace, room) = (self.workspace(stream, gemm.alike)?, workspace(gemm.alike));
        let [a, b, d] = described.layouts;
        let (one, zero) = (1f32, 0f32);
        let at = |address: u64| address as usize as *mut c_void;
        let (weight, x, out) = (at(gemm.weight.at().0), at(gemm.x.at().0), at(gemm.out.at().0));
        // SAFETY: pieces lie inside memory that is still allocated and have the sizes that a `Gemm` has; descriptors are read before this
        // returns.
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
                at(workspace),
                room,
                stream.cast(),
            )
        }
        .map_err(failed_for(gemm))
    }

    /// A stream's memory for partial sums, or 0 if the product may have none. It is allocated at the stream's first product that may have
    /// some.
    fn workspace(&self, stream: CUstream, alike: Alike) -> Result<CUdeviceptr, KernelError> {
        let bytes = workspace(alike);
        if bytes == 0 {
            return Ok(0);
        }
        let mut workspaces = self.workspaces.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(&at) = workspaces.get(&stream.addr()) {
            return Ok(at);
        }
        // SAFETY: nobody else has the new memory.
        let at = unsafe { driver::malloc_sync(bytes) }.map_err(super::no_memory(bytes))?;
        workspaces.insert(stream.addr(), at);
        Ok(at)
    }

    fn algorithm(&self, gemm: &Gemm<'_>) -> Result<sys::cublasLtMatmulAlgo_t, KernelError> {
        let mut chosen = self.chosen.lock().unwrap_or_else(PoisonError::into_inner);
        let kind = match gemm.operands {
            Operands::Bf16 => Kind::Bf16,
            Operands::E4m3(None) => Kind::E4m3,
            Operands::E4m3(Some(_)) => Kind::E4m3Scaled,
        };
        let shape = (kind, gemm.outs, gemm.cols, gemm.bias.is_some(), gemm.stride, gemm.alike);
        if let Some(&algorithm) = chosen.get(&shape) {
            return Ok(algorithm);
        }
        let algorithm = choose(self.handle, gemm)?;
        chosen.insert(shape, algorithm);
        Ok(algorithm)
    }

    /// Frees handle and memory. The context is current, and no call follows.
    pub fn close(&self) {
        for (_, at) in self.workspaces.lock().unwrap_or_else(PoisonError::into_inner).drain() {
            // SAFETY: `workspace` allocated it; freeing waits for the work that uses it.
            let _ = unsafe { driver::free_sync(at) };
        }
        // SAFETY: `new` made it, and the driver calls this once, when it is dropped.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_before_cuda_13s_is_refused_with_both_versions() {
        for version in [OLDEST, 130_100, 140_000] {
            assert!(check_version(version).is_ok(), "{version}");
        }
        let error = check_version(120_905).err().map(|error| error.to_string()).unwrap_or_default();
        assert!(error.contains("cuBLASLt is 12.9.5") && error.contains("need 13.0.0"), "{error}");
    }
}
