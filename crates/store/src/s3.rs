//! S3, over the HTTP client and the TLS that the other parts of a process use.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::BodyExt;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector as Sockets;
use hyper_util::rt::TokioExecutor;
use object_store::aws::{AmazonS3, AmazonS3Builder, AmazonS3ConfigKey};
use object_store::client::{
    ClientConfigKey, HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpRequestBody, HttpResponse,
    HttpResponseBody, HttpService,
};
use object_store::{BackoffConfig, ClientOptions, RetryConfig};
use rustls::crypto::ring;

/// Longest time to connect.
const CONNECT: Duration = Duration::from_secs(2);
/// A connection that nobody uses is closed after so long.
const IDLE: Duration = Duration::from_secs(30);
/// How often a call is made again within its time limit.
const RETRIES: usize = 2;

/// Opens a bucket, with the settings of AWS's variables.
pub(crate) fn open(bucket: &str, patience: Duration) -> object_store::Result<AmazonS3> {
    let retry = RetryConfig { backoff: BackoffConfig::default(), max_retries: RETRIES, retry_timeout: patience };
    let mut builder = AmazonS3Builder::from_env().with_bucket_name(bucket).with_retry(retry);
    let endpoints = [AmazonS3ConfigKey::S3Endpoint, AmazonS3ConfigKey::Endpoint];
    let endpoint = endpoints.iter().find_map(|key| builder.get_config_value(key));
    // As AWS's tools do: who gives such an address wants no TLS.
    if endpoint.is_some_and(|endpoint| endpoint.starts_with("http://")) {
        builder = builder.with_allow_http(true);
    }
    builder.with_http_connector(Connector).build()
}

/// Makes HTTP clients.
#[derive(Debug)]
struct Connector;

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let mut sockets = Sockets::new();
        sockets.enforce_http(false);
        sockets.set_nodelay(true);
        sockets.set_connect_timeout(Some(CONNECT));
        let tls = HttpsConnectorBuilder::new().with_provider_and_native_roots(ring::default_provider());
        let tls = tls.map_err(|error| object_store::Error::Generic { store: "S3", source: Box::new(error) })?;
        let allowed = options.get_config_value(&ClientConfigKey::AllowHttp);
        let schemes = if allowed.as_deref() == Some("true") { tls.https_or_http() } else { tls.https_only() };
        let client = Client::builder(TokioExecutor::new())
            .pool_idle_timeout(IDLE)
            .build(schemes.enable_http1().wrap_connector(sockets));
        Ok(HttpClient::new(Http(Arc::new(client))))
    }
}

/// A client.
#[derive(Debug)]
struct Http(Arc<Client<HttpsConnector<Sockets>, HttpRequestBody>>);

impl HttpService for Http {
    fn call<'s, 'a>(
        &'s self,
        request: HttpRequest,
    ) -> Pin<Box<dyn Future<Output = Result<HttpResponse, HttpError>> + Send + 'a>>
    where
        's: 'a,
        Self: 'a,
    {
        Box::pin(async move {
            let kind = |error: &hyper_util::client::legacy::Error| match error.is_connect() {
                true => HttpErrorKind::Connect,
                false => HttpErrorKind::Interrupted,
            };
            let answer = self.0.request(request).await.map_err(|error| HttpError::new(kind(&error), error))?;
            let (parts, body) = answer.into_parts();
            let body = body.map_err(|error| HttpError::new(HttpErrorKind::Interrupted, error));
            Ok(HttpResponse::from_parts(parts, HttpResponseBody::new(body)))
        })
    }
}
