//! The response object.

use baton_types::random_u64;
use serde_json::{Map, Value, json};

use crate::openai::answer::{Answer, Part};
use crate::openai::usage::UsageSum;
use crate::prompt::json_weight;
use crate::tools::Call;

/// What a response repeats of its request, with what OpenAI's API says where the request says nothing.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Frame(Map<String, Value>);

/// Fields that a response repeats, and their values where the request has none.
const REPEATED: [(&str, &str); 13] = [
    ("instructions", "null"),
    ("max_output_tokens", "null"),
    ("metadata", "{}"),
    ("parallel_tool_calls", "true"),
    ("reasoning", "{\"effort\":null,\"summary\":null}"),
    ("temperature", "1.0"),
    ("text", "{\"format\":{\"type\":\"text\"}}"),
    ("tool_choice", "\"auto\""),
    ("tools", "[]"),
    ("top_logprobs", "0"),
    ("top_p", "1.0"),
    ("truncation", "\"disabled\""),
    ("user", "null"),
];

impl Frame {
    pub fn new(fields: &Map<String, Value>) -> Frame {
        let value = |name: &str, otherwise: &str| match fields.get(name) {
            Some(value) if !value.is_null() => value.clone(),
            _ => serde_json::from_str(otherwise).unwrap_or_default(),
        };
        Frame(REPEATED.iter().map(|(name, otherwise)| ((*name).to_owned(), value(name, otherwise))).collect())
    }

    /// About its bytes: held, copied into a response, and once more as JSON.
    pub fn weight(&self) -> usize {
        3 * self.0.values().map(json_weight).sum::<usize>()
    }
}

/// How far a response is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Status {
    InProgress,
    Completed,
    /// `max_output_tokens`, or the end of the context, cut it off.
    Incomplete,
    Failed,
}

impl Status {
    pub fn of(finish: Option<&str>) -> Status {
        if finish == Some("length") { Status::Incomplete } else { Status::Completed }
    }

    pub fn as_str(self) -> &'static str {
        match self {
            Status::InProgress => "in_progress",
            Status::Completed => "completed",
            Status::Incomplete => "incomplete",
            Status::Failed => "failed",
        }
    }
}

/// A response object.
pub(super) fn object(answer: &Answer, status: Status, output: &[Value], usage: Option<&UsageSum>) -> Value {
    let incomplete = (status == Status::Incomplete).then(|| json!({"reason": "max_output_tokens"}));
    let mut object = json!({
        "id": answer.id,
        "object": "response",
        "created_at": answer.created,
        "status": status.as_str(),
        "error": null,
        "incomplete_details": incomplete,
        "model": answer.model.id(),
        "output": output,
        "previous_response_id": null,
        "background": false,
        "store": false,
        "service_tier": answer.tier(),
        "usage": usage.map(usage_object),
    });
    if let (Some(object), Some(Frame(repeated))) = (object.as_object_mut(), &answer.frame) {
        object.extend(repeated.clone());
    }
    object
}

fn usage_object(sum: &UsageSum) -> Value {
    let usage = sum.usage();
    json!({
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": sum.thought},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    })
}

/// A new id of an item.
pub(super) fn item_id(prefix: &str) -> String {
    format!("{prefix}_{:016x}", random_u64())
}

/// The item of what the model thought.
pub(super) fn reasoning(id: &str, text: Option<&str>, status: Status) -> Value {
    let content: Vec<_> = text.map(reasoning_part).into_iter().collect();
    json!({"id": id, "type": "reasoning", "status": status.as_str(), "summary": [], "content": content})
}

pub(super) fn reasoning_part(text: &str) -> Value {
    json!({"type": "reasoning_text", "text": text})
}

/// The item of the answer's text.
pub(super) fn message(id: &str, content: Option<Value>, status: Status) -> Value {
    let content: Vec<_> = content.into_iter().collect();
    json!({"id": id, "type": "message", "role": "assistant", "status": status.as_str(), "content": content})
}

pub(super) fn text_part(text: &str, logprobs: Vec<Value>) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs})
}

/// The item of a call.
pub(super) fn function_call(id: &str, call: &Call, arguments: &str, status: Status) -> Value {
    json!({"id": id, "type": "function_call", "status": status.as_str(), "call_id": call.id, "name": call.name,
        "arguments": arguments})
}

/// The whole answer.
pub(crate) fn whole(answer: &Answer, part: &Part, usage: &UsageSum) -> Vec<u8> {
    let status = Status::of(part.finish);
    let mut output = Vec::new();
    if !part.reasoning.is_empty() {
        output.push(reasoning(&item_id("rs"), Some(&part.reasoning), status));
    }
    if !part.text.is_empty() || part.calls.is_empty() {
        let content = text_part(&part.text, answer.chat_logprobs(&part.pieces));
        output.push(message(&item_id("msg"), Some(content), status));
    }
    output.extend(part.calls.iter().map(|call| function_call(&item_id("fc"), call, &call.arguments, status)));
    object(answer, status, &output, Some(usage)).to_string().into_bytes()
}
