//! The weighted sum of values, a part of [`super::fold`]: each output element is one chain of fused multiply-adds over slots, ascending.

use super::element::Element;
use super::fold::{Query, SLOTS, Slots, Weights};
use super::simd::{Floats, LANES, Simd, Wide};

/// Eight lanes or sixteen, into which elements are widened.
trait Vector {
    /// The lanes.
    type Lanes: Floats;
    /// Widens as many elements.
    unsafe fn load<E: Element>(p: *const E) -> <Self::Lanes as Floats>::F;
}

/// Eight lanes.
struct Eight<S>(std::marker::PhantomData<S>);

/// Sixteen.
struct Sixteen<S>(std::marker::PhantomData<S>);

impl<S: Simd> Vector for Eight<S> {
    type Lanes = S;
    #[inline(always)]
    unsafe fn load<E: Element>(p: *const E) -> S::F {
        // SAFETY: the caller's promise.
        unsafe { E::load::<S>(p) }
    }
}

impl<S: Simd> Vector for Sixteen<S> {
    type Lanes = S::Wide;
    #[inline(always)]
    unsafe fn load<E: Element>(p: *const E) -> Wide<S> {
        // SAFETY: the caller's promise.
        unsafe { E::load_wide::<S>(p) }
    }
}

/// `acc[n] += p[n][s] · v[s]`, `W` vectors wide.
#[inline(always)]
unsafe fn add_slot<V: Vector, E: Element, const N: usize, const W: usize>(
    acc: &mut [[<V::Lanes as Floats>::F; W]; N],
    weights: &[*const f32; N],
    s: usize,
    row: *const E,
) {
    // SAFETY: the caller's promise: the row has `W` vectors, and each query a weight for the slot.
    unsafe {
        for w in 0..W {
            let values = V::load(row.add(w * V::Lanes::COUNT));
            for n in 0..N {
                acc[n][w] = V::Lanes::fma(V::Lanes::splat(*weights[n].add(s)), values, acc[n][w]);
            }
        }
    }
}

/// `out[n] += Σ_s p[n][s] · v[s]` over slots `low..high`, `W` vectors wide from element `d` on.
#[inline(always)]
unsafe fn add_columns<V: Vector, E: Element, const N: usize, const W: usize>(
    queries: &[Query],
    p: &[Weights],
    (slots, d): (&Slots<E>, usize),
    (low, high): (usize, usize),
) {
    let (mut out, mut weights) = ([std::ptr::null_mut::<f32>(); N], [std::ptr::null::<f32>(); N]);
    for n in 0..N {
        (out[n], weights[n]) = (queries[n].out.wrapping_add(d), p[n].as_ptr());
    }
    let (count, lines) = (V::Lanes::COUNT, W * V::Lanes::COUNT / SLOTS);
    // SAFETY: outputs and the rows of v that are seen have `dim` elements, `W` vectors of them from `d` on.
    unsafe {
        let mut acc = [[V::Lanes::splat(0.0); W]; N];
        for n in 0..N {
            for w in 0..W {
                acc[n][w] = V::Lanes::load(out[n].add(w * count));
            }
        }
        for half in 0..2 {
            let first = half * SLOTS;
            let (mut s, end) = (low.max(first), high.min(first + SLOTS));
            let row = |s: usize| slots.v[half].wrapping_add((s - first) * slots.dim + d);
            while s + 2 <= end {
                // Two slots of 16 columns are as many elements as a line has.
                for w in 0..lines {
                    E::ask(slots.next[1][half], d / 2 + (s - first) / 2 * lines + w);
                }
                add_slot::<V, E, N, W>(&mut acc, &weights, s, row(s));
                add_slot::<V, E, N, W>(&mut acc, &weights, s + 1, row(s + 1));
                s += 2;
            }
            if s < end {
                add_slot::<V, E, N, W>(&mut acc, &weights, s, row(s));
            }
        }
        for n in 0..N {
            for w in 0..W {
                V::Lanes::store(out[n].add(w * count), acc[n][w]);
            }
        }
    }
}

/// Adds values of slots `seen` to the first `N` outputs.
#[inline(always)]
unsafe fn add_values<S: Simd, E: Element, const N: usize, const W: usize>(
    queries: &[Query],
    p: &[Weights],
    slots: &Slots<E>,
    seen: (usize, usize),
) {
    let (dim, mut d) = (slots.dim, 0);
    // SAFETY: outputs and rows of v have `dim` elements, a multiple of 8.
    unsafe {
        // As with scores, these fill 16 registers.
        if N == 3 && W == 1 {
            while d + 4 * LANES <= dim {
                add_columns::<Eight<S>, E, N, 4>(queries, p, (slots, d), seen);
                d += 4 * LANES;
            }
        }
        while d + W * SLOTS <= dim {
            add_columns::<Sixteen<S>, E, N, W>(queries, p, (slots, d), seen);
            d += W * SLOTS;
        }
        while d + SLOTS <= dim {
            add_columns::<Sixteen<S>, E, N, 1>(queries, p, (slots, d), seen);
            d += SLOTS;
        }
        if d < dim {
            add_columns::<Eight<S>, E, N, 1>(queries, p, (slots, d), seen);
        }
    }
}

/// Adds values of slots `seen` to all outputs.
///
/// # Safety
/// Outputs and slots have `slots.dim` elements, a multiple of 8, as far as they are seen; the CPU has `S`'s features.
#[inline(always)]
pub unsafe fn add_all<S: Simd, E: Element>(queries: &[Query], p: &[Weights], slots: &Slots<E>, seen: (usize, usize)) {
    let mut n = 0;
    while n < queries.len() {
        macro_rules! some {
            ($count:literal, $width:literal) => {{
                // SAFETY: the caller's promise.
                unsafe { add_values::<S, E, $count, $width>(&queries[n..], &p[n..], slots, seen) }
                n += $count;
            }};
        }
        // What is widened here is shared by more queries.
        let widens = size_of::<E>() == 2;
        match (queries.len() - n, S::REGISTERS) {
            (3 | 6, ..32) if widens => some!(3, 1),
            (4.., ..32) if widens => some!(4, 1),
            (4 | 7.., 32..) => some!(4, 4),
            (3.., 32..) => some!(3, 4),
            (2.., 32..) => some!(2, 4),
            (2.., _) => some!(2, 2),
            _ => some!(1, 4),
        }
    }
}
