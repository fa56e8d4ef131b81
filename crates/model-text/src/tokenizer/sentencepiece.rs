//! SentencePiece's BPE over a vocabulary with scores: of all neighbours whose concatenation is a token, the one with the
//! highest score is joined first, the leftmost of equals. What is left outside the vocabulary is spelled in bytes.
//!
//! It is a model of the `tokenizers` crate, whose own BPE needs a list of merges. Deriving that list would take seconds for a
//! vocabulary of 262,144 tokens and would lose the rule for equal scores.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashMap};
use std::path::{Path, PathBuf};

use tokenizers::models::bpe::BpeTrainer;
use tokenizers::{Model, Result, Token};

/// Vocabulary and scores.
#[derive(Debug)]
pub(super) struct SentencePiece {
    ids: HashMap<String, u32>,
    tokens: Vec<String>,
    scores: Vec<f32>,
    bytes: Vec<Option<u32>>,
    unknown: Option<u32>,
}

impl SentencePiece {
    /// `tokens[id]` has `scores[id]`; `unknown` stands for text that not even byte tokens can spell.
    pub fn new(tokens: Vec<String>, scores: Vec<f32>, unknown: Option<u32>) -> SentencePiece {
        let ids: HashMap<String, u32> = (0u32..).zip(&tokens).map(|(id, token)| (token.clone(), id)).collect();
        let bytes = (0..=0xffu8).map(|byte| ids.get(&format!("<0x{byte:02X}>")).copied()).collect();
        SentencePiece { ids, tokens, scores, bytes, unknown }
    }

    /// Splits `text` into the ranges that remain when nothing can be joined any more.
    fn join<'t>(&self, text: &'t str) -> Vec<&'t str> {
        let mut symbols = Symbols::new(text);
        let mut queue = BinaryHeap::new();
        for left in 0..symbols.list.len() {
            queue.extend(self.candidate(&symbols, left));
        }
        while let Some(candidate) = queue.pop() {
            if symbols.is_current(&candidate) {
                symbols.join(candidate.left);
                queue.extend(self.candidate(&symbols, candidate.left));
                queue.extend(symbols.before(candidate.left).and_then(|before| self.candidate(&symbols, before)));
            }
        }
        symbols.list.iter().filter(|s| s.len > 0).map(|s| &text[s.start..s.start + s.len]).collect()
    }

    /// The join of `left` with its right neighbour, if that makes a token.
    fn candidate(&self, symbols: &Symbols, left: usize) -> Option<Candidate> {
        let (start, len) = symbols.joined(left)?;
        let id = *self.ids.get(&symbols.text[start..start + len])?;
        Some(Candidate { score: *self.scores.get(id as usize)?, left, len })
    }

    fn spell(&self, symbol: &str, start: usize, out: &mut Vec<Token>) {
        if let Some(&id) = self.ids.get(symbol) {
            out.push(Token::new(id, symbol.to_owned(), (start, start + symbol.len())));
            return;
        }
        for (offset, byte) in symbol.bytes().enumerate() {
            if let Some(id) = self.bytes[byte as usize].or(self.unknown) {
                let value = self.tokens.get(id as usize).cloned().unwrap_or_default();
                out.push(Token::new(id, value, (start + offset, start + offset + 1)));
            }
        }
    }
}

/// A stretch of the text; length 0 once it has been joined to the one before.
#[derive(Clone, Copy)]
struct Symbol {
    start: usize,
    len: usize,
    before: Option<usize>,
    after: Option<usize>,
}

/// The text's symbols as a list linked in both directions.
struct Symbols<'t> {
    text: &'t str,
    list: Vec<Symbol>,
}

impl<'t> Symbols<'t> {
    /// One symbol per character.
    fn new(text: &'t str) -> Symbols<'t> {
        let mut list: Vec<Symbol> = Vec::with_capacity(text.len());
        for (index, (start, c)) in text.char_indices().enumerate() {
            list.push(Symbol { start, len: c.len_utf8(), before: index.checked_sub(1), after: Some(index + 1) });
        }
        if let Some(last) = list.last_mut() {
            last.after = None;
        }
        Symbols { text, list }
    }

    /// Start and length of `left` and its right neighbour together.
    fn joined(&self, left: usize) -> Option<(usize, usize)> {
        let symbol = self.list[left];
        let right = self.list[symbol.after?];
        Some((symbol.start, symbol.len + right.len))
    }

    /// Whether neither of the two symbols has been joined to anything since the candidate was made.
    fn is_current(&self, candidate: &Candidate) -> bool {
        self.list[candidate.left].len > 0 && self.joined(candidate.left).is_some_and(|(_, len)| len == candidate.len)
    }

    fn join(&mut self, left: usize) {
        let Some(right) = self.list[left].after else { return };
        let gone = std::mem::replace(&mut self.list[right].len, 0);
        let after = self.list[right].after;
        self.list[left].len += gone;
        self.list[left].after = after;
        if let Some(after) = after {
            self.list[after].before = Some(left);
        }
    }

    fn before(&self, index: usize) -> Option<usize> {
        self.list[index].before
    }
}

/// A possible join; the greatest is done first.
struct Candidate {
    score: f32,
    left: usize,
    /// Bytes of the joined symbol.
    len: usize,
}

impl Ord for Candidate {
    fn cmp(&self, other: &Self) -> Ordering {
        self.score.total_cmp(&other.score).then(other.left.cmp(&self.left)).then(other.len.cmp(&self.len))
    }
}

impl PartialOrd for Candidate {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Candidate {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Candidate {}

impl Model for SentencePiece {
    type Trainer = BpeTrainer;

    fn tokenize(&self, sequence: &str) -> Result<Vec<Token>> {
        let mut out = Vec::new();
        let mut start = 0;
        for symbol in self.join(sequence) {
            self.spell(symbol, start, &mut out);
            start += symbol.len();
        }
        Ok(out)
    }

    fn token_to_id(&self, token: &str) -> Option<u32> {
        self.ids.get(token).copied()
    }

    fn id_to_token(&self, id: u32) -> Option<String> {
        self.tokens.get(id as usize).cloned()
    }

    fn get_vocab(&self) -> HashMap<String, u32> {
        self.ids.clone()
    }

    fn get_vocab_size(&self) -> usize {
        self.tokens.len()
    }

    fn save(&self, _folder: &Path, _prefix: Option<&str>) -> Result<Vec<PathBuf>> {
        Err("a vocabulary read from a model file is not saved".into())
    }

    fn get_trainer(&self) -> BpeTrainer {
        BpeTrainer::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model(tokens: &[(&str, f32)]) -> SentencePiece {
        let (names, scores) = tokens.iter().map(|(t, s)| ((*t).to_owned(), *s)).unzip();
        SentencePiece::new(names, scores, Some(0))
    }

    fn split(model: &SentencePiece, text: &str) -> Vec<String> {
        model.tokenize(text).unwrap().into_iter().map(|t| t.value).collect()
    }

    #[test]
    fn the_best_score_joins_first_and_the_leftmost_of_equals() {
        let m = model(&[("<unk>", 0.0), ("a", -9.0), ("b", -9.0), ("ab", -2.0), ("ba", -1.0), ("aa", -3.0)]);
        assert_eq!(split(&m, "aba"), ["a", "ba"], "ba beats ab");
        assert_eq!(split(&m, "aaa"), ["aa", "a"], "the left pair");
        assert_eq!(split(&m, ""), Vec::<String>::new());
    }

    #[test]
    fn unknown_characters_become_bytes_or_the_unknown_token() {
        let m = model(&[("<unk>", 0.0), ("<0xC3>", 0.0), ("<0xA9>", 0.0), ("x", -1.0)]);
        assert_eq!(split(&m, "xé"), ["x", "<0xC3>", "<0xA9>"]);
        assert_eq!(split(&m, "ü"), ["<0xC3>", "<unk>"]);
    }

    #[test]
    fn characters_outside_the_vocabulary_may_still_be_joined() {
        let m = model(&[("<unk>", 0.0), ("né", -1.0)]);
        assert_eq!(split(&m, "né"), ["né"]);
    }

    #[test]
    fn long_texts_take_no_quadratic_time() {
        let m = model(&[("<unk>", 0.0), ("a", -3.0), ("aa", -1.0), ("aaaa", -2.0)]);
        assert_eq!(m.tokenize(&"a".repeat(400_000)).unwrap().len(), 100_000);
    }
}
