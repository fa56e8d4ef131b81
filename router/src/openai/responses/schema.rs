//! The schemas of a request and a response, for the API's document. Both are JSON without types here: a request is rewritten as a chat.

use schemars::SchemaGenerator;
use serde_json::{Value, json};

use crate::openai::types::{ChatFields, CommonFields};

/// Fields of chats that have another name or form here, are refused, or have no effect.
pub(crate) const OTHERWISE: [&str; 8] = [
    "logprobs",
    "max_completion_tokens",
    "max_tokens",
    "messages",
    "n",
    "response_format",
    "return_token_ids",
    "stream_options",
];

/// A request: its own fields, and those that it shares with a chat.
pub(crate) fn request_schema(generator: &mut SchemaGenerator) -> Value {
    generator.subschema_for::<ChatFields>();
    generator.subschema_for::<CommonFields>();
    let of = |name: &str| generator.definitions().get(name).and_then(|schema| schema["properties"].as_object());
    let mut fields: serde_json::Map<_, _> = ["ChatFields", "CommonFields"]
        .into_iter()
        .filter_map(of)
        .flatten()
        .map(|(n, s)| (n.clone(), s.clone()))
        .collect();
    fields.retain(|name, _| !OTHERWISE.contains(&name.as_str()));
    if let Value::Object(own) = own() {
        fields.extend(own);
    }
    json!({"type": "object", "required": ["input"], "properties": fields})
}

/// The fields that chats lack, or have in another form.
fn own() -> Value {
    let texts = json!({"type": "array", "items": {"type": "object"}});
    json!({
        "input": {
            "description": "A text, or items: messages, function calls and their outputs, thoughts.",
            "anyOf": [{"type": "string"}, texts],
        },
        "instructions": {"type": ["string", "null"], "description": "The system message."},
        "max_output_tokens": {"type": ["integer", "null"], "minimum": 0},
        "include": {"type": ["array", "null"], "items": {"type": "string"}},
        "text": {"type": ["object", "null"], "description": "`format`: text, json_object, or json_schema with a name and a schema."},
        "tools": {"type": ["array", "null"], "items": {"type": "object"}, "description": "Functions of the client."},
        "reasoning": {"type": ["object", "null"], "description": "`effort`: none keeps the model from thinking."},
        "metadata": {"type": ["object", "null"]},
        "user": {"type": ["string", "null"]},
        "truncation": {"enum": ["disabled", null]},
        "store": {"type": ["boolean", "null"], "description": "Nothing is stored, whatever it says."},
    })
}

/// A response.
pub(crate) fn schema() -> Value {
    let details = |name: &str| json!({"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]});
    let usage = json!({
        "type": "object",
        "required": ["input_tokens", "input_tokens_details", "output_tokens", "output_tokens_details", "total_tokens"],
        "properties": {
            "input_tokens": {"type": "integer"},
            "input_tokens_details": details("cached_tokens"),
            "output_tokens": {"type": "integer"},
            "output_tokens_details": details("reasoning_tokens"),
            "total_tokens": {"type": "integer"},
        },
    });
    let item = json!({
        "type": "object",
        "required": ["id", "type", "status"],
        "properties": {
            "id": {"type": "string"},
            "type": {"enum": ["message", "reasoning", "function_call"]},
            "status": {"enum": ["in_progress", "completed", "incomplete"]},
        },
    });
    json!({
        "type": "object",
        "required": ["id", "object", "created_at", "status", "error", "incomplete_details", "model", "output", "usage"],
        "properties": {
            "id": {"type": "string"},
            "object": {"const": "response"},
            "created_at": {"type": "integer"},
            "status": {"enum": ["completed", "incomplete"]},
            "error": {"type": "null"},
            "incomplete_details": {"type": ["object", "null"]},
            "model": {"type": "string"},
            "output": {"type": "array", "items": item},
            "usage": usage,
        },
    })
}
