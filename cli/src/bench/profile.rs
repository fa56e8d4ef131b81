//! The profile of `baton bench engine`, as a table and as JSON lines: the time of each operation beside this machine's ceilings.
//!
//! [`baton_kernels::Profiled`] times the kernels, this module the sampler. The rest of the measured time is the engine's planning
//! and the benchmark itself.

use std::time::{Duration, Instant};

use baton_engine::{Batch, ModelRunner, RunError};
use baton_kernels::{Backend, Ceilings, Operation, Profile, SharedProfile, Tally};
use baton_model::Decoder;
use baton_types::TokenOut;
use serde_json::json;

/// Collects profiles of one model.
pub struct Profiler {
    profile: SharedProfile,
    ceilings: Ceilings,
    json: bool,
}

/// A [`ModelRunner`] that runs a decoder and times its sampler.
struct TimedSampler<B: Backend> {
    decoder: Decoder<B>,
    profile: SharedProfile,
    chosen: Vec<TokenOut>,
}

/// A row of the table.
struct Row {
    operation: String,
    share: f64,
    calls: u64,
    /// Bytes moved per second.
    moved: f64,
    /// Multiplications and additions per second; 0 when they are not counted.
    computed: f64,
    /// Fraction of the ceiling that bounds the operation, and the ceiling's name.
    reached: Option<(f64, &'static str)>,
}

/// Prints this machine's ceilings.
pub fn print_ceilings(ceilings: &Ceilings, json: bool) {
    let each = [
        ("ceiling_read", ceilings.read, "GB/s"),
        ("ceiling_f32", ceilings.f32, "GFLOP/s"),
        ("ceiling_int8", ceilings.int8, "GOP/s"),
    ];
    for (metric, value, unit) in each {
        let value = value / 1e9;
        if json {
            println!("{}", json!({"metric": metric, "value": value, "unit": unit}));
        } else {
            println!("{metric:<14} {value:>10.1} {unit}");
        }
    }
}

impl Profiler {
    /// A profiler for runs on this machine, whose ceilings are given.
    pub fn new(ceilings: Ceilings, json: bool) -> Profiler {
        Profiler { profile: SharedProfile::default(), ceilings, json }
    }

    /// The profile that the backend adds its timings to.
    pub fn shared(&self) -> SharedProfile {
        self.profile.clone()
    }

    /// A runner that adds the sampler's time to the profile.
    pub fn runner<B: Backend>(&self, decoder: Decoder<B>) -> impl ModelRunner + use<B> {
        TimedSampler { decoder, profile: self.shared(), chosen: Vec::new() }
    }

    /// Returns the profile since the last call and resets it.
    pub fn take(&self) -> Profile {
        self.profile.take()
    }

    /// The least seconds that this machine needs for the counted operations, one after the other.
    pub fn least_seconds(&self, profile: &Profile) -> f64 {
        profile.tallies().map(|(operation, tally)| least(operation, tally, &self.ceilings).0).sum()
    }

    /// Prints the profile of a measurement that took `seconds`.
    pub fn print(&self, metric: &str, profile: &Profile, seconds: f64) {
        let rows = rows(profile, &self.ceilings, seconds);
        if !self.json {
            println!(
                "  {:<30} {:>6} {:>8} {:>8} {:>8}  of its ceiling",
                "operation", "share", "calls", "GB/s", "GOP/s"
            );
        }
        for row in rows {
            let Row { operation, share, calls, moved, computed, reached } = row;
            let (moved, computed) = (moved / 1e9, computed / 1e9);
            if self.json {
                let (fraction, ceiling) = reached.unzip();
                println!(
                    "{}",
                    json!({"profile": metric, "operation": operation, "share": share, "calls": calls, "gb_per_s": moved,
                        "gop_per_s": computed, "of_ceiling": fraction, "ceiling": ceiling})
                );
                continue;
            }
            let number = |x: f64| if x > 0.0 { format!("{x:.1}") } else { String::new() };
            let reached = reached.map_or(String::new(), |(part, of)| format!("{:>4.0}% {of}", part * 100.0));
            let (moved, computed) = (number(moved), number(computed));
            println!("  {operation:<30} {:>5.1}% {calls:>8} {moved:>8} {computed:>8}  {reached}", share * 100.0);
        }
    }
}

/// Rows of the table, longest time first, and the rest of the time as the last one.
fn rows(profile: &Profile, ceilings: &Ceilings, seconds: f64) -> Vec<Row> {
    let mut rows: Vec<Row> = profile.tallies().map(|(o, tally)| row(o, tally, ceilings, seconds)).collect();
    rows.sort_by(|a, b| b.share.total_cmp(&a.share));
    let left = 1.0 - rows.iter().map(|row| row.share).sum::<f64>();
    rows.push(Row { operation: "other".to_owned(), share: left, calls: 0, moved: 0.0, computed: 0.0, reached: None });
    rows
}

fn row(operation: Operation, tally: Tally, ceilings: &Ceilings, seconds: f64) -> Row {
    let time = tally.time.max(Duration::from_nanos(1)).as_secs_f64();
    let (moved, computed) = (tally.bytes as f64 / time, tally.arithmetic as f64 / time);
    let (least, bound) = least(operation, tally, ceilings);
    let reached = (tally.bytes > 0).then_some((least / time, bound));
    let share = tally.time.as_secs_f64() / seconds;
    Row { operation: operation.to_string(), share, calls: tally.calls, moved, computed, reached }
}

/// The least seconds that an operation's calls can take, and the ceiling that bounds them.
fn least(operation: Operation, tally: Tally, ceilings: &Ceilings) -> (f64, &'static str) {
    let quantised = match operation {
        // The matrices of one product are either all quantised or all not.
        Operation::Matmul { parts, .. } => parts.iter().flatten().all(|(dtype, _)| dtype.block_elements() > 1),
        _ => false,
    };
    let (most, name) = if quantised { (ceilings.int8, "int8") } else { (ceilings.f32, "f32") };
    let (memory, arithmetic) = (tally.bytes as f64 / ceilings.read, tally.arithmetic as f64 / most);
    if memory >= arithmetic { (memory, "read") } else { (arithmetic, name) }
}

impl<B: Backend> ModelRunner for TimedSampler<B> {
    fn launch(&mut self, batch: &Batch<'_>, on_layer: &mut dyn FnMut(u32)) -> Result<(), RunError> {
        let TimedSampler { decoder, profile, chosen } = self;
        chosen.clear();
        let mut samples = batch.rows.iter().filter_map(|row| row.sample.as_ref());
        decoder.run_logits(batch, on_layer, &mut |sampler, _, logits| {
            if let Some(sample) = samples.next() {
                let started = Instant::now();
                chosen.push(sampler.sample(logits, sample));
                let (time, bytes) = (started.elapsed(), 4 * logits.len() as u64);
                profile.add(Operation::Sampling, Tally { calls: 1, time, bytes, arithmetic: 0 });
            }
        })
    }

    fn collect(&mut self, _batch: &Batch<'_>, out: &mut Vec<TokenOut>) -> Result<(), RunError> {
        out.append(&mut self.chosen);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use baton_types::WeightDtype;

    use super::*;

    #[test]
    fn shares_add_up_and_the_nearer_ceiling_counts() {
        let shared = SharedProfile::default();
        let tally =
            |millis, bytes, arithmetic| Tally { calls: 1, time: Duration::from_millis(millis), bytes, arithmetic };
        let product =
            Operation::Matmul { parts: [Some((WeightDtype::Q4_1, 8)), Some((WeightDtype::Q6K, 4)), None], cols: 32 };
        shared.add(Operation::Norm, tally(100, 1_000_000_000, 0));
        shared.add(product, tally(500, 1_000_000_000, 50_000_000_000));
        let ceilings = Ceilings { read: 20e9, f32: 100e9, int8: 200e9 };
        let rows = rows(&shared.take(), &ceilings, 1.0);
        let shares: Vec<_> = rows.iter().map(|r| (r.operation.as_str(), (r.share * 100.0).round())).collect();
        assert_eq!(shares, [("matmul Q4_1 8 + Q6_K 4 x 32", 50.0), ("norm", 10.0), ("other", 40.0)]);
        assert_eq!(rows[0].reached, Some((0.5, "int8")));
        assert_eq!(rows[1].reached, Some((0.5, "read")));
    }
}
