//! Tests that every [`Registry`] must pass, run against the embedded one over gRPC and against a real etcd.
//!
//! All waits are for events; [`within`] only keeps a defect from hanging the run.

#![allow(clippy::unwrap_used)] // Helpers of tests, not only the tests themselves.

mod backing;
mod special;

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use backing::{Backing, Embedded, Etcd};
use baton_cluster::{ClusterError, MAX_TEXT, Member, Registry, Role, View, ViewReceiver, connect};
use baton_types::WorkerId;

const TTL: Duration = Duration::from_secs(20);

/// Runs each of the suite's tests against each registry.
macro_rules! conformance {
    ($($test:ident),+ $(,)?) => {
        mod embedded {
            $(#[tokio::test] async fn $test() { super::within(super::$test(super::Embedded::start())).await })+
        }
        mod etcd {
            $(#[tokio::test] async fn $test() { super::within(super::$test(super::Etcd::start())).await })+
        }
    };
}

conformance!(
    a_member_is_seen_updated_and_revoked,
    a_member_that_leaves_is_not_kept,
    a_dead_member_expires_and_a_living_one_does_not,
    views_come_in_order,
    two_members_may_have_one_address,
    bad_members_are_refused,
    the_view_outlives_the_registry_and_leases_come_back,
    a_registry_may_come_up_last,
);

async fn a_member_is_seen_updated_and_revoked(backing: impl Backing) {
    let worker = registry(&backing).await;
    let mut views = registry(&backing).await.watch();
    let lease = worker.register(member(1), TTL).await.unwrap();
    assert_eq!(until(&mut views, |v| !v.members.is_empty()).await.members, [member(1)]);
    lease.set_draining();
    let draining = until(&mut views, |v| v.members.iter().all(|m| m.draining)).await;
    assert_eq!(draining.members, [Member { draining: true, ..member(1) }]);
    lease.update(Member { blocks: 7, ..lease.member() }).unwrap();
    until(&mut views, |v| v.members[0].blocks == 7).await;
    lease.revoke().await;
    let view = until(&mut views, |v| v.members.is_empty()).await;
    assert!(!view.stale && view.last_update.is_some());
}

/// Watchers keep a member that vanished for 10 s. One that leaves says so, however soon after its drain began.
async fn a_member_that_leaves_is_not_kept(backing: impl Backing) {
    let worker = registry(&backing).await;
    let mut views = registry(&backing).await.watch();
    for (id, drains) in [(1, true), (2, false)] {
        let lease = worker.register(member(id), TTL).await.unwrap();
        until(&mut views, |v| !v.members.is_empty()).await;
        if drains {
            lease.set_draining();
        }
        let began = Instant::now();
        lease.revoke().await;
        until(&mut views, |v| v.members.is_empty()).await;
        assert!(began.elapsed() < Duration::from_secs(5), "{id}: {:?}", began.elapsed());
    }
}

async fn a_dead_member_expires_and_a_living_one_does_not(backing: impl Backing) {
    let worker = registry(&backing).await;
    let _living = worker.register(member(1), Duration::from_secs(8)).await.unwrap();
    let dead = worker.register(member(2), Duration::from_secs(10)).await.unwrap();
    let mut views = worker.watch();
    until(&mut views, |v| v.members.len() == 2).await;
    drop(dead);
    let view = until(&mut views, |v| v.members.len() < 2).await;
    assert_eq!(view.members, [member(1)], "its own ttl has passed, so it was renewed");
}

async fn views_come_in_order(backing: impl Backing) {
    let worker = registry(&backing).await;
    let mut views = registry(&backing).await.watch();
    let mut leases = Vec::new();
    for id in [5, 3, 9, 1] {
        leases.push(worker.register(member(id), TTL).await.unwrap());
    }
    let (mut revision, mut count) = (0, 0);
    loop {
        let view = Arc::clone(&views.borrow_and_update());
        assert!(view.revision >= revision, "{} after {revision}", view.revision);
        assert!(view.members.len() >= count, "members only joined");
        assert!(view.members.is_sorted_by_key(|m| m.id));
        (revision, count) = (view.revision, view.members.len());
        if count == leases.len() {
            assert_eq!(view.get(WorkerId(9)), Some(&member(9)));
            break;
        }
        views.changed().await.unwrap();
    }
}

async fn two_members_may_have_one_address(backing: impl Backing) {
    let worker = registry(&backing).await;
    let first = worker.register(member(1), TTL).await.unwrap();
    let _second = worker.register(member(2), TTL).await.unwrap();
    let mut views = worker.watch();
    let view = until(&mut views, |v| v.members.len() == 2).await;
    assert_eq!(view.members[0].grpc, view.members[1].grpc);
    first.revoke().await;
    assert_eq!(until(&mut views, |v| v.members.len() == 1).await.members, [member(2)], "only the one that left");
}

async fn bad_members_are_refused(backing: impl Backing) {
    // I5, I8
    let worker = registry(&backing).await;
    let refused = |result: Result<_, ClusterError>| result.err().unwrap().to_string();
    let large = Member { model: "m".repeat(MAX_TEXT + 1), ..member(1) };
    assert_eq!(
        refused(worker.register(large.clone(), TTL).await),
        "member.model: has 257 bytes; at most 256 are allowed"
    );
    let nowhere = Member { grpc: "127.0.0.1".to_owned(), ..member(1) };
    assert!(refused(worker.register(nowhere, TTL).await).contains("http://host:port"));
    assert!(refused(worker.register(member(1), Duration::ZERO).await).contains("between 1 s and 1 h"));
    let lease = worker.register(member(1), TTL).await.unwrap();
    assert!(lease.update(large).is_err());
    let mut views = worker.watch();
    assert_eq!(
        until(&mut views, |v| !v.members.is_empty()).await.members,
        [member(1)],
        "nothing lost for the good one"
    );
}

async fn the_view_outlives_the_registry_and_leases_come_back(mut backing: impl Backing) {
    // I7
    let (one, two) = (registry(&backing).await, registry(&backing).await);
    let _first = one.register(member(1), TTL).await.unwrap();
    let mut views = one.watch();
    until(&mut views, |v| v.members.len() == 1).await;
    backing.kill();
    let view = until(&mut views, |v| v.stale).await;
    assert_eq!(view.members, [member(1)], "the last known view");
    // Registering waits for the registry.
    let second = tokio::spawn(async move { two.register(member(2), TTL).await });
    backing.restart();
    let _second = second.await.unwrap().unwrap();
    let view = until(&mut views, |v| v.members.len() == 2).await;
    assert!(!view.stale);
    // A new watcher sees both: the first member has registered again by itself.
    until(&mut registry(&backing).await.watch(), |v| v.members.len() == 2).await;
}

async fn a_registry_may_come_up_last(mut backing: impl Backing) {
    backing.kill();
    let worker = registry(&backing).await;
    let mut views = worker.watch();
    assert_eq!((views.borrow().stale, views.borrow().last_update), (true, None));
    let registering = tokio::spawn(async move { worker.register(member(1), TTL).await.map(|lease| (lease, worker)) });
    backing.restart();
    let _keep = registering.await.unwrap().unwrap();
    assert!(!until(&mut views, |v| v.members.len() == 1).await.stale);
}

fn member(id: u64) -> Member {
    Member {
        id: WorkerId(id),
        role: if id.is_multiple_of(2) { Role::Prefill } else { Role::Decode },
        grpc: "http://127.0.0.1:9001".to_owned(),
        admin: "http://127.0.0.1:9002".to_owned(),
        model: "smollm2".to_owned(),
        layout: u64::MAX - 1,
        blocks: 512,
        block_size: 16,
        window_tokens: 0,
        max_running: 0,
        context_tokens: 8192,
        draining: false,
        late_targets: false,
        exchanges: 7,
        kv_secret: 8,
    }
}

async fn registry(backing: &impl Backing) -> Arc<dyn Registry> {
    connect(&backing.spec(), None).await.unwrap()
}

async fn until(views: &mut ViewReceiver, mut wanted: impl FnMut(&View) -> bool) -> Arc<View> {
    Arc::clone(&views.wait_for(|view| wanted(view)).await.unwrap())
}

async fn within(test: impl Future<Output = ()>) {
    tokio::time::timeout(Duration::from_secs(120), test).await.expect("hangs");
}
