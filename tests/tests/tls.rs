//! TLS between real processes: who has no certificate of the right role gets in nowhere, and certificates change under load.
#![allow(clippy::unwrap_used)]

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use baton_cluster::{Member, Role};
use baton_proto::v1::{self, registry_client::RegistryClient, worker_client::WorkerClient};
use baton_runtime::tls::{Authority, CertificateFiles, TlsRole, dial, write_private};
use baton_runtime::{Tls, TlsConfig};
use baton_tests::binary::{self, runtime_dir};
use baton_tests::cluster::client::{apart, prompt, sampled};
use baton_tests::cluster::{Cluster, ClusterOptions, learn, models, operator, processes, wait};
use rustix::process::Signal;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

fn of(folder: &Path, role: TlsRole) -> Tls {
    let CertificateFiles { certificate, key, authority } = CertificateFiles::of(folder, role);
    let (tls_cert, tls_key, tls_ca) = (Some(certificate), Some(key), Some(authority));
    Tls::open(&TlsConfig { tls_cert, tls_key, tls_ca, ..TlsConfig::default() }).unwrap().unwrap()
}

/// Whether a listener lets in somebody with these certificates, or without any. A server learns of a bad certificate after its client
/// believes to be connected, so this waits for what it does then.
async fn lets_in(port: u16, tls: Option<&Tls>) -> bool {
    let client = tls.map(|tls| tls.client(TlsRole::ALL, &[]));
    let Ok(mut stream) = dial("127.0.0.1", port, client.as_ref()).await else { return false };
    if tls.is_none() {
        // What gRPC begins with. Without TLS it is answered in kind, or waited for; TLS answers with an alert, or closes.
        const BEGINNING: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
        stream.write_all(BEGINNING).await.unwrap();
        let read = tokio::time::timeout(Duration::from_secs(2), stream.read_u8()).await;
        return !matches!(read, Ok(Ok(0x15) | Err(_)));
    }
    let read = stream.read_u8();
    // Who is let in is waited for in silence, or told a protocol's first words.
    tokio::time::timeout(Duration::from_secs(2), read).await.is_ok_and(|read| read.is_ok()) || {
        // A handshake that was refused has closed the connection by now.
        let read = stream.read_u8();
        tokio::time::timeout(Duration::from_millis(100), read).await.is_err()
    }
}

fn port(member: &Member) -> u16 {
    member.grpc.rsplit_once(':').unwrap().1.parse().unwrap()
}

/// Certificates of another authority for all roles, in a folder whose authority is the one in `of`.
fn strangers(of: &Path) -> TempDir {
    let strangers = tempfile::tempdir().unwrap();
    write_private(&strangers.path().join("ca.pem"), &std::fs::read_to_string(of.join("ca.pem")).unwrap()).unwrap();
    Authority::new("other").unwrap().write(strangers.path(), &TlsRole::ALL, 1).unwrap();
    strangers
}

fn with_role(cluster: &Cluster, role: Role) -> Member {
    cluster.members().into_iter().find(|m| m.role == role).unwrap()
}

/// Checks every internal port of a cluster with a prefill and a decode worker: who has a certificate of a right role in `certs` is let in, nobody
/// else, and not with the same role in `strangers`.
fn only_its_own_get_in(cluster: &Cluster, certs: &Path, strangers: &Path) {
    let [prefill, decode, supervisor] =
        [Role::Prefill, Role::Decode, Role::Supervisor].map(|role| with_role(cluster, role));
    let internal: u16 = cluster.registry().rsplit_once(':').unwrap().1.parse().unwrap();
    let admin: u16 = decode.admin.rsplit_once(':').unwrap().1.parse().unwrap();
    let listening = processes::listening_ports(cluster.pid("decode").unwrap());
    let transfer = *listening.iter().find(|p| **p != port(&decode) && **p != admin).unwrap();
    let workers = [TlsRole::Prefill, TlsRole::Decode];
    let callers = [TlsRole::Router, TlsRole::Operator];
    for (name, port, may) in [
        ("internal", internal, &TlsRole::ALL[..]),
        ("prefill", port(&prefill), &callers[..]),
        ("decode", port(&decode), &callers[..]),
        ("transfer", transfer, &workers[..]),
        ("supervisor", port(&supervisor), &[TlsRole::Operator][..]),
    ] {
        assert!(!cluster.block_on(lets_in(port, None)), "{name}: no TLS");
        for role in TlsRole::ALL {
            let let_in = cluster.block_on(lets_in(port, Some(&of(certs, role))));
            assert_eq!(let_in, may.contains(&role), "{name}: {role:?}");
            let stranger = cluster.block_on(lets_in(port, Some(&of(strangers, role))));
            assert!(!stranger, "{name}: a stranger's {role:?}");
        }
    }
}

#[test]
fn a_cluster_has_an_authority_of_its_own_unless_it_is_given_one() {
    let model = models::tiny().unwrap();
    let cluster = Cluster::start(ClusterOptions::new(model.path())).unwrap();
    cluster.wait_for_members(|members| members.len() == 3).unwrap();
    let port = cluster.registry().rsplit_once(':').unwrap().1;
    let certs = runtime_dir().join("baton").join(format!("up-{port}"));
    // Other users of the machine can read none of it, and its own user no key that makes more certificates.
    let files: Vec<_> = std::fs::read_dir(&certs).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(files.len() > TlsRole::ALL.len(), "{files:?}");
    for path in files.iter().chain([&certs]) {
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o077, 0, "{}", path.display());
    }
    assert!(!certs.join("ca-key.pem").exists(), "{files:?}");
    only_its_own_get_in(&cluster, &certs, strangers(&certs).path());
    cluster.stop().unwrap();
    assert!(!certs.exists());
}

#[test]
fn who_has_no_right_certificate_is_refused_on_every_port() {
    let model = models::tiny().unwrap();
    let certs = tempfile::tempdir().unwrap();
    let folder = certs.path().to_str().unwrap();
    binary::output(&["certs", folder]).unwrap();
    let strangers = strangers(certs.path());
    let args = vec!["--certs".to_owned(), folder.to_owned()];
    let cluster = Cluster::start(ClusterOptions { args, ..ClusterOptions::new(model.path()) }).unwrap();
    cluster.wait_for_members(|members| members.len() == 3).unwrap();
    let [prefill, decode, supervisor] =
        [Role::Prefill, Role::Decode, Role::Supervisor].map(|role| with_role(&cluster, role));
    assert!([&prefill, &decode, &supervisor].iter().all(|m| m.grpc.starts_with("https://")), "{:?}", cluster.members());
    only_its_own_get_in(&cluster, certs.path(), strangers.path());
    // A prefill worker's certificate registers no decode worker, which would be sent prompts, and removes none.
    let tls = of(certs.path(), TlsRole::Prefill);
    let channel = async { baton_cluster::channel(cluster.registry(), Some((&tls, TlsRole::Router))).unwrap() };
    let mut registry = RegistryClient::new(cluster.block_on(channel));
    let false_one = baton_cluster::member_to_proto(Member { id: baton_types::WorkerId(7), ..decode.clone() });
    let request = v1::RegisterRequest { member: Some(false_one), ttl_ms: 5000 };
    let refused = cluster.block_on(registry.register(request)).unwrap_err();
    assert_eq!(refused.code(), tonic::Code::PermissionDenied, "{refused}");
    let removal = cluster.block_on(registry.deregister(v1::DeregisterRequest { id: decode.id.0 })).unwrap_err();
    assert_eq!(removal.code(), tonic::Code::PermissionDenied, "{removal}");
    // Nor does it take the place of one.
    let in_its_place = baton_cluster::member_to_proto(Member { id: decode.id, ..prefill.clone() });
    let request = v1::RegisterRequest { member: Some(in_its_place), ttl_ms: 5000 };
    let refused = cluster.block_on(registry.register(request)).unwrap_err();
    assert_eq!(refused.code(), tonic::Code::PermissionDenied, "{refused}");
    assert_eq!(cluster.members().len(), 3);
    // Each listener has complained of this address, once a minute at most.
    let complaints = cluster.log().lines().filter(|line| line.contains("a connection is refused")).count();
    assert!((4..=6).contains(&complaints), "{complaints}\n{}", cluster.log());
    // Nobody was harmed, and an operator sees all.
    let answer = cluster.block_on(cluster.client().unwrap().ask(sampled(prompt(40, 1), 8, 1))).unwrap();
    assert_eq!(answer.ids.len(), 8);
    let shown = binary::output(&["status", "--registry", cluster.registry(), "--certs", folder]).unwrap();
    assert!(shown.contains("decode") && shown.contains("prefill"), "{shown}");
    let not_shown = binary::run(&["status", "--registry", cluster.registry()]).unwrap();
    assert!(not_shown.err.contains("--certs"), "{}", not_shown.err);
    cluster.stop().unwrap();
}

#[test]
fn certificates_and_their_authority_change_under_load() {
    let model = models::tiny().unwrap();
    let certs = tempfile::tempdir().unwrap();
    let folder = certs.path().to_str().unwrap();
    binary::output(&["certs", folder]).unwrap();
    let before = operator(certs.path()).unwrap();
    let args = vec!["--certs".to_owned(), folder.to_owned()];
    let options = ClusterOptions { transport: "tcp", args, ..ClusterOptions::new(model.path()) };
    let cluster = Cluster::start(options).unwrap();
    let (stop, asked) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let clients: Vec<_> = (0..4)
        .map(|client| {
            let (stop, asked, client_) = (Arc::clone(&stop), Arc::clone(&asked), cluster.client().unwrap());
            cluster.spawn(async move {
                let want = client_.ask(apart(sampled(prompt(60, client), 20, client))).await?.ids;
                while !stop.load(Ordering::Relaxed) {
                    let got = client_.ask(apart(sampled(prompt(60, client), 20, client))).await?.ids;
                    anyhow::ensure!(got == want, "{got:?}");
                    asked.fetch_add(1, Ordering::Relaxed);
                }
                anyhow::Ok(())
            })
        })
        .collect();
    let reads = || cluster.log().matches("certificates read again").count();
    let decodes = || cluster.members().into_iter().filter(|m| m.role == Role::Decode).collect::<Vec<_>>();
    let decode = || decodes().remove(0);
    // Router, two workers and their supervisor.
    for (round, change) in ["--renew", "--new-ca", "--renew", "--drop-old-ca"].into_iter().enumerate() {
        let (seen, answered) = (reads(), asked.load(Ordering::Relaxed));
        binary::output(&["certs", folder, change]).unwrap();
        wait(|| (reads() >= seen + 4).then_some(())).unwrap();
        wait(|| (asked.load(Ordering::Relaxed) > answered + 8).then_some(())).unwrap();
        if round == 2 {
            // Connections that are made from here on have certificates of the new authority at both ends.
            let killed = cluster.pid("decode").unwrap();
            let its_record = decode();
            cluster.signal(killed, Signal::KILL).unwrap();
            wait(|| cluster.pids("decode").iter().any(|pid| *pid != killed).then_some(())).unwrap();
            // Until its lease has run out there are two records.
            wait(|| (decodes().len() == 1 && decode().id != its_record.id).then_some(())).unwrap();
        }
    }
    stop.store(true, Ordering::Relaxed);
    for client in clients {
        cluster.block_on(client).unwrap().unwrap();
    }
    // What was trusted at first is not trusted any more.
    learn(certs.path()).unwrap();
    cluster.wait_idle().unwrap();
    let address = decode().grpc;
    let ask = |tls: &Tls| {
        cluster.block_on(async {
            let channel = baton_cluster::channel(&address, Some((tls, TlsRole::Decode))).unwrap();
            WorkerClient::new(channel).status(v1::StatusRequest {}).await
        })
    };
    ask(&operator(certs.path()).unwrap()).unwrap();
    assert!(ask(&before).is_err());
    cluster.stop().unwrap();
}
