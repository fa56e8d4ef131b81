//! TLS below a session's frames, where it is set up. Each end shows a certificate, and accepts only peers whose certificate comes from
//! the same authority.
//!
//! Sits between [`crate::link`] and a TCP stream, and never blocks. Knows nothing of frames. Shared memory does not use it: that goes
//! over a unix socket, where the kernel says who the peer is.

use std::fmt;
use std::io::{BufReader, Error, ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::client::Resumption;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::version::TLS13;
use rustls::{ClientConfig, ClientConnection, Connection, RootCertStore, ServerConfig, ServerConnection};

use baton_handoff::TransferError;

/// Encrypted bytes read at once: a few records, of 16 KiB each.
const READ: usize = 64 << 10;
/// Most bytes encrypted ahead of the socket (I5).
const AHEAD: usize = 256 << 10;
/// Advice in errors about two ends of which only one has TLS.
const BOTH: &str = "set up TLS for transfers on both workers or on neither";

/// Paths of the PEM files.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TlsFiles {
    /// This worker's certificate, and the intermediate ones between it and the authority.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// Certificates of the trusted authorities, for peers that connect and for peers connected to.
    pub authority: PathBuf,
    /// Name that every decode worker's certificate holds. None: each holds the name or address by which the worker is reached.
    pub name: Option<String>,
}

/// TLS settings of both ends.
#[derive(Clone, Debug)]
pub struct Tls {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
    name: Option<ServerName<'static>>,
}

impl Tls {
    /// Reads the files. Later changes of them have no effect.
    ///
    /// # Errors
    /// [`TransferError::Argument`] names the file that cannot be used, and why.
    pub fn load(files: &TlsFiles) -> Result<Tls, TransferError> {
        let bad = |field| move |e: rustls::Error| TransferError::argument(field, e.to_string());
        let chain = certificates("tls.certificate", &files.certificate)?;
        let key = PrivateKeyDer::from_pem_file(&files.key);
        let key = key.map_err(|e| unreadable("tls.key", &files.key, e))?;
        let mut roots = RootCertStore::empty();
        for certificate in certificates("tls.authority", &files.authority)? {
            roots.add(certificate).map_err(bad("tls.authority"))?;
        }
        let (roots, provider) = (Arc::new(roots), Arc::new(ring::default_provider()));
        let verifier = WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone()).build();
        let verifier = verifier.map_err(|e| TransferError::argument("tls.authority", e.to_string()))?;
        let server = ServerConfig::builder_with_provider(provider.clone()).with_protocol_versions(&[&TLS13]);
        let server = server.map_err(bad("tls"))?.with_client_cert_verifier(verifier);
        let mut server = server.with_single_cert(chain.clone(), key.clone_key()).map_err(bad("tls.key"))?;
        // Sessions last long, so TLS resumption is off.
        server.send_tls13_tickets = 0;
        let client = ClientConfig::builder_with_provider(provider).with_protocol_versions(&[&TLS13]);
        let client = client.map_err(bad("tls"))?.with_root_certificates(roots);
        let mut client = client.with_client_auth_cert(chain, key).map_err(bad("tls.key"))?;
        client.resumption = Resumption::disabled();
        let name = files.name.clone().map(|name| server_name(&name)).transpose();
        let name = name.map_err(|e| TransferError::argument("tls.name", e.to_string()))?;
        Ok(Tls { client: Arc::new(client), server: Arc::new(server), name })
    }

    /// Starts TLS at the prefill end, to a worker reached at `host`.
    pub(crate) fn connect(&self, stream: TcpStream, host: &str) -> Result<TlsStream, Error> {
        let name = self.name.clone().map_or_else(|| server_name(host), Ok)?;
        let connection = ClientConnection::new(self.client.clone(), name).map_err(Error::other)?;
        Ok(TlsStream::new(stream, connection.into()))
    }

    /// Starts TLS at the decode end.
    pub(crate) fn accept(&self, stream: TcpStream) -> Result<TlsStream, Error> {
        let connection = ServerConnection::new(self.server.clone()).map_err(Error::other)?;
        Ok(TlsStream::new(stream, connection.into()))
    }
}

/// For a session without TLS: the error if its first bytes are a TLS record, a greeting or an alert.
pub(crate) fn wants_tls(bytes: &[u8]) -> Option<String> {
    let is = matches!(bytes, [0x15 | 0x16, 0x03, ..]);
    is.then(|| format!("it wants TLS, which this worker is not set up for; {BOTH}"))
}

fn server_name(host: &str) -> Result<ServerName<'static>, Error> {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    ServerName::try_from(bare.to_owned()).map_err(|e| Error::other(format!("{host:?}: {e}")))
}

fn certificates(field: &'static str, path: &Path) -> Result<Vec<CertificateDer<'static>>, TransferError> {
    let all = CertificateDer::pem_file_iter(path).and_then(Iterator::collect);
    let all: Vec<_> = all.map_err(|e| unreadable(field, path, e))?;
    match all.is_empty() {
        true => Err(unreadable(field, path, "it holds no certificate")),
        false => Ok(all),
    }
}

fn unreadable(field: &'static str, path: &Path, why: impl fmt::Display) -> TransferError {
    TransferError::argument(field, format!("{}: {why}; a file in PEM is needed", path.display()))
}

/// A stream that encrypts and decrypts. It shakes hands by itself while it is read and written.
pub(crate) struct TlsStream {
    stream: BufReader<TcpStream>,
    connection: Connection,
}

impl TlsStream {
    fn new(stream: TcpStream, mut connection: Connection) -> TlsStream {
        connection.set_buffer_limit(Some(AHEAD));
        TlsStream { stream: BufReader::with_capacity(READ, stream), connection }
    }

    /// The peer's address.
    pub(crate) fn peer_address(&self) -> Option<SocketAddr> {
        self.stream.get_ref().peer_addr().ok()
    }

    /// Whether encrypted bytes wait for the socket.
    pub(crate) fn has_output(&self) -> bool {
        self.connection.wants_write()
    }

    /// Whether the handshake is still going on, or its bytes still wait for the socket. What is written meanwhile waits.
    pub(crate) fn is_opening(&self) -> bool {
        self.connection.is_handshaking() || self.has_output()
    }

    /// Reads decrypted bytes into `into`, in order. Returns 0 when the peer has closed; [`ErrorKind::WouldBlock`] when none are there.
    pub(crate) fn read(&mut self, into: &mut [IoSliceMut<'_>]) -> Result<usize, Error> {
        loop {
            match self.take(into) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                taken => return taken,
            }
            if self.connection.read_tls(&mut self.stream)? == 0 {
                return Ok(0);
            }
            let processed = self.connection.process_new_packets().map_err(|e| Error::other(self.explain(&e)));
            // Sends this end's part of the handshake, or the alert that says why it failed.
            let flushed = self.flush();
            processed.and(flushed)?;
        }
    }

    /// Takes bytes that are already decrypted.
    fn take(&mut self, into: &mut [IoSliceMut<'_>]) -> Result<usize, Error> {
        let mut reader = self.connection.reader();
        let mut taken = 0;
        for slice in into {
            let mut at = 0;
            while at < slice.len() {
                match reader.read(&mut slice[at..]) {
                    Ok(0) => return Ok(taken + at),
                    Ok(count) => at += count,
                    Err(_) if taken + at > 0 => return Ok(taken + at),
                    Err(error) => return Err(error),
                }
            }
            taken += at;
        }
        Ok(taken)
    }

    /// Encrypts some of `from` and sends what the socket takes. Returns how many bytes of `from` were taken over;
    /// [`ErrorKind::WouldBlock`] when none were.
    pub(crate) fn write(&mut self, from: &[IoSlice<'_>]) -> Result<usize, Error> {
        self.flush()?;
        let count = self.connection.writer().write_vectored(from)?;
        self.flush()?;
        match count {
            0 => Err(ErrorKind::WouldBlock.into()),
            count => Ok(count),
        }
    }

    /// Sends encrypted bytes, as many as the socket takes.
    pub(crate) fn flush(&mut self) -> Result<(), Error> {
        while self.connection.wants_write() {
            match self.connection.write_tls(self.stream.get_mut()) {
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Tells the peer that nothing more will be sent, as far as the socket takes that now.
    pub(crate) fn finish(&mut self) -> Result<(), Error> {
        self.connection.send_close_notify();
        self.flush()
    }

    fn explain(&self, error: &rustls::Error) -> String {
        match error {
            rustls::Error::InvalidMessage(_) if self.connection.is_handshaking() => {
                format!("it does not speak TLS; {BOTH}")
            }
            rustls::Error::NoCertificatesPresented => format!("it shows no certificate; {BOTH}"),
            rustls::Error::InvalidCertificate(why) => format!("TLS: its certificate is refused: {why}"),
            rustls::Error::AlertReceived(why) => format!("TLS: it refuses this worker: {why:?}"),
            other => format!("TLS: {other}"),
        }
    }
}

impl AsFd for TlsStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.get_ref().as_fd()
    }
}

impl fmt::Debug for TlsStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("TlsStream").field(self.stream.get_ref()).finish()
    }
}
