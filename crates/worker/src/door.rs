//! Connections of a worker's gRPC server, with TLS or without it.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use baton_runtime::TlsServer;
use baton_runtime::tls::{HTTP2_BEGINNING, TlsIo, TlsPeer};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_stream::Stream;
use tonic::transport::server::Connected;

/// Pause after accepting failed, for example because there were no file descriptors left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Most connections at a time (I5). Each router has one.
const CONNECTIONS: usize = 4096;

/// A connection.
pub struct Door {
    stream: TlsIo<TcpStream>,
    _place: Option<OwnedSemaphorePermit>,
}

/// A stream of accepted connections. Tokens are small, so Nagle's algorithm is off.
pub fn incoming(listener: TcpListener, tls: Option<TlsServer>) -> impl Stream<Item = io::Result<Door>> {
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    async_stream::stream! {
        loop {
            // The semaphore is never closed.
            let place = Arc::clone(&places).acquire_owned().await.ok();
            match listener.accept().await {
                Ok((stream, address)) => {
                    let _ = stream.set_nodelay(true);
                    let stream = TlsIo::maybe(tls.as_ref(), stream, Some(address)).beginning_with(HTTP2_BEGINNING);
                    yield Ok(Door { stream, _place: place });
                }
                // The client left before it was accepted.
                Err(e) if matches!(e.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset) => {}
                Err(error) => {
                    tracing::warn!(%error, "cannot accept connections");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }
}

impl Connected for Door {
    type ConnectInfo = TlsPeer;

    fn connect_info(&self) -> TlsPeer {
        self.stream.peer()
    }
}

impl AsyncRead for Door {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Door {
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
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio_stream::StreamExt;

    /// I5
    #[tokio::test]
    async fn who_sends_nothing_does_not_keep_a_connection() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut incoming = std::pin::pin!(incoming(listener, None));
        let mut ends = Vec::new();
        for sent in [0, HTTP2_BEGINNING] {
            let mut client = TcpStream::connect(address).await.unwrap();
            client.write_all(&vec![0; sent]).await.unwrap();
            let mut door = incoming.next().await.unwrap().unwrap();
            tokio::time::pause();
            let mut all = vec![0; sent + 1];
            let read = tokio::time::timeout(Duration::from_secs(60), door.read_exact(&mut all)).await;
            tokio::time::resume();
            ends.push(read.map(|read| read.unwrap_err().kind()).ok());
        }
        assert_eq!(ends, [Some(io::ErrorKind::TimedOut), None]);
    }
}
