//! What is seen of processes and pools while clients come and go.

use std::fmt;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use baton_cluster::{Member, Role};
use baton_runtime::metrics as names;

use crate::cluster::http::Metrics;
use crate::cluster::processes::{self, Process};
use crate::cluster::status;

const TICK: Duration = Duration::from_millis(200);

/// One process's own memory over time.
#[derive(Clone, PartialEq, Debug)]
pub struct Memory {
    role: String,
    pid: u32,
    bytes: Vec<u64>,
}

impl Memory {
    /// The most of the first and of the last third.
    fn thirds(&self) -> (u64, u64) {
        let third = self.bytes.len().div_ceil(3);
        let most = |part: &[u64]| part.iter().copied().max().unwrap_or(0);
        (most(&self.bytes[..third]), most(&self.bytes[self.bytes.len() - third..]))
    }

    /// Ok when it has not grown: the most in the last third is little more than the most in the first.
    pub fn check(&self) -> anyhow::Result<()> {
        let (first, last) = self.thirds();
        let most = first + first / 8 + (16 << 20);
        ensure!(last <= most, "{} {} grew from {first} to {last} bytes", self.role, self.pid);
        Ok(())
    }
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (first, last) = self.thirds();
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        write!(f, "{} {:.1} → {:.1} MiB", self.role, mib(first), mib(last))
    }
}

/// Samples the processes until then.
pub async fn memory(processes: Vec<Process>, end: Instant) -> Vec<Memory> {
    let empty = |p: Process| Memory { role: p.role, pid: p.pid, bytes: Vec::new() };
    let mut memory: Vec<Memory> = processes.into_iter().map(empty).collect();
    let mut tick = tokio::time::interval(TICK);
    while Instant::now() < end {
        tick.tick().await;
        for process in &mut memory {
            process.bytes.extend(processes::own_bytes(process.pid));
        }
    }
    memory
}

/// One worker's pool over time, and how often it was too small.
#[derive(Clone, PartialEq, Debug)]
pub struct Pool {
    /// Whose.
    pub role: Role,
    /// Its blocks.
    pub blocks: u32,
    /// The part of the blocks that sequences, peers or fences own, from 0 to 1.
    owned: Vec<f64>,
    /// Samples in which sequences waited.
    waited: usize,
    /// Sequences whose blocks were taken, so far.
    pub preemptions: u64,
    /// Tokens whose KV came back from the worker's store.
    pub loaded: u64,
}

impl Pool {
    /// The mean of each tenth of the time.
    fn tenths(&self) -> Vec<f64> {
        let mean = |part: &[f64]| part.iter().sum::<f64>() / part.len() as f64;
        self.owned.chunks(self.owned.len().div_ceil(10).max(1)).map(mean).collect()
    }

    /// The mean of the part that is owned.
    pub fn mean(&self) -> f64 {
        self.owned.iter().sum::<f64>() / self.owned.len().max(1) as f64
    }

    /// Ok when it was as good as full all the time, so that sequences had to make room for others.
    pub fn check_full(&self) -> anyhow::Result<()> {
        ensure!(self.mean() > 0.7 && self.preemptions > 0, "the pool was not under pressure: {self}");
        Ok(())
    }

    fn read(&mut self, metrics: &Metrics) {
        let count = |name, labels| metrics.sum(name, labels) as u64;
        self.preemptions = count(names::PREEMPTIONS, "");
        self.loaded = count(names::LOADED_TOKENS, "");
    }
}

impl fmt::Display for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Pool { role, blocks, owned, waited, preemptions, loaded } = self;
        let percent = |part: &f64| format!("{:.0}", part * 100.0);
        let full = owned.iter().filter(|part| **part >= 0.9).count();
        let samples = owned.len().max(1) as f64;
        let share = |of: usize| of as f64 / samples * 100.0;
        let tenths: Vec<String> = self.tenths().iter().map(percent).collect();
        let most = owned.iter().copied().fold(0.0, f64::max);
        write!(
            f,
            "{} pool of {blocks} blocks: {}% owned by tenths of the time, {}% at most, 90% or more in {:.0}% of {} samples, \
             sequences waiting in {:.0}%; {preemptions} preemptions, {loaded} tokens loaded from the store",
            role.as_str(),
            tenths.join(" "),
            percent(&most),
            share(full),
            owned.len(),
            share(*waited),
        )
    }
}

/// Samples the workers' pools until then.
pub async fn pools(members: Vec<Member>, end: Instant) -> anyhow::Result<Vec<Pool>> {
    let empty = |m: &Member| Pool { role: m.role, blocks: 0, owned: Vec::new(), waited: 0, preemptions: 0, loaded: 0 };
    let mut pools: Vec<Pool> = members.iter().map(empty).collect();
    let mut tick = tokio::time::interval(TICK);
    while Instant::now() < end {
        tick.tick().await;
        for (member, pool) in members.iter().zip(&mut pools) {
            let now = status(member).await?;
            let blocks = now.blocks.unwrap_or_default();
            pool.blocks = blocks.total;
            pool.owned.push(f64::from(blocks.total - blocks.free - blocks.cached) / f64::from(blocks.total.max(1)));
            pool.waited += usize::from(now.waiting > 0);
        }
    }
    for (member, pool) in members.into_iter().zip(&mut pools) {
        let admin = member.admin.strip_prefix("http://").context("an admin address")?.parse()?;
        pool.read(&tokio::task::spawn_blocking(move || Metrics::of(admin)).await??);
    }
    Ok(pools)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growth_is_noticed() {
        let memory = |bytes: &[u64]| Memory {
            role: "decode".to_owned(),
            pid: 1,
            bytes: bytes.iter().map(|n| n << 20).collect(),
        };
        memory(&[100, 110, 104]).check().unwrap();
        let error = memory(&[100, 120, 140]).check().unwrap_err().to_string();
        assert!(error.contains("decode 1 grew"), "{error}");
    }

    #[test]
    fn a_pool_is_shown_over_time() {
        let owned = (0..40).map(|i| f64::from(i) / 40.0).collect();
        let pool = Pool { role: Role::Decode, blocks: 9, owned, waited: 10, preemptions: 3, loaded: 20 };
        let text = pool.to_string();
        for part in ["4 14 24", "94% owned", "in 10% of 40", "waiting in 25%", "3 preemptions, 20 tokens"] {
            assert!(text.contains(part), "{text}");
        }
    }
}
