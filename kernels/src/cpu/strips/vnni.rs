//! The products of an unpacked strip with VNNI: tiles of up to six rows by two vectors of outputs.
//!
//! Twelve sums of integers and as many of floats fill 24 of the 32 registers. A broadcast of four activations serves two vectors, and a
//! vector of weights all rows of the tile, so that loads stay far below the two a cycle.

use std::arch::x86_64::*;
use std::ops::Range;

use super::super::tiles::Operands;
use super::super::unpack::GROUP;
use super::sums::{At, Sums, add_scaled, from_halves};
use super::{Ahead, HALVES, Kind, MINIMUM, SIGNED, Span, Unpacked, Vector};

/// Most rows of a tile.
const TILE: usize = 6;
/// The same where a group has two sums.
const HALVES_TILE: usize = 4;

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

/// The rows' dot products of a group, as floats.
#[inline(always)]
unsafe fn dots<const T: usize, const KIND: u8>(w: *const Unpacked, x: &Operands, at: At) -> Sums<T> {
    // SAFETY: the caller's promise.
    unsafe {
        let mut q = [x.q; T];
        for t in 0..T {
            q[t] = x.q.add(at.group_of(t) * GROUP);
        }
        let start = |t: usize, part: usize| [every((*x.raised.add(at.group_of(t)))[part]); 2];
        let mut dot = [[_mm512_setzero_si512(); 2]; T];
        let mut found = [[_mm512_setzero_ps(); 2]; T];
        if KIND == HALVES {
            let mut second = dot;
            for t in 0..T {
                (dot[t], second[t]) = (start(t, 0), start(t, 1));
            }
            add_products(&mut dot, w, q, 0..4);
            add_products(&mut second, w, q, 4..8);
            for t in 0..T {
                for v in 0..2 {
                    found[t][v] = from_halves(w, v, [dot[t][v], second[t][v]]);
                }
            }
            return found;
        }
        if KIND == SIGNED {
            for t in 0..T {
                dot[t] = start(t, 2);
            }
        }
        add_products(&mut dot, w, q, 0..8);
        for t in 0..T {
            for v in 0..2 {
                found[t][v] = _mm512_cvtepi32_ps(dot[t][v]);
            }
        }
        found
    }
}

/// Rows `row..row + T` times the groups of the span.
#[inline(always)]
unsafe fn tile<const T: usize, const KIND: u8>(
    w: *const Unpacked,
    x: &Operands,
    span: Span,
    row: usize,
    kept: *mut [Vector; 2],
    mut ahead: Ahead,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut acc = super::sums::begin::<T>(kept, span.group);
        for g in 0..span.groups {
            ahead.fetch();
            let at = At { row, group: span.group + g, all: span.all };
            let found = dots::<T, KIND>(w.add(g), x, at);
            add_scaled::<T, KIND>(&mut acc, found, w.add(g), x, at);
        }
        super::sums::end(acc, kept, x, row, (span.group + span.groups == span.all).then_some(span.columns));
    }
}

#[inline(always)]
unsafe fn rows<const KIND: u8>(
    w: *const Unpacked,
    x: &Operands,
    span: Span,
    sums: *mut [Vector; 2],
    ahead: &mut Ahead,
) {
    let most = if KIND == HALVES { HALVES_TILE } else { TILE };
    ahead.share(span.rows.div_ceil(most) * (span.all - span.group));
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
        let count = left.div_ceil(left.div_ceil(most));
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
pub unsafe fn multiply(
    kind: Kind,
    w: *const Unpacked,
    x: &Operands,
    span: Span,
    sums: *mut [Vector; 2],
    ahead: &mut Ahead,
) {
    // SAFETY: the caller's promise.
    unsafe {
        match kind {
            Kind::Minimum => rows::<MINIMUM>(w, x, span, sums, ahead),
            Kind::Signed => rows::<SIGNED>(w, x, span, sums, ahead),
            Kind::Halves => rows::<HALVES>(w, x, span, sums, ahead),
        }
    }
}
