//! A run in words: sizes, faults at a time or after an event, and the expected outcome.
//!
//! One statement per line; `#` begins a comment:
//!
//! ```text
//! seed 7
//! routers 1
//! prefill 1
//! decode 2
//! kv-stores 1                    # none unless it is said
//! requests 1
//! every 200ms                    # longest time between two arrivals
//! lease 2s
//! after verified kill it         # the worker at which it happened
//! at 900ms partition prefill 0 decode 1 2s
//! expect finished 1
//! expect some verified
//! ```
//!
//! - Events: `lent`, `verified`, `lease-expired` (of a reservation) and `token` at a decode worker, `first-token` at a prefill worker,
//!   `telling` and `told` there (of a try to tell a decode worker that a session with it has ended, and of its success), `drain-cut` at a worker that drains and leaves before it
//!   is idle, `member-expired` at the registry; at a router, `member-kept` (the registry's list lacks a worker, and the router goes on
//!   using it) and `finished-in-outage` (of a request, while the registry is away).
//!   A number after the event picks a later occurrence: `after token 3`.
//! - Events of KV stores: `kept` at a worker from which one has taken tokens, `given` at a worker that has taken some from one, `outlived` there
//!   if the processes that computed them are gone, `found` at a worker that computes on them, `found-again` at a store that loads what the one
//!   before it had on its disk.
//! - `expect some EVENT` fails a run in which it did not happen, so that a scenario does not pass without what it is about.
//!   `expect some EVENT 3`: at least three times.
//! - Actions: `kill X`, `drain X`, `freeze X TIME`, `cut X`, `partition X X TIME`, `registry-down TIME`, `registry-emptied TIME`. A time
//!   after `drain X` is how long it may take. `cut X` ends all connections for KV of a worker.
//! - X is `it`, `registry`, `router N`, `prefill N`, `decode N` or `kv-store N`.

use std::str::{FromStr, SplitWhitespace};

use crate::events::Process;
use crate::lifecycle::DRAIN;
use crate::stream::Micros;
use crate::world::World;
use crate::{Faults, Options, Summary, Violation, run};

/// Events that a rule may wait for.
const MILESTONES: [&str; 17] = [
    "lent",
    "verified",
    "lease-expired",
    "first-token",
    "token",
    "telling",
    "told",
    "member-expired",
    "member-kept",
    "finished-in-outage",
    "drain-cut",
    "kept",
    "given",
    "outlived",
    "found",
    "found-again",
    "streamed",
];

/// The process that a rule acts on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Target {
    It,
    Process(Process),
}

/// What a rule does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Deed {
    Kill(Target),
    Drain(Target, Micros),
    Freeze(Target, Micros),
    Cut(Target),
    Partition(Target, Target, Micros),
    Registry { away: Micros, emptied: bool },
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum When {
    At(Micros),
    After { milestone: &'static str, times: u64 },
}

/// One fault of a scenario.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rule {
    when: When,
    deed: Deed,
}

/// A run and its expected outcome.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Scenario {
    seed: u64,
    options: Options,
    finished: Option<u64>,
    failed: Option<u64>,
    /// Events, each with how often it must have happened.
    some: Vec<(&'static str, u64)>,
}

/// A line that cannot be read.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("line {line}: {problem}")]
pub struct ScenarioError {
    line: usize,
    problem: String,
}

impl Scenario {
    /// Plays the run.
    ///
    /// # Errors
    /// The invariant that was violated, or the expectation that was not met.
    pub fn play(&self) -> Result<Summary, Violation> {
        let summary = run(self.seed, &self.options)?;
        let rules = self.options.rules.len() as u64;
        if summary.rules < rules {
            let what = format!("{} of {rules} rules struck: what the others wait for did not happen", summary.rules);
            return Err(Violation { invariant: "expectation", at_micros: summary.micros, what, trace: Vec::new() });
        }
        let failed: u64 = summary.failed.values().sum();
        for (what, wanted, got) in [("finished", self.finished, summary.finished), ("failed", self.failed, failed)] {
            if let Some(wanted) = wanted.filter(|wanted| *wanted != got) {
                let what = format!("{got} requests {what}, expected are {wanted}");
                return Err(Violation { invariant: "expectation", at_micros: summary.micros, what, trace: Vec::new() });
            }
        }
        let got = |name| summary.milestones.get(name).copied().unwrap_or(0);
        if let Some((name, times)) = self.some.iter().find(|(name, times)| got(name) < *times) {
            let what = format!("{name} happened {} times, expected are {times}", got(name));
            return Err(Violation { invariant: "expectation", at_micros: summary.micros, what, trace: Vec::new() });
        }
        Ok(summary)
    }
}

impl FromStr for Scenario {
    type Err = ScenarioError;

    fn from_str(text: &str) -> Result<Scenario, ScenarioError> {
        let options = Options { faults: Some(Faults::none()), rules: Vec::new(), trace: true, ..Options::default() };
        let mut scenario = Scenario { seed: 0, options, finished: None, failed: None, some: Vec::new() };
        for (at, line) in text.lines().enumerate() {
            let said = line.split('#').next().unwrap_or_default();
            let mut words = said.split_whitespace();
            let Some(first) = words.next() else { continue };
            let read = scenario.read(first, &mut words).and_then(|()| match words.next() {
                Some(more) => Err(format!("{more:?} is too much")),
                None => Ok(()),
            });
            read.map_err(|problem| ScenarioError { line: at + 1, problem })?;
        }
        Ok(scenario)
    }
}

impl Scenario {
    fn read(&mut self, first: &str, words: &mut SplitWhitespace<'_>) -> Result<(), String> {
        let sizes = &mut self.options.sizes;
        match first {
            "seed" => self.seed = number(words)?,
            "routers" => sizes.routers = Some(number(words)? as u32),
            "prefill" => sizes.prefills = Some(number(words)? as u32),
            "decode" => sizes.decodes = Some(number(words)? as u32),
            "kv-stores" => sizes.stores = Some(number(words)? as u32),
            "requests" => self.options.requests = number(words)? as u32,
            "lease" => self.options.lease = Some(time(words)?),
            "every" => self.options.every = Some(time(words)?),
            "at" => {
                let when = When::At(time(words)?);
                self.options.rules.push(Rule { when, deed: deed(words)? });
            }
            "after" => {
                let (milestone, times) = occurrence(words)?;
                let when = When::After { milestone, times };
                self.options.rules.push(Rule { when, deed: deed(words)? });
            }
            "expect" => match words.next().unwrap_or_default() {
                "finished" => self.finished = Some(number(words)?),
                "failed" => self.failed = Some(number(words)?),
                "some" => self.some.push(occurrence(words)?),
                other => return Err(format!("{other:?} is none of finished, failed, some")),
            },
            other => return Err(format!("{other:?} is no word of a scenario")),
        }
        Ok(())
    }
}

/// An event, and a number if one follows.
fn occurrence(words: &mut SplitWhitespace<'_>) -> Result<(&'static str, u64), String> {
    let word = words.next().unwrap_or_default();
    let known = MILESTONES.into_iter().find(|known| *known == word);
    let known = known.ok_or_else(|| format!("{word:?} is none of {}", MILESTONES.join(", ")))?;
    let times = words.clone().next().and_then(|word| word.parse().ok());
    if times.is_some() {
        words.next();
    }
    Ok((known, times.unwrap_or(1)))
}

fn number(words: &mut SplitWhitespace<'_>) -> Result<u64, String> {
    let word = words.next().unwrap_or_default();
    word.parse().map_err(|_| format!("{word:?} is no number"))
}

/// `20ms` or `3s`, as microseconds.
fn time(words: &mut SplitWhitespace<'_>) -> Result<Micros, String> {
    let word = words.next().unwrap_or_default();
    let parsed = match word.strip_suffix("ms") {
        Some(number) => number.parse().map(|number: Micros| number * 1000),
        None => word.strip_suffix('s').unwrap_or("?").parse().map(|number: Micros| number * 1_000_000),
    };
    parsed.map_err(|_| format!("{word:?} is no time; 20ms and 3s are"))
}

fn target(words: &mut SplitWhitespace<'_>) -> Result<Target, String> {
    let word = words.next().unwrap_or_default();
    let place = |words: &mut SplitWhitespace<'_>| number(words).map(|place| place as usize);
    Ok(match word {
        "it" => Target::It,
        "router" => Target::Process(Process::Router(place(words)?)),
        "prefill" => Target::Process(Process::Prefill(place(words)?)),
        "decode" => Target::Process(Process::Decode(place(words)?)),
        "kv-store" => Target::Process(Process::KvStore(place(words)?)),
        "registry" => Target::Process(Process::Registry),
        other => {
            return Err(format!("{other:?} is no process: it, registry, router N, prefill N, decode N, kv-store N"));
        }
    })
}

fn deed(words: &mut SplitWhitespace<'_>) -> Result<Deed, String> {
    Ok(match words.next().unwrap_or_default() {
        "kill" => Deed::Kill(target(words)?),
        "drain" => Deed::Drain(target(words)?, if words.clone().next().is_some() { time(words)? } else { DRAIN }),
        "freeze" => Deed::Freeze(target(words)?, time(words)?),
        "cut" => Deed::Cut(target(words)?),
        "partition" => Deed::Partition(target(words)?, target(words)?, time(words)?),
        "registry-down" => Deed::Registry { away: time(words)?, emptied: false },
        "registry-emptied" => Deed::Registry { away: time(words)?, emptied: true },
        other => return Err(format!("{other:?} is nothing that can be done")),
    })
}

impl World {
    /// The rules that strike at a given time: their times and numbers.
    pub(crate) fn rule_times(&self) -> Vec<(Micros, usize)> {
        let at = |(number, rule): (usize, &Rule)| match rule.when {
            When::At(at) => Some((at, number)),
            When::After { .. } => None,
        };
        self.options.rules.iter().enumerate().filter_map(at).collect()
    }

    /// Counts an event, and plans the rules that wait for it.
    pub(crate) fn milestone(&mut self, name: &'static str, it: Process) {
        let passed = self.passed.entry(name).or_default();
        *passed += 1;
        let (now, passed) = (self.now, *passed);
        for (number, rule) in self.options.rules.iter().enumerate() {
            if rule.when == (When::After { milestone: name, times: passed }) {
                // As an event of its own, not in the middle of the current one.
                self.events.plan(now, crate::events::Event::Rule { number, it: Some(it) });
            }
        }
    }

    /// Carries out a rule.
    pub(crate) fn obey(&mut self, number: usize, it: Option<Process>) -> Result<(), Violation> {
        let Some(rule) = self.options.rules.get(number).copied() else { return Ok(()) };
        self.summary.rules += 1;
        self.note(|| format!("a rule strikes: {:?}", rule.deed));
        let whom = |target| match target {
            Target::It => it.unwrap_or(Process::Registry),
            Target::Process(process) => process,
        };
        match rule.deed {
            Deed::Kill(target) => self.kill(whom(target), true),
            Deed::Drain(target, patience) => self.drain(whom(target), patience),
            Deed::Freeze(target, time) => self.freeze(whom(target), self.now + time),
            Deed::Cut(target) => {
                let process = whom(target);
                self.cut_lines(|c| [c.from, c.to].contains(&process), false);
            }
            Deed::Partition(a, b, time) => self.partition(whom(a), whom(b), self.now + time),
            Deed::Registry { away, emptied } => self.lose_registry(self.now + away, emptied),
        }
        Ok(())
    }
}
