//! TLS below a session's frames, where it is set up.
//!
//! Sits between [`crate::link`] and a TCP stream, and never blocks. Knows nothing of frames. Shared memory does not use it: that goes
//! over a unix socket, where the kernel says who the peer is.

use std::fmt;
use std::io::{BufRead, BufReader, Error, ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, Connection, ServerConfig, ServerConnection};

/// Encrypted bytes read at once: a few records, of 16 KiB each.
const READ: usize = 64 << 10;
/// Most bytes encrypted ahead of the socket (I5).
const AHEAD: usize = 256 << 10;
/// Advice in errors about two ends of which only one has TLS.
const BOTH: &str = "set up TLS (tls_cert) on both workers or on neither";
/// First bytes of TLS records: a greeting or an alert.
const GREETING: u8 = 0x16;
const ALERT: u8 = 0x15;

/// TLS of both ends. Whoever makes these settings decides which certificates are shown and accepted; they may change what they hold.
#[derive(Clone, Debug)]
pub struct Tls {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
    permissive: bool,
}

impl Tls {
    /// Settings for connections to decode workers, and for those from prefill workers.
    ///
    /// `permissive`: peers without TLS are accepted too, and asked again without it if they do not speak it.
    pub fn new(client: Arc<ClientConfig>, server: Arc<ServerConfig>, permissive: bool) -> Tls {
        Tls { client, server, permissive }
    }

    /// Whether peers without TLS are accepted.
    pub(crate) fn is_permissive(&self) -> bool {
        self.permissive
    }

    /// Starts TLS at the prefill end, to a worker reached at `host`.
    pub(crate) fn connect(&self, stream: TcpStream, host: &str) -> Result<TlsStream, Error> {
        let connection = ClientConnection::new(self.client.clone(), server_name(host)?).map_err(Error::other)?;
        Ok(TlsStream::new(stream, connection.into(), Spoken::Tls))
    }

    /// Starts TLS at the decode end.
    pub(crate) fn accept(&self, stream: TcpStream) -> Result<TlsStream, Error> {
        let connection = ServerConnection::new(self.server.clone()).map_err(Error::other)?;
        let spoken = if self.permissive { Spoken::Unknown(Vec::new()) } else { Spoken::Tls };
        Ok(TlsStream::new(stream, connection.into(), spoken))
    }
}

/// For a session without TLS: the error if its first bytes are a TLS record, a greeting or an alert.
pub(crate) fn wants_tls(bytes: &[u8]) -> Option<String> {
    let is = matches!(bytes, [ALERT | GREETING, 0x03, ..]);
    is.then(|| format!("it wants TLS, which this worker is not set up for; {BOTH}"))
}

fn server_name(host: &str) -> Result<ServerName<'static>, Error> {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    ServerName::try_from(bare.to_owned()).map_err(|e| Error::other(format!("{host:?}: {e}")))
}

/// A stream that encrypts and decrypts. It shakes hands by itself while it is read and written.
pub(crate) struct TlsStream {
    stream: BufReader<TcpStream>,
    connection: Connection,
    spoken: Spoken,
}

/// What the peer speaks.
enum Spoken {
    Tls,
    /// Nothing has come yet. What is to be sent waits.
    Unknown(Vec<u8>),
    /// No TLS. What waited is sent first.
    Plain(Vec<u8>),
}

impl TlsStream {
    fn new(stream: TcpStream, mut connection: Connection, spoken: Spoken) -> TlsStream {
        connection.set_buffer_limit(Some(AHEAD));
        TlsStream { stream: BufReader::with_capacity(READ, stream), connection, spoken }
    }

    /// Finds out what the peer speaks by its first byte.
    fn listen(&mut self) -> Result<(), Error> {
        let Spoken::Unknown(held) = &mut self.spoken else { return Ok(()) };
        let first = self.stream.fill_buf()?.first().copied();
        let held = std::mem::take(held);
        if matches!(first, Some(GREETING | ALERT)) {
            self.spoken = Spoken::Tls;
            self.connection.writer().write_all(&held)
        } else {
            self.spoken = Spoken::Plain(held);
            self.flush()
        }
    }

    /// The peer's address.
    pub(crate) fn peer_address(&self) -> Option<SocketAddr> {
        self.stream.get_ref().peer_addr().ok()
    }

    /// Whether encrypted bytes wait for the socket.
    pub(crate) fn has_output(&self) -> bool {
        match &self.spoken {
            Spoken::Tls => self.connection.wants_write(),
            // It waits for the peer, not for the socket.
            Spoken::Unknown(_) => false,
            Spoken::Plain(held) => !held.is_empty(),
        }
    }

    /// Whether the handshake is still going on, or its bytes still wait for the socket. What is written meanwhile waits.
    pub(crate) fn is_opening(&self) -> bool {
        let opening = match &self.spoken {
            Spoken::Tls => self.connection.is_handshaking(),
            Spoken::Unknown(_) => true,
            Spoken::Plain(_) => false,
        };
        opening || self.has_output()
    }

    /// Reads decrypted bytes into `into`, in order. Returns 0 when the peer has closed; [`ErrorKind::WouldBlock`] when none are there.
    pub(crate) fn read(&mut self, into: &mut [IoSliceMut<'_>]) -> Result<usize, Error> {
        self.listen()?;
        if let Spoken::Plain(_) = self.spoken {
            return self.stream.read_vectored(into);
        }
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
        match &mut self.spoken {
            Spoken::Unknown(held) if held.len() < AHEAD => {
                from.iter().for_each(|part| held.extend_from_slice(part));
                return Ok(from.iter().map(|part| part.len()).sum());
            }
            Spoken::Unknown(_) => return Err(ErrorKind::WouldBlock.into()),
            Spoken::Plain(held) if held.is_empty() => return self.stream.get_mut().write_vectored(from),
            Spoken::Plain(_) => return Err(ErrorKind::WouldBlock.into()),
            Spoken::Tls => {}
        }
        let count = self.connection.writer().write_vectored(from)?;
        self.flush()?;
        match count {
            0 => Err(ErrorKind::WouldBlock.into()),
            count => Ok(count),
        }
    }

    /// Sends encrypted bytes, as many as the socket takes.
    pub(crate) fn flush(&mut self) -> Result<(), Error> {
        if let Spoken::Plain(held) = &mut self.spoken {
            while !held.is_empty() {
                match self.stream.get_mut().write(held) {
                    Ok(count) => drop(held.drain(..count)),
                    Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Err(error) => return Err(error),
                }
            }
            return Ok(());
        }
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
        if let Spoken::Tls = self.spoken {
            self.connection.send_close_notify();
        }
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
