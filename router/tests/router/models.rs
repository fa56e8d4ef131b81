//! Several models behind one router, and several names for a model.

use baton_cluster::Role;
use baton_proto::v1;
use baton_proto::v1::inference_client::InferenceClient;
use baton_router::testing::model;
use baton_router::{RouterError, ServedModel};
use serde_json::{Value, json};

use crate::support::{Cluster, NAME, TEXT, config, text};

const OTHER: &str = "other-model";

fn models(files: &tempfile::TempDir) -> Vec<ServedModel> {
    let first = ServedModel::new(model::write_and_open(files.path(), model::TEMPLATE), "small");
    let second = ServedModel::new(model::write_and_open_as(files.path(), OTHER, model::TEMPLATE), "big");
    vec![first.with_aliases(["chat".to_owned()]), second]
}

#[tokio::test]
async fn each_model_is_answered_by_its_own_workers() {
    let files = tempfile::tempdir().unwrap();
    let models = models(&files);
    let mut cluster = Cluster::of_models(files, models, config(), &["yes"]).await;
    cluster.add(Role::Decode, |_| {}).await;
    cluster.readiness.wait().await;
    let ask = |name: &'static str| json!({"model": name, "prompt": "hi"});
    let (status, refused) = cluster.ask(TEXT, &ask("big")).await;
    assert_eq!(status, 503, "no worker has it yet: {refused}");
    cluster.add(Role::Decode, |member| member.model = OTHER.into()).await;
    cluster.seen(2).await;
    for (name, worker, served) in
        [("small", 0, "small"), ("chat", 0, "small"), (NAME, 0, "small"), ("", 0, "small"), ("big", 1, "big")]
    {
        let before = [0, 1].map(|at| cluster.worker(at).asked().len());
        let (status, answer) = cluster.ask(TEXT, &ask(name)).await;
        assert_eq!((status, text(&answer), &answer["model"]), (200, "yes", &json!(served)), "{name}");
        let after = [0, 1].map(|at| cluster.worker(at).asked().len());
        assert_eq!((after[worker], after[1 - worker]), (before[worker] + 1, before[1 - worker]), "{name}");
    }
    let (status, unknown) = cluster.ask(TEXT, &ask("huge")).await;
    assert_eq!((status, unknown["error"]["code"].as_str()), (404, Some("model_not_found")));
    let list: Value = cluster.http.get(cluster.url("/v1/models")).send().await.unwrap().json().await.unwrap();
    let ids: Vec<_> = list["data"].as_array().unwrap().iter().map(|model| model["id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["small", "chat", "big"]);
    let one: Value = cluster.http.get(cluster.url("/v1/models/chat")).send().await.unwrap().json().await.unwrap();
    assert_eq!(one["id"], "chat");
    cluster.add(Role::Decode, |member| member.model = "nobody's".into()).await;
    // People see it, though nobody asks for its model.
    cluster.seen(3).await;
    let mut client = InferenceClient::connect(cluster.grpc_url()).await.unwrap();
    let listed = client.list_models(v1::ListModelsRequest {}).await.unwrap().into_inner().models;
    let listed: Vec<_> = listed.iter().map(|model| (model.id.as_str(), &model.aliases[..])).collect();
    assert_eq!(listed, [("small", &["chat".to_owned()][..]), ("big", &[])]);
    assert_eq!(cluster.router.cluster()["models"][1], json!({"model": OTHER, "served_name": "big"}));
    cluster.stop().await;
}

#[tokio::test]
async fn a_name_means_one_model() {
    let files = tempfile::tempdir().unwrap();
    let [first, second] = models(&files).try_into().unwrap();
    let twice = vec![first, second.with_aliases(["chat".to_owned()])];
    let error = Cluster::try_start_with(config(), twice).await.unwrap_err();
    assert!(matches!(&error, RouterError::SameName { name } if name == "chat"), "{error}");
    assert!(error.to_string().contains("served_name"), "{error}");
    assert!(matches!(Cluster::try_start_with(config(), Vec::new()).await, Err(RouterError::NoModel)));
}
