//! `baton chat`: one question to a running cluster, streamed to the terminal over gRPC.

use std::error::Error;
use std::io::Write;

use anyhow::{Context, anyhow, bail};
use baton_proto::v1::{self, generate_request::Input, inference_client::InferenceClient};
use clap::{Arg, ArgMatches, Command, value_parser};
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint};

/// Tokens after which an answer is cut off when the user gave no --max-tokens.
const ENOUGH: usize = 512;

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
        .arg(
            Arg::new("api-key-file")
                .long("api-key-file")
                .value_name("PATH")
                .help("A file with the API key, where the router needs one (--keys-file)"),
        )
        .arg(
            Arg::new("tls-ca").long("tls-ca").value_name("PATH").help(
                "Certificates in PEM of the authorities that the router's certificate may come from, with https://",
            ),
        )
        .arg(Arg::new("system").long("system").value_name("TEXT").help("A system message to go first"))
        .arg(
            Arg::new("max-tokens")
                .long("max-tokens")
                .value_name("N")
                .value_parser(value_parser!(u32))
                .help(format!("Most tokens of the answer; default: {ENOUGH}, because small models can go on for ever")),
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

/// Sends the question and prints the answer.
pub async fn run(matches: &ArgMatches) -> anyhow::Result<()> {
    let text = |name: &str| matches.get_one::<String>(name).cloned();
    let message = |role: &str, content| v1::ChatMessage { role: role.to_owned(), content, ..Default::default() };
    let messages = text("system").map(|s| message("system", s)).into_iter();
    let messages = messages.chain(text("message").map(|m| message("user", m))).collect();
    let limit = matches.get_one::<u32>("max-tokens").copied();
    // Without --max-tokens the request has no limit: the model's context may be shorter than `ENOUGH`.
    let sampling =
        v1::Sampling { max_tokens: limit, temperature: matches.get_one("temperature").copied(), ..Default::default() };
    let request = v1::GenerateRequest {
        input: Some(Input::Chat(v1::Chat { messages, ..Default::default() })),
        sampling: Some(sampling),
        ..Default::default()
    };
    let router = text("router").unwrap_or_default();
    let secure = router.starts_with("https://");
    if !secure && !router.starts_with("http://") {
        bail!("--router is {router:?}; it must be http://HOST:PORT or https://HOST:PORT, the gRPC address of a router");
    }
    let mut endpoint = Endpoint::from_shared(router.clone()).with_context(|| format!("--router {router}"))?;
    if secure {
        let path = text("tls-ca")
            .context("https:// needs --tls-ca, the authorities that the router's certificate may come from")?;
        let authority = std::fs::read(&path).with_context(|| format!("--tls-ca {path}"))?;
        endpoint = endpoint.tls_config(ClientTlsConfig::new().ca_certificate(Certificate::from_pem(authority)))?;
    }
    let channel = endpoint.connect().await.map_err(|error| match secure {
        false => {
            anyhow!("no router answers at {router}; start one with `baton up` or name its gRPC address with --router")
        }
        true => anyhow::Error::from(error).context(format!("no router with TLS answers at {router}")),
    })?;
    let mut client = InferenceClient::new(channel);
    let failed = |status: tonic::Status| match status.source() {
        None => anyhow!("{}", status.message()),
        // The error comes from the connection, not from the router.
        Some(_) => anyhow!("{router} went away, or does not speak gRPC; name a router's gRPC address with --router"),
    };
    let mut request = tonic::Request::new(request);
    if let Some(path) = text("api-key-file") {
        let key = std::fs::read_to_string(&path).with_context(|| format!("--api-key-file {path}"))?;
        let value = format!("Bearer {}", key.trim()).parse();
        request.metadata_mut().insert("authorization", value.map_err(|_| anyhow!("{path} has no API key in it"))?);
    }
    let mut stream = client.generate(request).await.map_err(failed)?.into_inner();
    let (mut out, mut told) = (std::io::stdout(), 0);
    while let Some(part) = stream.message().await.map_err(failed)? {
        // What the model thinks is no part of the answer.
        eprint!("{}", part.reasoning);
        out.write_all(part.text.as_bytes())?;
        out.flush()?;
        told += part.tokens.len();
        if limit.is_none() && told >= ENOUGH && part.finish.is_none() {
            eprintln!("\n[cut off after {told} tokens; --max-tokens allows more]");
            break;
        }
    }
    writeln!(out)?;
    Ok(())
}
