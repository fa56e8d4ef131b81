//! Products: the rows that go in, after what comes first, made what the weights are, bf16 or E4M3, and what a product of E4M3 leaves to be done.
//!
//! A row of E4M3 has a scale of its own, its largest magnitude / 448, and so has each output of a weight. cuBLASLt multiplies sums with both
//! where it can ([`Fp8::Scaled`]); elsewhere a kernel does, with the same values. A bias is that kernel's, too: for f32 outputs of such
//! products the library takes none of f32.

use super::backend::{CudaBackend, Normed};
use super::device::{Access, Address, Alike, Device, Fp8, Gemm, Memory, Operands, Piece, RowScales};
use super::params::{self, Element, Embed, GateMul, ScaleProducts};
use super::weight::{CudaWeight, Form, quantise};
use crate::KernelError;
use crate::backend::{First, Gate, Input, Product};

/// Where rows of E4M3 and their scales lie in the memory of operands: together fewer bytes than the same rows of bf16.
fn codes_and_scales<D: Device>(operand: &Memory<D>, rows: usize, cols: usize) -> (Piece<'_>, Piece<'_>) {
    // Columns are multiples of 16 and more than none, so scales are aligned and have room.
    (operand.piece(0, rows * cols), operand.piece(rows * cols, rows * size_of::<f32>()))
}

impl<D: Device> CudaBackend<D> {
    /// A product's input, after what comes first, as weights of this form take it. What is left to be done for weights of another form.
    fn operand<'a>(
        &mut self,
        input: &Input<'a, Memory<D>>,
        cols: usize,
        form: Form,
    ) -> Result<First<'a, Memory<D>>, KernelError> {
        let (rows, elements, first) = (input.rows, input.rows * cols, input.first);
        self.queue.at_least(&mut self.operand, (elements * Element::Bf16.bytes()).max(1))?;
        let Some(operand) = &self.operand else { return Ok(first) };
        let (x, beside) = (input.x.floats(elements), first.beside().map(|other| other.floats(elements)));
        if let Some(norm) = first.norm() {
            assert_eq!(norm.weight.bytes(), cols * size_of::<f32>(), "norm of another width than the product");
            let out = match form {
                Form::E4m3 => {
                    let (codes, scales) = codes_and_scales(operand, rows, cols);
                    Normed::E4m3(codes, scales)
                }
                Form::Bf16 => Normed::Dense(operand.piece(0, elements * Element::Bf16.bytes()), Element::Bf16),
            };
            self.normed(norm, (x, beside), out, rows)?;
            return Ok(First::Norm(norm));
        }
        let gated = match (first, beside) {
            (First::Gate(act, _), Some(up)) => Some((act, up)),
            _ => None,
        };
        match (form, gated) {
            (Form::E4m3, gated) => {
                if let Some((act, up)) = gated {
                    self.gated(act, (x, up), (x, Element::F32))?;
                }
                quantise(&self.queue, (x, Element::F32), codes_and_scales(operand, rows, cols), rows, cols)?;
                Ok(First::Nothing)
            }
            (Form::Bf16, gated) => {
                let out = operand.piece(0, elements * Element::Bf16.bytes());
                match gated {
                    Some((act, up)) => self.gated(act, (x, up), (out, Element::Bf16))?,
                    None => self.rounded(x, out, rows, cols)?,
                }
                Ok(first)
            }
        }
    }

    /// `act(gate) · up`, f32 rows, as rows of this type.
    fn gated(
        &self,
        act: Gate,
        (gate, up): (Piece<'_>, Piece<'_>),
        (out, out_type): (Piece<'_>, Element),
    ) -> Result<(), KernelError> {
        // Nothing of it depends on where a row ends.
        let width = (gate.bytes() / size_of::<f32>()) as u32;
        let params = GateMul {
            gate: gate.at(),
            up: up.at(),
            out: out.at(),
            element: Element::F32,
            out_type,
            act: params::gate(act),
            rows: 1,
            width,
            gate_stride: width,
            up_stride: width,
            out_stride: width,
        };
        let touches = [Access::Read(gate), Access::Read(up), Access::Write(out)];
        self.queue.launch("baton_gate_mul", &params, &touches)
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
        mut input: Input<'_, Memory<D>>,
        mut products: [Product<'_, CudaWeight<D>, Memory<D>>; N],
    ) -> Result<(), KernelError> {
        let Some(cols) = products.first().map(|product| product.weight.cols) else { return Ok(()) };
        for form in [Form::E4m3, Form::Bf16] {
            if !products.iter().any(|product| product.weight.form() == form) {
                continue;
            }
            input.first = self.operand(&input, cols, form)?;
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
