//! Workers, asked what they hold.

use std::time::{Duration, Instant};

use anyhow::ensure;
use baton_cluster::{Member, Role};
use baton_proto::MeantFor;
use baton_proto::v1::exchange_client::ExchangeClient;
use baton_proto::v1::{self, worker_client::WorkerClient};
use tonic::service::interceptor::InterceptedService;
use tonic::transport::Channel;

use super::certificates::{channel, connect};
use super::http::{Metrics, get};
use super::{HANG, LOOK};
use baton_types::WorkerId;
use serde_json::Value;

/// What a worker may take to answer before it counts as not there.
const PATIENCE: Duration = Duration::from_secs(2);

/// A worker that answers.
#[derive(Clone, PartialEq, Debug)]
pub struct Worker {
    /// What it registered.
    pub member: Member,
    /// Its process.
    pub pid: u32,
    /// What it holds right now.
    pub status: v1::StatusResponse,
}

impl Worker {
    /// Blocks by state.
    pub fn blocks(&self) -> v1::BlockCounts {
        self.status.blocks.unwrap_or_default()
    }

    /// What its admin endpoint says.
    pub fn metrics(&self) -> anyhow::Result<Metrics> {
        Metrics::of(self.member.admin.trim_start_matches("http://").parse()?)
    }

    /// What it tells autoscalers, at `/load` of its admin endpoint.
    pub fn load(&self) -> anyhow::Result<Value> {
        let (status, text) = get(self.member.admin.trim_start_matches("http://").parse()?, "/load")?;
        ensure!(status == 200, "{status}: {text}");
        Ok(serde_json::from_str(&text)?)
    }

    /// No sequence, and every block free or kept for its prefix only (I6).
    pub fn idle(&self) -> bool {
        idle(&self.status)
    }
}

fn idle(status: &v1::StatusResponse) -> bool {
    let blocks = status.blocks.unwrap_or_default();
    status.running == 0 && status.waiting == 0 && blocks.total > 0 && blocks.free + blocks.cached == blocks.total
}

/// What a worker holds right now.
pub async fn status(member: &Member) -> anyhow::Result<v1::StatusResponse> {
    status_of(member, member.id).await
}

/// What the worker with this id holds, asked at a member's address.
pub async fn status_of(member: &Member, id: WorkerId) -> anyhow::Result<v1::StatusResponse> {
    let ask = async {
        let channel = channel(member).await?;
        let mut client = WorkerClient::with_interceptor(channel, MeantFor::new(id));
        anyhow::Ok(client.status(v1::StatusRequest {}).await?.into_inner())
    };
    tokio::time::timeout(PATIENCE, ask).await?
}

/// A client of a worker's exchange of prefixes.
pub async fn exchange_with(member: &Member) -> anyhow::Result<ExchangeClient<InterceptedService<Channel, MeantFor>>> {
    Ok(ExchangeClient::with_interceptor(channel(member).await?, MeantFor::new(member.id)))
}

/// Waits until every worker in a registry's view holds nothing (I6).
pub async fn wait_all_free(registry: &str) -> anyhow::Result<()> {
    let mut views = connect(registry).await?.watch();
    let start = Instant::now();
    loop {
        let view = tokio::time::timeout(HANG, views.wait_for(|view| !view.stale)).await??.clone();
        let mut busy = Vec::new();
        for member in view.members.iter().filter(|m| m.role != Role::Supervisor) {
            match status(member).await {
                Ok(status) if idle(&status) => {}
                other => busy.push((member.id, other)),
            }
        }
        if busy.is_empty() {
            return Ok(());
        }
        ensure!(start.elapsed() < HANG, "not free: {busy:#?}");
        tokio::time::sleep(LOOK).await;
    }
}
