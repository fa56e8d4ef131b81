//! How byte-level vocabularies split text into words before joining bytes, by the name a GGUF file gives
//! (`tokenizer.ggml.pre`).

use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{Result, SplitDelimiterBehavior};

/// GPT-2: contractions, words and numbers with the space before them, runs of other characters, spaces.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const EACH_DIGIT: &str = r"\p{N}";
/// Llama 3: contractions in either case, any one character before a word, numbers of three digits, line ends apart.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Like Llama 3, but each digit alone.
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Mistral's Tekken: words split where the case changes.
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// GPT-4o and gpt-oss: like Tekken, with contractions and numbers of three digits.
const O200K: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The rule of files that name none: punctuation, GPT-2, numbers in threes.
const UNNAMED: [&str; 4] = [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"];

/// One rule.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Rule {
    /// Patterns, applied one after the other, each to the pieces that the one before leaves.
    patterns: &'static [&'static str],
    /// A word that is a token is taken whole, whatever the merges say.
    pub ignore_merges: bool,
    /// bos precedes a text unless the file says otherwise.
    pub add_bos: bool,
}

/// The names of rules, for messages.
pub(super) const NAMES: &str = "default, gpt-2, smollm, starcoder, refact, command-r, qwen2, llama-bpe, tekken";

/// The rule of a name.
pub(super) fn rule(name: &str) -> Option<Rule> {
    let plain = |patterns| Rule { patterns, ignore_merges: false, add_bos: false };
    Some(match name {
        "default" => plain(&UNNAMED),
        "gpt-2" | "phi-2" | "mpt" | "olmo" => plain(&[GPT2]),
        "smollm" | "starcoder" | "refact" | "command-r" | "codeshell" => plain(&[EACH_DIGIT, GPT2]),
        "qwen2" | "deepseek-r1-qwen" => plain(&[QWEN2]),
        "llama-bpe" | "llama3" | "llama-v3" => Rule { patterns: &[LLAMA3], ignore_merges: true, add_bos: true },
        "tekken" => Rule { patterns: &[TEKKEN], ignore_merges: true, add_bos: true },
        _ => return None,
    })
}

/// Whether a pattern is one of these, or of another model family. None of their words has a letter followed by a space, and none looks
/// back.
pub(super) fn is_known(pattern: &str) -> bool {
    [GPT2, EACH_DIGIT, LLAMA3, QWEN2, TEKKEN, O200K].contains(&pattern) || UNNAMED.contains(&pattern)
}

/// Whether a known pattern also ends a word before each space that follows a letter.
pub(super) fn splits_words(pattern: &str) -> bool {
    [GPT2, LLAMA3, QWEN2, TEKKEN, O200K].contains(&pattern)
}

impl Rule {
    /// The rule as a pre-tokenizer that ends in the byte-level alphabet.
    pub fn build(self) -> Result<PreTokenizerWrapper> {
        let split = |pattern: &&str| {
            let pattern = SplitPattern::Regex((*pattern).to_owned());
            Split::new(pattern, SplitDelimiterBehavior::Isolated, false).map(PreTokenizerWrapper::from)
        };
        let mut steps = self.patterns.iter().map(split).collect::<Result<Vec<_>>>()?;
        steps.push(ByteLevel::new(false, false, false).into());
        Ok(Sequence::new(steps).into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer};

    fn words<'t>(name: &str, text: &'t str) -> Vec<&'t str> {
        let mut string = PreTokenizedString::from(text);
        rule(name).unwrap().build().unwrap().pre_tokenize(&mut string).unwrap();
        let splits = string.get_splits(OffsetReferential::Original, OffsetType::Byte);
        splits.into_iter().map(|(_, (start, end), _)| &text[start..end]).collect()
    }

    #[test]
    fn rules_split_as_their_models_expect() {
        let text = "I'LL pay  $1234\n\n now";
        assert_eq!(words("gpt-2", text), ["I", "'", "LL", " pay", " ", " $", "1234", "\n\n", " now"]);
        assert_eq!(words("smollm", text), ["I", "'", "LL", " pay", " ", " $", "1", "2", "3", "4", "\n\n", " now"]);
        assert_eq!(words("llama-bpe", text), ["I", "'LL", " pay", " ", " $", "123", "4", "\n\n", " now"]);
        assert_eq!(words("qwen2", text), ["I", "'LL", " pay", " ", " $", "1", "2", "3", "4", "\n\n", " now"]);
        assert_eq!(words("tekken", "HTTPServer x9"), ["HTTPServer", " x", "9"]);
        assert!(rule("no-such-rule").is_none());
    }

    #[test]
    fn every_rule_keeps_every_character() {
        let text = "a\u{300}b 漢字かな\t\r\n  👩‍🚀 ١٢٣ x_y(z) — “q”… \u{a0}end   ";
        for name in ["default", "gpt-2", "smollm", "qwen2", "llama-bpe", "tekken"] {
            assert_eq!(words(name, text).concat(), text, "{name}");
        }
    }
}
