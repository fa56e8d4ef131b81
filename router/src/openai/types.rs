//! The JSON of the API, field by field. A request has its endpoint's own fields, common fields, and other fields, which `fields.rs`
//! handles. `once.rs` reads them.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;

use baton_model_text::TemplateOptions;
use baton_types::ErrorKind;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

/// The fields of POST /v1/chat/completions that completions lack.
#[derive(Debug, Deserialize, JsonSchema)]
pub(crate) struct ChatFields {
    #[schemars(length(min = 1))]
    pub messages: Vec<Message>,
    pub max_completion_tokens: Option<u32>,
    pub logprobs: Option<bool>,
    #[schemars(range(max = 20))]
    pub top_logprobs: Option<u32>,
    /// Functions, each as `{"type": "function", "function": {"name", "description", "parameters"}}`.
    #[schemars(length(max = 128))]
    pub tools: Option<Vec<serde_json::Value>>,
    /// none, auto, required, or a function.
    pub tool_choice: Option<serde_json::Value>,
    pub parallel_tool_calls: Option<bool>,
    /// Variables of the model's chat template, such as `enable_thinking`.
    pub chat_template_kwargs: Option<TemplateOptions>,
    /// false: what the model thinks is not sent. Default true.
    pub include_reasoning: Option<bool>,
}

/// The fields of POST /v1/completions that chats lack or have in another form.
#[derive(Debug, Deserialize, JsonSchema)]
pub(crate) struct CompletionFields {
    pub prompt: PromptField,
    /// Log probabilities of the answer's tokens, and of so many of the likeliest ones; with echo of the prompt's, too.
    #[schemars(range(max = 20))]
    pub logprobs: Option<u32>,
    /// Send the prompt before the answer.
    pub echo: Option<bool>,
    /// Generate so many answers to each prompt, and send the n likeliest of them.
    pub best_of: Option<u32>,
}

/// The fields that both endpoints share.
#[derive(Debug, Deserialize, JsonSchema)]
pub(crate) struct CommonFields {
    /// One of the models that are served; the first of them if absent.
    pub model: Option<String>,
    /// Server-sent events instead of one body.
    pub stream: Option<bool>,
    pub stream_options: Option<StreamOptions>,
    /// Answers to each prompt.
    #[schemars(range(min = 1, max = 128))]
    pub n: Option<u32>,
    /// Most tokens of an answer.
    pub max_tokens: Option<u32>,
    /// Tokens before which neither a stop token nor a stop string ends the answer.
    pub min_tokens: Option<u32>,
    /// 0 always takes the likeliest token. Absent, like the following: as the model's makers advise.
    #[schemars(range(min = 0, max = 100))]
    pub temperature: Option<f32>,
    /// Above 0.
    #[schemars(range(min = 0, max = 1))]
    pub top_p: Option<f32>,
    /// 0 or -1: all tokens.
    #[schemars(range(min = -1))]
    pub top_k: Option<i64>,
    #[schemars(range(min = 0, max = 1))]
    pub min_p: Option<f32>,
    /// A 64-bit whole number. The same seed gives the same answer. Absent: a random one.
    pub seed: Option<serde_json::Number>,
    /// Texts that end the answer, at most 4. They are not part of it.
    pub stop: Option<StopField>,
    pub stop_token_ids: Option<Vec<u32>>,
    #[schemars(range(min = -2, max = 2))]
    pub presence_penalty: Option<f32>,
    #[schemars(range(min = -2, max = 2))]
    pub frequency_penalty: Option<f32>,
    /// Above 0.
    pub repetition_penalty: Option<f32>,
    /// By token id, from -100 to 100.
    pub logit_bias: Option<HashMap<String, f32>>,
    /// The model's end tokens do not end the answer.
    pub ignore_eos: Option<bool>,
    /// Send the token ids of prompt and answer.
    pub return_token_ids: Option<bool>,
    /// Only requests with the same salt share KV; at most 256 bytes.
    pub cache_salt: Option<String>,
    /// Requests of a tier with a lower value are served first.
    #[schemars(range(min = -536870912, max = 536870911))]
    pub priority: Option<i32>,
    /// flex: batch work, which is served with what other requests leave. auto, default: as the key says, else at once.
    #[schemars(extend("enum" = ["auto", "default", "flex", "priority", "scale", null]))]
    pub service_tier: Option<String>,
    /// Keep the KV of prompt and answer this long, in preference to that of requests that do not ask.
    #[schemars(range(max = 86400))]
    pub cache_keep_seconds: Option<u32>,
    /// Reject the request when its first token is predicted to come later than this many milliseconds. Absent: as the key or the router says.
    #[schemars(range(min = 1))]
    pub reject_ttft_ms: Option<u32>,
    /// Reject it when its tokens are predicted to be further apart than this, in the mean.
    #[schemars(range(min = 1))]
    pub reject_itl_ms: Option<u32>,
    /// The form of the answer.
    pub response_format: Option<ResponseFormat>,
    pub guided_json: Option<serde_json::Value>,
    pub guided_regex: Option<String>,
    pub guided_choice: Option<Vec<String>>,
    pub guided_grammar: Option<String>,
    pub structured_outputs: Option<StructuredOutputs>,
}

/// The newer form of the `guided_*` fields.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct StructuredOutputs {
    pub json: Option<serde_json::Value>,
    pub json_object: Option<bool>,
    pub regex: Option<String>,
    pub choice: Option<Vec<String>>,
    pub grammar: Option<String>,
}

/// The required form of the answer.
#[derive(Debug, Deserialize, JsonSchema)]
pub(crate) struct ResponseFormat {
    #[serde(rename = "type")]
    #[schemars(extend("enum" = ["text", "json_object", "json_schema"]))]
    pub kind: String,
    pub json_schema: Option<NamedSchema>,
}

/// A schema as OpenAI's clients send it. It is always enforced, whatever `strict` says.
#[derive(Debug, Deserialize, JsonSchema)]
pub(crate) struct NamedSchema {
    pub name: Option<String>,
    pub schema: Option<serde_json::Value>,
}

/// Options of a stream.
#[derive(Debug, Deserialize, JsonSchema)]
pub(crate) struct StreamOptions {
    pub include_usage: Option<bool>,
}

/// One message of a conversation.
#[derive(Debug, Deserialize, JsonSchema)]
pub(crate) struct Message {
    #[schemars(extend("enum" = ["system", "developer", "user", "assistant", "tool"]))]
    pub role: String,
    pub content: Option<Content>,
    pub reasoning_content: Option<String>,
    pub tool_calls: Option<Vec<MessageCall>>,
    pub tool_call_id: Option<String>,
    pub name: Option<String>,
}

/// A call in an assistant's message.
#[derive(Debug, Deserialize, JsonSchema)]
pub(crate) struct MessageCall {
    pub id: Option<String>,
    pub function: MessageFunction,
}

/// The function of a call.
#[derive(Debug, Deserialize, JsonSchema)]
pub(crate) struct MessageFunction {
    pub name: String,
    /// A string of JSON; some clients send the object itself.
    pub arguments: serde_json::Value,
}

/// A message's content.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "a string or an array of content parts (objects with a type)")]
pub(crate) enum Content {
    Text(String),
    Parts(Vec<Part>),
}

/// A part of a message.
#[derive(Debug, Deserialize, JsonSchema)]
pub(crate) struct Part {
    #[serde(rename = "type")]
    #[schemars(extend("enum" = ["text"]))]
    pub kind: String,
    pub text: Option<String>,
}

/// Stop strings.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "a string or an array of strings")]
pub(crate) enum StopField {
    One(String),
    Many(Vec<String>),
}

/// A prompt, or several.
#[derive(PartialEq, Debug)]
pub(crate) enum PromptField {
    Text(String),
    Texts(Vec<String>),
    Ids(Vec<u32>),
    IdLists(Vec<Vec<u32>>),
}

impl JsonSchema for PromptField {
    fn schema_name() -> Cow<'static, str> {
        "Prompt".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let ids = || json_schema!({"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1});
        json_schema!({"anyOf": [
            {"type": "string"},
            {"type": "array", "items": {"type": "string"}, "minItems": 1},
            ids(),
            {"type": "array", "items": ids(), "minItems": 1},
        ]})
    }
}

impl<'de> Deserialize<'de> for PromptField {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(PromptVisitor)
    }
}

/// Reads straight into the right kind of list. All elements must be of the first element's kind.
struct PromptVisitor;

/// The first element of a prompt that is a list.
enum First {
    Id(u32),
    Text(String),
    Ids(Vec<u32>),
}

impl<'de> Deserialize<'de> for First {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct FirstVisitor;
        impl<'de> Visitor<'de> for FirstVisitor {
            type Value = First;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string, a token id or an array of token ids")
            }
            fn visit_u64<E: serde::de::Error>(self, id: u64) -> Result<First, E> {
                let too_large = |_| E::invalid_value(serde::de::Unexpected::Unsigned(id), &"a token id");
                u32::try_from(id).map(First::Id).map_err(too_large)
            }
            fn visit_str<E>(self, text: &str) -> Result<First, E> {
                Ok(First::Text(text.to_owned()))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<First, A::Error> {
                let mut ids = Vec::new();
                while let Some(id) = list.next_element()? {
                    ids.push(id);
                }
                Ok(First::Ids(ids))
            }
        }
        from.deserialize_any(FirstVisitor)
    }
}

impl<'de> Visitor<'de> for PromptVisitor {
    type Value = PromptField;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string, an array of strings, an array of token ids, or an array of arrays of token ids")
    }

    fn visit_str<E>(self, text: &str) -> Result<PromptField, E> {
        Ok(PromptField::Text(text.to_owned()))
    }

    fn visit_string<E>(self, text: String) -> Result<PromptField, E> {
        Ok(PromptField::Text(text))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<PromptField, A::Error> {
        match list.next_element()? {
            None => Ok(PromptField::Texts(Vec::new())),
            Some(First::Id(first)) => rest(first, list).map(PromptField::Ids),
            Some(First::Text(first)) => rest(first, list).map(PromptField::Texts),
            Some(First::Ids(first)) => rest(first, list).map(PromptField::IdLists),
        }
    }
}

fn rest<'de, T: Deserialize<'de>, A: SeqAccess<'de>>(first: T, mut list: A) -> Result<Vec<T>, A::Error> {
    let mut all = vec![first];
    while let Some(next) = list.next_element()? {
        all.push(next);
    }
    Ok(all)
}

/// GET /v1/models.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct ModelList<'a> {
    pub object: &'static str,
    pub data: Vec<Model<'a>>,
}

/// GET /v1/models/{id}.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Model<'a> {
    pub id: &'a str,
    pub object: &'static str,
    pub created: u64,
    pub owned_by: &'static str,
    /// Longest sequence, tokens.
    pub max_model_len: u32,
}

/// The body of every error.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct ErrorBody {
    pub error: ErrorObject,
}

/// What is wrong.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct ErrorObject {
    pub message: String,
    #[serde(rename = "type")]
    pub kind: &'static str,
    pub param: Option<String>,
    pub code: Option<&'static str>,
}

impl From<&crate::error::RequestError> for ErrorBody {
    fn from(e: &crate::error::RequestError) -> ErrorBody {
        let (message, param) = (e.message.clone(), e.param.clone());
        let kind = match e.kind {
            // OpenAI's API has no type of its own for it.
            ErrorKind::Unauthenticated => ErrorKind::InvalidArgument.as_str(),
            kind => kind.as_str(),
        };
        ErrorBody { error: ErrorObject { message, kind, param, code: e.code } }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_has_four_forms() {
        let read = |json: &str| serde_json::from_str::<PromptField>(json);
        assert_eq!(read(r#""a""#).unwrap(), PromptField::Text("a".into()));
        assert_eq!(read(r#"["a","b"]"#).unwrap(), PromptField::Texts(vec!["a".into(), "b".into()]));
        assert_eq!(read("[1,2]").unwrap(), PromptField::Ids(vec![1, 2]));
        assert_eq!(read("[[1],[2,3]]").unwrap(), PromptField::IdLists(vec![vec![1], vec![2, 3]]));
        assert_eq!(read("[]").unwrap(), PromptField::Texts(vec![]));
        for bad in ["5", "{}", "[1,\"a\"]", "[-1]", "[[1],2]", "[true]", "null"] {
            assert!(read(bad).is_err(), "{bad}");
        }
    }
}
