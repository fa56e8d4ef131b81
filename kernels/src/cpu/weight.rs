//! Weight matrices, repacked at load into panels of eight rows so that the eight lanes of a vector are eight outputs.
//!
//! Lanes as outputs means that each output element is summed over k in one fixed order, whatever the number of
//! activation rows (I1), and that no horizontal sum is needed. A panel is a run of units over k; memory bandwidth bounds decode, so
//! units are about as small as the file's own blocks. How their bytes lie is [`super::packing`]'s.

use baton_types::{WeightData, WeightDtype};

use super::packed::PackedFile;
use super::packing::{Form, pack, unpack};
use super::simd::LANES;
use super::unpack::{GROUP, element, quantised_group};
use crate::pages::{Arena, Fixed};
use crate::{KernelError, WeightSource};

/// Bytes of rows that are repacked together, about: there is no more of a matrix beside itself where its rows are made or put in order.
const PORTION: usize = 16 << 20;
/// Bytes that a thread packs, at least: below it, starting one takes longer.
const SHARE: usize = 256 << 10;

/// A matrix `[rows, cols]`, rows being outputs. The last panel is padded with zero rows.
pub struct CpuWeight {
    pub(super) form: Form,
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) data: Fixed,
}

/// Bytes of a panel.
pub(super) fn panel_bytes(form: Form, cols: usize) -> usize {
    cols / form.unit_weights() * form.unit_bytes()
}

/// Packs a whole matrix, on as many threads as pay.
fn pack_all(source: &WeightSource<'_>, form: Form, out: &mut [u8]) -> Result<(), KernelError> {
    let panel = panel_bytes(form, source.cols).max(1);
    let most = match source.data {
        WeightData::Stored(_) => std::thread::available_parallelism().map_or(1, usize::from),
        // Making the values is most of the work, and takes threads of its own.
        WeightData::Seeded(_) => 1,
    };
    let share = (out.len() / panel).div_ceil((out.len() / SHARE).clamp(1, most)).max(1);
    std::thread::scope(|scope| {
        let mut shares = out.chunks_mut(share * panel).enumerate();
        let own = shares.next();
        let others: Vec<_> =
            shares.map(|(i, out)| scope.spawn(move || pack_panels(source, form, i * share, out))).collect();
        let own = own.map_or(Ok(()), |(_, out)| pack_panels(source, form, 0, out));
        let failed =
            |_| KernelError::Weight { name: source.name.to_owned(), why: "a thread that packs it failed".into() };
        others.into_iter().map(|other| other.join().unwrap_or_else(|e| Err(failed(e)))).fold(own, Result::and)
    })
}

/// Packs panels from number `first` on, as many as there is room for in `out`, which is zeroed.
pub(super) fn pack_panels(
    source: &WeightSource<'_>,
    form: Form,
    first: usize,
    out: &mut [u8],
) -> Result<(), KernelError> {
    let (rows, cols) = (source.rows, source.cols);
    let (row_bytes, panel_bytes) = (source.row_bytes()?, panel_bytes(form, cols));
    let together = (PORTION / (LANES * row_bytes).max(1)).max(1);
    for (portion, out) in out.chunks_mut((together * panel_bytes).max(1)).enumerate() {
        let start = (first + portion * together) * LANES;
        let count = (out.len() / panel_bytes * LANES).min(rows - start);
        let stored = source.rows(start, count)?;
        for (row, stored) in stored.chunks_exact(row_bytes).enumerate() {
            let panel = &mut out[row / LANES * panel_bytes..][..panel_bytes];
            pack_row(source.dtype, form, row % LANES, stored, panel);
        }
    }
    Ok(())
}

/// Packs a row as one lane of a panel.
fn pack_row(dtype: WeightDtype, form: Form, lane: usize, row: &[u8], panel: &mut [u8]) {
    let groups = form.unit_groups();
    for (u, unit) in panel.chunks_exact_mut(form.unit_bytes()).enumerate() {
        match form {
            Form::F32 | Form::F16 | Form::Bf16 => {
                let size = form.unit_bytes() / LANES;
                unit[lane * size..][..size].copy_from_slice(&row[u * size..][..size]);
            }
            _ => {
                for g in 0..groups {
                    pack(form, unit, g, lane, &quantised_group(dtype, row, u * groups + g));
                }
            }
        }
    }
}

impl CpuWeight {
    /// Repacks a stored matrix into memory of `arena`.
    pub fn new(source: &WeightSource<'_>, arena: &mut Arena) -> Result<Self, KernelError> {
        let (form, rows, cols) = (Form::of(source.dtype), source.rows, source.cols);
        source.row_bytes()?;
        let mut data = arena.zeroed(rows.div_ceil(LANES) * panel_bytes(form, cols))?;
        pack_all(source, form, &mut data)?;
        Ok(CpuWeight { form, rows, cols, data: data.into() })
    }

    /// A matrix that is packed already.
    pub(super) fn packed(source: &WeightSource<'_>, file: &PackedFile) -> Result<Self, KernelError> {
        let form = Form::of(source.dtype);
        Ok(CpuWeight { form, rows: source.rows, cols: source.cols, data: file.take(form, source)? })
    }

    pub(super) fn panels(&self) -> usize {
        self.rows.div_ceil(LANES)
    }

    pub(super) fn panel_bytes(&self) -> usize {
        panel_bytes(self.form, self.cols)
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

#[cfg(test)]
mod tests {
    use baton_types::{Seeded, SeededRows};

    use super::*;

    /// The last portion is no whole one, and the last panel of it neither.
    #[test]
    fn a_matrix_of_several_portions_is_made_as_it_is_stored() {
        let (rows, cols) = (45, 1 << 18);
        assert!(rows * cols * 2 > PORTION && 16 * cols * 2 <= PORTION, "several portions of several panels");
        let made = SeededRows { values: Seeded { key: 3, middle: 0.0, spread: 1.0 }, first: 2, stride: cols };
        let order = |i: usize| rows - 1 - i;
        let mut stored = vec![0; rows * cols * 2];
        stored.chunks_mut(cols * 2).enumerate().for_each(|(i, out)| made.fill_row(i, out));
        for (data, row_order) in [
            (WeightData::Seeded(made), None),
            (stored[..].into(), None),
            (stored[..].into(), Some(&order as crate::RowOrder<'_>)),
        ] {
            let source = WeightSource { name: "w", dtype: WeightDtype::Bf16, rows, cols, data, row_order };
            let weight = CpuWeight::new(&source, &mut Arena::default()).unwrap();
            let mut got = vec![0.0; cols];
            for row in 0..rows {
                weight.read_row(row, &mut got);
                let want = &stored[row_order.map_or(row, |order| order(row)) * cols * 2..];
                for k in [0, 1, cols / 2, cols - 1] {
                    assert_eq!(got[k], element(WeightDtype::Bf16, want, k), "row {row}, input {k}");
                }
            }
        }
    }
}
