//! The gRPC service `Exchange`, of every worker.

use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_engine::Exchange as Prefix;
use baton_proto::v1::{self, exchange_server, fetch_event, serve_event};
use baton_roles::exchange::Answer;
use baton_roles::prefill::check_target;
use baton_types::BatonError;
use tokio::sync::oneshot;
use tonic::{Request, Response, Status};

use crate::ends::KvEnds;
use crate::engine_thread;
use crate::exchange::Message;
use crate::{EngineHandle, Events, Node, Wire, stream_status, transferred};

/// The service. `C`: the role's messages.
pub(crate) struct ExchangeService<C> {
    pub node: Node,
    pub engine: EngineHandle<C>,
    pub ends: Arc<KvEnds>,
}

impl<C> ExchangeService<C> {
    /// Checks a prefix from the router (I8).
    fn prefix(&self, prefix: Option<v1::Prefix>) -> Result<(Box<Prefix>, Instant), Status> {
        let prefix = prefix.ok_or_else(|| Status::invalid_argument("prefix is missing"))?;
        let lease = self.node.config.kv_lease;
        let left = match prefix.deadline_ms {
            0 => lease,
            ms => Duration::from_millis(ms).min(lease),
        };
        let prefix = self.node.exchange(prefix, left)?;
        Ok((Box::new(prefix), Instant::now() + left))
    }
}

#[tonic::async_trait]
impl<C: Send + 'static> exchange_server::Exchange for ExchangeService<C> {
    type FetchStream = Events<Fetch, C>;
    type ServeStream = Events<Serve, C>;

    async fn fetch(&self, request: Request<v1::FetchRequest>) -> Result<Response<Self::FetchStream>, Status> {
        let (prefix, _) = self.prefix(request.into_inner().prefix)?;
        Events::open_exchange(&self.engine, |stream, accepted| Message::Fetch { prefix, stream, accepted }).await
    }

    async fn serve(&self, request: Request<v1::ServeRequest>) -> Result<Response<Self::ServeStream>, Status> {
        let v1::ServeRequest { prefix, target } = request.into_inner();
        let (prefix, deadline) = self.prefix(prefix)?;
        let layout = &self.node.geometry.layout;
        let handoff = self.ends.sender.open(&target, deadline).map_err(|e| baton_proto::status_of(&e))?;
        if handoff.converts() {
            // I1: what is rounded twice is not what the other worker would compute.
            return Err(Status::failed_precondition("target: its KV type differs; prefixes move between equal ones"));
        }
        let (tokens, first, counts) = (handoff.tokens(), handoff.first_blocks(), handoff.block_counts());
        let moves = prefix.moves(layout.block_size) as usize;
        check_target(layout, tokens, first, counts, moves).map_err(|e| stream_status(e.kind(), e.to_string()))?;
        let handoff = Box::new(handoff);
        Events::open_exchange(&self.engine, |stream, accepted| Message::Serve { prefix, handoff, stream, accepted })
            .await
    }

    async fn recall(&self, request: Request<v1::RecallRequest>) -> Result<Response<v1::RecallResponse>, Status> {
        let (prefix, _) = self.prefix(request.into_inner().prefix)?;
        // The call is open until the thread has heard: so no more of them wait than calls may be open (I5).
        let (heard, hears) = oneshot::channel();
        let gone = || Status::unavailable("the worker ends");
        self.engine.post(engine_thread::Message::Recall(prefix, heard)).map_err(|_| gone())?;
        hears.await.map_err(|_| gone())?;
        Ok(Response::new(v1::RecallResponse {}))
    }
}

/// How a fetch is told.
pub(crate) struct Fetch;

impl Wire for Fetch {
    type Item = Answer;
    type Event = v1::FetchEvent;

    fn event(answer: Answer) -> Result<(v1::FetchEvent, bool), Status> {
        let last = answer.is_last();
        let event = match answer {
            Answer::Reserved(target) => fetch_event::Event::Reserved(v1::Reserved { target }),
            Answer::Fetched(tokens) => fetch_event::Event::Fetched(v1::Fetched { tokens }),
            Answer::Served(_) => return Err(Status::internal("a fetch does not serve")),
            Answer::Failed(kind, message) => return Err(stream_status(kind, message)),
        };
        Ok((v1::FetchEvent { event: Some(event) }, last))
    }
}

/// How it is told that a prefix is served.
pub(crate) struct Serve;

impl Wire for Serve {
    type Item = Answer;
    type Event = v1::ServeEvent;

    fn event(answer: Answer) -> Result<(v1::ServeEvent, bool), Status> {
        let last = answer.is_last();
        let event = match answer {
            Answer::Served(stats) => serve_event::Event::Transferred(transferred(&stats)),
            Answer::Reserved(_) | Answer::Fetched(_) => return Err(Status::internal("what serves does not fetch")),
            Answer::Failed(kind, message) => return Err(stream_status(kind, message)),
        };
        Ok((v1::ServeEvent { event: Some(event) }, last))
    }
}
