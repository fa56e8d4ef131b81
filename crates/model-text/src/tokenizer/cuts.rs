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
        let (cuts, words) = rule(normalizer, pre_tokenizer)?;
        // A word that is a token is taken whole, so that a short one at the end could differ.
        if let (Encoder::Standard(tokenizer), false) = (encoder, words)
            && matches!(tokenizer.get_model(), ModelWrapper::BPE(bpe) if bpe.ignore_merges)
        {
            return None;
        }
        let free = added.values().all(leaves_cuts_alone) && !pieces.has_letter_and_space();
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

/// The rule, and whether the pre-tokenizer ends a word at each cut by itself.
fn rule(normalizer: Option<&NormalizerWrapper>, pre_tokenizer: Option<&PreTokenizerWrapper>) -> Option<(Cuts, bool)> {
    let mut spaces = Spaces::default();
    let normalizer = normalizer.map(serde_json::to_value).transpose().ok()?.unwrap_or_default();
    let pre_tokenizer = pre_tokenizer.map(serde_json::to_value).transpose().ok()?.unwrap_or_default();
    let known = normalizes_in_place(&normalizer, &mut spaces) && ends_words(&pre_tokenizer, spaces);
    // The space that is prepended must become what a space within the text becomes.
    let cuts = Cuts { skip_space: spaces.prepended };
    (known && (spaces.replaced || !spaces.prepended)).then_some((cuts, splits_words(&pre_tokenizer)))
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
        Some("ByteLevel") => !spaces.prepended,
        Some("Metaspace") => !spaces.prepended && pre_tokenizer["replacement"] == "\u{2581}",
        Some("Digits") => true,
        Some("Split") if pre_tokenizer["pattern"]["String"] == " " => spaces.replaced,
        Some("Split") => {
            let known = pre_tokenizer["pattern"]["Regex"].as_str().is_some_and(pretokenizers::is_known);
            known && pre_tokenizer["behavior"] == "Isolated" && pre_tokenizer["invert"] == false
        }
        Some("Sequence") => {
            // What follows these sees other characters than the patterns are made for.
            let rewrites = |one: &Value| matches!(one["type"].as_str(), Some("ByteLevel" | "Metaspace" | "Sequence"));
            let last = |all: &[Value]| all.iter().rev().skip(1).all(|one| !rewrites(one));
            let all = pre_tokenizer["pretokenizers"].as_array();
            all.is_some_and(|all| last(all) && all.iter().all(|one| ends_words(one, spaces)))
        }
        Some(_) => false,
    }
}

/// Whether a pre-tokenizer, one that is known, has a pattern that ends a word before each space.
fn splits_words(pre_tokenizer: &Value) -> bool {
    match pre_tokenizer["type"].as_str() {
        Some("ByteLevel") => pre_tokenizer["use_regex"] != false,
        Some("Metaspace") => pre_tokenizer["split"] != false,
        Some("Split") => pre_tokenizer["pattern"]["Regex"].as_str().is_some_and(pretokenizers::splits_words),
        Some("Sequence") => pre_tokenizer["pretokenizers"].as_array().is_some_and(|all| all.iter().any(splits_words)),
        _ => false,
    }
}

/// Whether an added token leaves every cut alone. One that is searched for in normalized text may match other characters than its own, so
/// it must be plain.
fn leaves_cuts_alone(token: &AddedToken) -> bool {
    let text = token.content.replace('\u{2581}', " ");
    leaves_cuts(&text) && (!token.normalized || text.is_ascii())
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
    use std::collections::HashMap;

    use serde_json::json;
    use tokenizers::TokenizerImpl;
    use tokenizers::normalizers::{Prepend, Replace, Sequence};
    use tokenizers::pre_tokenizers::byte_level::ByteLevel;

    use super::super::pieces::{Alphabet, PieceKind};
    use super::super::sentencepiece::SentencePiece;
    use super::*;

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

    /// Parts of texts that are made to go wrong when they are cut.
    const PARTS: [&str; 28] = [
        " ",
        " ",
        "a",
        "b c",
        "the",
        " the",
        "The quick fox",
        "isn't",
        " 's",
        "'ll go",
        "12",
        " 345",
        "7 days",
        "  ",
        "   x",
        "\n",
        "\r\n",
        " \n ",
        ".",
        " (",
        "—",
        "é",
        "e\u{301} f",
        "漢字",
        "👩‍🚀",
        "\u{a0}",
        "▁a",
        "<|end|>",
    ];

    /// Tokens must be the same whether a text is tokenised whole or in chunks.
    fn same_in_chunks(name: &str, encoder: &Encoder, pieces: &Pieces) {
        let cuts = Cuts::of(encoder, pieces).unwrap_or_else(|| panic!("{name} has no cuts"));
        let (mut state, mut cut) = (1u64, 0);
        for _ in 0..60 {
            let mut text = String::new();
            for _ in 0..600 {
                // Knuth's MMIX generator.
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                text.push_str(PARTS[(state >> 33) as usize % PARTS.len()]);
            }
            let parts = chunks(cuts, &text);
            cut += parts.len() - 1;
            let together: Vec<u32> = parts.iter().flat_map(|part| encoder.encode(part, false).unwrap()).collect();
            assert_eq!(together, encoder.encode(&text, false).unwrap(), "{name}: {text:?}");
        }
        assert!(cut > 60, "{name} was cut {cut} times");
    }

    /// Merges that make words with the space before them; of SentencePiece's tokens, too.
    const MERGES: [(&str, &str); 8] =
        [("t", "h"), ("th", "e"), ("_", "the"), ("_", "f"), ("f", "o"), ("_f", "o"), ("q", "u"), ("_", "qu")];

    #[test]
    fn chunks_have_the_tokens_of_the_text_by_every_rule() {
        for name in ["default", "gpt-2", "smollm", "qwen2", "llama-bpe", "tekken"] {
            let rule = pretokenizers::rule(name).unwrap();
            let spell = |text: &str| text.replace('_', "Ġ");
            let mut tokens: Vec<String> = ByteLevel::alphabet().into_iter().map(String::from).collect();
            tokens.sort();
            tokens.extend(MERGES.map(|(a, b)| spell(&format!("{a}{b}"))));
            let vocab: HashMap<String, u32> = tokens.iter().cloned().zip(0..).collect();
            let vocab = vocab.into_iter().collect::<tokenizers::models::bpe::Vocab>();
            let merges = MERGES.map(|(a, b)| (spell(a), spell(b))).to_vec();
            let model =
                BPE::builder().vocab_and_merges(vocab, merges).ignore_merges(rule.ignore_merges).build().unwrap();
            let mut tokenizer = tokenizers::Tokenizer::new(model);
            tokenizer.with_pre_tokenizer(Some(rule.build().unwrap()));
            tokenizer.add_tokens([AddedToken::from("<|end|>", true).normalized(false)]).unwrap();
            let mut pieces = Pieces::default();
            tokens.iter().for_each(|token| pieces.push(token, PieceKind::Ordinary, Alphabet::ByteLevel));
            same_in_chunks(name, &Encoder::Standard(Box::new(tokenizer)), &pieces);
        }
    }

    #[test]
    fn chunks_have_the_tokens_of_the_text_where_a_space_is_prepended() {
        for prepended in [false, true] {
            let mut tokens: Vec<String> = (0..=255u8).map(|byte| format!("<0x{byte:02X}>")).collect();
            tokens.extend((b'a'..=b'z').map(|letter| char::from(letter).to_string()));
            tokens.push("▁".to_owned());
            tokens.extend(MERGES.map(|(a, b)| format!("{a}{b}").replace('_', "▁")));
            let scores = (0..tokens.len()).map(|at| -(at as f32)).collect();
            let mut pieces = Pieces::default();
            tokens.iter().for_each(|token| pieces.push(token, PieceKind::Ordinary, Alphabet::SentencePiece));
            let mut tokenizer = TokenizerImpl::new(SentencePiece::new(tokens, scores, None));
            let mut steps: Vec<NormalizerWrapper> = Vec::new();
            if prepended {
                steps.push(Prepend::new("▁".to_owned()).into());
            }
            steps.push(Replace::new(" ", "▁").unwrap().into());
            tokenizer.with_normalizer(Some(Sequence::new(steps))).unwrap();
            tokenizer.add_tokens([AddedToken::from("<|end|>", true).normalized(false)]).unwrap();
            let encoder = Encoder::SentencePiece(Box::new(tokenizer));
            assert_eq!(Cuts::of(&encoder, &pieces), Some(Cuts { skip_space: prepended }));
            same_in_chunks("SentencePiece", &encoder, &pieces);
        }
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
