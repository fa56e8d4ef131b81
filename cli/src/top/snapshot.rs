//! The cluster at one moment, as the feed of the live page tells it. What a router of another version does not say stays empty.

use std::fmt;

use baton_cluster::Role;
use serde::Deserialize;

/// Most characters of a text (I5).
const MOST: usize = 512;

/// A text of others. Characters that a terminal would obey instead of showing them, or that hide what stands there, are `?` in it.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Default, Deserialize)]
#[serde(from = "String")]
pub struct Text(String);

impl From<String> for Text {
    fn from(text: String) -> Text {
        let shown = |c: char| if is_shown(c) { c } else { '?' };
        Text(text.chars().take(MOST).map(shown).collect())
    }
}

impl Text {
    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Its first characters.
    pub fn first(&self, characters: usize) -> &str {
        self.0.char_indices().nth(characters).map_or(&self.0, |(at, _)| &self.0[..at])
    }
}

impl fmt::Display for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

/// Whether a terminal shows this character, and nothing else happens: no control character, none that only changes how others are set.
pub fn is_shown(c: char) -> bool {
    let format = matches!(
        c,
        '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}'
        | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}'
    );
    !c.is_control() && !format
}

/// One event of the feed.
#[derive(Clone, PartialEq, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Snapshot {
    pub router: Router,
    pub workers: Vec<Worker>,
    /// Answers in progress.
    pub running: u64,
    pub stats: Stats,
    pub bound: Bound,
    /// The latest ones, the newest first.
    pub handoffs: Vec<Handoff>,
}

/// The router whose feed it is.
#[derive(Clone, PartialEq, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Router {
    pub version: Text,
    pub models: Vec<Text>,
    pub uptime_s: u64,
    /// The registry is away, so its view of the cluster is old.
    pub stale: bool,
    /// Why it takes no requests; `None` when it does.
    pub not_ready: Option<Text>,
}

/// A worker.
#[derive(Clone, PartialEq, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Worker {
    pub id: Text,
    pub role: Text,
    pub model: Text,
    /// The URL of its gRPC server.
    pub address: Text,
    /// serving, draining, left out, silent or lost.
    pub state: Text,
    /// Tokens of prompts that are to be computed; `None` where it says nothing.
    pub queued_tokens: Option<u64>,
    /// Sequences that get a token in each step.
    pub rows: Option<u64>,
    /// Sequences that it works on, and those that wait for that.
    pub running: Option<u64>,
    pub waiting: Option<u64>,
    /// Steps of its engine since it started.
    pub steps: Option<u64>,
    pub blocks: Option<Blocks>,
}

/// The blocks of a pool by state.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Blocks {
    pub total: u64,
    pub used: u64,
    pub cached: u64,
    pub lent: u64,
    pub quarantined: u64,
}

/// How requests fared lately.
#[derive(Clone, PartialEq, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Stats {
    /// Time to the first token, and between two tokens, in seconds.
    pub ttft_s: Percentiles,
    pub itl_s: Percentiles,
    pub tokens_per_s: Option<f64>,
    /// Requests that ended, and of them those that met their SLO.
    pub requests_per_s: Option<f64>,
    pub goodput_per_s: Option<f64>,
    /// Requests that failed in that time.
    pub failed: u64,
}

/// `None` where nothing was measured.
#[derive(Clone, Copy, PartialEq, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Percentiles {
    pub p50: Option<f64>,
    pub p90: Option<f64>,
    pub p99: Option<f64>,
}

/// What bounds the cluster.
#[derive(Clone, PartialEq, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Bound {
    /// Requests miss their SLO because of it.
    pub over: bool,
    pub sentence: Text,
}

/// The KV of one prompt, on its way from a prefill to a decode worker.
#[derive(Clone, PartialEq, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Handoff {
    pub request: Text,
    pub from: Option<Text>,
    pub to: Option<Text>,
    pub transport: Text,
    pub bytes: u64,
    pub seconds: Option<f64>,
    pub age_ms: u64,
}

impl Worker {
    /// Its role, if this version knows it.
    pub fn role(&self) -> Option<Role> {
        [Role::Prefill, Role::Decode, Role::KvStore].into_iter().find(|role| role.as_str() == self.role.as_str())
    }

    /// Whether it stays: it is alive, as far as is known, and nobody has told it to go.
    pub fn stays(&self) -> bool {
        !matches!(self.state.as_str(), "draining" | "lost")
    }

    /// The share of its blocks that nobody else can have now; `None` where it says nothing.
    pub fn in_use(&self) -> Option<f64> {
        let Blocks { total, used, lent, quarantined, .. } = self.blocks.filter(|blocks| blocks.total > 0)?;
        Some((used + lent + quarantined) as f64 / total as f64)
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// What a router said of one prefill and two decode workers, one of which is lost.
    pub const EVENT: &str = r#"{
        "router": {"version": "0.1.0", "models": ["random:tiny"], "uptime_s": 125, "stale": false, "revision": 7, "not_ready": null,
                   "slo": {"ttft_s": 1.0, "itl_s": 0.1}},
        "workers": [
            {"id": "waaaaaaaaaaaaaaa1", "role": "prefill", "model": "random:tiny", "address": "http://127.0.0.1:7001", "state": "serving",
             "ejected": false, "lost": false, "in_flight": 2, "blocks_total": 1000, "queued_tokens": 12345, "queue_s": 0.7, "rows": 0,
             "coming": 0, "room": 900, "running": 1, "waiting": 3, "steps": 40,
             "blocks": {"total": 1000, "free": 700, "used": 100, "cached": 200, "lent": 0, "quarantined": 0}},
            {"id": "wbbbbbbbbbbbbbbb2", "role": "decode", "model": "random:tiny", "address": "http://127.0.0.1:7002", "state": "serving",
             "queued_tokens": 0, "queue_s": null, "rows": 5, "running": 5, "waiting": 0, "steps": 1000,
             "blocks": {"total": 1000, "free": 100, "used": 600, "cached": 200, "lent": 80, "quarantined": 20}},
            {"id": "wccccccccccccccc3", "role": "decode", "model": "random:tiny", "address": "http://127.0.0.1:7003", "state": "lost"}
        ],
        "links": [],
        "running": 6,
        "stats": {"window_s": 60.0, "ttft_s": {"p50": 0.0123, "p90": 0.0201, "p99": 1.5, "n": 90},
                  "itl_s": {"p50": 0.00045, "p90": 0.0099, "p99": null, "n": 0},
                  "tokens_per_s": 123.4, "requests_per_s": 1.5, "goodput_per_s": 1.25, "ended": 90, "good": 75, "failed": 2},
        "bound": {"by": "prefill", "over": true, "pressures": {"prefill": 1.2},
                  "sentence": "Prefill bounds the cluster: 12345 prompt tokens are to be computed, so a prompt that comes now waits 1.2 s; 1.0 s to the first token are allowed."},
        "requests": [],
        "handoffs": [
            {"request": "cmpl-0123456789abcdef", "from": "waaaaaaaaaaaaaaa1", "to": "wbbbbbbbbbbbbbbb2", "transport": "shm", "bytes": 1572864,
             "seconds": 0.0031, "at_us": 5, "age_ms": 3200},
            {"request": "cmpl-2", "from": null, "to": null, "transport": "tcp", "bytes": 512, "seconds": 0.0, "at_us": 5, "age_ms": 61000}
        ],
        "of a later version": [1]
    }"#;

    pub fn snapshot() -> Snapshot {
        serde_json::from_str(EVENT).unwrap()
    }

    #[test]
    fn an_event_is_read_and_what_is_missing_stays_empty() {
        let told = snapshot();
        let [prefill, decode, lost] = &told.workers[..] else { panic!("{told:?}") };
        assert_eq!((prefill.role(), decode.role()), (Some(Role::Prefill), Some(Role::Decode)));
        assert_eq!((decode.in_use(), lost.in_use(), lost.rows), (Some(0.7), None, None));
        assert!(decode.stays() && !lost.stays());
        assert_eq!((told.stats.itl_s.p50, told.stats.itl_s.p99), (Some(0.00045), None));
        assert_eq!(told.handoffs[1].from, None);
        let nothing: Snapshot = serde_json::from_str("{}").unwrap();
        assert_eq!(nothing, Snapshot::default());
    }

    #[test]
    fn texts_of_others_do_nothing_to_the_terminal() {
        let hostile = r#""a\u001b]0;owned\u0007\r\n\u009b2J\u202eb\u200b\u007fä日""#;
        let text: Text = serde_json::from_str(hostile).unwrap();
        assert_eq!(text.as_str(), "a?]0;owned????2J?b??ä日");
        assert_eq!((text.first(2), text.first(99)), ("a?", text.as_str()));
        assert_eq!(Text::from("x".repeat(MOST + 1)).as_str().len(), MOST);
    }
}
