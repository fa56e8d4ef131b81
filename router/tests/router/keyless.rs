//! Calls of the gRPC API that need no key must not keep others out (I5).

use std::time::Duration;

use crate::support::{Cluster, config};
use baton_proto::v1::ListModelsRequest;
use baton_proto::v1::inference_client::InferenceClient;
use baton_router::RouterConfig;
use tokio::time::timeout;
use tonic::transport::{Channel, Error};
use tonic::{Code, Status, Streaming};
use tonic_health::pb::health_client::HealthClient;
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};

const LONG: Duration = Duration::from_secs(20);

async fn connect(cluster: &Cluster) -> Result<Channel, Error> {
    Channel::from_shared(cluster.grpc_url()).unwrap().connect().await
}

async fn watch(channel: &Channel) -> Result<Streaming<HealthCheckResponse>, Status> {
    let watch = HealthClient::new(channel.clone()).watch(HealthCheckRequest::default()).await;
    watch.map(tonic::Response::into_inner)
}

/// Whether a call with a key, had there to be one, is answered on this connection.
async fn lists_models(channel: &Channel) -> bool {
    InferenceClient::new(channel.clone()).list_models(ListModelsRequest {}).await.is_ok()
}

#[tokio::test]
async fn watches_of_health_keep_nobody_out() {
    let cluster = Cluster::with(RouterConfig { max_connections: 2, ..config() }, 0, 1, &["fine"]).await;
    let mut watches = Vec::new();
    for _ in 0..2 {
        let channel = connect(&cluster).await.unwrap();
        let mut watch = watch(&channel).await.unwrap();
        assert!(watch.message().await.unwrap().is_some());
        watches.push((channel, watch));
    }
    let asks = async { lists_models(&connect(&cluster).await.unwrap()).await };
    assert_eq!(timeout(LONG, asks).await, Ok(true));
    // One of them made room.
    let (_, watch) = &mut watches[0];
    assert!(timeout(LONG, watch.message()).await.unwrap().is_err());
    drop(watches);
    cluster.stop().await;
}

#[tokio::test]
async fn a_connection_has_few_calls_that_need_no_key() {
    let cluster = Cluster::start(0, 1, "fine").await;
    let channel = connect(&cluster).await.unwrap();
    let mut watches = Vec::new();
    let refused = loop {
        match watch(&channel).await {
            Ok(watch) => watches.push(watch),
            Err(refused) => break refused,
        }
        assert!(watches.len() < 100);
    };
    assert_eq!((refused.code(), watches.len()), (Code::ResourceExhausted, 16));
    assert!(lists_models(&channel).await, "others go on");
    watches.pop();
    let again = async { while watch(&channel).await.is_err() {} };
    timeout(LONG, again).await.unwrap();
    drop(watches);
    cluster.stop().await;
}

#[tokio::test]
async fn a_watch_does_not_outlive_the_age_of_its_connection_for_ever() {
    let short = Duration::from_millis(100);
    let settings =
        RouterConfig { connection_age: Some(short), request_timeout: short, send_timeout: short, ..config() };
    let cluster = Cluster::with(settings, 0, 1, &["fine"]).await;
    let channel = connect(&cluster).await.unwrap();
    let mut watch = watch(&channel).await.unwrap();
    assert!(watch.message().await.unwrap().is_some());
    assert!(timeout(LONG, watch.message()).await.unwrap().is_err());
    cluster.stop().await;
}
