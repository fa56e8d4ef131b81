//! Asks a router over gRPC, and reads an answer as it comes.

use std::error::Error;
use std::future::pending;
use std::io::Write;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use baton_proto::v1::{self, generate_request::Input, inference_client::InferenceClient};
use clap::ArgMatches;
use serde_json::Value;
use tonic::Streaming;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint};

/// Tokens after which an answer is cut off when the user gave no --max-tokens.
pub const ENOUGH: usize = 512;

/// A connection to a router, and how to ask it.
#[derive(Clone)]
pub struct Client {
    inner: InferenceClient<Channel>,
    router: String,
    key: Option<MetadataValue<Ascii>>,
    limit: Option<u32>,
    temperature: Option<f32>,
}

/// An answer, perhaps not to its end.
#[derive(Debug, Default)]
pub struct Answer {
    pub text: String,
    pub tokens: usize,
    /// From the question to the first token, and from that to the last.
    pub first: Option<Duration>,
    pub rest: Duration,
    /// Where it ran: the router's placement of it.
    pub route: Option<String>,
    /// The user, or the limit of tokens, cut it off.
    pub stopped: Option<&'static str>,
}

impl Client {
    /// Connects as the arguments say.
    pub async fn connect(matches: &ArgMatches) -> anyhow::Result<Client> {
        let text = |name: &str| matches.get_one::<String>(name).cloned();
        let router = text("router").unwrap_or_default();
        let secure = router.starts_with("https://");
        if !secure && !router.starts_with("http://") {
            bail!(
                "--router is {router:?}; it must be http://HOST:PORT or https://HOST:PORT, the gRPC address of a router"
            );
        }
        let mut endpoint = Endpoint::from_shared(router.clone()).with_context(|| format!("--router {router}"))?;
        if secure {
            let path = text("tls-ca")
                .context("https:// needs --tls-ca, the authorities that the router's certificate may come from")?;
            let authority = std::fs::read(&path).with_context(|| format!("--tls-ca {path}"))?;
            endpoint = endpoint.tls_config(ClientTlsConfig::new().ca_certificate(Certificate::from_pem(authority)))?;
        }
        let channel = endpoint.connect().await.map_err(|error| match secure {
            false => anyhow!(
                "no router answers at {router}; start one with `baton up` or name its gRPC address with --router"
            ),
            true => anyhow::Error::from(error).context(format!("no router with TLS answers at {router}")),
        })?;
        let key = text("api-key-file").map(|path| {
            let key = std::fs::read_to_string(&path).with_context(|| format!("--api-key-file {path}"))?;
            format!("Bearer {}", key.trim()).parse().map_err(|_| anyhow!("{path} has no API key in it"))
        });
        Ok(Client {
            inner: InferenceClient::new(channel),
            router,
            key: key.transpose()?,
            // Not every command has these arguments.
            limit: matches.try_get_one::<u32>("max-tokens").ok().flatten().copied(),
            temperature: matches.try_get_one("temperature").ok().flatten().copied(),
        })
    }

    /// Sends a request.
    pub async fn generate(&mut self, request: v1::GenerateRequest) -> anyhow::Result<Streaming<v1::GenerateResponse>> {
        let mut request = tonic::Request::new(request);
        request.metadata_mut().insert("x-baton-trace", MetadataValue::from_static("1"));
        if let Some(key) = &self.key {
            request.metadata_mut().insert("authorization", key.clone());
        }
        let opened = self.inner.generate(request).await;
        Ok(opened.map_err(|status| failed(&self.router, status))?.into_inner())
    }

    /// The next part of an answer.
    pub async fn next(
        &self,
        stream: &mut Streaming<v1::GenerateResponse>,
    ) -> anyhow::Result<Option<v1::GenerateResponse>> {
        stream.message().await.map_err(|status| failed(&self.router, status))
    }

    /// Asks, and writes the answer to `out` while it comes; what the model thinks goes to `aside`. Ends early when `stop` does.
    pub async fn ask(
        &mut self,
        messages: Vec<v1::ChatMessage>,
        out: &mut impl Write,
        aside: &mut impl Write,
        stop: impl Future<Output = ()>,
    ) -> anyhow::Result<Answer> {
        // Without --max-tokens the request has no limit: the model's context may be shorter than `ENOUGH`.
        let sampling = v1::Sampling { max_tokens: self.limit, temperature: self.temperature, ..Default::default() };
        let request = v1::GenerateRequest {
            input: Some(Input::Chat(v1::Chat { messages, ..Default::default() })),
            sampling: Some(sampling),
            ..Default::default()
        };
        let (asked, limit) = (Instant::now(), self.limit);
        let mut answer = Answer::default();
        let mut stop = std::pin::pin!(stop);
        let opened = tokio::select! {
            biased;
            () = &mut stop => {
                answer.stopped = Some("stopped");
                return Ok(answer);
            }
            opened = self.generate(request) => opened,
        };
        let mut stream = opened?;
        loop {
            let part = tokio::select! {
                biased;
                () = &mut stop => {
                    answer.stopped = Some("stopped");
                    return Ok(answer);
                }
                part = self.next(&mut stream) => part?,
            };
            let Some(part) = part else { return Ok(answer) };
            aside.write_all(part.reasoning.as_bytes())?;
            out.write_all(part.text.as_bytes())?;
            out.flush()?;
            answer.took(&part, asked.elapsed());
            if limit.is_none() && answer.tokens >= ENOUGH && part.finish.is_none() {
                answer.stopped = Some("cut off; --max-tokens allows more");
                return Ok(answer);
            }
        }
    }
}

/// Never completes.
pub async fn never() {
    pending().await
}

fn failed(router: &str, status: tonic::Status) -> anyhow::Error {
    match status.source() {
        None => anyhow!("{}", status.message()),
        // The error comes from the connection, not from the router.
        Some(_) => anyhow!("{router} went away, or does not speak gRPC; name a router's gRPC address with --router"),
    }
}

impl Answer {
    fn took(&mut self, part: &v1::GenerateResponse, at: Duration) {
        self.text += &part.text;
        if !part.tokens.is_empty() {
            self.tokens += part.tokens.len();
            let first = *self.first.get_or_insert(at);
            self.rest = at.saturating_sub(first);
        }
        if let Some(finish) = &part.finish {
            self.route = route(&finish.placement);
        }
    }

    /// How it went, in one line.
    pub fn summary(&self) -> String {
        let mut words = vec![match self.tokens {
            1 => "1 token".to_owned(),
            tokens => format!("{tokens} tokens"),
        }];
        words.extend(self.first.map(|first| format!("TTFT {:.0} ms", first.as_secs_f64() * 1e3)));
        if self.tokens > 1 && !self.rest.is_zero() {
            words.push(format!("{:.1} tokens/s", (self.tokens - 1) as f64 / self.rest.as_secs_f64()));
        }
        words.extend(self.route.clone());
        words.extend(self.stopped.map(str::to_owned));
        words.join(" · ")
    }
}

/// Where the last placement of a request was, in words. `None`: the router does not say.
fn route(placements: &str) -> Option<String> {
    let placements: Vec<Value> = serde_json::from_str(placements).ok()?;
    let last = placements.last()?;
    let decode = last["decode"].as_str()?;
    Some(match last["prefill"].as_str() {
        Some(prefill) => format!("prefill {prefill}, decode {decode}"),
        None => format!("decode {decode} alone"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_summed_up_in_a_line() {
        let mut answer = Answer::default();
        let part = |tokens, finish| v1::GenerateResponse {
            tokens: vec![v1::Token::default(); tokens],
            text: "x".to_owned(),
            finish,
            ..Default::default()
        };
        answer.took(&part(1, None), Duration::from_millis(80));
        answer.took(&part(10, None), Duration::from_millis(580));
        let placement = r#"[{"decode": "d0", "prefill": null}, {"decode": "d1", "prefill": "p1"}]"#.to_owned();
        answer.took(&part(0, Some(v1::Finish { placement, ..Default::default() })), Duration::from_secs(9));
        assert_eq!(answer.summary(), "11 tokens · TTFT 80 ms · 20.0 tokens/s · prefill p1, decode d1");
        assert_eq!(answer.text, "xxx");
        assert_eq!(Answer { stopped: Some("stopped"), ..Answer::default() }.summary(), "0 tokens · stopped");
        assert_eq!((route(""), route("[]")), (None, None), "a router of the version before says nothing");
        assert_eq!(route(r#"[{"decode": "d", "prefill": null}]"#).as_deref(), Some("decode d alone"));
    }
}
