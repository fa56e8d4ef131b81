//! Arrays as the device's copy units know them, encoded by the driver. Nothing is asked of the device itself.

use cudarc::driver::sys::{
    self, CUtensorMapDataType_enum as Type, CUtensorMapFloatOOBfill_enum as Fill,
    CUtensorMapInterleave_enum as Interleave, CUtensorMapL2promotion_enum as Promotion,
    CUtensorMapSwizzle_enum as Swizzle,
};

use super::super::device::{Rows, TensorMap};
use super::failed;
use crate::KernelError;

/// Rows as the driver encodes them, of which only the address matters here: bytes are copied as they are.
pub(super) fn encode(rows: &Rows<'_>) -> Result<TensorMap, KernelError> {
    let mut map = sys::CUtensorMap { opaque: [0; 16] };
    let stride = u64::from(rows.width) * 2;
    let sizes = [u64::from(rows.width), rows.memory.bytes() as u64 / stride.max(1)];
    // SAFETY: arrays of two dimensions, and one stride less; the address is the device's and is not looked at.
    unsafe {
        sys::cuTensorMapEncodeTiled(
            &raw mut map,
            Type::CU_TENSOR_MAP_DATA_TYPE_UINT16,
            2,
            std::ptr::with_exposed_provenance_mut(rows.memory.at().0 as usize),
            sizes.as_ptr(),
            [stride].as_ptr(),
            rows.box_shape.as_ptr(),
            [1, 1].as_ptr(),
            Interleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            Swizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            Promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            Fill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    }
    .result()
    .map_err(failed("tensor map"))?;
    Ok(TensorMap { words: map.opaque })
}
