//! Handshakes over real sockets, with certificates of all kinds.

use std::path::Path;

use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use super::*;

/// A cluster's authority and a folder with its certificates.
struct Cluster {
    authority: Authority,
    folder: TempDir,
}

impl Cluster {
    fn new() -> Cluster {
        let (authority, folder) = (Authority::new("test").unwrap(), tempfile::tempdir().unwrap());
        write_private(&folder.path().join("ca.pem"), authority.certificate()).unwrap();
        authority.write(folder.path(), &TlsRole::ALL, 1).unwrap();
        Cluster { authority, folder }
    }

    fn of(&self, role: TlsRole) -> Tls {
        open(self.folder.path(), role, TlsMode::Required)
    }
}

fn open(folder: &Path, role: TlsRole, tls: TlsMode) -> Tls {
    let CertificateFiles { certificate, key, authority } = CertificateFiles::of(folder, role);
    let (tls_cert, tls_key, tls_ca) = (Some(certificate), Some(key), Some(authority));
    Tls::open(&TlsConfig { tls_cert, tls_key, tls_ca, tls, ..TlsConfig::default() }).unwrap().unwrap()
}

/// Sends a word there and back; returns the roles that the server saw.
async fn talk(server: TlsServer, client: Option<TlsClient>) -> io::Result<Option<TlsRoles>> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let port = listener.local_addr()?.port();
    let serving = tokio::spawn(async move {
        let (stream, address) = listener.accept().await?;
        let mut stream = server.accept(stream, Some(address));
        let mut word = [0; 5];
        stream.read_exact(&mut word).await?;
        stream.write_all(&word).await?;
        stream.flush().await?;
        io::Result::Ok(stream.peer().roles())
    });
    let client = async {
        let mut stream = dial("127.0.0.1", port, client.as_ref()).await?;
        let mut word = [0; 5];
        stream.write_all(b"baton").await?;
        stream.flush().await?;
        stream.read_exact(&mut word).await?;
        if &word == b"baton" { Ok(()) } else { Err(io::Error::from(io::ErrorKind::InvalidData)) }
    };
    let said = client.await;
    let seen = serving.await.unwrap();
    said.and(seen)
}

#[tokio::test]
async fn each_role_reaches_what_is_for_it() {
    let cluster = Cluster::new();
    let worker = |peers: &[TlsRole]| cluster.of(TlsRole::Decode).server(peers.to_vec(), &[alpn::HTTP2]);
    for role in TlsRole::ALL {
        let client = cluster.of(role).client([TlsRole::Decode], &[alpn::HTTP2]);
        let seen = talk(worker(&[TlsRole::Router, TlsRole::Operator]), Some(client)).await;
        let may = matches!(role, TlsRole::Router | TlsRole::Operator);
        assert_eq!(seen.ok(), may.then(|| Some([role].into_iter().collect())), "{role:?}");
    }
    // A client has a look at the role, too.
    let router = cluster.of(TlsRole::Router).client([TlsRole::Prefill], &[alpn::HTTP2]);
    let error = talk(worker(&[TlsRole::Router]), Some(router)).await.unwrap_err().to_string();
    assert!(error.contains("has the role decode; here it must be one of prefill"), "{error}");
}

#[tokio::test]
async fn strangers_are_refused() {
    let (cluster, other) = (Cluster::new(), Cluster::new());
    let server = |peer| cluster.of(TlsRole::Router).server([peer], &[]);
    // Each end looks by itself: a client that trusts both, and a server of a stranger.
    let both = format!("{}{}", cluster.authority.certificate(), other.authority.certificate());
    write_private(&other.folder.path().join("ca.pem"), &both).unwrap();
    let stranger = other.of(TlsRole::Prefill).client([TlsRole::Router], &[]);
    assert!(talk(server(TlsRole::Prefill), Some(stranger)).await.is_err(), "another authority");
    let strange = other.of(TlsRole::Router).server([TlsRole::Prefill], &[]);
    let error = talk(strange, Some(cluster.of(TlsRole::Prefill).client([TlsRole::Router], &[]))).await.unwrap_err();
    assert!(error.to_string().contains("UnknownIssuer"), "{error}");
    assert!(talk(server(TlsRole::Prefill), None).await.is_err(), "no TLS");
    // No certificate at all.
    let mut roots = rustls::RootCertStore::empty();
    roots.add(cluster.of(TlsRole::Router).live.material().key.cert[0].clone()).unwrap();
    let config = ClientConfig::builder_with_provider(provider()).with_protocol_versions(&[&TLS13]).unwrap();
    let peers = Peers::new(Arc::clone(&cluster.of(TlsRole::Router).live), TlsRole::ALL.into_iter().collect());
    let config = config.dangerous().with_custom_certificate_verifier(Arc::new(peers)).with_no_client_auth();
    let bare = TlsClient { config: Arc::new(config), permissive: false };
    assert!(talk(server(TlsRole::Prefill), Some(bare)).await.is_err(), "no certificate");
    // One that has run out, and one without a role.
    for (roles, days) in [(&[TlsRole::Prefill][..], 0), (&[], 1)] {
        let issued = cluster.authority.issue(roles, days).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let files = CertificateFiles::of(folder.path(), TlsRole::Prefill);
        write_private(&files.certificate, &issued.certificate).unwrap();
        write_private(&files.key, &issued.key).unwrap();
        write_private(&files.authority, cluster.authority.certificate()).unwrap();
        let client = open(folder.path(), TlsRole::Prefill, TlsMode::Required).client([TlsRole::Router], &[]);
        // A certificate is good for its last second.
        tokio::time::sleep(std::time::Duration::from_millis(1100)).await;
        assert!(talk(server(TlsRole::Prefill), Some(client)).await.is_err(), "{roles:?}, {days}");
    }
    let friend = cluster.of(TlsRole::Prefill).client([TlsRole::Router], &[]);
    assert!(talk(server(TlsRole::Prefill), Some(friend)).await.is_ok());
}

#[tokio::test]
async fn permissive_listeners_understand_both() {
    let cluster = Cluster::new();
    let server = || open(cluster.folder.path(), TlsRole::Router, TlsMode::Permissive).server([TlsRole::Decode], &[]);
    let client = cluster.of(TlsRole::Decode).client([TlsRole::Router], &[]);
    assert_eq!(talk(server(), None).await.unwrap(), None);
    assert_eq!(talk(server(), Some(client)).await.unwrap().map(|roles| roles.to_string()), Some("decode".to_owned()));
    let wrong = cluster.of(TlsRole::Prefill).client([TlsRole::Router], &[]);
    assert!(talk(server(), Some(wrong)).await.is_err(), "who shows a certificate must show the right one");
    // A client understands both, too, but takes no certificate for none.
    let client = |role| open(cluster.folder.path(), TlsRole::Decode, TlsMode::Permissive).client([role], &[]);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let plain = tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut word = [0; 5];
            stream.read_exact(&mut word).await.unwrap();
            stream.write_all(if &word == b"baton" { b"baton" } else { b"what?" }).await.unwrap();
        }
    });
    let mut stream = dial("127.0.0.1", port, Some(&client(TlsRole::Router))).await.unwrap();
    stream.write_all(b"baton").await.unwrap();
    let mut word = [0; 5];
    stream.read_exact(&mut word).await.unwrap();
    assert_eq!(&word, b"baton");
    plain.abort();
    assert!(talk(server(), Some(client(TlsRole::Prefill))).await.is_err(), "a router is no prefill worker");
}

#[tokio::test(start_paused = true)]
async fn who_does_not_begin_in_time_is_given_up() {
    let cluster = Cluster::new();
    let server = cluster.of(TlsRole::Router).server([TlsRole::Decode], &[]).beginning_with(8);
    let client = cluster.of(TlsRole::Decode).client([TlsRole::Router], &[]);
    for sent in [None, Some(0), Some(7), Some(8)] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (client, server) = (client.clone(), server.clone());
        let connected = tokio::spawn(async move {
            match sent {
                None => dial("127.0.0.1", port, None).await.unwrap(),
                Some(bytes) => {
                    let mut stream = dial("127.0.0.1", port, Some(&client)).await.unwrap();
                    stream.write_all(&[7; 8][..bytes]).await.unwrap();
                    stream.flush().await.unwrap();
                    stream
                }
            }
        });
        let (stream, _) = listener.accept().await.unwrap();
        let mut stream = server.accept(stream, None);
        let mut all = [0; 9];
        let read = tokio::time::timeout(std::time::Duration::from_secs(60), stream.read_exact(&mut all)).await;
        let end = read.map(|read| read.map(drop).map_err(|error| error.kind()));
        assert_eq!(end.ok(), (sent != Some(8)).then_some(Err(io::ErrorKind::TimedOut)), "{sent:?}");
        drop(connected.await);
    }
}

#[tokio::test(start_paused = true)]
async fn new_files_are_taken_and_bad_ones_are_not() {
    let cluster = Cluster::new();
    let router = cluster.of(TlsRole::Router);
    let shutdown = Shutdown::new(std::time::Duration::from_secs(1));
    let watching = tokio::spawn(router.clone().watch(shutdown.clone()));
    let number = || router.live.material().key.cert[0].clone();
    let first = number();
    let files = CertificateFiles::of(cluster.folder.path(), TlsRole::Router);
    let pause = || tokio::time::sleep(std::time::Duration::from_secs(20));
    // A key that is not the certificate's.
    let issued = cluster.authority.issue(&[TlsRole::Router], 1).unwrap();
    write_private(&files.certificate, &issued.certificate).unwrap();
    pause().await;
    assert_eq!(number(), first);
    write_private(&files.key, &issued.key).unwrap();
    // Reading is real work on another thread.
    while number() == first {
        pause().await;
    }
    shutdown.start("test");
    watching.await.unwrap();
}

#[test]
fn files_that_cannot_be_used_are_named() {
    let cluster = Cluster::new();
    let files = CertificateFiles::of(cluster.folder.path(), TlsRole::Router);
    let config = |cert: &Path, key: &Path| TlsConfig {
        tls_cert: Some(cert.to_owned()),
        tls_key: Some(key.to_owned()),
        tls_ca: Some(files.authority.clone()),
        ..TlsConfig::default()
    };
    let error = |config: &TlsConfig| Tls::open(config).unwrap_err().to_string();
    let missing = error(&config(Path::new("/nonexistent"), &files.key));
    assert!(missing.starts_with("tls_cert: /nonexistent: "), "{missing}");
    let no_key = error(&config(&files.certificate, &files.certificate));
    assert!(no_key.starts_with("tls_key: "), "{no_key}");
    let one = TlsConfig { tls_cert: Some(files.certificate.clone()), ..TlsConfig::default() };
    assert!(error(&one).starts_with("tls_key is not set"), "{}", error(&one));
    let permissive = TlsConfig { tls: TlsMode::Permissive, ..TlsConfig::default() };
    assert!(error(&permissive).starts_with("tls_cert is not set"));
    assert!(Tls::open(&TlsConfig::default()).unwrap().is_none());
}

#[test]
fn listeners_that_others_reach_need_tls_or_a_word() {
    let check = |config: &TlsConfig, address: &str| config.check_listener("internal", address.parse().unwrap());
    let none = TlsConfig::default();
    assert!(check(&none, "127.0.0.1:8002").is_ok() && check(&none, "[::1]:8002").is_ok());
    let error = check(&none, "0.0.0.0:8002").unwrap_err().to_string();
    assert!(error.contains("internal is 0.0.0.0:8002") && error.contains("insecure_internal"), "{error}");
    assert!(check(&TlsConfig { insecure_internal: true, ..TlsConfig::default() }, "0.0.0.0:8002").is_ok());
    assert!(check(&TlsConfig { tls_cert: Some("x".into()), ..TlsConfig::default() }, "10.0.0.1:8002").is_ok());
}

#[test]
fn an_authority_goes_on_from_its_files() {
    let cluster = Cluster::new();
    let (key, certificate) = (cluster.authority.key().to_owned(), cluster.authority.certificate().to_owned());
    let again = Authority::from_pem(&key, &certificate, "test").unwrap();
    again.write(cluster.folder.path(), &[TlsRole::Decode], 1).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let server = cluster.of(TlsRole::Router).server([TlsRole::Decode], &[]);
    let client = cluster.of(TlsRole::Decode).client([TlsRole::Router], &[]);
    assert!(runtime.block_on(talk(server, Some(client))).is_ok());
}
