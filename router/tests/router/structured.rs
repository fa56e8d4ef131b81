//! Structured output and tools at the front door: what reaches the workers, what comes back, what is refused.

use crate::support::{self, CHAT, Cluster, TEXT, config, merged, streamed};
use baton_proto::v1::constraint::Kind;
use serde_json::{Value, json};

const CALL: &str = "<tool_call>\n{\"name\": \"look\", \"arguments\": {\"at\": [1, 2.50]}}\n</tool_call>";

fn hello(fields: Value) -> Value {
    merged(json!({"messages": [{"role": "user", "content": "hi"}]}), fields)
}

fn tools(fields: Value) -> Value {
    let look = json!({"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}});
    hello(merged(json!({"tools": [look], "tool_choice": "required"}), fields))
}

/// The constraint in the last request that a worker got.
fn constraint(cluster: &Cluster, worker: usize) -> Option<Kind> {
    cluster.worker(worker).asked().last().unwrap().sampling.clone().unwrap().constraint.and_then(|c| c.kind)
}

/// The prompt in the last request that a worker got, without special tokens.
fn prompt(cluster: &Cluster, worker: usize) -> String {
    let tokens = cluster.worker(worker).asked().last().unwrap().tokens.clone();
    String::from_utf8(tokens.iter().filter_map(|&t| u8::try_from(t).ok()).collect()).unwrap()
}

#[tokio::test]
async fn a_constraint_reaches_both_workers() {
    let cluster = Cluster::start(1, 1, "{}").await;
    let schema = json!({"type": "object", "properties": {"b": {}, "a": {}}});
    let format = json!({"type": "json_schema", "json_schema": {"name": "x", "strict": true, "schema": schema}});
    let any = json!({"type": "object"});
    for (path, fields, want) in [
        (CHAT, json!({ "response_format": format }), Kind::JsonSchema(schema.to_string())),
        (TEXT, json!({ "response_format": {"type": "json_object"} }), Kind::JsonSchema(any.to_string())),
        (TEXT, json!({ "guided_json": schema }), Kind::JsonSchema(schema.to_string())),
        (TEXT, json!({ "guided_json": schema.to_string() }), Kind::JsonSchema(schema.to_string())),
        (CHAT, json!({ "guided_regex": "a{2}" }), Kind::Regex("a{2}".into())),
        (CHAT, json!({ "structured_outputs": {"regex": "a{2}"} }), Kind::Regex("a{2}".into())),
        (TEXT, json!({ "structured_outputs": {"json": schema} }), Kind::JsonSchema(schema.to_string())),
        (TEXT, json!({ "structured_outputs": {"json_object": true} }), Kind::JsonSchema(any.to_string())),
        (CHAT, json!({ "guided_choice": ["a", "\"b\""] }), Kind::Lark("start: \"a\" | \"\\\"b\\\"\"".into())),
        (TEXT, json!({ "guided_grammar": "start: \"x\"" }), Kind::Lark("start: \"x\"".into())),
    ] {
        let body = if path == CHAT { hello(fields) } else { merged(json!({"prompt": "hi"}), fields) };
        let (status, answer) = cluster.ask(path, &body).await;
        assert_eq!(status, 200, "{answer}");
        assert_eq!((constraint(&cluster, 0), constraint(&cluster, 1)), (Some(want.clone()), Some(want)));
    }
    cluster.ask(CHAT, &hello(json!({"response_format": {"type": "text"}}))).await;
    assert_eq!(constraint(&cluster, 1), None);
    cluster.stop().await;
}

#[tokio::test]
async fn what_cannot_work_is_refused_by_name() {
    let cluster = Cluster::start(0, 1, "{}").await;
    let schema = |schema: Value| json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}});
    let tool = |function: Value| json!({"tools": [{"type": "function", "function": function}]});
    let call = json!({"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{"}}]});
    for (fields, param) in [
        (schema(json!({"type": "strin"})), "response_format.json_schema.schema"),
        (schema(json!({"minItems": 3, "type": "array", "maxItems": 2})), "response_format.json_schema.schema"),
        (json!({"response_format": {"type": "json_schema"}}), "response_format.json_schema"),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": {"name": "a b"}}}),
            "response_format.json_schema.name",
        ),
        (json!({"response_format": {"type": "xml"}}), "response_format.type"),
        (json!({"response_format": {}}), "response_format"),
        (json!({"guided_regex": "["}), "guided_regex"),
        (json!({"guided_grammar": "x".repeat(200_000)}), "guided_grammar"),
        (json!({"guided_choice": [""]}), "guided_choice"),
        (json!({"guided_json": "{\"type\": "}), "guided_json"),
        (json!({"guided_regex": "a", "guided_json": {}}), "guided_regex"),
        (json!({"guided_regex": "a", "ignore_eos": true}), "ignore_eos"),
        (json!({"guided_regexp": "a"}), "guided_regexp"),
        (json!({"structured_outputs": {"regex": "["}}), "structured_outputs.regex"),
        (json!({"structured_outputs": {"choice": []}}), "structured_outputs.choice"),
        (json!({"structured_outputs": {"regex": "a", "json": {}}}), "structured_outputs.regex"),
        (json!({"structured_outputs": {"structural_tag": "a"}}), "structured_outputs.structural_tag"),
        (tool(json!({"name": "f"})), "tools"),
        (tool(json!({"name": ""})), "tools[0].function.name"),
        (tool(json!({"name": "f", "parameters": []})), "tools[0].function.parameters"),
        (json!({"tools": [{"type": "retrieval"}]}), "tools[0].type"),
        (json!({"tool_choice": "required"}), "tool_choice"),
        (tools(json!({"tool_choice": "sometimes"})), "tool_choice"),
        (tools(json!({"tool_choice": {"type": "function", "function": {"name": "other"}}})), "tool_choice"),
        (tools(json!({"guided_regex": "a"})), "guided_regex"),
        (json!({"messages": [call]}), "messages[0].tool_calls[0].function.arguments"),
        (json!({"functions": [{"name": "f"}]}), "functions"),
    ] {
        let (status, answer) = cluster.ask(CHAT, &hello(fields.clone())).await;
        assert_eq!((status, answer["error"]["param"].as_str()), (400, Some(param)), "{fields}: {answer}");
    }
    let (status, answer) = cluster.ask(TEXT, &json!({"prompt": "a", "tools": [{"type": "function"}]})).await;
    assert_eq!((status, &answer["error"]["param"]), (400, &json!("tools")), "not with a plain prompt");
    assert_eq!(cluster.worker(0).asked().len(), 0, "nothing was spent on any of them");
    cluster.stop().await;
}

#[tokio::test]
async fn a_call_whole_and_streamed() {
    let cluster = Cluster::start(1, 1, CALL).await;
    let (status, answer) = cluster.ask(CHAT, &tools(json!({}))).await;
    assert_eq!(status, 200, "{answer}");
    let choice = &answer["choices"][0];
    assert_eq!((&choice["finish_reason"], &choice["message"]["content"]), (&json!("tool_calls"), &Value::Null));
    let calls = choice["message"]["tool_calls"].as_array().unwrap();
    assert_eq!(calls.len(), 1);
    assert_eq!(calls[0]["function"], json!({"name": "look", "arguments": "{\"at\": [1, 2.50]}"}), "as it was written");
    assert_eq!((&calls[0]["type"], calls[0].get("index")), (&json!("function"), None));
    assert!(matches!(constraint(&cluster, 1), Some(Kind::Lark(text)) if text.contains("look")));
    assert!(prompt(&cluster, 1).starts_with("system\nYou can call these functions:\n{\"name\":\"look\""));

    let chunks = cluster.stream(CHAT, tools(json!({"n": 2}))).await;
    for choice in 0..2 {
        let of =
            |c: &Value| c["choices"].as_array().unwrap().iter().filter(|c| c["index"] == choice).cloned().collect();
        let own: Vec<Value> = chunks.iter().flat_map::<Vec<Value>, _>(of).collect();
        let calls: Vec<&Value> = own.iter().filter_map(|c| c["delta"].get("tool_calls")).collect();
        assert_eq!(calls.len(), 1);
        assert_eq!((&calls[0][0]["index"], &calls[0][0]["function"]["name"]), (&json!(0), &json!("look")));
        assert_eq!(own.last().unwrap()["finish_reason"], "tool_calls");
        assert_eq!(streamed(&chunks, choice), "");
    }
    cluster.stop().await;
}

#[tokio::test]
async fn what_is_no_call_is_content() {
    let answer = "Hm. <tool_call>{\"name\": \"jump\", \"arguments\": {}}</tool_call>";
    let cluster = Cluster::start(0, 1, answer).await;
    let (_, whole) = cluster.ask(CHAT, &tools(json!({}))).await;
    let message = &whole["choices"][0]["message"];
    assert_eq!((&message["content"], message.get("tool_calls")), (&json!(answer), None));
    assert_eq!(whole["choices"][0]["finish_reason"], "stop");
    assert_eq!(streamed(&cluster.stream(CHAT, tools(json!({}))).await, 0), answer);
    cluster.stop().await;
}

#[tokio::test]
async fn calls_and_results_are_part_of_the_conversation() {
    let cluster = Cluster::start(0, 1, "x").await;
    let function = json!({"name": "look", "arguments": "{\"at\": 1}"});
    let messages = json!([
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": null, "tool_calls": [{"id": "c", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c", "content": "a cat"},
    ]);
    let (status, answer) = cluster.ask(CHAT, &json!({ "messages": messages })).await;
    assert_eq!(status, 200, "{answer}");
    let call = "<tool_call>\n{\"name\":\"look\",\"arguments\":{\"at\":1}}\n</tool_call>";
    let want = format!("user\nhi\nassistant\n{call}\nuser\n<tool_response>\na cat\n</tool_response>\nassistant\n");
    assert_eq!(prompt(&cluster, 0), want);
    cluster.stop().await;
}

/// A template that lists tools as Qwen's templates do, and shows calls and results.
const HERMES: &str = "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>{% endif %}\
    {% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\
    {{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}</tool_call>{% endfor %}{% endfor %}";

#[tokio::test]
async fn a_model_that_knows_tools_calls_as_it_likes() {
    let answer = format!("Let me look.\n{CALL}\n{CALL}");
    let cluster = Cluster::of_model(HERMES, config(), 0, 1, &[&answer]).await;
    let (status, whole) = cluster.ask(CHAT, &tools(json!({"tool_choice": "auto"}))).await;
    assert_eq!(status, 200, "{whole}");
    let message = &whole["choices"][0]["message"];
    assert_eq!((&message["content"], message["tool_calls"].as_array().unwrap().len()), (&json!("Let me look."), 2));
    assert_ne!(message["tool_calls"][0]["id"], message["tool_calls"][1]["id"]);
    assert_eq!(whole["choices"][0]["finish_reason"], "tool_calls");
    assert_eq!(constraint(&cluster, 0), None, "nothing is forced");
    let spec = "{\"type\": \"function\", \"function\": {\"name\": \"look\", \"parameters\": {\"type\": \"object\"}}}";
    assert_eq!(prompt(&cluster, 0), format!("<tools>{spec}</tools>[user]hi"), "keys as the client sent them");

    let chunks = cluster.stream(CHAT, tools(json!({"tool_choice": "auto"}))).await;
    assert_eq!(streamed(&chunks, 0), "Let me look.");
    let calls = chunks.iter().filter_map(|c| c["choices"][0]["delta"].get("tool_calls"));
    assert_eq!(calls.map(|c| c[0]["index"].as_u64().unwrap()).collect::<Vec<_>>(), [0, 1]);

    let one = tools(json!({"tool_choice": "auto", "parallel_tool_calls": false}));
    let (_, one) = cluster.ask(CHAT, &one).await;
    let message = &one["choices"][0]["message"];
    assert_eq!(message["tool_calls"].as_array().unwrap().len(), 1);
    assert_eq!(message["content"], json!(format!("Let me look.\n{CALL}")), "the second is not lost");

    cluster.ask(CHAT, &tools(json!({"tool_choice": "none"}))).await;
    assert_eq!(prompt(&cluster, 0), "[user]hi", "none is told of");
    let (_, without) = cluster.ask(CHAT, &hello(json!({}))).await;
    assert_eq!(without["choices"][0]["message"]["content"], json!(answer), "nobody asked for calls");
    cluster.stop().await;
}

#[tokio::test]
async fn a_special_token_may_announce_calls() {
    let template = "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}{# [TOOL_CALLS] #}";
    let answer = "[TOOL_CALLS] [{\"name\": \"look\", \"arguments\": {}}]";
    let cluster = Cluster::of_model(template, config(), 0, 1, &[answer]).await;
    let (_, whole) = cluster.ask(CHAT, &tools(json!({}))).await;
    assert_eq!(whole["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"], "{}", "{whole}");
    let (_, plain) = cluster.ask(CHAT, &hello(json!({}))).await;
    assert!(
        plain["choices"][0]["message"]["content"].as_str().unwrap().starts_with(" [{"),
        "special tokens have no text"
    );
    cluster.ask(CHAT, &tools(json!({}))).await;
    let marker = support::CALLS;
    assert!(
        matches!(constraint(&cluster, 0), Some(Kind::Lark(text)) if text.starts_with(&format!("start: <[{marker}]>")))
    );
    cluster.stop().await;
}
