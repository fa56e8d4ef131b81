//! Serves the router's listeners until the last request has ended.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::Request;
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::Response;
use baton_cluster::EmbeddedRegistry;
use baton_runtime::places::holding;
use baton_runtime::{Shutdown, TlsServer};
use futures::Stream;
use tokio::net::TcpListener;
use tonic::service::Routes;
use tonic::transport::Server;

use crate::admission;
use crate::front::Front;
use crate::held::{self, Caller, Held};
use crate::keyless::{self, Reflections, is_keyless};
use crate::listener::{self, Bounds};

/// Maximum size of a gRPC call's headers, bytes.
const HEADERS: u32 = 16 << 10;
/// Maximum calls in progress on one gRPC connection; more wait at the client.
const STREAMS: u32 = 4096;
/// Longest time until a gRPC call's answer begins.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);
/// How long streams that do not end by themselves (health watches, idle connections) may outlive the last request.
const STREAM_GRACE: Duration = Duration::from_millis(250);

/// What serves the router's listeners.
#[derive(Clone)]
pub(crate) struct Serving {
    pub bounds: Bounds,
    pub front: Arc<Front>,
    pub shutdown: Shutdown,
    pub tls: ListenerTls,
}

/// What the listeners speak, where that is TLS.
#[derive(Clone, Default)]
pub(crate) struct ListenerTls {
    pub http: Option<TlsServer>,
    pub grpc: Option<TlsServer>,
    pub internal: Option<TlsServer>,
}

impl Serving {
    /// The OpenAI-compatible API.
    pub async fn http(self, listener: TcpListener, app: axum::Router) {
        let last = async {
            self.last_request().await;
            tokio::time::sleep(STREAM_GRACE).await;
        };
        listener::serve(listener, app, self.bounds, self.tls.http.clone(), self.shutdown.clone(), last).await;
    }

    /// The gRPC API. Connections older than `age` are asked to end. Those that have not ended when their last call must have, and been read,
    /// are cut: a watch of health never ends.
    pub async fn grpc(self, listener: TcpListener, routes: Routes, age: Option<Duration>) {
        let server = match age {
            Some(age) => Server::builder().max_connection_age(age),
            None => Server::builder(),
        };
        let grace = self.front.limits.request_timeout.saturating_add(self.bounds.send);
        let longest = age.map(|age| age.saturating_add(grace));
        let incoming = held::incoming(listener, self.bounds, self.tls.grpc.clone(), longest);
        let bound = from_fn_with_state(Reflections::default(), keyless::bound);
        let admitted = from_fn_with_state(Arc::clone(&self.front), admission::admit);
        let routes = Routes::from(routes.into_axum_router().layer(admitted).layer(bound));
        self.until_last(server, incoming, routes, || {}).await;
    }

    /// The registry. Workers renew their leases here until the last request has ended.
    pub async fn internal(self, listener: TcpListener, registry: EmbeddedRegistry) {
        let mut routes = Routes::builder();
        routes.add_service(registry.service());
        let incoming = held::incoming(listener, self.bounds, self.tls.internal.clone(), None);
        self.until_last(Server::builder(), incoming, routes.routes(), || registry.close()).await;
    }

    /// Serves until the last request has ended; calls that begin before that are answered, if only by an error. Then `close` may end what
    /// would not end by itself.
    async fn until_last(
        &self,
        server: Server,
        incoming: impl Stream<Item = io::Result<Held>>,
        routes: Routes,
        close: impl FnOnce(),
    ) {
        let mut server = server
            .http2_keepalive_interval(Some(Duration::from_secs(10)))
            .http2_max_header_list_size(HEADERS)
            .max_concurrent_streams(STREAMS)
            // Until the answer begins, its request's message included.
            .timeout(REQUEST_TIMEOUT);
        let routes = Routes::from(routes.into_axum_router().layer(from_fn(occupy)));
        let server = server.add_routes(routes).serve_with_incoming_shutdown(incoming, self.last_request());
        let last = async {
            self.last_request().await;
            close();
            tokio::time::sleep(STREAM_GRACE).await;
        };
        tokio::select! {
            ended = server => if let Err(error) = ended {
                tracing::error!(%error, "a gRPC server ended");
                self.shutdown.start("a gRPC server ended");
            },
            () = last => {}
        }
    }

    /// Completes when the router is draining and no request is in progress.
    async fn last_request(&self) {
        self.shutdown.draining().await;
        self.front.idle().await;
    }
}

/// Keeps the place of a call's connection until its answer has ended, unless anybody could make that call.
async fn occupy(mut request: Request, next: Next) -> Response {
    let Some(Caller { peer, seat, .. }) = request.extensions().get::<Caller>().cloned() else {
        return next.run(request).await;
    };
    request.extensions_mut().insert(peer);
    if is_keyless(request.uri().path()) {
        return next.run(request).await;
    }
    let occupied = seat.occupy();
    next.run(request).await.map(|body| holding(body, occupied))
}
