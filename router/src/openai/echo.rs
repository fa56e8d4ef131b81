//! Prompts that are sent before their answers.

use std::sync::Arc;

use baton_types::TokenOut;

use super::answer::Part;
use crate::model::ServedModel;
use crate::sink::Piece;

/// One prompt as its answers repeat it.
#[derive(Clone, Debug)]
pub(crate) struct Echo {
    ids: Arc<[u32]>,
    text: String,
    /// Characters of `text` before each token, and all of them.
    offsets: Vec<u32>,
    chars: u32,
}

impl Echo {
    /// About the bytes of the echoes of these prompts, before they are made.
    pub fn weights(model: &ServedModel, prompts: &[Arc<[u32]>]) -> usize {
        let text = |id: &u32| model.tokenizer().token_bytes(*id).map_or(0, <[u8]>::len);
        prompts.iter().flat_map(|ids| &ids[..]).map(|id| size_of::<u32>() + text(id)).sum()
    }

    /// About its bytes.
    pub fn weight(&self) -> usize {
        self.text.len() + size_of_val(&self.offsets[..])
    }

    /// Those of its text.
    pub fn text_bytes(&self) -> usize {
        self.text.len()
    }

    pub fn new(model: &ServedModel, ids: &Arc<[u32]>) -> Echo {
        let mut stream = model.text_stream(false);
        let (mut text, mut offsets, mut chars) = (String::new(), Vec::with_capacity(ids.len()), 0);
        for &id in &ids[..] {
            offsets.push(chars);
            let piece = stream.push(id);
            chars += piece.chars().count() as u32;
            text += &piece;
        }
        text += &stream.finish();
        Echo { ids: Arc::clone(ids), chars: text.chars().count() as u32, text, offsets }
    }

    /// What comes before anything else of an answer. With log probabilities that is also the first token, which has none.
    pub fn opening(&self, choice: u32, logprobs: bool) -> Part {
        let first = self.ids.first().filter(|_| logprobs);
        let scored = first.map(|&id| Piece { token: TokenOut { id, ..TokenOut::default() }, offset: 0 });
        Part { choice, text: self.text.as_str().into(), scored: scored.into_iter().collect(), ..Part::default() }
    }

    /// A token of the prompt and its place in the text.
    pub fn piece(&self, token: TokenOut) -> Piece {
        let offset = self.offsets.get(token.index as usize).copied().unwrap_or_default();
        Piece { token, offset }
    }

    /// The same token of the answer, with the prompt before it.
    pub fn after(&self, piece: Piece) -> Piece {
        Piece { offset: piece.offset + self.chars, ..piece }
    }
}
