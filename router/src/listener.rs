//! Client connections. Limits their number for both front doors. For HTTP also limits their idle time and ends them.
//!
//! Knows bytes and connections only; `http.rs` handles the requests.

use std::future::Future;
use std::io::ErrorKind;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use baton_runtime::Shutdown;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;

/// Longest time until the head of a connection's next request is complete, idle time included (I5).
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause after accepting failed, for example because there were no file descriptors left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Most permits of a semaphore; every platform can count this many.
const MOST: usize = 1 << 24;

/// Limits of a listener.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    /// Maximum open connections; more wait in the system's queue.
    pub connections: usize,
    /// Longest time until the head of a request is complete.
    pub head: Duration,
}

impl Bounds {
    /// Limits with this many connections and the default head timeout.
    pub fn new(connections: usize) -> Bounds {
        Bounds { connections, head: HEAD_TIMEOUT }
    }

    /// A semaphore with one permit per connection.
    pub fn places(&self) -> Arc<Semaphore> {
        Arc::new(Semaphore::new(self.connections.clamp(1, MOST)))
    }
}

/// Serves `app` until the drain has started and then every connection has ended or `last` has completed. Connections still
/// open then are cut.
pub(crate) async fn serve(
    listener: TcpListener,
    app: Router,
    bounds: Bounds,
    shutdown: Shutdown,
    last: impl Future<Output = ()>,
) {
    let places = bounds.places();
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            () = shutdown.draining() => break,
            (stream, place) = accept(&listener, &places) => {
                connections.spawn(connection(stream, place, app.clone(), bounds.head, shutdown.clone()));
            }
            // Frees the tasks of ended connections.
            Some(_) = connections.join_next() => {}
        }
    }
    drop(listener);
    let ended = async { while connections.join_next().await.is_some() {} };
    tokio::select! {
        () = ended => {}
        () = last => {}
    }
}

/// Waits for a free place and accepts the next connection. Its packets leave at once (TCP_NODELAY): tokens are small, and
/// waiting to fill a packet would delay each.
pub(crate) async fn accept(
    listener: &TcpListener,
    places: &Arc<Semaphore>,
) -> (TcpStream, Option<OwnedSemaphorePermit>) {
    // The semaphore is never closed.
    let place = Arc::clone(places).acquire_owned().await.ok();
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                let _ = stream.set_nodelay(true);
                return (stream, place);
            }
            // The client left before it was accepted.
            Err(e) if matches!(e.kind(), ErrorKind::ConnectionAborted | ErrorKind::ConnectionReset) => {}
            Err(error) => {
                tracing::warn!(%error, "cannot accept connections");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

async fn connection(
    stream: TcpStream,
    _place: Option<OwnedSemaphorePermit>,
    app: Router,
    head: Duration,
    shutdown: Shutdown,
) {
    let service = TowerToHyperService::new(app);
    let mut server = http1::Builder::new();
    let server = server.timer(TokioTimer::new()).header_read_timeout(head);
    let mut serving = std::pin::pin!(server.serve_connection(TokioIo::new(stream), service));
    let ended = tokio::select! {
        ended = serving.as_mut() => ended,
        () = shutdown.draining() => {
            serving.as_mut().graceful_shutdown();
            serving.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "an HTTP connection broke off");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::routing::get;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    /// Starts a listener. Returns its address, its shutdown handle and its task.
    async fn start(bounds: Bounds) -> (std::net::SocketAddr, Shutdown, tokio::task::JoinHandle<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let shutdown = Shutdown::new(Duration::from_secs(600));
        let app = Router::new().route("/", get(|| async { "fine" }));
        let serving = tokio::spawn(serve(listener, app, bounds, shutdown.clone(), std::future::pending()));
        (address, shutdown, serving)
    }

    async fn everything(mut stream: TcpStream) -> String {
        let mut text = String::new();
        stream.read_to_string(&mut text).await.unwrap();
        text
    }

    const ASK: &[u8] = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n";

    #[tokio::test]
    async fn a_connection_without_a_whole_head_is_closed() {
        // I5
        let head = Duration::from_millis(20);
        let (address, shutdown, serving) = start(Bounds { head, ..Bounds::new(9) }).await;
        for sent in [&b""[..], b"GET / HTTP/1.1\r\nho"] {
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream.write_all(sent).await.unwrap();
            assert!(!everything(stream).await.contains("200"));
        }
        // A connection that has its answer and asks for nothing more is closed too.
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(ASK).await.unwrap();
        assert!(everything(stream).await.ends_with("fine"));
        shutdown.start("test");
        serving.await.unwrap();
    }

    #[tokio::test]
    async fn one_more_than_there_are_places_waits_for_one() {
        let (address, shutdown, serving) = start(Bounds::new(1)).await;
        let mut first = TcpStream::connect(address).await.unwrap();
        first.write_all(ASK).await.unwrap();
        // Its answer has begun, so the place is taken.
        first.read_u8().await.unwrap();
        let mut second = TcpStream::connect(address).await.unwrap();
        second.write_all(ASK).await.unwrap();
        assert_eq!(second.try_read(&mut [0]).unwrap_err().kind(), ErrorKind::WouldBlock);
        drop(first);
        second.read_u8().await.unwrap();
        shutdown.start("test");
        serving.await.unwrap();
    }
}
