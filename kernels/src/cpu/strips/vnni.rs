//! The products of an unpacked strip with VNNI: tiles of up to six rows by two vectors of outputs.
//!
//! Twelve sums of integers and as many of floats fill 24 of the 32 registers; what a super-block has besides waits in memory. A broadcast of four
//! activations serves two vectors, and a vector of weights all rows of the tile, so that loads stay far below the two a cycle.

use std::arch::x86_64::*;
use std::ops::Range;

use super::super::packing::SUPER;
use super::super::tiles::Operands;
use super::super::unpack::GROUP;
use super::sums::{At, Sums, add_scaled, add_super};
use super::{Ahead, Chunk, HALVES, Kind, MINIMUM, SIGNED, SUPER4, SUPER5, Span, Unpacked, Vector};

/// Most rows of a tile.
const TILE: usize = 6;

/// The same integer for every output.
#[inline(always)]
unsafe fn every(x: i32) -> __m512i {
    // SAFETY: the caller's promise.
    unsafe { _mm512_set1_epi32(x) }
}

/// Adds the products of words `words` of the rows' activations with the weights to `dot`.
#[inline(always)]
unsafe fn add_products<const T: usize>(
    dot: &mut [[__m512i; 2]; T],
    w: *const Unpacked,
    q: [*const i8; T],
    words: Range<usize>,
) {
    // SAFETY: the caller's promise.
    unsafe {
        for i in words {
            let weights = [(*w).weights[i][0].integers(), (*w).weights[i][1].integers()];
            for t in 0..T {
                let x = every(q[t].cast::<i32>().add(i).read_unaligned());
                dot[t][0] = _mm512_dpbusd_epi32(dot[t][0], weights[0], x);
                dot[t][1] = _mm512_dpbusd_epi32(dot[t][1], weights[1], x);
            }
        }
    }
}

/// The rows' dot products of words `words` of a group, as floats; `part` says what undoes the raising of weights, if they are.
#[inline(always)]
unsafe fn dots<const T: usize>(
    w: *const Unpacked,
    x: &Operands,
    at: At,
    words: Range<usize>,
    part: Option<usize>,
) -> Sums<T> {
    // SAFETY: the caller's promise.
    unsafe {
        let mut q = [x.q; T];
        let mut dot = [[_mm512_setzero_si512(); 2]; T];
        for t in 0..T {
            q[t] = x.q.add(at.group_of(t) * GROUP);
            if let Some(part) = part {
                dot[t] = [every((*x.raised.add(at.group_of(t)))[part]); 2];
            }
        }
        add_products(&mut dot, w, q, words);
        let mut found = [[_mm512_setzero_ps(); 2]; T];
        for t in 0..T {
            for v in 0..2 {
                found[t][v] = _mm512_cvtepi32_ps(dot[t][v]);
            }
        }
        found
    }
}

/// Adds dot products times their small scales.
#[inline(always)]
unsafe fn add_small<const T: usize>(sums: &mut Sums<T>, dot: Sums<T>, scale: [Vector; 2]) {
    for t in 0..T {
        for v in 0..2 {
            // SAFETY: the caller's promise.
            sums[t][v] = unsafe { _mm512_fmadd_ps(dot[t][v], scale[v].floats(), sums[t][v]) };
        }
    }
}

/// Groups of a super-block whose sums of dot products times small scales are below 2^24, so exact as floats: of 32 weights below 2^4 and scales
/// below 2^6 four, of weights below 2^5 two, of weights of at most 2^5 and scales of at most 2^7 one. Activations are at most 127.
const fn exact(kind: u8) -> usize {
    match kind {
        SUPER4 => 4,
        SUPER5 => 2,
        _ => 1,
    }
}

/// Rows `row..row + T` times the super-blocks of the span. The sum of a super-block is the float that is next to the integer. A loop over groups,
/// so that its code stays small.
#[inline(always)]
unsafe fn add_supers<const T: usize, const KIND: u8>(
    acc: &mut Sums<T>,
    w: Chunk,
    x: &Operands,
    (span, row): (Span, usize),
    mut ahead: Ahead,
) {
    let exact = const { exact(KIND) };
    // SAFETY: the caller's promise.
    unsafe {
        let none = [[_mm512_setzero_ps(); 2]; T];
        let (mut few, mut halves) = (none, none);
        let mut sums = [[_mm512_setzero_si512(); 2]; T];
        for g in 0..span.groups {
            ahead.fetch();
            let (w_of, at) = (w.groups.add(g), At { row, group: span.group + g, all: span.all });
            if KIND == HALVES {
                add_small(&mut few, dots::<T>(w_of, x, at, 0..4, Some(0)), (*w_of).factors[0]);
                add_small(&mut few, dots::<T>(w_of, x, at, 4..8, Some(1)), (*w_of).factors[1]);
            } else {
                add_small(&mut few, dots::<T>(w_of, x, at, 0..8, None), (*w_of).factors[0]);
            }
            if g % exact < exact - 1 {
                continue;
            }
            for t in 0..T {
                for v in 0..2 {
                    if KIND == SUPER4 {
                        // The sum of two is rounded once, as the integer would be.
                        halves[t][v] = _mm512_add_ps(halves[t][v], few[t][v]);
                    } else {
                        sums[t][v] = _mm512_add_epi32(sums[t][v], _mm512_cvtps_epi32(few[t][v]));
                    }
                }
            }
            few = none;
            if g % SUPER < SUPER - 1 {
                continue;
            }
            if KIND != SUPER4 {
                for t in 0..T {
                    for v in 0..2 {
                        halves[t][v] = _mm512_cvtepi32_ps(sums[t][v]);
                    }
                }
                sums = [[_mm512_setzero_si512(); 2]; T];
            }
            let at = At { group: at.group + 1 - SUPER, ..at };
            add_super::<T, KIND>(acc, halves, w.heads.add(g / SUPER), x, at);
            halves = none;
        }
    }
}

/// Rows `row..row + T` times the groups of the span.
#[inline(always)]
unsafe fn tile<const T: usize, const KIND: u8>(
    w: Chunk,
    x: &Operands,
    span: Span,
    row: usize,
    kept: *mut [Vector; 2],
    mut ahead: Ahead,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut acc = super::sums::begin::<T>(kept, span.group);
        let at = |g: usize| At { row, group: span.group + g, all: span.all };
        if KIND == MINIMUM || KIND == SIGNED {
            for g in 0..span.groups {
                ahead.fetch();
                let part = if KIND == SIGNED { Some(2) } else { None };
                let found = dots::<T>(w.groups.add(g), x, at(g), 0..8, part);
                add_scaled::<T, KIND>(&mut acc, found, w.groups.add(g), x, at(g));
            }
        } else {
            add_supers::<T, KIND>(&mut acc, w, x, (span, row), ahead);
        }
        super::sums::end(acc, kept, x, row, (span.group + span.groups == span.all).then_some(span.columns));
    }
}

#[inline(always)]
unsafe fn rows<const KIND: u8>(w: Chunk, x: &Operands, span: Span, sums: *mut [Vector; 2], ahead: &mut Ahead) {
    ahead.share(span.rows.div_ceil(TILE) * (span.all - span.group));
    let mut done = 0;
    while done < span.rows {
        macro_rules! tile {
            ($t:literal) => {{
                // SAFETY: the caller's promise.
                unsafe { tile::<$t, KIND>(w, x, span, span.row + done, sums.add(done), *ahead) }
            }};
        }
        // As even as they can be: a tile of one row would wait for each sum.
        let left = span.rows - done;
        let count = left.div_ceil(left.div_ceil(TILE));
        match count {
            6 => tile!(6),
            5 => tile!(5),
            4 => tile!(4),
            3 => tile!(3),
            2 => tile!(2),
            _ => tile!(1),
        }
        done += count;
        ahead.pass(span.groups);
    }
}

/// The rows of a span times a chunk of a strip. A row's sums go on from those it has, but for the first chunk; the last one writes
/// outputs.
///
/// # Safety
/// `w` holds the groups of the span, `sums` its rows; the operands hold its rows; the CPU has AVX-512 with VNNI.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
pub unsafe fn multiply(kind: Kind, w: Chunk, x: &Operands, span: Span, sums: *mut [Vector; 2], ahead: &mut Ahead) {
    // SAFETY: the caller's promise.
    unsafe {
        match kind {
            Kind::Minimum => rows::<MINIMUM>(w, x, span, sums, ahead),
            Kind::Signed => rows::<SIGNED>(w, x, span, sums, ahead),
            Kind::Super4 => rows::<SUPER4>(w, x, span, sums, ahead),
            Kind::Super5 => rows::<SUPER5>(w, x, span, sums, ahead),
            Kind::Halves => rows::<HALVES>(w, x, span, sums, ahead),
        }
    }
}
