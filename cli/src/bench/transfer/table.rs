//! The output of `baton bench transfer`: Markdown tables with the conditions of the measurement, or the same as JSON.

use std::collections::BTreeMap;
use std::fmt;

use baton_transfer::TransportKind;
use serde_json::{Value, json};

use super::report::{BenchOptions, BenchReport, Samples, Way};

/// A report with the options it was measured under.
pub(super) struct Table<'a> {
    pub options: &'a BenchOptions,
    pub report: &'a BenchReport,
    /// Address of the receiving host, if it is a different one.
    pub to: Option<&'a str>,
}

impl Table<'_> {
    /// The whole report as JSON, in base units.
    pub(super) fn json(&self) -> Value {
        let spread =
            |s: &Samples| json!({"median": s.quantile(0.5), "lowest": s.quantile(0.0), "highest": s.quantile(1.0)});
        let named = |way: Way| match way {
            Way::Handoff { transport, connections, verified } => {
                json!({"way": "handoff", "transport": transport.as_str(), "connections": connections, "verified": verified})
            }
            Way::Memcpy => json!({"way": "memcpy"}),
            Way::PlainTcp => json!({"way": "plain-tcp"}),
        };
        let with = |mut row: Value, more: Value| {
            if let (Some(row), Value::Object(more)) = (row.as_object_mut(), more) {
                row.extend(more);
            }
            row
        };
        let bandwidth = self.report.bandwidth.iter().map(|row| {
            let figures = json!({"blocks": row.blocks, "bytes": row.bytes, "bytes_per_second": spread(&row.rates)});
            with(named(row.way), figures)
        });
        let latency = self.report.latency.iter().map(|row| {
            let seconds = json!({"median": row.seconds.quantile(0.5), "p99": row.seconds.quantile(0.99)});
            with(named(row.way), json!({"bytes": row.bytes, "seconds": seconds, "count": row.seconds.count()}))
        });
        json!({
            "here": self.report.here,
            "there": self.report.there,
            "shape": self.shape(),
            "scattered": self.options.scattered.is_some(),
            "rounds": self.options.rounds,
            "bandwidth": bandwidth.collect::<Vec<_>>(),
            "latency": latency.collect::<Vec<_>>(),
            "handoffs": self.report.handoffs.iter().map(|(kind, count)| (kind.as_str(), *count)).collect::<BTreeMap<_, _>>(),
        })
    }

    fn shape(&self) -> String {
        let layout = &self.options.geometry.layout;
        let group = &layout.groups[0];
        let (layers, dtype) = (group.layers.len(), format!("{:?}", layout.dtype).to_lowercase());
        let (heads, dim, slots) = (group.kv_heads, group.head_dim, layout.block_size);
        format!("{layers} layers, {heads} KV heads × {dim}, {dtype}, {slots} tokens a block")
    }

    /// The baseline that a row is compared with (memcpy for shm, plain TCP for the rest) and its median bytes per second for the same
    /// number of blocks.
    fn beside(&self, way: Way, blocks: u32) -> Option<(Way, f64)> {
        let base = match way {
            Way::Handoff { transport: TransportKind::Shm, .. } => Way::Memcpy,
            Way::Handoff { .. } => Way::PlainTcp,
            Way::Memcpy | Way::PlainTcp => return None,
        };
        let row = self.report.bandwidth.iter().find(|row| row.way == base && row.blocks == blocks)?;
        Some((base, row.rates.quantile(0.5)))
    }
}

fn name(way: Way) -> String {
    match way {
        Way::Memcpy => "memcpy".to_owned(),
        Way::PlainTcp => "plain TCP".to_owned(),
        Way::Handoff { transport, connections, verified } => {
            let several = if connections > 1 { format!(" ×{connections}") } else { String::new() };
            let unverified = if verified { "" } else { ", unverified" };
            format!("{}{several} handoff{unverified}", transport.as_str())
        }
    }
}

impl fmt::Display for Table<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (here, there) = (&self.report.here, &self.report.there);
        let lie =
            if self.options.scattered.is_some() { "blocks in random order" } else { "blocks one after the other" };
        writeln!(f, "KV of {}; {lie}. baton {}.\n", self.shape(), env!("CARGO_PKG_VERSION"))?;
        match self.to {
            Some(address) => writeln!(f, "From {here} to {address}, {there}.\n")?,
            None => writeln!(f, "Between two processes on {here}.\n")?,
        }
        self.bandwidth(f)?;
        if !self.report.latency.is_empty() {
            self.latency(f)?;
        }
        let counted = self.report.handoffs.iter().map(|(kind, count)| format!("{count} over {kind}"));
        writeln!(f, "\nHandoffs in all, warm-up included: {}.", counted.collect::<Vec<_>>().join(", "))
    }
}

impl Table<'_> {
    fn bandwidth(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "| {:<27} | blocks |       MB | GB/s (lowest to highest) | beside            |", "bandwidth")?;
        writeln!(f, "| {:-<27} | -----: | -------: | -----------------------: | :---------------- |", ":")?;
        for row in &self.report.bandwidth {
            let [low, median, high] = [0.0, 0.5, 1.0].map(|share| row.rates.quantile(share));
            // Below 0.1 GB/s, four digits keep at least two significant ones.
            let digits = if median < 1e8 { 4 } else { 2 };
            let rate = format!("{:.digits$} ({:.digits$} to {:.digits$})", median / 1e9, low / 1e9, high / 1e9);
            let beside = self.beside(row.way, row.blocks);
            let beside = beside.map_or(String::new(), |(way, base)| format!("{:.2} of {}", median / base, name(way)));
            let (name, megabytes) = (name(row.way), row.bytes as f64 / 1e6);
            writeln!(f, "| {name:<27} | {:>6} | {megabytes:>8.1} | {rate:>24} | {beside:<17} |", row.blocks)?;
        }
        writeln!(
            f,
            "\nMedians of {} rounds in turn, after one that warms up; a handoff is timed from opening to",
            self.options.rounds
        )?;
        writeln!(f, "its verified answer, digests of both sides included; memcpy and plain TCP check nothing.")
    }

    fn latency(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let microseconds = |seconds: f64| seconds * 1e6;
        writeln!(f, "\n| {:<27} |       KB | median µs |    p99 µs |", "latency of one block")?;
        writeln!(f, "| {:-<27} | -------: | --------: | --------: |", ":")?;
        for row in &self.report.latency {
            let [median, p99] = [0.5, 0.99].map(|share| microseconds(row.seconds.quantile(share)));
            let (name, kilobytes) = (name(row.way), row.bytes as f64 / 1e3);
            writeln!(f, "| {name:<27} | {kilobytes:>8.1} | {median:>9.0} | {p99:>9.0} |")?;
        }
        let count = self.report.latency.first().map_or(0, |row| row.seconds.count());
        writeln!(f, "\n{count} in turn by each way. A handoff makes two round trips, for access and for data and its")?;
        writeln!(f, "verification; plain TCP makes one.")
    }
}
