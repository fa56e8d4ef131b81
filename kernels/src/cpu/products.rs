//! Products of one input with several weights: the input is added to or gated, normed and rounded once, a row while it is in the cache,
//! then the panels of all weights are shared out among the threads together, so that a small weight beside a large one leaves no thread
//! waiting.
//!
//! Bytes moved: the input once, for all products; each weight once. Bound: [`super::matmul`]'s. What is fused saves a pass over the
//! input and a wait of all threads for each product but one.

use super::matmul::{self, SIDE_BY_SIDE};
use super::quantise::{self, Quantised, Span};
use super::tiles::Operands;
use super::unpack::GROUP;
use super::{CpuBackend, CpuWeight, LANES, Shared, elementwise};
use crate::KernelError;
use crate::backend::{First, Input, MAX_PRODUCTS, Product};
use crate::pages::Pages;

/// What an input's rows become before they are multiplied.
pub struct Scratch {
    /// Rows that were only normed, for products with floats.
    pub normed: Pages<f32>,
    /// Rows rounded by groups, and by super-blocks.
    rounded: [Quantised; 2],
}

impl Scratch {
    /// Room for `elements` activations.
    pub fn with_capacity(elements: usize) -> Result<Self, KernelError> {
        let rounded = [Quantised::with_capacity(elements)?, Quantised::with_capacity(elements)?];
        Ok(Scratch { normed: Pages::zeroed(elements)?, rounded })
    }
}

/// What products need of their input's rows.
#[derive(Clone, Copy)]
struct Needs {
    /// The floats.
    dense: bool,
    /// Rounded, in these ways.
    spans: [bool; 2],
}

impl Needs {
    fn of<'a>(weights: impl Iterator<Item = &'a CpuWeight> + Clone) -> Needs {
        let any = |span| weights.clone().any(|weight| weight.form.span() == span);
        Needs { dense: any(None), spans: SPANS.map(|span| any(Some(span))) }
    }

    fn rounded(self) -> impl Iterator<Item = (usize, Span)> {
        SPANS.into_iter().enumerate().filter(move |&(i, _)| self.spans[i])
    }
}

/// In the order of [`Scratch::rounded`].
const SPANS: [Span; 2] = [Span::Group, Span::Super];

/// Tasks a thread gets, about: small enough to balance, large enough not to be felt.
const TASKS_PER_THREAD: usize = 4;

/// One product's share of the work.
struct Part<'a> {
    weight: &'a CpuWeight,
    operands: Operands,
    /// Panels of a task.
    piece: usize,
}

impl Part<'_> {
    fn tasks(&self) -> usize {
        self.weight.panels().div_ceil(self.piece)
    }
}

/// Panels that a task takes of this weight when it moves about `bytes`.
fn piece(weight: &CpuWeight, bytes: usize) -> usize {
    (bytes / weight.panel_bytes().max(1)).max(1).next_multiple_of(SIDE_BY_SIDE)
}

impl CpuBackend {
    /// Does what comes first, and norms and rounds the input's rows into the scratch buffers, as far as the products need it: rounded for
    /// quantised weights, the normed floats for dense ones. Gives the floats to multiply.
    fn prepare(&mut self, input: Input<'_, Pages<f32>>, cols: usize, needs: Needs) -> *const f32 {
        let (isa, [groups, supers]) = (self.isa, &mut self.scratch.rounded);
        let rounded = [groups.rounded(), supers.rounded()];
        let normed = Shared(self.scratch.normed.as_mut_ptr());
        let (x, groups) = (Shared(input.x.as_mut_ptr()), cols / GROUP);
        let norm = input.first.norm().map(|norm| (&norm.weight[..], norm.eps));
        let floats = input.x.as_ptr();
        let ways = needs.rounded().count();
        if ways == 0 && matches!(input.first, First::Nothing) {
            return floats;
        }
        self.over_rows(input.rows, cols, &|first, count| {
            for row in first..first + count {
                // SAFETY: `multiply` checked that all buffers hold the rows, and their width where something comes first; a row belongs to one
                // task.
                unsafe {
                    let own = x.add(row * cols);
                    match input.first {
                        First::AddNorm(y, _) => elementwise::add(isa, own, y.as_ptr().add(row * cols), cols),
                        First::Gate(act, up) => {
                            elementwise::gate_mul(isa, act, own, up.as_ptr().add(row * cols), cols);
                        }
                        First::Nothing | First::Norm(_) => {}
                    }
                    let mut from = own.cast_const();
                    let out = |i: usize, span| rounded[i].from(row * groups, span);
                    match norm {
                        Some((weight, eps)) if !needs.dense && ways == 1 => {
                            for (i, span) in needs.rounded() {
                                quantise::norm_quantise(isa, from, weight.as_ptr(), eps, groups, span, out(i, span));
                            }
                            continue;
                        }
                        Some((weight, eps)) => {
                            let to = normed.add(row * cols);
                            elementwise::rms_norm(isa, from, weight.as_ptr(), eps, cols, to);
                            from = to;
                        }
                        None => {}
                    }
                    for (i, span) in needs.rounded() {
                        quantise::quantise(isa, from, groups, span, out(i, span));
                    }
                }
            }
        });
        if norm.is_some() { self.scratch.normed.as_ptr() } else { floats }
    }

    /// All products of an input.
    ///
    /// # Panics
    /// When a buffer is too small, weights differ in their inputs, or [`crate::Backend::reserve`] was not called for as many.
    pub(super) fn multiply<const N: usize>(
        &mut self,
        input: Input<'_, Pages<f32>>,
        products: [Product<'_, CpuWeight, Pages<f32>>; N],
    ) {
        const { assert!(N >= 1 && N <= MAX_PRODUCTS) };
        let (rows, cols) = (input.rows, products[0].weight.cols);
        assert!(input.x.len() >= rows * cols, "matmul input too small");
        let norm = input.first.norm();
        assert!(norm.is_none_or(|norm| norm.weight.len() == cols), "norm of another width");
        let whole = matches!(input.first, First::Nothing) || cols.is_multiple_of(LANES);
        assert!(whole, "rows of {cols} are not whole vectors");
        assert!(
            input.first.beside().is_none_or(|other| other.len() >= rows * cols),
            "what is added or gates is too small"
        );
        for product in &products {
            assert!(product.weight.cols == cols, "weights of one input differ in width");
            assert!(product.out.len() >= rows * product.weight.rows, "matmul output too small");
            assert!(product.bias.is_none_or(|b| b.len() >= product.weight.rows), "matmul bias too small");
        }
        let needs = Needs::of(products.iter().map(|p| p.weight));
        let room = self.scratch.normed.len() >= rows * cols || needs.rounded().count() == 0 && norm.is_none();
        assert!(room, "reserve() was not called for {rows} rows of {cols}");
        let x = self.prepare(input, cols, needs);
        let bytes: usize = products.iter().map(|p| p.weight.data.len()).sum();
        let share = bytes / (self.threads.count() * TASKS_PER_THREAD);
        let parts = products.map(|product| {
            let rounded = &self.scratch.rounded[usize::from(product.weight.form.span() == Some(Span::Super))];
            Part {
                weight: product.weight,
                operands: Operands {
                    rows,
                    x,
                    q: rounded.q.as_ptr(),
                    scale: rounded.scale.as_ptr(),
                    minus_sum: rounded.minus_sum.as_ptr(),
                    minus: rounded.minus.as_ptr(),
                    halves: rounded.halves.as_ptr(),
                    raised: rounded.raised.as_ptr(),
                    bias: product.bias.map(|b| b.as_ptr()),
                    out: product.out.as_mut_ptr(),
                },
                piece: piece(product.weight, share),
            }
        });
        let isa = self.isa;
        self.threads.run(parts.iter().map(Part::tasks).sum(), &|mut i| {
            for part in &parts {
                if let Some(later) = i.checked_sub(part.tasks()) {
                    i = later;
                    continue;
                }
                let first = i * part.piece;
                let last = part.weight.panels().min(first + part.piece);
                // SAFETY: sizes are checked above; a panel's columns belong to one task.
                unsafe { matmul::panels(isa, part.weight, &part.operands, first, last) }
                return;
            }
        });
    }
}
