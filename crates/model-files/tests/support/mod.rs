//! Writers of tiny model files, independent of the readers under test.
#![allow(dead_code)] // Each test file uses its part.
#![allow(clippy::unwrap_used)]

pub mod gguf;
pub mod hub;
pub mod safetensors;

/// The character by which byte-level vocabularies write a byte.
pub fn byte_char(byte: u8) -> char {
    let printable = |b: u8| (0x21..=0x7e).contains(&b) || (0xa1..=0xac).contains(&b) || b >= 0xae;
    if printable(byte) {
        return char::from(byte);
    }
    let earlier = (0..byte).filter(|&b| !printable(b)).count() as u32;
    char::from_u32(0x100 + earlier).unwrap()
}

/// A byte-level vocabulary: the 256 bytes, what `merges` make, then special tokens.
pub fn byte_level_vocab(merges: &[(&str, &str)], special: &[&str]) -> Vec<String> {
    let bytes = (0..=255u8).map(|byte| byte_char(byte).to_string());
    let joined = merges.iter().map(|(a, b)| format!("{a}{b}"));
    bytes.chain(joined).chain(special.iter().map(|s| (*s).to_owned())).collect()
}

/// Bytes that look like weights and differ between tensors.
pub fn noise(name: &str, bytes: usize) -> Vec<u8> {
    let mut state = name.bytes().fold(0x9e37_79b9_u32, |h, b| (h ^ u32::from(b)).wrapping_mul(0x0100_0193));
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state >> 9) as u8
    };
    (0..bytes).map(|_| next()).collect()
}
