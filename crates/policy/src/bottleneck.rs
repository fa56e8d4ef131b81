//! What bounds a cluster now: prefill, transfer, decode or memory. In one sentence with its reason, for people who look.
//!
//! Each of the four has a pressure: how long it makes requests wait, as a share of what their SLO allows, by what workers have to do now or by
//! what was measured lately, whichever is more. Memory has the share of blocks in use, and more than 1 where sequences wait for blocks. The
//! highest pressure is the bottleneck.

use std::time::Duration;

use baton_latency::Backlog;
use baton_types::Class;

use crate::Slo;

/// Below this pressure nothing is worth a word.
const IDLE: f64 = 0.02;

/// One worker, as far as the question goes.
#[derive(Clone, Copy, Debug)]
pub struct WorkerLoad {
    /// It is a prefill worker; otherwise a decode worker.
    pub prefill: bool,
    /// What it has to do, as it said last.
    pub backlog: Backlog,
    /// Blocks of its pool.
    pub blocks: u32,
}

/// What requests are promised, in seconds.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Targets {
    /// Time to the first token.
    pub first_token: f64,
    /// Time between two tokens.
    pub token: f64,
}

impl Targets {
    /// What is aimed at unless told otherwise.
    pub const USUAL: Targets = Targets { first_token: 1.0, token: 0.1 };

    /// What a request is measured by: what it was promised, and for what it was not, the usual. Batch work only by what it asked for; None: by nothing.
    pub fn of(slo: &Slo, class: Class) -> Option<Targets> {
        let Slo { first_token, token, .. } = slo;
        let asked = first_token.is_some() || token.is_some();
        let seconds = |limit: &Option<Duration>, usual: f64| match limit {
            Some(limit) => limit.as_secs_f64(),
            None if class.is_batch() => f64::INFINITY,
            None => usual,
        };
        let targets = Targets {
            first_token: seconds(first_token, Targets::USUAL.first_token),
            token: seconds(token, Targets::USUAL.token),
        };
        (asked || !class.is_batch()).then_some(targets)
    }
}

/// What was measured lately, in seconds and in any order.
#[derive(Clone, Copy, Debug, Default)]
pub struct Lately<'a> {
    /// Times to the first token.
    pub first_tokens: &'a [f64],
    /// Times between two tokens.
    pub tokens: &'a [f64],
    /// Of handoffs: from the first token until the KV was verified.
    pub tails: &'a [f64],
}

/// What bounds a cluster.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Bound {
    /// Nothing: hardly anything is to be done.
    Nothing,
    /// Prompts wait for the prompts before them.
    Prefill,
    /// KV arrives long after its prompt was computed.
    Transfer,
    /// Tokens of answers are far apart.
    Decode,
    /// Sequences wait for KV blocks.
    Memory,
}

baton_types::words!(Bound {
    Nothing = "nothing",
    Prefill = "prefill",
    Transfer = "transfer",
    Decode = "decode",
    Memory = "memory"
});

/// What bounds a cluster, and why.
#[derive(Clone, PartialEq, Debug)]
pub struct Bottleneck {
    /// What it is.
    pub by: Bound,
    /// Requests miss their SLO because of it.
    pub over: bool,
    /// One sentence.
    pub sentence: String,
    /// The pressures of prefill, transfer, decode and memory.
    pub pressures: [(Bound, f64); 4],
}

/// What bounds these workers.
pub fn bottleneck(workers: &[WorkerLoad], lately: Lately<'_>, targets: Targets) -> Bottleneck {
    let memory = memory(workers);
    // What was measured before the last request ended says nothing of now.
    let lately = if workers.iter().all(is_idle) { Lately::default() } else { lately };
    // What was measured while sequences waited for blocks says nothing of prefill and decode.
    let Lately { first_tokens, tokens, tails } = lately;
    let (first_tokens, tokens) = if memory.pressure >= 1.0 { (&[][..], &[][..]) } else { (first_tokens, tokens) };
    let signs =
        [prefill(workers, first_tokens, targets), transfer(tails, targets), decode(workers, tokens, targets), memory];
    let pressures = signs.each_ref().map(|sign| (sign.of, sign.pressure));
    let [first, others @ ..] = signs;
    // Of equals the earlier one: what a request meets first.
    let most = others.into_iter().fold(first, |most, sign| if sign.pressure > most.pressure { sign } else { most });
    let over = most.pressure >= 1.0;
    let (by, sentence) = match most.of {
        _ if workers.is_empty() => (Bound::Nothing, "Nothing is known of any worker.".to_owned()),
        _ if most.pressure < IDLE => {
            (Bound::Nothing, "Nothing bounds the cluster: hardly anything is to be done.".to_owned())
        }
        by if over => (by, format!("{} bounds the cluster: {}.", name(by), most.reason)),
        by => (by, format!("Nothing is over its limit; {by} is closest to it: {}.", most.reason)),
    };
    Bottleneck { by, over, sentence, pressures }
}

fn is_idle(worker: &WorkerLoad) -> bool {
    let Backlog { work, coming, .. } = worker.backlog;
    work.tokens == 0 && work.rows == 0 && coming.rows == 0
}

/// How much of something there is.
struct Sign {
    of: Bound,
    pressure: f64,
    reason: String,
}

fn name(bound: Bound) -> String {
    let word = bound.as_str();
    word[..1].to_uppercase() + &word[1..]
}

/// How long a prompt that came now would wait for those before it, or how long first tokens took.
fn prefill(workers: &[WorkerLoad], first_tokens: &[f64], targets: Targets) -> Sign {
    let split = workers.iter().any(|worker| worker.prefill);
    let computing = || workers.iter().filter(|worker| worker.prefill == split);
    let wait = computing().map(|worker| worker.backlog.queue()).fold(f64::INFINITY, f64::min);
    let wait = if wait.is_finite() { wait } else { 0.0 };
    let tokens: u64 = computing().map(|worker| worker.backlog.work.tokens).sum();
    let least = match computing().count() {
        0 | 1 => String::new(),
        workers => format!(" on the least busy of {workers} workers"),
    };
    let took = median(first_tokens);
    let what = match took > wait {
        true => format!("first tokens came after {}, the median of {} lately", time(took), first_tokens.len()),
        false => {
            format!("{tokens} prompt tokens are to be computed, so a prompt that comes now waits {}{least}", time(wait))
        }
    };
    let reason = format!("{what}; {} to the first token are allowed", time(targets.first_token));
    Sign { of: Bound::Prefill, pressure: share(wait.max(took), targets.first_token), reason }
}

/// How long the KV of a prompt arrives after its first token. The second token waits for it.
fn transfer(tails: &[f64], targets: Targets) -> Sign {
    let median = median(tails);
    let reason = format!(
        "KV arrives {} after the first token, the median of {} handoffs; {} are allowed",
        time(median),
        tails.len(),
        time(targets.first_token)
    );
    Sign { of: Bound::Transfer, pressure: share(median, targets.first_token), reason }
}

/// How far apart the tokens of an answer are: in the mean over answers by what steps cost, or as measured.
fn decode(workers: &[WorkerLoad], tokens: &[f64], targets: Targets) -> Sign {
    let busy = || workers.iter().filter(|worker| !worker.prefill).map(|worker| worker.backlog);
    let rows: u64 = busy().map(|backlog| backlog.work.rows).sum();
    let step = |backlog: Backlog| backlog.cost.step(&baton_latency::StepWork { tokens: 0, pairs: 0, ..backlog.work });
    let all: f64 = busy().map(|backlog| backlog.work.rows as f64 * step(backlog)).sum();
    let mean = if rows > 0 { all / rows as f64 } else { 0.0 };
    let answers = if rows == 1 { "one answer is".to_owned() } else { format!("{rows} answers are") };
    let took = median(tokens);
    let what = match took > mean {
        true => format!("{answers} being given, and a token came each {}, the median lately", time(took)),
        false => format!("{answers} being given, with a token each {}, as predicted of their steps", time(mean)),
    };
    let reason = format!("{what}; {} are allowed", time(targets.token));
    Sign { of: Bound::Decode, pressure: share(mean.max(took), targets.token), reason }
}

/// How many blocks are in use, where there are most free ones.
fn memory(workers: &[WorkerLoad]) -> Sign {
    let pressure = |worker: &WorkerLoad| {
        let (blocks, room) = (f64::from(worker.blocks.max(1)), worker.backlog.room as f64);
        (1.0 - room / blocks).max(0.0)
    };
    let decode = workers.iter().filter(|worker| !worker.prefill && worker.blocks > 0);
    let least = decode.min_by(|one, other| pressure(one).total_cmp(&pressure(other)));
    let Some(worker) = least else { return Sign { of: Bound::Memory, pressure: 0.0, reason: String::new() } };
    let (blocks, room) = (worker.blocks, worker.backlog.room);
    let reason = match room {
        ..0 => {
            format!(
                "sequences wait for {} KV blocks more than the {blocks} that the emptiest decode worker has",
                room.unsigned_abs()
            )
        }
        _ => format!("{room} of {blocks} KV blocks are free or cached on the emptiest decode worker"),
    };
    Sign { of: Bound::Memory, pressure: pressure(worker), reason }
}

/// By the nearest rank, as percentiles are told elsewhere.
fn median(times: &[f64]) -> f64 {
    let mut times = times.to_vec();
    let middle = times.len().saturating_sub(1) / 2;
    if times.is_empty() { 0.0 } else { *times.select_nth_unstable_by(middle, f64::total_cmp).1 }
}

fn share(time: f64, allowed: f64) -> f64 {
    if allowed > 0.0 { (time / allowed).min(1e6) } else { 0.0 }
}

/// A time for people.
fn time(seconds: f64) -> String {
    match seconds {
        s if s >= 9.95 => format!("{s:.0} s"),
        s if s >= 0.9995 => format!("{s:.1} s"),
        s if s >= 0.00995 => format!("{:.0} ms", s * 1e3),
        s => format!("{:.1} ms", s * 1e3),
    }
}

#[cfg(test)]
mod tests {
    use baton_latency::{StepCost, StepWork};

    use super::*;

    const TARGETS: Targets = Targets { first_token: 1.0, token: 0.1 };
    const COST: StepCost = StepCost { base: 10e-3, row: 1e-3, context: 0.0, chunk: 0.0, token: 1e-3, pair: 0.0 };

    fn worker(prefill: bool, work: StepWork, room: i64) -> WorkerLoad {
        let backlog = Backlog { work, room, cost: COST, step_tokens: 512, ..Backlog::default() };
        WorkerLoad { prefill, backlog, blocks: 1000 }
    }

    fn prompts(tokens: u64) -> WorkerLoad {
        worker(true, StepWork { tokens, ..StepWork::default() }, 1000)
    }

    fn answers(rows: u64, room: i64) -> WorkerLoad {
        worker(false, StepWork { rows, ..StepWork::default() }, room)
    }

    fn said(workers: &[WorkerLoad], tails: &[f64]) -> (Bound, bool, String) {
        let Bottleneck { by, over, sentence, .. } = bottleneck(workers, Lately { tails, ..Lately::default() }, TARGETS);
        (by, over, sentence)
    }

    #[test]
    fn a_request_is_measured_by_what_it_was_promised() {
        let of = |first: Option<u64>, token: Option<u64>, class| {
            let slo = Slo {
                first_token: first.map(Duration::from_millis),
                token: token.map(Duration::from_millis),
                ..Slo::default()
            };
            Targets::of(&slo, class).map(|targets| (targets.first_token, targets.token))
        };
        assert_eq!(of(None, None, Class::Interactive), Some((1.0, 0.1)));
        assert_eq!(of(Some(300), None, Class::Interactive), Some((0.3, 0.1)));
        assert_eq!(of(None, None, Class::Batch), None);
        assert_eq!(of(None, Some(50), Class::Batch), Some((f64::INFINITY, 0.05)));
    }

    #[test]
    fn where_nothing_is_to_be_done_nothing_bounds() {
        let idle = [prompts(0), answers(0, 1000)];
        assert_eq!(said(&idle, &[]).0, Bound::Nothing);
        assert_eq!(said(&[], &[]).2, "Nothing is known of any worker.");
        assert_eq!(said(&idle, &[9.0]).0, Bound::Nothing, "that was before");
    }

    #[test]
    fn prompts_bound_when_they_wait_also_on_the_least_busy_worker() {
        let (by, over, why) = said(&[prompts(9000), prompts(2000), answers(5, 900)], &[]);
        assert_eq!((by, over), (Bound::Prefill, true));
        let want = "Prefill bounds the cluster: 11000 prompt tokens are to be computed, so a prompt that comes now waits 2.0 s on the \
                    least busy of 2 workers; 1.0 s to the first token are allowed.";
        assert_eq!(why, want);
        assert_ne!(said(&[prompts(9000), prompts(0), answers(5, 900)], &[]).0, Bound::Prefill, "one is free");
        let whole = worker(false, StepWork { tokens: 3000, ..StepWork::default() }, 900);
        assert_eq!(said(&[whole], &[]).0, Bound::Prefill, "decode workers compute prompts where there are no others");
    }

    #[test]
    fn answers_bound_when_their_tokens_are_far_apart() {
        let (by, over, why) = said(&[prompts(0), answers(100, 500), answers(0, 500)], &[]);
        assert_eq!((by, over), (Bound::Decode, true));
        assert!(why.contains("100 answers are being given, with a token each 110 ms"), "{why}");
        let (by, over, why) = said(&[prompts(0), answers(70, 500)], &[]);
        assert_eq!((by, over), (Bound::Decode, false));
        assert!(why.starts_with("Nothing is over its limit; decode is closest to it: 70 answers"), "{why}");
    }

    #[test]
    fn what_was_measured_counts_where_it_is_more() {
        let said = |workers: &[WorkerLoad], first_tokens: &[f64], tokens: &[f64]| {
            let told = bottleneck(workers, Lately { first_tokens, tokens, tails: &[] }, TARGETS);
            (told.by, told.over, told.sentence)
        };
        let idle = [prompts(0), answers(2, 900)];
        let (by, over, why) = said(&idle, &[1.9, 2.1, 0.1], &[0.05]);
        assert_eq!((by, over), (Bound::Prefill, true));
        assert!(
            why.contains("first tokens came after 1.9 s, the median of 3 lately; 1.0 s to the first token"),
            "{why}"
        );
        assert!(said(&idle, &[3.0, 1.5], &[]).2.contains("after 1.5 s"), "of two the lower");
        let (by, _, why) = said(&idle, &[0.1], &[0.2]);
        assert_eq!(by, Bound::Decode);
        assert!(why.contains("a token came each 200 ms, the median lately"), "{why}");
        assert_eq!(said(&[prompts(0), answers(2, -1)], &[9.0], &[9.0]).0, Bound::Memory, "they waited for blocks");
    }

    #[test]
    fn memory_bounds_when_no_decode_worker_has_blocks() {
        let (by, over, why) = said(&[prompts(100), answers(5, -40), answers(5, -90)], &[]);
        assert_eq!((by, over), (Bound::Memory, true));
        assert!(why.contains("wait for 40 KV blocks more than the 1000"), "{why}");
        assert!(!said(&[prompts(100), answers(5, -40), answers(5, 900)], &[]).1, "one has");
        assert_eq!(said(&[prompts(0), answers(5, 0)], &[]).2.split(':').next(), Some("Memory bounds the cluster"));
    }

    #[test]
    fn transfer_bounds_when_kv_comes_long_after_the_first_token() {
        let (by, over, why) = said(&[prompts(0), answers(1, 900)], &[9.0, 0.1, 1.5]);
        assert_eq!((by, over), (Bound::Transfer, true));
        assert!(why.contains("KV arrives 1.5 s after the first token, the median of 3 handoffs"), "{why}");
    }

    /// A worker may say anything.
    #[test]
    fn no_number_is_too_strange() {
        let odd = Backlog { room: i64::MIN, cost: StepCost { token: 1e300, ..COST }, ..prompts(u64::MAX).backlog };
        let nan = &[f64::NAN][..];
        let lately = Lately { first_tokens: nan, tokens: nan, tails: nan };
        let told = bottleneck(&[WorkerLoad { prefill: false, backlog: odd, blocks: 0 }], lately, TARGETS);
        assert!(told.over && told.pressures.iter().all(|(_, pressure)| !pressure.is_infinite()));
    }
}
