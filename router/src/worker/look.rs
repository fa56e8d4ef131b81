//! What people who look see of the workers. Nothing here runs unless somebody looks.

use std::collections::HashMap;
use std::time::Duration;

use baton_cluster::Member;
use baton_policy::Backlog;
use baton_proto::v1::worker_client::WorkerClient;
use baton_proto::v1::{ColumnsRequest, ColumnsResponse, StatusRequest, StatusResponse};
use baton_types::WorkerId;
use futures::{StreamExt, stream};
use tokio::time::{Instant, timeout};
use tonic::Status;

use super::Workers;

/// Workers that are asked at the same time, and how long one may take.
const AT_ONCE: usize = 16;
const PATIENCE: Duration = Duration::from_millis(400);
/// The same for columns of KV, which wait for a step, and their largest answer in bytes.
const LOOK: Duration = Duration::from_secs(10);
const COLUMNS: usize = 8 << 20;

/// A worker of the model, as this router knows it.
pub(crate) struct Seen {
    pub member: Member,
    pub lost: bool,
    pub ejected: bool,
    pub in_flight: u32,
    /// What it has to do; `None`: it has said nothing.
    pub backlog: Option<Backlog>,
}

impl Workers {
    /// The workers of this model.
    pub fn look(&self) -> Vec<Seen> {
        let fleet = self.fleet();
        let mut backlogs: HashMap<WorkerId, Backlog> = fleet.backlogs(Instant::now().into_std()).collect();
        let own = fleet.members().filter(|worker| worker.member.model == fleet.model());
        own.map(|worker| Seen {
            member: worker.member.clone(),
            lost: worker.lost,
            ejected: worker.ejected,
            in_flight: worker.in_flight,
            backlog: backlogs.remove(&worker.member.id),
        })
        .collect()
    }

    /// What the workers of this model say of themselves now; nothing of those that do not answer soon.
    pub async fn statuses(&self) -> HashMap<WorkerId, StatusResponse> {
        let table = self.table();
        let own = self.look().into_iter().map(|seen| seen.member.id);
        let channels: Vec<_> = own.filter_map(|id| Some((id, table.channels.get(&id)?.clone()))).collect();
        let ask = |(id, channel)| async move {
            let mut client = WorkerClient::new(channel);
            let told = timeout(PATIENCE, client.status(StatusRequest {})).await.ok()?.ok()?;
            Some((id, told.into_inner()))
        };
        let answers = stream::iter(channels).map(ask).buffer_unordered(AT_ONCE);
        answers.filter_map(async |answer| answer).collect().await
    }

    /// The blocks in which a worker holds a prefix, and K and V of one head, if asked for.
    ///
    /// # Errors
    /// For people: the worker is gone, does not answer, or is of a version that does not know this; or what is asked for is not there (`InvalidArgument`).
    pub async fn columns(&self, worker: WorkerId, asked: ColumnsRequest) -> Result<ColumnsResponse, Status> {
        let channel = self.table().channels.get(&worker).cloned();
        let channel = channel.ok_or_else(|| Status::not_found(format!("worker {worker} is gone")))?;
        let mut client = WorkerClient::new(channel).max_decoding_message_size(COLUMNS);
        match timeout(LOOK, client.columns(asked)).await {
            Ok(Ok(told)) => Ok(told.into_inner()),
            Ok(Err(status)) => Err(Status::new(status.code(), format!("worker {worker}: {}", status.message()))),
            Err(_) => {
                let late = format!("worker {worker} did not answer within {} s", LOOK.as_secs());
                Err(Status::deadline_exceeded(late))
            }
        }
    }

    /// Whether the view is an old one, and its revision.
    pub fn view_state(&self) -> (bool, u64) {
        let fleet = self.fleet();
        (fleet.view().stale, fleet.view().revision)
    }
}
