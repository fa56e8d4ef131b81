//! A tokenizer without a file, for models without a vocabulary of their own: a token for every byte, and made-up words for the ids
//! beyond. So whatever the model writes is text.

use std::sync::Arc;

use super::pieces::{Alphabet, PieceKind, Pieces};
use super::{BosRule, Encoder, Inner, Tokenizer};

/// Control tokens, after the 256 bytes: begin and end of a text.
const SPECIAL: [&str; 2] = ["<|begin|>", "<|end|>"];
const BYTES: u32 = 256;
/// Fewest ids that it needs.
pub(crate) const LEAST_VOCABULARY: u32 = BYTES + SPECIAL.len() as u32;

/// A tokenizer with as many ids as the model's embedding has rows.
pub(crate) fn tokenizer(vocab_size: u32) -> Tokenizer {
    let mut pieces = Pieces::default();
    for byte in 0..BYTES {
        pieces.push(&format!("<0x{byte:02X}>"), PieceKind::Ordinary, Alphabet::SentencePiece);
    }
    for text in SPECIAL {
        pieces.push(text, PieceKind::Special, Alphabet::SentencePiece);
    }
    for number in 0..vocab_size.saturating_sub(LEAST_VOCABULARY) {
        pieces.push(&word(number), PieceKind::Verbatim, Alphabet::SentencePiece);
    }
    Tokenizer(Arc::new(Inner {
        encoder: Encoder::Bytes,
        cuts: None,
        pieces,
        bos: Some(BYTES),
        eos: vec![BYTES + 1],
        bos_rule: BosRule::Here,
        add_eos: false,
        space_prefix: false,
    }))
}

/// Ids of a text: special tokens where they are written, bytes elsewhere.
pub(super) fn encode(text: &str) -> Vec<u32> {
    let mut ids = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, others)) = rest.split_first() {
        let special = (BYTES..).zip(SPECIAL).find_map(|(id, text)| Some((id, rest.strip_prefix(text.as_bytes())?)));
        let (id, next) = special.unwrap_or((u32::from(byte), others));
        ids.push(id);
        rest = next;
    }
    ids
}

/// A number as a pronounceable word, with a syllable for each digit.
fn word(mut number: u32) -> String {
    const CONSONANTS: &[u8; 16] = b"bdfghjklmnprstvz";
    const VOWELS: &[u8; 4] = b"aiou";
    let mut word = " ".to_owned();
    loop {
        word.push(char::from(CONSONANTS[number as usize % 16]));
        word.push(char::from(VOWELS[number as usize / 16 % 4]));
        number /= 64;
        if number == 0 {
            return word;
        }
        number -= 1;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn texts_come_back_and_special_tokens_are_recognised() {
        let tokenizer = tokenizer(1000);
        for text in ["", "a", "Grüße, 世界\n\0", "<|begin", "<<|end"] {
            let ids = tokenizer.encode(text, false).unwrap();
            assert_eq!(ids.len(), text.len());
            assert_eq!(tokenizer.decode(&ids, true).unwrap(), text);
        }
        assert_eq!(tokenizer.encode("a<|end|>b", true).unwrap(), [256, 97, 257, 98]);
        assert_eq!(tokenizer.encode_chat("<|begin|>a").unwrap(), [256, 97], "what the text has is not added");
        assert_eq!((tokenizer.bos_id(), tokenizer.eos_ids()), (Some(256), &[257][..]));
    }

    #[test]
    fn every_id_beyond_the_bytes_is_a_word_of_its_own() {
        let tokenizer = tokenizer(LEAST_VOCABULARY + 20_000);
        assert_eq!(tokenizer.vocab_size(), 20_258);
        let words: BTreeSet<&[u8]> = (LEAST_VOCABULARY..20_258).map(|id| tokenizer.token_bytes(id).unwrap()).collect();
        assert_eq!(words.len(), 20_000);
        assert!(tokenizer.token_bytes(20_258).is_err());
        assert_eq!(tokenizer.decode(&[258, 259, 258 + 64], true).unwrap(), " ba da baba");
    }
}
