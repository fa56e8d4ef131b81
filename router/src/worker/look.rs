//! What people who look see of the workers. Nothing here runs unless somebody looks.

use std::collections::HashMap;
use std::time::Duration;

use baton_cluster::Member;
use baton_policy::Backlog;
use baton_proto::v1::worker_client::WorkerClient;
use baton_proto::v1::{StatusRequest, StatusResponse};
use baton_types::WorkerId;
use futures::{StreamExt, stream};
use tokio::time::{Instant, timeout};

use super::Workers;

/// Workers that are asked at the same time, and how long one may take.
const AT_ONCE: usize = 16;
const PATIENCE: Duration = Duration::from_millis(400);

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

    /// Whether the view is an old one, and its revision.
    pub fn view_state(&self) -> (bool, u64) {
        let fleet = self.fleet();
        (fleet.view().stale, fleet.view().revision)
    }
}
