//! Measures a router alone: what it adds to a request, and what it costs. Its workers compute nothing, and answer at a set pace.
//!
//! ```text
//! front_door workers --registry http://127.0.0.1:8002 --model NAME [--pairs 2] [PACE]    prefill and decode workers, over gRPC
//! front_door backend --listen 127.0.0.1:9001 [PACE]                                      a worker over HTTP, for other routers
//! front_door relay --listen 127.0.0.1:9000 --to 127.0.0.1:9001,127.0.0.1:9002                     copies bytes, and looks at none
//! front_door load --url http://127.0.0.1:8000 --model NAME --rate 1000 --seconds 10 [--prompt 1000] [--tokens 64]
//!     [--text true | --shared 0.5] [--count 10000] [--patience 300] [--grpc kept | new]
//! ```
//!
//! PACE is `--first-ms 20 --step-ms 10 --burst 1`: when the first token comes, how long a step takes, and how many tokens of a request are
//! ready together. `bench/router` runs all four.
//!
//! A load ends after `--seconds`, or when it has begun `--count` requests. An answer that takes longer than `--patience`, in seconds, has failed.
//! With `--grpc` the URL is the one of Baton's gRPC API: all requests go over one connection that is kept, or each over a new one.
//!
//! The load is open: requests are sent at times that are fixed in advance, and latency counts from those times. So a router that falls
//! behind cannot hide it by slowing the load down.
#![allow(clippy::disallowed_methods, clippy::unwrap_used)] // A program for people who measure: it reads the clock and panics when set up wrong.

mod backend;
mod grpc;
mod load;
mod pace;
mod relay;
mod workers;

use std::collections::BTreeMap;
use std::str::FromStr;
use std::time::Duration;

/// The words after the first, as `--name value` pairs.
pub struct Arguments(BTreeMap<String, String>);

impl Arguments {
    fn read(words: impl Iterator<Item = String>) -> Arguments {
        let words: Vec<String> = words.collect();
        let pair = |pair: &[String]| match pair {
            [name, value] if name.starts_with("--") => (name[2..].to_owned(), value.clone()),
            other => panic!("{other:?} is not --name value"),
        };
        Arguments(words.chunks(2).map(pair).collect())
    }

    /// A value, or the default.
    pub fn or<T: FromStr>(&self, name: &str, default: T) -> T {
        let value = self.0.get(name);
        value.map_or(default, |value| value.parse().unwrap_or_else(|_| panic!("--{name} cannot be {value:?}")))
    }

    /// A value that must be given.
    pub fn must(&self, name: &str) -> &str {
        self.0.get(name).unwrap_or_else(|| panic!("--{name} is missing"))
    }

    fn pace(&self) -> pace::Pace {
        let milliseconds = |name, default: f64| Duration::from_secs_f64(self.or(name, default) / 1e3);
        pace::Pace {
            first: milliseconds("first-ms", 20.0),
            step: milliseconds("step-ms", 10.0),
            burst: self.or("burst", 1u32).max(1),
        }
    }
}

fn main() {
    let mut words = std::env::args().skip(1);
    let what = words.next().unwrap_or_default();
    let arguments = Arguments::read(words);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        match what.as_str() {
            "workers" => workers::serve(&arguments).await,
            "backend" => backend::serve(&arguments).await,
            "relay" => relay::serve(&arguments).await,
            "load" => load::run(&arguments).await,
            other => panic!("{other:?} is none of workers, backend, relay, load"),
        }
    });
}
