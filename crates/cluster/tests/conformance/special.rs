//! Tests that concern only one of the registries.

use std::io::{Read, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use baton_cluster::{ClusterError, EmbeddedRegistry, MAX_TEXT, Member, Registry, Role, connect, member_to_proto};
use baton_proto::v1;
use baton_proto::v1::registry_client::RegistryClient;
use baton_runtime::tls::{Authority, Issued, TlsMode, TlsRole};
use baton_runtime::{Shutdown, Tls, TlsConfig};
use etcd_client::{Client, EventType, PutOptions, Txn, TxnOp, WatchStream};
use tokio::sync::oneshot;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::Code;
use tonic::transport::Server;

use super::backing::{Backing, Embedded, Etcd};
use super::{TTL, member, registry, until, within};

#[tokio::test]
async fn the_embedded_service_checks_what_strangers_send() {
    // I8
    within(async {
        let backing = Embedded::start();
        let mut stranger = RegistryClient::connect(backing.spec()).await.unwrap();
        let empty = v1::RegisterRequest { member: None, ttl_ms: 20_000 };
        let huge = Member { model: "m".repeat(1 << 20), ..member(1) };
        let huge = v1::RegisterRequest { member: Some(member_to_proto(huge)), ttl_ms: 20_000 };
        let role = v1::Member { role: 99, ..member_to_proto(member(1)) };
        let role = v1::RegisterRequest { member: Some(role), ttl_ms: 20_000 };
        let short = v1::RegisterRequest { member: Some(member_to_proto(member(1))), ttl_ms: 0 };
        for (request, want) in [(empty, "member: is missing"), (role, "member.role"), (short, "ttl is 0 ms")] {
            let status = stranger.register(request).await.unwrap_err();
            assert_eq!(status.code(), Code::InvalidArgument);
            assert!(status.message().contains(want), "{status}");
        }
        stranger.register(huge).await.unwrap_err();
        stranger.deregister(v1::DeregisterRequest { id: 404 }).await.unwrap();
        let _lease = registry(&backing).await.register(member(1), TTL).await.unwrap();
        until(&mut registry(&backing).await.watch(), |v| v.members == [member(1)]).await;
    })
    .await;
}

/// A watcher of the version before refuses a view with a role that it does not know.
#[tokio::test]
async fn only_who_knows_kv_stores_is_told_of_them() {
    within(async {
        let backing = Embedded::start();
        let store = Member { role: Role::KvStore, ..member(2) };
        let registry = registry(&backing).await;
        let _leases =
            (registry.register(member(1), TTL).await.unwrap(), registry.register(store.clone(), TTL).await.unwrap());
        until(&mut registry.watch(), |v| v.members == [member(1), store.clone()]).await;
        let mut before = RegistryClient::connect(backing.spec()).await.unwrap();
        let mut views = before.watch(v1::WatchRequest::default()).await.unwrap().into_inner();
        let view = views.message().await.unwrap().unwrap();
        assert_eq!(view.members, [member_to_proto(member(1))]);
    })
    .await;
}

#[tokio::test]
async fn the_routers_own_process_shares_the_embedded_registry() {
    within(async {
        let embedded = EmbeddedRegistry::new();
        let listener = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let spec = format!("http://{}", listener.local_addr().unwrap());
        let (stop, stopped) = oneshot::channel::<()>();
        let server = Server::builder()
            .add_service(embedded.service())
            .serve_with_incoming_shutdown(TcpListenerStream::new(listener), async { stopped.await.unwrap() });
        let server = tokio::spawn(server);
        let remote = connect(&spec, None).await.unwrap();
        let _remote_lease = remote.register(member(1), TTL).await.unwrap();
        let local_lease = embedded.register(member(2), TTL).await.unwrap();
        let mut far = remote.watch();
        until(&mut far, |v| v.members.len() == 2).await;
        until(&mut embedded.watch(), |v| v.members == [member(1), member(2)]).await;
        local_lease.revoke().await;
        until(&mut far, |v| v.members == [member(1)]).await;
        // A server that waits for its streams ends once the watches are closed.
        embedded.close();
        stop.send(()).unwrap();
        server.await.unwrap().unwrap();
        assert_eq!(until(&mut far, |v| v.stale).await.members, [member(1)]);
    })
    .await;
}

#[tokio::test]
async fn a_server_that_is_no_registry_is_an_error_and_not_a_wait() {
    within(async {
        let listener = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let addr = listener.local_addr().unwrap();
        let other = Server::builder().add_routes(tonic::service::Routes::default());
        let _server = tokio::spawn(other.serve_with_incoming(TcpListenerStream::new(listener)));
        for spec in [format!("http://{addr}"), format!("etcd://{addr}")] {
            match connect(&spec, None).await.unwrap().register(member(1), TTL).await {
                Err(ClusterError::Refused { registry, .. }) => assert!(registry.starts_with(&spec), "{registry}"),
                other => panic!("{other:?}"),
            }
        }
    })
    .await;
}

#[tokio::test]
async fn what_others_do_to_keys_in_etcd_hurts_nobody() {
    within(async {
        let backing = Etcd::start();
        let worker = registry(&backing).await;
        let _lease = worker.register(member(1), Duration::from_secs(3)).await.unwrap();
        let mut views = worker.watch();
        until(&mut views, |v| v.members == [member(1)]).await;
        let mut etcd = Client::connect([backing.endpoint()], None).await.unwrap();
        // Rubbish, and a member under another's key, are ignored (I8).
        let prefix = "/baton/conformance/members/";
        etcd.put(format!("{prefix}rubbish"), "{}", None).await.unwrap();
        etcd.put(format!("{prefix}{:016x}", 7), "not json", None).await.unwrap();
        let swapped = serde_json::to_vec(&member(9)).unwrap();
        etcd.put(format!("{prefix}{:016x}", 8), swapped, None).await.unwrap();
        let good = serde_json::to_vec(&member(5)).unwrap();
        etcd.put(format!("{prefix}{:016x}", 5), good, Some(PutOptions::new())).await.unwrap();
        let view = until(&mut views, |v| v.members.len() > 1).await;
        assert_eq!(view.members, [member(1), member(5)]);
        // A deleted key comes back when it is looked at, a revoked lease with the next renewal. The test reads etcd's own events, because a
        // quick renewal could hide the gap from a view.
        let key = format!("{prefix}{:016x}", 1);
        let mut events = etcd.watch(key.clone(), None).await.unwrap();
        let lease = etcd.get(key.clone(), None).await.unwrap().kvs()[0].lease();
        etcd.delete(key.clone(), None).await.unwrap();
        comes_back(&mut events).await;
        etcd.lease_revoke(lease).await.unwrap();
        comes_back(&mut events).await;
        // Also where renewals are seldom: before routers forget the member (I7).
        let _seldom = worker.register(member(2), Duration::from_secs(60)).await.unwrap();
        let key = format!("{prefix}{:016x}", 2);
        let mut events = etcd.watch(key.clone(), None).await.unwrap();
        etcd.delete(key, None).await.unwrap();
        tokio::time::timeout(Duration::from_secs(5), comes_back(&mut events)).await.expect("in time");
        until(&mut views, |v| v.members.len() == 3).await;
        drop(_seldom);
        until(&mut views, |v| v.members.contains(&member(1)) && v.members.contains(&member(5))).await;
    })
    .await;
}

/// A member is renewed by messages on one stream, and etcd writes nothing for that.
#[tokio::test]
async fn renewals_go_over_one_stream_and_write_nothing() {
    within(async {
        let backing = Etcd::start();
        // Renewed every second.
        let ttl = Duration::from_secs(3);
        let _lease = registry(&backing).await.register(member(1), ttl).await.unwrap();
        let counts = || {
            let page = metrics(&backing.endpoint());
            let renewals = sum(&page, "etcd_debugging_lease_renewed_total", "");
            let streams = sum(&page, "grpc_server_started_total", "grpc_method=\"LeaseKeepAlive\"");
            (renewals, streams, sum(&page, "etcd_server_proposals_committed_total", ""))
        };
        let (renewed, _, written) = counts();
        let (renewed, streams, now) = loop {
            let now = counts();
            if now.0 >= renewed + 7.0 {
                break now;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        };
        // etcd itself may write its version shortly after its start.
        assert!(
            streams == 1.0 && now - written < 3.0,
            "{renewed} renewals: {streams} streams, {} writes",
            now - written
        );
    })
    .await;
}

/// The end of the stream tells a member that is renewed every ten seconds only, long before the next renewal is due.
#[tokio::test]
async fn a_member_with_a_long_ttl_is_back_soon_after_etcd_has_lost_everything() {
    within(async {
        let mut backing = Etcd::start();
        let long = Duration::from_secs(600);
        let _lease = registry(&backing).await.register(member(1), long).await.unwrap();
        backing.wipe();
        backing.restart();
        let began = Instant::now();
        until(&mut registry(&backing).await.watch(), |v| v.members == [member(1)]).await;
        assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    })
    .await;
}

/// What etcd says of itself.
fn metrics(endpoint: &str) -> String {
    let mut stream = std::net::TcpStream::connect(endpoint).unwrap();
    write!(stream, "GET /metrics HTTP/1.0\r\n\r\n").unwrap();
    let mut page = String::new();
    stream.read_to_string(&mut page).unwrap();
    page
}

/// Sum of a metric's series with these labels.
fn sum(page: &str, metric: &str, labels: &str) -> f64 {
    let of = |line: &&str| {
        line.strip_prefix(metric).is_some_and(|rest| rest.starts_with(['{', ' ']) && rest.contains(labels))
    };
    let values = page.lines().filter(of).map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap());
    values.sum()
}

/// More members than one answer of etcd may have bytes: a list comes in pages of one revision.
#[tokio::test]
async fn a_list_that_no_message_holds_comes_in_pages() {
    within(async {
        let backing = Etcd::start();
        let mut etcd = Client::connect([backing.endpoint()], None).await.unwrap();
        let all: Vec<Member> = (1..=12_000).map(|id| Member { model: "m".repeat(MAX_TEXT), ..member(id) }).collect();
        // As many operations as etcd takes at once.
        for some in all.chunks(128) {
            let put = |member: &Member| {
                let key = format!("/baton/conformance/members/{:016x}", member.id.0);
                TxnOp::put(key, serde_json::to_vec(member).unwrap(), None)
            };
            etcd.txn(Txn::new().and_then(some.iter().map(put).collect::<Vec<_>>())).await.unwrap();
        }
        let mut views = registry(&backing).await.watch();
        assert_eq!(until(&mut views, |v| !v.stale).await.members, all, "all of them, and at once");
        // What comes after the list is seen too.
        let _one = registry(&backing).await.register(member(20_000), TTL).await.unwrap();
        until(&mut views, |v| v.members.len() == all.len() + 1).await;
    })
    .await;
}

#[tokio::test]
async fn clusters_that_share_an_etcd_do_not_see_each_other() {
    within(async {
        let backing = Etcd::start();
        let blue = connect(&format!("etcd://{}/blue", backing.endpoint()), None).await.unwrap();
        let green = connect(&format!("etcd://{}/blue-green", backing.endpoint()), None).await.unwrap();
        let _blue = blue.register(member(1), TTL).await.unwrap();
        let _green = green.register(member(2), TTL).await.unwrap();
        assert_eq!(until(&mut blue.watch(), |v| !v.stale).await.members, [member(1)]);
        assert_eq!(until(&mut green.watch(), |v| !v.stale).await.members, [member(2)]);
    })
    .await;
}

/// Waits for a delete followed by a put.
async fn comes_back(events: &mut WatchStream) {
    let mut seen = Vec::new();
    while seen.len() < 2 {
        let response = events.message().await.unwrap().unwrap();
        seen.extend(response.events().iter().map(|event| event.event_type()));
    }
    assert_eq!(seen, [EventType::Delete, EventType::Put]);
}

/// Files of a process, by this authority.
fn certify(authority: &Authority, folder: &Path, issued: Issued) {
    for (file, text) in
        [("tls.crt", &*issued.certificate), ("tls.key", &issued.key), ("ca.crt", authority.certificate())]
    {
        std::fs::write(folder.join(file), text).unwrap();
    }
}

/// The certificates in a folder, read again when they change.
fn opened(folder: &Path, tls: TlsMode) -> Tls {
    let file = |name: &str| Some(folder.join(name));
    let files = (file("tls.crt"), file("tls.key"), file("ca.crt"));
    let config = TlsConfig { tls_cert: files.0, tls_key: files.1, tls_ca: files.2, tls, ..TlsConfig::default() };
    let tls = Tls::open(&config).unwrap().unwrap();
    tokio::spawn(tls.clone().watch(Shutdown::new(Duration::from_secs(1))));
    tls
}

#[tokio::test]
async fn etcd_is_reached_over_tls_also_when_everybody_has_new_certificates() {
    within(async {
        let folder = tempfile::tempdir().unwrap();
        let of = |name: &str| folder.path().join(name);
        let certify_all = || {
            let authority = Authority::new("conformance").unwrap();
            for name in ["etcd", "decode", "router"] {
                std::fs::create_dir_all(of(name)).unwrap();
            }
            certify(&authority, &of("etcd"), authority.issue_server("etcd", &["127.0.0.1".to_owned()], 1).unwrap());
            certify(&authority, &of("decode"), authority.issue(&[TlsRole::Decode], 1).unwrap());
            certify(&authority, &of("router"), authority.issue(&[TlsRole::Router], 1).unwrap());
        };
        certify_all();
        let mut backing = Etcd::with_tls(&of("etcd"));
        let (decode, router) = (opened(&of("decode"), TlsMode::Required), opened(&of("router"), TlsMode::Required));
        let watcher = connect(&backing.spec(), Some(&router)).await.unwrap();
        let mut views = watcher.watch();
        let registry = connect(&backing.spec(), Some(&decode)).await.unwrap();
        let _lease = registry.register(member(1), TTL).await.unwrap();
        until(&mut views, |v| v.members == [member(1)] && !v.stale).await;
        // Without a certificate of this authority nobody is let in.
        let strange = Authority::new("conformance").unwrap();
        std::fs::create_dir_all(of("stranger")).unwrap();
        certify(&strange, &of("stranger"), strange.issue(&[TlsRole::Decode], 1).unwrap());
        let stranger = connect(&backing.spec(), Some(&opened(&of("stranger"), TlsMode::Required))).await.unwrap();
        let refused = tokio::time::timeout(Duration::from_secs(2), stranger.register(member(2), TTL)).await;
        assert!(!matches!(refused, Ok(Ok(_))), "a stranger has registered");
        // Another authority: nothing of before is good for anything.
        backing.kill();
        until(&mut views, |v| v.stale).await;
        certify_all();
        backing.restart();
        until(&mut views, |v| v.members == [member(1)] && !v.stale).await;
        let _second = registry.register(member(3), TTL).await.unwrap();
        until(&mut views, |v| v.members == [member(1), member(3)]).await;
    })
    .await;
}

/// While a cluster goes over to TLS, or back, its processes outlast an etcd that begins or ends to have it.
#[tokio::test]
async fn etcd_may_go_over_to_tls_and_back() {
    within(async {
        let folder = tempfile::tempdir().unwrap();
        let of = |name: &str| folder.path().join(name);
        let authority = Authority::new("conformance").unwrap();
        let etcd = authority.issue_server("etcd", &["127.0.0.1".to_owned()], 1).unwrap();
        for (name, issued) in [("etcd", etcd), ("decode", authority.issue(&[TlsRole::Decode], 1).unwrap())] {
            std::fs::create_dir_all(of(name)).unwrap();
            certify(&authority, &of(name), issued);
        }
        let tls = opened(&of("decode"), TlsMode::Permissive);
        let mut backing = Etcd::start();
        let spec = backing.spec().replace("etcd://", "etcds://");
        let registry = connect(&spec, Some(&tls)).await.unwrap();
        let _lease = registry.register(member(1), TTL).await.unwrap();
        let mut views = registry.watch();
        until(&mut views, |v| v.members == [member(1)] && !v.stale).await;
        for certificates in [Some(of("etcd")), None] {
            backing.kill();
            until(&mut views, |v| v.stale).await;
            backing.secure(certificates);
            backing.restart();
            until(&mut views, |v| v.members == [member(1)] && !v.stale).await;
        }
    })
    .await;
}
