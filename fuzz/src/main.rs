//! Runs a target on mutations of its corpus: `cargo run --profile fuzz -p baton-fuzz -- TARGET|all SECONDS [SEED]`.
//!
//! - A panic, or an input that takes longer than 20 s, ends the run. The input is left in `fuzz/findings/TARGET` for the test to
//!   replay.
//! - `keep` in place of the seconds runs for 10 seconds, and writes the smallest input of each kind of outcome to the corpus.
//! - Inputs are told apart by outcome, not by the code they reach.
//! - With `BATON_FUZZ_TRACE=FILE` each input is written to FILE before it is tried. An input that ends the process, for example by a
//!   stack overflow, is left there.

use std::collections::BTreeMap;
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use baton_fuzz::{MOST, Mutator, TARGETS, Target};

/// Longest time that an input may take.
const PATIENCE: Duration = Duration::from_secs(20);
/// Most inputs kept in memory.
const KEPT: usize = 20_000;
/// Most inputs of a target in the corpus.
const CORPUS: usize = 32;

fn folder(kind: &str, target: &Target) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(kind).join(target.name)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let usage = "TARGET|all SECONDS|keep [SEED]";
    let (name, time) = (arguments.next().ok_or(usage)?, arguments.next().ok_or(usage)?);
    let seed = arguments.next().map_or(Ok(1), |seed| seed.parse())?;
    let keep = time == "keep";
    let seconds: u64 = if keep { 10 } else { time.parse()? };
    let chosen: Vec<Target> = TARGETS.into_iter().filter(|t| name == "all" || t.name == name).collect();
    if chosen.is_empty() {
        return Err(format!("no target {name}; there are {:?}", TARGETS.map(|t| t.name)).into());
    }
    for target in chosen {
        let found = fuzz(&target, Duration::from_secs(seconds), seed)?;
        if keep {
            std::fs::create_dir_all(folder("corpus", &target))?;
            let mut kept: Vec<Vec<u8>> = (target.seeds)();
            let mut by_size: Vec<Vec<u8>> = found.into_values().collect();
            by_size.sort_by_key(Vec::len);
            let room = CORPUS.saturating_sub(kept.len());
            let step = (by_size.len() / room.max(1)).max(1);
            kept.extend(by_size.into_iter().step_by(step).take(room));
            for (at, input) in kept.iter().enumerate() {
                std::fs::write(folder("corpus", &target).join(format!("{at:02}")), input)?;
            }
        }
    }
    Ok(())
}

/// The input being tried, and since when.
type Tried = Arc<Mutex<(Instant, Vec<u8>)>>;

fn note(tried: &Tried, input: &[u8]) {
    let mut now = tried.lock().unwrap_or_else(PoisonError::into_inner);
    now.0 = Instant::now();
    now.1.clear();
    now.1.extend_from_slice(input);
}

/// Starts a thread that ends the process when an input takes too long. The thread ends when the run is over.
fn watch(target: &Target, tried: Weak<Mutex<(Instant, Vec<u8>)>>) {
    let folder = folder("findings", target);
    std::thread::spawn(move || {
        while let Some(tried) = tried.upgrade() {
            std::thread::sleep(Duration::from_secs(1));
            let now = tried.lock().unwrap_or_else(PoisonError::into_inner);
            if now.0.elapsed() > PATIENCE {
                let file = folder.join("slow");
                let written = std::fs::create_dir_all(&folder).and_then(|()| std::fs::write(&file, &now.1));
                eprintln!("an input takes longer than {PATIENCE:?}: {} ({written:?})", file.display());
                std::process::exit(1);
            }
        }
    });
}

/// Kinds of outcomes, with the smallest input of each.
fn fuzz(target: &Target, time: Duration, seed: u64) -> Result<BTreeMap<u64, Vec<u8>>, Box<dyn std::error::Error>> {
    let (start, mut mutator, mut tried) = (Instant::now(), Mutator::new(seed), 0u64);
    let mut inputs = (target.seeds)();
    for entry in std::fs::read_dir(folder("corpus", target)).into_iter().flatten() {
        inputs.push(std::fs::read(entry?.path())?);
    }
    let mut outcomes: BTreeMap<u64, Vec<u8>> = BTreeMap::new();
    let under_way: Tried = Arc::new(Mutex::new((start, Vec::new())));
    let trace = std::env::var_os("BATON_FUZZ_TRACE");
    watch(target, Arc::downgrade(&under_way));
    while start.elapsed() < time {
        for _ in 0..256 {
            let (one, other) = (mutator.below(inputs.len()), mutator.below(inputs.len()));
            let input = mutator.mutate(&inputs[one], &inputs[other], MOST);
            let run = target.run;
            note(&under_way, &input);
            if let Some(file) = &trace {
                std::fs::write(file, &input)?;
            }
            let Ok(outcome) = catch_unwind(|| run(&input)) else {
                std::fs::create_dir_all(folder("findings", target))?;
                let file = folder("findings", target).join(format!("{seed}-{tried}"));
                std::fs::write(&file, &input)?;
                return Err(format!("{} panics on {}", target.name, file.display()).into());
            };
            tried += 1;
            match outcomes.get_mut(&outcome) {
                Some(smallest) if smallest.len() <= input.len() => {}
                Some(smallest) => *smallest = input,
                // I5
                None if inputs.len() < KEPT => {
                    outcomes.insert(outcome, input.clone());
                    inputs.push(input);
                }
                None => {}
            }
        }
    }
    println!("{}: {tried} inputs, {} kinds of outcomes kept, no finding", target.name, outcomes.len());
    Ok(outcomes)
}
