//! The tokenizer inside a GGUF file: byte-level BPE with merges (`gpt2`), or SentencePiece with scores (`llama`).

use std::collections::HashMap;
use std::sync::Arc;

use candle_core::quantized::gguf_file::Value;
use tokenizers::models::bpe::BPE;
use tokenizers::normalizers::{NormalizerWrapper, Prepend, Replace, Sequence};
use tokenizers::{AddedToken, TokenizerImpl};

use super::cuts::Cuts;
use super::pieces::{Alphabet, PieceKind, Pieces};
use super::sentencepiece::SentencePiece;
use super::{BosRule, END_TOKENS, Encoder, Inner, Tokenizer, end_tokens, pretokenizers};
use crate::ModelFileError;
use crate::gguf::Header;
use crate::keys::Keys;

const SPACE: &str = "\u{2581}";

/// Token types as the format numbers them; every other number is an ordinary token.
const UNKNOWN: i64 = 2;
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;

/// Builds the tokenizer; takes its long arrays out of the header.
pub(crate) fn from_gguf(header: &mut Header) -> Result<Tokenizer, ModelFileError> {
    let (ggml, metadata) = (header.keys.family("tokenizer.ggml"), &mut header.metadata);
    let model: String = ggml.need("model")?;
    let tokens = take_array(&ggml, metadata, "tokens", |v| string(v).map(str::to_owned))?
        .ok_or_else(|| ggml.error("tokens", "is missing"))?;
    let kinds = take_array(&ggml, metadata, "token_type", integer)?;
    let kinds = same_length(&ggml, "token_type", kinds, tokens.len(), 1)?;
    let ids: Ids = Ids::read(&ggml, &tokens, &kinds)?;
    let added = added_tokens(&tokens, &kinds);
    let (encoder, alphabet, defaults) = match model.as_str() {
        "gpt2" => byte_level(&ggml, metadata, &tokens, added)?,
        "llama" => sentence_piece(&ggml, metadata, &tokens, added)?,
        other => return Err(ggml.error("model", format!("is {other:?}; supported: gpt2, llama"))),
    };
    let mut pieces = Pieces::default();
    for (token, kind) in tokens.iter().zip(&kinds) {
        pieces.push(token, piece_kind(*kind), alphabet);
    }
    Ok(Tokenizer(Arc::new(Inner {
        cuts: Cuts::of(&encoder, &pieces),
        encoder,
        pieces,
        bos: ids.bos,
        eos: ids.eos,
        bos_rule: if ggml.or("add_bos_token", defaults.add_bos)? { BosRule::Here } else { BosRule::Never },
        add_eos: ggml.or("add_eos_token", false)?,
        space_prefix: defaults.space_prefix,
    })))
}

/// Values of keys that the file may leave out.
struct Defaults {
    add_bos: bool,
    space_prefix: bool,
}

struct Ids {
    bos: Option<u32>,
    eos: Vec<u32>,
}

impl Ids {
    fn read(ggml: &Keys, tokens: &[String], kinds: &[i64]) -> Result<Ids, ModelFileError> {
        let id = |key: &str| match ggml.opt::<u32>(key)? {
            Some(id) if id as usize >= tokens.len() => {
                Err(ggml.error(key, format!("is {id}, the vocabulary has {}", tokens.len())))
            }
            id => Ok(id),
        };
        let by_name = (0u32..)
            .zip(tokens.iter().zip(kinds))
            .filter_map(|(id, (token, kind))| (*kind == CONTROL && END_TOKENS.contains(&token.as_str())).then_some(id));
        let others = [id("eot_token_id")?, id("eom_token_id")?].into_iter().flatten().chain(by_name);
        Ok(Ids { bos: id("bos_token_id")?, eos: end_tokens(id("eos_token_id")?, others) })
    }
}

fn byte_level(
    ggml: &Keys,
    metadata: &mut HashMap<String, Value>,
    tokens: &[String],
    added: Vec<AddedToken>,
) -> Result<(Encoder, Alphabet, Defaults), ModelFileError> {
    let name: String = ggml.or("pre", "default".to_owned())?;
    let rule = pretokenizers::rule(&name)
        .ok_or_else(|| ggml.error("pre", format!("{name:?} is not supported; supported: {}", pretokenizers::NAMES)))?;
    // Neither half is empty, and a half may begin with a space.
    let halves = |v: &Value| {
        let merge = string(v)?;
        let space = merge.char_indices().skip(1).find(|(_, c)| *c == ' ')?.0;
        Some((merge[..space].to_owned(), merge[space + 1..].to_owned()))
    };
    let merges = take_array(ggml, metadata, "merges", halves)?.ok_or_else(|| ggml.error("merges", "is missing"))?;
    let vocab: HashMap<String, u32> = tokens.iter().cloned().zip(0u32..).collect();
    let vocab = vocab.into_iter().collect::<tokenizers::models::bpe::Vocab>();
    let fail = |e: tokenizers::Error| ggml.error("merges", e.to_string());
    let model =
        BPE::builder().vocab_and_merges(vocab, merges).ignore_merges(rule.ignore_merges).build().map_err(fail)?;
    let mut tokenizer = tokenizers::Tokenizer::new(model);
    tokenizer.with_pre_tokenizer(Some(rule.build().map_err(fail)?));
    tokenizer.add_tokens(added).map_err(fail)?;
    let defaults = Defaults { add_bos: rule.add_bos, space_prefix: false };
    Ok((Encoder::Standard(Box::new(tokenizer)), Alphabet::ByteLevel, defaults))
}

fn sentence_piece(
    ggml: &Keys,
    metadata: &mut HashMap<String, Value>,
    tokens: &[String],
    added: Vec<AddedToken>,
) -> Result<(Encoder, Alphabet, Defaults), ModelFileError> {
    let scores = take_array(ggml, metadata, "scores", float)?;
    let scores = same_length(ggml, "scores", scores, tokens.len(), 0.0)?;
    let space_prefix = ggml.or("add_space_prefix", true)?;
    let fail = |e: tokenizers::Error| ggml.error("tokens", e.to_string());
    let mut steps: Vec<NormalizerWrapper> = Vec::new();
    if space_prefix {
        steps.push(Prepend::new(SPACE.to_owned()).into());
    }
    steps.push(Replace::new(" ", SPACE).map_err(fail)?.into());
    let model = SentencePiece::new(tokens.to_vec(), scores, ggml.opt("unknown_token_id")?);
    let mut tokenizer = TokenizerImpl::new(model);
    tokenizer.with_normalizer(Some(Sequence::new(steps))).map_err(fail)?;
    tokenizer.add_tokens(added).map_err(fail)?;
    let defaults = Defaults { add_bos: true, space_prefix };
    Ok((Encoder::SentencePiece(Box::new(tokenizer)), Alphabet::SentencePiece, defaults))
}

/// Tokens recognised verbatim in a text, before anything else looks at it.
fn added_tokens(tokens: &[String], kinds: &[i64]) -> Vec<AddedToken> {
    let verbatim = tokens
        .iter()
        .zip(kinds)
        .filter(|(token, kind)| !token.is_empty() && matches!(**kind, UNKNOWN | CONTROL | USER_DEFINED));
    verbatim.map(|(token, kind)| AddedToken::from(token.clone(), *kind != USER_DEFINED).normalized(false)).collect()
}

fn piece_kind(kind: i64) -> PieceKind {
    match kind {
        UNKNOWN | CONTROL => PieceKind::Special,
        USER_DEFINED => PieceKind::Verbatim,
        _ => PieceKind::Ordinary,
    }
}

// Matched by hand: for a value of another type, candle's own conversions build an error with a backtrace.
fn integer(value: &Value) -> Option<i64> {
    match value {
        Value::U8(v) => Some(i64::from(*v)),
        Value::I8(v) => Some(i64::from(*v)),
        Value::U16(v) => Some(i64::from(*v)),
        Value::I16(v) => Some(i64::from(*v)),
        Value::U32(v) => Some(i64::from(*v)),
        Value::I32(v) => Some(i64::from(*v)),
        Value::I64(v) => Some(*v),
        _ => None,
    }
}

fn float(value: &Value) -> Option<f32> {
    match value {
        Value::F32(v) => Some(*v),
        Value::F64(v) => Some(*v as f32),
        _ => None,
    }
}

fn string(value: &Value) -> Option<&str> {
    match value {
        Value::String(v) => Some(v),
        _ => None,
    }
}

/// Takes an array out of the metadata; None if it is not there.
fn take_array<T>(
    ggml: &Keys,
    metadata: &mut HashMap<String, Value>,
    key: &str,
    convert: impl Fn(&Value) -> Option<T>,
) -> Result<Option<Vec<T>>, ModelFileError> {
    let Some(value) = metadata.remove(&format!("tokenizer.ggml.{key}")) else { return Ok(None) };
    let Value::Array(items) = value else { return Err(ggml.error(key, "is not an array")) };
    let convert_item = |(index, item): (usize, &Value)| {
        convert(item).ok_or_else(|| ggml.error(key, format!("entry {index} cannot be read: {item:?}")))
    };
    items.iter().enumerate().map(convert_item).collect::<Result<_, _>>().map(Some)
}

fn same_length<T: Clone>(
    ggml: &Keys,
    key: &str,
    array: Option<Vec<T>>,
    length: usize,
    default: T,
) -> Result<Vec<T>, ModelFileError> {
    match array {
        None => Ok(vec![default; length]),
        Some(array) if array.len() == length => Ok(array),
        Some(array) => Err(ggml.error(key, format!("has {} entries for {length} tokens", array.len()))),
    }
}
