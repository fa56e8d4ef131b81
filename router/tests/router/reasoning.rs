//! Models that think before they answer.

use serde_json::{Value, json};

use crate::support::{CHAT, Cluster, config, merged};

/// A template that keeps no thoughts of past answers.
const THINKS: &str = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}|{% endfor %}";
/// One whose prompt ends within the thoughts.
const OPENS: &str = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}|{% endfor %}<think>\n";

fn hello(fields: Value) -> Value {
    merged(json!({"messages": [{"role": "user", "content": "hi"}]}), fields)
}

#[tokio::test]
async fn thoughts_are_split_from_the_answer() {
    for (template, answer) in [(THINKS, "<think>\nhm, so\n</think>\n\nyes"), (OPENS, "hm, so\n</think>\n\nyes")] {
        let cluster = Cluster::of_model(template, config(), 1, 1, &[answer]).await;
        let (_, body) = cluster.ask(CHAT, &hello(json!({}))).await;
        let message = &body["choices"][0]["message"];
        assert_eq!((&message["reasoning_content"], &message["content"]), (&json!("hm, so"), &json!("yes")));
        assert!(body["usage"]["completion_tokens_details"]["reasoning_tokens"].as_u64().unwrap() >= 6, "{body}");
        let chunks = cluster.stream(CHAT, hello(json!({}))).await;
        let said = |field: &'static str| {
            chunks.iter().filter_map(|c| c["choices"][0]["delta"][field].as_str()).collect::<String>()
        };
        assert_eq!((said("reasoning_content"), said("content")), ("hm, so".into(), "yes".into()));
        let (_, body) = cluster.ask(CHAT, &hello(json!({"include_reasoning": false}))).await;
        let message = &body["choices"][0]["message"];
        assert_eq!((message.get("reasoning_content"), &message["content"]), (None, &json!("yes")));
        cluster.stop().await;
    }
}

#[tokio::test]
async fn who_does_not_think_or_may_not_has_no_thoughts() {
    let cluster = Cluster::of_model(OPENS, config(), 0, 1, &["{}"]).await;
    let (_, body) = cluster.ask(CHAT, &hello(json!({"response_format": {"type": "json_object"}}))).await;
    let message = &body["choices"][0]["message"];
    assert_eq!(
        (message.get("reasoning_content"), &message["content"]),
        (None, &json!("{}")),
        "its form leaves no room"
    );
    cluster.stop().await;
    let cluster = Cluster::start(0, 1, "<think>a</think>b").await;
    let (_, body) = cluster.ask(CHAT, &hello(json!({}))).await;
    assert_eq!(body["choices"][0]["message"]["content"], "<think>a</think>b", "its template knows no thoughts");
    cluster.stop().await;
}
