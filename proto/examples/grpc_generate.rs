//! A chat over gRPC with the generated client: `cargo run -p baton-proto --example grpc_generate -- [PROMPT]`, beside a running
//! `baton up`.

use anyhow::ensure;
use baton_proto::v1::{self, generate_request::Input, inference_client::InferenceClient};

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let prompt = std::env::args().nth(1).unwrap_or_else(|| "Why is the sky blue?".to_owned());
    let target = std::env::var("BATON_GRPC_TARGET").unwrap_or_else(|_| "http://127.0.0.1:8001".to_owned());
    let mut client = InferenceClient::connect(target).await?;
    let message = v1::ChatMessage { role: "user".to_owned(), content: prompt, ..Default::default() };
    let request = v1::GenerateRequest {
        input: Some(Input::Chat(v1::Chat { messages: vec![message], ..Default::default() })),
        // The same seed gives the same answer, whatever the route.
        sampling: Some(v1::Sampling { max_tokens: Some(128), seed: Some(1), ..v1::Sampling::default() }),
        ..v1::GenerateRequest::default()
    };
    // Dropping the stream cancels the request on the workers.
    let mut answer = client.generate(request).await?.into_inner();
    let mut tokens = 0;
    while let Some(part) = answer.message().await? {
        ensure!(part.tokens.is_empty() || part.index == tokens, "every token comes once, in order");
        tokens += part.tokens.len() as u32;
        print!("{}", part.text);
        std::io::Write::flush(&mut std::io::stdout())?;
        if let Some(finish) = part.finish {
            let prompt_tokens = finish.usage.map_or(0, |usage| usage.prompt_tokens);
            println!("\n[{prompt_tokens} tokens in, {tokens} out, {}]", finish.reason().as_str_name());
            return Ok(());
        }
    }
    anyhow::bail!("the stream broke off after {tokens} tokens")
}
