//! The bytes each token stands for: one table, from which tokens become text.

/// How ordinary tokens of a vocabulary spell bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Alphabet {
    /// Each byte is one printable character (GPT-2's table).
    ByteLevel,
    /// Text with U+2581 for a space; `<0x41>` is a single byte.
    SentencePiece,
}

/// What a token is to the detokeniser.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum PieceKind {
    /// Spelled in the vocabulary's alphabet.
    Ordinary,
    /// Stands for exactly its own text.
    Verbatim,
    /// As `Verbatim`, and left out when special tokens are skipped.
    Special,
}

/// Bytes of every token, in one allocation.
#[derive(Debug, Default)]
pub(super) struct Pieces {
    bytes: Vec<u8>,
    /// End of each token's bytes; they begin where the token before ends.
    ends: Vec<usize>,
    special: Vec<bool>,
}

impl Pieces {
    /// Adds the next token.
    pub fn push(&mut self, text: &str, kind: PieceKind, alphabet: Alphabet) {
        match (kind, alphabet) {
            (PieceKind::Ordinary, Alphabet::ByteLevel) => push_byte_level(&mut self.bytes, text),
            (PieceKind::Ordinary, Alphabet::SentencePiece) => match byte_token(text) {
                Some(byte) => self.bytes.push(byte),
                None => self.bytes.extend(text.replace('\u{2581}', " ").bytes()),
            },
            _ => self.bytes.extend(text.bytes()),
        }
        self.ends.push(self.bytes.len());
        self.special.push(kind == PieceKind::Special);
    }

    pub fn len(&self) -> usize {
        self.ends.len()
    }

    pub fn get(&self, id: u32) -> Option<&[u8]> {
        let index = id as usize;
        let end = *self.ends.get(index)?;
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        Some(&self.bytes[start..end])
    }

    /// Whether a token has an ASCII letter followed by a space.
    pub fn has_letter_and_space(&self) -> bool {
        let inside = |bytes: &[u8]| bytes.windows(2).any(|pair| pair[0].is_ascii_alphabetic() && pair[1] == b' ');
        (0..self.len() as u32).filter_map(|id| self.get(id)).any(inside)
    }

    pub fn is_special(&self, id: u32) -> bool {
        self.special.get(id as usize).copied().unwrap_or(false)
    }
}

/// The byte that `<0x41>` stands for.
pub(super) fn byte_token(text: &str) -> Option<u8> {
    let digits = text.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() == 2 { u8::from_str_radix(digits, 16).ok() } else { None }
}

fn push_byte_level(bytes: &mut Vec<u8>, text: &str) {
    for c in text.chars() {
        match byte_of(c) {
            Some(byte) => bytes.push(byte),
            // Not in the alphabet: a token that somebody added by hand.
            None => bytes.extend(c.encode_utf8(&mut [0; 4]).bytes()),
        }
    }
}

/// The byte that a character of the byte-level alphabet stands for. Printable Latin-1 stands for itself; the other 68 byte
/// values have, in order, the characters from U+0100 on.
fn byte_of(c: char) -> Option<u8> {
    let code = u8::try_from(u32::from(c)).ok();
    match (code, u32::from(c)) {
        (Some(byte @ (b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff)), _) => Some(byte),
        (None, code @ 0x100..=0x120) => u8::try_from(code - 0x100).ok(),
        (None, code @ 0x121..=0x142) => u8::try_from(code - 0x121 + 0x7f).ok(),
        (None, 0x143) => Some(0xad),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_byte_level_alphabet_covers_every_byte_once() {
        let mut seen: Vec<u8> = (0..0x200).filter_map(char::from_u32).filter_map(byte_of).collect();
        seen.sort_unstable();
        assert_eq!(seen, (0..=0xff).collect::<Vec<u8>>());
        assert_eq!(byte_of('Ġ'), Some(b' '));
        assert_eq!(byte_of('Ċ'), Some(b'\n'));
    }

    #[test]
    fn tokens_give_their_bytes() {
        let mut pieces = Pieces::default();
        pieces.push("Ġthe", PieceKind::Ordinary, Alphabet::ByteLevel);
        pieces.push("<|Ġ|>", PieceKind::Special, Alphabet::ByteLevel);
        pieces.push("▁a", PieceKind::Ordinary, Alphabet::SentencePiece);
        pieces.push("<0xE2>", PieceKind::Ordinary, Alphabet::SentencePiece);
        pieces.push("", PieceKind::Ordinary, Alphabet::ByteLevel);
        let want: [&[u8]; 5] = [b" the", "<|Ġ|>".as_bytes(), b" a", b"\xe2", b""];
        for (id, bytes) in want.iter().enumerate() {
            assert_eq!(pieces.get(id as u32), Some(*bytes));
        }
        assert_eq!(pieces.get(5), None);
        assert!(pieces.is_special(1) && !pieces.is_special(0) && !pieces.is_special(9));
        assert!(!pieces.has_letter_and_space());
        pieces.push("aĠb", PieceKind::Ordinary, Alphabet::ByteLevel);
        assert!(pieces.has_letter_and_space());
    }
}
