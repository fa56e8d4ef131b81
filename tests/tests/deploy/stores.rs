//! KV stores in the chart: they keep the KV of the release's workers, have the memory and the disk that they are told to use, and no GPU.

use std::collections::BTreeSet;

use anyhow::{Context, ensure};
use baton_runtime::Bytes;
use serde_json::Value;

use crate::chart::{KV_STORE, Release, Settings, list, selects};

/// All releases that have stores.
fn with_stores() -> anyhow::Result<Vec<&'static Release>> {
    let found: Vec<_> = Release::all()?.iter().filter(|r| r.roles().any(|role| role == KV_STORE)).collect();
    ensure!(found.len() >= 6, "only {} value files have stores", found.len());
    Ok(found)
}

fn bytes(settings: &Settings, key: &str) -> anyhow::Result<u64> {
    Ok(settings.text(key)?.parse::<Bytes>().map_err(anyhow::Error::msg)?.0)
}

/// Bytes of a quantity of Kubernetes in a binary unit.
fn quantity(value: &Value) -> anyhow::Result<u64> {
    let text = value.as_str().with_context(|| format!("{value} is no quantity"))?;
    Ok(format!("{text}B").parse::<Bytes>().map_err(anyhow::Error::msg)?.0)
}

/// A store whose KV is of another kind than the workers' exchanges nothing with them.
#[test]
fn a_store_keeps_the_kv_of_the_workers() -> anyhow::Result<()> {
    let values = "kvStore.enabled=true,workers.config.kv_type=q8,workers.config.block_size=64,workers.config.tp=2,\
                  workers.config.attention_window=512,workers.config.attention_sinks=8,workers.config.transfer_heartbeat=300ms,\
                  workers.config.kv_memory=3GiB,workers.config.transport=tcp";
    let others = Release::render("others than the defaults", &["--set", values])?;
    ensure!(others.settings(KV_STORE)?.text("kv_type")? == "q8", "nothing was set");
    for release in with_stores()?.into_iter().chain([&others]) {
        let (store, workers) = (release.settings(KV_STORE)?, release.settings("decode")?);
        let kinds = ["kv_type", "block_size", "attention_window", "attention_sinks", "quantization", "tp"];
        for key in kinds.into_iter().chain(["model", "transfer_heartbeat", "transfer_silence", "registry_ttl"]) {
            // The store of this file has another.
            if release.name.ends_with("everything.yaml") && key == "registry_ttl" {
                continue;
            }
            assert_eq!(store.values.get(key), workers.values.get(key), "{}: {key}", release.name);
        }
        let on_gpus = workers.text("backend")? == "cuda";
        assert_eq!(store.text("computed_by")?.contains("cuda ("), on_gpus, "{}", release.name);
    }
    // Its memory is its own.
    assert_eq!(bytes(&others.settings(KV_STORE)?, "kv_memory")?, 1 << 30);
    Ok(())
}

#[test]
fn a_store_computes_nothing_and_takes_no_gpu() -> anyhow::Result<()> {
    for release in with_stores()? {
        let (_, container) = release.pod(KV_STORE)?;
        for kind in ["limits", "requests"] {
            assert_eq!(container["resources"][kind]["nvidia.com/gpu"], Value::Null, "{}", release.name);
        }
        // Not even those that the image for GPUs would ask for.
        let devices = list(&container["env"]).iter().find(|v| v["name"] == "NVIDIA_VISIBLE_DEVICES");
        assert_eq!(devices.context("NVIDIA_VISIBLE_DEVICES")?["value"], "void", "{}", release.name);
        let image = container["image"].as_str().context("an image")?;
        ensure!(!image.ends_with("-cuda"), "{}: {image}", release.name);
    }
    Ok(())
}

#[test]
fn the_pod_has_the_memory_that_the_store_takes() -> anyhow::Result<()> {
    let large = Release::render(
        "a large disk",
        &[
            "--set",
            "kvStore.enabled=true,kvStore.config.kv_host=500MB,kvStore.disk.size=4Ti,kvStore.config.kv_memory=1.5GiB",
        ],
    )?;
    for release in with_stores()?.into_iter().chain([&large]) {
        let (settings, (_, container)) = (release.settings(KV_STORE)?, release.pod(KV_STORE)?);
        let kept = bytes(&settings, "kv_memory")? + bytes(&settings, "kv_host")?;
        let disk = if settings.values.contains_key("kv_disk") { bytes(&settings, "kv_disk_size")? } else { 0 };
        let object = if settings.values.contains_key("kv_object") { bytes(&settings, "kv_object_size")? } else { 0 };
        let least = kept + (disk + object) / 256 + (512 << 20);
        for kind in ["requests", "limits"] {
            let given = quantity(&container["resources"][kind]["memory"])?;
            let fits = least..least + least / 8 + (1 << 20);
            ensure!(fits.contains(&given), "{}: {kind} {given} of {least} bytes", release.name);
        }
    }
    Ok(())
}

/// KV goes to a volume, to a folder of the pod's own there, and leaves room on it.
#[test]
fn a_disk_is_where_the_store_looks_for_it() -> anyhow::Result<()> {
    let mut kinds = BTreeSet::new();
    for release in with_stores()? {
        let (settings, (pod, container)) = (release.settings(KV_STORE)?, release.pod(KV_STORE)?);
        let set = &release.workload(KV_STORE)?["spec"];
        let mounts = list(&container["volumeMounts"]);
        let Ok(folder) = settings.text("kv_disk") else {
            ensure!(!mounts.iter().any(|m| m["name"] == "kv"), "{}: a disk that is not used", release.name);
            kinds.insert("none");
            continue;
        };
        let mount = mounts.iter().find(|m| m["name"] == "kv").context("a mount")?["mountPath"].as_str();
        assert_eq!(folder, format!("{}/pod-0", mount.context("a path")?), "{}", release.name);
        let used = bytes(&settings, "kv_disk_size")?;
        let volumes = list(&pod["volumes"]);
        let claim = list(&set["volumeClaimTemplates"]).iter().find(|c| c["metadata"]["name"] == "kv");
        let size = match (volumes.iter().find(|v| v["name"] == "kv"), claim) {
            (Some(volume), None) if !volume["emptyDir"].is_null() => {
                kinds.insert("emptyDir");
                let asked = quantity(&container["resources"]["requests"]["ephemeral-storage"])?;
                let size = quantity(&volume["emptyDir"]["sizeLimit"])?;
                ensure!(asked >= size, "{}: {asked} bytes for a disk of {size}", release.name);
                size
            }
            (Some(volume), None) => {
                kinds.insert(if volume["hostPath"].is_null() { "existing" } else { "hostPath" });
                let prepared = list(&pod["initContainers"]).iter().any(|c| c["name"] == "kv");
                assert_eq!(prepared, !volume["hostPath"].is_null(), "{}", release.name);
                continue;
            }
            (None, Some(claim)) => {
                kinds.insert("claim");
                quantity(&claim["spec"]["resources"]["requests"]["storage"])?
            }
            found => anyhow::bail!("{}: {found:?}", release.name),
        };
        ensure!(used <= size / 10 * 9 && used > size / 2, "{}: {used} of {size} bytes", release.name);
    }
    assert_eq!(kinds, BTreeSet::from(["none", "emptyDir", "claim", "existing", "hostPath"]), "kinds of disks");
    Ok(())
}

/// Whom a policy lets in at a port of a component, of those that workers and stores are.
fn let_in(release: &Release, to: &str, port: &str) -> anyhow::Result<BTreeSet<&'static str>> {
    let rules = list(&release.one("NetworkPolicy", to)?["spec"]["ingress"]).iter();
    let rules = rules.filter(|rule| list(&rule["ports"]).iter().any(|p| p["port"] == port));
    let peers: Vec<_> = rules.flat_map(|rule| list(&rule["from"])).collect();
    let mut found = BTreeSet::new();
    for role in release.roles() {
        let labels = &release.workload(role)?["spec"]["template"]["metadata"]["labels"];
        if peers.iter().any(|peer| selects(&peer["podSelector"]["matchLabels"], labels)) {
            found.insert(role);
        }
    }
    Ok(found)
}

#[test]
fn stores_reach_workers_and_the_registry_and_workers_reach_stores() -> anyhow::Result<()> {
    let workers = BTreeSet::from(["prefill", "decode"]);
    let all = BTreeSet::from(["prefill", "decode", KV_STORE]);
    for release in with_stores()?.into_iter().filter(|r| r.of_kind("NetworkPolicy").next().is_some()) {
        let name = &release.name;
        for role in &workers {
            assert_eq!(let_in(release, role, "transfer")?, all, "{name}: {role}");
        }
        assert_eq!(let_in(release, KV_STORE, "transfer")?, workers, "{name}");
        assert_eq!(let_in(release, KV_STORE, "grpc")?, BTreeSet::from(["router"]), "{name}");
        if release.settings("router")?.text("registry")? == "embedded" {
            assert_eq!(let_in(release, "router", "internal")?, all, "{name}");
        } else if release.one("StatefulSet", "etcd").is_ok() {
            assert!(let_in(release, "etcd", "client")?.contains(KV_STORE), "{name}");
        }
    }
    Ok(())
}

/// The chart's way to scale stores is that of `baton scale`: a StatefulSet that operators may scale.
#[test]
fn operators_may_scale_stores_where_there_are_any() -> anyhow::Result<()> {
    for (more, wanted) in [("kvStore.enabled=true", true), ("kvStore.enabled=false", false)] {
        let release =
            Release::render(more, &["--set", more, "--set", "rbac.scalers[0].kind=User,rbac.scalers[0].name=me"])?;
        let role = release.of_kind("Role").find(|r| r["metadata"]["name"] == "test-baton-scaler").context("a role")?;
        let scales = |rule: &&Value| list(&rule["resources"]).iter().any(|r| r == "statefulsets/scale");
        let names: Vec<&Value> =
            list(&role["rules"]).iter().filter(scales).flat_map(|r| list(&r["resourceNames"])).collect();
        let set = release.workload(KV_STORE).ok().map(|set| &set["metadata"]["name"]);
        assert_eq!(names, set.into_iter().collect::<Vec<_>>(), "{more}");
        assert_eq!(set.is_some(), wanted, "{more}");
    }
    Ok(())
}
