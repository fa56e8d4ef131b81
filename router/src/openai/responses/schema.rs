//! The schemas of a request and a response, for the API's document. Both are JSON without types here: a request is rewritten as a chat.

use serde_json::{Value, json};

/// A request.
pub(crate) fn request_schema() -> Value {
    let texts = json!({"type": "array", "items": {"type": "object"}});
    json!({
        "type": "object",
        "required": ["input"],
        "properties": {
            "model": {"type": ["string", "null"]},
            "input": {
                "description": "A text, or items: messages, function calls and their outputs, thoughts.",
                "anyOf": [{"type": "string"}, texts],
            },
            "instructions": {"type": ["string", "null"], "description": "The system message."},
            "max_output_tokens": {"type": ["integer", "null"], "minimum": 0},
            "temperature": {"type": ["number", "null"], "minimum": 0, "maximum": 100},
            "top_p": {"type": ["number", "null"], "minimum": 0, "maximum": 1},
            "top_logprobs": {"type": ["integer", "null"], "minimum": 0, "maximum": 20},
            "include": {"type": ["array", "null"], "items": {"type": "string"}},
            "stream": {"type": ["boolean", "null"]},
            "text": {"type": ["object", "null"], "description": "`format`: text, json_object, or json_schema with a name and a schema."},
            "tools": {"type": ["array", "null"], "items": {"type": "object"}, "description": "Functions of the client."},
            "tool_choice": {"description": "none, auto, required, or a function."},
            "parallel_tool_calls": {"type": ["boolean", "null"]},
            "reasoning": {"type": ["object", "null"]},
            "metadata": {"type": ["object", "null"]},
            "store": {"type": ["boolean", "null"], "description": "Nothing is stored, whatever it says."},
        },
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
