//! Weights of any stored type, made bf16 on the device when they are loaded.

use std::borrow::Cow;

use super::device::{Access, Address, Device, Memory};
use super::params::{Dequantise, Element, Embed, Stored, stored};
use super::queue::Queue;
use crate::KernelError;
use crate::backend::WeightSource;

/// Stored bytes that are on the device at once while a weight is loaded, as far as a row has no more.
const STAGED: usize = 64 << 20;

/// A weight matrix on a device: `[rows, cols]` bf16.
pub struct CudaWeight<D: Device> {
    pub(super) memory: Memory<D>,
    pub(super) rows: usize,
    pub(super) cols: usize,
}

/// Sends stored rows in portions and turns each into bf16, rounded to nearest.
pub(super) fn load<D: Device>(
    queue: &Queue<D>,
    staging: &mut Option<Memory<D>>,
    source: &WeightSource<'_>,
) -> Result<CudaWeight<D>, KernelError> {
    let (rows, cols) = (source.rows, source.cols);
    let row_bytes = source.row_bytes()?;
    let fits = |x: usize| u32::try_from(x).is_ok();
    if !cols.is_multiple_of(8) || !fits(rows) || !fits(cols) {
        let why =
            format!("{rows} x {cols}; a GPU takes rows of a multiple of 8 elements, and at most {} of them", u32::MAX);
        return Err(KernelError::Weight { name: source.name.to_owned(), why });
    }
    let out_bytes = cols * Element::Bf16.bytes();
    let memory = queue.memory(rows * out_bytes)?;
    let portion = (STAGED / row_bytes.max(1)).clamp(1, rows.max(1));
    for first in (0..rows).step_by(portion) {
        let count = portion.min(rows - first);
        let data = stored_rows(source, row_bytes, first, count);
        let out = memory.piece(first * out_bytes, count * out_bytes);
        let kind = stored(source.dtype);
        if kind == Stored::Dense(Element::Bf16) {
            queue.write_bytes(out, &data)?;
            continue;
        }
        queue.at_least(staging, data.len())?;
        let Some(staged) = staging.as_ref().map(|staging| staging.piece(0, data.len())) else { continue };
        queue.write_bytes(staged, &data)?;
        let touches = [Access::Read(staged), Access::Write(out)];
        let (count, width, none) = (count as u32, cols as u32, Address::default());
        match kind {
            Stored::Dense(table_type) => {
                let (table, out, out_type) = (staged.at(), out.at(), Element::Bf16);
                let (scale, drawn) = (1.0, none);
                let params = Embed { table, rows: none, out, table_type, out_type, count, width, scale, drawn };
                queue.launch("baton_embed", &params, &touches)?;
            }
            Stored::Quantised(quant) => {
                let (source, out, out_type) = (staged.at(), out.at(), Element::Bf16);
                let params = Dequantise { source, row_order: none, out, quant, out_type, rows: count, cols: width };
                queue.launch("baton_dequantise", &params, &touches)?;
            }
        }
    }
    Ok(CudaWeight { memory, rows, cols })
}

/// Rows `first..first + count` of the matrix, as they are stored.
fn stored_rows<'a>(source: &WeightSource<'a>, row_bytes: usize, first: usize, count: usize) -> Cow<'a, [u8]> {
    match source.row_order {
        None => Cow::Borrowed(&source.data[first * row_bytes..][..count * row_bytes]),
        Some(order) => {
            let row = |i: usize| &source.data[order(i) * row_bytes..][..row_bytes];
            Cow::Owned((first..first + count).flat_map(row).copied().collect())
        }
    }
}
