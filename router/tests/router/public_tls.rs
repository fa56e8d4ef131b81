//! Clients over TLS: both front doors with the certificate of `--public-tls-cert`, each with its own protocol.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use crate::support::{Cluster, config};
use baton_proto::v1::ListModelsRequest;
use baton_proto::v1::inference_client::InferenceClient;
use baton_router::RouterConfig;
use baton_runtime::tls::{Authority, CertificateFiles, TlsConfig, TlsRole, alpn, write_private};
use baton_runtime::{Tls, TlsClient};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tonic::transport::{Endpoint, Uri};

/// Which role the certificate gives does not matter to clients. These tests' client looks at it, though.
const ROLE: TlsRole = TlsRole::Router;

/// Writes a certificate of a new authority into the folder.
fn issue(folder: &Path) {
    let authority = Authority::new("test").unwrap();
    write_private(&folder.join("ca.pem"), authority.certificate()).unwrap();
    authority.write(folder, &[ROLE], 1).unwrap();
}

/// A client that trusts the folder's authority of now.
fn client(folder: &Path, protocols: &[&[u8]]) -> TlsClient {
    let CertificateFiles { certificate, key, authority } = CertificateFiles::of(folder, ROLE);
    let files =
        TlsConfig { tls_cert: Some(certificate), tls_key: Some(key), tls_ca: Some(authority), ..Default::default() };
    Tls::open(&files).unwrap().unwrap().client([ROLE], protocols)
}

/// What a listener speaks with a client that speaks these protocols; an error if they do not shake hands.
async fn spoken(address: SocketAddr, client: &TlsClient) -> std::io::Result<Option<Vec<u8>>> {
    let mut stream = client.connect(TcpStream::connect(address).await?).await?;
    let protocol = stream.get_ref().1.alpn_protocol().map(<[u8]>::to_vec);
    // The server may refuse after the client's side is done.
    if protocol.as_deref() == Some(alpn::HTTP1) {
        stream.write_all(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with("alive\n"), "{answer}");
    }
    Ok(protocol)
}

/// Models that a gRPC client is told of.
async fn models(address: SocketAddr, client: TlsClient) -> usize {
    let connect = tower::service_fn(move |_: Uri| {
        let client = client.clone();
        async move { client.connect(TcpStream::connect(address).await?).await.map(TokioIo::new) }
    });
    let channel = Endpoint::from_static("http://router").connect_with_connector(connect).await.unwrap();
    InferenceClient::new(channel).list_models(ListModelsRequest {}).await.unwrap().into_inner().models.len()
}

#[tokio::test]
async fn both_front_doors_have_the_certificate_that_is_there_now() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    issue(path);
    let CertificateFiles { certificate, key, .. } = CertificateFiles::of(path, ROLE);
    let settings = RouterConfig { public_tls_cert: Some(certificate), public_tls_key: Some(key), ..config() };
    let cluster = Cluster::with(settings, 0, 1, &["fine"]).await;
    let (http, grpc) = (cluster.router.http_addr, cluster.router.grpc_addr);
    let any = client(path, &[alpn::HTTP2, alpn::HTTP1]);
    assert_eq!(spoken(http, &any).await.unwrap().as_deref(), Some(alpn::HTTP1));
    assert_eq!(spoken(grpc, &any).await.unwrap().as_deref(), Some(alpn::HTTP2));
    assert_eq!(models(grpc, client(path, &[alpn::HTTP2])).await, 1);
    // A protocol that is not spoken there.
    assert!(spoken(http, &client(path, &[alpn::HTTP2])).await.is_err());
    assert!(spoken(grpc, &client(path, &[alpn::HTTP1])).await.is_err());
    assert!(cluster.http.get(cluster.url("/health")).send().await.is_err(), "without TLS");
    // The certificate is replaced, by one that old clients do not trust.
    issue(path);
    let new = client(path, &[alpn::HTTP2, alpn::HTTP1]);
    assert!(spoken(http, &new).await.is_err());
    let replaced = async {
        while spoken(http, &new).await.is_err() {
            tokio::time::sleep(Duration::from_millis(50)).await
        }
    };
    tokio::time::timeout(Duration::from_secs(30), replaced).await.unwrap();
    assert_eq!(models(grpc, client(path, &[alpn::HTTP2])).await, 1);
    assert!(spoken(http, &any).await.is_err());
    cluster.stop().await;
}
