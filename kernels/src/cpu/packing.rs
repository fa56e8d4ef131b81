//! The bytes of a unit: eight rows of one group of 32 weights, or of a super-block of eight groups.
//!
//! | form | from | groups | header | weights of a group | scales of a group |
//! | --- | --- | --- | --- | --- | --- |
//! | `U4` | Q4_0, Q4_1 | 1 | none | 128 | f16 scale and minimum: 32 |
//! | `U5` | Q5_0, Q5_1 | 1 | none | 128 + 32 | f16 scale and minimum: 32 |
//! | `I8` | Q8_0 | 1 | none | 256 | f16 scale: 16 |
//! | `U4Super` | Q4_K | 8 | f16 d and dmin: 32 | 128 | 8-bit scale and minimum: 16 |
//! | `U5Super` | Q5_K | 8 | f16 d and dmin: 32 | 128 + 32 | 8-bit scale and minimum: 16 |
//! | `U6Super` | Q6_K | 8 | f16 d: 16 | 128 + 64 | two signed 8-bit scales: 16 |
//! | dense | F32, F16, BF16 | 8 elements a unit of k | | | |
//!
//! The 32-byte vector i of a group's 128 bytes holds weights 4i..4i+4 of every lane in its low nibbles and 16+4i..16+4i+4 in the high
//! ones. Bits above the fourth follow: byte b of `U5`'s 32 has the fifth bit of byte b of vector i, low nibble, at bit i, high
//! nibble at bit 4 + i; of `U6Super`'s 64, byte b has the two upper bits of low nibbles at bit 2i, byte 32 + b of high ones.

use baton_types::WeightDtype;
use half::f16;

use super::quantise::Span;
use super::simd::LANES;
use super::unpack::{GROUP, Group, element};

/// Number of this way of packing: raise it whenever a packed byte changes (a test notices), so that no file of another is read.
pub const LAYOUT: u32 = 1;

/// How a panel is stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Form {
    F32,
    F16,
    Bf16,
    U4,
    U5,
    I8,
    U4Super,
    U5Super,
    U6Super,
}

/// Groups of a super-block.
pub const SUPER: usize = 8;

impl Form {
    pub fn of(dtype: WeightDtype) -> Form {
        match dtype {
            WeightDtype::F32 => Form::F32,
            WeightDtype::F16 => Form::F16,
            WeightDtype::Bf16 => Form::Bf16,
            WeightDtype::Q4_0 | WeightDtype::Q4_1 => Form::U4,
            WeightDtype::Q5_0 | WeightDtype::Q5_1 => Form::U5,
            WeightDtype::Q8_0 => Form::I8,
            WeightDtype::Q4K => Form::U4Super,
            WeightDtype::Q5K => Form::U5Super,
            WeightDtype::Q6K => Form::U6Super,
        }
    }

    /// Activations are rounded to 8 bits for these.
    pub fn quantised(self) -> bool {
        self.span().is_some()
    }

    /// How activations are rounded for these. None: they are not.
    pub fn span(self) -> Option<Span> {
        match self {
            Form::F32 | Form::F16 | Form::Bf16 => None,
            Form::U4 | Form::U5 | Form::I8 => Some(Span::Group),
            Form::U4Super | Form::U5Super | Form::U6Super => Some(Span::Super),
        }
    }

    /// Groups of 32 weights in a unit; quantised forms only.
    pub const fn unit_groups(self) -> usize {
        match self {
            Form::U4Super | Form::U5Super | Form::U6Super => SUPER,
            _ => 1,
        }
    }

    /// Weights of each row in a unit.
    pub fn unit_weights(self) -> usize {
        if self.quantised() { self.unit_groups() * GROUP } else { 1 }
    }

    /// Bytes before a unit's first group.
    pub const fn header_bytes(self) -> usize {
        match self {
            Form::U4Super | Form::U5Super => 4 * LANES,
            Form::U6Super => 2 * LANES,
            _ => 0,
        }
    }

    /// Bytes of a group's weights; its scales follow.
    pub const fn weight_bytes(self) -> usize {
        match self {
            Form::F32 => 4 * LANES,
            Form::F16 | Form::Bf16 => 2 * LANES,
            Form::U4 | Form::U4Super => 128,
            Form::U5 | Form::U5Super => 128 + 32,
            Form::U6Super => 128 + 64,
            Form::I8 => 256,
        }
    }

    /// Bytes of a group.
    pub const fn group_bytes(self) -> usize {
        self.weight_bytes()
            + match self {
                Form::F32 | Form::F16 | Form::Bf16 => 0,
                Form::U4 | Form::U5 => 4 * LANES,
                Form::I8 | Form::U4Super | Form::U5Super | Form::U6Super => 2 * LANES,
            }
    }

    /// Bytes of a unit.
    pub const fn unit_bytes(self) -> usize {
        self.header_bytes() + self.unit_groups() * self.group_bytes()
    }
}

fn put_half(unit: &mut [u8], at: usize, x: f32) {
    unit[at..at + 2].copy_from_slice(&f16::from_f32(x).to_le_bytes());
}

/// Byte of weight `k` (below 16 of nibbles, below 32 of bytes) of `lane` in the vectors of a group.
fn vector_byte(k: usize, lane: usize) -> usize {
    k / 4 * 32 + lane * 4 + k % 4
}

/// Where the bits above the fourth of weight `k` are: (byte after the nibbles, first bit, how many).
fn high_bits(form: Form, k: usize, lane: usize) -> (usize, usize, usize) {
    let (byte, vector, upper) = (lane * 4 + k % 4, k % 16 / 4, k / 16);
    match form {
        Form::U6Super => (32 * upper + byte, 2 * vector, 2),
        Form::U5 | Form::U5Super => (byte, 4 * upper + vector, 1),
        _ => (0, 0, 0),
    }
}

/// What is added to signed weights so that they are stored unsigned.
fn raised(form: Form) -> i8 {
    if form == Form::U6Super { 32 } else { 0 }
}

/// Writes group `g` of a unit for one lane. The unit's bytes are zero before.
pub fn pack(form: Form, unit: &mut [u8], g: usize, lane: usize, group: &Group) {
    let start = form.header_bytes() + g * form.group_bytes();
    for (k, &q) in group.q.iter().enumerate() {
        if form == Form::I8 {
            unit[start + vector_byte(k, lane)] = q as u8;
            continue;
        }
        let q = (q + raised(form)) as u8;
        unit[start + vector_byte(k % 16, lane)] |= (q & 15) << (4 * (k / 16));
        let (byte, bit, count) = high_bits(form, k, lane);
        if count > 0 {
            unit[start + 128 + byte] |= q >> 4 << bit;
        }
    }
    let scales = start + form.weight_bytes();
    match form {
        Form::U4 | Form::U5 => {
            put_half(unit, scales + 2 * lane, group.d);
            put_half(unit, scales + 16 + 2 * lane, group.dmin);
        }
        Form::U4Super | Form::U5Super => {
            put_half(unit, 2 * lane, group.d);
            put_half(unit, 16 + 2 * lane, group.dmin);
            unit[scales + lane] = group.scale[0] as u8;
            unit[scales + 8 + lane] = group.min;
        }
        Form::U6Super => {
            put_half(unit, 2 * lane, group.d);
            unit[scales + 2 * lane] = group.scale[0] as u8;
            unit[scales + 2 * lane + 1] = group.scale[1] as u8;
        }
        _ => put_half(unit, scales + 2 * lane, group.d),
    }
}

/// The inverse of [`pack`].
pub fn unpack(form: Form, unit: &[u8], g: usize, lane: usize) -> Group {
    let start = form.header_bytes() + g * form.group_bytes();
    let q = std::array::from_fn(|k| {
        if form == Form::I8 {
            return unit[start + vector_byte(k, lane)] as i8;
        }
        let low = unit[start + vector_byte(k % 16, lane)] >> (4 * (k / 16)) & 15;
        let (byte, bit, count) = high_bits(form, k, lane);
        let high = if count > 0 { unit[start + 128 + byte] >> bit & ((1 << count) - 1) } else { 0 };
        (low | high << 4) as i8 - raised(form)
    });
    let half = |at: usize| element(WeightDtype::F16, &unit[at..], lane);
    let scales = start + form.weight_bytes();
    match form {
        Form::U4 | Form::U5 => Group { q, d: half(scales), scale: [1; 2], dmin: half(scales + 16), min: 1 },
        Form::U4Super | Form::U5Super => {
            let scale = [unit[scales + lane] as i8; 2];
            Group { q, d: half(0), scale, dmin: half(16), min: unit[scales + 8 + lane] }
        }
        Form::U6Super => {
            let scale = [unit[scales + 2 * lane] as i8, unit[scales + 2 * lane + 1] as i8];
            Group { q, d: half(0), scale, dmin: 0.0, min: 0 }
        }
        _ => Group { q, d: half(scales), scale: [1; 2], dmin: 0.0, min: 0 },
    }
}
