//! Products: the rows that go in made what the weights are, bf16 or E4M3, and what a product of E4M3 leaves to be done.
//!
//! A row of E4M3 has a scale of its own, its largest magnitude / 448, and so has each output of a weight. cuBLASLt multiplies sums with both
//! where it can ([`Fp8::Scaled`]); elsewhere a kernel does, with the same values. A bias is that kernel's, too: for f32 outputs of such
//! products the library takes none of f32.

use super::backend::{CudaBackend, Normed};
use super::device::{Access, Address, Alike, Device, Fp8, Gemm, Memory, Operands, Piece, RowScales};
use super::params::{Element, Embed, ScaleProducts};
use super::weight::{CudaWeight, Form, quantise};
use crate::KernelError;
use crate::backend::{Input, Product};

/// Where rows of E4M3 and their scales lie in the memory of operands: together fewer bytes than the same rows of bf16.
fn codes_and_scales<D: Device>(operand: &Memory<D>, rows: usize, cols: usize) -> (Piece<'_>, Piece<'_>) {
    // Columns are multiples of 16 and more than none, so scales are aligned and have room.
    (operand.piece(0, rows * cols), operand.piece(rows * cols, rows * size_of::<f32>()))
}

impl<D: Device> CudaBackend<D> {
    /// A product's input, normed where it is to be, as weights of this form take it.
    fn operand(&mut self, input: &Input<'_, Memory<D>>, cols: usize, form: Form) -> Result<(), KernelError> {
        let (rows, elements) = (input.rows, input.rows * cols);
        self.queue.at_least(&mut self.operand, (elements * Element::Bf16.bytes()).max(1))?;
        let Some(operand) = &self.operand else { return Ok(()) };
        let x = input.x.floats(elements);
        if let Some(norm) = input.norm {
            assert_eq!(norm.weight.bytes(), cols * size_of::<f32>(), "norm of another width than the product");
        }
        match (form, input.norm) {
            (Form::E4m3, norm) => {
                let (codes, scales) = codes_and_scales(operand, rows, cols);
                match norm {
                    Some(norm) => self.normed(norm, x, Normed::E4m3(codes, scales), rows),
                    None => quantise(&self.queue, (x, Element::F32), (codes, scales), rows, cols),
                }
            }
            (Form::Bf16, norm) => {
                let out = operand.piece(0, elements * Element::Bf16.bytes());
                match norm {
                    Some(norm) => self.normed(norm, x, Normed::Dense(out, Element::Bf16), rows),
                    None => self.rounded(x, out, rows, cols),
                }
            }
        }
    }

    /// f32 rows as bf16.
    fn rounded(&self, x: Piece<'_>, out: Piece<'_>, rows: usize, cols: usize) -> Result<(), KernelError> {
        let params = Embed {
            table: x.at(),
            rows: Address::default(),
            out: out.at(),
            table_type: Element::F32,
            out_type: Element::Bf16,
            count: rows as u32,
            width: cols as u32,
            scale: 1.0,
            drawn: Address::default(),
        };
        self.queue.launch("baton_embed", &params, &[Access::Read(x), Access::Write(out)])
    }

    pub(super) fn multiply<const N: usize>(
        &mut self,
        input: Input<'_, Memory<D>>,
        mut products: [Product<'_, CudaWeight<D>, Memory<D>>; N],
    ) -> Result<(), KernelError> {
        let Some(cols) = products.first().map(|product| product.weight.cols) else { return Ok(()) };
        for form in [Form::E4m3, Form::Bf16] {
            if !products.iter().any(|product| product.weight.form() == form) {
                continue;
            }
            self.operand(&input, cols, form)?;
            for Product { weight, bias, out } in &mut products {
                if weight.form() == form {
                    assert_eq!(weight.cols, cols, "products of one input have as many inputs");
                    let bias = bias.map(|bias| bias.floats(weight.rows));
                    self.product(weight, bias, out.floats(input.rows * weight.rows), input.rows)?;
                }
            }
        }
        Ok(())
    }

    /// One product with the operand as it lies there.
    fn product(
        &self,
        of: &CudaWeight<D>,
        bias: Option<Piece<'_>>,
        out: Piece<'_>,
        rows: usize,
    ) -> Result<(), KernelError> {
        let Some(operand) = &self.operand else { return Ok(()) };
        let alike = if self.options.invariant { Alike::Always } else { Alike::by_rows(rows) };
        let (outs, cols, weight) = (of.rows, of.cols, of.memory.piece(0, of.memory.bytes()));
        let Some(weight_scales) = &of.scales else {
            let x = operand.piece(0, rows * cols * Element::Bf16.bytes());
            return self.queue.product(&Gemm {
                operands: Operands::Bf16,
                weight,
                x,
                bias,
                out,
                rows,
                outs,
                cols,
                alike,
            });
        };
        let (x, x_scales) = codes_and_scales(operand, rows, cols);
        let scales = RowScales { weight: weight_scales.floats(outs), x: x_scales };
        let applied = self.queue.device.properties().fp8 == Fp8::Scaled;
        let operands = Operands::E4m3(applied.then_some(scales));
        self.queue.product(&Gemm { operands, weight, x, bias: None, out, rows, outs, cols, alike })?;
        self.finish_product(out, (!applied).then_some(scales), bias, rows, outs)
    }

    /// Scales that a product has not applied, and its bias.
    fn finish_product(
        &self,
        out: Piece<'_>,
        scales: Option<RowScales<'_>>,
        bias: Option<Piece<'_>>,
        rows: usize,
        outs: usize,
    ) -> Result<(), KernelError> {
        if scales.is_none() && bias.is_none() {
            return Ok(());
        }
        let at = |piece: Option<Piece<'_>>| piece.map_or(Address::default(), |piece| piece.at());
        let (row, column) = (scales.map(|scales| scales.x), scales.map(|scales| scales.weight));
        let read = |piece: Option<_>| Access::Read(piece.unwrap_or(out));
        let touches = [Access::Write(out), read(row), read(column), read(bias)];
        let (rows, width) = (rows as u32, outs as u32);
        let params =
            ScaleProducts { x: out.at(), row_scales: at(row), column_scales: at(column), bias: at(bias), rows, width };
        self.queue.launch("baton_scale_products", &params, &touches)
    }
}
