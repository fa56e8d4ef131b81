//! Lists the members in etcd, page by page, and watches them from the list's revision on. When the connection breaks or the revision has been
//! compacted away, it lists again.

use std::collections::BTreeMap;

use baton_membership::{List, MAX_MEMBERS, Member};
use baton_types::WorkerId;
use etcd_client::{Error, EventType, GetOptions, WatchOptions, WatchResponse, WatchStream};
use futures::{FutureExt, StreamExt};
use tracing::warn;

use super::Etcd;
use crate::error::ClusterError;
use crate::follow::{Feed, Lists};

/// Most members of a page. A client takes 4 MiB in one answer, and a member has at most some hundred bytes more than 1 KiB.
const PAGE: usize = 1000;

/// The source of lists.
pub(super) struct EtcdFeed(Etcd);

/// The members as of the last event, and the stream of further events.
struct Following {
    etcd: Etcd,
    members: BTreeMap<WorkerId, Member>,
    events: WatchStream,
    listed: bool,
}

impl Feed for EtcdFeed {
    fn address(&self) -> &str {
        &self.0.address
    }

    async fn open(&mut self) -> Result<Lists, ClusterError> {
        let mut listed = self.list_and_watch().await;
        if listed.is_err() && self.0.switch().await {
            listed = self.list_and_watch().await;
        }
        let following = listed.map_err(|e| self.0.error(&e))?;
        let lists = futures::stream::unfold(Some(following), |following| async move {
            let mut following = following?;
            match following.next().await {
                Ok(list) => Some((Ok(list), Some(following))),
                Err(error) => Some((Err(error), None)),
            }
        });
        Ok(lists.boxed())
    }
}

impl EtcdFeed {
    pub(super) fn new(etcd: Etcd) -> EtcdFeed {
        EtcdFeed(etcd)
    }

    async fn list_and_watch(&mut self) -> Result<Following, Error> {
        self.0.refresh().await?;
        let (members, revision) = self.list().await?;
        let Etcd { client, prefix, .. } = &mut self.0;
        let options = WatchOptions::new().with_prefix().with_start_revision(revision + 1);
        let events = client.watch(prefix.as_str(), Some(options)).await?;
        Ok(Following { etcd: self.0.clone(), members, events, listed: false })
    }

    /// All members as of one revision, and that revision. If it is compacted away between two pages, that is an error, and the caller tries
    /// again.
    async fn list(&mut self) -> Result<(BTreeMap<WorkerId, Member>, i64), Error> {
        let (mut members, mut revision, mut left) = (BTreeMap::new(), 0, MAX_MEMBERS);
        let prefix = self.0.prefix.clone();
        let (mut from, end) = (prefix.clone().into_bytes(), after_all(&prefix));
        loop {
            let options =
                GetOptions::new().with_range(end.clone()).with_limit(PAGE.min(left) as i64).with_revision(revision);
            let page = self.0.client.get(from, Some(options)).await?;
            if revision == 0 {
                revision = page.header().map_or(0, |header| header.revision());
            }
            members.extend(page.kvs().iter().filter_map(|kv| self.0.member(kv)).map(|member| (member.id, member)));
            left = left.saturating_sub(page.kvs().len());
            match page.kvs().last().filter(|_| page.more() && left > 0) {
                Some(last) => from = [last.key(), &[0]].concat(),
                None => return Ok((members, revision)),
            }
        }
    }
}

/// The end of the range of all keys with a prefix that ends with a slash.
fn after_all(prefix: &str) -> Vec<u8> {
    let mut end = prefix.as_bytes().to_vec();
    // A slash is not the last of all bytes.
    end.last_mut().into_iter().for_each(|slash| *slash += 1);
    end
}

impl Following {
    /// The first call returns the listed members; later calls wait for a change and return the members after it.
    async fn next(&mut self) -> Result<List, ClusterError> {
        let mut left = Vec::new();
        let mut changed = !self.listed;
        while !changed {
            let response = self.events.message().await;
            changed = self.take_in(response, &mut left)?;
            // What came with it belongs to one list: many members come or go at once.
            while changed && let Some(response) = self.events.message().now_or_never() {
                self.take_in(response, &mut left)?;
            }
        }
        self.listed = true;
        Ok(List { members: self.members.values().cloned().collect(), left })
    }

    /// Applies a response of the watch; whether it had events. Adds the members that have left by it, having announced that before.
    fn take_in(
        &mut self,
        response: Result<Option<WatchResponse>, Error>,
        left: &mut Vec<WorkerId>,
    ) -> Result<bool, ClusterError> {
        let broken = |problem: String| ClusterError::Unavailable { registry: self.etcd.address.clone(), problem };
        let response = response.map_err(|error| broken(error.to_string()))?;
        let response = response.ok_or_else(|| broken("the watch ended".to_owned()))?;
        // The revision was compacted away, or there is no leader: the caller lists again.
        if response.canceled() {
            return Err(broken(format!("the watch was cancelled: {}", response.cancel_reason())));
        }
        left.extend(response.events().iter().filter_map(|event| apply(&self.etcd, &mut self.members, event)));
        Ok(!response.events().is_empty())
    }
}

/// Applies an event; returns the member that has left by it, having announced that before.
fn apply(etcd: &Etcd, members: &mut BTreeMap<WorkerId, Member>, event: &etcd_client::Event) -> Option<WorkerId> {
    let kv = event.kv()?;
    let id = etcd.id(kv.key())?;
    let member = match event.event_type() {
        EventType::Put => etcd.member(kv),
        EventType::Delete => None,
    };
    match member {
        Some(member) if members.len() < MAX_MEMBERS || members.contains_key(&id) => {
            members.insert(id, member);
        }
        Some(_) => warn!(%id, "ignoring a member beyond the {MAX_MEMBERS} of a cluster"),
        None => return members.remove(&id).filter(|member| member.draining).map(|_| id),
    }
    None
}
