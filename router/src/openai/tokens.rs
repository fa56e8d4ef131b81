//! POST /tokenize and /detokenize, in the form of vLLM: the token ids of a prompt, and the text of token ids.

use std::sync::Arc;

use baton_model_text::TemplateOptions;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::parse::parse;
use super::request::messages;
use super::types::Message;
use crate::body::{Bodies, Share};
use crate::error::RequestError;
use crate::heavy::Line;
use crate::http::MANY;
use crate::model::ServedModel;
use crate::models::Models;
use crate::prompt::Prompt;

/// Most token ids that are turned into text at once.
const MAX_IDS: usize = 1 << 20;
/// What a token id takes in an answer, and in its JSON.
const ID: usize = 16;
/// What a token's text takes besides its bytes.
const TEXT: usize = 64;
/// Tokens for whose texts memory is taken at a time.
const PORTION: usize = 1 << 10;

#[derive(Deserialize, JsonSchema)]
pub(super) struct TokenizeFields {
    model: Option<String>,
    prompt: Option<String>,
    messages: Option<Vec<Message>>,
    chat_template_kwargs: Option<TemplateOptions>,
    add_special_tokens: Option<bool>,
    return_token_strs: Option<bool>,
}

/// What POST /tokenize asks for.
pub(crate) struct TokenizeInput {
    model: String,
    pub prompt: Prompt,
    /// Without special tokens at the beginning and the end.
    bare: bool,
    texts: bool,
}

impl TokenizeInput {
    /// Reads the body.
    pub fn read(body: &[u8]) -> Result<TokenizeInput, RequestError> {
        let fields: TokenizeFields = parse(body)?;
        let prompt = match (fields.prompt, fields.messages) {
            (Some(text), None) => Prompt::Text(text),
            (None, Some(all)) => Prompt::Chat(messages(all)?, fields.chat_template_kwargs.unwrap_or_default()),
            _ => return Err(RequestError::invalid("prompt", "give either prompt or messages")),
        };
        let bare = fields.add_special_tokens == Some(false);
        let texts = fields.return_token_strs.unwrap_or(false);
        Ok(TokenizeInput { model: fields.model.unwrap_or_default(), prompt, bare, texts })
    }
}

/// The answer to POST /tokenize.
#[derive(Debug, PartialEq, Serialize, JsonSchema)]
pub(crate) struct Tokenized {
    pub count: usize,
    pub max_model_len: u32,
    pub tokens: Vec<u32>,
    pub token_strs: Option<Vec<String>>,
}

#[derive(Deserialize, JsonSchema)]
pub(super) struct DetokenizeFields {
    model: Option<String>,
    tokens: Vec<u32>,
}

/// The answer to POST /detokenize.
#[derive(Debug, PartialEq, Serialize, JsonSchema)]
pub(crate) struct Detokenized {
    pub prompt: String,
}

/// An answer that is still to be put together.
pub(crate) struct Unwritten {
    model: Arc<ServedModel>,
    tokens: Vec<u32>,
    what: What,
}

enum What {
    Tokens { max_model_len: u32, texts: bool },
    Prompt,
}

impl Unwritten {
    /// Whether putting it together takes long.
    pub fn is_large(&self) -> bool {
        self.tokens.len() >= MANY
    }

    /// Its JSON. Takes the memory for it first.
    pub fn write(self, memory: &Bodies, share: &mut Share) -> Result<Vec<u8>, RequestError> {
        let Unwritten { model, tokens, what } = self;
        let written = match what {
            What::Tokens { max_model_len, texts } => {
                memory.add(share, tokens.len() * ID)?;
                let token_strs = texts.then(|| token_strs(&model, &tokens, memory, share)).transpose()?;
                serde_json::to_vec(&Tokenized { count: tokens.len(), max_model_len, tokens, token_strs })
            }
            What::Prompt => {
                let wrong = |e: baton_model_text::ModelFileError| RequestError::invalid("tokens", e.to_string());
                let bytes =
                    |id: &u32| model.tokenizer().token_bytes(*id).map_or(0, |bytes| bytes.len() + json_bytes(bytes));
                memory.add(share, tokens.iter().map(bytes).sum())?;
                serde_json::to_vec(&Detokenized { prompt: model.tokenizer().decode(&tokens, false).map_err(wrong)? })
            }
        };
        // Cannot fail: numbers, texts, and lists of them.
        Ok(written.unwrap_or_default())
    }
}

/// The text of each token.
fn token_strs(
    model: &ServedModel,
    tokens: &[u32],
    memory: &Bodies,
    share: &mut Share,
) -> Result<Vec<String>, RequestError> {
    memory.add(share, tokens.len() * TEXT)?;
    let mut texts = Vec::with_capacity(tokens.len());
    for portion in tokens.chunks(PORTION) {
        let begin = texts.len();
        texts.extend(portion.iter().map(|id| model.token(*id).0));
        memory.add(share, texts[begin..].iter().map(|text| text.len() + json_bytes(text.as_bytes())).sum())?;
    }
    Ok(texts)
}

/// The bytes of a text in JSON, without its quotes.
fn json_bytes(text: &[u8]) -> usize {
    let bytes = |byte: &u8| match byte {
        b'"' | b'\\' => 2,
        ..0x20 => 6,
        _ => 1,
    };
    text.iter().map(bytes).sum()
}

/// The token ids of a prompt, or of messages by the model's chat template. `salt`: whose tokens of texts seen before may be used. `line`: where
/// a long text waits.
pub(crate) async fn tokenize(
    input: TokenizeInput,
    models: &Models,
    salt: &str,
    line: Option<&Line>,
) -> Result<Unwritten, RequestError> {
    let TokenizeInput { model, prompt, bare, texts } = input;
    let served = models.named(&model)?;
    let model = Arc::clone(&served.model);
    let tokens = match prompt {
        Prompt::Text(text) if bare => model.encode_bare(text, line).await?,
        prompt => model.encode(prompt, None, salt, line).await?,
    };
    Ok(Unwritten { model, tokens, what: What::Tokens { max_model_len: served.context_tokens(), texts } })
}

/// The text of token ids, special tokens included.
pub(crate) fn detokenize(body: &[u8], models: &Models) -> Result<Unwritten, RequestError> {
    let DetokenizeFields { model: name, tokens } = parse(body)?;
    let model = &models.named(name.as_deref().unwrap_or_default())?.model;
    if tokens.len() > MAX_IDS {
        let wrong = format!("tokens has {} ids; at most {MAX_IDS} are allowed", tokens.len());
        return Err(RequestError::invalid("tokens", wrong));
    }
    if let Some(at) = tokens.iter().position(|id| *id >= model.vocab_size()) {
        let wrong = format!("tokens[{at}] is {}; it must be below {}", tokens[at], model.vocab_size());
        return Err(RequestError::invalid(format!("tokens[{at}]"), wrong));
    }
    Ok(Unwritten { model: Arc::clone(model), tokens, what: What::Prompt })
}
