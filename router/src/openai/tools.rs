//! `tools`, `tool_choice` and `parallel_tool_calls`, and the messages that carry calls and their results.

use baton_model_text::{FunctionCall, ToolCall};
use serde_json::{Value, json};

use super::embedded::Embedded;
use super::types::{ChatFields, MessageCall};
use crate::error::RequestError;
use crate::tools::{Choice, Tools};

/// Maximum tools of a request (I5).
const MAX_TOOLS: usize = 128;
/// Longest name of a function, bytes.
const MAX_NAME: usize = 64;

/// The tools to offer to the model. None if there are none, or if none may be called.
pub(super) fn tools(fields: &mut ChatFields) -> Result<Option<Tools>, RequestError> {
    let specs = fields.tools.take().unwrap_or_default();
    if specs.len() > MAX_TOOLS {
        let wrong = format!("tools has {} entries; at most {MAX_TOOLS} are allowed", specs.len());
        return Err(RequestError::invalid("tools", wrong));
    }
    let names: Vec<String> = specs.iter().enumerate().map(|(at, spec)| name(at, spec)).collect::<Result<_, _>>()?;
    if let Some(twice) = (1..names.len()).find(|&at| names[..at].contains(&names[at])) {
        let wrong = format!("tools[{twice}].function.name is {:?} a second time", names[twice]);
        return Err(RequestError::invalid(format!("tools[{twice}].function.name"), wrong));
    }
    let Some(choice) = choice(fields.tool_choice.take().unwrap_or(Value::Null), &names)? else { return Ok(None) };
    let parallel = fields.parallel_tool_calls.unwrap_or(true);
    Ok((!specs.is_empty()).then(|| Tools { specs, names: names.into(), choice, parallel }))
}

fn name(at: usize, spec: &Value) -> Result<String, RequestError> {
    let refuse = |field: &str, must: &str| {
        let field = format!("tools[{at}].{field}");
        Err(RequestError::invalid(field.clone(), format!("{field} must be {must}")))
    };
    if spec["type"] != "function" {
        return refuse("type", "\"function\"");
    }
    let good = |b: u8| b.is_ascii_alphanumeric() || b == b'_' || b == b'-' || b == b'.';
    match spec["function"]["name"].as_str() {
        Some(name) if (1..=MAX_NAME).contains(&name.len()) && name.bytes().all(good) => {
            match &spec["function"]["parameters"] {
                Value::Null | Value::Object(_) => Ok(name.to_owned()),
                _ => refuse("function.parameters", "a JSON schema, an object"),
            }
        }
        _ => refuse("function.name", "1 to 64 letters, digits, _, - or ."),
    }
}

/// The meaning of `tool_choice`; None: no tool may be called.
fn choice(choice: Value, names: &[String]) -> Result<Option<Choice>, RequestError> {
    let refuse = |wrong: String| Err(RequestError::invalid("tool_choice", wrong));
    let forced = match &choice {
        Value::Null => return Ok(Some(Choice::Auto)),
        Value::String(word) => match word.as_str() {
            "none" => return Ok(None),
            "auto" => return Ok(Some(Choice::Auto)),
            "required" => Choice::Required,
            other => return refuse(format!("tool_choice is {other:?}; it must be none, auto, required or a function")),
        },
        named => match named["function"]["name"].as_str().filter(|_| named["type"] == "function") {
            Some(name) => match names.iter().position(|known| known == name) {
                Some(at) => Choice::Named(at),
                None => return refuse(format!("tool_choice names {name:?}, which is not among the tools")),
            },
            None => {
                let form = json!({"type": "function", "function": {"name": "…"}});
                return refuse(format!("tool_choice must be none, auto, required or {form}"));
            }
        },
    };
    if names.is_empty() {
        return refuse("tool_choice asks for a call, but there are no tools".to_owned());
    }
    Ok(Some(forced))
}

/// The calls of an assistant's message. Their arguments become JSON objects, as templates expect.
pub(super) fn calls(
    message: usize,
    calls: Vec<MessageCall>,
    embedded: &mut Embedded,
) -> Result<Vec<ToolCall>, RequestError> {
    let read = |(at, call): (usize, MessageCall)| {
        let MessageCall { id, function } = call;
        let field = || format!("messages[{message}].tool_calls[{at}].function.arguments");
        let arguments = match function.arguments {
            Value::String(text) if text.trim().is_empty() => Some(json!({})),
            Value::String(text) => embedded.read(&field(), &text)?,
            other => Some(other),
        };
        match arguments.filter(Value::is_object) {
            Some(arguments) => {
                let function = FunctionCall { name: function.name, arguments };
                Ok(ToolCall { id, kind: "function".to_owned(), function })
            }
            None => {
                let field = field();
                Err(RequestError::invalid(field.clone(), format!("{field} must be a string with a JSON object")))
            }
        }
    };
    calls.into_iter().enumerate().map(read).collect()
}
