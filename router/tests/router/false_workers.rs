//! Workers without the right certificate, in the registry of a router that has certificates: no prompt reaches them.

use std::path::Path;

use crate::support::{Cluster, config};
use baton_cluster::Role;
use baton_router::RouterConfig;
use baton_runtime::tls::{Authority, CertificateFiles, TlsRole, write_private};
use baton_runtime::{Tls, TlsConfig};
use serde_json::json;
use tokio::net::{TcpListener, TcpStream};

fn files(folder: &Path, role: TlsRole) -> TlsConfig {
    let CertificateFiles { certificate, key, authority } = CertificateFiles::of(folder, role);
    TlsConfig { tls_cert: Some(certificate), tls_key: Some(key), tls_ca: Some(authority), ..TlsConfig::default() }
}

/// Takes TLS off with these certificates and passes the rest on; returns its address.
async fn front(tls: &Tls, behind: String) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("https://{}", listener.local_addr().unwrap());
    let server = tls.server(TlsRole::ALL, &[b"h2"]);
    tokio::spawn(async move {
        loop {
            let (stream, from) = listener.accept().await.unwrap();
            let mut near = server.accept(stream, Some(from));
            let mut far = TcpStream::connect(behind.trim_start_matches("http://")).await.unwrap();
            tokio::spawn(async move { tokio::io::copy_bidirectional(&mut near, &mut far).await });
        }
    });
    address
}

#[tokio::test]
async fn no_prompt_reaches_a_false_worker() {
    let [own, strange] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let (authority, other) = (Authority::new("own").unwrap(), Authority::new("other").unwrap());
    authority.write(own.path(), &TlsRole::ALL, 1).unwrap();
    other.write(strange.path(), &TlsRole::ALL, 1).unwrap();
    for folder in [own.path(), strange.path()] {
        write_private(&folder.join("ca.pem"), &format!("{}{}", authority.certificate(), other.certificate())).unwrap();
    }
    // The router trusts its own authority only.
    let trusted = own.path().join("trusted.pem");
    write_private(&trusted, authority.certificate()).unwrap();
    let internal_tls = TlsConfig { tls_ca: Some(trusted), ..files(own.path(), TlsRole::Router) };
    let settings = RouterConfig { internal_tls, max_attempts: 1, ..config() };
    let tls = |folder: &Path, role| Tls::open(&files(folder, role)).unwrap().unwrap();
    for (what, certificates) in [
        ("no TLS", None),
        ("another authority", Some(tls(strange.path(), TlsRole::Decode))),
        ("a client's role", Some(tls(own.path(), TlsRole::Operator))),
        ("another worker's role", Some(tls(own.path(), TlsRole::Prefill))),
        ("its own", Some(tls(own.path(), TlsRole::Decode))),
    ] {
        let mut cluster = Cluster::with(settings.clone(), 0, 0, &["hello"]).await;
        // The record of a worker, with another address than the worker's own where TLS is in front of it.
        let stand_in = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (listener, mut address) = (stand_in.local_addr().unwrap(), None);
        drop(stand_in);
        let worker = cluster.add(Role::Decode, |member| {
            if certificates.is_some() {
                address = Some(std::mem::replace(&mut member.grpc, format!("https://{listener}")));
            }
        });
        let worker = worker.await;
        if let (Some(tls), Some(behind)) = (&certificates, address) {
            let at = front(tls, behind).await;
            // The record's address leads there.
            let there = TcpListener::bind(listener).await.unwrap();
            let at = at.trim_start_matches("https://").to_owned();
            tokio::spawn(async move {
                loop {
                    let (mut near, _) = there.accept().await.unwrap();
                    let mut far = TcpStream::connect(&at).await.unwrap();
                    tokio::spawn(async move { tokio::io::copy_bidirectional(&mut near, &mut far).await });
                }
            });
        }
        cluster.readiness.wait().await;
        cluster.seen(1).await;
        let (status, answer) = cluster.ask("/v1/completions", &json!({"prompt": "secret", "max_tokens": 3})).await;
        let friend = what == "its own";
        assert_eq!(status == 200, friend, "{what}: {answer}");
        assert_eq!(worker.asked().len(), usize::from(friend), "{what}");
        cluster.stop().await;
    }
}
