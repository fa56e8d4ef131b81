//! The gRPC service `Prefill.Run`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_cluster::Role;
use baton_engine::Start;
use baton_proto::v1::{self, prefill_event::Event as Sent, prefill_server};
use baton_roles::Prefill;
use baton_roles::prefill::{Answer, check_target};
use baton_runtime::metrics as names;
use baton_transfer::{PathReport, Sender, SenderOptions, TransferError, TransportKind};
use baton_types::WorkerId;
use baton_worker::{
    Commands, EngineHandle, Events, Node, NodeRole, Wire, WorkerError, WorkerService, kv_converter, scored,
    stream_status,
};
use metrics::counter;
use tonic::service::RoutesBuilder;
use tonic::{Request, Response, Status};

use crate::role::{Message, PrefillShell};

pub(crate) struct PrefillNode {
    node: Node,
    engine: EngineHandle<Message>,
    sender: Arc<Sender>,
}

impl NodeRole for PrefillNode {
    type Shell = PrefillShell;
    const ROLE: Role = Role::Prefill;

    fn role(node: &Node) -> Prefill {
        Prefill::new(node.geometry.layout.clone().into())
    }

    fn shell(_: &Node, commands: Commands<Message>) -> Result<PrefillShell, WorkerError> {
        Ok(PrefillShell::new(commands))
    }

    fn routes(
        node: Node,
        engine: EngineHandle<Message>,
        worker: WorkerService,
        routes: &mut RoutesBuilder,
    ) -> Result<&'static str, WorkerError> {
        let sender = Arc::new(Sender::new(SenderOptions {
            worker: node.id,
            geometry: node.geometry.clone(),
            pool: node.pool.clone(),
            transport: node.config.transport.0,
            ucx: node.config.ucx(),
            tls: node.transfer_tls(),
            tcp_connections: node.config.tcp_connections,
            sockets: node.config.transfer_sockets.clone(),
            cpus: node.config.transfer_cpus.0.clone(),
            limits: node.config.transfer_limits(),
            convert: Some(kv_converter()),
            verify: true,
            on_trouble,
        })?);
        let paths = sender.clone();
        worker.report_peers(move || paths.paths().into_iter().map(peer).collect());
        routes.add_service(prefill_server::PrefillServer::new(PrefillNode { node, engine, sender }));
        Ok(<prefill_server::PrefillServer<PrefillNode> as tonic::server::NamedService>::NAME)
    }
}

/// Counts changed frames and failed paths. It does not count changed blocks: the decode worker finds and counts those.
fn on_trouble(transport: TransportKind, error: &TransferError) {
    match error {
        TransferError::Corrupt { .. } => counter!(names::VERIFY_FAILURES).increment(1),
        TransferError::Verify { .. } => {}
        _ => {
            let labels = [("transport", transport.as_str()), ("cause", error.cause())];
            counter!(names::TRANSFER_PATH_FAILURES, &labels).increment(1);
        }
    }
}

fn peer((worker, paths): (WorkerId, Vec<PathReport>)) -> v1::Peer {
    let path = |path: PathReport| v1::Path {
        transport: path.transport.as_str().to_owned(),
        in_use: path.in_use,
        connections: path.connections as u32,
        handoffs: path.handoffs,
        failures: path.failures,
        bytes_per_second: path.bytes_per_second,
        unused: path.unused.unwrap_or_default(),
    };
    v1::Peer { id: worker.0, paths: paths.into_iter().map(path).collect() }
}

#[tonic::async_trait]
impl prefill_server::Prefill for PrefillNode {
    type RunStream = Events<Self, Message>;

    async fn run(&self, request: Request<v1::PrefillRequest>) -> Result<Response<Self::RunStream>, Status> {
        let request = request.into_inner();
        let sequence = request.sequence.ok_or_else(|| Status::invalid_argument("sequence is missing"))?;
        let left = match sequence.deadline_ms {
            0 => self.node.config.kv_lease,
            ms => Duration::from_millis(ms),
        };
        let new = self.node.new_sequence(sequence, Start::ComputeAndHold).await?;
        let handoff =
            self.sender.open(&request.target, Instant::now() + left).map_err(|e| baton_proto::status_of(&e))?;
        let (layout, sequence) = (&self.node.geometry.layout, new.tokens.len());
        check_target(layout, handoff.tokens(), handoff.first_blocks(), handoff.block_counts(), sequence)
            .map_err(|e| baton_proto::status_of(&e))?;
        Events::open(&self.engine, Message::Cancel, |stream, accepted| Message::Run {
            new: Box::new(new),
            handoff,
            stream,
            accepted,
        })
        .await
    }
}

impl Wire for PrefillNode {
    type Item = Answer;
    type Event = v1::PrefillEvent;

    fn event(answer: Answer) -> Result<(v1::PrefillEvent, bool), Status> {
        let last = answer.is_last();
        let event = match answer {
            Answer::Scored(tokens) => Sent::Scored(scored(tokens)),
            Answer::FirstToken { token, finish, cached_tokens } => {
                let finish = finish.map(|reason| v1::FinishReason::from(reason).into());
                Sent::FirstToken(v1::FirstToken { token: Some(token.into()), finish, cached_tokens })
            }
            Answer::Transferred(stats) => {
                let transport = stats.transport.as_str().to_owned();
                Sent::Transferred(v1::Transferred { bytes: stats.bytes, seconds: stats.seconds, transport })
            }
            Answer::Failed(kind, message) => return Err(stream_status(kind, message)),
        };
        Ok((v1::PrefillEvent { event: Some(event) }, last))
    }
}
