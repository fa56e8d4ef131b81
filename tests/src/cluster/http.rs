//! Plain HTTP/1.0, and metrics by it.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};

use anyhow::{Context, ensure};

use super::HANG;

/// A GET: status and body.
pub fn get(address: SocketAddr, path: &str) -> anyhow::Result<(u16, String)> {
    exchange(address, &format!("GET {path} HTTP/1.0\r\nHost: {address}\r\n\r\n"))
}

/// The first event of a stream of server-sent events.
pub fn first_event(address: SocketAddr, path: &str) -> anyhow::Result<serde_json::Value> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(HANG))?;
    stream.write_all(format!("GET {path} HTTP/1.0\r\nHost: {address}\r\n\r\n").as_bytes())?;
    let lines = BufReader::new(stream).lines().map_while(Result::ok);
    let event = lines.filter_map(|line| line.strip_prefix("data: ").map(str::to_owned)).next();
    Ok(serde_json::from_str(&event.context("no event")?)?)
}

/// A POST of JSON: status and body.
pub fn post(address: SocketAddr, path: &str, body: &str) -> anyhow::Result<(u16, String)> {
    let length = body.len();
    let head = format!("POST {path} HTTP/1.0\r\nHost: {address}\r\nContent-Type: application/json\r\n");
    exchange(address, &format!("{head}Content-Length: {length}\r\n\r\n{body}"))
}

fn exchange(address: SocketAddr, request: &str) -> anyhow::Result<(u16, String)> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(HANG))?;
    stream.write_all(request.as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let status = answer.split_whitespace().nth(1).and_then(|word| word.parse().ok()).context("no HTTP answer")?;
    Ok((status, answer.split_once("\r\n\r\n").map_or("", |(_, body)| body).to_owned()))
}

/// The text that a stream of server-sent events spells, chat or completion. Its last event must be `[DONE]`.
pub fn streamed_text(body: &str) -> anyhow::Result<String> {
    let events: Vec<&str> = body.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
    let Some(("[DONE]", events)) = events.split_last().map(|(last, rest)| (*last, rest)) else {
        anyhow::bail!("the stream does not end with [DONE]: {body}");
    };
    let mut text = String::new();
    for event in events {
        let event: serde_json::Value = serde_json::from_str(event).with_context(|| format!("in {event:?}"))?;
        let choice = &event["choices"][0];
        text += choice["delta"]["content"].as_str().or(choice["text"].as_str()).unwrap_or_default();
    }
    Ok(text)
}

/// The numbers of one process.
#[derive(Clone, PartialEq, Debug)]
pub struct Metrics(String);

impl Metrics {
    /// What `GET /metrics` says.
    pub fn of(address: SocketAddr) -> anyhow::Result<Metrics> {
        let (status, body) = get(address, "/metrics")?;
        ensure!(status == 200, "GET /metrics: {status} {body}");
        Ok(Metrics(body))
    }

    /// The sum over all series of this name whose labels contain this text; 0 when there is none.
    pub fn sum(&self, name: &str, labels: &str) -> f64 {
        let series = self.0.lines().filter_map(|line| line.strip_prefix(name));
        let values = series.filter(|rest| rest.starts_with([' ', '{']) && rest.contains(labels));
        values.filter_map(|rest| rest.rsplit_once(' ')?.1.parse::<f64>().ok()).sum()
    }
}
