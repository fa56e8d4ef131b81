//! Connections to workers that gather what is ready to be written. HTTP/2 flushes the head of a request before its body is asked for, and
//! the frames of two streams one by one. Each flush is a system call, and those cost more than all else that the router does for a request.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use baton_runtime::TlsClient;
use baton_runtime::tls::{Outgoing, dial};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tonic::transport::Uri;

/// Bytes that are gathered at most before they are written.
const MOST: usize = 64 << 10;

/// Connects to a worker's address.
pub(super) async fn connect(uri: Uri, tls: Option<TlsClient>) -> io::Result<TokioIo<Gather<Outgoing>>> {
    let (host, port) = (uri.host().unwrap_or_default(), uri.port_u16().unwrap_or(80));
    Ok(TokioIo::new(Gather::new(dial(host, port, tls.as_ref()).await?)))
}

/// A connection that puts a flush off once, until all tasks that are ready by then have run.
pub(super) struct Gather<S> {
    stream: S,
    waiting: Vec<u8>,
    /// How much of `waiting` is written.
    written: usize,
    /// The flush has been put off.
    put_off: bool,
}

impl<S: AsyncWrite + Unpin> Gather<S> {
    fn new(stream: S) -> Gather<S> {
        Gather { stream, waiting: Vec::new(), written: 0, put_off: false }
    }

    fn write_waiting(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while self.written < self.waiting.len() {
            match ready!(Pin::new(&mut self.stream).poll_write(cx, &self.waiting[self.written..]))? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                bytes => self.written += bytes,
            }
        }
        self.waiting.clear();
        (self.written, self.put_off) = (0, false);
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Gather<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Gather<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[io::IoSlice::new(buf)])
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if self.waiting.len() >= MOST {
            ready!(self.write_waiting(cx))?;
        }
        let bytes = bufs.iter().map(|buf| buf.len()).sum();
        if self.waiting.is_empty() && bytes >= MOST {
            return Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        }
        bufs.iter().for_each(|buf| self.waiting.extend_from_slice(buf));
        Poll::Ready(Ok(bytes))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.waiting.is_empty() {
            return Pin::new(&mut self.stream).poll_flush(cx);
        }
        if !std::mem::replace(&mut self.put_off, true) {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        self.write_waiting(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.write_waiting(cx))?;
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    #[tokio::test]
    async fn what_is_written_before_a_flush_comes_together() {
        let (ours, mut theirs) = tokio::io::duplex(1 << 20);
        let mut gather = Gather::new(ours);
        let mut cx = Context::from_waker(std::task::Waker::noop());
        gather.write_all(b"head").await.unwrap();
        assert!(Pin::new(&mut gather).poll_flush(&mut cx).is_pending());
        gather.write_all(b" and body").await.unwrap();
        assert!(futures::poll!(Box::pin(theirs.read_u8())).is_pending(), "nothing is sent yet");
        assert!(Pin::new(&mut gather).poll_flush(&mut cx).is_ready());
        let mut all = [0; 13];
        theirs.read_exact(&mut all).await.unwrap();
        assert_eq!(&all, b"head and body");
        gather.write_all(b"more").await.unwrap();
        gather.flush().await.unwrap();
        theirs.read_exact(&mut all[..4]).await.unwrap();
        assert_eq!(&all[..4], b"more");
    }

    #[tokio::test]
    async fn all_bytes_arrive_in_order_however_slowly_they_are_read() {
        let (ours, mut theirs) = tokio::io::duplex(1000);
        let sent: Vec<u8> = (0..600_000u32).map(|at| (at / 7) as u8).collect();
        let wanted = sent.clone();
        let writing = tokio::spawn(async move {
            let (mut gather, mut rest, mut size) = (Gather::new(ours), &sent[..], 1);
            while !rest.is_empty() {
                let (now, later) = rest.split_at(size.min(rest.len()));
                gather.write_all(now).await.unwrap();
                if size % 3 == 0 {
                    gather.flush().await.unwrap();
                }
                (rest, size) = (later, size * 2 % 99_991);
            }
            gather.shutdown().await.unwrap();
        });
        let mut got = Vec::new();
        theirs.read_to_end(&mut got).await.unwrap();
        writing.await.unwrap();
        assert!(got == wanted);
    }
}
