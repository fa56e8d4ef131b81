//! The tokenizer of a Hugging Face directory: `tokenizer.json`, and the begin and end tokens that other files name.

use std::path::Path;
use std::sync::Arc;

use serde::Deserialize;
use tokenizers::models::ModelWrapper;

use super::cuts::Cuts;
use super::pieces::{Alphabet, PieceKind, Pieces};
use super::{BosRule, END_TOKENS, Encoder, Inner, Tokenizer, end_tokens};
use crate::ModelFileError;
use crate::keys::Keys;

/// Most token ids a tokenizer may have, so that a stray huge id cannot cause a huge allocation.
const MAX_VOCAB: usize = 1 << 24;

/// One id or several.
#[derive(Deserialize)]
#[serde(untagged)]
enum EndIds {
    One(u32),
    Many(Vec<u32>),
}

/// A special token as `tokenizer_config.json` writes it.
#[derive(Deserialize)]
#[serde(untagged)]
pub(crate) enum SpecialToken {
    Text(String),
    Object { content: String },
}

impl SpecialToken {
    pub fn into_text(self) -> String {
        match self {
            SpecialToken::Text(text) | SpecialToken::Object { content: text } => text,
        }
    }
}

/// Builds the tokenizer of a directory. `settings` is its `tokenizer_config.json`, if it has one.
pub(crate) fn from_directory(dir: &Path, settings: Option<&Keys>) -> Result<Tokenizer, ModelFileError> {
    let path = dir.join("tokenizer.json");
    let json = std::fs::read(&path).map_err(ModelFileError::io(&path))?;
    let fail = |e: tokenizers::Error| ModelFileError::malformed(&path, "tokenizer.json", e.to_string());
    let mut tokenizer = tokenizers::Tokenizer::from_bytes(&json).map_err(fail)?;
    // Settings of a training that files carry along: a prompt is never cut or filled up.
    tokenizer.with_padding(None).with_truncation(None).map_err(fail)?;
    if !matches!(tokenizer.get_model(), ModelWrapper::BPE(_)) {
        return Err(ModelFileError::config(&path, "model.type", "only BPE is supported"));
    }
    let decoder = serde_json::to_string(&tokenizer.get_decoder())
        .map_err(|e| ModelFileError::malformed(&path, "tokenizer.json", e))?;
    let byte_level = decoder.contains("\"ByteLevel\"");
    let pieces = pieces(&path, &tokenizer, if byte_level { Alphabet::ByteLevel } else { Alphabet::SentencePiece })?;
    let named = |key: &str| -> Result<Option<u32>, ModelFileError> {
        let Some(settings) = settings else { return Ok(None) };
        Ok(settings.opt::<SpecialToken>(key)?.and_then(|token| tokenizer.token_to_id(&token.into_text())))
    };
    let (bos, named_eos) = (named("bos_token")?, named("eos_token")?);
    let eos = collect_eos(dir, &tokenizer, named_eos)?;
    let encoder = Encoder::Standard(Box::new(tokenizer));
    let add_bos = settings.map(|s| s.opt("add_bos_token")).transpose()?.flatten();
    let bos_rule = match add_bos {
        Some(false) => BosRule::Never,
        Some(true) if encoder.encode("", true)?.first().copied() != bos => BosRule::Here,
        _ => BosRule::Encoder,
    };
    Ok(Tokenizer(Arc::new(Inner {
        cuts: Cuts::of(&encoder, &pieces),
        pieces,
        bos,
        eos,
        bos_rule,
        add_eos: false,
        space_prefix: !byte_level && (decoder.contains("\"Strip\"") || decoder.contains("\"Metaspace\"")),
        encoder,
    })))
}

fn collect_eos(dir: &Path, tokenizer: &tokenizers::Tokenizer, named: Option<u32>) -> Result<Vec<u32>, ModelFileError> {
    let mut ids: Vec<u32> = named.into_iter().collect();
    for file in ["generation_config.json", "config.json"] {
        let path = dir.join(file);
        if path.exists() {
            match Keys::read_json(&path)?.opt::<EndIds>("eos_token_id")? {
                Some(EndIds::One(id)) => ids.push(id),
                Some(EndIds::Many(many)) => ids.extend(many),
                None => {}
            }
        }
    }
    let added = tokenizer.get_added_tokens_decoder();
    let by_name = added.iter().filter(|(_, token)| token.special && END_TOKENS.contains(&token.content.as_str()));
    let by_name: Vec<u32> = by_name.map(|(id, _)| *id).collect();
    Ok(end_tokens(ids.first().copied(), ids.iter().copied().chain(by_name)))
}

fn pieces(path: &Path, tokenizer: &tokenizers::Tokenizer, alphabet: Alphabet) -> Result<Pieces, ModelFileError> {
    let vocab = tokenizer.get_vocab(true);
    let size = vocab.values().max().map_or(0, |&id| id as usize + 1);
    if size == 0 || size > MAX_VOCAB {
        let problem = format!("has ids up to {size}; it must be between 1 and {MAX_VOCAB}");
        return Err(ModelFileError::config(path, "model.vocab", problem));
    }
    let mut texts: Vec<&str> = vec![""; size];
    for (text, id) in &vocab {
        texts[*id as usize] = text;
    }
    let added = tokenizer.get_added_tokens_decoder();
    let mut pieces = Pieces::default();
    for (id, text) in (0u32..).zip(texts) {
        let kind = match added.get(&id) {
            Some(token) if token.special => PieceKind::Special,
            Some(_) => PieceKind::Verbatim,
            None => PieceKind::Ordinary,
        };
        pieces.push(text, kind, alphabet);
    }
    Ok(pieces)
}
