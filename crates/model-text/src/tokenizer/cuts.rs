//! Where a text may be cut so that the tokens of its chunks, put together, are the tokens of the text.
//!
//! A cut goes before a single space between two ASCII letters: `a| b`. It changes no token when nothing that the tokenizer does looks
//! across it:
//! - no token of the vocabulary has an ASCII letter followed by a space, so no merge of BPE or SentencePiece crosses the cut, and merges on
//!   either side do not depend on the other;
//! - no added token (one that is found in the text before anything else) can cover that space, or touches it and takes it with it;
//! - the normalizer works character by character there, and the pre-tokenizer always ends a word there. Both are known for the ones
//!   listed here; with any other, texts are not cut.

use std::ops::Range;

use serde_json::Value;
use tokenizers::models::ModelWrapper;
use tokenizers::models::bpe::BPE;
use tokenizers::{AddedToken, NormalizerWrapper, PreTokenizerWrapper};

use super::Encoder;
use super::pieces::Pieces;
use super::pretokenizers;

/// A chunk ends at the first cut from this many bytes on.
const CHUNK: usize = 256;

/// The rule by which texts are cut for one tokenizer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Cuts {
    /// The encoder puts a space before every text, and so before every chunk. The chunk's own is left out.
    skip_space: bool,
}

/// What the parts of a tokenizer do to spaces.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
struct Spaces {
    /// Puts one before a text.
    prepended: bool,
    /// Writes U+2581 for each.
    replaced: bool,
}

impl Cuts {
    /// The rule for an encoder; None if its texts may not be cut.
    pub fn of(encoder: &Encoder, pieces: &Pieces) -> Option<Cuts> {
        let (normalizer, pre_tokenizer, added) = match encoder {
            Encoder::Bytes => return None,
            Encoder::Standard(tokenizer) => {
                let ModelWrapper::BPE(bpe) = tokenizer.get_model() else { return None };
                if !merges_only(bpe) || !adds_only_before(encoder) {
                    return None;
                }
                let added = tokenizer.get_added_tokens_decoder();
                (tokenizer.get_normalizer(), tokenizer.get_pre_tokenizer(), added)
            }
            Encoder::SentencePiece(tokenizer) => {
                (tokenizer.get_normalizer(), tokenizer.get_pre_tokenizer(), tokenizer.get_added_tokens_decoder())
            }
        };
        let cuts = rule(normalizer, pre_tokenizer)?;
        let free = added.values().map(added_text).all(|text| leaves_cuts(&text)) && !pieces.has_letter_and_space();
        free.then_some(cuts)
    }

    /// Where the chunks of a text are, in order. Where a text has no cut, a chunk is long.
    pub fn chunks(&self, text: &str) -> impl Iterator<Item = Range<usize>> {
        // A space is one byte.
        let skip = usize::from(self.skip_space);
        let mut begin = Some(0);
        std::iter::from_fn(move || {
            let from = begin?;
            let cut = cut(&text.as_bytes()[from..]).map(|at| from + at);
            begin = cut.map(|at| at + skip);
            Some(from..cut.unwrap_or(text.len()))
        })
    }
}

/// The first cut of a text that leaves a chunk of enough bytes.
fn cut(text: &[u8]) -> Option<usize> {
    let is_cut = |w: &[u8]| w[1] == b' ' && w[0].is_ascii_alphabetic() && w[2].is_ascii_alphabetic();
    text.get(CHUNK - 1..)?.windows(3).position(is_cut).map(|at| CHUNK + at)
}

/// Whether the model does nothing but join neighbours.
fn merges_only(bpe: &BPE) -> bool {
    let absent = |text: &Option<String>| text.as_ref().is_none_or(String::is_empty);
    // Unknown characters on both sides of a cut would become one token.
    let fuses = bpe.unk_token.is_some() && bpe.fuse_unk && !bpe.byte_fallback;
    bpe.dropout.is_none() && absent(&bpe.continuing_subword_prefix) && absent(&bpe.end_of_word_suffix) && !fuses
}

/// Whether the encoder adds special tokens only before a text, never after it.
fn adds_only_before(encoder: &Encoder) -> bool {
    let [with, without] = [true, false].map(|special| encoder.encode("a", special));
    matches!((with, without), (Ok(with), Ok(without)) if with.ends_with(&without))
}

fn rule(normalizer: Option<&NormalizerWrapper>, pre_tokenizer: Option<&PreTokenizerWrapper>) -> Option<Cuts> {
    let mut spaces = Spaces::default();
    let normalizer = normalizer.map(serde_json::to_value).transpose().ok()?.unwrap_or_default();
    let pre_tokenizer = pre_tokenizer.map(serde_json::to_value).transpose().ok()?.unwrap_or_default();
    let known = normalizes_in_place(&normalizer, &mut spaces) && ends_words(&pre_tokenizer, spaces);
    // The space that is prepended must become what a space within the text becomes.
    (known && (spaces.replaced || !spaces.prepended)).then_some(Cuts { skip_space: spaces.prepended })
}

/// Whether a normalizer treats a letter and the space after it alike wherever they stand.
fn normalizes_in_place(normalizer: &Value, spaces: &mut Spaces) -> bool {
    match normalizer["type"].as_str() {
        None => normalizer.is_null(),
        Some("NFC" | "NFD" | "NFKC" | "NFKD") => true,
        Some("Replace") => {
            spaces.replaced = normalizer["pattern"]["String"] == " " && normalizer["content"] == "\u{2581}";
            spaces.replaced
        }
        Some("Prepend") => {
            spaces.prepended = normalizer["prepend"] == "\u{2581}";
            spaces.prepended
        }
        Some("Sequence") => {
            let all = normalizer["normalizers"].as_array();
            all.is_some_and(|all| all.iter().all(|one| normalizes_in_place(one, spaces)))
        }
        Some(_) => false,
    }
}

/// Whether a pre-tokenizer never has a letter and the space after it in one word, or leaves it to the model, and looks no further back
/// than a word's beginning.
fn ends_words(pre_tokenizer: &Value, spaces: Spaces) -> bool {
    match pre_tokenizer["type"].as_str() {
        None => pre_tokenizer.is_null(),
        // A space that either puts before a text is one that a chunk begins with.
        Some("ByteLevel" | "Metaspace") => !spaces.prepended,
        Some("Digits") => true,
        Some("Split") if pre_tokenizer["pattern"]["String"] == " " => spaces.replaced,
        Some("Split") => {
            let known = pre_tokenizer["pattern"]["Regex"].as_str().is_some_and(pretokenizers::is_known);
            known && pre_tokenizer["behavior"] == "Isolated" && pre_tokenizer["invert"] == false
        }
        Some("Sequence") => {
            let all = pre_tokenizer["pretokenizers"].as_array();
            all.is_some_and(|all| all.iter().all(|one| ends_words(one, spaces)))
        }
        Some(_) => false,
    }
}

fn added_text(token: &AddedToken) -> String {
    token.content.replace('\u{2581}', " ")
}

/// Whether an added token with this text can neither cover the space of a cut nor end at a letter beside it.
fn leaves_cuts(text: &str) -> bool {
    let letter = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_alphabetic);
    let bytes = text.as_bytes();
    let fits = |at: Option<usize>| at.and_then(|at| bytes.get(at)).is_none_or(u8::is_ascii_alphabetic);
    let covers = |at: usize| bytes[at] == b' ' && fits(at.checked_sub(1)) && fits(Some(at + 1));
    !letter(bytes.first()) && !letter(bytes.last()) && !(0..bytes.len()).any(covers)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const CUTS: Cuts = Cuts { skip_space: false };

    fn chunks(cuts: Cuts, text: &str) -> Vec<&str> {
        cuts.chunks(text).map(|range| &text[range]).collect()
    }

    #[test]
    fn chunks_end_between_words_and_make_up_the_text() {
        let sentence = "The quick brown fox, 12 times.  It jumps over; the lazy dog\n sleeps on – a é ";
        let text = sentence.repeat(40);
        let parts = chunks(CUTS, &text);
        assert_eq!(parts.concat(), text);
        assert!(parts.len() > text.len() / CHUNK / 2);
        for pair in parts.windows(2) {
            assert!((CHUNK..CHUNK + sentence.len()).contains(&pair[0].len()));
            assert!(pair[0].ends_with(|c: char| c.is_ascii_alphabetic()) && pair[1].starts_with(' '));
        }
        let skipping = chunks(Cuts { skip_space: true }, &text);
        assert_eq!(skipping.join(" "), text);
    }

    #[test]
    fn texts_without_a_cut_are_one_chunk() {
        for text in ["", "a b", &"x".repeat(5000), &"1 2 ".repeat(500), &"é è ".repeat(500)] {
            assert_eq!(chunks(CUTS, text), [text]);
        }
        // A cut right at the least length, and one before it.
        let at = |before: usize| format!("{} b", "a".repeat(before));
        assert_eq!(chunks(CUTS, &at(CHUNK)).len(), 2);
        assert_eq!(chunks(CUTS, &at(CHUNK - 1)).len(), 1);
    }

    #[test]
    fn added_tokens_must_leave_cuts_alone() {
        for text in ["<|im_end|>", "</s>", "  ", "é", "<|a  b|>", "< b>", "<a >", "\n", ""] {
            assert!(leaves_cuts(text), "{text:?}");
        }
        for text in [" ", "a", "<a", "a>", " b>", "<a ", "<a b>", " b", "a "] {
            assert!(!leaves_cuts(text), "{text:?}");
        }
    }

    #[test]
    fn unknown_parts_are_not_cut() {
        let normalizer = |value: Value| {
            let mut spaces = Spaces::default();
            normalizes_in_place(&value, &mut spaces).then_some(spaces)
        };
        let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"});
        let prepend = json!({"type": "Prepend", "prepend": "\u{2581}"});
        let both = json!({"type": "Sequence", "normalizers": [prepend, replace]});
        assert_eq!(normalizer(Value::Null), Some(Spaces::default()));
        assert_eq!(normalizer(json!({"type": "NFC"})), Some(Spaces::default()));
        assert_eq!(normalizer(both), Some(Spaces { prepended: true, replaced: true }));
        for other in
            [json!({"type": "Lowercase"}), json!({"type": "Strip"}), json!({"type": "Prepend", "prepend": "x"})]
        {
            assert_eq!(normalizer(other), None);
        }
        let pre = |value: Value| ends_words(&value, Spaces::default());
        let split = |regex: &str, behavior: &str| json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": behavior, "invert": false});
        assert!(pre(Value::Null) && pre(json!({"type": "ByteLevel"})) && pre(split(r"\p{N}", "Isolated")));
        assert!(!pre(split(r"\p{N}", "Removed")) && !pre(split(r"\w+ \w+", "Isolated")));
        assert!(
            !pre(json!({"type": "Whitespace"})) && !pre(json!({"type": "Sequence", "pretokenizers": [{"type": "X"}]}))
        );
        assert!(!ends_words(&json!({"type": "ByteLevel"}), Spaces { prepended: true, replaced: true }));
    }
}
