//! A worker's two ends of handoffs: one through which KV leaves its pool, one through which KV comes in. Both roles have both.

use std::sync::Mutex;

use baton_proto::v1;
use baton_runtime::metrics as names;
use baton_transfer::{
    PathReport, Receiver, ReceiverOptions, ReceiverStats, Sender, SenderOptions, TransferError, TransportChoice,
    TransportKind,
};
use baton_types::WorkerId;
use metrics::{counter, gauge};

use crate::engine_thread::Message;
use crate::settings::transfer_cpus;
use crate::{Commands, Node, WorkerError, kv_converter};

/// A worker's ends of handoffs.
pub struct KvEnds {
    /// Where KV leaves.
    pub sender: Sender,
    /// Where KV comes in.
    pub receiver: Receiver,
    /// What the receiver has counted by itself, as far as the metrics have it.
    counted: Mutex<u64>,
}

impl KvEnds {
    /// Listens for peers. What happens to blocks that are lent reaches the engine thread as messages.
    pub(crate) fn open<C: Send + 'static>(node: &Node, commands: Commands<C>) -> Result<KvEnds, WorkerError> {
        let on_event = Box::new(move |event| {
            // The engine thread outlives the receiver, except at the very end, when nobody needs the events.
            let _ = commands.post(Message::Received(event));
        });
        let receiver = Receiver::bind(receiving(node), on_event)?;
        Ok(KvEnds { sender: Sender::new(sending(node))?, receiver, counted: Mutex::default() })
    }

    /// Opens what the transport needs now, for a worker whose peers would wait for it: see [`Receiver::prepare_ucx`].
    pub fn prepare(&self, node: &Node) -> Result<(), WorkerError> {
        match node.config.transfers.transport.0 {
            TransportChoice::Ucx => Ok(self.receiver.prepare_ucx()?),
            _ => Ok(()),
        }
    }

    /// The paths to each worker that KV was sent to.
    pub(crate) fn peers(&self) -> Vec<v1::Peer> {
        self.sender.paths().into_iter().map(peer).collect()
    }

    /// Updates the metrics of what the receiver counts by itself.
    pub(crate) fn count(&self) {
        let ReceiverStats { verify_failures, sessions, .. } = self.receiver.stats();
        gauge!(names::TRANSFER_SESSIONS).set(sessions as f64);
        // Only the engine thread counts.
        let Ok(mut counted) = self.counted.lock() else { return };
        counter!(names::VERIFY_FAILURES).increment(verify_failures - *counted);
        *counted = verify_failures;
    }
}

fn receiving(node: &Node) -> ReceiverOptions {
    ReceiverOptions {
        worker: node.id,
        tcp: node.config.transfers.transfer,
        advertise: node.config.join.advertise.clone(),
        geometry: node.geometry.clone(),
        pool: node.pool.clone(),
        ucx: node.config.ucx(),
        tls: node.transfer_tls(),
        sockets: node.config.transfers.transfer_sockets.clone(),
        cpus: transfer_cpus(&node.config),
        courtesy: node.courtesy.clone(),
        limits: node.config.transfer_limits(),
        verify: true,
    }
}

fn sending(node: &Node) -> SenderOptions {
    SenderOptions {
        worker: node.id,
        geometry: node.geometry.clone(),
        pool: node.pool.clone(),
        transport: node.config.transfers.transport.0,
        ucx: node.config.ucx(),
        tls: node.transfer_tls(),
        tcp_connections: node.config.transfers.tcp_connections,
        sockets: node.config.transfers.transfer_sockets.clone(),
        cpus: transfer_cpus(&node.config),
        courtesy: node.courtesy.clone(),
        limits: node.config.transfer_limits(),
        convert: Some(kv_converter()),
        verify: true,
        on_trouble,
    }
}

/// Counts changed frames and failed paths. It does not count changed blocks: the worker that takes them finds and counts those.
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
        opened_by: path.opened_by.map(|by| by.to_string()).unwrap_or_default(),
    };
    v1::Peer { id: worker.0, paths: paths.into_iter().map(path).collect() }
}
