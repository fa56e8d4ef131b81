//! The names of all metrics, what they say, and the recorder behind them.
//!
//! Base units are part of the name. Labels are small enums, never request ids. Crates record with the macros of the
//! `metrics` crate and these constants. A process renders its metrics at its admin endpoint. The tables of docs/metrics.md are made from
//! the same list.

mod list;
mod table;

use std::sync::{Mutex, PoisonError};

use ::metrics::{describe_counter, describe_gauge, describe_histogram};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};

pub use list::*;
pub use table::{Kind, Metric};

use crate::error::RuntimeError;

/// Upper bounds of histogram buckets, seconds: 100 µs to 2 minutes, about three per decade.
const SECONDS: [f64; 19] = [
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
    120.0,
];

/// Renders this process's metrics. Cheap to clone.
#[derive(Clone)]
pub struct MetricsHandle(PrometheusHandle);

impl std::fmt::Debug for MetricsHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("MetricsHandle")
    }
}

impl MetricsHandle {
    /// Prometheus text format.
    pub fn render(&self) -> String {
        self.0.render()
    }

    /// Folds recorded samples into buckets. Call it every few seconds, so that memory stays bounded (I5) when nobody reads
    /// the metrics.
    pub fn upkeep(&self) {
        self.0.run_upkeep();
    }
}

static INSTALLED: Mutex<Option<MetricsHandle>> = Mutex::new(None);

/// Installs the recorder on the first call; later calls return the same handle.
///
/// # Errors
/// Something else in this process has installed a recorder.
pub fn install() -> Result<MetricsHandle, RuntimeError> {
    let mut installed = INSTALLED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(handle) = &*installed {
        return Ok(handle.clone());
    }
    let recorder = PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_seconds".to_owned()), &SECONDS)
        .map_err(|e| RuntimeError::Buckets(e.to_string()))?
        .build_recorder();
    let handle = MetricsHandle(recorder.handle());
    ::metrics::set_global_recorder(recorder).map_err(|_| RuntimeError::Recorder)?;
    describe();
    *installed = Some(handle.clone());
    Ok(handle)
}

/// Tells the recorder what each metric says.
fn describe() {
    for metric in list::ALL {
        let (unit, help) = (metric.unit(), metric.help());
        match metric.kind {
            Kind::Counter => describe_counter!(metric.name, unit, help),
            Kind::Gauge => describe_gauge!(metric.name, unit, help),
            Kind::Histogram => describe_histogram!(metric.name, unit, help),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DOCS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/metrics.md");

    #[test]
    fn the_docs_have_the_tables_of_the_code() {
        let docs = std::fs::read_to_string(DOCS).unwrap();
        let told =
            "docs/metrics.md is not what the code says; cargo test -p baton-runtime rewrite -- --ignored writes it";
        assert!(table::page(&docs) == docs, "{told}");
        let missing: Vec<_> = list::ALL.iter().filter(|metric| !docs.contains(&format!("`{}`", metric.name))).collect();
        assert!(missing.is_empty(), "docs/metrics.md lacks a section: {missing:?}");
    }

    /// Not a test: writes the tables.
    #[test]
    #[ignore = "writes docs/metrics.md"]
    fn rewrite() {
        let docs = std::fs::read_to_string(DOCS).unwrap();
        std::fs::write(DOCS, table::page(&docs)).unwrap();
    }

    #[test]
    fn help_is_plain_text() {
        let metric = |help| Metric { section: "", name: "baton_a_seconds", kind: Kind::Gauge, by: "", of: "", help };
        assert_eq!(metric("of a [store](store.md#it), not `none`; [more](x)").help(), "Of a store, not none; more");
        assert!(list::ALL.iter().all(|metric| !metric.help().contains(['[', ']', '`'])));
    }

    /// Prometheus' conventions: what is counted ends in `_total`, and base units end a name.
    #[test]
    fn names_say_what_they_count() {
        for metric in list::ALL {
            let Metric { name, kind, help, .. } = metric;
            assert!(name.starts_with("baton_") && !help.ends_with('.'), "{name}");
            assert_eq!(*kind == Kind::Counter, name.ends_with("_total"), "{name}");
            assert!(*kind != Kind::Histogram || name.ends_with("_seconds"), "{name}: buckets are those of seconds");
        }
        let mut names: Vec<_> = list::ALL.iter().map(|metric| metric.name).collect();
        names.sort_unstable();
        assert!(names.windows(2).all(|pair| pair[0] != pair[1]), "a name is there twice");
    }

    #[test]
    fn metrics_are_rendered_with_help_and_buckets() {
        let handle = install().unwrap();
        ::metrics::histogram!(TIME_TO_FIRST_TOKEN).record(0.2);
        ::metrics::counter!(REJECTED, "reason" => "no_blocks").increment(3);
        let text = install().unwrap().render();
        for want in [
            "# HELP baton_time_to_first_token_seconds Request received until its first token left",
            "baton_time_to_first_token_seconds_bucket{le=\"0.25\"} 1",
            "baton_time_to_first_token_seconds_bucket{le=\"0.1\"} 0",
            "baton_rejected_total{reason=\"no_blocks\"} 3",
        ] {
            assert!(text.contains(want), "{want} is missing in\n{text}");
        }
        handle.upkeep();
    }
}
