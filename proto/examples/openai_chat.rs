//! A chat over the OpenAI-compatible API with nothing but an HTTP client: `cargo run -p baton-proto --example openai_chat -- [PROMPT]`,
//! beside a running `baton up`.

use anyhow::ensure;
use serde_json::{Value, json};

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let prompt = std::env::args().nth(1).unwrap_or_else(|| "Why is the sky blue?".to_owned());
    let base = std::env::var("OPENAI_BASE_URL").unwrap_or_else(|_| "http://127.0.0.1:8000/v1".to_owned());
    let client = reqwest::Client::new();
    let models: Value = client.get(format!("{base}/models")).send().await?.json().await?;
    let body = json!({
        "model": models["data"][0]["id"],
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 128,
        "stream": true,
    });
    let mut answer = client.post(format!("{base}/chat/completions")).json(&body).send().await?;
    if !answer.status().is_success() {
        // An error says which field is wrong.
        anyhow::bail!("{}: {}", answer.status(), answer.text().await?);
    }
    // Server-sent events: lines that begin with `data: `. A chunk may hold several lines, or part of one.
    let mut rest = Vec::new();
    let mut ended = false;
    while let Some(chunk) = answer.chunk().await? {
        rest.extend_from_slice(&chunk);
        while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = rest.drain(..=end).collect();
            let Some(data) = line.strip_prefix(b"data: ").map(<[u8]>::trim_ascii) else { continue };
            if data == b"[DONE]" {
                ended = true;
                continue;
            }
            let event: Value = serde_json::from_slice(data)?;
            ensure!(event["error"].is_null(), "{}", event["error"]);
            print!("{}", event["choices"][0]["delta"]["content"].as_str().unwrap_or(""));
            std::io::Write::flush(&mut std::io::stdout())?;
        }
    }
    ensure!(ended, "the stream broke off");
    println!();
    Ok(())
}
