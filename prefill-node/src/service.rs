//! `Prefill.Run` over gRPC.

use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_cluster::Role as MemberRole;
use baton_engine::Start;
use baton_proto::v1::{self, prefill_event::Event as Sent, prefill_server};
use baton_transfer::{Handoff, Limits, Sender, SenderOptions};
use baton_worker::{Commands, EngineHandle, Events, Item, Node, NodeRole, WorkerError, WorkerService, stream_status};
use tonic::service::RoutesBuilder;
use tonic::{Request, Response, Status};

use crate::role::{Command, PrefillRole, Said};

pub(crate) struct PrefillNode {
    node: Node,
    engine: EngineHandle<Command>,
    worker: WorkerService,
    sender: Arc<Sender>,
}

impl NodeRole for PrefillNode {
    type Role = PrefillRole;
    const ROLE: MemberRole = MemberRole::Prefill;

    fn role(node: &Node, commands: Commands<Command>) -> Result<PrefillRole, WorkerError> {
        Ok(PrefillRole::new(node.geometry.layout.clone(), commands))
    }

    fn routes(
        node: Node,
        engine: EngineHandle<Command>,
        worker: WorkerService,
        routes: &mut RoutesBuilder,
    ) -> Result<&'static str, WorkerError> {
        let sender = Arc::new(Sender::new(SenderOptions {
            worker: node.id,
            geometry: node.geometry.clone(),
            segment: node.segment.clone(),
            transport: node.config.transport.choice(),
            limits: Limits::default(),
        })?);
        routes.add_service(prefill_server::PrefillServer::new(PrefillNode { node, engine, worker, sender }));
        Ok(<prefill_server::PrefillServer<PrefillNode> as tonic::server::NamedService>::NAME)
    }
}

#[tonic::async_trait]
impl prefill_server::Prefill for PrefillNode {
    type RunStream = Events<Said, Command>;

    async fn run(&self, request: Request<v1::PrefillRequest>) -> Result<Response<Self::RunStream>, Status> {
        self.worker.accept()?;
        let request = request.into_inner();
        let sequence = request.sequence.ok_or_else(|| Status::invalid_argument("sequence is missing"))?;
        let left = match sequence.deadline_ms {
            0 => self.node.config.kv_lease,
            ms => Duration::from_millis(ms),
        };
        let new = self.node.new_sequence(sequence, Start::ComputeAndHold).await?;
        let handoff =
            self.sender.open(&request.target, Instant::now() + left).map_err(|e| baton_proto::status_of(&e))?;
        if handoff.tokens() as usize != new.tokens.len() {
            let text = format!("target is for {} tokens, the sequence has {}", handoff.tokens(), new.tokens.len());
            return Err(Status::invalid_argument(text));
        }
        check_reach(&handoff, self.node.geometry.layout.block_size)?;
        Events::open(&self.engine, Command::Cancel, |stream, accepted| Command::Run {
            new: Box::new(new),
            handoff,
            stream,
            accepted,
        })
        .await
    }
}

/// The reservation must begin within the sequence and go on to its last block, or the handoff could never be complete; and one
/// without blocks is none.
fn check_reach(handoff: &Handoff, block_size: u32) -> Result<(), Status> {
    let blocks = handoff.tokens().div_ceil(block_size);
    if handoff.block_counts().iter().all(|count| *count == 0) {
        return Err(Status::invalid_argument("target wants no block at all"));
    }
    for (group, (first, count)) in handoff.first_blocks().iter().zip(handoff.block_counts()).enumerate() {
        if first.checked_add(*count) != Some(blocks) {
            let text = format!(
                "target wants {count} blocks of layer group {group} from block {first} on; the sequence has {blocks}"
            );
            return Err(Status::invalid_argument(text));
        }
    }
    Ok(())
}

impl Item for Said {
    type Event = v1::PrefillEvent;

    fn into_event(self) -> Result<(v1::PrefillEvent, bool), Status> {
        let (event, last) = match self {
            Said::First(token, finish, cached_tokens) => {
                let reason = finish.map(|reason| v1::FinishReason::from(reason).into());
                let first = v1::FirstToken { token: Some(token.into()), finish: reason, cached_tokens };
                // When the token ends the answer, no transfer follows.
                (Sent::FirstToken(first), finish.is_some())
            }
            Said::Transferred(stats) => {
                let transport = stats.transport.as_str().to_owned();
                let done = v1::Transferred { bytes: stats.bytes, seconds: stats.seconds, transport };
                (Sent::Transferred(done), true)
            }
            Said::Failed(kind, message) => return Err(stream_status(kind, message)),
        };
        Ok((v1::PrefillEvent { event: Some(event) }, last))
    }
}
