//! Input items as messages of a chat.

use serde_json::{Map, Value, json};

use crate::error::RequestError;

/// A request's messages, and the input item that each comes from: its text when the error is about it.
#[derive(Debug, Default)]
pub(super) struct Messages {
    pub all: Vec<Value>,
    /// By message: the path in the request.
    pub paths: Vec<String>,
}

impl Messages {
    /// Adds the instructions, as a system message.
    pub fn instruct(&mut self, text: &Value) {
        self.push("instructions", json!({"role": "system", "content": text}));
    }

    /// Adds the input: a text, or a list of items.
    pub fn input(&mut self, input: Value) -> Result<(), RequestError> {
        let items = match input {
            Value::String(text) => {
                self.push("input", json!({"role": "user", "content": text}));
                return Ok(());
            }
            Value::Array(items) => items,
            _ => return Err(RequestError::invalid("input", "input must be a string or an array of items")),
        };
        // Thoughts of the message that follows.
        let mut reasoning = None;
        for (at, item) in items.into_iter().enumerate() {
            let path = format!("input[{at}]");
            let Value::Object(item) = item else {
                return Err(RequestError::invalid(path.clone(), format!("{path} must be an object")));
            };
            self.item(path, item, &mut reasoning)?;
        }
        Ok(())
    }

    fn item(
        &mut self,
        path: String,
        mut item: Map<String, Value>,
        reasoning: &mut Option<String>,
    ) -> Result<(), RequestError> {
        let kind = item.get("type").and_then(Value::as_str).unwrap_or("message").to_owned();
        match kind.as_str() {
            "message" => {
                let role = item.remove("role").unwrap_or_default();
                let content = parts(item.remove("content").unwrap_or_default());
                self.push(&path, json!({"role": role, "content": content}));
                self.think(reasoning.take());
            }
            "function_call" => {
                let function = json!({"name": item.remove("name"), "arguments": item.remove("arguments")});
                let call = json!({"id": item.remove("call_id"), "type": "function", "function": function});
                self.call(&path, call);
                self.think(reasoning.take());
            }
            "function_call_output" => {
                let content = parts(item.remove("output").unwrap_or_default());
                self.push(&path, json!({"role": "tool", "tool_call_id": item.remove("call_id"), "content": content}));
            }
            "reasoning" => *reasoning = Some(thoughts(&item)),
            other => {
                let known = "message, function_call, function_call_output or reasoning";
                let wrong = format!("{path}.type is {other:?}; it must be {known}: nothing is stored here");
                return Err(RequestError::invalid(format!("{path}.type"), wrong).code("unsupported_parameter"));
            }
        }
        Ok(())
    }

    fn push(&mut self, path: &str, message: Value) {
        self.all.push(message);
        self.paths.push(path.to_owned());
    }

    /// Adds a call to the assistant's message before it, or to a new one.
    fn call(&mut self, path: &str, call: Value) {
        match self.all.last_mut().filter(|last| last["role"] == "assistant") {
            Some(last) => match last["tool_calls"].as_array_mut() {
                Some(calls) => calls.push(call),
                None => last["tool_calls"] = json!([call]),
            },
            None => self.push(path, json!({"role": "assistant", "tool_calls": [call]})),
        }
    }

    /// Gives these thoughts to the last message, if it is the assistant's.
    fn think(&mut self, reasoning: Option<String>) {
        let last = self.all.last_mut().filter(|last| last["role"] == "assistant");
        if let (Some(last), Some(reasoning)) = (last, reasoning) {
            last["reasoning_content"] = reasoning.into();
        }
    }
}

/// Content as a chat has it: parts of text have other names here.
fn parts(content: Value) -> Value {
    let Value::Array(parts) = content else { return content };
    let part = |mut part: Value| {
        if matches!(part["type"].as_str(), Some("input_text" | "output_text")) {
            part["type"] = "text".into();
        }
        if part["type"] == "refusal" {
            return json!({"type": "text", "text": part["refusal"]});
        }
        part
    };
    parts.into_iter().map(part).collect()
}

/// The text of an item of thoughts: what was thought or, without that, its summary.
fn thoughts(item: &Map<String, Value>) -> String {
    let texts = |name: &str| {
        let parts = item.get(name).and_then(Value::as_array).into_iter().flatten();
        parts.filter_map(|part| part["text"].as_str()).collect::<Vec<_>>().join("\n")
    };
    Some(texts("content")).filter(|text| !text.is_empty()).unwrap_or_else(|| texts("summary"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_become_messages() {
        let mut messages = Messages::default();
        messages.instruct(&json!("Be brief."));
        let items = json!([
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{\"a\": 1}"},
            {"type": "function_call_output", "call_id": "c1", "output": "one"},
            {"type": "function_call", "call_id": "c3", "name": "f", "arguments": "{}"},
        ]);
        messages.input(items).unwrap();
        let call = |id: &str, name: &str, arguments: &str| json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
        let want = json!([
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "Let me see."}], "reasoning_content": "hm",
             "tool_calls": [call("c1", "f", "{}"), call("c2", "g", "{\"a\": 1}")]},
            {"role": "tool", "tool_call_id": "c1", "content": "one"},
            {"role": "assistant", "tool_calls": [call("c3", "f", "{}")]},
        ]);
        assert_eq!(Value::from(messages.all), want);
        assert_eq!(messages.paths, ["instructions", "input[0]", "input[2]", "input[5]", "input[6]"]);
        for (bad, path) in
            [(json!(5), "input"), (json!([1]), "input[0]"), (json!([{"type": "item_reference"}]), "input[0].type")]
        {
            assert_eq!(Messages::default().input(bad).unwrap_err().param.as_deref(), Some(path));
        }
    }
}
