//! Serves the router's listeners until the last request has ended.

use std::sync::Arc;
use std::time::Duration;

use baton_runtime::Shutdown;
use tokio::net::TcpListener;
use tonic::service::Routes;

use crate::front::Front;
use crate::held;
use crate::listener::{self, Bounds};
use crate::server::RegistryChoice;

/// Maximum size of a gRPC call's headers, bytes.
const HEADERS: u32 = 16 << 10;
/// Maximum calls in progress on one gRPC connection; more wait at the client.
const STREAMS: u32 = 4096;
/// Longest time until a gRPC call's answer begins.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);
/// How long streams that do not end by themselves (health watches, idle connections) may outlive the last request.
const STREAM_GRACE: Duration = Duration::from_millis(250);

pub(crate) async fn serve_http(
    listener: TcpListener,
    app: axum::Router,
    bounds: Bounds,
    front: Arc<Front>,
    shutdown: Shutdown,
) {
    let last = async {
        last_request(&front, &shutdown).await;
        tokio::time::sleep(STREAM_GRACE).await;
    };
    listener::serve(listener, app, bounds, shutdown.clone(), last).await;
}

pub(crate) async fn serve_grpc(
    listener: TcpListener,
    routes: Routes,
    bounds: Bounds,
    age: Option<Duration>,
    front: Arc<Front>,
    registry: RegistryChoice,
    shutdown: Shutdown,
) {
    // Serves until the last request has ended. Until then workers renew their leases here, and new requests are told that
    // the router is stopping.
    let server = tonic::transport::Server::builder();
    let server = match age {
        Some(age) => server.max_connection_age(age),
        None => server,
    };
    let server = server
        .http2_keepalive_interval(Some(Duration::from_secs(10)))
        .http2_max_header_list_size(HEADERS)
        .max_concurrent_streams(STREAMS)
        // Until the answer begins, its request's message included.
        .timeout(REQUEST_TIMEOUT)
        .add_routes(routes)
        .serve_with_incoming_shutdown(held::incoming(listener, bounds), last_request(&front, &shutdown));
    let last = async {
        last_request(&front, &shutdown).await;
        if let RegistryChoice::Embedded(registry) = &registry {
            registry.close();
        }
        tokio::time::sleep(STREAM_GRACE).await;
    };
    tokio::select! {
        ended = server => if let Err(error) = ended {
            tracing::error!(%error, "the gRPC server ended");
            shutdown.start("the gRPC server ended");
        },
        () = last => {}
    }
}

/// Completes when the router is draining and no request is in progress.
async fn last_request(front: &Front, shutdown: &Shutdown) {
    shutdown.draining().await;
    front.idle().await;
}
