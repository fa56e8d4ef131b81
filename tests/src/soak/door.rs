//! Asking over either front door, and leaving early.

use std::net::SocketAddr;

use anyhow::{Context, ensure};
use baton_proto::v1::{self, generate_request::Input};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

use crate::cluster::client::Client;

/// How a client asks.
#[derive(Clone, Debug)]
pub enum Door {
    Grpc(Client),
    Http(SocketAddr),
}

impl Door {
    /// The answer's ids: all of them, or about as many as it stays for.
    pub async fn ask(&self, request: v1::GenerateRequest, leave: Option<usize>) -> anyhow::Result<Vec<u32>> {
        match self {
            Door::Grpc(client) => ask_grpc(client, request, leave).await,
            Door::Http(address) => ask_http(*address, request, leave).await,
        }
    }
}

async fn ask_grpc(client: &Client, request: v1::GenerateRequest, leave: Option<usize>) -> anyhow::Result<Vec<u32>> {
    let mut answering = client.start(request).await?;
    let Some(tokens) = leave else { return Ok(answering.rest().await?.ids) };
    answering.until(tokens).await?;
    Ok(answering.so_far().ids.clone())
}

/// The same over server-sent events, in the plainest HTTP there is.
async fn ask_http(address: SocketAddr, request: v1::GenerateRequest, leave: Option<usize>) -> anyhow::Result<Vec<u32>> {
    let (Some(Input::TokenIds(prompt)), Some(sampling)) = (request.input, request.sampling) else {
        anyhow::bail!("a soak's requests have token ids and sampling")
    };
    let body = json!({
        "prompt": prompt.ids, "max_tokens": sampling.max_tokens, "temperature": sampling.temperature,
        "seed": sampling.seed, "cache_salt": request.cache_salt, "priority": request.priority, "ignore_eos": true, "stream": true, "return_token_ids": true,
    })
    .to_string();
    let length = body.len();
    let head = format!("POST /v1/completions HTTP/1.0\r\nHost: {address}\r\nContent-Type: application/json\r\n");
    let mut stream = BufReader::new(TcpStream::connect(address).await?);
    stream.write_all(format!("{head}Content-Length: {length}\r\n\r\n{body}").as_bytes()).await?;
    let mut lines = stream.lines();
    let status = lines.next_line().await?.context("no answer")?;
    ensure!(status.contains(" 200 "), "{status}");
    let mut ids: Vec<u32> = Vec::new();
    while leave.is_none_or(|tokens| ids.len() < tokens) {
        let line = lines.next_line().await?.context("the stream ended without [DONE]")?;
        match line.strip_prefix("data: ") {
            Some("[DONE]") => break,
            Some(event) => {
                let event: Value = serde_json::from_str(event)?;
                ensure!(event["error"].is_null(), "{event}");
                ids.extend(
                    serde_json::from_value::<Option<Vec<u32>>>(event["choices"][0]["token_ids"].clone())?
                        .unwrap_or_default(),
                );
            }
            None => {}
        }
    }
    Ok(ids)
}
