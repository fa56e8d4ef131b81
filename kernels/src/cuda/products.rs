//! Matrix products in three parts: an operation on the input rows ([`First`]), converted to the type of the weights (bf16 or E4M3);
//! the product itself; for E4M3 also scales and bias.
//!
//! Each input row of E4M3 has its own scale, its largest magnitude / 448. So has each output of a weight. cuBLASLt multiplies the sums
//! with both scales where it can ([`Fp8::Scaled`]). Elsewhere a kernel does so, with the same values. That kernel also adds the bias:
//! for f32 outputs of such products the library takes no f32 bias.

use super::attention::Strided;
use super::backend::{CudaBackend, Normed};
use super::device::{Access, Address, Alike, Device, Fp8, Gemm, Operands, Piece, RowScales};
use super::memory::Memory;
use super::params::{self, Element, Embed, GateMul, ScaleProducts};
use super::weight::{CudaWeight, Form, quantise};
use crate::KernelError;
use crate::backend::{First, Gate, Input, Product};

/// Places of E4M3 rows and of their scales in the memory of operands. Together they need fewer bytes than the same rows in bf16.
fn codes_and_scales<D: Device>(operand: &Memory<D>, rows: usize, cols: usize) -> (Piece<'_>, Piece<'_>) {
    // The number of columns is a multiple of 16 and above 0, so the scales are aligned and have room.
    (operand.piece(0, rows * cols), operand.piece(rows * cols, rows * size_of::<f32>()))
}

impl<D: Device> CudaBackend<D> {
    /// Applies the input's [`First`] and converts its rows for weights of this form, into the memory of operands. Rows that are bf16
    /// already stay where they are. Returns the operation that is left to do before products with weights of another form.
    fn operand<'a>(
        &mut self,
        input: &Input<'a, Memory<D>>,
        cols: usize,
        form: Form,
    ) -> Result<First<'a, Memory<D>>, KernelError> {
        let (rows, first, x) = (input.rows, input.first, &*input.x);
        let bytes = rows * cols * Element::Bf16.bytes();
        self.queue.at_least(&mut self.operand, bytes.max(1))?;
        let Some(operand) = &self.operand else { return Ok(first) };
        let (dense, coded) = ((operand.piece(0, bytes), Element::Bf16), codes_and_scales(operand, rows, cols));
        match (first, form) {
            (First::Norm(norm) | First::AddNorm(_, norm), _) => {
                assert_eq!(norm.weight.bytes(), cols * size_of::<f32>(), "norm of another width than the product");
                let out = match form {
                    Form::E4m3 => Normed::E4m3(coded.0, coded.1),
                    Form::Bf16 => Normed::Dense(dense.0, dense.1),
                };
                let added = first.beside().map(|other| other.floats(rows * cols));
                self.normed(norm, (x.heads(rows, cols), added), out, rows)?;
                Ok(First::Norm(norm))
            }
            (First::Gate(act, up), Form::Bf16) => {
                let of = [x, up].map(|part| part.rows(rows, cols));
                self.gated(act, of, (dense.0, cols, dense.1), (rows, cols))?;
                Ok(first)
            }
            (First::Gate(act, up), Form::E4m3) => {
                let of = [x, up].map(|part| part.rows(rows, cols));
                let (gate, stride) = of[0];
                self.gated(act, of, (gate, stride, Element::F32), (rows, cols))?;
                quantise(&self.queue, (gate, Element::F32, stride), coded, rows, cols)?;
                Ok(First::Nothing)
            }
            (First::Nothing, Form::Bf16) if x.element() == Element::Bf16 => Ok(first),
            (First::Nothing, Form::Bf16) => self.rounded(x.floats(rows * cols), dense.0, rows, cols).map(|()| first),
            (First::Nothing, Form::E4m3) => {
                let (x, stride) = x.rows(rows, cols);
                quantise(&self.queue, (x, Element::F32, stride), coded, rows, cols).map(|()| first)
            }
        }
    }

    /// Computes `act(gate) · up` of f32 rows of `width` elements, and stores it as rows of `out_type`.
    fn gated(
        &self,
        act: Gate,
        [(gate, gate_stride), (up, up_stride)]: [Strided<'_>; 2],
        (out, out_stride, out_type): (Piece<'_>, usize, Element),
        (rows, width): (usize, usize),
    ) -> Result<(), KernelError> {
        let params = GateMul {
            gate: gate.at(),
            up: up.at(),
            out: out.at(),
            element: Element::F32,
            out_type,
            act: params::gate(act),
            rows: rows as u32,
            width: width as u32,
            gate_stride: gate_stride as u32,
            up_stride: up_stride as u32,
            out_stride: out_stride as u32,
        };
        let touches = [Access::Read(gate), Access::Read(up), Access::Write(out)];
        self.queue.launch("baton_gate_mul", &params, &touches)
    }

    /// Rounds f32 rows to bf16.
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
        products: [Product<'_, CudaWeight<D>, Memory<D>>; N],
    ) -> Result<(), KernelError> {
        let Some(cols) = products.first().map(|product| product.weight.cols) else { return Ok(()) };
        assert!(
            products.iter().all(|product| product.weight.cols == cols),
            "products of one input have as many inputs"
        );
        for form in [Form::E4m3, Form::Bf16] {
            if !products.iter().any(|product| product.weight.form() == form) {
                continue;
            }
            input.first = self.operand(&input, cols, form)?;
            let mut rest = &products[..];
            while let [product, others @ ..] = rest {
                rest = others;
                if product.weight.form() != form {
                    continue;
                }
                let (mut weight, mut out, bias) = (product.weight.clone(), product.out.clone(), product.bias);
                while let ([next, others @ ..], None) = (rest, bias) {
                    let joined = weight.joined(next.weight).zip(out.joined(next.out));
                    let Some(joined) = joined.filter(|_| next.bias.is_none()) else { break };
                    ((weight, out), rest) = (joined, others);
                }
                let bias = bias.map(|bias| bias.floats(weight.rows));
                self.product(&weight, bias, (&*input.x, out.rows(input.rows, weight.rows)), input.rows)?;
            }
        }
        Ok(())
    }

    /// Computes one product, with the operand that [`CudaBackend::operand`] has prepared.
    fn product(
        &self,
        of: &CudaWeight<D>,
        bias: Option<Piece<'_>>,
        (x, (out, stride)): (&Memory<D>, Strided<'_>),
        rows: usize,
    ) -> Result<(), KernelError> {
        let Some(operand) = &self.operand else { return Ok(()) };
        let alike = if self.options.invariant { Alike::Always } else { Alike::by_rows(rows) };
        let (outs, cols, weight) = (of.rows, of.cols, of.memory.piece(0, of.memory.bytes()));
        let Some(weight_scales) = &of.scales else {
            let x = if x.element() == Element::Bf16 { x } else { operand };
            let x = x.piece(0, rows * cols * Element::Bf16.bytes());
            return self.queue.product(&Gemm {
                operands: Operands::Bf16,
                weight,
                x,
                bias,
                out,
                stride,
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
        self.queue.product(&Gemm { operands, weight, x, bias: None, out, stride, rows, outs, cols, alike })?;
        self.finish_product((out, stride), (!applied).then_some(scales), bias, rows, outs)
    }

    /// Applies the scales, if the product has not, and the bias, if there is one.
    fn finish_product(
        &self,
        (out, stride): Strided<'_>,
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
        let (rows, width, stride) = (rows as u32, outs as u32, stride as u32);
        let (row_scales, column_scales, bias) = (at(row), at(column), at(bias));
        let params = ScaleProducts { x: out.at(), row_scales, column_scales, bias, rows, width, stride };
        self.queue.launch("baton_scale_products", &params, &touches)
    }
}
