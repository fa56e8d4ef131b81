//! TLS between the processes of a cluster, where each shows a certificate with its role, and TLS for clients.
//!
//! - [`TlsConfig`]: one set of files for all internal connections of a process. [`Tls`]: what they hold.
//! - [`TlsServer`], [`TlsClient`]: one kind of connection, with the roles that its peers must have.
//! - [`Authority`]: makes certificates.
//! - [`TlsIo`]: an accepted connection, with TLS or without it.

mod authority;
mod live;
mod role;
mod stream;
mod verify;

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use rustls::client::Resumption;
use rustls::pki_types::ServerName;
use rustls::version::TLS13;
use rustls::{ClientConfig, ServerConfig};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::{TlsAcceptor, TlsConnector, client::TlsStream};
use tokio_util::either::Either;

use self::live::{Files, Live, provider};
use self::stream::Complaints;
use self::verify::Peers;
use crate::error::RuntimeError;
use crate::shutdown::Shutdown;

pub use authority::{Authority, CertificateFiles, Issued, newest_certificate, write_private};
pub use role::{TlsRole, TlsRoles};
pub use stream::{TlsIo, TlsPeer};

/// Bytes with which every HTTP/2 client begins: the preface, and the head of its settings.
pub const HTTP2_BEGINNING: usize = 24 + 9;

/// Protocols that are agreed on in the handshake.
pub mod alpn {
    /// gRPC.
    pub const HTTP2: &[u8] = b"h2";
    /// The OpenAI-compatible API.
    pub const HTTP1: &[u8] = b"http/1.1";
}

/// What a client says it wants to reach. Peers are known by their roles, not by names.
const PEER: &str = "baton";

crate::config_enum! {
    /// Who is accepted where certificates are set up.
    pub enum TlsMode {
        /// Only peers with TLS.
        Required = "required",
        /// Also peers without it, while a cluster goes over to TLS. Peers are asked with TLS, and without it if they do not speak it.
        Permissive = "permissive",
    }
}

crate::config! {
    /// TLS between the processes of a cluster.
    pub struct TlsConfig {
        /// This process's certificate in PEM, then the intermediate ones, for all connections between processes of the cluster. It says by a
        /// URI what the process is (docs/tls.md). Needs tls_key and tls_ca too. The three files are read again when they change.
        tls_cert: Option<PathBuf> = None,
        /// Private key of tls_cert, in PEM.
        tls_key: Option<PathBuf> = None,
        /// Certificates in PEM of the authorities whose certificates are accepted from other processes of the cluster.
        tls_ca: Option<PathBuf> = None,
        /// With certificates: required, or permissive, which gets on with processes without TLS too, while a cluster goes over to TLS.
        tls: TlsMode = TlsMode::Required,
        /// Lets internal listeners without TLS have addresses other than this machine's own. Whoever reaches them can read prompts and join
        /// the cluster: only for networks that nobody else reaches.
        insecure_internal: bool = false,
    }
}

impl TlsConfig {
    /// Refuses an internal listener without TLS that other machines can reach, unless that is asked for by name.
    ///
    /// # Errors
    /// Which listener, and what to do.
    pub fn check_listener(&self, field: &'static str, address: SocketAddr) -> Result<(), RuntimeError> {
        let open = self.tls_cert.is_none() && !address.ip().is_loopback() && !self.insecure_internal;
        if open { Err(RuntimeError::Insecure { field, address }) } else { Ok(()) }
    }
}

/// A connection to another process, with TLS on the right.
pub type Outgoing = Either<TcpStream, TlsStream<TcpStream>>;

/// Connects to a process of the cluster. Its packets leave at once (TCP_NODELAY). While the cluster goes over to TLS, a peer that does not speak
/// it is asked without.
///
/// # Errors
/// It cannot be reached, or it is refused, or refuses this process.
pub async fn dial(host: &str, port: u16, tls: Option<&TlsClient>) -> io::Result<Outgoing> {
    // An IPv6 address of a URL is in brackets.
    let host = host.trim_matches(['[', ']']);
    let connect = || async {
        let stream = crate::connect::connect(host, port).await?;
        stream.set_nodelay(true)?;
        io::Result::Ok(stream)
    };
    let Some(tls) = tls else { return Ok(Either::Left(connect().await?)) };
    match tls.connect(connect().await?).await {
        Ok(stream) => Ok(Either::Right(stream)),
        Err(error) if tls.permissive && !is_refusal(&error) => Ok(Either::Left(connect().await?)),
        Err(error) => Err(error),
    }
}

/// Whether a handshake failed although the peer speaks TLS.
fn is_refusal(error: &io::Error) -> bool {
    let tls = error.get_ref().and_then(|error| error.downcast_ref::<rustls::Error>());
    matches!(tls, Some(rustls::Error::InvalidCertificate(_) | rustls::Error::AlertReceived(_)))
}

/// This process's certificate, and whom it trusts.
#[derive(Clone, Debug)]
pub struct Tls {
    live: Arc<Live>,
    permissive: bool,
}

/// Accepts one kind of connection.
#[derive(Clone)]
pub struct TlsServer {
    config: Arc<ServerConfig>,
    permissive: bool,
    beginning: usize,
    complaints: Arc<Complaints>,
}

/// Opens one kind of connection.
#[derive(Clone)]
pub struct TlsClient {
    config: Arc<ClientConfig>,
    permissive: bool,
}

impl Tls {
    /// Reads the files; `None` without any.
    ///
    /// # Errors
    /// A file is missing or cannot be used.
    pub fn open(config: &TlsConfig) -> Result<Option<Tls>, RuntimeError> {
        let TlsConfig { tls_cert, tls_key, tls_ca, tls, .. } = config;
        let files = [("tls_cert", tls_cert), ("tls_key", tls_key), ("tls_ca", tls_ca)];
        if files.iter().all(|(_, path)| path.is_none()) {
            return match tls {
                TlsMode::Required => Ok(None),
                TlsMode::Permissive => {
                    Err(RuntimeError::TlsFiles { field: "tls_cert", with: "tls_cert, tls_key and tls_ca" })
                }
            };
        }
        let file = |(field, path): (&'static str, &Option<PathBuf>)| match path {
            Some(path) => Ok((field, path.clone())),
            None => Err(RuntimeError::TlsFiles { field, with: "tls_cert, tls_key and tls_ca" }),
        };
        let [certificate, key, authority] = files.map(file);
        let live = Live::open(Files { certificate: certificate?, key: key?, authority: Some(authority?) })?;
        Ok(Some(Tls { live, permissive: *tls == TlsMode::Permissive }))
    }

    /// Whether peers without TLS are accepted, and this process offers none.
    pub fn is_permissive(&self) -> bool {
        self.permissive
    }

    /// Certificate, key and authorities, in PEM, as they are now.
    pub fn pem(&self) -> [Vec<u8>; 3] {
        // `open` needs all three.
        self.live.pem().try_into().unwrap_or_default()
    }

    /// The scheme of the addresses under which this process is reached.
    pub fn scheme(tls: Option<&Tls>) -> &'static str {
        if tls.is_some_and(|tls| !tls.permissive) { "https" } else { "http" }
    }

    /// Accepts peers with one of these roles.
    pub fn server(&self, peers: impl IntoIterator<Item = TlsRole>, protocols: &[&[u8]]) -> TlsServer {
        let peers = Arc::new(Peers::new(Arc::clone(&self.live), peers.into_iter().collect()));
        let builder = ServerConfig::builder_with_provider(provider()).with_protocol_versions(&[&TLS13]);
        // The provider has TLS 1.3.
        let Ok(builder) = builder else { unreachable!("ring has TLS 1.3") };
        let config = builder.with_client_cert_verifier(peers).with_cert_resolver(self.live.clone());
        TlsServer::new(config, protocols, self.permissive)
    }

    /// Connects to peers with one of these roles.
    pub fn client(&self, peers: impl IntoIterator<Item = TlsRole>, protocols: &[&[u8]]) -> TlsClient {
        let peers = Arc::new(Peers::new(Arc::clone(&self.live), peers.into_iter().collect()));
        let builder = ClientConfig::builder_with_provider(provider()).with_protocol_versions(&[&TLS13]);
        let Ok(builder) = builder else { unreachable!("ring has TLS 1.3") };
        let builder = builder.dangerous().with_custom_certificate_verifier(peers);
        let mut config = builder.with_client_cert_resolver(self.live.clone());
        // A resumed session would skip the look at certificates that may have changed, and connections live long.
        config.resumption = Resumption::disabled();
        config.enable_sni = false;
        config.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
        TlsClient { config: Arc::new(config), permissive: self.permissive }
    }

    /// Reads the files again whenever they change, until the drain starts.
    pub async fn watch(self, shutdown: Shutdown) {
        self.live.watch(shutdown).await;
    }
}

impl TlsServer {
    fn new(mut config: ServerConfig, protocols: &[&[u8]], permissive: bool) -> TlsServer {
        config.send_tls13_tickets = 0;
        config.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
        TlsServer { config: Arc::new(config), permissive, beginning: 1, complaints: Arc::default() }
    }

    /// The same for a protocol whose clients begin with this many bytes: they must come in the time of the handshake (I5).
    pub fn beginning_with(self, bytes: usize) -> TlsServer {
        TlsServer { beginning: bytes, ..self }
    }

    /// A connection that shakes hands when it is first read or written.
    pub fn accept<S: AsyncRead + AsyncWrite + Unpin>(&self, stream: S, address: Option<SocketAddr>) -> TlsIo<S> {
        let acceptor = TlsAcceptor::from(Arc::clone(&self.config));
        TlsIo::accept(stream, acceptor, self, address)
    }

    /// For those who shake hands without tokio.
    pub fn config(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.config)
    }
}

/// The certificate that clients see.
#[derive(Clone, Debug)]
pub struct PublicTls(Arc<Live>);

impl PublicTls {
    /// Reads the files of these two fields; `None` without any.
    ///
    /// # Errors
    /// A file is missing or cannot be used.
    pub fn open(
        certificate: (&'static str, &Option<PathBuf>),
        key: (&'static str, &Option<PathBuf>),
    ) -> Result<Option<PublicTls>, RuntimeError> {
        let file = |(field, path): (&'static str, &Option<PathBuf>)| path.clone().map(|path| (field, path));
        match (file(certificate), file(key)) {
            (None, None) => Ok(None),
            (Some(certificate), Some(key)) => {
                Ok(Some(PublicTls(Live::open(Files { certificate, key, authority: None })?)))
            }
            (Some(_), None) => Err(RuntimeError::TlsFiles { field: key.0, with: certificate.0 }),
            (None, Some(_)) => Err(RuntimeError::TlsFiles { field: certificate.0, with: key.0 }),
        }
    }

    /// Accepts clients that speak one of these protocols.
    pub fn server(&self, protocols: &[&[u8]]) -> TlsServer {
        let builder = ServerConfig::builder_with_provider(provider()).with_protocol_versions(rustls::ALL_VERSIONS);
        let Ok(builder) = builder else { unreachable!("ring has every version of TLS that is built in") };
        TlsServer::new(builder.with_no_client_auth().with_cert_resolver(self.0.clone()), protocols, false)
    }

    /// Reads the files again whenever they change, until the drain starts.
    pub async fn watch(self, shutdown: Shutdown) {
        self.0.watch(shutdown).await;
    }
}

impl TlsClient {
    /// Shakes hands over a connection.
    ///
    /// # Errors
    /// The peer is refused, or refuses this process.
    pub async fn connect<S: AsyncRead + AsyncWrite + Unpin>(&self, stream: S) -> io::Result<TlsStream<S>> {
        let name = ServerName::try_from(PEER).map_err(io::Error::other)?;
        TlsConnector::from(Arc::clone(&self.config)).connect(name, stream).await
    }

    /// For those who shake hands without tokio.
    pub fn config(&self) -> Arc<ClientConfig> {
        Arc::clone(&self.config)
    }
}

#[cfg(test)]
mod tests;
