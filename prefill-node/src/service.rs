//! `Prefill.Run` over gRPC.

use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_cluster::Role as MemberRole;
use baton_engine::Start;
use baton_proto::v1::{self, prefill_event::Event as Sent, prefill_server};
use baton_runtime::metrics as names;
use baton_transfer::{PathReport, Sender, SenderOptions, TransferError, TransportKind};
use baton_types::{KvLayout, WorkerId};
use baton_worker::{
    Commands, EngineHandle, Events, Item, Node, NodeRole, WorkerError, WorkerService, kv_converter, stream_status,
};
use metrics::counter;
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
            pool: node.pool.clone(),
            transport: node.config.transport.choice(),
            ucx: node.config.ucx(),
            tls: node.config.transfer_tls()?,
            tcp_connections: node.config.tcp_connections,
            cpus: node.config.transfer_cpus.0.clone(),
            limits: node.config.transfer_limits(),
            convert: Some(kv_converter()),
            verify: true,
            on_trouble,
        })?);
        let paths = sender.clone();
        worker.report_peers(move || paths.paths().into_iter().map(peer).collect());
        routes.add_service(prefill_server::PrefillServer::new(PrefillNode { node, engine, worker, sender }));
        Ok(<prefill_server::PrefillServer<PrefillNode> as tonic::server::NamedService>::NAME)
    }
}

/// Of bytes that changed, this end finds those of frames; those of blocks the decode worker finds, and counts.
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
        let layout = &self.node.geometry.layout;
        check_reach(layout, handoff.tokens(), handoff.first_blocks(), handoff.block_counts())?;
        Events::open(&self.engine, Command::Cancel, |stream, accepted| Command::Run {
            new: Box::new(new),
            handoff,
            stream,
            accepted,
        })
        .await
    }
}

/// Per layer group, the reservation must be all the blocks from some block of the sequence on that the token after the last
/// one sees, or the handoff could never be complete; and one without blocks is none.
fn check_reach(layout: &KvLayout, tokens: u32, first: &[u32], counts: &[u32]) -> Result<(), Status> {
    if counts.iter().all(|count| *count == 0) {
        return Err(Status::invalid_argument("target wants no block at all"));
    }
    let blocks = tokens.div_ceil(layout.block_size);
    for (group, (first, count)) in first.iter().zip(counts).enumerate() {
        let live = layout.groups[group].live(tokens, layout.block_size);
        let due = blocks.checked_sub(*first).map(|rest| rest - live.missing(*first, blocks));
        if due != Some(*count) {
            let text = format!(
                "target wants {count} blocks of layer group {group} from block {first} on; the sequence has {} of {blocks}",
                due.unwrap_or(0)
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

#[cfg(test)]
mod tests {
    use baton_types::{KvDtype, KvGroup};

    use super::*;

    #[test]
    fn a_target_must_reach_from_within_the_sequence_to_its_end() {
        let group = |window, sinks| KvGroup { layers: Vec::new(), planes: 2, kv_heads: 1, head_dim: 8, window, sinks };
        let layout = |window, sinks| {
            let groups = vec![group(None, 0), group(window, sinks)];
            KvLayout { version: 1, model: 0, dtype: KvDtype::F16, block_size: 16, groups }
        };
        // The 101st token sees a window of 32 from block 4 on.
        let (full, window, sinks) = (layout(None, 0), layout(Some(32), 0), layout(Some(32), 16));
        for (layout, first, counts) in [
            (&full, [0, 0], [7, 7]),
            (&full, [6, 2], [1, 5]),
            (&full, [7, 6], [0, 1]),
            (&window, [0, 0], [7, 3]),
            (&window, [2, 5], [5, 2]),
            (&sinks, [0, 0], [7, 4]),
            (&sinks, [1, 1], [6, 3]),
        ] {
            assert!(check_reach(layout, 100, &first, &counts).is_ok(), "{first:?} {counts:?}");
        }
        for (layout, first, counts) in [
            (&full, [0, 0], [7, 6]),
            (&full, [1, 0], [7, 7]),
            (&full, [7, 7], [0, 0]),
            (&full, [u32::MAX, 0], [8, 7]),
            (&window, [0, 0], [7, 7]),
            (&sinks, [0, 0], [7, 3]),
        ] {
            let refused = check_reach(layout, 100, &first, &counts).unwrap_err();
            assert_eq!(refused.code(), tonic::Code::InvalidArgument, "{first:?} {counts:?}");
        }
    }
}
