//! Tensor maps: descriptions of arrays for the device's copy units. The driver encodes them without asking the device.

use cudarc::driver::sys::{
    self, CUtensorMapDataType_enum as Type, CUtensorMapFloatOOBfill_enum as Fill,
    CUtensorMapInterleave_enum as Interleave, CUtensorMapL2promotion_enum as Promotion,
    CUtensorMapSwizzle_enum as Swizzle,
};

use super::super::device::{Rows, TensorMap};
use super::failed;
use crate::KernelError;

/// Encodes rows of 16-bit elements. The element type given does not matter, since bytes are copied as they are.
pub(super) fn encode(rows: &Rows<'_>) -> Result<TensorMap, KernelError> {
    let mut map = sys::CUtensorMap { opaque: [0; 16] };
    let stride = u64::from(rows.width) * 2;
    let sizes = [u64::from(rows.width), rows.memory.bytes() as u64 / stride.max(1)];
    // SAFETY: the array has two dimensions, so all parameters have two entries and strides one. The address is a device address, which the
    // call does not read from.
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
