//! HTTP/2 to one worker. A call is sent and its answer read by the task that makes it: head and message are handed to the connection together,
//! so that they leave in one write, and no task between the two has to run. Each of those would cost a request a turn behind all that are
//! ready to run. What of a call's messages is not there yet follows while its answer is read.
//!
//! A connection is opened when it is first needed, and anew after it broke. A worker from which nothing comes, not even the answer to a ping,
//! breaks it.

use std::error::Error;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::{Bytes, HttpBody};
use axum::http::uri::{Authority, PathAndQuery, Scheme};
use axum::http::{HeaderMap, Request, Response, Uri};
use baton_runtime::TlsClient;
use baton_runtime::config::format_duration;
use baton_runtime::tls::{Outgoing, dial};
use futures::FutureExt;
use futures::future::{BoxFuture, Shared, pending, poll_fn};
use h2::client::{Builder, Connection, SendRequest};
use h2::{Ping, PingPong, RecvStream, SendStream};
use hyper::body::Frame;
use tokio::time::{sleep, timeout};

/// Bytes that a worker may be ahead of a client that reads slowly (I5). All streams to a worker share one connection.
/// `CONNECTION_WINDOW` is large enough that slow clients do not hold up others.
const STREAM_WINDOW: u32 = 64 << 10;
const CONNECTION_WINDOW: u32 = 1 << 30;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// How often a worker that says nothing is asked whether it is there (I5).
const PING_EVERY: Duration = Duration::from_secs(1);

type BoxError = Box<dyn Error + Send + Sync>;

/// The way to one worker. Clones share its connection.
#[derive(Clone)]
pub(crate) struct Channel(Arc<Peer>);

struct Peer {
    authority: Authority,
    tls: Option<TlsClient>,
    /// How long it may leave a ping unanswered.
    silence: Duration,
    state: Mutex<State>,
}

enum State {
    Closed,
    /// All that need it wait for the same connection.
    Opening(Shared<BoxFuture<'static, Result<Open, Broke>>>),
    Open(Open),
}

/// An open connection.
#[derive(Clone)]
struct Open {
    requests: SendRequest<Bytes>,
    health: Arc<Health>,
}

#[derive(Default)]
struct Health {
    /// Something came since the last look.
    heard: AtomicBool,
    /// Why the connection is no more.
    broke: OnceLock<Broke>,
}

/// How a connection broke; as an error that several can have.
#[derive(Clone, Debug)]
struct Broke {
    kind: io::ErrorKind,
    message: Arc<str>,
}

impl Broke {
    fn new(kind: io::ErrorKind, message: impl Into<Arc<str>>) -> Broke {
        Broke { kind, message: message.into() }
    }

    fn error(&self) -> BoxError {
        io::Error::new(self.kind, self.message.to_string()).into()
    }
}

impl From<io::Error> for Broke {
    fn from(error: io::Error) -> Broke {
        Broke::new(error.kind(), error.to_string())
    }
}

impl std::fmt::Debug for Channel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Channel({})", self.0.authority)
    }
}

impl Channel {
    /// A channel to this address that is not connected yet.
    pub fn new(authority: Authority, tls: Option<TlsClient>, silence: Duration) -> Channel {
        Channel(Arc::new(Peer { authority, tls, silence, state: Mutex::new(State::Closed) }))
    }
}

impl Peer {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The open connection; opens one if there is none.
    async fn open(self: &Arc<Peer>) -> Result<Open, BoxError> {
        let opening = match &mut *self.state() {
            State::Open(open) if open.health.broke.get().is_none() => return Ok(open.clone()),
            State::Opening(opening) => opening.clone(),
            closed => {
                // A task of its own: it goes on when who asked for it is gone.
                let connecting = tokio::spawn(Arc::clone(self).connect());
                let lost = |_| Err(Broke::new(io::ErrorKind::Other, "connecting was broken off"));
                let opening = connecting.map(move |done| done.unwrap_or_else(lost)).boxed().shared();
                *closed = State::Opening(opening.clone());
                opening
            }
        };
        opening.await.map_err(|broke| broke.error())
    }

    async fn connect(self: Arc<Peer>) -> Result<Open, Broke> {
        let late = |_| {
            Broke::new(io::ErrorKind::TimedOut, format!("no connection within {}", format_duration(CONNECT_TIMEOUT)))
        };
        let opened = timeout(CONNECT_TIMEOUT, self.handshake()).await.map_err(late).flatten();
        *self.state() = opened.as_ref().map_or(State::Closed, |open| State::Open(open.clone()));
        opened
    }

    async fn handshake(&self) -> Result<Open, Broke> {
        let (host, port) = (self.authority.host(), self.authority.port_u16().unwrap_or(80));
        let stream = dial(host, port, self.tls.as_ref()).await?;
        let mut builder = Builder::new();
        builder.initial_window_size(STREAM_WINDOW).initial_connection_window_size(CONNECTION_WINDOW).enable_push(false);
        let not_http = |error: h2::Error| Broke::new(io::ErrorKind::Other, error.to_string());
        let (requests, connection) = builder.handshake(stream).await.map_err(not_http)?;
        let health = Arc::<Health>::default();
        tokio::spawn(keep(connection, Arc::clone(&health), self.silence));
        Ok(Open { requests, health })
    }

    /// A connection that can take a request. One whose peer said that it takes no more is replaced.
    async fn ready(self: &Arc<Peer>) -> Result<Open, BoxError> {
        let old = self.open().await?;
        if let Ok(requests) = old.requests.clone().ready().await {
            return Ok(Open { requests, ..old });
        }
        {
            let mut state = self.state();
            if matches!(&*state, State::Open(open) if Arc::ptr_eq(&open.health, &old.health)) {
                *state = State::Closed;
            }
        }
        self.open().await
    }

    async fn call(self: Arc<Peer>, request: Request<tonic::body::Body>) -> Result<Response<Answer>, BoxError> {
        let (mut head, body) = request.into_parts();
        let path = head.uri.path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/"));
        let uri = Uri::builder().scheme(Scheme::HTTP).authority(self.authority.clone()).path_and_query(path);
        head.uri = uri.build()?;
        let (message, rest) = begin(body).await?;
        let Open { mut requests, health } = self.ready().await?;
        let (mut answer, mut up) = requests.send_request(Request::from_parts(head, ()), false)?;
        up.send_data(message, rest.is_none())?;
        let mut rest = rest.map(|body| Rest { body, up });
        // A peer may begin to answer only when it has heard all.
        let answer = poll_fn(|cx| {
            Rest::send(&mut rest, cx);
            answer.poll_unpin(cx)
        });
        match answer.await {
            Ok(answer) => Ok(answer.map(|stream| Answer { stream, rest, health, ended: false })),
            Err(error) => Err(health.error(error)),
        }
    }
}

impl Health {
    /// The error of a stream: that of its connection, if it has broken.
    fn error(&self, error: h2::Error) -> BoxError {
        match self.broke.get() {
            Some(broke) => broke.error(),
            None if error.is_io() => error.into_io().unwrap_or_else(|| io::ErrorKind::Other.into()).into(),
            None => error.into(),
        }
    }
}

/// Serves a connection until it breaks or nobody needs it.
async fn keep(mut connection: Connection<Outgoing, Bytes>, health: Arc<Health>, silence: Duration) {
    let pings = connection.ping_pong();
    let silent = async {
        match pings {
            Some(pings) => until_silent(pings, &health, silence).await,
            None => pending().await,
        }
    };
    let broke = tokio::select! {
        biased;
        ended = &mut connection => match ended {
            Ok(()) => Broke::new(io::ErrorKind::UnexpectedEof, "the worker closed the connection"),
            Err(error) => match error.get_io() {
                Some(io) => Broke::new(io.kind(), io.to_string()),
                None => Broke::new(io::ErrorKind::Other, error.to_string()),
            },
        },
        () = silent => {
            Broke::new(io::ErrorKind::TimedOut, format!("no answer to a ping within {}", format_duration(silence)))
        }
    };
    // Before the connection is dropped, which ends its streams.
    let _ = health.broke.set(broke);
}

/// Completes when nothing has come for too long, although it was asked for.
async fn until_silent(mut pings: PingPong, health: &Health, silence: Duration) {
    let mut asked = false;
    loop {
        sleep(PING_EVERY).await;
        if health.heard.swap(false, Ordering::Relaxed) {
            continue;
        }
        asked = asked || pings.send_ping(Ping::opaque()).is_ok();
        match timeout(silence, poll_fn(|cx| pings.poll_pong(cx))).await {
            Ok(Ok(_)) => asked = false,
            // The connection is over.
            Ok(Err(_)) => pending().await,
            // The answer may be behind much else.
            Err(_) if health.heard.swap(false, Ordering::Relaxed) => {}
            Err(_) => return,
        }
    }
}

/// What is there of a call's messages, at least the first, and the body if more may follow.
async fn begin(mut body: tonic::body::Body) -> Result<(Bytes, Option<tonic::body::Body>), BoxError> {
    let mut parts = Vec::new();
    let ended = loop {
        let next = poll_fn(|cx| match Pin::new(&mut body).poll_frame(cx) {
            Poll::Pending if parts.is_empty() => Poll::Pending,
            there => Poll::Ready(there),
        });
        match next.await {
            Poll::Ready(Some(frame)) => parts.extend(frame?.into_data().ok()),
            Poll::Ready(None) => break true,
            Poll::Pending => break false,
        }
    };
    let there = match &mut parts[..] {
        [only] => std::mem::take(only),
        parts => parts.concat().into(),
    };
    Ok((there, (!ended).then_some(body)))
}

/// Messages of a call that are not there yet. Dropped before their end, they cancel the call.
struct Rest {
    body: tonic::body::Body,
    up: SendStream<Bytes>,
}

impl Rest {
    /// Sends what has come. Whoever polls this is woken when more comes. A stream that takes nothing more says so where its answer is read.
    fn send(rest: &mut Option<Rest>, cx: &mut Context<'_>) {
        while let Some(Rest { body, up }) = rest {
            let (data, last) = match Pin::new(body).poll_frame(cx) {
                Poll::Pending => return,
                Poll::Ready(Some(Ok(frame))) => (frame.into_data().unwrap_or_default(), false),
                Poll::Ready(Some(Err(_)) | None) => (Bytes::new(), true),
            };
            if up.send_data(data, last).is_err() || last {
                *rest = None;
            }
        }
    }
}

impl tower::Service<Request<tonic::body::Body>> for Channel {
    type Response = Response<Answer>;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<Response<Answer>, BoxError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<tonic::body::Body>) -> Self::Future {
        Box::pin(Arc::clone(&self.0).call(request))
    }
}

/// The body of an answer. Dropped before its end, it cancels the call.
pub(crate) struct Answer {
    stream: RecvStream,
    rest: Option<Rest>,
    health: Arc<Health>,
    /// Only trailers follow.
    ended: bool,
}

impl HttpBody for Answer {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        Rest::send(&mut self.rest, cx);
        if !self.ended {
            match ready!(self.stream.poll_data(cx)) {
                Some(Ok(bytes)) => {
                    self.health.heard.store(true, Ordering::Relaxed);
                    // Fails only for more than what came.
                    let _ = self.stream.flow_control().release_capacity(bytes.len());
                    return Poll::Ready(Some(Ok(Frame::data(bytes))));
                }
                Some(Err(error)) => return Poll::Ready(Some(Err(self.health.error(error)))),
                None => self.ended = true,
            }
        }
        let trailers: Result<Option<HeaderMap>, _> = ready!(self.stream.poll_trailers(cx));
        let frame = trailers.map(|trailers| trailers.map(Frame::trailers)).map_err(|error| self.health.error(error));
        Poll::Ready(frame.transpose())
    }

    fn is_end_stream(&self) -> bool {
        self.stream.is_end_stream()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::StreamExt;
    use std::sync::atomic::AtomicU32;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};

    const SILENCE: Duration = Duration::from_millis(300);

    /// A listener, and a channel to it.
    async fn channel() -> (TcpListener, Channel) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let authority = listener.local_addr().unwrap().to_string().parse().unwrap();
        (listener, Channel::new(authority, None, SILENCE))
    }

    fn request() -> Request<tonic::body::Body> {
        Request::builder().uri("/a.Service/Call").body(tonic::body::Body::empty()).unwrap()
    }

    /// Answers a call with what it says, message by message.
    async fn echo(listener: TcpListener) {
        let mut server = h2::server::handshake(listener.accept().await.unwrap().0).await.unwrap();
        while let Some(Ok((request, mut respond))) = server.accept().await {
            tokio::spawn(async move {
                let mut up = request.into_body();
                let mut down = respond.send_response(Response::new(()), false).unwrap();
                while let Some(Ok(data)) = up.data().await {
                    down.send_data(data, false).unwrap();
                }
                down.send_data("end".into(), true).unwrap();
            });
        }
    }

    #[tokio::test]
    async fn what_follows_later_is_sent_while_the_answer_is_read() {
        let (listener, channel) = channel().await;
        tokio::spawn(echo(listener));
        let (more, follows) = tokio::sync::mpsc::unbounded_channel();
        let body = tokio_stream::wrappers::UnboundedReceiverStream::new(follows).map(Ok::<Bytes, io::Error>);
        more.send("first".into()).unwrap();
        let body = tonic::body::Body::new(axum::body::Body::from_stream(body));
        let request = Request::builder().uri("/a.Service/Call").body(body).unwrap();
        let mut answer = Arc::clone(&channel.0).call(request).await.unwrap();
        let said = async |answer: &mut Response<Answer>| frame(answer).await.unwrap().unwrap().into_data().unwrap();
        assert_eq!(said(&mut answer).await, "first");
        let (late, ()) = tokio::join!(said(&mut answer), async {
            sleep(Duration::from_millis(20)).await;
            more.send("late".into()).unwrap();
        });
        assert_eq!(late, "late");
        drop(more);
        assert_eq!(said(&mut answer).await, "end");
    }

    async fn call(channel: &Channel) -> Result<Response<Answer>, BoxError> {
        Arc::clone(&channel.0).call(request()).await
    }

    fn kind(error: &BoxError) -> Option<io::ErrorKind> {
        error.downcast_ref::<io::Error>().map(io::Error::kind)
    }

    async fn frame(answer: &mut Response<Answer>) -> Option<Result<Frame<Bytes>, BoxError>> {
        poll_fn(|cx| Pin::new(answer.body_mut()).poll_frame(cx)).await
    }

    /// Answers each call with its path; ends after `calls`, telling the client that it takes no more.
    async fn serve(stream: TcpStream, calls: u32, served: Arc<AtomicU32>) {
        let mut server = h2::server::handshake(stream).await.unwrap();
        while let Some(Ok((request, mut respond))) = server.accept().await {
            let mut rest = respond.send_response(Response::new(()), false).unwrap();
            rest.send_data(request.uri().to_string().into(), false).unwrap();
            rest.send_trailers(HeaderMap::from_iter([("end".parse().unwrap(), "yes".parse().unwrap())])).unwrap();
            if served.fetch_add(1, Ordering::Relaxed) + 1 == calls {
                server.graceful_shutdown();
            }
        }
    }

    #[tokio::test]
    async fn calls_share_a_connection_and_one_that_takes_no_more_is_replaced() {
        let (listener, channel) = channel().await;
        let served = Arc::<AtomicU32>::default();
        let (counted, accepted) = (Arc::clone(&served), Arc::<AtomicU32>::default());
        let connections = Arc::clone(&accepted);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                connections.fetch_add(1, Ordering::Relaxed);
                tokio::spawn(serve(stream, 8, Arc::clone(&counted)));
            }
        });
        let all = futures::future::join_all((0..8).map(|_| call(&channel))).await;
        for answer in all {
            let mut answer = answer.unwrap();
            let said = frame(&mut answer).await.unwrap().unwrap().into_data().unwrap();
            assert!(said.starts_with(b"http://127.0.0.1:") && said.ends_with(b"/a.Service/Call"), "{said:?}");
            let trailers = frame(&mut answer).await.unwrap().unwrap().into_trailers().unwrap();
            assert_eq!(trailers["end"], "yes");
            assert!(frame(&mut answer).await.is_none());
        }
        assert_eq!(accepted.load(Ordering::Relaxed), 1);
        // The server takes no more over the first. Its word may not be here yet.
        sleep(Duration::from_millis(50)).await;
        call(&channel).await.unwrap();
        assert_eq!((accepted.load(Ordering::Relaxed), served.load(Ordering::Relaxed)), (2, 9));
    }

    #[tokio::test]
    async fn a_peer_that_is_not_there_says_so_and_is_asked_anew_each_time() {
        let (listener, channel) = channel().await;
        let address = listener.local_addr().unwrap();
        drop(listener);
        for _ in 0..2 {
            let refused = call(&channel).await.err().unwrap();
            assert_eq!(kind(&refused), Some(io::ErrorKind::ConnectionRefused));
        }
        let listener = TcpListener::bind(address).await.unwrap();
        tokio::spawn(async move { serve(listener.accept().await.unwrap().0, 9, Arc::default()).await });
        call(&channel).await.unwrap();
    }

    /// I5: one that answers no ping is given up, and what waits for it hears why.
    #[tokio::test]
    async fn a_silent_peer_breaks_its_connection_and_a_talking_one_does_not() {
        let (listener, channel) = channel().await;
        tokio::spawn(async move {
            let (stream, _) = listener.accept().await.unwrap();
            let mut server = h2::server::handshake(stream).await.unwrap();
            let (_, mut respond) = server.accept().await.unwrap().unwrap();
            let mut rest = respond.send_response(Response::new(()), false).unwrap();
            // Talks for longer than silence lasts, then stands still: nobody serves the connection, so no ping is answered.
            for _ in 0..20 {
                rest.send_data("x".into(), false).unwrap();
                let _ = timeout(SILENCE / 3, server.accept()).await;
            }
            pending::<()>().await;
        });
        let mut answer = call(&channel).await.unwrap();
        for _ in 0..20 {
            frame(&mut answer).await.unwrap().unwrap();
        }
        let begun = tokio::time::Instant::now();
        let lost = timeout(9 * PING_EVERY, frame(&mut answer)).await.expect("it is given up").unwrap().err().unwrap();
        assert_eq!(kind(&lost), Some(io::ErrorKind::TimedOut), "{lost}");
        assert!(begun.elapsed() < 3 * PING_EVERY + SILENCE, "{:?}", begun.elapsed());
    }

    #[tokio::test]
    async fn head_and_message_leave_in_one_write_and_a_call_that_is_dropped_is_cancelled() {
        let (listener, channel) = channel().await;
        let calling = tokio::spawn(async move {
            let body = tonic::body::Body::new(axum::body::Body::from(vec![7; 9000]));
            let request = Request::builder().uri("/x").body(body).unwrap();
            drop(timeout(Duration::from_millis(200), Arc::clone(&channel.0).call(request)).await);
            sleep(Duration::from_secs(9)).await;
        });
        let (mut stream, _) = listener.accept().await.unwrap();
        // An empty SETTINGS frame, as a server begins.
        stream.write_all(&[0, 0, 0, 4, 0, 0, 0, 0, 0]).await.unwrap();
        let mut bytes = vec![0; 1 << 20];
        let (mut got, mut largest) = (0, 0);
        while let Ok(Ok(read)) = timeout(Duration::from_millis(100), stream.read(&mut bytes)).await {
            (got, largest) = (got + read, largest.max(read));
        }
        assert!(largest > 9000, "{largest} of {got} bytes at once");
        let read = timeout(Duration::from_secs(2), stream.read(&mut bytes)).await.unwrap().unwrap();
        // A RST_STREAM frame of stream 1 with the code CANCEL.
        assert!(
            bytes[..read].windows(13).any(|part| part == [0, 0, 4, 3, 0, 0, 0, 0, 1, 0, 0, 0, 8]),
            "{:?}",
            &bytes[..read]
        );
        calling.abort();
    }
}
