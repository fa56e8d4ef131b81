//! Turns tokens into text as they come. A token may hold part of a character, so only whole characters are given out.

use compact_str::CompactString;

use super::Tokenizer;

/// Longest incomplete character, bytes.
const MAX_PENDING: usize = 3;

/// Turns a stream of tokens into a stream of text. Each byte is looked at a constant number of times.
#[derive(Clone, Debug)]
pub struct TextStream {
    tokenizer: Tokenizer,
    skip_special: bool,
    /// A special token that is written even when others are skipped.
    kept: Option<u32>,
    /// Bytes of a character that is not complete yet, at most three.
    pending: Vec<u8>,
}

impl TextStream {
    pub(super) fn new(tokenizer: Tokenizer, skip_special: bool) -> TextStream {
        TextStream { tokenizer, skip_special, kept: None, pending: Vec::with_capacity(MAX_PENDING) }
    }

    /// Writes this special token even when others are skipped.
    pub fn keeping(self, id: Option<u32>) -> TextStream {
        TextStream { kept: id, ..self }
    }

    /// The text that `id` completes, without an allocation if it is short; empty while a character is incomplete. Bytes that can never be UTF-8 become U+FFFD. An
    /// id outside the tokenizer's vocabulary (models may have more rows than words) adds nothing.
    pub fn push(&mut self, id: u32) -> CompactString {
        let pieces = &self.tokenizer.0.pieces;
        match pieces.get(id) {
            Some(piece) if !self.skip_special || !pieces.is_special(id) || self.kept == Some(id) => {
                take_text(&mut self.pending, piece)
            }
            _ => CompactString::default(),
        }
    }

    /// What is left: an incomplete character as U+FFFD.
    pub fn finish(self) -> CompactString {
        if self.pending.is_empty() { CompactString::default() } else { "\u{fffd}".into() }
    }
}

/// Complete characters of `pending` and `piece` together; leaves in `pending` what may still become one.
fn take_text(pending: &mut Vec<u8>, piece: &[u8]) -> CompactString {
    // Mostly a token is whole characters.
    if let (true, Ok(text)) = (pending.is_empty(), std::str::from_utf8(piece)) {
        return text.into();
    }
    pending.extend_from_slice(piece);
    let mut text = CompactString::with_capacity(pending.len());
    let mut rest: &[u8] = pending;
    loop {
        match std::str::from_utf8(rest) {
            Ok(valid) => {
                text.push_str(valid);
                rest = &[];
                break;
            }
            Err(e) => {
                let (valid, invalid) = rest.split_at(e.valid_up_to());
                text.push_str(&String::from_utf8_lossy(valid));
                let Some(bad) = e.error_len() else {
                    rest = invalid;
                    break;
                };
                text.push(char::REPLACEMENT_CHARACTER);
                rest = &invalid[bad..];
            }
        }
    }
    let used = pending.len() - rest.len();
    pending.drain(..used);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn feed(chunks: &[&[u8]]) -> (Vec<CompactString>, Vec<u8>) {
        let mut pending = Vec::new();
        (chunks.iter().map(|chunk| take_text(&mut pending, chunk)).collect(), pending)
    }

    #[test]
    fn characters_are_never_split() {
        let emoji = "👩‍🚀é".as_bytes();
        for cut in 1..emoji.len() {
            let (texts, pending) = feed(&[&emoji[..cut], &emoji[cut..]]);
            assert_eq!(texts.concat().as_bytes(), emoji);
            assert!(pending.is_empty() && !texts.concat().contains('\u{fffd}'), "cut at {cut}");
        }
    }

    #[test]
    fn bytes_that_cannot_be_text_are_replaced_at_once_and_the_rest_is_kept() {
        let (texts, pending) = feed(&[b"a\xffb", b"\xe2\x82", b"z", b"\xf0\x9f"]);
        assert_eq!(texts, ["a\u{fffd}b", "", "\u{fffd}z", ""]);
        assert_eq!(pending, b"\xf0\x9f");
    }

    #[test]
    fn pieces_agree_with_the_whole() {
        let bytes: Vec<u8> = (0..4000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 21) as u8).collect();
        let mut pending = Vec::new();
        let mut text: String = bytes.chunks(3).map(|chunk| take_text(&mut pending, chunk)).collect();
        assert!(pending.len() <= MAX_PENDING);
        text.push_str(&String::from_utf8_lossy(&pending));
        assert_eq!(text, String::from_utf8_lossy(&bytes));
    }
}
