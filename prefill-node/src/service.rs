//! The gRPC service `Prefill.Run`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_cluster::Role;
use baton_engine::Start;
use baton_proto::v1::{self, prefill_event::Event as Sent, prefill_server};
use baton_roles::Prefill;
use baton_roles::prefill::{Answer, check_target};
use baton_transfer::Handoff;
use baton_types::{BatonError, ErrorKind, KvLayout};
use baton_worker::{
    Commands, EngineHandle, Events, KvEnds, Moment, Node, NodeRole, Traced, Wire, WorkerError, scored, stream_status,
    transferred,
};
use tonic::service::RoutesBuilder;
use tonic::{Request, Response, Status, Streaming};

use crate::role::{Message, PrefillShell};

pub(crate) struct PrefillNode {
    node: Node,
    engine: EngineHandle<Message>,
    ends: Arc<KvEnds>,
}

impl NodeRole for PrefillNode {
    type Shell = PrefillShell;
    const ROLE: Role = Role::Prefill;

    fn role(node: &Node) -> Prefill {
        Prefill::new(node.geometry.layout.clone().into())
    }

    fn shell(_: &Node, commands: Commands<Message>, _: &Arc<KvEnds>) -> Result<PrefillShell, WorkerError> {
        Ok(PrefillShell::new(commands))
    }

    fn routes(
        node: Node,
        engine: EngineHandle<Message>,
        ends: Arc<KvEnds>,
        routes: &mut RoutesBuilder,
    ) -> Result<&'static str, WorkerError> {
        routes.add_service(prefill_server::PrefillServer::new(PrefillNode { node, engine, ends }));
        Ok(<prefill_server::PrefillServer<PrefillNode> as tonic::server::NamedService>::NAME)
    }
}

#[tonic::async_trait]
impl prefill_server::Prefill for PrefillNode {
    type RunStream = Events<Self, Message>;

    async fn run(&self, request: Request<Streaming<v1::PrefillRequest>>) -> Result<Response<Self::RunStream>, Status> {
        let (metadata, _, mut requests) = request.into_parts();
        let first = requests.message().await?.ok_or_else(|| Status::invalid_argument("the stream has no request"))?;
        let v1::PrefillRequest { sequence, target, target_follows } = first;
        let sequence = sequence.ok_or_else(|| Status::invalid_argument("sequence is missing"))?;
        let traced = Traced::read(&metadata, "prefill worker", &sequence.request_id);
        let left = match sequence.deadline_ms {
            0 => self.node.config.kv_lease,
            ms => Duration::from_millis(ms),
        };
        let deadline = Instant::now() + left;
        let new = self.node.new_sequence(sequence, Start::ComputeAndHold).await?;
        let tokens = new.tokens.len();
        let aim = Aim { ends: self.ends.clone(), layout: self.node.geometry.layout.clone(), tokens, deadline };
        let handoff = if target_follows { None } else { Some(aim.open(&target).map_err(status)?) };
        let events = Events::open(&self.engine, Message::Cancel, traced, |stream, accepted| Message::Run {
            new: Box::new(new),
            handoff,
            stream,
            accepted,
        })
        .await?;
        if target_follows {
            let (seq, engine) = (events.get_ref().seq(), self.engine.clone());
            tokio::spawn(async move {
                let target = match requests.message().await {
                    Ok(Some(request)) => aim.open(&request.target).map(Box::new),
                    Ok(None) => Err((ErrorKind::InvalidArgument, "the target did not follow".to_owned())),
                    // The router has gone away, and the sequence with its stream.
                    Err(_) => return,
                };
                // If the engine is gone, so is the sequence.
                let _ = engine.send(Message::Target(seq, target));
            });
        }
        Ok(events)
    }
}

/// What is needed to open a request's handoff once its target is known.
struct Aim {
    ends: Arc<KvEnds>,
    layout: KvLayout,
    /// Tokens of the sequence.
    tokens: usize,
    deadline: Instant,
}

impl Aim {
    /// Opens the handoff into a target, which the router passed on (I8).
    fn open(&self, target: &[u8]) -> Result<Handoff, (ErrorKind, String)> {
        let handoff = self.ends.sender.open(target, self.deadline).map_err(|e| (e.kind(), e.to_string()))?;
        let (tokens, first, counts) = (handoff.tokens(), handoff.first_blocks(), handoff.block_counts());
        check_target(&self.layout, tokens, first, counts, self.tokens).map_err(|e| (e.kind(), e.to_string()))?;
        Ok(handoff)
    }
}

fn status((kind, message): (ErrorKind, String)) -> Status {
    stream_status(kind, message)
}

impl Wire for PrefillNode {
    type Item = Answer;
    type Event = v1::PrefillEvent;

    fn moment(answer: &Answer) -> Moment {
        match answer {
            Answer::FirstToken { .. } => Moment::Computed,
            Answer::Transferred(_) => Moment::Sent,
            _ => Moment::Other,
        }
    }

    fn event(answer: Answer) -> Result<(v1::PrefillEvent, bool), Status> {
        let last = answer.is_last();
        let event = match answer {
            Answer::Due => Sent::Due(v1::Due {}),
            Answer::Scored(tokens) => Sent::Scored(scored(tokens)),
            Answer::FirstToken { token, finish, cached_tokens } => {
                let finish = finish.map(|reason| v1::FinishReason::from(reason).into());
                Sent::FirstToken(v1::FirstToken { token: Some(token.into()), finish, cached_tokens })
            }
            Answer::Transferred(stats) => Sent::Transferred(transferred(&stats)),
            Answer::Failed(kind, message) => return Err(stream_status(kind, message)),
        };
        Ok((v1::PrefillEvent { event: Some(event) }, last))
    }
}
