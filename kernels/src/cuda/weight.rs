//! Loads weights of any stored type and converts them to bf16 or E4M3 on the device. Seeded weights are made on the device too.

use baton_types::{Seeded, WeightData};

use super::device::{Access, Address, Device, FP8_MULTIPLE, Piece};
use super::memory::Memory;
use super::params::{Dequantise, Element, Embed, QuantiseRows, SeededRows, Stored, stored};
use super::queue::Queue;
use crate::backend::all;
use crate::{KernelError, WeightSource};

/// Most bytes of device memory for staging while a weight is loaded, unless a single row needs more.
const STAGED: usize = 64 << 20;
/// Alignment of every allocation, in bytes. Parts of a divided allocation have it too, except scales: those are aligned to sixteen f32.
const ALIGN: usize = 256;

/// Element type of a weight and of the rows that it is multiplied with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Form {
    Bf16,
    /// E4M3 with a scale for each row.
    E4m3,
}

impl Form {
    /// The form of a matrix that only products read. It is E4M3 if `fp8` is set and products of E4M3 take its sizes.
    pub fn of(rows: usize, cols: usize, fp8: bool) -> Form {
        let fits = |n: usize| n > 0 && n.is_multiple_of(FP8_MULTIPLE);
        if fp8 && fits(rows) && fits(cols) { Form::E4m3 } else { Form::Bf16 }
    }

    fn element_bytes(self) -> usize {
        match self {
            Form::Bf16 => Element::Bf16.bytes(),
            Form::E4m3 => 1,
        }
    }
}

/// Bytes on the device of a matrix that only products read, with or without [`super::CudaOptions::fp8`].
pub fn product_weight_bytes(rows: usize, cols: usize, fp8: bool) -> u64 {
    let form = Form::of(rows, cols, fp8);
    let scales = if form == Form::E4m3 { rows * size_of::<f32>() } else { 0 };
    (rows * cols * form.element_bytes() + scales) as u64
}

/// A weight matrix on a device, `[rows, cols]`.
pub struct CudaWeight<D: Device> {
    pub(super) memory: Memory<D>,
    /// `[rows]` f32: one scale per row, if the weight is E4M3.
    pub(super) scales: Option<Memory<D>>,
    pub(super) rows: usize,
    pub(super) cols: usize,
}

impl<D: Device> CudaWeight<D> {
    /// Allocates an uninitialised weight.
    fn new(queue: &Queue<D>, rows: usize, cols: usize, form: Form) -> Result<Self, KernelError> {
        let scales = match form {
            Form::Bf16 => None,
            Form::E4m3 => Some(queue.memory(rows * size_of::<f32>())?),
        };
        Ok(CudaWeight { memory: queue.memory(rows * cols * form.element_bytes())?, scales, rows, cols })
    }

    /// The weight of `rows` of its rows from row `first` on, in the same memory.
    fn part(&self, first: usize, rows: usize) -> Self {
        let (row, float) = (self.cols * self.form().element_bytes(), size_of::<f32>());
        let scales = self.scales.as_ref().map(|scales| scales.part(first * float, rows * float));
        CudaWeight { memory: self.memory.part(first * row, rows * row), scales, rows, cols: self.cols }
    }

    /// Its rows and those of `next` as one weight, if they lie one behind the other in memory.
    pub(super) fn joined(&self, next: &CudaWeight<D>) -> Option<Self> {
        let scales = match (&self.scales, &next.scales) {
            (None, None) => None,
            (Some(own), Some(next)) => Some(own.joined(next)?),
            _ => return None,
        };
        let memory = self.memory.joined(&next.memory)?;
        (self.cols == next.cols).then(|| CudaWeight { memory, scales, rows: self.rows + next.rows, cols: self.cols })
    }

    pub(super) fn form(&self) -> Form {
        if self.scales.is_some() { Form::E4m3 } else { Form::Bf16 }
    }
}

/// A clone is the same memory.
impl<D: Device> Clone for CudaWeight<D> {
    fn clone(&self) -> Self {
        CudaWeight { memory: self.memory.clone(), scales: self.scales.clone(), rows: self.rows, cols: self.cols }
    }
}

/// Loads the weights of several products of one input. They share one allocation if one product can take them together.
pub(super) fn load_together<D: Device, const N: usize>(
    queue: &Queue<D>,
    staging: &mut Option<Memory<D>>,
    sources: [&WeightSource<'_>; N],
    fp8: bool,
) -> Result<[CudaWeight<D>; N], KernelError> {
    let form = |source: &WeightSource<'_>| Form::of(source.rows, source.cols, fp8);
    let alike = |source: &WeightSource<'_>, first: &WeightSource<'_>| {
        // Each part must be aligned like an allocation of its own.
        let aligned = (source.rows * source.cols * form(source).element_bytes()).is_multiple_of(ALIGN);
        aligned && source.cols == first.cols && form(source) == form(first)
    };
    if !sources.iter().all(|source| alike(source, sources[0])) {
        return all(sources.map(|source| load(queue, staging, source, form(source))));
    }
    let (rows, cols) = (sources.iter().map(|source| source.rows).sum(), sources[0].cols);
    let (whole, mut first) = (CudaWeight::new(queue, rows, cols, form(sources[0]))?, 0);
    all(sources.map(|source| {
        first += source.rows;
        let weight = whole.part(first - source.rows, source.rows);
        fill(queue, staging, source, &weight, STAGED)?;
        Ok(weight)
    }))
}

/// Loads a weight into an allocation of its own.
pub(super) fn load<D: Device>(
    queue: &Queue<D>,
    staging: &mut Option<Memory<D>>,
    source: &WeightSource<'_>,
    form: Form,
) -> Result<CudaWeight<D>, KernelError> {
    let weight = CudaWeight::new(queue, source.rows, source.cols, form)?;
    fill(queue, staging, source, &weight, STAGED)?;
    Ok(weight)
}

/// Copies or makes rows in portions of about `staged` bytes and converts each portion to the weight's form, rounding to nearest.
fn fill<D: Device>(
    queue: &Queue<D>,
    staging: &mut Option<Memory<D>>,
    source: &WeightSource<'_>,
    weight: &CudaWeight<D>,
    staged: usize,
) -> Result<(), KernelError> {
    let (rows, cols) = (source.rows, source.cols);
    let row_bytes = source.row_bytes()?;
    let fits = |x: usize| u32::try_from(x).is_ok();
    if !cols.is_multiple_of(8) || !fits(rows) || !fits(cols) {
        let why =
            format!("{rows} x {cols}; a GPU takes rows of a multiple of 8 elements, and at most {} of them", u32::MAX);
        return Err(KernelError::Weight { name: source.name.to_owned(), why });
    }
    let portion = (staged / staged_bytes(source, weight.form(), row_bytes, 1).max(1)).clamp(1, rows.max(1));
    for first in (0..rows).step_by(portion) {
        let rows = Rows { first, count: portion.min(rows - first), cols };
        rows.load(queue, staging, source, weight)?;
    }
    Ok(())
}

/// Bytes of staging for `rows` rows: the rows as they are stored, and as f32 if they are converted by way of f32.
fn staged_bytes(source: &WeightSource<'_>, form: Form, row_bytes: usize, rows: usize) -> usize {
    let wide = match (stored(source.dtype), form) {
        (Stored::Quantised(_), Form::E4m3) => rows * source.cols * size_of::<f32>(),
        _ => 0,
    };
    (rows * row_bytes).next_multiple_of(ALIGN) + wide
}

/// Rows of a weight that are loaded together.
struct Rows {
    first: usize,
    count: usize,
    cols: usize,
}

impl Rows {
    fn load<D: Device>(
        &self,
        queue: &Queue<D>,
        staging: &mut Option<Memory<D>>,
        source: &WeightSource<'_>,
        weight: &CudaWeight<D>,
    ) -> Result<(), KernelError> {
        let (kind, form, row_bytes) = (stored(source.dtype), weight.form(), source.row_bytes()?);
        let out_bytes = self.cols * form.element_bytes();
        let out = weight.memory.piece(self.first * out_bytes, self.count * out_bytes);
        if (kind, form) == (Stored::Dense(Element::Bf16), Form::Bf16) {
            return self.bring(queue, source, out);
        }
        queue.at_least(staging, staged_bytes(source, form, row_bytes, self.count))?;
        let Some(staging) = staging.as_ref() else { return Ok(()) };
        let staged = staging.piece(0, self.count * row_bytes);
        self.bring(queue, source, staged)?;
        let Some(scales) = &weight.scales else {
            return self.dense(queue, staged, kind, (out, Element::Bf16));
        };
        let scales = scales.piece(self.first * size_of::<f32>(), self.count * size_of::<f32>());
        let (x, x_type) = match kind {
            Stored::Dense(element) => (staged, element),
            Stored::Quantised(_) => {
                let elements = self.count * self.cols;
                let wide = staging.piece(staged.bytes().next_multiple_of(ALIGN), elements * size_of::<f32>());
                self.dense(queue, staged, kind, (wide, Element::F32))?;
                (wide, Element::F32)
            }
        };
        quantise(queue, (x, x_type, self.cols), (out, scales), self.count, self.cols)
    }

    /// Brings the rows to the device as they are stored. Seeded rows are made on the device.
    fn bring<D: Device>(&self, queue: &Queue<D>, source: &WeightSource<'_>, to: Piece<'_>) -> Result<(), KernelError> {
        match (&source.data, source.row_order) {
            (WeightData::Seeded(all), None) => {
                let first = all.first + self.first as u64 * all.stride as u64;
                let (stride, rows, width) = (all.stride as u64, self.count as u32, self.cols as u32);
                let Seeded { key, middle, spread } = all.values;
                let params = SeededRows { out: to.at(), key, first, stride, rows, width, middle, spread };
                queue.launch("baton_seeded_rows", &params, &[Access::Write(to)])
            }
            _ => queue.write_bytes(to, &source.rows(self.first, self.count)?),
        }
    }

    /// Converts stored rows to a dense type.
    fn dense<D: Device>(
        &self,
        queue: &Queue<D>,
        staged: Piece<'_>,
        kind: Stored,
        (out, out_type): (Piece<'_>, Element),
    ) -> Result<(), KernelError> {
        let touches = [Access::Read(staged), Access::Write(out)];
        let (count, width, none) = (self.count as u32, self.cols as u32, Address::default());
        match kind {
            Stored::Dense(table_type) => {
                let (table, out, scale, drawn) = (staged.at(), out.at(), 1.0, none);
                let params = Embed { table, rows: none, out, table_type, out_type, count, width, scale, drawn };
                queue.launch("baton_embed", &params, &touches)
            }
            Stored::Quantised(quant) => {
                let (source, out) = (staged.at(), out.at());
                let params = Dequantise { source, row_order: none, out, quant, out_type, rows: count, cols: width };
                queue.launch("baton_dequantise", &params, &touches)
            }
        }
    }
}

/// Quantises rows of `x`, which begin `x_stride` elements apart, to E4M3 with a scale for each row.
pub(super) fn quantise<D: Device>(
    queue: &Queue<D>,
    (x, x_type, x_stride): (Piece<'_>, Element, usize),
    (out, scales): (Piece<'_>, Piece<'_>),
    rows: usize,
    cols: usize,
) -> Result<(), KernelError> {
    let (rows, width, x_stride) = (rows as u32, cols as u32, x_stride as u32);
    let params = QuantiseRows { x: x.at(), out: out.at(), scales: scales.at(), x_type, rows, width, x_stride };
    queue.launch("baton_quantise_rows", &params, &[Access::Read(x), Access::Write(out), Access::Write(scales)])
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use baton_types::WeightDtype;

    use super::super::HostDevice;
    use super::*;
    use crate::conformance::{Random, random_weight};

    /// The bytes on the device of a weight that was loaded in portions of `staged` bytes, scales included.
    fn loaded(queue: &Queue<HostDevice>, source: &WeightSource<'_>, form: Form, staged: usize) -> Vec<u8> {
        let weight = CudaWeight::new(queue, source.rows, source.cols, form).unwrap();
        fill(queue, &mut None, source, &weight, staged).unwrap();
        let mut bytes = Vec::new();
        for memory in [Some(&weight.memory), weight.scales.as_ref()].into_iter().flatten() {
            let mut part = vec![0; memory.bytes()];
            queue.read(memory.piece(0, part.len()), &mut part).unwrap();
            bytes.extend(part);
        }
        bytes
    }

    #[test]
    fn a_weight_is_the_same_in_however_many_portions_it_came() {
        let Some(device) = HostDevice::for_tests() else { return };
        let queue = Queue::new(Arc::new(device)).unwrap();
        let (rows, cols) = (29, 256);
        let order = |i: usize| (i * 5 + 1) % rows;
        let values = Seeded { key: 2, middle: 0.0, spread: 1.0 };
        let seeded = WeightData::Seeded(baton_types::SeededRows { values, first: 7, stride: cols + 9 });
        for dtype in [WeightDtype::F32, WeightDtype::Bf16, WeightDtype::Q8_0, WeightDtype::Q4K] {
            let stored = random_weight(dtype, rows, cols, &mut Random(4));
            let made = (dtype == WeightDtype::Bf16).then(|| seeded.clone());
            for data in [Some(stored[..].into()), made].into_iter().flatten() {
                for row_order in [None, Some(&order as crate::RowOrder<'_>)] {
                    let source = WeightSource { name: "w", dtype, rows, cols, data: data.clone(), row_order };
                    for form in [Form::Bf16, Form::E4m3] {
                        let whole = loaded(&queue, &source, form, STAGED);
                        for staged in [0, 4 * 256 * 10] {
                            let parts = loaded(&queue, &source, form, staged);
                            assert!(parts == whole, "{dtype:?} as {form:?} in portions of {staged} bytes");
                        }
                    }
                }
            }
        }
    }
}
