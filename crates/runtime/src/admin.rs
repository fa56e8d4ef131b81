//! The HTTP endpoint that every process has besides its own service: health, readiness, metrics.
//!
//! It stays up during a drain, so that orchestrators see "not ready: draining" instead of a refused connection.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::Router;
use axum::extract::connect_info::{ConnectInfo, Connected};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::serve::{IncomingStream, Listener};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Duration, MissedTickBehavior, interval};

use crate::error::RuntimeError;
use crate::metrics::MetricsHandle;
use crate::places::{Place, Places, Seat, holding};
use crate::shutdown::Shutdown;

const UPKEEP: Duration = Duration::from_secs(5);
/// Most connections. One more takes the place of one that asks nothing (I5), and has asked nothing for this long: whoever opens thousands of them must
/// not keep a probe waiting until the process is taken for dead.
const CONNECTIONS: usize = 128;
const GRACE: Duration = Duration::from_millis(100);
/// Pause after accepting failed, for example because there were no file descriptors left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Whether this process can take work, and if not, why. Clones share it.
#[derive(Clone, Debug)]
pub struct Readiness(watch::Sender<Option<String>>);

impl Readiness {
    /// Not ready, for this reason.
    pub fn new(reason: impl Into<String>) -> Readiness {
        Readiness(watch::Sender::new(Some(reason.into())))
    }

    /// Ready from now on.
    pub fn ready(&self) {
        self.0.send_replace(None);
    }

    /// Not ready from now on.
    pub fn not_ready(&self, reason: impl Into<String>) {
        self.0.send_replace(Some(reason.into()));
    }

    /// Why it is not ready; `None` when it is.
    pub fn reason(&self) -> Option<String> {
        self.0.borrow().clone()
    }

    /// Completes when ready.
    pub async fn wait(&self) {
        // `self` holds a sender, so the channel cannot close.
        let _ = self.0.subscribe().wait_for(Option::is_none).await;
    }
}

/// Listens on `addr`. The error tells the user to change `flag` (with its dashes).
pub async fn listen(addr: SocketAddr, flag: &str) -> Result<TcpListener, RuntimeError> {
    TcpListener::bind(addr).await.map_err(|source| RuntimeError::Listen { addr, flag: flag.to_owned(), source })
}

/// A running admin endpoint. It ends when this is dropped.
#[derive(Debug)]
pub struct AdminServer {
    addr: SocketAddr,
    tasks: [JoinHandle<()>; 2],
}

/// What an admin endpoint serves besides health, readiness and metrics.
#[derive(Clone, Debug, Default)]
pub struct AdminRoutes {
    /// For everybody who reaches it, as the metrics are.
    pub open: Router,
    /// Needs the admin token; if none is configured, served on loopback only.
    pub guarded: Router,
}

#[derive(Clone)]
struct AdminState {
    readiness: Readiness,
    metrics: MetricsHandle,
    shutdown: Shutdown,
}

impl AdminServer {
    /// Serves `/health`, `/ready`, `/metrics` and `routes`, which must not have those three, on `addr`. The guarded ones need the token in
    /// `token_file`. Port 0 takes a free one.
    pub async fn start(
        addr: SocketAddr,
        token_file: Option<PathBuf>,
        readiness: Readiness,
        metrics: MetricsHandle,
        shutdown: Shutdown,
        routes: AdminRoutes,
    ) -> Result<AdminServer, RuntimeError> {
        let listener = listen(addr, "--admin").await?;
        let addr = listener.local_addr().unwrap_or(addr);
        let upkeep = tokio::spawn(upkeep(metrics.clone()));
        let router = Router::new()
            .route("/health", get(|| async { "alive\n" }))
            .route("/ready", get(ready))
            .route("/metrics", get(render))
            .with_state(AdminState { readiness, metrics, shutdown })
            .merge(routes.open)
            .merge(routes.guarded.layer(middleware::from_fn_with_state(Arc::new(Guard::new(addr, token_file)), guard)));
        let router = router.layer(middleware::from_fn(occupy)).into_make_service_with_connect_info::<Caller>();
        let door = Door { listener, places: Places::with_grace(CONNECTIONS, GRACE) };
        let server = tokio::spawn(async move {
            if let Err(error) = axum::serve(door, router).await {
                tracing::error!(%error, "the admin endpoint ended");
            }
        });
        Ok(AdminServer { addr, tasks: [server, upkeep] })
    }

    /// The address it listens on.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }
}

impl Drop for AdminServer {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

/// The listener, which has so many places.
struct Door {
    listener: TcpListener,
    places: Arc<Places>,
}

/// A connection in its place.
struct Visitor {
    stream: TcpStream,
    place: Place,
}

/// The place of a request's connection.
#[derive(Clone)]
struct Caller(Seat);

impl Listener for Door {
    type Io = Visitor;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Visitor, SocketAddr) {
        loop {
            match self.listener.accept().await {
                Ok((stream, address)) => return (Visitor { stream, place: self.places.take().await }, address),
                Err(_) => tokio::time::sleep(ACCEPT_PAUSE).await,
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

impl Connected<IncomingStream<'_, Door>> for Caller {
    fn connect_info(stream: IncomingStream<'_, Door>) -> Caller {
        Caller(stream.io().place.seat())
    }
}

/// Keeps the place of a request's connection until its answer has ended.
async fn occupy(request: Request, next: Next) -> Response {
    let caller = request.extensions().get::<ConnectInfo<Caller>>();
    let occupied = caller.map(|ConnectInfo(Caller(seat))| seat.occupy());
    next.run(request).await.map(|body| holding(body, occupied))
}

impl AsyncRead for Visitor {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.place.seat().check(cx)?;
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Visitor {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// Who sees more than health and metrics.
#[derive(Debug)]
enum Guard {
    Token(PathBuf),
    Everybody,
    Nobody,
}

impl Guard {
    fn new(addr: SocketAddr, token_file: Option<PathBuf>) -> Guard {
        match token_file {
            Some(path) => Guard::Token(path),
            None if addr.ip().is_loopback() => Guard::Everybody,
            None => Guard::Nobody,
        }
    }
}

async fn guard(State(guard): State<Arc<Guard>>, request: Request, next: Next) -> Response {
    let refused = |status, why: String| (status, why).into_response();
    let path = match &*guard {
        Guard::Everybody if is_here(request.headers()) => return next.run(request).await,
        Guard::Everybody => {
            let why =
                "this page is for this machine: ask by an address or as localhost, or start with --admin-token-file\n";
            return refused(StatusCode::FORBIDDEN, why.to_owned());
        }
        Guard::Nobody => {
            let why = "this page needs a token, and none is set up: start with --admin-token-file\n";
            return refused(StatusCode::FORBIDDEN, why.to_owned());
        }
        Guard::Token(path) => path,
    };
    let token = match tokio::fs::read_to_string(path).await {
        Ok(token) if !token.trim().is_empty() => token.trim().to_owned(),
        Ok(_) => return refused(StatusCode::INTERNAL_SERVER_ERROR, "the admin token's file is empty\n".to_owned()),
        Err(error) => {
            tracing::warn!(path = %path.display(), %error, "the admin token cannot be read");
            return refused(StatusCode::INTERNAL_SERVER_ERROR, "the admin token cannot be read\n".to_owned());
        }
    };
    let given = request.headers().get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    match same(&given.and_then(token_in).unwrap_or_default(), token.as_bytes()) {
        true => next.run(request).await,
        false => {
            let why = "send the admin token as Authorization: Bearer TOKEN, or as the password of any user\n";
            // A browser asks for it then.
            let ask = [(header::WWW_AUTHENTICATE, "Basic realm=\"baton admin\", charset=\"UTF-8\"")];
            (StatusCode::UNAUTHORIZED, ask, why).into_response()
        }
    }
}

/// The token in a value of the header `Authorization`: a bearer token, or a password. `None`: it has none.
fn token_in(value: &str) -> Option<Vec<u8>> {
    let (scheme, rest) = value.split_once(' ')?;
    if scheme.eq_ignore_ascii_case("bearer") {
        return Some(rest.trim().as_bytes().to_vec());
    }
    let user_and_password = scheme.eq_ignore_ascii_case("basic").then(|| base64(rest.trim()))??;
    let colon = user_and_password.iter().position(|byte| *byte == b':')?;
    Some(user_and_password[colon + 1..].to_vec())
}

/// Decodes base64 (RFC 4648, section 4). `None`: it is none.
fn base64(text: &str) -> Option<Vec<u8>> {
    let text = text.trim_end_matches('=');
    let (mut bytes, mut bits, mut held) = (Vec::with_capacity(text.len() * 3 / 4), 0u32, 0);
    for letter in text.bytes() {
        let value = match letter {
            b'A'..=b'Z' => letter - b'A',
            b'a'..=b'z' => letter - b'a' + 26,
            b'0'..=b'9' => letter - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        (bits, held) = ((bits << 6) | u32::from(value), held + 6);
        if held >= 8 {
            held -= 8;
            bytes.push((bits >> held) as u8);
            bits &= (1 << held) - 1;
        }
    }
    Some(bytes)
}

/// Whether a request was meant for this machine. A page of another site may have a name of its own resolved to this machine's address, and
/// so read what is served here; then the request names that site.
fn is_here(headers: &HeaderMap) -> bool {
    let Some(host) = headers.get(header::HOST) else { return true };
    let host = host.to_str().unwrap_or_default();
    let name = if host.ends_with(']') { host } else { host.rsplit_once(':').map_or(host, |(name, _)| name) };
    name.eq_ignore_ascii_case("localhost") || name.trim_matches(['[', ']']).parse::<IpAddr>().is_ok()
}

/// Compares in a time that does not tell how much is right.
fn same(given: &[u8], wanted: &[u8]) -> bool {
    let differ = given.iter().zip(wanted).fold(0, |differ, (a, b)| differ | (a ^ b));
    differ == 0 && given.len() == wanted.len()
}

async fn ready(State(state): State<AdminState>) -> Response {
    let draining = state.shutdown.is_draining().then(|| "draining".to_owned());
    match draining.or_else(|| state.readiness.reason()) {
        None => "ready\n".into_response(),
        Some(reason) => (StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n")).into_response(),
    }
}

async fn render(State(state): State<AdminState>) -> Response {
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], state.metrics.render()).into_response()
}

async fn upkeep(metrics: MetricsHandle) {
    let mut tick = interval(UPKEEP);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tick.tick().await;
        metrics.upkeep();
    }
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use tower::ServiceExt;

    use super::*;

    async fn status(guard_of: Guard, token: Option<&str>) -> StatusCode {
        let page = Router::new().route("/cluster", get(|| async { "all" }));
        let page = page.layer(middleware::from_fn_with_state(Arc::new(guard_of), guard));
        let mut request = Request::builder().uri("/cluster");
        if let Some(token) = token {
            request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
        }
        page.oneshot(request.body(Body::empty()).unwrap()).await.unwrap().status()
    }

    #[tokio::test]
    async fn pages_need_a_token_where_others_reach_them() {
        let [own, any] = ["127.0.0.1:1", "0.0.0.0:1"].map(|addr| addr.parse::<SocketAddr>().unwrap());
        assert_eq!(status(Guard::new(own, None), None).await, StatusCode::OK);
        assert_eq!(status(Guard::new(any, None), Some("x")).await, StatusCode::FORBIDDEN);
        let file = tempfile::NamedTempFile::new().unwrap();
        let with = |addr| Guard::new(addr, Some(file.path().to_owned()));
        assert_eq!(status(with(any), Some("")).await, StatusCode::INTERNAL_SERVER_ERROR, "an empty token is none");
        std::fs::write(file.path(), "secret\n").unwrap();
        for (token, want) in [
            (Some("secret"), StatusCode::OK),
            (Some("secre"), StatusCode::UNAUTHORIZED),
            (Some("secret2"), StatusCode::UNAUTHORIZED),
            (None, StatusCode::UNAUTHORIZED),
        ] {
            assert_eq!(status(with(any), token).await, want, "{token:?}");
            assert_eq!(status(with(own), token).await, want, "{token:?}: asked for here too");
        }
    }

    #[tokio::test]
    async fn a_browser_sends_the_token_as_a_password() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "s:cret\n").unwrap();
        let page = Router::new().route("/cluster", get(|| async { "all" }));
        let guarded = Arc::new(Guard::new("0.0.0.0:1".parse().unwrap(), Some(file.path().to_owned())));
        let page = page.layer(middleware::from_fn_with_state(guarded, guard));
        // me:s:cret, me:s:creT, no colon, no base64
        for (value, want) in [
            ("Basic bWU6czpjcmV0", StatusCode::OK),
            ("basic bWU6czpjcmV0", StatusCode::OK),
            ("Basic bWU6czpjcmVU", StatusCode::UNAUTHORIZED),
            ("Basic czpjcmV0", StatusCode::UNAUTHORIZED),
            ("Basic ::::", StatusCode::UNAUTHORIZED),
            ("Digest x", StatusCode::UNAUTHORIZED),
        ] {
            let request = Request::builder().uri("/cluster").header(header::AUTHORIZATION, value);
            let answer = page.clone().oneshot(request.body(Body::empty()).unwrap()).await.unwrap();
            assert_eq!(answer.status(), want, "{value}");
            assert_eq!(answer.headers().contains_key(header::WWW_AUTHENTICATE), want != StatusCode::OK);
        }
        let texts = [("", ""), ("Zg==", "f"), ("Zm8=", "fo"), ("Zm9v", "foo"), ("Zm9vYg", "foob")];
        texts.iter().for_each(|(coded, plain)| assert_eq!(base64(coded).unwrap(), plain.as_bytes()));
    }

    #[tokio::test]
    async fn without_a_token_a_page_is_not_for_sites_that_resolve_to_this_machine() {
        let page = Router::new().route("/cluster", get(|| async { "all" }));
        let guarded = Arc::new(Guard::new("127.0.0.1:1".parse().unwrap(), None));
        let page = page.layer(middleware::from_fn_with_state(guarded, guard));
        for (host, want) in [
            ("127.0.0.1:9000", StatusCode::OK),
            ("[::1]:9000", StatusCode::OK),
            ("[::1]", StatusCode::OK),
            ("localhost", StatusCode::OK),
            ("evil.example:9000", StatusCode::FORBIDDEN),
            ("127.0.0.1.evil.example", StatusCode::FORBIDDEN),
        ] {
            let request = Request::builder().uri("/cluster").header(header::HOST, host).body(Body::empty()).unwrap();
            assert_eq!(page.clone().oneshot(request).await.unwrap().status(), want, "{host}");
        }
    }

    #[tokio::test]
    async fn silent_connections_do_not_keep_probes_out() {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let page = Router::new().route("/health", get(|| async { "alive" })).layer(middleware::from_fn(occupy));
        let door = Door { listener, places: Places::new(2) };
        let serving = axum::serve(door, page.into_make_service_with_connect_info::<Caller>());
        let serving = tokio::spawn(async move { serving.await });
        let mut silent = Vec::new();
        for _ in 0..4 {
            silent.push(TcpStream::connect(address).await.unwrap());
        }
        let mut probe = TcpStream::connect(address).await.unwrap();
        probe.write_all(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await.unwrap();
        let mut answer = String::new();
        probe.read_to_string(&mut answer).await.unwrap();
        assert!(answer.ends_with("alive"), "{answer}");
        assert_eq!(silent[0].read(&mut [0]).await.unwrap(), 0, "the first made room");
        serving.abort();
    }
}
