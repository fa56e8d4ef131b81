//! The model as the router knows it: a name, a tokenizer, a chat template, and two sizes. Never its weights.

use std::sync::Arc;

use baton_grammar::Grammars;
use baton_model_text::{ChatTemplate, TextModel, TextStream, Tokenizer, ToolSyntax};
use baton_types::Constraint;

use crate::error::RequestError;
use crate::prompt::{Prompt, Wanted};
use crate::tools::{Choice, ToolParser, Tools, grammar, plain};

/// Text longer than this is tokenised on a thread of its own, so that it delays nobody else's stream.
const INLINE_BYTES: usize = 8 << 10;

/// The one model a router serves.
#[derive(Debug)]
pub struct ServedModel {
    model: TextModel,
    id: String,
    grammars: Arc<Grammars>,
    /// The special token that announces calls, where the model has one.
    call_marker: Option<u32>,
}

impl ServedModel {
    /// Serves an open model; clients ask for it by `id`, or by the name in its files.
    pub fn new(model: TextModel, id: impl Into<String>) -> ServedModel {
        let grammars = Arc::new(Grammars::new(model.tokenizer(), model.vocab_size()));
        let syntax = model.chat_template().and_then(ChatTemplate::tools);
        let call_marker = syntax.and_then(|syntax| model.tokenizer().special_id(syntax.marker()));
        ServedModel { model, id: id.into(), grammars, call_marker }
    }

    /// The name in the model's files, by which workers register.
    pub fn name(&self) -> &str {
        self.model.name()
    }

    /// The name clients ask for.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Longest sequence by the model's files, tokens; workers may be set to another.
    pub fn context_tokens(&self) -> u32 {
        self.model.context_length()
    }

    /// Token ids are below this.
    pub fn vocab_size(&self) -> u32 {
        self.model.vocab_size()
    }

    pub(crate) fn tokenizer(&self) -> &Tokenizer {
        self.model.tokenizer()
    }

    pub(crate) fn eos_ids(&self) -> &[u32] {
        self.tokenizer().eos_ids()
    }

    /// A detokeniser for one answer; special tokens have no text, but for the one that announces calls where it may have some.
    pub(crate) fn text_stream(&self, calls: bool) -> TextStream {
        self.tokenizer().stream(true).keeping(self.call_marker.filter(|_| calls))
    }

    /// Ok when the model can be told of these tools, or made to call them.
    pub(crate) fn check_tools(&self, tools: &Tools) -> Result<(), RequestError> {
        if tools.choice != Choice::Auto || self.template()?.tools().is_some() {
            return Ok(());
        }
        let wrong = format!(
            "the chat template of {:?} knows no tools (in the form of Hermes and Qwen, Llama 3 or Mistral); leave tools out, or \
             make the model call with tool_choice: required, or a function",
            self.id
        );
        Err(RequestError::invalid("tools", wrong).code("unsupported_parameter"))
    }

    /// Reads calls out of an answer.
    pub(crate) fn tool_parser(&self, tools: &Tools) -> ToolParser {
        tools.parser(self.tool_syntax())
    }

    /// A model whose template knows none is told one in words.
    fn tool_syntax(&self) -> ToolSyntax {
        self.model.chat_template().and_then(ChatTemplate::tools).unwrap_or(ToolSyntax::Hermes)
    }

    /// The constraint of answers that must call.
    pub(crate) fn forced_calls(&self, tools: &Tools) -> Option<Wanted> {
        let forced = tools.choice != Choice::Auto;
        forced
            .then(|| Wanted { field: "tools", constraint: grammar(tools, self.tool_syntax(), self.call_marker).into() })
    }

    /// Ok when the constraint means something. Compiles it, on a thread of its own.
    pub(crate) async fn check_constraint(&self, wanted: &Wanted) -> Result<(), RequestError> {
        let Wanted { field, constraint } = wanted.clone();
        let (bytes, most) = (constraint.text().len(), Constraint::MAX_BYTES);
        if bytes > most {
            return Err(RequestError::invalid(field, format!("{field} has {bytes} bytes; at most {most} are allowed")));
        }
        let grammars = Arc::clone(&self.grammars);
        let checked = tokio::task::spawn_blocking(move || grammars.prepare(&constraint)).await;
        let failed = |e: &dyn std::fmt::Display| {
            RequestError::new(baton_types::ErrorKind::Internal, format!("compiling {field} failed: {e}"))
        };
        checked.map_err(|e| failed(&e))?.map(drop).map_err(|e| match e {
            baton_grammar::GrammarError::Vocabulary(_) => failed(&e),
            refused => RequestError::invalid(field, format!("{field}: {refused}")),
        })
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
    pub(crate) async fn encode(
        self: &Arc<Self>,
        prompt: Prompt,
        tools: Option<&Tools>,
    ) -> Result<Vec<u32>, RequestError> {
        let bytes = match &prompt {
            Prompt::Ids(_) => 0,
            Prompt::Text(text) => text.len(),
            Prompt::Chat(messages) => messages.iter().map(|m| m.role.len() + m.content.len()).sum(),
        };
        if bytes <= INLINE_BYTES && tools.is_none() {
            return self.encode_now(prompt, None);
        }
        let (this, tools) = (Arc::clone(self), tools.cloned());
        tokio::task::spawn_blocking(move || this.encode_now(prompt, tools.as_ref())).await.unwrap_or_else(|e| {
            Err(RequestError::new(baton_types::ErrorKind::Internal, format!("tokenising the prompt failed: {e}")))
        })
    }

    fn encode_now(&self, prompt: Prompt, tools: Option<&Tools>) -> Result<Vec<u32>, RequestError> {
        let field = prompt.field();
        let refused = |e: baton_model_text::ModelFileError| RequestError::invalid(field, e.to_string());
        match prompt {
            Prompt::Ids(ids) => Ok(ids),
            Prompt::Text(text) => self.tokenizer().encode(&text, true).map_err(refused),
            Prompt::Chat(messages) => {
                let template = self.template()?;
                let text = match template.tools() {
                    Some(_) => template.render(&messages, tools.map(|tools| &tools.specs[..]), true),
                    None => template.render(&plain(messages, tools), None, true),
                };
                let text = text.map_err(refused)?;
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
