//! Weight matrices, repacked at load into panels of eight rows so that the eight lanes of a vector are eight outputs.
//!
//! Lanes as outputs means that each output element is summed over k in one fixed order, whatever the number of
//! activation rows (I1), and that no horizontal sum is needed. Bytes per panel and group of 32 weights:
//!
//! | packed form | from | weights | scales |
//! | --- | --- | --- | --- |
//! | `U4Half` | Q4_0, Q4_1 | 128 | f16 scale and min: 32 |
//! | `U4Single` | Q4_K | 128 | f32 scale and min: 64 |
//! | `I8Half` | Q5_0, Q8_0 | 256 | f16 scale: 16 |
//! | `I8Halves` | Q5_1, Q5_K, Q6_K | 256 | two f32 scales (16 weights each) and min: 96 |
//! | dense | F32, F16, BF16 | 8 elements per k | none |

use baton_types::WeightDtype;
use half::f16;

use super::simd::LANES;
use super::unpack::{GROUP, Group, element, quantised_group};
use crate::KernelError;
use crate::backend::WeightSource;

/// How a panel is stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Form {
    F32,
    F16,
    Bf16,
    U4Half,
    U4Single,
    I8Half,
    I8Halves,
}

impl Form {
    fn of(dtype: WeightDtype) -> Form {
        match dtype {
            WeightDtype::F32 => Form::F32,
            WeightDtype::F16 => Form::F16,
            WeightDtype::Bf16 => Form::Bf16,
            WeightDtype::Q4_0 | WeightDtype::Q4_1 => Form::U4Half,
            WeightDtype::Q4K => Form::U4Single,
            WeightDtype::Q5_0 | WeightDtype::Q8_0 => Form::I8Half,
            WeightDtype::Q5_1 | WeightDtype::Q5K | WeightDtype::Q6K => Form::I8Halves,
        }
    }

    /// Activations are rounded to 8 bits for these.
    pub fn quantised(self) -> bool {
        !matches!(self, Form::F32 | Form::F16 | Form::Bf16)
    }

    /// Bytes of a panel per unit of k: per group of 32 when quantised, per element when dense.
    pub fn unit_bytes(self) -> usize {
        match self {
            Form::F32 => 4 * LANES,
            Form::F16 | Form::Bf16 => 2 * LANES,
            Form::U4Half => 128 + 32,
            Form::U4Single => 128 + 64,
            Form::I8Half => 256 + 16,
            Form::I8Halves => 256 + 96,
        }
    }
}

/// A matrix `[rows, cols]`, rows being outputs. The last panel is padded with zero rows.
pub struct CpuWeight {
    pub(super) form: Form,
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) data: Vec<u8>,
}

impl CpuWeight {
    /// Repacks a stored matrix.
    pub fn new(source: &WeightSource<'_>) -> Result<Self, KernelError> {
        let form = Form::of(source.dtype);
        let (rows, cols) = (source.rows, source.cols);
        let row_bytes = source.row_bytes()?;
        let units = if form.quantised() { cols / GROUP } else { cols };
        let mut data = vec![0u8; rows.div_ceil(LANES) * units * form.unit_bytes()];
        if data.is_empty() {
            return Ok(CpuWeight { form, rows, cols, data });
        }
        for (p, panel) in data.chunks_exact_mut(units * form.unit_bytes()).enumerate() {
            for lane in 0..LANES.min(rows - p * LANES) {
                let at = source.row_order.map_or(p * LANES + lane, |order| order(p * LANES + lane));
                let row = &source.data[at * row_bytes..][..row_bytes];
                for (u, unit) in panel.chunks_exact_mut(form.unit_bytes()).enumerate() {
                    match form {
                        Form::F32 | Form::F16 | Form::Bf16 => {
                            let size = row_bytes / cols;
                            unit[lane * size..][..size].copy_from_slice(&row[u * size..][..size]);
                        }
                        _ => pack(form, unit, lane, &quantised_group(source.dtype, row, u)),
                    }
                }
            }
        }
        Ok(CpuWeight { form, rows, cols, data })
    }

    pub(super) fn panels(&self) -> usize {
        self.rows.div_ceil(LANES)
    }

    pub(super) fn panel_bytes(&self) -> usize {
        let units = if self.form.quantised() { self.cols / GROUP } else { self.cols };
        units * self.form.unit_bytes()
    }

    /// Writes row `row` as f32 into `out[..cols]`.
    pub fn read_row(&self, row: usize, out: &mut [f32]) {
        let (panel, lane) = (row / LANES, row % LANES);
        let panel = &self.data[panel * self.panel_bytes()..][..self.panel_bytes()];
        let dtype = match self.form {
            Form::F32 => WeightDtype::F32,
            Form::F16 => WeightDtype::F16,
            Form::Bf16 => WeightDtype::Bf16,
            form => {
                for (unit, out) in panel.chunks_exact(form.unit_bytes()).zip(out.chunks_exact_mut(GROUP)) {
                    let group = unpack(form, unit, lane);
                    for (k, out) in out.iter_mut().enumerate() {
                        *out = group.scale[k / 16].mul_add(group.q[k] as f32, group.min);
                    }
                }
                return;
            }
        };
        for (unit, out) in panel.chunks_exact(self.form.unit_bytes()).zip(out) {
            *out = element(dtype, unit, lane);
        }
    }
}

fn put_half(unit: &mut [u8], at: usize, x: f32) {
    unit[at..at + 2].copy_from_slice(&f16::from_f32(x).to_le_bytes());
}

fn put_single(unit: &mut [u8], at: usize, x: f32) {
    unit[at..at + 4].copy_from_slice(&x.to_le_bytes());
}

/// Byte of weight `k` of `lane` in the vectors of a group: 32-byte vector k/4 holds weights k..k+4 of every lane.
fn vector_byte(k: usize, lane: usize) -> usize {
    k / 4 * 32 + lane * 4 + k % 4
}

fn pack(form: Form, unit: &mut [u8], lane: usize, group: &Group) {
    let four_bits = matches!(form, Form::U4Half | Form::U4Single);
    for (k, &q) in group.q.iter().enumerate() {
        if four_bits {
            unit[vector_byte(k % 16, lane)] |= (q as u8) << (4 * (k / 16));
        } else {
            unit[vector_byte(k, lane)] = q as u8;
        }
    }
    match form {
        Form::U4Half => {
            put_half(unit, 128 + 2 * lane, group.scale[0]);
            put_half(unit, 144 + 2 * lane, group.min);
        }
        Form::U4Single => {
            put_single(unit, 128 + 4 * lane, group.scale[0]);
            put_single(unit, 160 + 4 * lane, group.min);
        }
        Form::I8Half => put_half(unit, 256 + 2 * lane, group.scale[0]),
        _ => {
            put_single(unit, 256 + 4 * lane, group.scale[0]);
            put_single(unit, 288 + 4 * lane, group.scale[1]);
            put_single(unit, 320 + 4 * lane, group.min);
        }
    }
}

fn unpack(form: Form, unit: &[u8], lane: usize) -> Group {
    let four_bits = matches!(form, Form::U4Half | Form::U4Single);
    let q = std::array::from_fn(|k| {
        if four_bits {
            (unit[vector_byte(k % 16, lane)] >> (4 * (k / 16)) & 15) as i8
        } else {
            unit[vector_byte(k, lane)] as i8
        }
    });
    let half = |at: usize| element(WeightDtype::F16, &unit[at..], lane);
    let single = |at: usize| element(WeightDtype::F32, &unit[at..], lane);
    let (scale, min) = match form {
        Form::U4Half => ([half(128); 2], half(144)),
        Form::U4Single => ([single(128); 2], single(160)),
        Form::I8Half => ([half(256); 2], 0.0),
        _ => ([single(256), single(288)], single(320)),
    };
    Group { q, scale, min }
}
