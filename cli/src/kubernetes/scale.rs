//! `baton scale` and `baton drain` on Kubernetes: the number of pods of a workload, and which of them go.

use std::time::Duration;

use anyhow::{Context, bail};
use baton_cluster::Role;
use k8s_openapi::api::apps::v1::{Deployment, StatefulSet};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{EvictParams, Patch, PatchParams};
use serde_json::json;
use tokio::time::{Instant, sleep, timeout};

use super::leaving::{COST_OF_LEAVING, Candidate, leaving, number, numbered_from};
use super::{ROLES, Release, Workload, answered, has_identities, is_leaving, is_ready, name};
use crate::scale::{Drain, Options, Wanted};

/// The annotation by which Kubernetes decides which of several pods goes.
const COST: &str = "controller.kubernetes.io/pod-deletion-cost";
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// A change of one workload.
struct Change {
    workload: Workload,
    to: u32,
    pods: Vec<Pod>,
    leaving: Vec<Candidate>,
}

/// Sets how many pods the workloads have.
pub async fn scale(release: &Release, wanted: &Wanted, options: &Options) -> anyhow::Result<()> {
    let mut changes = Vec::new();
    for (role, to) in wanted.roles() {
        changes.push(plan(release, role, to, options).await?);
    }
    changes.iter().for_each(|change| change.print(options));
    if options.dry_run {
        options.say.line("nothing was changed (--dry-run)");
        return Ok(());
    }
    for change in &changes {
        change.apply(release).await?;
    }
    match options.wait {
        true => wait(release, changes.iter().map(|change| (change.workload.role, change.to)).collect(), options).await,
        false => Ok(()),
    }
}

/// Takes one pod out of service once its requests are done: another takes its place, or the workload gets smaller by one.
pub async fn drain(release: &Release, drain: &Drain, options: &Options) -> anyhow::Result<()> {
    let (role, pod) = find(release, &drain.worker).await?;
    let workload = release.workload(role).await?;
    let now = workload.replicas();
    let to = if drain.replace { now } else { now.saturating_sub(1) };
    if role == Role::Decode && to == 0 {
        bail!("it is the last decode worker, and a cluster needs one; use --replace");
    }
    if drain.replace {
        refuse_gap(release, role, &pod, options).await?;
    }
    options.say.line(&format!(
        "{} goes once its requests are done; {}: {now} -> {to} pods",
        name(&pod),
        workload.name()
    ));
    if options.dry_run {
        options.say.line("nothing was changed (--dry-run)");
        return Ok(());
    }
    if drain.replace {
        let evicted = answered(release.api::<Pod>().evict(name(&pod), &EvictParams::default())).await;
        evicted.with_context(|| format!("evicting pod {}", name(&pod)))?;
    } else {
        refuse_autoscaler(release, &workload, options).await?;
        refuse_other_than_last(&workload, &pod)?;
        let others = release.pods(role).await?;
        let starting = |other: &&Pod| name(other) != name(&pod) && !is_leaving(other) && !is_ready(other);
        if let Some(other) = others.iter().find(starting).filter(|_| !has_identities(role)) {
            bail!(
                "pod {} is not ready, and Kubernetes would remove that one; try again once it is, or use --replace",
                name(other)
            );
        }
        mark(release, &workload, &others, &[name(&pod)]).await?;
        set_replicas(release, &workload, to).await?;
    }
    match options.wait {
        true => {
            gone(release, &pod, options).await?;
            wait(release, vec![(role, to)], options).await
        }
        false => Ok(()),
    }
}

async fn plan(release: &Release, role: Role, to: u32, options: &Options) -> anyhow::Result<Change> {
    let workload = release.workload(role).await?;
    refuse_autoscaler(release, &workload, options).await?;
    let pods: Vec<Pod> = release.pods(role).await?.into_iter().filter(|pod| !is_leaving(pod)).collect();
    let fewer = pods.len().saturating_sub(to as usize);
    let leaving = match fewer {
        0 => Vec::new(),
        _ if has_identities(role) => numbered_from(candidates(release, &pods).await, to),
        _ => leaving(candidates(release, &pods).await, fewer),
    };
    Ok(Change { workload, to, pods, leaving })
}

/// Asks the workers in the pods what they have to do.
async fn candidates(release: &Release, pods: &[Pod]) -> Vec<Candidate> {
    let ask = |pod| async move {
        let said = release.ask(pod).await;
        if let Err(error) = &said {
            tracing::debug!(pod = name(pod), error = format!("{error:#}"), "a pod did not say how busy it is");
        }
        let (requests, cached) = match said {
            Ok(said) => (Some(said.running + said.waiting), said.blocks.unwrap_or_default().cached),
            Err(_) => (None, 0),
        };
        Candidate { name: name(pod).to_owned(), ready: is_ready(pod), requests, cached }
    };
    futures::future::join_all(pods.iter().map(ask)).await
}

/// Kubernetes starts another pod only once this one has gone, which with one pod leaves nobody.
async fn refuse_gap(release: &Release, role: Role, pod: &Pod, options: &Options) -> anyhow::Result<()> {
    let pods = release.pods(role).await?;
    let others = pods.iter().filter(|other| name(other) != name(pod) && !is_leaving(other) && is_ready(other)).count();
    if role == Role::Decode && others == 0 && !options.force {
        bail!(
            "no other decode pod is ready, and Kubernetes starts another only once this one has gone; \
             add one first (baton scale --decode N --wait), or use --force"
        );
    }
    Ok(())
}

/// Of numbered pods Kubernetes removes the last.
fn refuse_other_than_last(workload: &Workload, pod: &Pod) -> anyhow::Result<()> {
    let last = workload.replicas().saturating_sub(1);
    if has_identities(workload.role) && number(name(pod)) != Some(last) {
        bail!(
            "KV stores go by their numbers, and {}-{last} would go first; drain that one, or use --replace, by which {} starts anew",
            workload.name(),
            name(pod)
        );
    }
    Ok(())
}

/// An autoscaler would undo a change within a minute.
async fn refuse_autoscaler(release: &Release, workload: &Workload, options: &Options) -> anyhow::Result<()> {
    let Some(autoscaler) = release.autoscaler(workload).await? else { return Ok(()) };
    let what = format!("{autoscaler} sets the pods of {}, and would undo this", workload.name());
    if !options.force {
        bail!("{what}; change its limits (*.autoscaling in the chart's values), or use --force");
    }
    eprintln!("{what}; done all the same (--force)");
    Ok(())
}

impl Change {
    fn print(&self, options: &Options) {
        options.say.line(&format!("{}: {} -> {} pods", self.workload.name(), self.workload.replicas(), self.to));
        self.leaving.iter().for_each(|pod| options.say.line(&format!("  goes: {pod}")));
    }

    async fn apply(&self, release: &Release) -> anyhow::Result<()> {
        let names: Vec<&str> = self.leaving.iter().map(|pod| pod.name.as_str()).collect();
        mark(release, &self.workload, &self.pods, &names).await?;
        set_replicas(release, &self.workload, self.to).await
    }
}

/// Tells Kubernetes which pods go first, where it lets itself be told. A mark that an earlier command left on another pod is taken away.
async fn mark(release: &Release, workload: &Workload, pods: &[Pod], going: &[&str]) -> anyhow::Result<()> {
    if has_identities(workload.role) {
        return Ok(());
    }
    for pod in pods {
        let marked =
            pod.metadata.annotations.as_ref().is_some_and(|all| all.get(COST) == Some(&COST_OF_LEAVING.to_string()));
        let goes = going.contains(&name(pod));
        if goes == marked {
            continue;
        }
        let cost = goes.then(|| COST_OF_LEAVING.to_string());
        let patch = Patch::Merge(json!({"metadata": {"annotations": {COST: cost}}}));
        let patched = answered(release.api::<Pod>().patch(name(pod), &PatchParams::default(), &patch)).await;
        patched.with_context(|| format!("marking pod {}", name(pod)))?;
    }
    Ok(())
}

async fn set_replicas(release: &Release, workload: &Workload, to: u32) -> anyhow::Result<()> {
    let patch = Patch::Merge(json!({"spec": {"replicas": to}}));
    let (name, params) = (workload.name(), PatchParams::default());
    let patched = if has_identities(workload.role) {
        answered(release.api::<StatefulSet>().patch_scale(name, &params, &patch)).await
    } else {
        answered(release.api::<Deployment>().patch_scale(name, &params, &patch)).await
    };
    patched.map(drop).with_context(|| format!("scaling {name}"))
}

/// Waits until each workload has so many ready pods and no others. Prints every change.
async fn wait(release: &Release, wanted: Vec<(Role, u32)>, options: &Options) -> anyhow::Result<()> {
    let until = Instant::now() + options.timeout;
    let mut said = String::new();
    loop {
        let (mut progress, mut done) = (Vec::new(), true);
        for &(role, to) in &wanted {
            let pods = release.pods(role).await?;
            let ready = pods.iter().filter(|pod| is_ready(pod)).count();
            let leaving = pods.iter().filter(|pod| is_leaving(pod)).count();
            let starting = pods.len() - ready - leaving;
            done &= ready == to as usize && leaving + starting == 0;
            progress.push(format!("{}: {ready} of {to} ready, {starting} starting, {leaving} leaving", role.as_str()));
        }
        let progress = progress.join("; ");
        if progress != said {
            options.say.line(&progress);
            said = progress;
        }
        if done {
            return Ok(());
        }
        if Instant::now() >= until {
            bail!("after {:?} (--timeout): {said}; `baton status` shows why", options.timeout);
        }
        sleep(LOOK_EVERY).await;
    }
}

/// Waits until a pod is no more.
async fn gone(release: &Release, pod: &Pod, options: &Options) -> anyhow::Result<()> {
    let gone = async {
        loop {
            let now = answered(release.api::<Pod>().get_opt(name(pod))).await?;
            if now.is_none_or(|now| now.metadata.uid != pod.metadata.uid) {
                return anyhow::Ok(());
            }
            sleep(LOOK_EVERY).await;
        }
    };
    let late = || format!("pod {} still answers requests after {:?} (--timeout)", name(pod), options.timeout);
    timeout(options.timeout, gone).await.with_context(late)?
}

/// The pod of this name, or whose worker has this id.
async fn find(release: &Release, worker: &str) -> anyhow::Result<(Role, Pod)> {
    for role in ROLES {
        for pod in release.pods(role).await? {
            let is_it = name(&pod) == worker
                || release
                    .ask(&pod)
                    .await
                    .is_ok_and(|said| said.id != 0 && baton_types::WorkerId(said.id).to_string() == worker);
            if is_it {
                return Ok((role, pod));
            }
        }
    }
    bail!("no pod of the release has the name or the worker id {worker:?}; `baton status` shows them")
}
