//! POST /tokenize and /detokenize, in the form of vLLM: the token ids of a prompt, and the text of token ids.

use baton_model_text::TemplateOptions;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::parse::parse;
use super::request::message;
use super::types::Message;
use crate::error::RequestError;
use crate::heavy::Line;
use crate::models::Models;
use crate::prompt::Prompt;

/// Most token ids that are turned into text at once.
const MAX_IDS: usize = 1 << 20;

#[derive(Deserialize, JsonSchema)]
pub(crate) struct TokenizeFields {
    model: Option<String>,
    prompt: Option<String>,
    messages: Option<Vec<Message>>,
    chat_template_kwargs: Option<TemplateOptions>,
    add_special_tokens: Option<bool>,
    return_token_strs: Option<bool>,
}

impl TokenizeFields {
    /// Reads the body of POST /tokenize.
    pub fn read(body: &[u8]) -> Result<TokenizeFields, RequestError> {
        parse(body)
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

/// The token ids of `prompt`, or of `messages` by the model's chat template. `salt`: whose tokens of texts seen before may be used. `line`: where
/// a long text waits.
pub(crate) async fn tokenize(
    fields: TokenizeFields,
    models: &Models,
    salt: &str,
    line: Option<&Line>,
) -> Result<Tokenized, RequestError> {
    let served = models.named(fields.model.as_deref().unwrap_or_default())?;
    let (model, max_model_len) = (&served.model, served.context_tokens());
    let prompt = match (fields.prompt, fields.messages) {
        (Some(text), None) => Prompt::Text(text),
        (None, Some(messages)) => {
            let messages = messages.into_iter().enumerate().map(|(at, m)| message(at, m)).collect::<Result<_, _>>()?;
            Prompt::Chat(messages, fields.chat_template_kwargs.unwrap_or_default())
        }
        _ => return Err(RequestError::invalid("prompt", "give either prompt or messages")),
    };
    let tokens = match prompt {
        Prompt::Text(text) if fields.add_special_tokens == Some(false) => model.encode_bare(text, line).await?,
        prompt => model.encode(prompt, None, salt, line).await?,
    };
    let texts = || tokens.iter().map(|id| model.token(*id).0).collect();
    let token_strs = fields.return_token_strs.unwrap_or(false).then(texts);
    Ok(Tokenized { count: tokens.len(), max_model_len, token_strs, tokens })
}

/// The text of token ids, special tokens included.
pub(crate) fn detokenize(body: &[u8], models: &Models) -> Result<Detokenized, RequestError> {
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
    let prompt = model.tokenizer().decode(&tokens, false);
    Ok(Detokenized { prompt: prompt.map_err(|e| RequestError::invalid("tokens", e.to_string()))? })
}
