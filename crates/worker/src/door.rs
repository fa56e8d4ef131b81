//! Connections of a worker's gRPC server, with TLS or without it.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use baton_runtime::TlsServer;
use baton_runtime::tls::{HTTP2_BEGINNING, TlsIo, TlsPeer};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio_stream::Stream;
use tonic::transport::server::Connected;

/// Pause after accepting failed, for example because there were no file descriptors left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A connection.
pub struct Door(TlsIo<TcpStream>);

/// A stream of accepted connections. Tokens are small, so Nagle's algorithm is off.
pub fn incoming(listener: TcpListener, tls: Option<TlsServer>) -> impl Stream<Item = io::Result<Door>> {
    let tls = tls.map(|tls| tls.beginning_with(HTTP2_BEGINNING));
    async_stream::stream! {
        loop {
            match listener.accept().await {
                Ok((stream, address)) => {
                    let _ = stream.set_nodelay(true);
                    yield Ok(Door(TlsIo::maybe(tls.as_ref(), stream, Some(address))));
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
        self.0.peer()
    }
}

impl AsyncRead for Door {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buf)
    }
}

impl AsyncWrite for Door {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.0.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}
