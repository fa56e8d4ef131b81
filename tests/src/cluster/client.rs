//! A gRPC client that counts: every token index once, in order (I4).

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, ensure};
use baton_proto::v1::{self, generate_request::Input, inference_client::InferenceClient};
use tonic::transport::Channel;
use tonic::{IntoRequest, Streaming};

/// A connection to a router.
#[derive(Clone, Debug)]
pub struct Client(InferenceClient<Channel>);

/// A greedy request for exactly `max_tokens` tokens, whatever the model says.
pub fn greedy(prompt: impl Into<Vec<u32>>, max_tokens: u32) -> v1::GenerateRequest {
    let sampling = v1::Sampling {
        max_tokens: Some(max_tokens),
        temperature: Some(0.0),
        ignore_eos: true,
        ..v1::Sampling::default()
    };
    v1::GenerateRequest {
        input: Some(Input::TokenIds(v1::TokenIds { ids: prompt.into() })),
        sampling: Some(sampling),
        ..v1::GenerateRequest::default()
    }
}

/// The same, sampled: a random model's greedy answer soon repeats itself, and a repetition hides what is lost.
pub fn sampled(prompt: impl Into<Vec<u32>>, max_tokens: u32, seed: u64) -> v1::GenerateRequest {
    let mut request = greedy(prompt, max_tokens);
    if let Some(sampling) = &mut request.sampling {
        sampling.temperature = Some(1.0);
        sampling.seed = Some(seed);
    }
    request
}

/// The same with a cache of its own, so that all of it is computed and travels.
pub fn apart(request: v1::GenerateRequest) -> v1::GenerateRequest {
    static ASKED: AtomicU64 = AtomicU64::new(0);
    let cache_salt = format!("apart {}", ASKED.fetch_add(1, Ordering::Relaxed));
    v1::GenerateRequest { cache_salt, ..request }
}

/// A prompt that is none other's: `tokens` ids below 256, which every tiny model has.
pub fn prompt(tokens: usize, seed: u64) -> Vec<u32> {
    crate::tiny::random_u64(seed, "prompt").take(tokens).map(|x| (x % 256) as u32).collect()
}

impl From<InferenceClient<Channel>> for Client {
    fn from(client: InferenceClient<Channel>) -> Self {
        Client(client)
    }
}

/// What came back.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Answer {
    /// Token ids.
    pub ids: Vec<u32>,
    /// Their text.
    pub text: String,
    /// Set at the end.
    pub finish: Option<v1::Finish>,
}

/// An answer on its way.
#[derive(Debug)]
pub struct Answering {
    stream: Streaming<v1::GenerateResponse>,
    answer: Answer,
}

impl Client {
    /// Connects to a router's gRPC address.
    pub async fn connect(address: SocketAddr) -> anyhow::Result<Client> {
        Ok(Client(InferenceClient::connect(format!("http://{address}")).await?))
    }

    /// Opens a stream.
    pub async fn start(&self, request: impl IntoRequest<v1::GenerateRequest>) -> Result<Answering, tonic::Status> {
        let stream = self.0.clone().generate(request).await?.into_inner();
        Ok(Answering { stream, answer: Answer::default() })
    }

    /// A whole answer.
    pub async fn ask(&self, request: impl IntoRequest<v1::GenerateRequest>) -> anyhow::Result<Answer> {
        self.start(request).await?.rest().await
    }
}

impl Answering {
    /// Takes the next message; false after the last. Anything that breaks I4 is an error.
    pub async fn next(&mut self) -> anyhow::Result<bool> {
        let Some(part) = self.stream.message().await? else {
            ensure!(self.answer.finish.is_some(), "the stream ended without a finish");
            return Ok(false);
        };
        ensure!(self.answer.finish.is_none(), "a message after the finish: {part:?}");
        for (i, token) in part.tokens.iter().enumerate() {
            let next = self.answer.ids.len() as u32;
            ensure!(token.index == next, "token {} came, {next} is next", token.index); // I4
            ensure!(i > 0 || part.index == next, "a message's index is {}, its first token's {next}", part.index);
            self.answer.ids.push(token.id);
        }
        self.answer.text += &part.text;
        self.answer.finish = part.finish;
        Ok(true)
    }

    /// Waits until at least `tokens` tokens are here.
    pub async fn until(&mut self, tokens: usize) -> anyhow::Result<()> {
        while self.answer.ids.len() < tokens {
            ensure!(self.next().await?, "the answer ended after {} tokens", self.answer.ids.len());
        }
        Ok(())
    }

    /// What is here so far.
    pub fn so_far(&self) -> &Answer {
        &self.answer
    }

    /// The whole answer.
    pub async fn rest(mut self) -> anyhow::Result<Answer> {
        while self.next().await? {}
        let finish = self.answer.finish.as_ref().context("no finish")?;
        let usage = finish.usage.as_ref().context("no usage")?;
        let (said, got) = (usage.completion_tokens as usize, self.answer.ids.len());
        ensure!(said == got, "usage says {said} tokens, {got} came");
        Ok(self.answer)
    }
}
