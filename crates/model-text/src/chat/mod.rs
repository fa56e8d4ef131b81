//! The model's chat template: Jinja as Hugging Face renders it.
//!
//! Rendering is text only; special tokens in the result are recognised when the text is tokenised.

mod date;
mod json;
mod message;
mod tools;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::SystemTime;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, Error, ErrorKind, Value, context};

use crate::ModelFileError;
pub use message::{ChatMessage, FunctionCall, ToolCall};
pub use tools::ToolSyntax;

/// A compiled template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    bos: String,
    eos: String,
    tools: Option<ToolSyntax>,
    thinks: bool,
}

/// What stands around a model's thoughts, before its answer: DeepSeek, Qwen3, SmolLM3 and others.
pub const THOUGHTS: (&str, &str) = ("<think>", "</think>");

/// The template's name in its environment; without a suffix, so that nothing is escaped.
const NAME: &str = "chat";
/// Most steps of one rendering: enough for some ten thousand messages of about a hundred steps each, and well under a second.
const MAX_STEPS: u64 = 2_000_000;
/// The function that templates call to refuse a conversation. Its message becomes the client's error.
const RAISE: &str = "raise_exception";

impl ChatTemplate {
    /// Compiles a template. `path` is the file it comes from; `bos` and `eos` are the texts of those tokens.
    pub fn compile(path: &Path, source: &str, bos: String, eos: String) -> Result<ChatTemplate, ModelFileError> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|e| ModelFileError::malformed(path, "chat template", e))?);
        environment.set_fuel(Some(MAX_STEPS));
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_filter("tojson", json::to_json);
        environment.add_function(RAISE, |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        environment
            .add_template_owned(NAME, without_generation_marks(source))
            .map_err(|e| ModelFileError::malformed(path, "chat template", e))?;
        let thinks = source.contains(THOUGHTS.1);
        Ok(ChatTemplate { environment, bos, eos, tools: ToolSyntax::of(source), thinks })
    }

    /// How the model writes tool calls; None when its template takes no tools, or writes calls in an unknown syntax.
    pub fn tools(&self) -> Option<ToolSyntax> {
        self.tools
    }

    /// Whether the model may think before it answers, between [`THOUGHTS`].
    pub fn thinks(&self) -> bool {
        self.thinks
    }

    /// Renders the prompt for these messages. `tools` are the functions that the model may call, as clients describe them; some templates
    /// tell None from an empty list. With `add_generation_prompt` the prompt ends where the assistant's answer begins.
    pub fn render(
        &self,
        messages: &[ChatMessage],
        tools: Option<&[serde_json::Value]>,
        add_generation_prompt: bool,
    ) -> Result<String, ModelFileError> {
        self.render_with(messages, tools, add_generation_prompt, &TemplateOptions::new())
    }

    /// As [`render`](Self::render), with further variables of the template's own, such as `enable_thinking`. They do not replace those that
    /// every template has.
    pub fn render_with(
        &self,
        messages: &[ChatMessage],
        tools: Option<&[serde_json::Value]>,
        add_generation_prompt: bool,
        options: &TemplateOptions,
    ) -> Result<String, ModelFileError> {
        self.render_at(messages, tools, add_generation_prompt, options, SystemTime::now())
    }

    /// As [`render_with`](Self::render_with), at a given time: some templates tell the model the date (here in UTC).
    pub fn render_at(
        &self,
        messages: &[ChatMessage],
        tools: Option<&[serde_json::Value]>,
        add_generation_prompt: bool,
        options: &TemplateOptions,
        now: SystemTime,
    ) -> Result<String, ModelFileError> {
        let strftime_now = Value::from_function(move |format: String| date::format(now, &format));
        let values = context! {
            messages => Value::from(Serde(messages)),
            add_generation_prompt,
            bos_token => self.bos.as_str(),
            eos_token => self.eos.as_str(),
            tools => Value::from(Serde(tools)),
            documents => Value::from(()),
            strftime_now,
            ..Value::from(Serde(options)),
        };
        let template = self.environment.get_template(NAME);
        // The library panics at a few expressions, such as an empty list read backwards. Here that is an error of this request (I8).
        let rendered = catch_unwind(AssertUnwindSafe(|| template.and_then(|template| template.render(values))));
        let rendered =
            rendered.map_err(|_| ModelFileError::ChatTemplate("it cannot be rendered with them".to_owned()))?;
        rendered.map_err(|error| ModelFileError::ChatTemplate(message(&error)))
    }
}

/// Variables that a client gives a template.
pub type TemplateOptions = serde_json::Map<String, serde_json::Value>;

/// The message that a template raised; any other error with its place in the template.
fn message(error: &Error) -> String {
    match error.detail() {
        _ if error.kind() == ErrorKind::OutOfFuel => {
            format!("it takes more than {MAX_STEPS} steps; send fewer messages, or use a model whose template ends")
        }
        Some(detail) if error.kind() == ErrorKind::InvalidOperation => detail.to_owned(),
        _ => error.to_string(),
    }
}

/// Replaces `{% generation %}` … `{% endgeneration %}`, with which training tools mark the assistant's part, by an `if` that always
/// holds. That keeps their whitespace control.
fn without_generation_marks(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(open) = rest.find("{%") {
        let (before, tag_on) = rest.split_at(open);
        out.push_str(before);
        let Some(inside) = tag_on[2..].find("%}") else {
            rest = tag_on;
            break;
        };
        let (tag, after) = tag_on.split_at(inside + 4);
        match tag[2..inside + 2].trim_matches(['-', '+']).trim() {
            "generation" => out.push_str(&tag.replace("generation", "if true")),
            "endgeneration" => out.push_str(&tag.replace("endgeneration", "endif")),
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn compile(source: &str) -> ChatTemplate {
        ChatTemplate::compile(Path::new("t"), source, "<s>".to_owned(), "</s>".to_owned()).unwrap()
    }

    #[test]
    fn blocks_are_trimmed_as_hugging_face_does() {
        let template = compile(
            "{{ bos_token }}\n  {% for m in messages %}\n    {%- if loop.first %}\nfirst\n    {% endif %}\n[{{ m.role }}] {{ m['content'].strip() | upper }}{{ eos_token }}\n{% endfor %}\n",
        );
        let messages = [ChatMessage::new("user", " hi "), ChatMessage::new("assistant", "yo")];
        let text = template.render(&messages, None, false).unwrap();
        assert_eq!(text, "<s>\nfirst\n[user] HI</s>\n[assistant] YO</s>\n");
    }

    #[test]
    fn python_methods_loop_controls_and_namespaces_work() {
        let template = compile(
            "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{% set ns.n = ns.n + 1 %}{{ m.content.split(' ')[0] }}{% if m.content.startswith('b') %}!{% break %}{% endif %}{% endfor %}#{{ ns.n }}{% if tools %}T{% endif %}{% if add_generation_prompt %}>{% endif %}",
        );
        let messages = [
            ChatMessage::new("system", "s"),
            ChatMessage::new("user", "a 1"),
            ChatMessage::new("user", "b 2"),
            ChatMessage::new("user", "c 3"),
        ];
        assert_eq!(template.render(&messages, None, true).unwrap(), "ab!#2>");
    }

    #[test]
    fn what_the_template_raises_is_the_clients_error() {
        use baton_types::{BatonError, ErrorKind};
        let template = compile("{{ raise_exception('roles must alternate') }}");
        let error = template.render(&[], None, true).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(error.to_string().ends_with("rejects these messages: roles must alternate"), "{error}");
    }

    #[test]
    fn a_template_that_does_not_end_is_given_up_and_a_long_conversation_is_not() {
        let endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}";
        let error = compile(endless).render(&[], None, true).unwrap_err();
        assert!(error.to_string().contains("more than 2000000 steps"), "{error}");
        let usual = "{% for m in messages %}{% if m.role == 'user' %}<{{ m.role }}>{{ m.content | trim }}{% else %}{{ raise_exception('no') }}{% endif %}{% endfor %}";
        let many = vec![ChatMessage::new("user", " hi "); 10_000];
        assert_eq!(compile(usual).render(&many, None, true).unwrap().len(), 10_000 * "<user>hi".len());
    }

    /// Found by fuzzing.
    #[test]
    fn what_the_library_panics_at_is_an_error() {
        let template = compile("{% for m in messages[::-1] %}{{ m.content }}{% endfor %}");
        assert_eq!(template.render(&[ChatMessage::new("user", "hi")], None, true).unwrap(), "hi");
        let error = template.render(&[], None, true).unwrap_err();
        assert!(error.to_string().ends_with("rejects these messages: it cannot be rendered with them"), "{error}");
    }

    #[test]
    fn a_broken_template_names_its_file() {
        let error = ChatTemplate::compile(Path::new("dir/chat.jinja"), "{% if %}", String::new(), String::new());
        assert!(error.unwrap_err().to_string().starts_with("dir/chat.jinja is not a readable chat template"));
    }

    #[test]
    fn the_date_is_that_of_the_given_time() {
        let template = compile("{{ strftime_now('%d %b %Y') }}");
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_721_952_000);
        assert_eq!(template.render_at(&[], None, false, &TemplateOptions::new(), now).unwrap(), "26 Jul 2024");
    }

    #[test]
    fn json_is_written_as_python_writes_it() {
        let template = compile("{{ {'b': [1, 'é<&>'], 'a': none} | tojson }}{{ [1] | tojson(indent=2) }}");
        assert_eq!(template.render(&[], None, false).unwrap(), "{\"b\": [1, \"é<&>\"], \"a\": null}[\n  1\n]");
    }

    #[test]
    fn tools_and_their_calls_reach_the_template_as_they_were_sent() {
        let template = compile(
            "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}{% for m in messages %}[{{ m.role }}{{ m.tool_call_id }}]{{ m.content }}{% if m.tool_calls %}{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% endif %}{% endfor %}",
        );
        assert_eq!(template.render(&[ChatMessage::new("user", "hi")], None, false).unwrap(), "[user]hi");
        let tools = [serde_json::json!({"type": "function", "function": {"name": "f", "a": 1}})];
        let function = FunctionCall { name: "f".to_owned(), arguments: serde_json::json!({"z": 1, "a": [true]}) };
        let call = ToolCall { id: Some("c1".to_owned()), kind: "function".to_owned(), function };
        let messages = [
            ChatMessage { tool_calls: vec![call], ..ChatMessage::new("assistant", "") },
            ChatMessage { tool_call_id: Some("c1".to_owned()), ..ChatMessage::new("tool", "4") },
        ];
        let want = "{\"type\": \"function\", \"function\": {\"name\": \"f\", \"a\": 1}}[assistant]f{\"z\": 1, \"a\": [true]}[toolc1]4";
        assert_eq!(template.render(&messages, Some(&tools), false).unwrap(), want);
    }

    #[test]
    fn a_template_shows_whether_its_model_thinks() {
        let plain = compile("{{ messages[0].content }}");
        let thinks = compile("{{ messages[0].content.split('</think>')[-1] }}{{ messages[0].reasoning_content }}");
        assert_eq!((plain.thinks(), thinks.thinks()), (false, true));
        let message =
            ChatMessage { reasoning_content: Some("hm".into()), ..ChatMessage::new("assistant", "x</think>y") };
        assert_eq!(thinks.render(&[message], None, false).unwrap(), "yhm");
    }

    #[test]
    fn generation_marks_are_passed_over() {
        let template = compile("a\n{%- generation -%}\n b {% endgeneration %}\nc");
        assert_eq!(template.render(&[], None, false).unwrap(), "ab c");
        assert_eq!(
            without_generation_marks("a{%- generation -%} b{% endgeneration %}c"),
            "a{%- if true -%} b{% endif %}c"
        );
        // Found by fuzzing: an end of a tag that overlaps its beginning.
        assert_eq!(without_generation_marks("{%} a {% generation %}{%}"), "{%} a {% generation %}{%}");
    }

    #[test]
    fn options_are_the_templates_variables_but_replace_none_of_the_usual_ones() {
        let template = compile("{{ enable_thinking }} {{ depth.most }} {{ messages | length }}{{ bos_token }}");
        let options =
            serde_json::json!({"enable_thinking": false, "depth": {"most": 3}, "messages": [1, 2], "bos_token": "x"});
        let options = options.as_object().unwrap();
        let text = template.render_with(&[ChatMessage::new("user", "hi")], None, false, options).unwrap();
        assert_eq!(text, "False 3 1<s>");
    }
}
