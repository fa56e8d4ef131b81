//! The model's vocabulary as the matcher wants it: the bytes of each token, in a trie.

use std::sync::Arc;

use baton_model_text::Tokenizer;
use llguidance::toktrie::{ApproximateTokEnv, INVALID_TOKEN, TokEnv, TokRxInfo, TokTrie};

/// Longest token that can be chosen under a constraint, bytes; the trie's depth is limited.
const LONGEST: usize = 512;

/// A trie over the `rows` token ids of the model's output head.
///
/// Special tokens stand behind a marker byte that no text has, so they never match text; a grammar may name one
/// (`<|like_this|>`). Ids without a text, and those beyond the tokenizer's, match nothing. There is no end token: which tokens
/// end an answer is the request's affair.
pub(crate) fn index(tokenizer: &Tokenizer, rows: u32) -> TokEnv {
    let words: Vec<Vec<u8>> = (0..rows).map(|id| word(tokenizer, id)).collect();
    let trie = TokTrie::from(&TokRxInfo::new(rows, INVALID_TOKEN), &words);
    // Not canonical: forced text may be spelled by any tokens, so that the model chooses among all of them.
    Arc::new(ApproximateTokEnv::new(trie))
}

fn word(tokenizer: &Tokenizer, id: u32) -> Vec<u8> {
    let bytes = tokenizer.token_bytes(id).unwrap_or_default();
    if bytes.len() > LONGEST || bytes.contains(&TokTrie::SPECIAL_TOKEN_MARKER) {
        return Vec::new();
    }
    let marker = tokenizer.is_special(id).then_some(TokTrie::SPECIAL_TOKEN_MARKER);
    marker.into_iter().chain(bytes.iter().copied()).collect()
}
