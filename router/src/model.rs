//! The model as the router knows it: name, tokenizer, chat template, context length and vocabulary size. Never its weights.

use std::sync::Arc;

use baton_grammar::Grammars;
use baton_model_text::{
    ChatTemplate, Lookup, ModelConfig, THOUGHTS, TextModel, TextStream, TokenCache, Tokenizer, ToolSyntax,
};
use baton_runtime::{Bytes, metrics as names};
use baton_types::{Constraint, ErrorKind, SamplingParams};
use metrics::counter;

use crate::error::RequestError;
use crate::heavy::{self, Line};
use crate::prompt::{Prompt, Wanted};
use crate::reasoning::Reasoning;
use crate::tools::{Choice, ToolParser, Tools, grammar, plain};

/// Most text, in bytes, that is tokenised inline. More goes to a blocking thread, so that it delays no stream.
const INLINE_BYTES: usize = 4 << 10;
/// Longest text, in bytes, that is rendered from messages, or looked up among texts seen before, inline.
const INLINE_TEXT: usize = 32 << 10;
/// Tokens of a prompt that people may see, if they may.
const SHOWN: usize = 256;
/// Tokens at the end of a prompt that are looked at for the beginning of thoughts.
const TAIL: usize = 8;
/// Memory for tokens of texts seen before, unless it is set.
pub(crate) const TOKEN_CACHE: Bytes = Bytes(64 << 20);

/// A model that a router serves.
#[derive(Debug)]
pub struct ServedModel {
    model: TextModel,
    /// The names by which clients ask for it, at least one; the first is the one that answers carry.
    names: Vec<String>,
    grammars: Arc<Grammars>,
    seen: TokenCache,
    /// How to sample where a request does not say.
    defaults: SamplingParams,
    /// Id of the special token that announces calls, if the model has one.
    call_marker: Option<u32>,
}

impl ServedModel {
    /// Serves an opened model. Clients ask for it by `id`, or by the name in its files.
    pub fn new(model: TextModel, id: impl Into<String>) -> ServedModel {
        let grammars = Arc::new(Grammars::new(model.tokenizer(), model.vocab_size()));
        let syntax = model.chat_template().and_then(ChatTemplate::tools);
        let call_marker = syntax.and_then(|syntax| model.tokenizer().special_id(syntax.marker()));
        let seen = TokenCache::new(TOKEN_CACHE.0);
        let defaults = model.sampling().over(SamplingParams::default());
        ServedModel { model, names: vec![id.into()], grammars, seen, defaults, call_marker }
    }

    /// The same model, for which clients can also ask by these names.
    pub fn with_aliases(mut self, aliases: impl IntoIterator<Item = String>) -> ServedModel {
        self.names.extend(aliases);
        self
    }

    /// The same model, with this much memory for tokens of texts seen before.
    pub fn with_token_cache(self, memory: Bytes) -> ServedModel {
        ServedModel { seen: TokenCache::new(memory.0), ..self }
    }

    /// The same model, sampled as OpenAI's API does where a request does not say: temperature 1, and all tokens.
    pub fn with_api_defaults(self) -> ServedModel {
        ServedModel { defaults: SamplingParams::default(), ..self }
    }

    /// How to sample where a request does not say.
    pub(crate) fn defaults(&self) -> &SamplingParams {
        &self.defaults
    }

    /// Its configuration, if the decoder can run it.
    pub(crate) fn config(&self) -> Option<&ModelConfig> {
        self.model.config()
    }

    /// The name in the model's files. Workers register with it.
    pub fn name(&self) -> &str {
        self.model.name()
    }

    /// The name that its answers carry.
    pub fn id(&self) -> &str {
        self.names.first().map_or_else(|| self.name(), String::as_str)
    }

    /// The names by which clients ask for the model.
    pub fn ids(&self) -> &[String] {
        &self.names
    }

    /// All names that mean the model: those for clients, and the one in its files.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        let own = Some(self.name()).filter(|name| !self.names.iter().any(|known| known == name));
        self.names.iter().map(String::as_str).chain(own)
    }

    /// Longest sequence according to the model's files, tokens. Workers may be set to another length.
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

    /// The beginning of a prompt, for people.
    pub(crate) fn beginning(&self, prompt: &[u32]) -> String {
        let tokens = &prompt[..prompt.len().min(SHOWN)];
        self.tokenizer().decode(tokens, false).unwrap_or_default()
    }

    /// A detokeniser for one answer. Special tokens have no text, except the call marker when `calls` is true.
    pub(crate) fn text_stream(&self, calls: bool) -> TextStream {
        self.tokenizer().stream(true).keeping(self.call_marker.filter(|_| calls))
    }

    /// Ok when the chat template can describe these tools, or when a call is forced.
    pub(crate) fn check_tools(&self, tools: &Tools) -> Result<(), RequestError> {
        if tools.choice != Choice::Auto || self.template()?.tools().is_some() {
            return Ok(());
        }
        let wrong = format!(
            "the chat template of {:?} knows no tools (in the form of Hermes and Qwen, Llama 3 or Mistral); leave tools out, or \
             make the model call with tool_choice: required, or a function",
            self.id()
        );
        Err(RequestError::invalid("tools", wrong).code("unsupported_parameter"))
    }

    /// A parser that reads calls out of an answer.
    pub(crate) fn tool_parser(&self, tools: &Tools) -> ToolParser {
        tools.parser(self.tool_syntax())
    }

    /// Splits thoughts from the answer to this prompt; None if the model does not think.
    pub(crate) fn reasoning(&self, prompt: &[u32]) -> Option<Reasoning> {
        self.model.chat_template().filter(|template| template.thinks())?;
        let tail = &prompt[prompt.len().saturating_sub(TAIL)..];
        let text = self.tokenizer().decode(tail, false).unwrap_or_default();
        Some(Reasoning::new(text.trim_end().ends_with(THOUGHTS.0)))
    }

    /// How the model writes calls. A model whose template knows no tools is told to use the Hermes syntax.
    fn tool_syntax(&self) -> ToolSyntax {
        self.model.chat_template().and_then(ChatTemplate::tools).unwrap_or(ToolSyntax::Hermes)
    }

    /// The constraint for answers that must call a tool; None when a call is optional.
    pub(crate) fn forced_calls(&self, tools: &Tools) -> Option<Wanted> {
        let forced = tools.choice != Choice::Auto;
        forced
            .then(|| Wanted { field: "tools", constraint: grammar(tools, self.tool_syntax(), self.call_marker).into() })
    }

    /// Ok when the constraint is valid. Compiles it on a blocking thread.
    pub(crate) async fn check_constraint(&self, wanted: &Wanted, line: Option<&Line>) -> Result<(), RequestError> {
        let Wanted { field, constraint } = wanted.clone();
        let (bytes, most) = (constraint.text().len(), Constraint::MAX_BYTES);
        if bytes > most {
            return Err(RequestError::invalid(field, format!("{field} has {bytes} bytes; at most {most} are allowed")));
        }
        let grammars = Arc::clone(&self.grammars);
        let compile = move || {
            grammars.prepare(&constraint).map(drop).map_err(|e| match e {
                baton_grammar::GrammarError::Vocabulary(_) => {
                    RequestError::new(ErrorKind::Internal, format!("compiling {field} failed: {e}"))
                }
                refused => RequestError::invalid(field, format!("{field}: {refused}")),
            })
        };
        heavy::run(line, compile).await
    }

    /// A token's text and bytes. Both are empty for unknown ids.
    pub(crate) fn token(&self, id: u32) -> (String, Vec<u8>) {
        let tokenizer = self.tokenizer();
        let bytes = tokenizer.token_bytes(id).map(Vec::from).unwrap_or_default();
        (tokenizer.token_text(id).unwrap_or_default(), bytes)
    }

    /// Token ids of a prompt. What was seen before with the same salt is not tokenised again.
    pub(crate) async fn encode(
        self: &Arc<Self>,
        prompt: Prompt,
        tools: Option<&Tools>,
        salt: &str,
        line: Option<&Line>,
    ) -> Result<Vec<u32>, RequestError> {
        let field = prompt.field();
        if prompt.weight() > INLINE_TEXT || tools.is_some() {
            let (this, tools, salt) = (Arc::clone(self), tools.cloned(), salt.to_owned());
            let whole = move || match this.look_up(prompt, tools.as_ref(), &salt)? {
                Looked::Ids(ids) => Ok(ids),
                Looked::Text(lookup) => this.complete(lookup, field),
            };
            return heavy::run(line, whole).await;
        }
        match self.look_up(prompt, tools, salt)? {
            Looked::Ids(ids) => Ok(ids),
            Looked::Text(lookup) if lookup.missing() <= INLINE_BYTES => self.complete(lookup, field),
            Looked::Text(lookup) => {
                let this = Arc::clone(self);
                heavy::run(line, move || this.complete(lookup, field)).await
            }
        }
    }

    /// Token ids of a text alone, without the special tokens that begin or end a prompt.
    pub(crate) async fn encode_bare(
        self: &Arc<Self>,
        text: String,
        line: Option<&Line>,
    ) -> Result<Vec<u32>, RequestError> {
        let this = Arc::clone(self);
        let encode = move || this.tokenizer().encode(&text, false);
        heavy::run(line, move || encode().map_err(|e| RequestError::invalid("prompt", e.to_string()))).await
    }

    /// Looks up the text of a prompt among those seen before.
    fn look_up(&self, prompt: Prompt, tools: Option<&Tools>, salt: &str) -> Result<Looked, RequestError> {
        let field = prompt.field();
        let (text, special) = match prompt {
            Prompt::Ids(ids) => return Ok(Looked::Ids(ids)),
            Prompt::Text(text) => (text, true),
            Prompt::Chat(messages, options) => {
                let template = self.template()?;
                let text = match template.tools() {
                    Some(_) => template.render_with(&messages, tools.map(|tools| &tools.specs[..]), true, &options),
                    None => template.render_with(&plain(messages, tools), None, true, &options),
                };
                let text = text.map_err(|e| RequestError::invalid(field, e.to_string()))?;
                let special = self.tokenizer().adds_to_chat(&text);
                (text, special)
            }
        };
        let lookup = self.seen.look_up(self.tokenizer(), text, special, salt);
        counter!(names::TOKENIZED_BYTES, "cached" => "yes").increment(lookup.found() as u64);
        counter!(names::TOKENIZED_BYTES, "cached" => "no").increment(lookup.missing() as u64);
        Ok(Looked::Text(lookup))
    }

    /// Tokenises what was not seen before.
    fn complete(&self, lookup: Lookup, field: &'static str) -> Result<Vec<u32>, RequestError> {
        let ids = self.seen.complete(self.tokenizer(), lookup);
        ids.map_err(|e| RequestError::invalid(field, e.to_string()))
    }

    fn template(&self) -> Result<&ChatTemplate, RequestError> {
        self.model.chat_template().ok_or_else(|| {
            let wrong = format!("the model {:?} has no chat template; use /v1/completions", self.id());
            RequestError::invalid("messages", wrong).code("no_chat_template")
        })
    }
}

/// A prompt after it was looked up.
enum Looked {
    /// It needs no tokenising.
    Ids(Vec<u32>),
    /// Its text.
    Text(Lookup),
}
