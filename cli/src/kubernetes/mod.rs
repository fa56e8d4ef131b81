//! A release of the Helm chart, by way of the Kubernetes API: its workloads, its pods, and what the workers in them say.

mod certs;
mod forward;
mod leaving;
mod scale;
mod status;

use std::fmt::Debug;
use std::time::Duration;

use anyhow::{Context, bail};
use baton_cluster::Role;
use baton_proto::v1;
use baton_runtime::Tls;
use clap::{Arg, ArgMatches};
use k8s_openapi::api::apps::v1::{Deployment, StatefulSet};
use k8s_openapi::api::autoscaling::v2::HorizontalPodAutoscaler;
use k8s_openapi::api::core::v1::{Pod, Secret};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::ListParams;
use kube::{Api, Client, Config, Resource};
use serde::de::DeserializeOwned;

pub use certs::{Change, Holder, Wanted, certs};
pub use scale::{drain, scale};
pub use status::status;

/// Longest wait for an answer of the Kubernetes API.
const PATIENCE: Duration = Duration::from_secs(15);
/// Annotation of the workloads: the Secret with the certificate for `baton status`, `scale` and `drain`.
const OPERATOR_SECRET: &str = "baton/operator-secret";
/// The port of workers for routers and operators, by the name that the chart gives it.
const WORKER_PORT: &str = "grpc";

/// The arguments that name a release.
pub fn args() -> [Arg; 2] {
    [
        Arg::new("release")
            .long("release")
            .value_name("NAME")
            .conflicts_with("registry")
            .help("A release of the Helm chart, through the Kubernetes API: as kubectl reaches it, or as the pod this runs in may"),
        Arg::new("namespace")
            .long("namespace")
            .short('n')
            .value_name("NAME")
            .requires("release")
            .help("The release's namespace [default: that of the kubeconfig's context, or of this pod]"),
    ]
}

/// A release, and how to ask for it.
pub struct Release {
    client: Client,
    namespace: String,
    name: String,
    /// For connections to workers; None where they have no TLS.
    tls: Option<Tls>,
}

/// The roles whose pods it has.
pub const ROLES: [Role; 3] = [Role::Prefill, Role::Decode, Role::KvStore];

/// What makes the pods of one role.
pub struct Workload {
    pub role: Role,
    metadata: ObjectMeta,
    replicas: Option<i32>,
}

impl Release {
    /// The release that the arguments name; None if they name none.
    ///
    /// # Errors
    /// No cluster is set up for this user.
    pub fn named(matches: &ArgMatches, tls: Option<Tls>) -> Option<impl Future<Output = anyhow::Result<Release>>> {
        let name = matches.get_one::<String>("release")?.clone();
        let namespace = matches.get_one::<String>("namespace").cloned();
        Some(async move {
            let (client, default) = client().await?;
            let namespace = namespace.unwrap_or(default);
            let mut release = Release { client, namespace, name, tls };
            if release.tls.is_none() {
                release.tls = release.own_certificate().await?;
            }
            Ok(release)
        })
    }

    /// The operator's certificate that the release has in a Secret; None where its processes have no TLS.
    async fn own_certificate(&self) -> anyhow::Result<Option<Tls>> {
        let workload = self.workload(Role::Decode).await?;
        let Some(secret) = workload.metadata.annotations.as_ref().and_then(|all| all.get(OPERATOR_SECRET)) else {
            return Ok(None);
        };
        let hint =
            "the workers have TLS; be allowed to read the operator's certificate, or name a folder with one by --certs";
        let read = answered(self.api::<Secret>().get(secret)).await;
        let held = read.with_context(|| format!("reading Secret {secret}: {hint}"))?;
        certs::operator(&held).with_context(|| format!("Secret {secret}")).map(Some)
    }

    fn api<K>(&self) -> Api<K>
    where
        K: Resource<Scope = k8s_openapi::NamespaceResourceScope>,
        K::DynamicType: Default,
    {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    fn labels(&self, role: &str) -> ListParams {
        let instance = &self.name;
        ListParams::default()
            .labels(&format!("app.kubernetes.io/instance={instance},app.kubernetes.io/component={role}"))
    }

    async fn list<K>(&self, what: &str, of: &ListParams) -> anyhow::Result<Vec<K>>
    where
        K: Resource<Scope = k8s_openapi::NamespaceResourceScope> + Clone + Debug + DeserializeOwned,
        K::DynamicType: Default,
    {
        let listed = answered(self.api::<K>().list(of)).await.with_context(|| format!("listing {what}"))?;
        Ok(listed.items)
    }

    /// The workload of a role.
    pub async fn workload(&self, role: Role) -> anyhow::Result<Workload> {
        let labels = self.labels(role.as_str());
        let mut found: Vec<Workload> = if has_identities(role) {
            let sets = self.list::<StatefulSet>("StatefulSets", &labels).await?.into_iter();
            sets.map(|set| Workload::new(role, set.metadata, set.spec.and_then(|spec| spec.replicas))).collect()
        } else {
            let deployments = self.list::<Deployment>("Deployments", &labels).await?.into_iter();
            deployments.map(|its| Workload::new(role, its.metadata, its.spec.and_then(|spec| spec.replicas))).collect()
        };
        match (found.pop(), found.len()) {
            (Some(workload), 0) => Ok(workload),
            (None, _) if role == Role::KvStore => bail!(
                "release {:?} in namespace {:?} has no KV stores; set kvStore.enabled in its values first",
                self.name,
                self.namespace
            ),
            (None, _) => bail!(
                "there is no {} workload of release {:?} in namespace {:?}; `helm list -A` shows the releases",
                role.as_str(),
                self.name,
                self.namespace
            ),
            _ => bail!("release {:?} has several {} workloads; was it installed twice?", self.name, role.as_str()),
        }
    }

    /// The pods of a role that have not ended.
    pub async fn pods(&self, role: Role) -> anyhow::Result<Vec<Pod>> {
        let pods = self.list::<Pod>("Pods", &self.labels(role.as_str())).await?;
        let over = |pod: &Pod| matches!(phase(pod), "Succeeded" | "Failed");
        Ok(pods.into_iter().filter(|pod| !over(pod)).collect())
    }

    /// The autoscaler that sets a workload's replicas, if there is one.
    pub async fn autoscaler(&self, workload: &Workload) -> anyhow::Result<Option<String>> {
        let all = self.list::<HorizontalPodAutoscaler>("HorizontalPodAutoscalers", &ListParams::default()).await?;
        let its = all.into_iter().find(|hpa| {
            let target = hpa.spec.as_ref().map(|spec| &spec.scale_target_ref);
            target.is_some_and(|target| target.kind == workload.kind() && target.name == workload.name())
        });
        Ok(its.map(|hpa| {
            let (least, most) =
                hpa.spec.as_ref().map_or((1, 1), |spec| (spec.min_replicas.unwrap_or(1), spec.max_replicas));
            // KEDA works by an autoscaler that it makes.
            let owner = hpa.metadata.labels.as_ref().and_then(|labels| labels.get("scaledobject.keda.sh/name"));
            let what = owner.map_or_else(
                || format!("HorizontalPodAutoscaler {}", hpa.metadata.name.as_deref().unwrap_or_default()),
                |object| format!("KEDA's ScaledObject {object}"),
            );
            format!("{what} ({least} to {most} pods)")
        }))
    }

    /// What the worker in a pod says, by a connection through the Kubernetes API.
    pub async fn ask(&self, pod: &Pod) -> anyhow::Result<v1::StatusResponse> {
        if let Some(reason) = trouble(pod) {
            bail!("{reason}");
        }
        let named = pod.metadata.labels.as_ref().and_then(|labels| labels.get("app.kubernetes.io/component"));
        let role = ROLES.into_iter().find(|role| named.is_some_and(|named| named == role.as_str()));
        let role = role.with_context(|| format!("pod {} is of no role that this version knows", name(pod)))?;
        let tunnel = forward::open(self.api::<Pod>(), name(pod), port(pod)?).await?;
        crate::status::ask_at(&tunnel.url(self.tls.is_some()), role, self.tls.as_ref()).await
    }
}

/// Whether pods of the role are numbered, in a StatefulSet: a KV store's disk outlives its pod. Others are in Deployments.
pub fn has_identities(role: Role) -> bool {
    role == Role::KvStore
}

impl Workload {
    fn new(role: Role, metadata: ObjectMeta, replicas: Option<i32>) -> Workload {
        Workload { role, metadata, replicas }
    }

    pub fn kind(&self) -> &'static str {
        if has_identities(self.role) { "StatefulSet" } else { "Deployment" }
    }

    pub fn name(&self) -> &str {
        self.metadata.name.as_deref().unwrap_or_default()
    }

    /// How many pods there should be.
    pub fn replicas(&self) -> u32 {
        u32::try_from(self.replicas.unwrap_or(1)).unwrap_or(0)
    }
}

/// A client of the cluster that this user, or this pod, works with, and the namespace to work in.
async fn client() -> anyhow::Result<(Client, String)> {
    let mut config = Config::infer()
        .await
        .context("finding a Kubernetes cluster: neither a kubeconfig nor a pod's service account")?;
    config.connect_timeout = Some(PATIENCE);
    config.read_timeout = Some(PATIENCE);
    let namespace = config.default_namespace.clone();
    Ok((Client::try_from(config).context("setting up the Kubernetes client")?, namespace))
}

/// Bounds the wait for an answer.
async fn answered<T>(answer: impl Future<Output = kube::Result<T>>) -> anyhow::Result<T> {
    let answer = tokio::time::timeout(PATIENCE, answer).await.context("the Kubernetes API does not answer")?;
    answer.map_err(|error| match error {
        kube::Error::Api(status) => anyhow::anyhow!("{}", status.message),
        other => anyhow::Error::new(other),
    })
}

pub fn name(pod: &Pod) -> &str {
    pod.metadata.name.as_deref().unwrap_or_default()
}

fn phase(pod: &Pod) -> &str {
    pod.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or("Unknown")
}

/// Whether a pod was told to end.
pub fn is_leaving(pod: &Pod) -> bool {
    pod.metadata.deletion_timestamp.is_some()
}

pub fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    !is_leaving(pod) && conditions.into_iter().any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

/// Why the worker in a pod cannot be asked; None when it can.
fn trouble(pod: &Pod) -> Option<String> {
    let containers = pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
    let states = containers.filter_map(|container| container.state.as_ref());
    let waiting = states.filter_map(|state| state.waiting.as_ref()).find_map(|waiting| waiting.reason.clone());
    match (phase(pod), waiting) {
        (_, Some(reason)) => Some(reason),
        ("Running", None) => None,
        (phase, None) => Some(phase.to_owned()),
    }
}

fn port(pod: &Pod) -> anyhow::Result<u16> {
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    let mut ports = containers.flat_map(|container| container.ports.iter().flatten());
    let named = ports.find(|port| port.name.as_deref() == Some(WORKER_PORT));
    let number = named.and_then(|port| u16::try_from(port.container_port).ok());
    number.with_context(|| format!("pod {} has no port named {WORKER_PORT}; is it of this chart?", name(pod)))
}
