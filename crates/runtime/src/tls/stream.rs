//! An accepted connection that may have TLS. It shakes hands by itself when it is first read or written, so that whoever accepts
//! connections waits for nobody.

use std::collections::HashMap;
use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};
use tokio_rustls::server::TlsStream;
use tokio_rustls::{Accept, TlsAcceptor};

use super::TlsServer;
use super::role::TlsRoles;

/// Longest time to shake hands and to begin (I5).
const HANDSHAKE: Duration = Duration::from_secs(10);
/// First byte of a TLS greeting.
const GREETING: u8 = 0x16;
/// How often one address is complained about.
const COMPLAIN_EVERY: Duration = Duration::from_secs(60);
/// Most addresses that are remembered for that (I5).
const COMPLAINTS: usize = 256;

/// The roles of a connection's peer, once it has shaken hands; none without TLS.
#[derive(Clone, Debug, Default)]
pub struct TlsPeer(Arc<OnceLock<TlsRoles>>);

impl TlsPeer {
    /// Its roles; `None` without TLS.
    pub fn roles(&self) -> Option<TlsRoles> {
        self.0.get().copied()
    }
}

/// A stream that gives back a byte that was read to see what the peer speaks.
#[derive(Debug)]
pub struct Begun<S> {
    first: Option<u8>,
    stream: S,
}

/// A connection with or without TLS.
pub struct TlsIo<S> {
    state: State<S>,
    peer: TlsPeer,
    address: Option<SocketAddr>,
    complaints: Option<Arc<Complaints>>,
    /// How many first bytes have not come yet, and when they must be there.
    beginning: Option<(usize, Pin<Box<Sleep>>)>,
}

enum State<S> {
    Plain(Begun<S>),
    /// Its first byte says what it is.
    Undecided(S, TlsAcceptor),
    Opening(Box<Accept<Begun<S>>>),
    Open(Box<TlsStream<Begun<S>>>),
    Broken,
}

/// Who was refused lately.
#[derive(Debug, Default)]
pub(super) struct Complaints(Mutex<HashMap<IpAddr, Instant>>);

impl Complaints {
    /// Logs a refusal, but of one address only now and then.
    fn refused(&self, address: Option<SocketAddr>, error: &io::Error) {
        let from = address.map(tracing::field::display);
        let ip = address.map_or(IpAddr::from([0, 0, 0, 0]), |address| address.ip());
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|_, at| at.elapsed() < COMPLAIN_EVERY);
        let new = known.len() < COMPLAINTS && !known.contains_key(&ip);
        if new {
            known.insert(ip, Instant::now());
            tracing::warn!(from, %error, "a connection is refused");
        } else {
            tracing::debug!(from, %error, "a connection is refused");
        }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> TlsIo<S> {
    /// A connection without TLS.
    pub fn plain(stream: S) -> TlsIo<S> {
        let state = State::Plain(Begun { first: None, stream });
        TlsIo { state, peer: TlsPeer::default(), address: None, complaints: None, beginning: None }
    }

    /// A connection as a listener takes it, with TLS or without.
    pub fn maybe(tls: Option<&TlsServer>, stream: S, address: Option<SocketAddr>) -> TlsIo<S> {
        match tls {
            Some(tls) => tls.accept(stream, address),
            None => TlsIo::plain(stream),
        }
    }

    /// A connection with TLS, or, if the server is permissive, with what the peer speaks.
    pub(super) fn accept(
        stream: S,
        acceptor: TlsAcceptor,
        server: &TlsServer,
        address: Option<SocketAddr>,
    ) -> TlsIo<S> {
        let state = match server.permissive {
            true => State::Undecided(stream, acceptor),
            false => State::Opening(Box::new(acceptor.accept(Begun { first: None, stream }))),
        };
        let complaints = Some(Arc::clone(&server.complaints));
        let beginning = Some((server.beginning, Box::pin(sleep(HANDSHAKE))));
        TlsIo { state, peer: TlsPeer::default(), address, complaints, beginning }
    }

    /// The peer must send its first `bytes` bytes soon, with TLS or without.
    pub fn beginning_with(self, bytes: usize) -> TlsIo<S> {
        TlsIo { beginning: Some((bytes, Box::pin(sleep(HANDSHAKE)))), ..self }
    }

    /// Who the peer is, as far as its certificate says.
    pub fn peer(&self) -> TlsPeer {
        self.peer.clone()
    }

    /// Shakes hands, if that is to be done. Afterwards the state is plain or open. Fails when the peer has not begun in time.
    fn poll_open(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if let Some((_, timer)) = &mut self.beginning
            && timer.as_mut().poll(cx).is_ready()
        {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        self.poll_handshake(cx)
    }

    fn poll_handshake(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            match &mut self.state {
                State::Plain(_) | State::Open(_) => return Poll::Ready(Ok(())),
                State::Broken => return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into())),
                State::Undecided(stream, _) => {
                    let mut first = [0];
                    let mut buf = ReadBuf::new(&mut first);
                    ready!(Pin::new(stream).poll_read(cx, &mut buf))?;
                    let first = buf.filled().first().copied();
                    let State::Undecided(stream, acceptor) = std::mem::replace(&mut self.state, State::Broken) else {
                        continue;
                    };
                    let begun = Begun { first, stream };
                    self.state = match first {
                        Some(GREETING) => State::Opening(Box::new(acceptor.accept(begun))),
                        _ => State::Plain(begun),
                    };
                }
                State::Opening(accept) => match ready!(Pin::new(accept).poll(cx)) {
                    Ok(stream) => {
                        let shown = stream.get_ref().1.peer_certificates().and_then(<[_]>::first);
                        if let Some(Ok(roles)) = shown.map(TlsRoles::of) {
                            let _ = self.peer.0.set(roles);
                        }
                        self.state = State::Open(Box::new(stream));
                    }
                    Err(error) => {
                        self.state = State::Broken;
                        // Who only connects and leaves, as probes do, is not worth a word.
                        if error.kind() == io::ErrorKind::InvalidData
                            && let Some(complaints) = &self.complaints
                        {
                            complaints.refused(self.address, &error);
                        }
                        return Poll::Ready(Err(error));
                    }
                },
            }
        }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for TlsIo<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_open(cx))?;
        let before = buf.filled().len();
        ready!(match &mut self.state {
            State::Plain(stream) => Pin::new(stream).poll_read(cx, buf),
            State::Open(stream) => Pin::new(stream).poll_read(cx, buf),
            _ => Poll::Ready(Err(io::ErrorKind::NotConnected.into())),
        })?;
        if let Some((left, _)) = &mut self.beginning {
            *left = left.saturating_sub(buf.filled().len() - before);
            if *left == 0 {
                self.beginning = None;
            }
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for TlsIo<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        ready!(self.poll_open(cx))?;
        match &mut self.state {
            State::Plain(stream) => Pin::new(stream).poll_write(cx, buf),
            State::Open(stream) => Pin::new(stream).poll_write(cx, buf),
            _ => Poll::Ready(Err(io::ErrorKind::NotConnected.into())),
        }
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_open(cx))?;
        match &mut self.state {
            State::Plain(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
            State::Open(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
            _ => Poll::Ready(Err(io::ErrorKind::NotConnected.into())),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match &self.state {
            State::Plain(stream) => stream.is_write_vectored(),
            // So does the TLS stream.
            _ => true,
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.state {
            State::Plain(stream) => Pin::new(stream).poll_flush(cx),
            State::Open(stream) => Pin::new(stream).poll_flush(cx),
            // Nothing was written yet.
            _ => Poll::Ready(Ok(())),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.state {
            State::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            State::Open(stream) => Pin::new(stream).poll_shutdown(cx),
            State::Undecided(stream, _) => Pin::new(stream).poll_shutdown(cx),
            State::Opening(_) | State::Broken => Poll::Ready(Ok(())),
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Begun<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if buf.remaining() > 0
            && let Some(first) = self.first.take()
        {
            buf.put_slice(&[first]);
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Begun<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
