//! Turns the API's JSON into a `GenerateInput`, and into what the client wants to see of the answer (`Asked`).

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use baton_model_text::ChatMessage;
use baton_runtime::traces::SpanPlace;
use baton_types::{Class, RequestId, SamplingParams};
use serde::Deserialize;
use tokio::time::Instant;

use super::embedded::Embedded;
use super::once::{Fields, fields};
use super::output;
use super::tools;
use super::types::{ChatFields, CommonFields, CompletionFields, Content, Message, Part, PromptField, StopField};
use crate::error::RequestError;
use crate::input::GenerateInput;
use crate::models::Defaults;
use crate::prompt::Prompt;
use crate::standing::{Standing, slo};
use crate::tenant::Tenant;
use crate::tools::Tools;

/// Maximum tokens of a completion when the client gives no number; the API's own default.
const COMPLETION_TOKENS: u32 = 16;

/// What the client wants to see of the answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Asked {
    /// Send server-sent events instead of one body.
    pub stream: bool,
    /// In a stream, send a last chunk with the usage.
    pub include_usage: bool,
    /// Send log probabilities of the chosen token and of this many of the most likely ones.
    pub logprobs: Option<u32>,
    /// Send the token ids of prompt and answer.
    pub token_ids: bool,
    /// Send what the model thinks, if it thinks.
    pub reasoning: bool,
    /// Send the prompt before the answer.
    pub echo: bool,
    /// It names a service tier, and so does the answer.
    pub tier: bool,
    /// Of the answers to a prompt, send this many: those with the highest log probability per token. None: all, in order.
    pub best: Option<u32>,
}

/// What is known of a request beside its body.
#[derive(Clone, Debug)]
pub(crate) struct Envelope {
    pub request_id: RequestId,
    pub tenant: Option<Arc<Tenant>>,
    pub received: Instant,
    pub deadline: Instant,
    /// How to sample where the request does not say.
    pub defaults: Arc<Defaults>,
    /// Its place in a trace that a collector gets, if that is kept.
    pub span: Option<SpanPlace>,
}

/// Reads POST /v1/chat/completions.
pub(crate) fn chat(body: &[u8], envelope: Envelope) -> Result<(GenerateInput, Asked), RequestError> {
    let Fields { own, common } = fields::<ChatFields>(body)?;
    let logprobs = match (own.logprobs.unwrap_or(false), own.top_logprobs) {
        (true, top) => Some(top.unwrap_or(0)),
        (false, None | Some(0)) => None,
        (false, Some(_)) => {
            return Err(RequestError::invalid("top_logprobs", "top_logprobs needs logprobs to be true"));
        }
    };
    let max_tokens = own.max_completion_tokens.or(common.max_tokens);
    let reasoning = own.include_reasoning.unwrap_or(true);
    let (prompt, tools) = prompt_and_tools(own)?;
    let (mut input, mut asked) = assemble(common, vec![prompt], max_tokens, logprobs, envelope)?;
    asked.reasoning = reasoning;
    input.tools = tools;
    if let (Some(_), Some(wanted)) = (&input.tools, &input.wanted) {
        let wrong = format!("{} leaves no room for calls; leave it out, or set tool_choice to none", wanted.field);
        return Err(RequestError::invalid(wanted.field, wrong));
    }
    Ok((input, asked))
}

/// The prompt and the tools of a conversation that did not come as a body.
pub(crate) fn conversation(fields: &serde_json::Value) -> Result<(Prompt, Option<Tools>), RequestError> {
    let own = ChatFields::deserialize(fields)
        .map_err(|e| RequestError::new(baton_types::ErrorKind::InvalidArgument, e.to_string()))?;
    prompt_and_tools(own)
}

fn prompt_and_tools(mut own: ChatFields) -> Result<(Prompt, Option<Tools>), RequestError> {
    if own.messages.is_empty() {
        return Err(RequestError::invalid("messages", "messages is empty; it must have at least one message"));
    }
    let tools = tools::tools(&mut own)?;
    let messages = messages(own.messages)?;
    Ok((Prompt::Chat(messages, own.chat_template_kwargs.unwrap_or_default()), tools))
}

/// Reads POST /v1/completions.
pub(crate) fn completion(body: &[u8], envelope: Envelope) -> Result<(GenerateInput, Asked), RequestError> {
    let Fields { own, common } = fields::<CompletionFields>(body)?;
    let prompts: Vec<Prompt> = match own.prompt {
        PromptField::Text(text) => vec![Prompt::Text(text)],
        PromptField::Ids(ids) => vec![Prompt::Ids(ids)],
        PromptField::Texts(texts) => texts.into_iter().map(Prompt::Text).collect(),
        PromptField::IdLists(lists) => lists.into_iter().map(Prompt::Ids).collect(),
    };
    if prompts.is_empty() {
        return Err(RequestError::invalid("prompt", "prompt is an empty array; it must have at least one element"));
    }
    let (echo, n) = (own.echo.unwrap_or(false), common.n.unwrap_or(1));
    let max_tokens = common.max_tokens.unwrap_or(COMPLETION_TOKENS);
    let only_prompt = echo && max_tokens == 0;
    let (mut input, mut asked) =
        assemble(common, prompts, Some(max_tokens.max(only_prompt.into())), own.logprobs, envelope)?;
    (input.only_prompt, asked.echo) = (only_prompt, echo);
    input.sampling.prompt_logprobs = own.logprobs.filter(|_| echo);
    if let Some(best_of) = own.best_of.filter(|best_of| *best_of != n) {
        if best_of < n || asked.stream {
            let wrong = match asked.stream {
                true => "best_of needs whole answers to compare; leave it out, or set stream to false".to_owned(),
                false => format!("best_of is {best_of}; it must be at least n, which is {n}"),
            };
            return Err(RequestError::invalid("best_of", wrong));
        }
        (input.n, asked.best) = (best_of, Some(n));
        input.sampling.top_logprobs.get_or_insert(0);
    }
    Ok((input, asked))
}

fn assemble(
    mut common: CommonFields,
    prompts: Vec<Prompt>,
    max_tokens: Option<u32>,
    logprobs: Option<u32>,
    envelope: Envelope,
) -> Result<(GenerateInput, Asked), RequestError> {
    let stream = common.stream.unwrap_or(false);
    if common.stream_options.is_some() && !stream {
        return Err(RequestError::invalid("stream_options", "stream_options needs stream to be true"));
    }
    let wanted = output::wanted(&mut common)?;
    let asked = Asked {
        stream,
        include_usage: common.stream_options.and_then(|o| o.include_usage).unwrap_or(false),
        logprobs,
        token_ids: common.return_token_ids.unwrap_or(false),
        reasoning: true,
        echo: false,
        tier: common.service_tier.is_some(),
        best: None,
    };
    let Envelope { request_id, tenant, received, deadline, defaults, span } = envelope;
    let model = common.model.unwrap_or_default();
    let defaults = defaults.of(&model);
    let top_k = common.top_k.map(top_k).transpose()?;
    let seed = common.seed.map(|s| seed(&s)).transpose()?;
    let sampling = SamplingParams {
        temperature: common.temperature.unwrap_or(defaults.temperature),
        top_p: common.top_p.unwrap_or(defaults.top_p),
        top_k: top_k.unwrap_or(defaults.top_k),
        min_p: common.min_p.unwrap_or(defaults.min_p),
        presence_penalty: common.presence_penalty.unwrap_or(defaults.presence_penalty),
        frequency_penalty: common.frequency_penalty.unwrap_or(defaults.frequency_penalty),
        repetition_penalty: common.repetition_penalty.unwrap_or(defaults.repetition_penalty),
        logit_bias: common.logit_bias.map(logit_bias).transpose()?.unwrap_or_default(),
        min_tokens: common.min_tokens.unwrap_or_default(),
        top_logprobs: logprobs,
        stop_token_ids: common.stop_token_ids.unwrap_or_default(),
        ..defaults
    };
    let ignore_eos = common.ignore_eos.unwrap_or(false);
    let stop = match common.stop {
        None => Vec::new(),
        Some(StopField::One(stop)) => vec![stop],
        Some(StopField::Many(stops)) => stops,
    };
    let n = common.n.unwrap_or(1);
    let standing = Standing {
        cache_salt: common.cache_salt.unwrap_or_default(),
        class: common.service_tier.as_deref().map(class).transpose()?.unwrap_or_default(),
        priority: common.priority.unwrap_or_default(),
        cache_keep_seconds: common.cache_keep_seconds.unwrap_or_default(),
        slo: slo(common.reject_ttft_ms, common.reject_itl_ms),
        ..Standing::default()
    };
    let input = GenerateInput {
        model,
        prompts,
        n,
        sampling,
        max_tokens,
        only_prompt: false,
        seed,
        ignore_eos,
        stop,
        wanted,
        tools: None,
        standing,
        tenant,
        request_id,
        deadline,
        received,
        span,
    };
    Ok((input, asked))
}

/// The class of a service tier of OpenAI's API. Tiers that are faster for money are the default here.
fn class(service_tier: &str) -> Result<Class, RequestError> {
    match service_tier {
        "flex" => Ok(Class::Batch),
        "auto" | "default" | "priority" | "scale" => Ok(Class::Interactive),
        other => {
            let wrong = format!("service_tier is {other:?}; it must be auto, default or flex");
            Err(RequestError::invalid("service_tier", wrong))
        }
    }
}

/// The messages of a chat.
pub(super) fn messages(messages: Vec<Message>) -> Result<Vec<ChatMessage>, RequestError> {
    let mut embedded = Embedded::default();
    messages.into_iter().enumerate().map(|(at, m)| message(at, m, &mut embedded)).collect()
}

/// `at`: its place, for errors.
fn message(at: usize, mut message: Message, embedded: &mut Embedded) -> Result<ChatMessage, RequestError> {
    let role = match message.role.as_str() {
        // `developer` is the newer name of `system`; templates know the older one.
        "developer" => "system".to_owned(),
        "system" | "user" | "assistant" | "tool" => std::mem::take(&mut message.role),
        other => {
            let wrong =
                format!("messages[{at}].role is {other:?}; it must be system, developer, user, assistant or tool");
            return Err(RequestError::invalid(format!("messages[{at}].role"), wrong));
        }
    };
    let tool_calls = tools::calls(at, message.tool_calls.take().unwrap_or_default(), embedded)?;
    if !tool_calls.is_empty() && role != "assistant" {
        let field = format!("messages[{at}].tool_calls");
        return Err(RequestError::invalid(field.clone(), format!("{field}: only an assistant's message has calls")));
    }
    let content = match message.content.take() {
        Some(Content::Text(text)) => text,
        Some(Content::Parts(parts)) => {
            parts.into_iter().enumerate().map(|(i, part)| text_of(at, i, part)).collect::<Result<Vec<_>, _>>()?.concat()
        }
        None if !tool_calls.is_empty() => String::new(),
        None => {
            let field = format!("messages[{at}].content");
            return Err(RequestError::invalid(field.clone(), format!("{field} is missing; it must be a string")));
        }
    };
    let Message { reasoning_content, tool_call_id, name, .. } = message;
    Ok(ChatMessage { role, content, reasoning_content, tool_calls, tool_call_id, name })
}

fn text_of(message: usize, at: usize, part: Part) -> Result<String, RequestError> {
    let field = format!("messages[{message}].content[{at}]");
    match (part.kind.as_str(), part.text) {
        ("text", Some(text)) => Ok(text),
        ("text", None) => Err(RequestError::invalid(field.clone(), format!("{field} is of type text but has no text"))),
        (other, _) => {
            let wrong = format!("{field} is of type {other:?}; this model reads text only");
            Err(RequestError::invalid(field, wrong).code("unsupported_content"))
        }
    }
}

fn top_k(k: i64) -> Result<u32, RequestError> {
    // -1 is how some clients say "off".
    let k = if k == -1 { 0 } else { k };
    u32::try_from(k).map_err(|_| RequestError::invalid("top_k", format!("top_k is {k}; it must be 0 (off) or above")))
}

/// Any 64-bit integer; a negative one counts as its two's complement.
fn seed(seed: &serde_json::Number) -> Result<u64, RequestError> {
    let whole = seed.as_u64().or_else(|| seed.as_i64().map(i64::cast_unsigned));
    whole.ok_or_else(|| RequestError::invalid("seed", format!("seed is {seed}; it must be a 64-bit whole number")))
}

fn logit_bias(biases: HashMap<String, f32>) -> Result<Vec<(u32, f32)>, RequestError> {
    let read = |(id, bias): (String, f32)| match id.parse() {
        Ok(id) => Ok((id, bias)),
        Err(_) => {
            Err(RequestError::invalid("logit_bias", format!("logit_bias has the key {id:?}; keys must be token ids")))
        }
    };
    // Sorted by token id, each id once.
    let biases: BTreeMap<u32, f32> = biases.into_iter().map(read).collect::<Result<_, _>>()?;
    Ok(biases.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use baton_policy::Slo;
    use serde_json::{Value, json};

    #[test]
    fn what_a_request_does_not_say_is_as_the_model_advises() {
        let advised = SamplingParams { temperature: 0.2, top_p: 0.9, top_k: 20, ..SamplingParams::default() };
        let envelope = || Envelope { defaults: Arc::new(Defaults::only(advised.clone())), ..envelope() };
        let read = |more: &str| {
            let body = format!(r#"{{"prompt": "x", "max_tokens": 3{more}}}"#);
            completion(body.as_bytes(), envelope()).unwrap().0.sampling
        };
        let sampled = |params: &SamplingParams| (params.temperature, params.top_p, params.top_k);
        assert_eq!(sampled(&read("")), (0.2, 0.9, 20));
        assert_eq!(sampled(&read(r#", "temperature": 1, "top_k": -1"#)), (1.0, 0.9, 0));
    }

    fn envelope() -> Envelope {
        let now = Instant::now();
        let defaults = Arc::<Defaults>::default();
        Envelope { request_id: RequestId("r".into()), tenant: None, received: now, deadline: now, defaults, span: None }
    }

    fn read_chat(body: &Value) -> Result<(GenerateInput, Asked), RequestError> {
        chat(body.to_string().as_bytes(), envelope())
    }

    fn with(extra: Value) -> Value {
        let mut body = json!({"messages": [{"role": "user", "content": "hi"}]});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        body
    }

    #[test]
    fn every_field_arrives() {
        let (input, asked) = read_chat(&with(json!({
            "model": "m", "n": 2, "max_completion_tokens": 7, "temperature": 0.5, "top_p": 0.9, "top_k": -1, "min_p": 0.1,
            "seed": -1, "stop": "END", "stop_token_ids": [3], "presence_penalty": 1, "frequency_penalty": -1,
            "repetition_penalty": 1.5, "logit_bias": {"5": -100}, "logprobs": true, "top_logprobs": 3, "ignore_eos": true,
            "stream": true, "stream_options": {"include_usage": true}, "return_token_ids": true, "user": "u",
            "cache_salt": "tenant", "priority": -1, "cache_keep_seconds": 90, "reject_ttft_ms": 700, "reject_itl_ms": 40,
            "service_tier": "flex",
        })))
        .unwrap();
        let sampling = SamplingParams {
            temperature: 0.5,
            top_p: 0.9,
            top_k: 0,
            min_p: 0.1,
            presence_penalty: 1.0,
            frequency_penalty: -1.0,
            repetition_penalty: 1.5,
            logit_bias: vec![(5, -100.0)],
            top_logprobs: Some(3),
            stop_token_ids: vec![3],
            ..SamplingParams::default()
        };
        assert_eq!((input.model.as_str(), input.n, &input.sampling), ("m", 2, &sampling));
        assert_eq!((input.max_tokens, input.seed, input.ignore_eos), (Some(7), Some(u64::MAX), true));
        assert_eq!(input.stop, ["END"]);
        let (first_token, token) = (Some(Duration::from_millis(700)), Some(Duration::from_millis(40)));
        let slo = Slo { first_token, token, ..Slo::default() };
        let want = Standing {
            cache_salt: "tenant".into(),
            priority: -1,
            cache_keep_seconds: 90,
            slo,
            class: Class::Batch,
            ..Standing::default()
        };
        assert_eq!(input.standing, want);
        let shown = Asked {
            stream: true,
            include_usage: true,
            logprobs: Some(3),
            token_ids: true,
            reasoning: true,
            echo: false,
            tier: true,
            best: None,
        };
        assert_eq!(asked, shown);
    }

    #[test]
    fn a_completion_may_echo_its_prompt_and_choose_among_answers() {
        let read = |body: Value| completion(body.to_string().as_bytes(), envelope());
        let (input, asked) = read(json!({"prompt": "x", "echo": true, "logprobs": 2, "max_tokens": 0})).unwrap();
        assert_eq!((input.only_prompt, input.max_tokens, asked.echo), (true, Some(1), true));
        assert_eq!(input.sampling.prompt_logprobs, Some(2));
        let (input, asked) = read(json!({"prompt": "x", "echo": true, "best_of": 1})).unwrap();
        assert_eq!((input.only_prompt, input.sampling.prompt_logprobs, asked.best), (false, None, None));
        let (input, asked) = read(json!({"prompt": "x", "n": 2, "best_of": 5})).unwrap();
        assert_eq!((input.n, asked.best, asked.logprobs, input.sampling.top_logprobs), (5, Some(2), None, Some(0)));
        for bad in [json!({"n": 3, "best_of": 2}), json!({"best_of": 2, "stream": true}), json!({"best_of": -1})] {
            let mut body = json!({"prompt": "x"});
            body.as_object_mut().unwrap().extend(bad.as_object().unwrap().clone());
            assert_eq!(read(body).unwrap_err().param.as_deref(), Some("best_of"));
        }
    }

    #[test]
    fn flex_is_batch_and_all_other_tiers_are_not() {
        let of = |tier: Value| {
            let (input, asked) = read_chat(&with(json!({"service_tier": tier}))).unwrap();
            (input.standing.class, asked.tier)
        };
        assert_eq!(of(json!("flex")), (Class::Batch, true));
        assert_eq!(of(Value::Null), (Class::Interactive, false));
        for tier in ["auto", "default", "priority", "scale"] {
            assert_eq!(of(json!(tier)), (Class::Interactive, true));
        }
    }

    #[test]
    fn content_parts_of_text_are_joined_and_others_refused() {
        let parts = |parts: Value| read_chat(&json!({"messages": [{"role": "developer", "content": parts}]}));
        let (input, _) = parts(json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])).unwrap();
        let want = ChatMessage::new("system", "ab");
        assert_eq!(input.prompts, [Prompt::Chat(vec![want], Default::default())]);
        let error = parts(json!([{"type": "image_url", "image_url": {"url": "x"}}])).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("messages[0].content[0]"));
    }

    #[test]
    fn bad_fields_are_named() {
        for (body, param) in [
            (json!({"messages": []}), "messages"),
            (json!({"messages": [{"role": "wizard", "content": "x"}]}), "messages[0].role"),
            (json!({"messages": [{"role": "user"}]}), "messages[0].content"),
            (with(json!({"top_logprobs": 2})), "top_logprobs"),
            (with(json!({"stream_options": {}})), "stream_options"),
            (with(json!({"logit_bias": {"x": 1}})), "logit_bias"),
            (with(json!({"seed": 1.5})), "seed"),
            (with(json!({"top_k": -2})), "top_k"),
            (with(json!({"stop": [1]})), "stop"),
            (with(json!({"tools": [{}]})), "tools[0].type"),
            (with(json!({"n": "two"})), "n"),
            (with(json!({"priority": "high"})), "priority"),
            (with(json!({"cache_keep_seconds": -1})), "cache_keep_seconds"),
            (with(json!({"service_tier": "cheap"})), "service_tier"),
            (with(json!({"reject_ttft_ms": "5s"})), "reject_ttft_ms"),
            (with(json!({"reject_itl_ms": 0.5})), "reject_itl_ms"),
            (with(json!({"reject_ttft_m": 5})), "reject_ttft_m"),
            (with(json!({"cache_keep_second": 5})), "cache_keep_second"),
            (with(json!({"max_tokns": 4})), "max_tokns"),
            (with(json!({"max_completion_token": 4})), "max_completion_token"),
        ] {
            assert_eq!(read_chat(&body).unwrap_err().param.as_deref(), Some(param), "{body}");
        }
    }
}
