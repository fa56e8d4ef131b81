//! Products of matrices: one as large as makes a device as fast as it gets, and those of a model with all that is around them.

use std::sync::Arc;

use baton_kernels::conformance::Random;
use baton_kernels::cuda::{Alike, CudaBackend, CudaOptions, Device, Gemm, Memory, Operands};
use baton_kernels::{Backend, First, Input, KernelError, Product, WeightSource};
use baton_types::WeightDtype;

use crate::{Figure, Sizes, geometry, median, timed};

/// bf16 of either sign between an eighth and 2.
fn weights(count: usize) -> Vec<u8> {
    let mut random = Random(1);
    let four = || ((random.bits() & 0x81ff_81ff_81ff_81ff) | 0x3e00_3e00_3e00_3e00).to_le_bytes();
    let mut data: Vec<u8> = std::iter::repeat_with(four).take(count.div_ceil(4)).flatten().collect();
    data.truncate(2 * count);
    data
}

/// The rate that others are a share of: a square product of bf16 that is there already, and nothing else.
pub fn square<D: Device>(device: &Arc<D>, sizes: &Sizes) -> Result<(), KernelError> {
    let n = sizes.square;
    let (weight, x) = (Memory::new(device, 2 * n * n)?, Memory::new(device, 2 * n * n)?);
    let (out, stream) = (Memory::new(device, 4 * n * n)?, device.stream()?);
    let values = weights(n * n);
    for operand in [&weight, &x] {
        device.write(stream, operand.piece(0, values.len()), &values)?;
    }
    let gemm = Gemm {
        operands: Operands::Bf16,
        weight: weight.piece(0, 2 * n * n),
        x: x.piece(0, 2 * n * n),
        bias: None,
        out: out.floats(n * n),
        stride: n,
        rows: n,
        outs: n,
        cols: n,
        alike: Alike::Many,
    };
    let seconds = median(sizes.repeats, |times| {
        (0..times).try_for_each(|_| device.product(stream, &gemm))?;
        device.synchronise(stream)
    })?;
    let case = format!("{n} x {n} x {n}");
    Figure { what: "matmul", case, seconds, bytes: 0, operations: 2 * n * n * n }.print(sizes);
    Ok(())
}

/// Products with all that is around them: what rounds the rows before, and with fp8 what scales the results where the device does not.
pub fn all<D: Device>(device: &Arc<D>, sizes: &Sizes, fp8: bool) -> Result<(), KernelError> {
    let options = CudaOptions { fp8, ..CudaOptions::default() };
    let mut backend = CudaBackend::new(Arc::clone(device), geometry(sizes, 1, 1), options)?;
    let (what, bytes_of_weight) = if fp8 { ("fp8", 1) } else { ("product", 2) };
    for &(outs, cols) in sizes.weights {
        let data = weights(outs * cols);
        let source = WeightSource {
            name: "w",
            dtype: WeightDtype::Bf16,
            rows: outs,
            cols,
            data: data[..].into(),
            row_order: None,
        };
        let weight = backend.linear(&source)?;
        let most = sizes.rows.iter().copied().max().unwrap_or(0);
        let inputs = Random(2).vector(most * cols);
        for &rows in sizes.rows {
            let (mut x, mut out) = (backend.upload(&inputs[..rows * cols])?, backend.buffer(rows * outs)?);
            let seconds = timed(&mut backend, sizes.repeats, |b| {
                let input = Input { x: &mut x, rows, first: First::Nothing };
                b.matmul(input, [Product { weight: &weight, bias: None, out: &mut out }]);
            })?;
            let (operations, bytes) =
                (2 * rows * outs * cols, outs * cols * bytes_of_weight + rows * (cols + outs) * 4);
            let case = format!("{outs} x {cols}, {rows} rows");
            Figure { what, case, seconds, bytes, operations }.print(sizes);
        }
    }
    Ok(())
}
