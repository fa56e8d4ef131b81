//! Many streaming clients at once that come, go and break off, all by a seed, and what must hold meanwhile: no error, no
//! token lost, doubled or changed, no process that grows.
//!
//! There is a limited number of different requests, so each is asked again and again, in other company and over both front
//! doors, and must be answered alike every time (I1, I4).

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use baton_proto::v1::{self, generate_request::Input};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

use crate::cluster::client::{Client, apart, prompt, sampled};
use crate::cluster::processes::{self, Process};
use crate::tiny::random_u64;

/// How much, how long, how large.
#[derive(Clone, Debug)]
pub struct Load {
    /// Clients at a time; every second one speaks HTTP.
    pub clients: u64,
    /// When no new request is begun.
    pub duration: Duration,
    /// Another seed, another order.
    pub seed: u64,
    /// Different requests.
    pub requests: u64,
    /// Most tokens of a prompt.
    pub prompt: u64,
    /// Most tokens of an answer.
    pub answer: u64,
}

/// What is under load.
#[derive(Clone, Debug)]
pub struct Target {
    /// The gRPC front door.
    pub grpc: SocketAddr,
    /// The HTTP front door.
    pub http: SocketAddr,
    /// Whose memory is watched.
    pub processes: Vec<Process>,
}

/// What happened.
#[derive(Clone, PartialEq, Debug)]
pub struct Report {
    clients: u64,
    seconds: f64,
    /// Answers read to their end.
    pub whole: u64,
    /// Answers given up in the middle.
    pub broken_off: u64,
    /// Tokens received.
    pub tokens: u64,
    memory: Vec<Memory>,
}

/// One process's own memory over time.
#[derive(Clone, PartialEq, Debug)]
struct Memory {
    role: String,
    pid: u32,
    bytes: Vec<u64>,
}

impl Report {
    /// Ok when no process has grown: the most in the last third is little more than the most in the first.
    pub fn check_memory(&self) -> anyhow::Result<()> {
        for memory in &self.memory {
            let (first, last) = memory.thirds();
            let most = first + first / 8 + (16 << 20);
            ensure!(last <= most, "{} {} grew from {first} to {last} bytes", memory.role, memory.pid);
        }
        Ok(())
    }
}

impl Memory {
    /// The most of the first and of the last third.
    fn thirds(&self) -> (u64, u64) {
        let third = self.bytes.len().div_ceil(3);
        let most = |part: &[u64]| part.iter().copied().max().unwrap_or(0);
        (most(&self.bytes[..third]), most(&self.bytes[self.bytes.len() - third..]))
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Report { clients, seconds, whole, broken_off, tokens, .. } = self;
        write!(
            f,
            "{clients} clients, {seconds:.0} s: {whole} answers whole, {broken_off} broken off, {tokens} tokens"
        )?;
        write!(f, ", {:.0} tokens/s; memory (first → last third)", *tokens as f64 / seconds)?;
        for memory in &self.memory {
            let (first, last) = memory.thirds();
            let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
            write!(f, ", {} {:.1} → {:.1} MiB", memory.role, mib(first), mib(last))?;
        }
        Ok(())
    }
}

/// Puts the target under load; the first thing that is wrong ends it.
pub async fn soak(target: &Target, load: &Load) -> anyhow::Result<Report> {
    let start = Instant::now();
    let known = Arc::new(Known::default());
    let watching = tokio::spawn(watch(target.processes.clone(), start + load.duration));
    let mut clients = tokio::task::JoinSet::new();
    for number in 0..load.clients {
        let door = match number % 2 {
            0 => Door::Grpc(Client::connect(target.grpc).await?),
            _ => Door::Http(target.http),
        };
        let visitor = Visitor { door, number, load: load.clone(), known: Arc::clone(&known) };
        clients.spawn(visitor.run(start + load.duration));
    }
    let mut report =
        Report { clients: load.clients, seconds: 0.0, whole: 0, broken_off: 0, tokens: 0, memory: Vec::new() };
    while let Some(ended) = clients.join_next().await {
        let visited = ended??;
        report.whole += visited.whole;
        report.broken_off += visited.broken_off;
        report.tokens += visited.tokens;
    }
    report.seconds = start.elapsed().as_secs_f64();
    report.memory = watching.await?;
    Ok(report)
}

/// Samples the processes until then.
async fn watch(processes: Vec<Process>, end: Instant) -> Vec<Memory> {
    let empty = |p: Process| Memory { role: p.role, pid: p.pid, bytes: Vec::new() };
    let mut memory: Vec<Memory> = processes.into_iter().map(empty).collect();
    let mut tick = tokio::time::interval(Duration::from_millis(200));
    while Instant::now() < end {
        tick.tick().await;
        for process in &mut memory {
            process.bytes.extend(processes::own_bytes(process.pid));
        }
    }
    memory
}

/// What is known of the answers: the longest beginning of each that anybody has seen.
#[derive(Debug, Default)]
struct Known(Mutex<BTreeMap<u64, Vec<u32>>>);

impl Known {
    fn check(&self, request: u64, ids: Vec<u32>) -> anyhow::Result<()> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let before = known.entry(request).or_default();
        let common = before.len().min(ids.len());
        let differs = (0..common).find(|&i| before[i] != ids[i]);
        ensure!(differs.is_none(), "request {request}: token {differs:?} is not the one of before"); // I1
        if ids.len() > before.len() {
            *before = ids;
        }
        Ok(())
    }
}

/// How a client asks.
#[derive(Clone, Debug)]
enum Door {
    Grpc(Client),
    Http(SocketAddr),
}

#[derive(Debug, Default)]
struct Visited {
    whole: u64,
    broken_off: u64,
    tokens: u64,
}

/// One client, asking again and again.
#[derive(Debug)]
struct Visitor {
    door: Door,
    number: u64,
    load: Load,
    known: Arc<Known>,
}

impl Visitor {
    async fn run(self, end: Instant) -> anyhow::Result<Visited> {
        let mut random = random_u64(self.load.seed, &format!("client {}", self.number));
        let mut below = move |limit: u64| random.next().unwrap_or(0) % limit.max(1);
        let mut visited = Visited::default();
        while Instant::now() < end {
            let number = below(self.load.requests);
            // Half of them find what others have left in the prefix cache; for the others everything is computed and travels.
            let request = if below(2) == 0 { self.request(number) } else { apart(self.request(number)) };
            let length = request.sampling.as_ref().and_then(|s| s.max_tokens).unwrap_or(0) as usize;
            // One in four leaves early, some before the first token.
            let leave = (below(4) == 0).then(|| below(length as u64) as usize);
            let asked = self.ask(request, leave).await;
            let ids = asked.with_context(|| format!("client {}, request {number}", self.number))?;
            visited.tokens += ids.len() as u64;
            match leave {
                Some(_) => visited.broken_off += 1,
                None => {
                    visited.whole += 1;
                    ensure!(ids.len() == length, "request {number}: {} tokens, not {length}", ids.len());
                }
            }
            self.known.check(number, ids)?;
        }
        Ok(visited)
    }

    fn request(&self, number: u64) -> v1::GenerateRequest {
        let mut random = random_u64(self.load.seed, &format!("request {number}"));
        let mut length = |most: u64| 1 + random.next().unwrap_or(0) % most.max(1);
        let (tokens, answer) = (length(self.load.prompt), length(self.load.answer));
        sampled(prompt(tokens as usize, number), answer as u32, number)
    }

    async fn ask(&self, request: v1::GenerateRequest, leave: Option<usize>) -> anyhow::Result<Vec<u32>> {
        match &self.door {
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
        "seed": sampling.seed, "cache_salt": request.cache_salt, "ignore_eos": true, "stream": true, "return_token_ids": true,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growth_is_noticed() {
        let memory = |bytes: Vec<u64>| Report {
            clients: 1,
            seconds: 1.0,
            whole: 0,
            broken_off: 0,
            tokens: 0,
            memory: vec![Memory { role: "decode".to_owned(), pid: 1, bytes }],
        };
        let mib = |n: u64| n << 20;
        memory(vec![mib(100), mib(110), mib(104)]).check_memory().unwrap();
        let error = memory(vec![mib(100), mib(120), mib(140)]).check_memory().unwrap_err().to_string();
        assert!(error.contains("decode 1 grew"), "{error}");
        memory(vec![]).check_memory().unwrap();
    }

    #[test]
    fn a_token_that_changes_is_noticed() {
        let known = Known::default();
        known.check(1, vec![5, 6]).unwrap();
        known.check(1, vec![5, 6, 7]).unwrap();
        known.check(1, vec![5]).unwrap();
        known.check(2, vec![9]).unwrap();
        assert!(known.check(1, vec![5, 6, 8]).is_err());
    }
}
