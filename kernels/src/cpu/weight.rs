//! Weight matrices, repacked at load into panels of eight rows so that the eight lanes of a vector are eight outputs.
//!
//! Lanes as outputs means that each output element is summed over k in one fixed order, whatever the number of
//! activation rows (I1), and that no horizontal sum is needed. A panel is a run of units over k; memory bandwidth bounds decode, so
//! units are about as small as the file's own blocks. How their bytes lie is [`super::packing`]'s.

use baton_types::WeightDtype;

use super::packing::{Form, pack, unpack};
use super::simd::LANES;
use super::unpack::{GROUP, element, quantised_group};
use crate::pages::{Arena, Bytes};
use crate::{KernelError, WeightSource};

/// A matrix `[rows, cols]`, rows being outputs. The last panel is padded with zero rows.
pub struct CpuWeight {
    pub(super) form: Form,
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) data: Bytes,
}

impl CpuWeight {
    /// Repacks a stored matrix into memory of `arena`.
    pub fn new(source: &WeightSource<'_>, arena: &mut Arena) -> Result<Self, KernelError> {
        let form = Form::of(source.dtype);
        let (rows, cols) = (source.rows, source.cols);
        let row_bytes = source.row_bytes()?;
        let panel_bytes = cols / form.unit_weights() * form.unit_bytes();
        let mut data = arena.zeroed(rows.div_ceil(LANES) * panel_bytes)?;
        if data.is_empty() {
            return Ok(CpuWeight { form, rows, cols, data });
        }
        let stored = source.rows(0, rows)?;
        for (p, panel) in data.chunks_exact_mut(panel_bytes).enumerate() {
            for lane in 0..LANES.min(rows - p * LANES) {
                let row = &stored[(p * LANES + lane) * row_bytes..][..row_bytes];
                for (u, unit) in panel.chunks_exact_mut(form.unit_bytes()).enumerate() {
                    match form {
                        Form::F32 | Form::F16 | Form::Bf16 => {
                            let size = row_bytes / cols;
                            unit[lane * size..][..size].copy_from_slice(&row[u * size..][..size]);
                        }
                        _ => {
                            for g in 0..form.unit_groups() {
                                pack(
                                    form,
                                    unit,
                                    g,
                                    lane,
                                    &quantised_group(source.dtype, row, u * form.unit_groups() + g),
                                );
                            }
                        }
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
        self.cols / self.form.unit_weights() * self.form.unit_bytes()
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
                for (i, out) in out.chunks_exact_mut(GROUP).enumerate() {
                    let (unit, g) = (i / form.unit_groups(), i % form.unit_groups());
                    let group = unpack(form, &panel[unit * form.unit_bytes()..], g, lane);
                    for (k, out) in out.iter_mut().enumerate() {
                        *out = group.weight(k);
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
