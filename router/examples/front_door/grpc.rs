//! Requests of a load over Baton's gRPC API.

use baton_proto::v1::generate_request::Input;
use baton_proto::v1::inference_client::InferenceClient;
use baton_proto::v1::{GenerateRequest, Sampling, TokenIds};
use tokio::time::Instant;
use tonic::transport::{Channel, Endpoint};

use super::load::{Load, Times};

/// How requests go.
pub struct Grpc {
    endpoint: Endpoint,
    /// The connection of all requests; none if each has its own.
    kept: Option<Channel>,
}

impl Grpc {
    /// `connections`: `kept` or `new`.
    pub async fn connect(host: &str, connections: &str) -> Grpc {
        let endpoint = Endpoint::from_shared(format!("http://{host}")).unwrap();
        let kept = match connections {
            "kept" => Some(endpoint.connect().await.unwrap()),
            "new" => None,
            other => panic!("--grpc cannot be {other:?}"),
        };
        Grpc { endpoint, kept }
    }

    /// The times of an answer, or why it failed.
    pub async fn answer(&self, load: &Load, count: u64, due: Instant) -> Result<Times, String> {
        let channel = match &self.kept {
            Some(channel) => channel.clone(),
            None => self.endpoint.connect().await.map_err(|error| format!("{error:?}"))?,
        };
        let sampling =
            Sampling { max_tokens: Some(load.tokens), temperature: Some(0.0), ignore_eos: true, ..Sampling::default() };
        let request = GenerateRequest {
            model: load.model.clone(),
            input: Some(Input::TokenIds(TokenIds { ids: load.ids(count) })),
            sampling: Some(sampling),
            ..GenerateRequest::default()
        };
        let refused = |status: tonic::Status| status.to_string();
        let mut answer = InferenceClient::new(channel).generate(request).await.map_err(refused)?.into_inner();
        let (mut first, mut got, mut before, mut pause) = (None, 0, Instant::now(), 0f64);
        let mut finished = false;
        while let Some(part) = answer.message().await.map_err(refused)? {
            if first.is_some() {
                pause = pause.max(before.elapsed().as_secs_f64());
            }
            before = Instant::now();
            let tokens = part.tokens.len() as u32;
            if tokens > 0 {
                first = first.or(Some(due.elapsed().as_secs_f64()));
                if part.index != got {
                    return Err(format!("token {} came after {got} tokens", part.index));
                }
            }
            got += tokens;
            load.came.set(load.came.get() + u64::from(tokens));
            finished |= part.finish.is_some();
        }
        if got != load.tokens || !finished {
            return Err(format!("{got} tokens of {}", load.tokens));
        }
        let last = due.elapsed().as_secs_f64();
        Ok(Times { first: first.unwrap_or(last), last, pause })
    }
}
