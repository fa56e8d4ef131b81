//! Client connections. Limits their number for both front doors. For HTTP also limits their idle time and ends them.
//!
//! Knows bytes and connections only; `http.rs` handles the requests.

use std::future::Future;
use std::io::ErrorKind;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, HttpBody};
use axum::http::Request;
use baton_runtime::Shutdown;
use baton_runtime::places::{Place, Places, holding};
use baton_runtime::tls::{TlsIo, TlsServer};
use hyper::body::{Frame, Incoming, SizeHint};
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use socket2::SockRef;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use crate::patient::{Patient, Phase};

/// Longest time from the first byte of a request's head to its last; of a gRPC connection, until it has begun (I5).
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// Most bytes of a request's head: enough for long keys, cookies and traces. About as many of a connection are read before they are wanted,
/// and wait to be written (I5).
const BUFFER: usize = 64 << 10;
/// Pause after accepting failed, for example because there were no file descriptors left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Limits of a listener.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    /// Maximum open connections. One more takes the place of the one that has waited for a request the longest, or waits itself.
    pub connections: usize,
    /// Longest time from the first byte of a request's head to its last.
    pub head: Duration,
    /// Longest time that an HTTP connection waits for a request.
    pub idle: Duration,
    /// Longest time that bytes wait for a client that reads none.
    pub send: Duration,
}

impl Bounds {
    /// Limits with this many connections, these waits for clients that ask nothing and for those that do not read, and the default head
    /// timeout.
    pub fn new(connections: usize, idle: Duration, send: Duration) -> Bounds {
        Bounds { connections, head: HEAD_TIMEOUT, idle, send }
    }

    /// A place for each connection.
    pub fn places(&self) -> Arc<Places> {
        Places::new(self.connections)
    }
}

/// Serves `app` until the drain has started and then every connection has ended or `last` has completed. Connections still
/// open then are cut.
pub(crate) async fn serve(
    listener: TcpListener,
    app: Router,
    bounds: Bounds,
    tls: Option<TlsServer>,
    shutdown: Shutdown,
    last: impl Future<Output = ()>,
) {
    let places = bounds.places();
    let mut connections = JoinSet::new();
    // Kept from turn to turn: a connection that was accepted may still wait for its place.
    let mut next = Box::pin(accept(&listener, &places));
    loop {
        tokio::select! {
            () = shutdown.draining() => break,
            (stream, place) = next.as_mut() => {
                next.set(accept(&listener, &places));
                let phase = Phase::new(place.seat());
                let address = stream.peer_addr().ok();
                let io = Patient::new(stream, bounds.send).placed(place.seat()).heads_within(bounds.head, phase.clone());
                let io = TlsIo::maybe(tls.as_ref(), io, address);
                connections.spawn(connection(io, phase, place, app.clone(), bounds.idle, shutdown.clone()));
            }
            // Frees the tasks of ended connections.
            Some(_) = connections.join_next() => {}
        }
    }
    drop(next);
    drop(listener);
    let ended = async { while connections.join_next().await.is_some() {} };
    tokio::select! {
        () = ended => {}
        () = last => {}
    }
}

/// Bytes that the system holds of an answer besides those on their way. Without a bound it holds megabytes, and a client that reads nothing
/// is noticed only when they are full.
const UNSENT: u32 = 64 << 10;

/// Accepts the next connection and waits for a place for it. Its packets leave at once (TCP_NODELAY): tokens are small, and
/// waiting to fill a packet would delay each.
pub(crate) async fn accept(listener: &TcpListener, places: &Arc<Places>) -> (TcpStream, Place) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                let _ = stream.set_nodelay(true);
                let _ = SockRef::from(&stream).set_tcp_notsent_lowat(UNSENT);
                return (stream, places.take().await);
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

async fn connection(io: TlsIo<Patient>, phase: Phase, _place: Place, app: Router, idle: Duration, shutdown: Shutdown) {
    let app = TowerToHyperService::new(app);
    let service = service_fn(move |request: Request<Incoming>| {
        let busy = phase.busy();
        let phase = phase.clone();
        let answer = app.call(request.map(|body| Body::new(Reading { body, phase, ended: false })));
        async move { answer.await.map(|answer| answer.map(|body| holding(body, busy))) }
    });
    let mut server = http1::Builder::new();
    // Counts from the end of the answer before, so a connection may be idle for as long.
    let server = server.timer(TokioTimer::new()).header_read_timeout(idle).max_buf_size(BUFFER).max_header_size(BUFFER);
    let mut serving = std::pin::pin!(server.serve_connection(TokioIo::new(io), service));
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

/// The body of a request, and the connection's phase, which learns if its end is not read.
struct Reading {
    body: Incoming,
    phase: Phase,
    ended: bool,
}

impl Drop for Reading {
    fn drop(&mut self) {
        if !self.ended && !self.body.is_end_stream() {
            self.phase.leave_unread();
        }
    }
}

impl HttpBody for Reading {
    type Data = <Incoming as HttpBody>::Data;
    type Error = <Incoming as HttpBody>::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        let polled = Pin::new(&mut self.body).poll_frame(cx);
        self.ended |= matches!(polled, Poll::Ready(None));
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::routing::{get, post};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    /// Starts a listener. Returns its address, its shutdown handle and its task.
    async fn start(bounds: Bounds) -> (std::net::SocketAddr, Shutdown, tokio::task::JoinHandle<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let shutdown = Shutdown::new(Duration::from_secs(600));
        let app = Router::new().route("/", get(|| async { "fine" }));
        let serving = tokio::spawn(serve(listener, app, bounds, None, shutdown.clone(), std::future::pending()));
        (address, shutdown, serving)
    }

    const LONG: Duration = Duration::from_secs(60);
    const SHORT: Duration = Duration::from_millis(50);

    async fn everything(mut stream: TcpStream) -> String {
        let mut text = String::new();
        stream.read_to_string(&mut text).await.unwrap();
        text
    }

    const ASK: &[u8] = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n";

    async fn answer(stream: &mut TcpStream) {
        stream.write_all(ASK).await.unwrap();
        let mut got = Vec::new();
        while !got.ends_with(b"fine") {
            assert!(stream.read_buf(&mut got).await.unwrap() > 0, "the connection ended");
        }
    }

    #[tokio::test]
    async fn a_head_that_is_not_completed_ends_its_connection() {
        // I5: at once or after an answer, however long connections may be idle.
        let (address, shutdown, serving) = start(Bounds { head: SHORT, ..Bounds::new(9, LONG, LONG) }).await;
        let silent = TcpStream::connect(address).await.unwrap();
        assert_eq!(everything(silent).await, "");
        for answers in 0..3 {
            let mut stream = TcpStream::connect(address).await.unwrap();
            for _ in 0..answers {
                answer(&mut stream).await;
                tokio::time::sleep(SHORT * 2).await;
            }
            stream.write_all(b"GET / HTTP/1.1\r\nho").await.unwrap();
            assert_eq!(everything(stream).await, "");
        }
        shutdown.start("test");
        serving.await.unwrap();
    }

    #[tokio::test]
    async fn little_is_held_for_a_client_that_reads_nothing() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (stream, _place) = accept(&listener, &Places::new(1)).await;
        let mut held = 0;
        // Written in small pieces, and slowly enough for the system's buffers to grow.
        while let Ok(taken) = tokio::time::timeout(SHORT, async {
            stream.writable().await?;
            stream.try_write(&[b'x'; 1000])
        })
        .await
        {
            held += taken.unwrap_or(0);
        }
        let most = 3 * UNSENT as usize;
        let receives = SockRef::from(&client).recv_buffer_size().unwrap();
        assert!(held < receives + most, "{held} bytes are held, {receives} of them by the client's side");
    }

    #[tokio::test]
    async fn a_connection_may_be_idle_but_not_for_ever() {
        let (address, shutdown, serving) = start(Bounds { head: LONG, ..Bounds::new(9, SHORT * 4, LONG) }).await;
        let silent = TcpStream::connect(address).await.unwrap();
        assert_eq!(everything(silent).await, "");
        let mut used = TcpStream::connect(address).await.unwrap();
        for _ in 0..4 {
            answer(&mut used).await;
            tokio::time::sleep(SHORT * 2).await;
        }
        assert_eq!(everything(used).await, "");
        shutdown.start("test");
        serving.await.unwrap();
    }

    #[tokio::test]
    async fn a_client_that_is_refused_while_it_sends_its_body_reads_the_answer() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let shutdown = Shutdown::new(LONG);
        let app = Router::new().route("/", post(|_: axum::extract::Request| async { "no room" }));
        let bounds = Bounds::new(9, LONG, LONG);
        let serving = tokio::spawn(serve(listener, app, bounds, None, shutdown.clone(), std::future::pending()));
        for (head, chunk) in [("content-length: 4000000", ""), ("transfer-encoding: chunked", "f4240\r\n")] {
            let mut stream = TcpStream::connect(address).await.unwrap();
            let head = format!("POST / HTTP/1.1\r\nhost: x\r\n{head}\r\n\r\n{chunk}");
            stream.write_all(head.as_bytes()).await.unwrap();
            for _ in 0..10 {
                stream.write_all(&vec![b'x'; 100_000]).await.unwrap();
                tokio::time::sleep(SHORT / 5).await;
            }
            assert!(everything(stream).await.ends_with("no room"));
        }
        shutdown.start("test");
        serving.await.unwrap();
    }

    #[tokio::test]
    async fn a_head_has_a_largest_size_and_a_body_none_here() {
        // I5: a head is held by its connection alone, whatever the memory for bodies.
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let shutdown = Shutdown::new(LONG);
        let length = |body: axum::body::Bytes| async move { format!("{} bytes", body.len()) };
        let app = Router::new().route("/", post(length)).layer(axum::extract::DefaultBodyLimit::disable());
        let bounds = Bounds::new(9, LONG, LONG);
        let serving = tokio::spawn(serve(listener, app, bounds, None, shutdown.clone(), std::future::pending()));
        for (header, body, want) in [
            (40 << 10, 0, "0 bytes"),
            (9, 8 << 20, "8388608 bytes"),
            (40 << 10, 1 << 20, "1048576 bytes"),
            (80 << 10, 0, "HTTP/1.1 431"),
        ] {
            let mut stream = TcpStream::connect(address).await.unwrap();
            let key = "k".repeat(header);
            let head = format!(
                "POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\nauthorization: Bearer {key}\r\ncontent-length: {body}\r\n\r\n"
            );
            let (mut reading, mut writing) = stream.split();
            let send = async {
                // What is refused is not read to its end.
                let _ = writing.write_all(head.as_bytes()).await;
                let _ = writing.write_all(&vec![b'x'; body]).await;
            };
            let mut answer = Vec::new();
            let read = async { drop(reading.read_to_end(&mut answer).await) };
            tokio::join!(send, read);
            let answer = String::from_utf8(answer).unwrap();
            assert!(answer.contains(want), "{header} bytes of a header: {answer}");
        }
        shutdown.start("test");
        serving.await.unwrap();
    }

    #[tokio::test]
    async fn one_more_than_there_are_places_waits_for_one() {
        let (address, shutdown, serving) = start(Bounds::new(1, LONG, LONG)).await;
        let mut first = TcpStream::connect(address).await.unwrap();
        first.write_all(ASK).await.unwrap();
        // Its answer has begun, so the place is taken.
        first.read_u8().await.unwrap();
        // Many times: that a place is given back and that a connection has ended are seen in any order.
        for _ in 0..50 {
            let mut second = TcpStream::connect(address).await.unwrap();
            second.write_all(ASK).await.unwrap();
            assert_eq!(second.try_read(&mut [0]).unwrap_err().kind(), ErrorKind::WouldBlock);
            tokio::time::sleep(Duration::from_millis(2)).await;
            drop(first);
            second.read_u8().await.expect("who waited for a place is served");
            first = second;
        }
        shutdown.start("test");
        serving.await.unwrap();
    }
}
