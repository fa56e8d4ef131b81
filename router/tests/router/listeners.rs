//! What each listener serves: clients must not find there what is for workers and operators.

use std::net::SocketAddr;

use crate::support::{self, Cluster, config};
use baton_proto::v1;
use baton_proto::v1::registry_client::RegistryClient;
use baton_router::RouterConfig;
use tonic::Code;

/// Registers a decode worker as any process could, from a record copied off the registry, and watches. Says how both ended.
async fn intrude(address: SocketAddr) -> [Code; 2] {
    let mut registry = RegistryClient::connect(format!("http://{address}")).await.unwrap();
    let member = v1::Member {
        id: 99,
        role: v1::Role::Decode.into(),
        grpc: "http://127.0.0.1:1".into(),
        admin: "http://127.0.0.1:1".into(),
        model: support::NAME.into(),
        ..v1::Member::default()
    };
    let registered = registry.register(v1::RegisterRequest { member: Some(member), ttl_ms: 1000 }).await;
    let watched = registry.watch(v1::WatchRequest::default()).await;
    [registered.map_or_else(|e| e.code(), |_| Code::Ok), watched.map_or_else(|e| e.code(), |_| Code::Ok)]
}

#[tokio::test]
async fn a_client_can_neither_register_a_worker_nor_see_them() {
    let cluster = Cluster::start(1, 1, "fine").await;
    assert_eq!(intrude(cluster.router.grpc_addr).await, [Code::Unimplemented; 2]);
    for page in ["/cluster", "/metrics"] {
        let answer = cluster.http.get(cluster.url(page)).send().await.unwrap();
        assert_eq!(answer.status(), 404, "{page}");
    }
    assert_eq!(cluster.router.cluster()["members"].as_array().unwrap().len(), 2);
    cluster.stop().await;
}

#[tokio::test]
async fn workers_register_at_the_internal_address() {
    let cluster = Cluster::start(0, 1, "fine").await;
    let registry = baton_cluster::connect(&cluster.registry_url(), None).await.unwrap();
    let mut member = registry.watch().wait_for(|view| !view.members.is_empty()).await.unwrap().members[0].clone();
    member.id = baton_types::WorkerId(99);
    let lease = registry.register(member, std::time::Duration::from_secs(60)).await.unwrap();
    cluster.seen(2).await;
    lease.revoke().await;
    cluster.seen(1).await;
    // Open watches of workers do not keep the router from stopping.
    cluster.stop().await;
}

#[tokio::test]
async fn the_registry_stays_on_grpc_where_that_is_asked_for() {
    let cluster = Cluster::with(RouterConfig { registry_on_grpc: true, ..config() }, 1, 1, &["fine"]).await;
    assert_eq!(intrude(cluster.router.grpc_addr).await, [Code::Ok; 2]);
    cluster.stop().await;
}
