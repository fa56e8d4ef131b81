//! The model's vocabulary in the form the matcher needs: a trie of the bytes of each token.

use std::sync::Arc;

use baton_model_text::Tokenizer;
use llguidance::toktrie::{ApproximateTokEnv, INVALID_TOKEN, TokEnv, TokRxInfo, TokTrie};

/// Most bytes of a token that can be chosen under a constraint. The trie's depth is limited.
const LONGEST: usize = 512;

/// A trie over the `rows` token ids of the model's output head.
///
/// Special tokens are prefixed with a marker byte that no text contains, so they never match text; a grammar can name one
/// (`<|like_this|>`). Ids without text and ids beyond the tokenizer's match nothing. The trie has no end token: each request says which
/// tokens end its answer.
pub(crate) fn index(tokenizer: &Tokenizer, rows: u32) -> TokEnv {
    let words: Vec<Vec<u8>> = (0..rows).map(|id| word(tokenizer, id)).collect();
    let trie = TokTrie::from(&TokRxInfo::new(rows, INVALID_TOKEN), &words);
    // Not canonical: any tokens may spell forced text, so that the model chooses among all of them.
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
