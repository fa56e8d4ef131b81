//! Text to token ids and back. A tokenizer comes from `tokenizer.json`, from the metadata of a GGUF file, or from no file at all; its
//! use is the same.
//!
//! Special tokens written in a text are recognised, so a chat template can write them. Detokenising does not use the encoder; it reads
//! one table of bytes.

pub(crate) mod bytes;
mod cache;
mod cuts;
mod gguf;
mod hf;
mod pieces;
mod pretokenizers;
mod sentencepiece;
mod stream;

use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use tokenizers::{DecoderWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper, TokenizerImpl};

use crate::ModelFileError;
use cuts::Cuts;
use pieces::Pieces;
use sentencepiece::SentencePiece;

pub use cache::{Lookup, TokenCache};
pub use stream::TextStream;

pub(crate) use gguf::from_gguf;
pub(crate) use hf::from_directory;

/// A model's tokenizer. Cheap to clone.
#[derive(Clone)]
pub struct Tokenizer(Arc<Inner>);

struct Inner {
    encoder: Encoder,
    /// How texts may be cut to be tokenised in chunks, if they may.
    cuts: Option<Cuts>,
    pieces: Pieces,
    bos: Option<u32>,
    eos: Vec<u32>,
    bos_rule: BosRule,
    add_eos: bool,
    /// The encoder puts a space before a text; decoding removes it.
    space_prefix: bool,
}

/// Who puts bos before a text.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum BosRule {
    /// Nobody.
    Never,
    /// This module.
    Here,
    /// The encoder's own post-processing, if it has any.
    Encoder,
}

type SentencePieceTokenizer =
    TokenizerImpl<SentencePiece, NormalizerWrapper, PreTokenizerWrapper, PostProcessorWrapper, DecoderWrapper>;

enum Encoder {
    Standard(Box<tokenizers::Tokenizer>),
    SentencePiece(Box<SentencePieceTokenizer>),
    Bytes,
}

impl Encoder {
    fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, ModelFileError> {
        let encoding = match self {
            Encoder::Standard(tokenizer) => tokenizer.encode_fast(text, add_special),
            Encoder::SentencePiece(tokenizer) => tokenizer.encode_fast(text, add_special),
            Encoder::Bytes => return Ok(bytes::encode(text)),
        };
        encoding.map(|e| e.get_ids().to_vec()).map_err(|e| ModelFileError::Encode(e.to_string()))
    }
}

/// Tokens that end an answer in some family, whatever end token the file names: chat models end a turn with one token and a document
/// with another.
const END_TOKENS: [&str; 8] =
    ["<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "<end_of_turn>", "<EOT>"];

impl Tokenizer {
    /// Token ids of a text; special tokens written in it are recognised. `add_special` adds what the model wants around a
    /// text, usually bos before it.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, ModelFileError> {
        Ok(self.with_special(self.encode_chunk(text, add_special)?, add_special))
    }

    /// Token ids of a rendered chat: bos is added if the model wants it and the template has not written it.
    pub fn encode_chat(&self, text: &str) -> Result<Vec<u32>, ModelFileError> {
        self.encode(text, self.adds_to_chat(text))
    }

    /// Whether special tokens are to be added around a rendered chat: its template has not written bos.
    pub fn adds_to_chat(&self, text: &str) -> bool {
        let bos = self.0.bos.and_then(|bos| self.0.pieces.get(bos));
        !bos.is_some_and(|bos| text.as_bytes().starts_with(bos))
    }

    /// Token ids of a chunk, with what the encoder adds if `add_special`; the rest is added by `with_special`.
    fn encode_chunk(&self, chunk: &str, add_special: bool) -> Result<Vec<u32>, ModelFileError> {
        self.0.encoder.encode(chunk, add_special && self.0.bos_rule == BosRule::Encoder)
    }

    /// Adds what the encoder does not add around a text.
    fn with_special(&self, mut ids: Vec<u32>, add_special: bool) -> Vec<u32> {
        if add_special {
            let inner = &*self.0;
            ids.splice(0..0, inner.bos.filter(|_| inner.bos_rule == BosRule::Here));
            ids.extend(inner.eos.first().filter(|_| inner.add_eos));
        }
        ids
    }

    /// Where the chunks of a text are that can be tokenised one by one; one chunk if it cannot be cut.
    fn chunks(&self, text: &str) -> Vec<Range<usize>> {
        match &self.0.cuts {
            Some(cuts) => cuts.chunks(text).collect(),
            None => std::iter::once(0..text.len()).collect(),
        }
    }

    /// Whether beginnings of texts can be kept in a [`TokenCache`].
    pub fn has_chunks(&self) -> bool {
        self.0.cuts.is_some()
    }

    /// The text of a whole sequence, the inverse of `encode`; bytes that are not valid UTF-8 become U+FFFD.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, ModelFileError> {
        let mut stream = self.stream(skip_special);
        let mut text = String::new();
        for &id in ids {
            self.token_bytes(id)?;
            text.push_str(&stream.push(id));
        }
        text.push_str(&stream.finish());
        if self.0.space_prefix && text.starts_with(' ') {
            text.remove(0);
        }
        Ok(text)
    }

    /// The bytes a token stands for, which may be part of a character.
    pub fn token_bytes(&self, id: u32) -> Result<&[u8], ModelFileError> {
        let vocab_size = self.vocab_size();
        self.0.pieces.get(id).ok_or(ModelFileError::TokenId { id, vocab_size })
    }

    /// Whether the token is a control token, not ordinary text.
    pub fn is_special(&self, id: u32) -> bool {
        self.0.pieces.is_special(id)
    }

    /// Id of the special token with this text.
    pub fn special_id(&self, text: &str) -> Option<u32> {
        let pieces = &self.0.pieces;
        (0..pieces.len() as u32).find(|&id| pieces.is_special(id) && pieces.get(id) == Some(text.as_bytes()))
    }

    /// The token as text, incomplete characters as U+FFFD.
    pub fn token_text(&self, id: u32) -> Result<String, ModelFileError> {
        self.token_bytes(id).map(|bytes| String::from_utf8_lossy(bytes).into_owned())
    }

    /// Tokens that end an answer: the model's own end token first, then the others in ascending order.
    pub fn eos_ids(&self) -> &[u32] {
        &self.0.eos
    }

    /// The token that begins a text.
    pub fn bos_id(&self) -> Option<u32> {
        self.0.bos
    }

    /// Number of token ids, from 0. The model's embedding may have more rows.
    pub fn vocab_size(&self) -> usize {
        self.0.pieces.len()
    }

    /// Starts detokenising a stream of generated tokens. A space at the very beginning is kept: the answer follows a prompt.
    pub fn stream(&self, skip_special: bool) -> TextStream {
        TextStream::new(self.clone(), skip_special)
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer").field("vocab_size", &self.vocab_size()).field("eos", &self.0.eos).finish()
    }
}

/// The list of end tokens: `main`, then the rest in ascending order, none twice.
fn end_tokens(main: Option<u32>, others: impl IntoIterator<Item = u32>) -> Vec<u32> {
    let rest: BTreeSet<u32> = others.into_iter().filter(|id| Some(*id) != main).collect();
    main.into_iter().chain(rest).collect()
}
