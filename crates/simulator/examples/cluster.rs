//! Simulates the whole cluster:
//!
//! ```text
//! cargo run --release -p baton-simulator --example cluster -- [SEEDS] [--first SEED] [--requests N] [--only FAULTS] [--calm] [--short]
//!     [--prefills N] [--kv-stores N] [--only-keeps]
//! ```
//!
//! Plays SEEDS seeds (1,000 by default), beginning with `--first` (0 by default), under random faults, with a thread per core. Stops
//! at the first seed that violates an invariant, looks for a smaller run that does so too, and prints its trace.
//!
//! - `--only Stall,Freeze` leaves out the other faults, `--calm` all of them.
//! - `--short` leaves out the smaller run and its trace.
//! - `--prefills` and `--kv-stores`: how many there are in each run. `--only-keeps`: prefixes move only to KV stores.
#![allow(clippy::disallowed_methods)] // It runs seeds on all cores, and says how long that took.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use baton_simulator::{Fault, Options, Summary, Violation, run, shrink};

struct Arguments {
    seeds: u64,
    first: u64,
    options: Options,
    /// Do not look for a smaller run.
    short: bool,
}

fn arguments() -> Result<Arguments, String> {
    let mut parsed = Arguments { seeds: 1000, first: 0, options: Options::default(), short: false };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut number = |name: &str| -> Result<u64, String> {
            let text = words.next().unwrap_or_default();
            text.parse().map_err(|_| format!("{name} is {text:?}; a number is expected"))
        };
        match word.as_str() {
            "--first" => parsed.first = number("--first")?,
            "--prefills" => parsed.options.sizes.prefills = Some(number("--prefills")? as u32),
            "--kv-stores" => parsed.options.sizes.stores = Some(number("--kv-stores")? as u32),
            "--only-keeps" => parsed.options.only_keeps = true,
            "--requests" => parsed.options.requests = number("--requests")? as u32,
            "--only" => parsed.options.without = all_but(&words.next().unwrap_or_default())?,
            "--calm" => parsed.options.calm = true,
            "--short" => parsed.short = true,
            seeds => parsed.seeds = seeds.parse().map_err(|_| format!("{seeds:?} is no number of seeds"))?,
        }
    }
    Ok(parsed)
}

/// The faults that are not in a list like `Stall,Freeze`.
fn all_but(names: &str) -> Result<BTreeSet<Fault>, String> {
    let mut others: BTreeSet<Fault> = Fault::ALL.into_iter().collect();
    for name in names.split(',') {
        let fault = Fault::ALL.into_iter().find(|fault| format!("{fault:?}") == name);
        let known = || Fault::ALL.map(|fault| format!("{fault:?}")).join(", ");
        others.remove(&fault.ok_or_else(|| format!("--only: {name:?} is no fault; there are {}", known()))?);
    }
    Ok(others)
}

/// Plays seeds until none are left or one fails. Returns the sum of their results, and the first seed that failed.
fn play(arguments: &Arguments) -> (Summary, Option<(u64, Violation)>) {
    let (next, end) = (AtomicU64::new(arguments.first), arguments.first + arguments.seeds);
    let (sum, failed) = (Mutex::new(Summary::default()), Mutex::new(None::<(u64, Violation)>));
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= end {
                        return;
                    }
                    match run(seed, &arguments.options) {
                        Ok(summary) => sum.lock().unwrap_or_else(PoisonError::into_inner).add(&summary),
                        Err(violation) => {
                            next.store(end, Ordering::Relaxed);
                            let mut failed = failed.lock().unwrap_or_else(PoisonError::into_inner);
                            if failed.as_ref().is_none_or(|(other, _)| seed < *other) {
                                *failed = Some((seed, violation));
                            }
                        }
                    }
                }
            });
        }
    });
    let sum = sum.into_inner().unwrap_or_else(PoisonError::into_inner);
    (sum, failed.into_inner().unwrap_or_else(PoisonError::into_inner))
}

fn main() -> Result<(), String> {
    let arguments = arguments()?;
    let start = Instant::now();
    let (sum, failed) = play(&arguments);
    if let Some((seed, violation)) = failed {
        if arguments.short {
            return Err(format!("seed {seed}: {violation}"));
        }
        let (options, found) = shrink(seed, &arguments.options, violation.clone());
        found.trace.iter().for_each(|line| println!("{line}"));
        let faults: Vec<String> =
            Fault::ALL.iter().filter(|f| !options.without.contains(f)).map(|f| format!("{f:?}")).collect();
        println!("seed {seed}, {} requests, faults {}:", options.requests, faults.join(" "));
        return Err(format!("seed {seed}: {violation}\nsmaller: {found}"));
    }
    let (real, played) = (start.elapsed().as_secs_f64(), sum.micros as f64 / 3.6e9);
    println!(
        "{} seeds, no violation; {:.0} a second, {played:.1} virtual hours in {real:.0} s",
        arguments.seeds,
        arguments.seeds as f64 / real
    );
    println!("{} requests finished, {} left, failed: {:?}", sum.finished, sum.left, sum.failed);
    println!("{} tokens; recoveries by leg: {:?}", sum.tokens, sum.recoveries);
    println!(
        "{} handoffs, {} verified, {} withdrawn, failed: {:?}",
        sum.handoffs, sum.verified, sum.withdrawn, sum.handoffs_failed
    );
    println!(
        "{} prefixes fetched, not fetched: {:?}; {} rows computed on fetched KV",
        sum.fetched, sum.fetches_failed, sum.rows_fetched
    );
    println!(
        "{} pieces kept by KV stores, not kept: {:?}; {} prefixes given by them, {} of these outlived their workers; {} tokens found",
        sum.kept, sum.keeps_failed, sum.given, sum.outlived, sum.given_tokens
    );
    println!("{} prefixes loaded from stores, {} tokens that were not in the pool", sum.stored, sum.stored_tokens);
    println!(
        "{} sessions were replaced; {} connections joined one, {} were left out; {} completions overtook writes",
        sum.replaced, sum.joined, sum.left_out, sum.overtook
    );
    println!("engines: {:?}", sum.engines);
    println!("each checker looked: {:?}", sum.looked);
    println!("faults: {:?}", sum.faults);
    Ok(())
}
