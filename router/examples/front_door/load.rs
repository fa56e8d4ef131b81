//! Sends requests at times that are fixed in advance, and reports how late their tokens come.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::LocalSet;
use tokio::time::{Instant, sleep_until, timeout_at};

use super::Arguments;
use super::backend::number;
use super::grpc::Grpc;

/// Prompts of token ids that differ; requests take them in turn. Prompts of words never repeat.
const PROMPTS: u64 = 64;
/// Of these, prompts of words are made. Each is a token of its own in most vocabularies.
const WORDS: [&str; 64] = [
    "the", "of", "and", "to", "in", "a", "is", "that", "for", "it", "was", "on", "with", "as", "be", "at", "by",
    "this", "had", "not", "are", "but", "from", "or", "have", "an", "they", "which", "one", "you", "were", "all",
    "her", "she", "there", "would", "their", "we", "him", "been", "has", "when", "who", "will", "no", "more", "if",
    "out", "so", "up", "said", "what", "its", "about", "than", "into", "them", "can", "only", "other", "time", "new",
    "some", "could",
];

/// What the prompts are.
#[derive(Clone, Copy)]
enum Prompts {
    /// Token ids.
    Ids,
    /// A text of about as many bytes as the ids take.
    Digits,
    /// Words; this share of them, from the beginning, is the same in all prompts.
    Words {
        /// Between 0 and 1.
        shared: f64,
    },
}

/// What the requests share.
pub struct Load {
    pub model: String,
    host: String,
    /// How requests go, if not over HTTP.
    grpc: Option<Grpc>,
    prompts: Prompts,
    /// Tokens of a prompt.
    prompt: u32,
    /// Makes the prompts of words differ from those of other loads.
    salt: u64,
    requests: Vec<Vec<u8>>,
    /// Tokens of an answer.
    pub tokens: u32,
    /// After this long an answer that has not ended has failed.
    patience: Duration,
    /// Tokens that came, also of answers that failed.
    pub came: Cell<u64>,
    /// Connections that wait for a request.
    idle: RefCell<Vec<TcpStream>>,
    /// Of each request; or why it failed.
    results: RefCell<Vec<Result<Times, String>>>,
}

/// Times of a request, seconds.
#[derive(Clone, Copy)]
pub struct Times {
    /// From when it was due to its first token.
    pub first: f64,
    /// From when it was due to its end.
    pub last: f64,
    /// The longest pause after its first token.
    pub pause: f64,
}

/// Plays the load and prints the figures as JSON.
pub async fn run(arguments: &Arguments) {
    let host = arguments.must("url").strip_prefix("http://").expect("--url http://host:port").to_owned();
    let (rate, count) = (arguments.or("rate", 100.0), arguments.or("count", u64::MAX));
    let seconds = arguments.or("seconds", if count == u64::MAX { 10.0 } else { f64::INFINITY });
    let patience = Duration::from_secs_f64(arguments.or("patience", 1e6));
    let (prompt, tokens) = (arguments.or("prompt", 1000u32), arguments.or("tokens", 64u32));
    let prompts = match (arguments.or("text", false), arguments.or("shared", -1.0)) {
        (false, ..0.0) => Prompts::Ids,
        (true, ..0.0) => Prompts::Digits,
        (_, shared) => Prompts::Words { shared },
    };
    let model = arguments.must("model").to_owned();
    let (requests, came, idle, results) = (Vec::new(), Cell::default(), RefCell::default(), RefCell::default());
    let salt = u64::from(std::process::id()) << 32;
    let grpc = match arguments.or("grpc", String::new()).as_str() {
        "" => None,
        connections => Some(Grpc::connect(&host, connections).await),
    };
    let mut load = Load { model, host, grpc, prompts, prompt, salt, requests, tokens, patience, came, idle, results };
    load.requests = match prompts {
        Prompts::Words { .. } => Vec::new(),
        _ => (0..PROMPTS).map(|seed| load.body(seed)).collect(),
    };
    let (load, tasks) = (Rc::new(load), LocalSet::new());
    let mut random = 1;
    tasks
        .run_until(async {
            let begin = Instant::now() + Duration::from_millis(10);
            let (mut at, mut begun) = (0.0, 0);
            while at < seconds && begun < count {
                sleep_until(begin + Duration::from_secs_f64(at)).await;
                tokio::task::spawn_local(Rc::clone(&load).request(begun, begin + Duration::from_secs_f64(at)));
                // As from many clients that know nothing of each other: a Poisson process.
                at -= uniform(&mut random).ln() / rate;
                begun += 1;
            }
        })
        .await;
    tasks.await;
    println!("{}", load.report(rate));
}

/// A number above 0 and up to 1 (SplitMix64).
fn uniform(state: &mut u64) -> f64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64 + f64::EPSILON
}

impl Load {
    /// A prompt of token ids.
    pub fn ids(&self, seed: u64) -> Vec<u32> {
        let mut random = seed % PROMPTS + 1;
        (0..self.prompt).map(|_| 32 + (uniform(&mut random) * 90.0) as u32).collect()
    }

    /// The bytes of a request. Each seed has a prompt of its own.
    fn body(&self, seed: u64) -> Vec<u8> {
        let prompt = match self.prompts {
            Prompts::Ids => json!(self.ids(seed)),
            Prompts::Digits => json!(self.ids(seed).iter().map(|id| format!("{id} ")).collect::<String>()),
            Prompts::Words { shared } => {
                let (same, mut first, mut random) = ((f64::from(self.prompt) * shared) as u32, 0, seed + 1);
                let word = |at| {
                    let random = if at < same { &mut first } else { &mut random };
                    WORDS[(uniform(random) * WORDS.len() as f64) as usize % WORDS.len()]
                };
                json!((0..self.prompt).map(word).collect::<Vec<_>>().join(" "))
            }
        };
        let body = json!({
            "model": self.model, "prompt": prompt, "max_tokens": self.tokens, "temperature": 0, "stream": true, "ignore_eos": true,
            "stream_options": {"include_usage": true},
        })
        .to_string();
        let head = format!(
            "POST /v1/completions HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            self.host,
            body.len()
        );
        [head.as_bytes(), body.as_bytes()].concat()
    }

    async fn request(self: Rc<Load>, number: u64, due: Instant) {
        let mut text = Vec::with_capacity(16 << 10);
        let answer = async {
            match &self.grpc {
                Some(grpc) => grpc.answer(&self, number, due).await,
                None => self.answer(number, due, &mut text).await.map_err(|error| error.to_string()),
            }
        };
        let ended = timeout_at(due + self.patience, answer).await;
        let result = ended.unwrap_or_else(|_| Err(format!("no end after {:.0} s", self.patience.as_secs_f64())));
        self.came.set(self.came.get() + letters(&String::from_utf8_lossy(&text)));
        self.results.borrow_mut().push(result);
    }

    async fn answer(&self, count: u64, due: Instant, text: &mut Vec<u8>) -> std::io::Result<Times> {
        let idle = self.idle.borrow_mut().pop();
        let mut stream = match idle {
            Some(stream) => stream,
            None => {
                let stream = TcpStream::connect(&self.host).await?;
                stream.set_nodelay(true)?;
                stream
            }
        };
        match self.requests.get((count % PROMPTS) as usize) {
            Some(request) => stream.write_all(request).await?,
            None => stream.write_all(&self.body(self.salt ^ count)).await?,
        }
        let (mut first, mut seen) = (None, 0);
        let (mut before, mut pause) = (Instant::now(), 0f64);
        // The last chunk of the body has no bytes.
        while !text.ends_with(b"\r\n0\r\n\r\n") {
            if stream.read_buf(text).await? == 0 {
                return Err(std::io::Error::other("the connection ended"));
            }
            if first.is_some() {
                pause = pause.max(before.elapsed().as_secs_f64());
            }
            before = Instant::now();
            if first.is_none() {
                let new = &text[seen..];
                first = new.windows(6).any(|window| window == b"data: ").then(|| due.elapsed().as_secs_f64());
                seen = text.len().saturating_sub(5);
                if text.len() > 16 && first.is_none() && !text.starts_with(b"HTTP/1.1 200") {
                    return Err(std::io::Error::other(String::from_utf8_lossy(text).into_owned()));
                }
            }
        }
        let last = due.elapsed().as_secs_f64();
        let text = String::from_utf8_lossy(text);
        let got = number(&text, "\"completion_tokens\":");
        if got != Some(self.tokens) || !text.contains("[DONE]") {
            return Err(std::io::Error::other(format!("{got:?} tokens of {}", self.tokens)));
        }
        self.idle.borrow_mut().push(stream);
        Ok(Times { first: first.unwrap_or(last), last, pause })
    }
    fn report(&self, rate: f64) -> serde_json::Value {
        let results = self.results.borrow();
        let good: Vec<Times> = results.iter().filter_map(|result| result.as_ref().ok().copied()).collect();
        let failed: Vec<&String> = results.iter().filter_map(|result| result.as_ref().err()).collect();
        let spread = |mut values: Vec<f64>| {
            values.sort_by(f64::total_cmp);
            let at = |share: f64| values.get(((values.len() as f64 - 1.0) * share).round() as usize).map(|s| s * 1e3);
            json!({"p50": at(0.5), "p90": at(0.9), "p99": at(0.99), "max": at(1.0)})
        };
        json!({
            "rate": rate, "requests": results.len(), "failed": failed.len(), "error": failed.first(),
            "tokens": results.len() as u64 * u64::from(self.tokens), "tokens_came": self.came.get(),
            "first_ms": spread(good.iter().map(|times| times.first).collect()),
            "last_ms": spread(good.iter().map(|times| times.last).collect()),
            "pause_ms": spread(good.iter().map(|times| times.pause).collect()),
        })
    }
}

/// Tokens in events, by the letters of their texts: tokens of `workers` and `backend` are a letter each.
fn letters(events: &str) -> u64 {
    events.split("\"text\":\"").skip(1).map(|rest| rest.find('"').unwrap_or(0) as u64).sum()
}
