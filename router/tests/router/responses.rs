//! POST /v1/responses, whole and as a stream.

use serde_json::{Value, json};

use crate::support::{Cluster, config, merged};

const RESPONSES: &str = "/v1/responses";
const CALL: &str = "<tool_call>\n{\"name\": \"look\", \"arguments\": {\"at\": 1}}\n</tool_call>";
const THINKS: &str = "{% for m in messages %}{{ m.role }}: {{ m.content.split('</think>')[-1] }}|{% endfor %}";

fn hello(fields: Value) -> Value {
    merged(json!({"input": "hi"}), fields)
}

/// Without what is random: ids.
fn plain(mut response: Value) -> Value {
    response["id"] = "".into();
    response["created_at"] = 0.into();
    for item in response["output"].as_array_mut().unwrap() {
        item["id"] = "".into();
        if item.get("call_id").is_some() {
            item["call_id"] = "".into();
        }
    }
    response
}

/// The events of a stream.
async fn events(cluster: &Cluster, body: Value) -> Vec<Value> {
    let response = cluster.post(RESPONSES, &merged(body, json!({"stream": true}))).await;
    assert_eq!(response.status(), 200);
    let text = response.text().await.unwrap();
    let data = text.lines().filter_map(|line| line.strip_prefix("data: "));
    let events: Vec<Value> = data.map(|line| serde_json::from_str(line).unwrap()).collect();
    let names: Vec<_> = text.lines().filter_map(|line| line.strip_prefix("event: ")).collect();
    let types: Vec<_> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    assert_eq!(names, types);
    for (number, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], number);
    }
    events
}

#[tokio::test]
async fn a_response_says_what_a_chat_would() {
    let cluster = Cluster::start(1, 1, "fine").await;
    let (status, body) =
        cluster.ask(RESPONSES, &hello(json!({"instructions": "Be brief.", "metadata": {"a": "b"}}))).await;
    assert_eq!(status, 200, "{body}");
    let content = json!([{"type": "output_text", "text": "fine", "annotations": [], "logprobs": []}]);
    assert_eq!(
        (&body["object"], &body["status"], &body["output"][0]["content"]),
        (&json!("response"), &json!("completed"), &content)
    );
    assert_eq!(
        (&body["instructions"], &body["metadata"], &body["store"]),
        (&json!("Be brief."), &json!({"a": "b"}), &json!(false))
    );
    assert_eq!(
        (&body["usage"]["output_tokens"], &body["usage"]["input_tokens_details"]["cached_tokens"]),
        (&json!(5), &json!(1))
    );
    assert!(body["id"].as_str().unwrap().starts_with("resp_"));
    let (_, cut) = cluster.ask(RESPONSES, &hello(json!({"max_output_tokens": 2, "top_logprobs": 2}))).await;
    assert_eq!(
        (&cut["status"], &cut["incomplete_details"]["reason"]),
        (&json!("incomplete"), &json!("max_output_tokens"))
    );
    let logprobs = &cut["output"][0]["content"][0]["logprobs"];
    assert_eq!((logprobs.as_array().unwrap().len(), &logprobs[0]["token"]), (2, &json!("f")));
    let long = json!({"input": "x".repeat(600)});
    let (status, refused) = cluster.ask(RESPONSES, &long).await;
    assert_eq!((status, &refused["error"]["param"]), (400, &json!("input")), "{refused}");
    cluster.stop().await;
}

#[tokio::test]
async fn a_stream_of_events_amounts_to_the_whole_response() {
    for (template, answer, fields) in [
        (THINKS, "fine", json!({})),
        (THINKS, "<think>\nhm\n</think>\n\nyes", json!({"max_output_tokens": 90})),
        (THINKS, "", json!({})),
        (
            baton_router::testing::model::TEMPLATE,
            CALL,
            json!({"tools": [{"type": "function", "name": "look", "parameters": {"type": "object"}}], "tool_choice": "required"}),
        ),
    ] {
        let cluster = Cluster::of_model(template, config(), 1, 1, &[answer]).await;
        let (status, whole) = cluster.ask(RESPONSES, &hello(fields.clone())).await;
        assert_eq!(status, 200, "{whole}");
        let events = events(&cluster, hello(fields)).await;
        let last = events.last().unwrap();
        assert_eq!(last["type"], "response.completed");
        assert_eq!(plain(last["response"].clone()), plain(whole), "{answer}");
        // The pieces amount to the items.
        let items = last["response"]["output"].as_array().unwrap();
        for (index, item) in items.iter().enumerate() {
            let of_item = |kind: &str| {
                let fits = |e: &&Value| e["output_index"] == index && e["type"] == kind;
                events.iter().filter(fits).cloned().collect::<Vec<_>>()
            };
            let (begin, end) = (of_item("response.output_item.added"), of_item("response.output_item.done"));
            assert_eq!((begin.len(), &end[0]["item"]), (1, item));
            assert_eq!((&begin[0]["item"]["id"], &begin[0]["item"]["status"]), (&item["id"], &json!("in_progress")));
            let (kind, text) = match item["type"].as_str().unwrap() {
                "message" => ("response.output_text.delta", &item["content"][0]["text"]),
                "reasoning" => ("response.reasoning_text.delta", &item["content"][0]["text"]),
                _ => ("response.function_call_arguments.delta", &item["arguments"]),
            };
            let deltas = of_item(kind);
            assert!(deltas.iter().all(|delta| delta["item_id"] == item["id"]));
            let said: String = deltas.iter().map(|delta| delta["delta"].as_str().unwrap()).collect();
            assert_eq!(&json!(said), text);
        }
        cluster.stop().await;
    }
}

#[tokio::test]
async fn a_response_that_fails_says_so_in_its_stream() {
    use crate::support::Decode;
    let cluster = Cluster::with(baton_router::RouterConfig { max_attempts: 1, ..config() }, 0, 1, &["fine"]).await;
    cluster.worker(0).decode_will([Decode::Fail(2, tonic::Status::data_loss("broken"))]);
    let events = events(&cluster, hello(json!({}))).await;
    let last = events.last().unwrap();
    assert_eq!((&last["type"], &last["response"]["status"]), (&json!("response.failed"), &json!("failed")));
    assert!(!last["response"]["error"]["message"].as_str().unwrap().is_empty());
    cluster.stop().await;
}
