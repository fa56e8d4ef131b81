//! The arithmetic of attention on up to 32 slots: scores of several queries, the online softmax, and the weighted sum of values.
//!
//! Source of the online softmax: Milakov and Gimelshein 2018, as used by FlashAttention (Dao et al. 2022).
//!
//! A score is one chain of fused multiply-adds over head_dim, an output element one over slots, both ascending; which queries are
//! taken together changes no bit (I1), nor does it whether slots that nobody sees are there, or whether K and V were widened to f32 before
//! or are as they are used, which is exact. Bound: fused multiply-adds, one load for each where one query is alone, about half of one where
//! several share the loads of K and V. Knows nothing of blocks, KV types or tiles.

use super::columns::add_all;
use super::element::Element;
use super::simd::{Floats, LANES, Simd, Wide, exp};

/// Slots of a vector of scores.
pub const SLOTS: usize = 16;
/// Slots taken together: the maximum of a softmax is that of all before these and of these.
pub const GROUP: usize = 2 * SLOTS;
/// Most queries taken together.
pub const TOGETHER: usize = 8;

/// Scores of the first `N` queries against `H` times 16 slots.
#[inline(always)]
unsafe fn scores<S: Simd, E: Element, const N: usize, const H: usize>(
    queries: &[Query],
    slots: &Slots<E>,
) -> [[Wide<S>; H]; N] {
    let mut q = [std::ptr::null(); N];
    for (q, query) in q.iter_mut().zip(queries) {
        *q = query.q;
    }
    // SAFETY: each query has `dim` elements, an even number, k has `dim * 16` and as many for the second half.
    unsafe {
        let mut acc = [[S::Wide::splat(0.0); H]; N];
        for first in (0..slots.dim).step_by(2) {
            for h in 0..H {
                E::ask(slots.next[0][h], first / 2);
            }
            for d in [first, first + 1] {
                for h in 0..H {
                    let k = E::load_wide::<S>(slots.k.add((h * slots.dim + d) * SLOTS));
                    for n in 0..N {
                        acc[n][h] = S::Wide::fma(S::Wide::splat(*q[n].add(d)), k, acc[n][h]);
                    }
                }
            }
        }
        acc
    }
}

/// [`scores`] of three queries against all 32 slots. Their twelve sums of eight lanes, an element of each query and what is widened fill 16
/// registers, and so many sums keep two units for fused multiply-adds busy, whose results come after four cycles.
#[inline(always)]
unsafe fn scores_of_three<S: Simd, E: Element>(queries: &[Query], slots: &Slots<E>) -> [[S::F; 4]; 3] {
    let q = [queries[0].q, queries[1].q, queries[2].q];
    // SAFETY: as for `scores`.
    unsafe {
        let mut acc = [[S::splat(0.0); 4]; 3];
        for d in 0..slots.dim {
            E::ask(slots.next[0][d % 2], d / 2);
            for v in 0..4 {
                let k = E::load::<S>(slots.k.add((v / 2 * slots.dim + d) * SLOTS + v % 2 * LANES));
                for n in 0..3 {
                    acc[n][v] = S::fma(S::splat(*q[n].add(d)), k, acc[n][v]);
                }
            }
        }
        acc
    }
}

/// [`scores`] of all of at most [`TOGETHER`] queries.
#[inline(always)]
unsafe fn all_scores<S: Simd, E: Element, const H: usize>(
    queries: &[Query],
    slots: &Slots<E>,
) -> [[Wide<S>; H]; TOGETHER] {
    // SAFETY: the caller's promise.
    unsafe {
        let mut found = [[S::Wide::splat(0.0); H]; TOGETHER];
        if H == 2 && size_of::<E>() == 2 && S::REGISTERS < 32 {
            if queries.len().is_multiple_of(3) {
                for (three, found) in queries.chunks(3).zip(found.chunks_mut(3)) {
                    for (found, [a, b, c, d]) in found.iter_mut().zip(scores_of_three::<S, E>(three, slots)) {
                        (found[0], found[H - 1]) = (S::join(a, b), S::join(c, d));
                    }
                }
                return found;
            }
            // Each half alone: then up to four queries share what is widened.
            for half in 0..H {
                let found_half = all_scores::<S, E, 1>(queries, &slots.half(half));
                for n in 0..queries.len() {
                    found[n][half] = found_half[n][0];
                }
            }
            return found;
        }
        let mut n = 0;
        while n < queries.len() {
            macro_rules! some {
                ($count:literal) => {{
                    let scores = scores::<S, E, $count, H>(&queries[n..], slots);
                    found[n..n + $count].copy_from_slice(&scores);
                    n += $count;
                }};
            }
            match queries.len() - n {
                8.. if S::REGISTERS >= 32 => some!(8),
                6.. if S::REGISTERS >= 32 => some!(6),
                4.. if S::REGISTERS >= 32 || H == 1 => some!(4),
                3 if S::REGISTERS >= 32 || H == 1 => some!(3),
                2.. => some!(2),
                _ => some!(1),
            }
        }
        found
    }
}

/// Running maximum and sum of a query's softmax.
#[derive(Clone, Copy)]
pub struct Softmax<S: Simd> {
    max: f32,
    /// Of the weights so far, those of slots `16n + i` in lane i.
    sum: Wide<S>,
}

impl<S: Simd> Softmax<S> {
    /// Before the first slot.
    ///
    /// # Safety
    /// The CPU has `S`'s features.
    #[inline(always)]
    pub unsafe fn empty() -> Softmax<S> {
        // SAFETY: the caller's promise.
        Softmax { max: f32::NEG_INFINITY, sum: unsafe { S::Wide::splat(0.0) } }
    }

    /// Sum of all weights.
    ///
    /// # Safety
    /// The CPU has `S`'s features.
    #[inline(always)]
    pub unsafe fn sum(&self) -> f32 {
        // SAFETY: the caller's promise.
        unsafe {
            let [low, high] = S::split(self.sum);
            S::sum(S::add(low, high))
        }
    }
}

/// A query among those taken together.
#[derive(Clone, Copy)]
pub struct Query {
    /// `head_dim` elements.
    pub q: *const f32,
    /// As many.
    pub out: *mut f32,
    /// Of the slots, the first it sees and the one behind the last.
    pub seen: (usize, usize),
    /// Which of the softmaxes is its.
    pub state: usize,
}

/// 16 slots, and perhaps 16 more.
#[derive(Clone, Copy)]
pub struct Slots<E> {
    /// K, transposed to `[dim][slot]`; that of the second half is behind that of the first.
    pub k: *const E,
    /// V as `[slot][dim]`, of each half.
    pub v: [*const E; 2],
    /// head_dim.
    pub dim: usize,
    /// Of 16 bits, K of each half as it lies in the pool, and V, of the slots that are needed next: each line is asked for while its place in
    /// these is used. Readable or not.
    pub next: [[*const u8; 2]; 2],
}

impl<E> Slots<E> {
    /// The first half or the second.
    #[inline(always)]
    pub fn half(&self, half: usize) -> Slots<E> {
        let next = self.next.map(|of| [of[half]; 2]);
        Slots { k: self.k.wrapping_add(half * self.dim * SLOTS), v: [self.v[half]; 2], dim: self.dim, next }
    }
}

/// `row *= factor`.
///
/// # Safety
/// The row has `dim` elements, a multiple of 8.
#[inline(always)]
pub unsafe fn scale_row<S: Simd>(row: *mut f32, dim: usize, factor: f32) {
    let mut d = 0;
    // SAFETY: the caller's promise.
    unsafe {
        while d + SLOTS <= dim {
            S::Wide::store(row.add(d), S::Wide::mul(S::Wide::load(row.add(d)), S::Wide::splat(factor)));
            d += SLOTS;
        }
        if d < dim {
            S::store(row.add(d), S::mul(S::load(row.add(d)), S::splat(factor)));
        }
    }
}

/// Lanes `seen` of vectors side by side, the others replaced.
#[inline(always)]
unsafe fn select<S: Simd, const H: usize>(x: &mut [Wide<S>; H], (low, high): (usize, usize), other: f32) {
    for h in 0..H {
        let at = |slot: usize| slot.saturating_sub(h * SLOTS).min(SLOTS);
        // SAFETY: the caller vouches for the CPU features; no memory is touched.
        unsafe { x[h] = S::Wide::select_range(x[h], at(low), at(high), other) }
    }
}

/// Takes scores, of which those of slots `query.seen` count, into a softmax: scales the output when the maximum rises, and leaves the
/// weights in `p`.
#[inline(always)]
unsafe fn weigh<S: Simd, const H: usize>(
    state: &mut Softmax<S>,
    scores: [Wide<S>; H],
    (scale, dim): (f32, usize),
    query: &Query,
    p: &mut Weights,
) {
    // SAFETY: the output row has `dim` elements, p room for all weights.
    unsafe {
        let all = query.seen == (0, H * SLOTS);
        let mut x = scores;
        for h in 0..H {
            x[h] = S::Wide::mul(scores[h], S::Wide::splat(scale));
        }
        if !all {
            select::<S, H>(&mut x, query.seen, f32::NEG_INFINITY);
        }
        let largest = if H == 2 { S::Wide::max(x[0], x[H - 1]) } else { x[0] };
        if S::Wide::any_larger(largest, S::Wide::splat(state.max)) {
            rise::<S>(state, largest, query.out, dim);
        }
        let mut weights = x;
        for h in 0..H {
            weights[h] = exp::<S::Wide>(S::Wide::sub(x[h], S::Wide::splat(state.max)));
        }
        if !all {
            select::<S, H>(&mut weights, query.seen, 0.0);
        }
        for h in 0..H {
            state.sum = S::Wide::add(state.sum, weights[h]);
            S::Wide::store(p.as_mut_ptr().add(h * SLOTS), weights[h]);
        }
    }
}

/// Raises the maximum to the largest lane of `x`, and scales what was summed with the old one. Rare after the first slots.
#[inline(always)]
unsafe fn rise<S: Simd>(state: &mut Softmax<S>, x: Wide<S>, out: *mut f32, dim: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        let [low, high] = S::split(x);
        let largest = S::max_lane(S::max(low, high));
        if state.max > f32::NEG_INFINITY {
            let mut row = [0.0f32; LANES];
            S::store(row.as_mut_ptr(), exp::<S>(S::splat(state.max - largest)));
            state.sum = S::Wide::mul(state.sum, S::Wide::splat(row[0]));
            scale_row::<S>(out, dim, row[0]);
        }
        state.max = largest;
    }
}

/// Weights of a query's slots.
pub type Weights = [f32; GROUP];

/// What attention does with slots, compiled once for each instruction set and float type and not into the kernel of each KV type.
pub trait Fold: Simd {
    /// Folds `H` times 16 slots into the softmax and output of up to [`TOGETHER`] queries, each of which sees at least one. They may belong to
    /// several sequences.
    ///
    /// # Safety
    /// `states` has those that the queries name; queries, outputs and slots have `slots.dim` elements, a multiple of 8; the CPU has `S`'s
    /// features.
    unsafe fn fold<E: Element, const H: usize>(
        queries: &[Query],
        states: *mut Softmax<Self>,
        scale: f32,
        slots: &Slots<E>,
    );
}

/// [`Fold`] with an instruction set's features.
macro_rules! folds {
    ($set:ty $(, $features:literal)?) => {
        impl Fold for $set {
            $(#[target_feature(enable = $features)])?
            #[inline(never)]
            unsafe fn fold<E: Element, const H: usize>(
                queries: &[Query],
                states: *mut Softmax<Self>,
                scale: f32,
                slots: &Slots<E>,
            ) {
                // SAFETY: the caller's promise.
                unsafe { fold_here::<Self, E, H>(queries, states, scale, slots) }
            }
        }
    };
}
folds!(super::portable::Portable);
#[cfg(target_arch = "x86_64")]
folds!(super::avx2::Avx2, "avx2,fma,f16c");
#[cfg(target_arch = "x86_64")]
folds!(super::avx512::Vnni, "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni");

/// See [`Fold::fold`].
#[inline(always)]
unsafe fn fold_here<S: Simd, E: Element, const H: usize>(
    queries: &[Query],
    states: *mut Softmax<S>,
    scale: f32,
    slots: &Slots<E>,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let found = all_scores::<S, E, H>(queries, slots);
        let mut p: [Weights; TOGETHER] = [[0.0; GROUP]; TOGETHER];
        for (i, query) in queries.iter().enumerate() {
            weigh::<S, H>(&mut *states.add(query.state), found[i], (scale, slots.dim), query, &mut p[i]);
        }
        let mut n = 0;
        while n < queries.len() {
            let mut alike = 1;
            while n + alike < queries.len() && queries[n + alike].seen == queries[n].seen {
                alike += 1;
            }
            add_all::<S, E>(&queries[n..n + alike], &p[n..n + alike], slots, queries[n].seen);
            n += alike;
        }
    }
}
