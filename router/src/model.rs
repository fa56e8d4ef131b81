//! The model as the router knows it: a name, a tokenizer, a chat template, and two sizes. Never its weights.

use std::sync::Arc;

use baton_model_files::{ChatMessage, ChatTemplate, Model, TextStream, Tokenizer};

use crate::error::RequestError;
use crate::input::Prompt;

/// Text longer than this is tokenised on a thread of its own, so that it delays nobody else's stream.
const INLINE_BYTES: usize = 8 << 10;

/// The one model a router serves.
#[derive(Debug)]
pub struct ServedModel {
    model: Model,
    id: String,
}

impl ServedModel {
    /// Serves an open model; clients ask for it by `id`, or by the name in its files.
    pub fn new(model: Model, id: impl Into<String>) -> ServedModel {
        ServedModel { model, id: id.into() }
    }

    /// The name in the model's files, by which workers register.
    pub fn name(&self) -> &str {
        self.model.name()
    }

    /// The name clients ask for.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Longest sequence by the model's files, tokens; workers may be set to less.
    pub fn context_tokens(&self) -> u32 {
        self.model.config().context_length
    }

    /// Token ids are below this.
    pub fn vocab_size(&self) -> u32 {
        self.model.config().vocab_size
    }

    /// Differs when the model's weights or configuration do.
    pub fn fingerprint(&self) -> u64 {
        self.model.fingerprint()
    }

    pub(crate) fn tokenizer(&self) -> &Tokenizer {
        self.model.tokenizer()
    }

    pub(crate) fn eos_ids(&self) -> &[u32] {
        self.tokenizer().eos_ids()
    }

    /// A detokeniser for one answer; special tokens have no text.
    pub(crate) fn text_stream(&self) -> TextStream {
        self.tokenizer().stream(true)
    }

    /// A token as text and as the bytes it stands for. Unknown ids have neither.
    pub(crate) fn token(&self, id: u32) -> (String, Vec<u8>) {
        let tokenizer = self.tokenizer();
        let bytes = tokenizer.token_bytes(id).map(Vec::from).unwrap_or_default();
        (tokenizer.token_text(id).unwrap_or_default(), bytes)
    }

    /// Ok when this is the model asked for; an empty name asks for the one there is.
    pub(crate) fn check_name(&self, name: &str) -> Result<(), RequestError> {
        if name.is_empty() || name == self.id || name == self.name() {
            return Ok(());
        }
        let wrong = format!("the model {name:?} does not exist; this router serves {:?}", self.id);
        let error = RequestError::new(baton_types::ErrorKind::NotFound, wrong).code("model_not_found");
        Err(RequestError { param: Some("model".into()), ..error })
    }

    /// Token ids of a prompt.
    pub(crate) async fn encode(self: &Arc<Self>, prompt: Prompt) -> Result<Vec<u32>, RequestError> {
        let bytes = match &prompt {
            Prompt::Ids(_) => 0,
            Prompt::Text(text) => text.len(),
            Prompt::Chat(messages) => messages.iter().map(|m| m.role.len() + m.content.len()).sum(),
        };
        if bytes <= INLINE_BYTES {
            return self.encode_now(prompt);
        }
        let this = Arc::clone(self);
        tokio::task::spawn_blocking(move || this.encode_now(prompt)).await.unwrap_or_else(|e| {
            Err(RequestError::new(baton_types::ErrorKind::Internal, format!("tokenising the prompt failed: {e}")))
        })
    }

    fn encode_now(&self, prompt: Prompt) -> Result<Vec<u32>, RequestError> {
        let field = prompt.field();
        let refused = |e: baton_model_files::ModelFileError| RequestError::invalid(field, e.to_string());
        match prompt {
            Prompt::Ids(ids) => Ok(ids),
            Prompt::Text(text) => self.tokenizer().encode(&text, true).map_err(refused),
            Prompt::Chat(messages) => {
                let text = self.template()?.render(&messages, true).map_err(refused)?;
                self.tokenizer().encode_chat(&text).map_err(refused)
            }
        }
    }

    fn template(&self) -> Result<&ChatTemplate, RequestError> {
        self.model.chat_template().ok_or_else(|| {
            let wrong = format!("the model {:?} has no chat template; use /v1/completions", self.id);
            RequestError::invalid("messages", wrong).code("no_chat_template")
        })
    }
}

/// One message of a conversation, for tests and the front doors.
pub(crate) fn message(role: impl Into<String>, content: impl Into<String>) -> ChatMessage {
    ChatMessage { role: role.into(), content: content.into() }
}
