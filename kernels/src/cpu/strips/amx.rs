//! The products of an unpacked strip with AMX: a tile of sixteen rows times sixteen outputs is one instruction.
//!
//! What a value needs. A tile instruction takes 64 weights of an output, sixteen rows, and sixteen cycles. Where there is a scale for
//! each 32 weights, it gets 32, half of what it could. Then the sums come out by way of memory, at a cycle for a row of sixteen outputs,
//! and AVX-512 makes floats of them, scales and adds them: of a group, sixteen outputs and a row, 4 instructions with a minimum, 3 without
//! ([`super`]). Measured on Sapphire Rapids, none of this overlaps: tile instructions take the port of half the vector instructions, for
//! hundreds of cycles. In super-blocks, weights are multiplied with their small scales first, and what comes of it is cut in two, of 7 bits each:
//! twice the products at full depth, and sums come out once for 256 weights. So a group takes, in cycles for sixteen outputs and a row:
//!
//! | weights | products | loads and stores | the rest | together | VNNI |
//! | --- | --- | --- | --- | --- | --- |
//! | with a minimum | 1 | 1.1 | 2.4 | 4.5 | 6.4 |
//! | signed | 1 | 1.1 | 1.8 | 3.9 | 5.9 |
//! | in super-blocks | 1 | 0.2 | 0.6 | 1.8 | 5.7 to 7.3 |
//!
//! That is 1.4 and 1.5 times VNNI at most, and about 12% of what tiles could do with one scale a row; in super-blocks 3 to 4 times. A product of
//! 512 rows gets 1.6 to 2.4 of it: rounding its rows, making weights ready and writing outputs take as long again.
//!
//! Tile instructions and vector instructions take turns by chunks. Sums of integers are exact, and what follows is the same as elsewhere,
//! so the bits are too (I1).

use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;

use super::super::packing::SUPER;
use super::super::tiles::Operands;
use super::super::unpack::GROUP;
use super::sums::{At, add_scaled, add_super, begin, end};
use super::{
    AMX_CHUNK, Ahead, Chunk, HALVES, Head, Kind, MINIMUM, SIGNED, SUPER4, Scaled, Span, Unpacked, Vector, even,
};

/// Most rows of a tile.
const TILE: usize = 16;
/// Rows that are scaled together.
const TOGETHER: usize = 4;
/// Bytes from word to word of a strip's weights, and from row to row of its products: two vectors.
const STRIDE: usize = size_of::<[Vector; 2]>();

/// What `ldtilecfg` reads: bytes of a row, and rows, of each tile.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start: u8,
    reserved: [u8; 14],
    bytes: [u16; 16],
    rows: [u8; 16],
}

/// Sets this thread's tiles: 0 to 3 are products, 4 activations, 5 to 7 weights, of which one instruction multiplies `depth`.
unsafe fn configure(rows: usize, depth: usize) {
    let (rows, line) = (rows as u8, size_of::<Vector>() as u16);
    let mut config = Config { palette: 1, start: 0, reserved: [0; 14], bytes: [0; 16], rows: [0; 16] };
    for tile in 0..8 {
        (config.rows[tile], config.bytes[tile]) = match tile {
            0..4 => (rows, line),
            4 => (rows, depth as u16),
            _ => (depth as u8 / 4, line),
        };
    }
    // SAFETY: the caller vouches for AMX; the configuration is one that the instruction takes.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const config, options(nostack, readonly)) }
}

/// Multiplies a group: the rows of `q` are `apart`; `to` gets the products of each.
#[inline(always)]
unsafe fn multiply_group(w: *const Unpacked, q: *const i8, apart: usize, to: *mut [Vector; 2]) {
    // SAFETY: the caller's promise: the group's weights, its activations of as many rows as the tiles have, and room for their products. No
    // tile lives on from one block to the next.
    unsafe {
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "tileloadd tmm4, [{q} + {apart}]",
            "tileloadd tmm6, [{w} + {stride}]",
            "tileloadd tmm7, [{w} + {stride} + 64]",
            "tdpbssd tmm0, tmm4, tmm6",
            "tdpbssd tmm1, tmm4, tmm7",
            "tilestored [{to} + {stride}], tmm0",
            "tilestored [{to} + {stride} + 64], tmm1",
            w = in(reg) w, q = in(reg) q, to = in(reg) to, apart = in(reg) apart, stride = in(reg) STRIDE,
            out("tmm0") _, out("tmm1") _, out("tmm4") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}

/// Multiplies a super-block: the rows of `q` are `apart`; `to` gets the products of each with the lower parts of weights, and a tile further on those
/// with the upper ones.
#[inline(always)]
unsafe fn multiply_super(w: *const Scaled, q: *const i8, apart: usize, to: *mut [Vector; 2]) {
    const { assert!(SUPER * GROUP == 4 * 64 && size_of::<Scaled>() == 16384 && TILE * STRIDE == 2048) };
    // SAFETY: the caller's promise: the super-block's weights, its activations of as many rows as the tiles have, and room for their products.
    // No tile lives on from one block to the next.
    unsafe {
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "tileloadd tmm4, [{q} + {apart}]",
            "tileloadd tmm5, [{w} + {stride}]",
            "tileloadd tmm6, [{w} + {stride} + 64]",
            "tdpbssd tmm0, tmm4, tmm5",
            "tdpbssd tmm1, tmm4, tmm6",
            "tileloadd tmm7, [{w} + {stride} + 8192]",
            "tileloadd tmm5, [{w} + {stride} + 8256]",
            "tdpbssd tmm2, tmm4, tmm7",
            "tdpbssd tmm3, tmm4, tmm5",
            "tileloadd tmm4, [{q} + {apart} + 64]",
            "tileloadd tmm6, [{w} + {stride} + 2048]",
            "tileloadd tmm7, [{w} + {stride} + 2112]",
            "tdpbssd tmm0, tmm4, tmm6",
            "tdpbssd tmm1, tmm4, tmm7",
            "tileloadd tmm5, [{w} + {stride} + 10240]",
            "tileloadd tmm6, [{w} + {stride} + 10304]",
            "tdpbssd tmm2, tmm4, tmm5",
            "tdpbssd tmm3, tmm4, tmm6",
            "tileloadd tmm4, [{q} + {apart} + 128]",
            "tileloadd tmm7, [{w} + {stride} + 4096]",
            "tileloadd tmm5, [{w} + {stride} + 4160]",
            "tdpbssd tmm0, tmm4, tmm7",
            "tdpbssd tmm1, tmm4, tmm5",
            "tileloadd tmm6, [{w} + {stride} + 12288]",
            "tileloadd tmm7, [{w} + {stride} + 12352]",
            "tdpbssd tmm2, tmm4, tmm6",
            "tdpbssd tmm3, tmm4, tmm7",
            "tileloadd tmm4, [{q} + {apart} + 192]",
            "tileloadd tmm5, [{w} + {stride} + 6144]",
            "tileloadd tmm6, [{w} + {stride} + 6208]",
            "tdpbssd tmm0, tmm4, tmm5",
            "tdpbssd tmm1, tmm4, tmm6",
            "tileloadd tmm7, [{w} + {stride} + 14336]",
            "tileloadd tmm5, [{w} + {stride} + 14400]",
            "tdpbssd tmm2, tmm4, tmm7",
            "tdpbssd tmm3, tmm4, tmm5",
            "tilestored [{to} + {stride}], tmm0",
            "tilestored [{to} + {stride} + 64], tmm1",
            "tilestored [{to} + {stride} + 2048], tmm2",
            "tilestored [{to} + {stride} + 2112], tmm3",
            w = in(reg) w, q = in(reg) q, to = in(reg) to, apart = in(reg) apart, stride = in(reg) STRIDE,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _, out("tmm5") _, out("tmm6") _,
            out("tmm7") _, options(nostack),
        );
    }
}

/// Scales the products of rows `row..row + T` of a span and adds them to their sums.
#[inline(always)]
unsafe fn scale<const T: usize, const KIND: u8>(
    w: *const Unpacked,
    x: &Operands,
    (span, row): (Span, usize),
    products: *const [Vector; 2],
    sums: *mut [Vector; 2],
) {
    // SAFETY: the caller's promise.
    unsafe {
        let kept = sums.add(row);
        let mut acc = begin::<T>(kept, span.group);
        for g in 0..span.groups {
            let mut found = [[_mm512_setzero_ps(); 2]; T];
            for t in 0..T {
                for v in 0..2 {
                    found[t][v] = _mm512_cvtepi32_ps((*products.add(g * TILE + t))[v].integers());
                }
            }
            let at = At { row: span.row + row, group: span.group + g, all: span.all };
            add_scaled::<T, KIND>(&mut acc, found, w.add(g), x, at);
        }
        let last = span.group + span.groups == span.all;
        end(acc, kept, x, span.row + row, last.then_some(span.columns));
    }
}

/// The same of a super-block, whose products are in two parts.
#[inline(always)]
unsafe fn scale_super<const T: usize, const KIND: u8>(
    head: *const Head,
    x: &Operands,
    (span, row): (Span, usize),
    products: *const [Vector; 2],
    sums: *mut [Vector; 2],
) {
    // SAFETY: the caller's promise.
    unsafe {
        let kept = sums.add(row);
        let mut acc = begin::<T>(kept, span.group);
        let mut found = [[_mm512_setzero_ps(); 2]; T];
        for t in 0..T {
            for v in 0..2 {
                let high = _mm512_slli_epi32::<7>((*products.add(TILE + t))[v].integers());
                found[t][v] = _mm512_cvtepi32_ps(_mm512_add_epi32((*products.add(t))[v].integers(), high));
            }
        }
        add_super::<T, KIND>(&mut acc, found, head, x, At { row: span.row + row, group: span.group, all: span.all });
        let last = span.group + span.groups == span.all;
        end(acc, kept, x, span.row + row, last.then_some(span.columns));
    }
}

#[inline(always)]
unsafe fn rows<const KIND: u8>(w: Chunk, x: &Operands, span: Span, sums: *mut [Vector; 2], ahead: &mut Ahead) {
    let mut products = [MaybeUninit::<[Vector; 2]>::uninit(); TILE * AMX_CHUNK];
    let products = products.as_mut_ptr().cast::<[Vector; 2]>();
    let (tile, apart) = (even(span.rows, TILE, 1), GROUP * span.all);
    ahead.share(span.rows.div_ceil(TOGETHER) * (span.all - span.group).div_ceil(span.groups));
    let mut configured = 0;
    for first in (0..span.rows).step_by(tile) {
        let count = tile.min(span.rows - first);
        // SAFETY: the caller's promise; the products of a chunk fit.
        unsafe {
            if configured != count {
                configure(count, GROUP);
                configured = count;
            }
            let q = x.q.add((span.row + first) * apart + span.group * GROUP);
            for g in 0..span.groups {
                multiply_group(w.groups.add(g), q.add(g * GROUP), apart, products.add(g * TILE));
            }
            for t in (0..count).step_by(TOGETHER) {
                ahead.fetch();
                // The next tile's activations come from the second-level cache.
                for t in t..t + TOGETHER {
                    let next = q.wrapping_add((tile + t) * apart);
                    for line in (0..span.groups * GROUP).step_by(Ahead::LINE) {
                        _mm_prefetch::<_MM_HINT_T0>(next.wrapping_add(line));
                    }
                }
                let (products, at) = (products.add(t), (span, first + t));
                match count - t {
                    4.. => scale::<4, KIND>(w.groups, x, at, products, sums),
                    3 => scale::<3, KIND>(w.groups, x, at, products, sums),
                    2 => scale::<2, KIND>(w.groups, x, at, products, sums),
                    _ => scale::<1, KIND>(w.groups, x, at, products, sums),
                }
            }
        }
    }
}

/// The same of a super-block. The tiles of some rows are multiplied before those of the rows before them are scaled, so that neither waits for the
/// other.
#[inline(always)]
unsafe fn super_rows<const KIND: u8>(w: Chunk, x: &Operands, span: Span, sums: *mut [Vector; 2], ahead: &mut Ahead) {
    let mut products = [[MaybeUninit::<[Vector; 2]>::uninit(); 2 * TILE]; 2];
    let products = products.as_mut_ptr().cast::<[[Vector; 2]; 2 * TILE]>();
    let (tile, apart) = (even(span.rows, TILE, 1), GROUP * span.all);
    let tiles = span.rows.div_ceil(tile);
    ahead.share(tiles * tile.div_ceil(TOGETHER) * (span.all - span.group).div_ceil(span.groups));
    let q = x.q.wrapping_add(span.row * apart + span.group * GROUP);
    let mut configured = 0;
    for i in 0..=tiles {
        // SAFETY: the caller's promise.
        unsafe {
            if i < tiles {
                let count = tile.min(span.rows - i * tile);
                if configured != count {
                    configure(count, 2 * GROUP);
                    configured = count;
                }
                multiply_super(w.scaled, q.add(i * tile * apart), apart, products.add(i % 2).cast());
            }
            let Some(i) = i.checked_sub(1) else { continue };
            let (first, products) = (i * tile, products.add(i % 2).cast::<[Vector; 2]>());
            let count = tile.min(span.rows - first);
            for at in (0..count).step_by(TOGETHER) {
                ahead.fetch();
                // Activations come from the second-level cache.
                for t in 0..TOGETHER {
                    let next = q.wrapping_add((first + 2 * tile + at + t) * apart);
                    for line in 0..SUPER * GROUP / Ahead::LINE {
                        _mm_prefetch::<_MM_HINT_T0>(next.wrapping_add(line * Ahead::LINE));
                    }
                }
                let (products, row) = (products.add(at), (span, first + at));
                match count - at {
                    4.. => scale_super::<4, KIND>(w.heads, x, row, products, sums),
                    3 => scale_super::<3, KIND>(w.heads, x, row, products, sums),
                    2 => scale_super::<2, KIND>(w.heads, x, row, products, sums),
                    _ => scale_super::<1, KIND>(w.heads, x, row, products, sums),
                }
            }
        }
    }
}

/// As [`super::vnni::multiply`], of weights that are not raised; of super-blocks, one.
///
/// # Safety
/// As there; and the process may use AMX.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
pub unsafe fn multiply(kind: Kind, w: Chunk, x: &Operands, span: Span, sums: *mut [Vector; 2], ahead: &mut Ahead) {
    // SAFETY: the caller's promise.
    unsafe {
        match kind {
            Kind::Minimum => rows::<MINIMUM>(w, x, span, sums, ahead),
            Kind::Signed => rows::<SIGNED>(w, x, span, sums, ahead),
            // Their tiles do not differ.
            Kind::Super4 | Kind::Super5 => super_rows::<SUPER4>(w, x, span, sums, ahead),
            Kind::Halves => super_rows::<HALVES>(w, x, span, sums, ahead),
        }
    }
}

/// Gives this thread's tiles back, so that the kernel need not save them.
///
/// # Safety
/// The process may use AMX.
pub unsafe fn release() {
    // SAFETY: the caller's promise.
    unsafe { asm!("tilerelease", options(nomem, nostack)) }
}

/// `steps` times four tile instructions at their full depth, for [`super::super::Ceilings`].
///
/// # Safety
/// The process may use AMX.
pub unsafe fn chains(steps: usize) -> f32 {
    let ones = [[1i8; 64]; TILE];
    // SAFETY: the caller's promise; a tile has 16 rows of 64 bytes.
    unsafe {
        configure(TILE, 64);
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "tileloadd tmm4, [{ones} + {stride}]",
            "tileloadd tmm6, [{ones} + {stride}]",
            "2:",
            "tdpbssd tmm0, tmm4, tmm6",
            "tdpbssd tmm1, tmm4, tmm6",
            "tdpbssd tmm2, tmm4, tmm6",
            "tdpbssd tmm3, tmm4, tmm6",
            "dec {steps}",
            "jnz 2b",
            ones = in(reg) ones.as_ptr(), stride = in(reg) 64usize, steps = inout(reg) steps.max(1) => _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _, out("tmm6") _,
            options(nostack, readonly),
        );
        release();
    }
    steps as f32
}

/// Multiplications and additions of a step of [`chains`].
pub const CHAINS_WORK: usize = 4 * TILE * TILE * 64 * 2;
