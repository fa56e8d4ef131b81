//! The input of a request, and its constraint on every answer.

use std::sync::Arc;

use baton_model_text::{ChatMessage, FunctionCall, TemplateOptions, ToolCall};
use baton_types::Constraint;
use serde_json::Value;

/// The prompt as the client gave it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Prompt {
    /// Tokenised as is.
    Text(String),
    /// Token ids, used as they are.
    Ids(Vec<u32>),
    /// Rendered with the model's chat template, which gets these options.
    Chat(Vec<ChatMessage>, TemplateOptions),
}

impl Prompt {
    /// The request field that the prompt comes from.
    pub fn field(&self) -> &'static str {
        match self {
            Prompt::Text(_) | Prompt::Ids(_) => "prompt",
            Prompt::Chat(..) => "messages",
        }
    }

    /// About the bytes of what must be tokenised, or rendered before that.
    pub fn weight(&self) -> usize {
        match self {
            Prompt::Ids(_) => 0,
            Prompt::Text(text) => text.len(),
            Prompt::Chat(messages, options) => {
                let options: usize = options.values().map(json_weight).sum();
                messages.iter().map(message).sum::<usize>() + options
            }
        }
    }

    /// About the bytes of the arguments of its calls, which came as JSON inside of texts.
    pub fn arguments(&self) -> usize {
        match self {
            Prompt::Ids(_) | Prompt::Text(_) => 0,
            Prompt::Chat(messages, _) => {
                let calls = messages.iter().flat_map(|message| &message.tool_calls);
                calls.map(|call| json_weight(&call.function.arguments)).sum()
            }
        }
    }
}

fn message(message: &ChatMessage) -> usize {
    let ChatMessage { role, content, reasoning_content, tool_calls, tool_call_id, name } = message;
    let some = |text: &Option<String>| text.as_ref().map_or(0, String::len);
    let call = |call: &ToolCall| {
        let FunctionCall { name, arguments } = &call.function;
        some(&call.id) + name.len() + json_weight(arguments)
    };
    role.len()
        + content.len()
        + some(reasoning_content)
        + some(tool_call_id)
        + some(name)
        + tool_calls.iter().map(call).sum::<usize>()
}

/// What a name in an object takes besides its text and its value.
const NAME: usize = 48;

/// About the bytes of a JSON value in memory.
pub(crate) fn json_weight(json: &Value) -> usize {
    let inside: usize = match json {
        Value::String(text) => text.len(),
        Value::Array(values) => values.iter().map(json_weight).sum(),
        Value::Object(fields) => fields.iter().map(|(name, json)| NAME + name.len() + json_weight(json)).sum(),
        Value::Null | Value::Bool(_) | Value::Number(_) => 0,
    };
    size_of::<Value>() + inside
}

/// A constraint on the form of every answer.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Wanted {
    /// The request field that asks for it.
    pub field: &'static str,
    /// The constraint.
    pub constraint: Arc<Constraint>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn all_that_is_rendered_has_weight() {
        let long = "x".repeat(1000);
        let hi = || ChatMessage::new("assistant", "hi");
        let chat = |message: ChatMessage| Prompt::Chat(vec![hi(), message], TemplateOptions::new());
        let call = |arguments: Value| {
            let function = FunctionCall { name: "f".into(), arguments };
            ChatMessage { tool_calls: vec![ToolCall { id: None, kind: "function".into(), function }], ..hi() }
        };
        let options = [("a".to_owned(), json!(long))].into_iter().collect();
        for heavy in [
            Prompt::Text(long.clone()),
            chat(ChatMessage::new("user", &*long)),
            chat(ChatMessage { reasoning_content: Some(long.clone()), ..hi() }),
            chat(ChatMessage { tool_call_id: Some(long.clone()), ..hi() }),
            chat(ChatMessage { name: Some(long.clone()), ..hi() }),
            chat(call(json!({"a": [{"b": long}]}))),
            chat(call(json!({"a": vec![0; 1000 / size_of::<Value>() + 1]}))),
            chat(call(json!({ long.clone(): 0 }))),
            Prompt::Chat(vec![hi()], options),
        ] {
            assert!((1000..2000).contains(&heavy.weight()), "{} of {heavy:?}", heavy.weight());
        }
        assert!(chat(hi()).weight() < 100);
        assert_eq!(Prompt::Ids(vec![0; 1000]).weight(), 0);
        assert_eq!(chat(call(json!([0, 0]))).arguments(), 3 * size_of::<Value>());
        assert_eq!(chat(ChatMessage::new("user", &*long)).arguments(), 0);
    }
}
