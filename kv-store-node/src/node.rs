//! What there is of a role in a KV store: nothing. All it does is what every worker does beside its role.

use std::convert::Infallible;
use std::sync::Arc;

use baton_cluster::Role;
use baton_roles::{KvStore, Write};
use baton_transfer::TransferError;
use baton_worker::{Commands, EngineHandle, KvEnds, Node, NodeRole, Shell, WorkerError};
use tonic::service::RoutesBuilder;

/// Name of the service whose health stands for the store's: every worker has it.
const EXCHANGE: &str = "baton.v1.Exchange";

pub(crate) struct KvStoreNode;

impl NodeRole for KvStoreNode {
    type Shell = KvStoreShell;
    const ROLE: Role = Role::KvStore;
    const OFFERS_FETCHED: bool = true;

    fn role(_: &Node) -> KvStore {
        KvStore
    }

    fn shell(node: &Node, _: Commands<Infallible>, ends: &Arc<KvEnds>) -> Result<KvStoreShell, WorkerError> {
        ends.prepare(node)?;
        Ok(KvStoreShell)
    }

    fn routes(
        _: Node,
        _: EngineHandle<Infallible>,
        _: Arc<KvEnds>,
        _: &mut RoutesBuilder,
    ) -> Result<&'static str, WorkerError> {
        Ok(EXCHANGE)
    }
}

pub(crate) struct KvStoreShell;

impl Shell for KvStoreShell {
    type Role = KvStore;
    type Command = Infallible;

    fn command(&mut self, command: Infallible) -> Infallible {
        command
    }

    fn perform(&mut self, effect: Infallible) -> Option<Infallible> {
        match effect {}
    }

    /// It computes nothing, and so has no layers to hand over as they are computed.
    fn write(&mut self, _: Write<'_>) -> Result<(), TransferError> {
        Err(TransferError::Closed)
    }
}
