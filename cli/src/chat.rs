//! `baton chat`: one question to a running cluster, streamed to the terminal over gRPC.

use std::io::Write;

use anyhow::Context;
use baton_proto::v1::{self, generate_request::Input, inference_client::InferenceClient};
use clap::{Arg, ArgMatches, Command, value_parser};

/// `baton chat`.
pub fn command() -> Command {
    Command::new("chat")
        .about("Asks a running cluster one question and streams the answer")
        .arg(Arg::new("message").required(true).value_name("TEXT").help("The question"))
        .arg(
            Arg::new("router")
                .long("router")
                .value_name("URL")
                .default_value("http://127.0.0.1:8001")
                .help("The router's gRPC address"),
        )
        .arg(Arg::new("system").long("system").value_name("TEXT").help("A system message to go first"))
        .arg(
            Arg::new("max-tokens")
                .long("max-tokens")
                .value_name("N")
                .default_value("512")
                .value_parser(value_parser!(u32))
                .help("Most tokens of the answer; small models can go on for ever"),
        )
        .arg(
            Arg::new("temperature")
                .long("temperature")
                .value_name("T")
                .default_value("0")
                .value_parser(value_parser!(f32))
                .help("0 always takes the most likely token"),
        )
}

/// Asks and prints.
pub async fn run(matches: &ArgMatches) -> anyhow::Result<()> {
    let text = |name: &str| matches.get_one::<String>(name).cloned();
    let message = |role: &str, content| v1::ChatMessage { role: role.to_owned(), content };
    let messages = text("system").map(|s| message("system", s)).into_iter();
    let messages = messages.chain(text("message").map(|m| message("user", m))).collect();
    let sampling = v1::Sampling {
        max_tokens: matches.get_one("max-tokens").copied(),
        temperature: matches.get_one("temperature").copied(),
        ..Default::default()
    };
    let request = v1::GenerateRequest {
        input: Some(Input::Chat(v1::Chat { messages })),
        sampling: Some(sampling),
        ..Default::default()
    };
    let router = text("router").unwrap_or_default();
    let mut client = InferenceClient::connect(router.clone()).await.with_context(|| {
        format!("no router answers at {router}; start one with `baton up` or name it with --router")
    })?;
    let failed = |status: tonic::Status| anyhow::anyhow!("{}", status.message());
    let mut stream = client.generate(request).await.map_err(failed)?.into_inner();
    let mut out = std::io::stdout();
    while let Some(part) = stream.message().await.map_err(failed)? {
        out.write_all(part.text.as_bytes())?;
        out.flush()?;
    }
    writeln!(out)?;
    Ok(())
}
