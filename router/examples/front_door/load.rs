//! Sends requests at times that are fixed in advance, and reports how late their tokens come.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::LocalSet;
use tokio::time::{Instant, sleep_until};

use super::Arguments;
use super::backend::number;

/// Prompts that differ; requests take them in turn.
const PROMPTS: u64 = 64;

/// What the requests share.
struct Load {
    host: String,
    requests: Vec<Vec<u8>>,
    tokens: u32,
    /// Connections that wait for a request.
    idle: RefCell<Vec<TcpStream>>,
    /// Of each request: seconds from its time to its first token and to its end; or why it failed.
    results: RefCell<Vec<Result<(f64, f64), String>>>,
}

/// Plays the load and prints the figures as JSON.
pub async fn run(arguments: &Arguments) {
    let host = arguments.must("url").strip_prefix("http://").expect("--url http://host:port").to_owned();
    let (rate, seconds): (f64, f64) = (arguments.or("rate", 100.0), arguments.or("seconds", 10.0));
    let (prompt, tokens) = (arguments.or("prompt", 1000u32), arguments.or("tokens", 64u32));
    let text = arguments.or("text", false);
    let body = |seed| body(arguments.must("model"), seed, prompt, tokens, text);
    let request = |seed| {
        let body = body(seed);
        let head = format!(
            "POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        [head.as_bytes(), body.as_bytes()].concat()
    };
    let requests = (0..PROMPTS).map(request).collect();
    let load = Load { host, requests, tokens, idle: RefCell::default(), results: RefCell::default() };
    let (load, tasks) = (Rc::new(load), LocalSet::new());
    let mut random = 1;
    tasks
        .run_until(async {
            let begin = Instant::now() + Duration::from_millis(10);
            let (mut at, mut count) = (0.0, 0);
            while at < seconds {
                sleep_until(begin + Duration::from_secs_f64(at)).await;
                tokio::task::spawn_local(Rc::clone(&load).request(count, begin + Duration::from_secs_f64(at)));
                // As from many clients that know nothing of each other: a Poisson process.
                at -= uniform(&mut random).ln() / rate;
                count += 1;
            }
        })
        .await;
    tasks.await;
    println!("{}", report(&load.results.borrow(), rate));
}

/// A prompt of token ids, or a text of about as many bytes as they take.
fn body(model: &str, seed: u64, prompt: u32, tokens: u32, text: bool) -> String {
    let mut random = seed + 1;
    let ids: Vec<u32> = (0..prompt).map(|_| 32 + (uniform(&mut random) * 90.0) as u32).collect();
    let prompt = if text { json!(ids.iter().map(|id| format!("{id} ")).collect::<String>()) } else { json!(ids) };
    json!({
        "model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": true, "ignore_eos": true,
        "stream_options": {"include_usage": true},
    })
    .to_string()
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
    async fn request(self: Rc<Load>, number: u64, due: Instant) {
        let result = self.answer(number, due).await.map_err(|error| error.to_string());
        self.results.borrow_mut().push(result);
    }

    async fn answer(&self, count: u64, due: Instant) -> std::io::Result<(f64, f64)> {
        let idle = self.idle.borrow_mut().pop();
        let mut stream = match idle {
            Some(stream) => stream,
            None => {
                let stream = TcpStream::connect(&self.host).await?;
                stream.set_nodelay(true)?;
                stream
            }
        };
        stream.write_all(&self.requests[(count % PROMPTS) as usize]).await?;
        let (mut text, mut first, mut seen) = (Vec::with_capacity(16 << 10), None, 0);
        // The last chunk of the body has no bytes.
        while !text.ends_with(b"\r\n0\r\n\r\n") {
            if stream.read_buf(&mut text).await? == 0 {
                return Err(std::io::Error::other("the connection ended"));
            }
            if first.is_none() {
                let new = &text[seen..];
                first = new.windows(6).any(|window| window == b"data: ").then(|| due.elapsed().as_secs_f64());
                seen = text.len().saturating_sub(5);
                if text.len() > 16 && first.is_none() && !text.starts_with(b"HTTP/1.1 200") {
                    return Err(std::io::Error::other(String::from_utf8_lossy(&text).into_owned()));
                }
            }
        }
        let last = due.elapsed().as_secs_f64();
        let text = String::from_utf8_lossy(&text);
        let got = number(&text, "\"completion_tokens\":");
        if got != Some(self.tokens) || !text.contains("[DONE]") {
            return Err(std::io::Error::other(format!("{got:?} tokens of {}", self.tokens)));
        }
        self.idle.borrow_mut().push(stream);
        Ok((first.unwrap_or(last), last))
    }
}

fn report(results: &[Result<(f64, f64), String>], rate: f64) -> serde_json::Value {
    let good: Vec<(f64, f64)> = results.iter().filter_map(|result| result.as_ref().ok().copied()).collect();
    let failed: Vec<&String> = results.iter().filter_map(|result| result.as_ref().err()).collect();
    let spread = |mut values: Vec<f64>| {
        values.sort_by(f64::total_cmp);
        let at = |share: f64| values.get(((values.len() as f64 - 1.0) * share).round() as usize).map(|s| s * 1e3);
        json!({"p50": at(0.5), "p90": at(0.9), "p99": at(0.99), "max": at(1.0)})
    };
    json!({
        "rate": rate, "requests": results.len(), "failed": failed.len(), "error": failed.first(),
        "first_ms": spread(good.iter().map(|good| good.0).collect()),
        "last_ms": spread(good.iter().map(|good| good.1).collect()),
    })
}
