//! Products of many rows with AVX-512: a strip of four panels is unpacked once for a block of rows.
//!
//! What a value needs. A group is 32 weights of an output. For a group, sixteen outputs and one row of activations VNNI takes 8
//! dot-product instructions. Without super-blocks the sum then becomes a float, is multiplied with the scales of weights and activations, and
//! added, and so is the minimum where there is one. In a super-block of eight groups sums are integers until its end, and one scale of the
//! activations serves it:
//!
//! | weights | dot products | others | most that dot products can get |
//! | --- | --- | --- | --- |
//! | with a minimum (Q4, Q5) | 8 | to float, product of scales, sum, minimum: 4 | 8 / 12 = 0.67 of the ceiling |
//! | signed (Q8_0) | 8 | to float, product of scales, sum: 3 | 8 / 11 = 0.73 |
//! | Q4_K | 8 | to float, sum: 2; of a super-block 4 for minima, 6 to end it | 8 / 11.3 = 0.71 |
//! | Q5_K | 8 | to float, sum, half of the way back: 3; the same | 8 / 12.3 = 0.65 |
//! | two scales a group (Q6_K) | 8 | the former twice, and the way back: 6; of a super-block 4 | 8 / 14.5 = 0.55 |
//!
//! Both kinds of instruction run on the same two ports, so the last column is the bound. The sums over groups, or over super-blocks, are
//! floats and their order is fixed (I1), so the others cannot leave the loop. All else does: weights are unpacked to bytes, scales to floats,
//! and what raised weights add to a sum is where the sum starts. A strip's chunk of groups stays in the first-level cache, a block of
//! rows in the second. Sums of a chunk that is not the last wait in memory as floats, which changes no bit.
//!
//! Bytes moved: the packed weights once for each block of rows, the rows once for each strip, from the second-level cache.

mod amx;
mod sums;
mod unpack;
mod vnni;

use std::arch::x86_64::*;
use std::mem::MaybeUninit;

pub use amx::{CHAINS_WORK, chains};

use super::isa::Isa;
use super::packing::{Form, SUPER};
use super::quantise::Span as Rounding;
use super::simd::LANES;
use super::tiles::Operands;
use super::unpack::GROUP;
use super::weight::CpuWeight;

/// Rows from which a strip is worth unpacking: at 8 it takes a fifth longer than the tiles of [`super::tiles`], at 16 less.
const MANY: usize = 12;
/// Rows from which tiles are faster than VNNI: measured 0.8 of it at 12 rows, 0.9 to 1.0 at 32, 1.1 at 64 and 1.2 at 128.
const AMX_MANY: usize = 64;

/// The same for super-blocks, whose weights take longer to make ready for tiles: measured 0.8 at 16 rows, 1.1 at 32, 1.4 at 64 and 1.6 to 2.4 at 512.
const AMX_SUPERS: usize = 32;

/// Panels of a strip: two vectors of outputs.
pub const PANELS: usize = 4;

/// Most groups of a chunk: they fill half the first-level cache.
const CHUNK: usize = 24;

/// The same beside the products of tiles: a super-block.
const AMX_CHUNK: usize = SUPER;

/// Most rows of a block.
const BLOCK: usize = 512;

/// Bytes of rounded activations of a block, about: half the second-level cache.
const BLOCK_BYTES: usize = 768 << 10;

/// What multiplies.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum With {
    Vnni,
    Amx,
}

impl With {
    /// What an instruction set multiplies so many rows and such weights with; None: strips are not worth it.
    pub fn of(isa: Isa, form: Form, rows: usize) -> Option<With> {
        match isa {
            _ if !form.quantised() => None,
            Isa::Amx(_) if rows >= if in_supers(form) { AMX_SUPERS } else { AMX_MANY } => Some(With::Amx),
            Isa::Amx(_) | Isa::Vnni(_) if rows >= MANY => Some(With::Vnni),
            _ => None,
        }
    }
}

/// Whether a form has super-blocks.
fn in_supers(form: Form) -> bool {
    form.span() == Some(Rounding::Super)
}

/// A register's bytes.
#[derive(Clone, Copy)]
#[repr(transparent)]
struct Vector(__m512i);

impl Vector {
    #[inline(always)]
    fn integers(self) -> __m512i {
        self.0
    }

    #[inline(always)]
    unsafe fn floats(self) -> __m512 {
        // SAFETY: the caller vouches for the CPU features.
        unsafe { _mm512_castsi512_ps(self.0) }
    }

    #[inline(always)]
    unsafe fn of(x: __m512) -> Vector {
        // SAFETY: the caller vouches for the CPU features.
        Vector(unsafe { _mm512_castps_si512(x) })
    }
}

/// A group of a strip. Every member has the vector of the first two panels, then that of the others.
#[derive(Clone, Copy)]
#[repr(C)]
struct Unpacked {
    /// Weights 4i..4i+4 of each output, as unsigned bytes, for i in 0..8.
    weights: [[Vector; 2]; 8],
    /// Floats: the scale, then the minimum if there is one. In a super-block the small scale; of two both.
    factors: [[Vector; 2]; 2],
}

/// What a super-block of a strip has once. Every member is as in [`Unpacked`].
#[derive(Clone, Copy)]
#[repr(C)]
struct Head {
    /// What sums are multiplied with, and what sums of minima are; the second is undefined where there are none.
    scales: [[Vector; 2]; 2],
    /// Minima of groups 2i and 2i + 1, as pairs of 16 bits.
    minima: [[Vector; 2]; SUPER / 2],
}

/// A super-block of a strip for tiles: each weight times its group's small scale is a number of 14 bits with its sign, of which tiles
/// multiply the upper and the lower part.
#[derive(Clone, Copy)]
#[repr(C)]
struct Scaled {
    /// Bits 0 to 6 of weights 4i..4i+4 of each output; less 64 where weights are signed.
    low: [[Vector; 2]; SUPER * GROUP / 4],
    /// What is left, divided by 128.
    high: [[Vector; 2]; SUPER * GROUP / 4],
}

/// What the unpacked groups of a form are.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// A scale and a minimum.
    Minimum,
    /// Raised by 128, one scale.
    Signed,
    /// 4 bits in super-blocks.
    Super4,
    /// 5 bits in super-blocks.
    Super5,
    /// In super-blocks, raised by 32, a scale for each half group.
    Halves,
}

/// [`Kind`] as a parameter of kernels.
const MINIMUM: u8 = Kind::Minimum as u8;
const SIGNED: u8 = Kind::Signed as u8;
const SUPER4: u8 = Kind::Super4 as u8;
const SUPER5: u8 = Kind::Super5 as u8;
const HALVES: u8 = Kind::Halves as u8;

impl Kind {
    fn of(form: Form) -> Kind {
        match form {
            Form::I8 => Kind::Signed,
            Form::U4Super => Kind::Super4,
            Form::U5Super => Kind::Super5,
            Form::U6Super => Kind::Halves,
            _ => Kind::Minimum,
        }
    }
}

/// Buffers of a task.
struct Scratch {
    groups: [MaybeUninit<Unpacked>; CHUNK],
    heads: [MaybeUninit<Head>; CHUNK / SUPER],
    scaled: MaybeUninit<Scaled>,
    /// Sums of each row of the block.
    sums: [MaybeUninit<[Vector; 2]>; BLOCK],
}

/// What is unpacked of a chunk: groups, or with AMX and in super-blocks one of these; and the heads of super-blocks.
#[derive(Clone, Copy)]
struct Chunk {
    groups: *mut Unpacked,
    heads: *mut Head,
    scaled: *mut Scaled,
}

/// Some rows and some groups of the operands.
#[derive(Clone, Copy)]
struct Span {
    row: usize,
    rows: usize,
    group: usize,
    groups: usize,
    /// Groups of a whole row.
    all: usize,
    columns: Columns,
}

/// Columns of the output that a strip makes: from `first` on, before `end`.
#[derive(Clone, Copy)]
struct Columns {
    first: usize,
    end: usize,
    /// Of the whole output.
    all: usize,
}

/// What is packed in the next strip, fetched into the cache while this one is multiplied.
#[derive(Clone, Copy)]
struct Ahead {
    at: *const u8,
    end: *const u8,
    /// Lines at a time.
    lines: usize,
}

impl Ahead {
    /// Bytes of a line of the cache.
    const LINE: usize = 64;

    /// Chooses how many lines are fetched at a time so that all are in `times`.
    fn share(&mut self, times: usize) {
        let left = (self.end as usize).saturating_sub(self.at as usize);
        self.lines = left.div_ceil(Self::LINE).div_ceil(times.max(1));
    }

    /// Fetches the next lines. It may go on behind the end: it is a hint, and nothing is read.
    #[inline(always)]
    fn fetch(&mut self) {
        for _ in 0..self.lines {
            // SAFETY: a hint, valid for any address.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(self.at.cast()) };
            self.at = self.at.wrapping_add(Self::LINE);
        }
    }

    /// Takes note of what a copy has fetched in `times`.
    fn pass(&mut self, times: usize) {
        self.at = self.at.wrapping_add(times * self.lines * Self::LINE);
    }
}

/// `whole` cut into the fewest parts of at most `most`, multiples of `of`, as even as they can be: the size of all but the last.
fn even(whole: usize, most: usize, of: usize) -> usize {
    whole.div_ceil(whole.div_ceil(most).max(1)).next_multiple_of(of)
}

/// Panels `first..last` of the product.
///
/// # Safety
/// As for [`super::matmul::panels`]; the weight is quantised, the CPU has AVX-512 with VNNI.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
pub unsafe fn panels(with: With, w: &CpuWeight, x: &Operands, first: usize, last: usize) {
    let (kind, all) = (Kind::of(w.form), w.cols / GROUP);
    let most = if with == With::Amx { AMX_CHUNK } else { CHUNK };
    let chunk = even(all, most, w.form.unit_groups()).max(1);
    let fitting = (BLOCK_BYTES / w.cols.max(1)).clamp(MANY, BLOCK);
    // Tiles wait less for activations than for a super-block's weights to be made ready.
    let block = even(x.rows, if with == With::Amx && in_supers(w.form) { BLOCK } else { fitting }, 1);
    let mut scratch = Scratch {
        groups: [MaybeUninit::uninit(); CHUNK],
        heads: [MaybeUninit::uninit(); CHUNK / SUPER],
        scaled: MaybeUninit::uninit(),
        sums: [MaybeUninit::uninit(); BLOCK],
    };
    let unpacked = Chunk {
        groups: scratch.groups.as_mut_ptr().cast(),
        heads: scratch.heads.as_mut_ptr().cast(),
        scaled: scratch.scaled.as_mut_ptr(),
    };
    let sums = scratch.sums.as_mut_ptr().cast::<[Vector; 2]>();
    for row in (0..x.rows).step_by(block) {
        let rows = block.min(x.rows - row);
        for p in (first..last).step_by(PANELS) {
            // Panels that are not there are taken to be the strip's first; what comes of them is not stored.
            let at = |i: usize| if p + i < last { p + i } else { p };
            // SAFETY: the panels are inside the weight.
            let strip = std::array::from_fn(|i| unsafe { w.data.as_ptr().add(at(i) * w.panel_bytes()) });
            let next = w.data.as_ptr().wrapping_add((p + PANELS) * w.panel_bytes());
            let mut ahead = Ahead { at: next, end: next.wrapping_add(PANELS * w.panel_bytes()), lines: 0 };
            let columns = Columns { first: p * LANES, end: w.rows.min(last * LANES), all: w.rows };
            for group in (0..all).step_by(chunk) {
                let span = Span { row, rows, group, groups: chunk.min(all - group), all, columns };
                // SAFETY: a chunk's groups fit the scratch, and so do the block's rows; the operands hold the rows.
                unsafe {
                    unpack::unpack(w.form, strip, (group, span.groups), with, unpacked);
                    match with {
                        With::Vnni => vnni::multiply(kind, unpacked, x, span, sums, &mut ahead),
                        With::Amx => amx::multiply(kind, unpacked, x, span, sums, &mut ahead),
                    }
                }
            }
        }
    }
    if with == With::Amx {
        // SAFETY: the caller's promise.
        unsafe { amx::release() }
    }
}
