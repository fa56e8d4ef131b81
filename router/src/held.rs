//! Connections of the gRPC front door, limited in number (I5). Each occupies a place until it is closed.
//!
//! Knows connections only. `listener.rs` accepts them, and `grpc.rs` handles their requests.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use baton_runtime::places::{Place, Seat};
use baton_runtime::tls::{HTTP2_BEGINNING, TlsIo, TlsPeer, TlsServer};
use futures::Stream;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpListener;
use tonic::transport::server::Connected;

use crate::listener::{Bounds, accept};
use crate::patient::Patient;

/// A connection and the place it occupies.
pub(crate) struct Held {
    stream: TlsIo<Patient>,
    place: Place,
}

/// What a call knows of its connection.
#[derive(Clone)]
pub(crate) struct Caller {
    /// The roles of its certificate, once it has shaken hands.
    pub peer: TlsPeer,
    /// Its place, which it keeps while a call is answered.
    pub seat: Seat,
}

/// A stream of accepted connections. Each is accepted once there is a place for it.
pub(crate) fn incoming(
    listener: TcpListener,
    bounds: Bounds,
    tls: Option<TlsServer>,
) -> impl Stream<Item = io::Result<Held>> {
    async_stream::stream! {
        let places = bounds.places();
        loop {
            let (stream, place) = accept(&listener, &places).await;
            let address = stream.peer_addr().ok();
            let stream = Patient::new(stream, bounds.send).placed(place.seat()).begins_within(bounds.head, HTTP2_BEGINNING);
            let stream = TlsIo::maybe(tls.as_ref(), stream, address);
            yield Ok(Held { stream, place });
        }
    }
}

impl Connected for Held {
    type ConnectInfo = Caller;

    fn connect_info(&self) -> Caller {
        Caller { peer: self.stream.peer(), seat: self.place.seat() }
    }
}

impl AsyncRead for Held {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
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
    use std::time::Duration;
    use tokio::net::TcpStream;

    #[tokio::test]
    async fn a_closed_connection_gives_its_place_to_the_next() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut incoming =
            std::pin::pin!(incoming(listener, Bounds::new(1, Duration::from_secs(60), Duration::from_secs(60)), None));
        let _clients = [TcpStream::connect(address).await.unwrap(), TcpStream::connect(address).await.unwrap()];
        let first = incoming.next().await.unwrap().unwrap();
        assert!(futures::poll!(incoming.next()).is_pending(), "there is no place for the second yet");
        drop(first);
        let _second = incoming.next().await.unwrap().unwrap();
    }
}
