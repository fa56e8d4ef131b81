//! Handles what a client sends over HTTP, up to the first worker: reads it, checks it against the model, renders and tokenises it, and
//! compiles its constraint.
//!
//! An input's first byte picks the endpoint and the router's model. The rest is a body or, with [`EDITED`], edits of an accepted body,
//! since few mutations of JSON are JSON. A refusal must be a client error. An internal error is a finding. So is a panic on a thread
//! that compiles or tokenises, because it becomes an internal error.

mod edits;

use std::cell::OnceCell;
use std::sync::Arc;

use baton_router::testing::model::{self, CONTEXT};
use baton_router::testing::{Checked, Endpoint, read};
use baton_router::{RequestError, ServedModel};
use serde_json::{Value, json};
use tokio::runtime::{Builder, Runtime};

use crate::signature;

/// Bit of an input's first byte: the rest is edits of a body.
const EDITED: u8 = 0x80;
/// The body is one of /v1/responses.
const RESPONSES: u8 = 0x40;

/// Chat templates: one without tools, and two with different tool syntaxes.
const TEMPLATES: [&str; 3] = [
    model::TEMPLATE,
    "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>{% endif %}{% for m in messages %}[{{ m.role }}]\
     {{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments | tojson }}</tool_call>{% endfor %}{% endfor %}",
    "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}{# [TOOL_CALLS] #}",
];

/// Most choices of a request.
const CHOICES: usize = 128;

struct Routers {
    runtime: Runtime,
    models: Vec<Arc<ServedModel>>,
}

thread_local! {
    static ROUTERS: OnceCell<Routers> = const { OnceCell::new() };
}

fn routers() -> Routers {
    let serve = |template: &&str| {
        let folder = tempfile::tempdir().expect("a folder");
        // All of it has been read by the time the folder is removed.
        Arc::new(ServedModel::new(model::write_and_open(folder.path(), template), model::MODEL))
    };
    let runtime = Builder::new_current_thread().max_blocking_threads(1).build().expect("a runtime");
    Routers { runtime, models: TEMPLATES.iter().map(serve).collect() }
}

impl Routers {
    fn send(&self, which: u8, body: &[u8]) -> Result<Checked, RequestError> {
        let endpoint = match which & RESPONSES != 0 {
            true => Endpoint::Responses,
            false if which.is_multiple_of(2) => Endpoint::Chat,
            false => Endpoint::Completions,
        };
        self.runtime.block_on(read(endpoint, body, &self.models[usize::from(which / 2) % self.models.len()]))
    }
}

pub(crate) fn body(input: &[u8]) -> u64 {
    let Some((which, body)) = input.split_first() else { return 0 };
    let edited = (which & EDITED != 0).then(|| edits::edited(body).to_string().into_bytes());
    let body = edited.as_deref().unwrap_or(body);
    let outcome = ROUTERS.with(|cell| cell.get_or_init(routers).send(which & !EDITED, body));
    match &outcome {
        Ok(checked) => works(checked),
        Err(error) => refused(error, body),
    }
    signature(&outcome.map(outline).map_err(|error| (error.kind, error.code, field(error))))
}

/// Asserts that no worker would have to refuse the request.
fn works(checked: &Checked) {
    let choices = checked.prompts.iter().map(|(_, choices)| choices.len()).sum::<usize>();
    assert!((1..=CHOICES).contains(&choices), "{choices} choices");
    for (prompt, choices) in &checked.prompts {
        assert!(!prompt.is_empty());
        for params in choices {
            assert_eq!(params.validate(), Ok(()));
            assert!(prompt.len() + params.max_tokens as usize <= CONTEXT as usize, "{params:?}");
        }
    }
}

fn refused(error: &RequestError, body: &[u8]) {
    let status = error.kind.http_status();
    assert!((400..500).contains(&status), "{status}: {error}");
    // An error may repeat what the client sent, escaped, but must not multiply it (I5).
    assert!(!error.message.is_empty() && error.message.len() <= 1000 + 8 * body.len(), "{error}");
}

fn outline(checked: Checked) -> impl std::fmt::Debug {
    let few = checked.prompts.len().min(2);
    let params = checked.prompts.into_iter().next().and_then(|(_, choices)| choices.into_iter().next());
    let asked =
        params.map(|params| (params.constraint.is_some(), params.top_logprobs.is_some(), params.temperature > 0.0));
    (checked.stream, checked.tools, few > 1, asked)
}

/// The field of an error, without the names chosen by the client.
fn field(error: RequestError) -> Option<String> {
    let field = error.param.filter(|_| error.code != Some("unknown_parameter"))?;
    let own = if field.starts_with("logit_bias") { "logit_bias" } else { field.split('[').next().unwrap_or_default() };
    Some(own.to_owned())
}

pub(crate) fn body_seeds() -> Vec<Vec<u8>> {
    let plain = bodies().map(|(which, body)| [vec![which], body.to_string().into_bytes()].concat());
    let edited = (0..6).map(|at| vec![EDITED | at, 3 * at, at, 0, at, 3 * at, 2, at + 1, 5 * at, 1, at + 2]);
    plain.chain(edited).collect()
}

/// Bodies, each with the first byte that sends it to an endpoint that accepts it.
fn bodies() -> impl Iterator<Item = (u8, Value)> {
    let user = |content: Value| json!({"role": "user", "content": content});
    let spec = json!({"type": "function", "function": {"name": "look", "description": "Looks.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}}});
    let call = json!({"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{\"at\": \"it\"}"}});
    let every = json!({"messages": [user(json!("hi"))], "model": "bytes", "n": 2, "max_completion_tokens": 7, "temperature": 0.5,
        "top_p": 0.9, "top_k": -1, "min_p": 0.1, "seed": -1, "stop": ["END", "."], "stop_token_ids": [3], "presence_penalty": 1,
        "frequency_penalty": -1, "repetition_penalty": 1.5, "logit_bias": {"5": -100}, "logprobs": true, "top_logprobs": 3,
        "stream": true, "stream_options": {"include_usage": true}, "user": "u", "cache_salt": "s", "priority": -1,
        "cache_keep_seconds": 90, "return_token_ids": true, "ignore_eos": true, "metadata": {"a": [1]}});
    let talk = json!({"messages": [{"role": "developer", "content": "Be brief."},
        user(json!([{"type": "text", "text": "What is "}, {"type": "text", "text": "it? é\u{1f600}"}])),
        {"role": "assistant", "content": null, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "name": "look", "content": "a cat"}],
        "tools": [spec], "tool_choice": "auto", "parallel_tool_calls": false});
    let forced = json!({"messages": [user(json!("look"))], "tools": [spec], "max_tokens": 9,
        "tool_choice": {"type": "function", "function": {"name": "look"}}});
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer", "minimum": 0}, "b": {"enum": ["x", null]}},
        "required": ["a"], "additionalProperties": false});
    let shaped = json!({"messages": [user(json!("hi"))],
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": true}}});
    let other = |field: &str, value: Value| json!({"messages": [user(json!("hi"))], field: value});
    let prompt =
        |prompt: Value| json!({"prompt": prompt, "max_tokens": 5, "echo": false, "logprobs": 2, "suffix": null});
    let mut seeds = vec![(0, every), (4, forced.clone()), (0, forced), (0, shaped)];
    seeds.extend([0, 2, 4].map(|which| (which, talk.clone())));
    seeds.extend(
        [
            other(
                "guided_json",
                json!({"$ref": "#/$defs/t", "$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}}),
            ),
            other("guided_json", json!("{\"type\": \"number\"}")),
            other("guided_regex", json!("[a-c]{2,5}(x|y)*?\\d")),
            other("guided_choice", json!(["yes", "no \"way\""])),
            other("guided_grammar", json!("start: \"a\" b | /[0-9]+/\nb: \"(\" start \")\"")),
            other("response_format", json!({"type": "json_object"})),
            other("max_tokns", json!(1)),
        ]
        .map(|body| (2, body)),
    );
    let prompts = [json!("Once"), json!(["a", "b"]), json!([1, 2, 3]), json!([[1], [2, 3]]), json!([])];
    seeds.extend(prompts.map(|of| (1, prompt(of))));
    let part = |kind: &str, text: &str| json!([{"type": kind, "text": text}]);
    let items = json!([
        {"role": "user", "content": part("input_text", "hi")},
        {"type": "reasoning", "summary": [], "content": part("reasoning_text", "hm")},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "4"},
    ]);
    let form = json!({"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}});
    let tool = json!([{"type": "function", "name": "f", "parameters": {"type": "object"}}]);
    let responses = [
        json!({"input": "hi", "instructions": "Be brief.", "max_output_tokens": 5, "top_logprobs": 1}),
        json!({"input": items, "text": form}),
        json!({"input": "hi", "tools": tool, "tool_choice": {"type": "function", "name": "f"}, "stream": true}),
    ];
    seeds.extend(responses.map(|body| (RESPONSES, body)));
    seeds.into_iter()
}

#[cfg(test)]
mod tests {
    use baton_types::ErrorKind;

    use super::*;

    /// Seeds must be accepted bodies; otherwise mutations would only exercise the first checks.
    #[test]
    fn seeds_are_taken() {
        let refused = bodies().filter(|(which, body)| !taken(*which, &body.to_string())).count();
        // The three: tools for a model that knows none, a misspelt word, no prompt at all.
        assert_eq!(refused, 3);
    }

    fn taken(which: u8, body: &str) -> bool {
        let read = routers().send(which, body.as_bytes());
        read.inspect_err(|error| assert_eq!(error.kind, ErrorKind::InvalidArgument)).is_ok()
    }
}
