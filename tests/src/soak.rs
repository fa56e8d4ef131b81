//! Many streaming clients at once that come, go and break off, all by a seed, and what must hold meanwhile: no error, no
//! token lost, doubled or changed, no process that grows.
//!
//! There is a limited number of different requests, so each is asked again and again, in other company and over both front
//! doors, and must be answered alike every time (I1, I4). Under pressure, with a pool that is too small for them, as they are
//! answered alone.

mod door;
mod watch;

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use baton_cluster::Member;
use baton_proto::v1;

use crate::cluster::client::{Client, apart, prompt, sampled};
use crate::cluster::processes::Process;
use crate::tiny::random_u64;
use door::Door;
pub use watch::{Memory, Pool};

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
    /// The pool is meant to be too small: nobody leaves early, each request has a priority by chance, and all that is answered
    /// must be what the same request is answered alone, before the others come.
    pub pressure: bool,
}

impl Load {
    fn request(&self, number: u64) -> v1::GenerateRequest {
        let mut random = random_u64(self.seed, &format!("request {number}"));
        let mut length = |most: u64| 1 + random.next().unwrap_or(0) % most.max(1);
        let (tokens, answer) = (length(self.prompt), length(self.answer));
        sampled(prompt(tokens as usize, number), answer as u32, number)
    }
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
    /// Workers whose pools are watched.
    pub workers: Vec<Member>,
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
    /// The watched processes.
    pub memory: Vec<Memory>,
    /// The watched pools.
    pub pools: Vec<Pool>,
}

impl Report {
    /// Ok when no process has grown.
    pub fn check_memory(&self) -> anyhow::Result<()> {
        self.memory.iter().try_for_each(Memory::check)
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
        self.memory.iter().try_for_each(|memory| write!(f, ", {memory}"))?;
        self.pools.iter().try_for_each(|pool| write!(f, "\n{pool}"))
    }
}

/// Puts the target under load; the first thing that is wrong ends it.
pub async fn soak(target: &Target, load: &Load) -> anyhow::Result<Report> {
    let known = Arc::new(Known::default());
    if load.pressure {
        known.ask_alone(&Client::connect(target.grpc).await?, load).await?;
    }
    let start = Instant::now();
    let watching = tokio::spawn(watch::memory(target.processes.clone(), start + load.duration));
    let watching_pools = tokio::spawn(watch::pools(target.workers.clone(), start + load.duration));
    let mut clients = tokio::task::JoinSet::new();
    for number in 0..load.clients {
        let door = match number % 2 {
            0 => Door::Grpc(Client::connect(target.grpc).await?),
            _ => Door::Http(target.http),
        };
        let visitor = Visitor { door, number, load: load.clone(), known: Arc::clone(&known) };
        clients.spawn(visitor.run(start + load.duration));
    }
    let (memory, pools) = (Vec::new(), Vec::new());
    let mut report = Report { clients: load.clients, seconds: 0.0, whole: 0, broken_off: 0, tokens: 0, memory, pools };
    while let Some(ended) = clients.join_next().await {
        let visited = ended??;
        report.whole += visited.whole;
        report.broken_off += visited.broken_off;
        report.tokens += visited.tokens;
    }
    report.seconds = start.elapsed().as_secs_f64();
    report.memory = watching.await?;
    report.pools = watching_pools.await??;
    Ok(report)
}

/// What is known of the answers: the longest beginning of each that anybody has seen.
#[derive(Debug, Default)]
struct Known(Mutex<BTreeMap<u64, Vec<u32>>>);

impl Known {
    /// Asks each request while nobody else asks anything.
    async fn ask_alone(&self, client: &Client, load: &Load) -> anyhow::Result<()> {
        for number in 0..load.requests {
            self.check(number, client.ask(apart(load.request(number))).await?.ids)?;
        }
        Ok(())
    }

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
            let request = self.load.request(number);
            let mut request = if below(2) == 0 { request } else { apart(request) };
            if self.load.pressure {
                request.priority = below(256) as i32 - 128;
            }
            let length = request.sampling.as_ref().and_then(|s| s.max_tokens).unwrap_or(0) as usize;
            // One in four leaves early, some before the first token.
            let leave = (!self.load.pressure && below(4) == 0).then(|| below(length as u64) as usize);
            let asked = self.door.ask(request, leave).await;
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
}

#[cfg(test)]
mod tests {
    use super::*;

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
