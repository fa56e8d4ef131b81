//! Rows of the pool read plainly, byte by byte, and how far each KV type may round.

use baton_types::{KvDtype, KvLayout};
use half::{bf16, f16};

/// The K (plane 0) or V (plane 1) of a slot, out of the bytes of one layer's part of its block.
pub fn read_row(layout: &KvLayout, group: usize, block: &[u8], plane: usize, head: usize, slot: usize) -> Vec<f32> {
    let (dtype, dim) = (layout.dtype, layout.groups[group].head_dim as usize);
    let slice = &block[plane * layout.plane_bytes(group) + head * layout.head_bytes(group)..];
    let elements = &slice[slot * dtype.row_bytes(dim)..];
    let parameters = &slice[layout.parameters_offset(group) + slot * dtype.row_parameters(dim) * 2..];
    let pair = |bytes: &[u8], i: usize| [bytes[2 * i], bytes[2 * i + 1]];
    let parameter = |i: usize| f16::from_le_bytes(pair(parameters, i)).to_f32();
    let element = |d: usize| match dtype {
        KvDtype::F32 => {
            f32::from_le_bytes([elements[4 * d], elements[4 * d + 1], elements[4 * d + 2], elements[4 * d + 3]])
        }
        KvDtype::F16 => f16::from_le_bytes(pair(elements, d)).to_f32(),
        KvDtype::Bf16 => bf16::from_le_bytes(pair(elements, d)).to_f32(),
        KvDtype::Q8 => parameter(0) * elements[d] as i8 as f32,
        KvDtype::Fp8 => parameter(0) * e4m3(elements[d]),
        KvDtype::Int4 => {
            let (q, group) = (elements[d / 2] >> (4 * (d % 2)) & 15, d / KvDtype::INT4_GROUP * 2);
            parameter(group).mul_add(q as f32, parameter(group + 1))
        }
    };
    (0..dim).map(element).collect()
}

/// Without the format's NaN, which is never stored.
fn e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (code >> 3 & 15, (code & 7) as f32);
    let magnitude = match exponent {
        0 => mantissa * 2f32.powi(-9),
        _ => (8.0 + mantissa) * 2f32.powi(exponent as i32 - 10),
    };
    if code >= 128 { -magnitude } else { magnitude }
}

/// How far element `d` of row `x` may be from what is read back.
pub fn rounding(dtype: KvDtype, x: &[f64], d: usize) -> f64 {
    let largest = |x: &[f64]| x.iter().fold(0f64, |m, v| m.max(v.abs()));
    // K is rotated in f32, and every parameter is rounded to f16, which may push the outermost element out of range.
    let (rotation, parameter) = (largest(x) * 3e-7, 2f64.powi(-11));
    let step = match dtype {
        KvDtype::F32 => 0.0,
        KvDtype::F16 => x[d].abs() * 2f64.powi(-11) + 2f64.powi(-25),
        KvDtype::Bf16 => x[d].abs() * 2f64.powi(-8),
        KvDtype::Q8 => largest(x) * (0.5 / 127.0 + parameter) + 2f64.powi(-25) * 127.0,
        KvDtype::Fp8 => {
            x[d].abs() * 2f64.powi(-4) + largest(x) * (2f64.powi(-10) / 448.0 + parameter) + 2f64.powi(-25) * 448.0
        }
        KvDtype::Int4 => {
            let first = d / KvDtype::INT4_GROUP * KvDtype::INT4_GROUP;
            let group = &x[first..x.len().min(first + KvDtype::INT4_GROUP)];
            let spread = group.iter().fold(f64::MIN, |m, &v| m.max(v)) - group.iter().fold(f64::MAX, |m, &v| m.min(v));
            spread * (0.5 / 15.0 + parameter) + largest(group) * parameter + 2f64.powi(-25) * 16.0
        }
    };
    rotation + step
}
