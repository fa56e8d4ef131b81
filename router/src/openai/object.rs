//! The JSON objects that answers and their chunks consist of.

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::Serialize;

use super::logprobs::{ChatLogprobs, TextLogprobs};
use super::usage::UsageSum;
use crate::tools::Call;

#[derive(Serialize, JsonSchema)]
#[schemars(rename = "Answer")]
pub(super) struct Body<'a> {
    pub id: &'a str,
    pub object: &'static str,
    pub created: u64,
    pub model: &'a str,
    pub system_fingerprint: &'a str,
    /// Of a chat that names a tier or is batch work: the tier that it was served in.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub service_tier: Option<&'static str>,
    pub choices: &'a [Choice],
    /// Three cases that differ in a stream: absent (`None`), null (`Some(None)`), or a value.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Option<UsageObject>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<&'a [u32]>,
}

#[derive(Serialize, JsonSchema)]
pub(super) struct Choice {
    pub index: u32,
    /// Of a whole chat.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<Message>,
    /// Of a streamed chat.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub delta: Option<Delta>,
    /// Of a completion.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    pub logprobs: Option<Logprobs>,
    pub finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Vec<u32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
}

/// What a choice says, in the form that its answer has.
pub(super) enum Content {
    Message(Message),
    Delta(Delta),
    Text(String),
}

#[derive(Serialize, JsonSchema)]
#[schemars(rename = "AnswerMessage")]
pub(super) struct Message {
    pub role: &'static str,
    /// What the model thought, if it thinks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// Null when there are only calls.
    pub content: Option<String>,
    pub refusal: Option<()>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<CallObject>,
}

#[derive(Serialize, JsonSchema)]
pub(super) struct CallObject {
    /// Only in a stream.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub index: Option<u32>,
    pub id: String,
    #[serde(rename = "type")]
    pub kind: &'static str,
    pub function: FunctionObject,
}

#[derive(Serialize, JsonSchema)]
pub(super) struct FunctionObject {
    pub name: String,
    pub arguments: String,
}

impl CallObject {
    pub fn of(call: Call, chunk: bool) -> CallObject {
        let Call { index, id, name, arguments } = call;
        CallObject { index: chunk.then_some(index), id, kind: "function", function: FunctionObject { name, arguments } }
    }
}

#[derive(Serialize, JsonSchema)]
#[schemars(rename = "AnswerDelta")]
pub(super) struct Delta {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<CallObject>,
}

#[derive(Serialize, JsonSchema)]
#[serde(untagged)]
pub(super) enum Logprobs {
    Chat(ChatLogprobs),
    Text(TextLogprobs),
}

#[derive(Serialize, JsonSchema)]
pub(super) struct UsageObject {
    pub prompt_tokens: u32,
    pub completion_tokens: u32,
    pub total_tokens: u32,
    pub prompt_tokens_details: PromptDetails,
    /// Of models that think.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completion_tokens_details: Option<CompletionDetails>,
}

#[derive(Serialize, JsonSchema)]
pub(super) struct PromptDetails {
    pub cached_tokens: u32,
}

#[derive(Serialize, JsonSchema)]
pub(super) struct CompletionDetails {
    pub reasoning_tokens: u32,
}

impl From<&UsageSum> for UsageObject {
    fn from(sum: &UsageSum) -> UsageObject {
        let (u, reasoning_tokens) = (sum.usage(), sum.thought);
        UsageObject {
            prompt_tokens: u.prompt_tokens,
            completion_tokens: u.completion_tokens,
            total_tokens: u.prompt_tokens + u.completion_tokens,
            prompt_tokens_details: PromptDetails { cached_tokens: u.cached_tokens },
            completion_tokens_details: (reasoning_tokens > 0).then_some(CompletionDetails { reasoning_tokens }),
        }
    }
}

/// The schema of an answer and of a chunk.
pub(super) fn schema(generator: &mut SchemaGenerator) -> Schema {
    generator.subschema_for::<Body<'_>>()
}
