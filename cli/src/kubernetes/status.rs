//! `baton status` on Kubernetes.

use baton_cluster::Role;
use baton_types::WorkerId;
use futures::future::join_all;
use k8s_openapi::api::core::v1::Pod;

use super::{ROLES, Release, is_leaving, is_ready, name};
use crate::status::Answered;

/// The workers of a release, each by the name of its pod, and what they say.
pub async fn status(release: &Release) -> anyhow::Result<Vec<Answered>> {
    let mut workers = Vec::new();
    for role in ROLES {
        let pods = release.pods(role).await?;
        workers.extend(join_all(pods.iter().map(|pod| worker(release, role, pod))).await);
    }
    Ok(workers)
}

async fn worker(release: &Release, role: Role, pod: &Pod) -> Answered {
    let mut answer = release.ask(pod).await;
    if let Ok(said) = &mut answer {
        said.draining |= is_leaving(pod) || !is_ready(pod);
    }
    let id = WorkerId(answer.as_ref().map_or(0, |said| said.id));
    Answered { role, id, at: name(pod).to_owned(), admin: String::new(), model: String::new(), answer }
}
