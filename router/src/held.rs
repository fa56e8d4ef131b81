//! Connections of the gRPC front door, limited in number (I5). Each occupies a place until it is closed.
//!
//! Knows connections only. `listener.rs` accepts them, and `grpc.rs` handles their requests.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use baton_runtime::places::{Place, Seat};
use baton_runtime::tls::{HTTP2_BEGINNING, TlsIo, TlsPeer, TlsServer};
use futures::Stream;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::time::{Sleep, sleep};
use tonic::transport::server::Connected;

use crate::keyless;
use crate::listener::{Bounds, accept};
use crate::patient::Patient;

/// A connection and the place it occupies.
pub(crate) struct Held {
    stream: TlsIo<Patient>,
    place: Place,
    /// When it breaks, whatever its calls do.
    end: Option<Pin<Box<Sleep>>>,
}

/// What a call knows of its connection.
#[derive(Clone)]
pub(crate) struct Caller {
    /// The roles of its certificate, once it has shaken hands.
    pub peer: TlsPeer,
    /// Its place, which it keeps while a call is answered.
    pub seat: Seat,
    /// Its calls that need no key.
    pub keyless: Arc<Semaphore>,
}

/// A stream of accepted connections. Each is accepted once there is a place for it, and breaks after `longest`.
pub(crate) fn incoming(
    listener: TcpListener,
    bounds: Bounds,
    tls: Option<TlsServer>,
    longest: Option<Duration>,
) -> impl Stream<Item = io::Result<Held>> {
    async_stream::stream! {
        let places = bounds.places();
        loop {
            let (stream, place) = accept(&listener, &places).await;
            let address = stream.peer_addr().ok();
            let stream = Patient::new(stream, bounds.send).placed(place.seat()).begins_within(bounds.head, HTTP2_BEGINNING);
            let stream = TlsIo::maybe(tls.as_ref(), stream, address);
            yield Ok(Held { stream, place, end: longest.map(|longest| Box::pin(sleep(longest))) });
        }
    }
}

impl Connected for Held {
    type ConnectInfo = Caller;

    fn connect_info(&self) -> Caller {
        let keyless = Arc::new(Semaphore::new(keyless::CALLS));
        Caller { peer: self.stream.peer(), seat: self.place.seat(), keyless }
    }
}

impl AsyncRead for Held {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.end.as_mut().is_some_and(|end| end.as_mut().poll(cx).is_ready()) {
            return Poll::Ready(Err(io::Error::new(
                io::ErrorKind::TimedOut,
                "the connection is too old (--connection-age)",
            )));
        }
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Held {
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

#[cfg(test)]
mod tests {
    use super::*;
    use futures::StreamExt;
    use tokio::io::AsyncReadExt;
    use tokio::net::TcpStream;

    #[tokio::test]
    async fn a_closed_connection_gives_its_place_to_the_next() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut incoming = std::pin::pin!(incoming(
            listener,
            Bounds::new(1, Duration::from_secs(60), Duration::from_secs(60)),
            None,
            None
        ));
        let _clients = [TcpStream::connect(address).await.unwrap(), TcpStream::connect(address).await.unwrap()];
        let first = incoming.next().await.unwrap().unwrap();
        assert!(futures::poll!(incoming.next()).is_pending(), "there is no place for the second yet");
        drop(first);
        let _second = incoming.next().await.unwrap().unwrap();
    }
    #[tokio::test]
    async fn a_connection_that_is_too_old_breaks() {
        let (long, short) = (Duration::from_secs(60), Duration::from_millis(50));
        for (longest, breaks) in [(Some(short), true), (None, false)] {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap();
            let mut incoming = std::pin::pin!(incoming(listener, Bounds::new(1, long, long), None, longest));
            let _client = TcpStream::connect(address).await.unwrap();
            let mut held = incoming.next().await.unwrap().unwrap();
            let read = tokio::time::timeout(short * 4, held.read_u8()).await;
            assert_eq!(read.is_ok_and(|read| read.is_err()), breaks, "{longest:?}");
        }
    }
}
