//! Simulated handoffs: `cargo run --release -p baton-simulator --example handoffs -- SEEDS [HANDOFFS] [FIRST] [calm]`.
//!
//! Plays HANDOFFS (102) requests under random faults for each of SEEDS seeds from FIRST (0) on; stops at the first that
//! violates an invariant and says how to play it again. `calm` leaves the faults out. A release is held to 1,000 seeds: some
//! requests never find room, and 100,000 handoffs are left.

use std::time::Instant;

use baton_simulator::{Options, Summary, run};

fn number(at: usize, otherwise: u64) -> Result<u64, String> {
    let Some(text) = std::env::args().nth(at) else { return Ok(otherwise) };
    text.parse().map_err(|_| format!("argument {at} is {text:?}; a number is expected: SEEDS [HANDOFFS] [FIRST]"))
}

fn main() -> Result<(), String> {
    let (seeds, handoffs, first) = (number(1, 100)?, number(2, 102)?, number(3, 0)?);
    let calm = std::env::args().nth(4).is_some_and(|word| word == "calm");
    let handoffs_a_seed = u32::try_from(handoffs).map_err(|e| e.to_string())?;
    let options = Options { handoffs: handoffs_a_seed, calm, ..Options::default() };
    let (mut sum, start) = (Summary::default(), Instant::now());
    for seed in first..first + seeds {
        match run(seed, &options) {
            Ok(summary) => sum.add(&summary),
            Err(violation) => {
                let again = "cargo run --release -p baton-simulator --example handoffs --";
                return Err(format!("seed {seed}: {violation}\nagain: {again} 1 {handoffs} {seed}"));
            }
        }
    }
    println!("{} handoffs from {seeds} seeds, no violation", sum.handoffs);
    println!("{} verified, {} withdrawn, failed: {:?}", sum.verified, sum.withdrawn, sum.failed);
    let Summary { joined, left_out, overtook, .. } = sum;
    println!("{joined} connections joined a session, {left_out} were left out; {overtook} completions overtook writes");
    println!("faults: {:?}", sum.faults);
    let (real, played) = (start.elapsed().as_secs_f64(), sum.micros as f64 / 1e6);
    println!("{} events, {played:.0} s of virtual time in {real:.1} s", sum.events);
    Ok(())
}
