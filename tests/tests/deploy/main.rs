//! The Helm chart and the binary understand each other: settings, ports, probes, drains, registries. Without a cluster: Helm renders,
//! the binary reads what it would be given, and the manifests are held against each other.

mod chart;
mod gateway;
mod stores;
mod ways;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, ensure};
use baton_cluster::Spec;
use baton_runtime::config::parse_duration;
use baton_tests::binary;
use serde_json::Value;

use chart::{KV_STORE, ROLES, Release, Settings, chart, list, port, root, selects};

#[test]
fn the_binary_takes_every_rendered_file() -> anyhow::Result<()> {
    for release in Release::all()? {
        for role in release.roles() {
            let settings = release.settings(role)?;
            let text = release.one("ConfigMap", role)?["data"]["baton.toml"].as_str().context("baton.toml")?;
            for (index, line) in text.lines().enumerate() {
                let (key, _) = line.split_once(" = ").with_context(|| format!("{line:?} sets nothing"))?;
                let (origin, wanted) = (&settings.origins[key], format!("line {}", index + 1));
                ensure!(*origin == wanted, "{} {role}: {key} is from {origin}, not from the file", release.name);
            }
            for key in settings.origins.iter().filter(|(_, from)| from.starts_with("BATON_")).map(|(key, _)| key) {
                let of_the_pod = ["advertise", "threads", "kv_disk"].contains(&key.as_str());
                ensure!(of_the_pod, "{} {role}: {key} in env", release.name);
            }
            ensure!(settings.values.contains_key("advertise") == (role != "router"), "{role}: advertise");
        }
    }
    Ok(())
}

#[test]
fn a_file_the_binary_does_not_take_fails_here() -> anyhow::Result<()> {
    let release = Release::render("default values", &[])?;
    let text = release.one("ConfigMap", "decode")?["data"]["baton.toml"].as_str().context("baton.toml")?;
    for (line, what) in [("kv_memroy = \"1GiB\"", "kv_memory"), ("kv_lease = \"10\"", "a duration with its unit")] {
        let error = match Settings::load("decode", &format!("{text}\n{line}\n"), &[]) {
            Ok(_) => anyhow::bail!("{line} was taken"),
            Err(error) => error.to_string(),
        };
        ensure!(error.contains(what), "{error}");
    }
    Ok(())
}

/// A setting of the binary that the schema refuses could not be set; one it has beyond them would not be taken.
#[test]
fn the_schema_has_the_binarys_settings() -> anyhow::Result<()> {
    // Made by the chart from other values, or from the pod.
    let own = [
        "admin",
        "advertise",
        "drain_timeout",
        "grpc",
        "http",
        "hub_endpoint",
        "hub_token_file",
        "insecure_internal",
        "internal",
        "kv_secret_file",
        "log",
        "log_format",
        "model",
        "model_cache",
        "model_peers",
    ];
    let own: BTreeSet<&str> = own
        .into_iter()
        .chain(["registry", "served_name", "share_models", "transfer", "transfer_sockets", "view_file"])
        .collect();
    let schema: Value = serde_json::from_slice(&std::fs::read(chart().join("values.schema.json"))?)?;
    let keys = |node: &Value| -> BTreeSet<String> {
        node["properties"].as_object().into_iter().flatten().map(|(key, _)| key.clone()).collect()
    };
    let router = keys(&schema["properties"]["router"]["properties"]["config"]);
    let both = keys(&schema["properties"]["workers"]["properties"]["config"]);
    for (role, offered) in [("router", &router), ("prefill", &both), ("decode", &both)] {
        let known: BTreeSet<String> = Settings::load(role, "", &[])?.known.into_iter().collect();
        let wanted: BTreeSet<String> = known.into_iter().filter(|key| !own.contains(key.as_str())).collect();
        ensure!(
            wanted == *offered,
            "settings of baton {role} the chart's schema lacks: {:?}; of the schema that the binary lacks: {:?}",
            wanted.difference(offered).collect::<Vec<_>>(),
            offered.difference(&wanted).collect::<Vec<_>>(),
        );
    }
    let one = keys(&schema["definitions"]["workerConfig"]);
    let store = keys(&schema["definitions"]["kvStoreConfig"]);
    let shared: BTreeSet<String> = both.difference(&one).cloned().collect();
    let agreed = ["attention_sinks", "attention_window", "block_size", "kv_type", "quantization"];
    assert_eq!(shared, BTreeSet::from(agreed.map(str::to_owned)));
    // A store has these from the workers' settings, and its disk from kvStore.disk.
    let made = ["kv_disk", "kv_disk_size"].into_iter().chain(agreed).chain(own);
    let mut known: BTreeSet<String> = Settings::load(KV_STORE, "", &[])?.known.into_iter().collect();
    for setting in made {
        known.remove(setting);
    }
    assert_eq!(known, store, "settings of baton kv-store, and those of the chart's schema");
    Ok(())
}

#[test]
fn ports_are_where_the_settings_listen() -> anyhow::Result<()> {
    for release in Release::all()? {
        for role in release.roles() {
            let (settings, container) = (release.settings(role)?, release.pod(role)?.1);
            let mut names = BTreeSet::from(["admin", "grpc"]);
            names.extend((role == "router").then_some("http"));
            let embedded = settings.text("registry")? == "embedded";
            names.extend((role == "router" && embedded).then_some("internal"));
            names.extend((role != "router").then_some("transfer"));
            for name in &names {
                let address: SocketAddr = settings.text(name)?.parse()?;
                ensure!(address.ip().is_unspecified(), "{} {role}: {name} is {address}", release.name);
                assert_eq!(port(container, name), Some(address.port().into()), "{} {role}: {name}", release.name);
            }
            assert_eq!(list(&container["ports"]).len(), names.len(), "{} {role}", release.name);
        }
    }
    Ok(())
}

#[test]
fn pods_run_their_role_with_their_file() -> anyhow::Result<()> {
    for release in Release::all()? {
        for role in release.roles() {
            let (pod, container) = release.pod(role)?;
            assert_eq!(container["args"], serde_json::json!([role, "--config", "/etc/baton/baton.toml"]));
            let map = &release.one("ConfigMap", role)?["metadata"]["name"];
            let volume = list(&pod["volumes"]).iter().find(|v| v["configMap"]["name"] == *map).context("its volume")?;
            let mounts = list(&container["volumeMounts"]);
            let mounted = |path: &str| mounts.iter().find(|m| m["mountPath"] == path).context(path.to_owned());
            assert_eq!(mounted("/etc/baton")?["name"], volume["name"]);
            mounted(release.settings(role)?.text("model_cache")?)?;
            if release.name == "everything" {
                let token = release.settings(role)?.text("hub_token_file")?.to_owned();
                mounted(token.trim_end_matches("/token"))?;
            }
        }
    }
    Ok(())
}

#[test]
fn probes_ask_what_is_answered() -> anyhow::Result<()> {
    for release in Release::all()? {
        for workload in release.services() {
            let role = &workload["metadata"]["labels"]["app.kubernetes.io/component"];
            let container = &workload["spec"]["template"]["spec"]["containers"][0];
            for kind in ["startupProbe", "livenessProbe", "readinessProbe"] {
                let get = &container[kind]["httpGet"];
                let (name, path) = (get["port"].as_str().unwrap_or(""), get["path"].as_str().unwrap_or(""));
                ensure!(port(container, name).is_some(), "{} {role}: {kind} asks port {name:?}", release.name);
                // A router without workers is not ready, and starting it again would not help.
                let loads = kind == "startupProbe" && (role == "prefill" || role == "decode" || role == KV_STORE);
                let wanted = match (role == "etcd", loads || kind == "readinessProbe") {
                    (false, true) => "/ready",
                    _ => "/health",
                };
                assert_eq!(path.split('?').next(), Some(wanted), "{} {role}: {kind}", release.name);
                ensure!((name == "admin") == (role != "etcd"), "{} {role}: {kind} asks {name}", release.name);
            }
        }
    }
    Ok(())
}

#[test]
fn a_drain_ends_before_the_pod_is_killed() -> anyhow::Result<()> {
    for release in Release::all()? {
        for role in release.roles() {
            let (pod, container) = release.pod(role)?;
            let drain = parse_duration(release.settings(role)?.text("drain_timeout")?).map_err(anyhow::Error::msg)?;
            let before = &container["lifecycle"]["preStop"]["exec"]["command"][1];
            let before: u64 = before.as_str().map_or(Ok(0), str::parse)?;
            let grace = pod["terminationGracePeriodSeconds"].as_u64().context("a grace period")?;
            // After the drain, streams are cut and leases are given back.
            ensure!(drain.as_secs() + before + 5 <= grace, "{} {role}: {drain:?}, {before}, {grace}", release.name);
        }
    }
    Ok(())
}

/// A router that loses etcd just as a worker's successor registers hears of it late: it gives up one try after 5 s, and waits 2 s before the next.
#[test]
fn a_worker_goes_when_all_routers_know_its_successor() -> anyhow::Result<()> {
    let late = baton_membership::OPEN + Duration::from_secs(2);
    for release in Release::all()? {
        for role in release.roles().filter(|role| *role != "router") {
            let wait = release.workload(role)?["spec"]["minReadySeconds"].as_u64();
            let wait = Duration::from_secs(wait.with_context(|| format!("{} {role}: minReadySeconds", release.name))?);
            ensure!(wait > late, "{} {role}: {wait:?} is not more than {late:?}", release.name);
        }
    }
    Ok(())
}

#[test]
fn selectors_and_references_meet_something() -> anyhow::Result<()> {
    for release in Release::all()? {
        let pods: Vec<_> = release.services().map(|w| (&w["spec"]["template"], &w["spec"]["selector"])).collect();
        let meets = |selector: &Value| -> Vec<&Value> {
            pods.iter().map(|(pod, _)| *pod).filter(|pod| selects(selector, &pod["metadata"]["labels"])).collect()
        };
        for (_, own) in &pods {
            assert_eq!(meets(&own["matchLabels"]).len(), 1, "{}: {own}", release.name);
        }
        for service in release.of_kind("Service") {
            let [pod] = meets(&service["spec"]["selector"])[..] else {
                anyhow::bail!("{}: {service} has no pods", release.name)
            };
            for entry in list(&service["spec"]["ports"]) {
                let name = entry["targetPort"].as_str().context("a named port")?;
                ensure!(port(&pod["spec"]["containers"][0], name).is_some(), "{}: {name}", release.name);
            }
        }
        for budget in release.of_kind("PodDisruptionBudget") {
            assert_eq!(meets(&budget["spec"]["selector"]["matchLabels"]).len(), 1, "{}: {budget}", release.name);
        }
        for scaler in release.of_kind("HorizontalPodAutoscaler") {
            let name = &scaler["spec"]["scaleTargetRef"]["name"];
            let target =
                release.of_kind("Deployment").find(|d| d["metadata"]["name"] == *name).context("its target")?;
            ensure!(target["spec"]["replicas"].is_null(), "{}: {name} has replicas and a scaler", release.name);
        }
        for policy in release.of_kind("NetworkPolicy") {
            let [pod] = meets(&policy["spec"]["podSelector"]["matchLabels"])[..] else {
                anyhow::bail!("{}: {policy} is for nobody", release.name)
            };
            let rules = list(&policy["spec"]["ingress"]).iter().flat_map(|rule| list(&rule["ports"]));
            let open: BTreeSet<_> = rules.filter_map(|p| p["port"].as_str()).collect();
            let container = list(&pod["spec"]["containers"][0]["ports"]).iter();
            assert_eq!(open, container.filter_map(|p| p["name"].as_str()).collect(), "{}: {policy}", release.name);
        }
    }
    Ok(())
}

#[test]
fn everybody_finds_the_registry() -> anyhow::Result<()> {
    let mut seen = BTreeSet::new();
    for release in Release::all()? {
        let router = release.settings("router")?.text("registry")?.to_owned();
        let workers = release.settings("decode")?.text("registry")?.to_owned();
        for role in release.roles().filter(|role| *role != "router") {
            assert_eq!(release.settings(role)?.text("registry")?, workers, "{} {role}", release.name);
        }
        let deployment = &release.one("Deployment", "router")?["spec"];
        match workers.parse()? {
            Spec::Embedded { endpoint, .. } => {
                assert_eq!(router, "embedded");
                assert_eq!((&deployment["replicas"], &deployment["strategy"]["type"]), (&1.into(), &"Recreate".into()));
                let service =
                    release.of_kind("Service").find(|s| endpoint.starts_with(&format!("http://{}:", host(s))));
                let service = &service.context(endpoint)?["spec"];
                // The router is not ready before it has workers.
                assert_eq!(service["publishNotReadyAddresses"], true);
                assert_eq!(service["ports"][0]["targetPort"], "internal");
                seen.insert("embedded");
            }
            Spec::Etcd { endpoints, .. } if release.one("StatefulSet", "etcd").is_ok() => {
                assert_eq!(router, workers);
                let (set, service) = (release.one("StatefulSet", "etcd")?, release.one("Service", "etcd")?);
                assert_eq!(set["spec"]["serviceName"], service["metadata"]["name"]);
                assert_eq!(service["spec"]["clusterIP"], "None");
                let name = set["metadata"]["name"].as_str().context("a name")?;
                let client = port(&set["spec"]["template"]["spec"]["containers"][0], "client").context("client")?;
                let members = 0..set["spec"]["replicas"].as_u64().context("replicas")?;
                let members: Vec<_> = members.map(|i| format!("{name}-{i}.{}:{client}", host(service))).collect();
                assert_eq!(endpoints, members, "{}", release.name);
                seen.insert("etcd");
            }
            Spec::Etcd { endpoints, .. } => {
                assert_eq!(router, workers);
                ensure!(!endpoints.is_empty());
                seen.insert("external");
            }
        }
    }
    assert_eq!(seen, BTreeSet::from(["embedded", "etcd", "external"]), "kinds of registry among the value files");
    Ok(())
}

/// The name a Service is reached by from everywhere in the cluster.
fn host(service: &Value) -> String {
    let text = |key: &str| service["metadata"][key].as_str().unwrap_or_default();
    format!("{}.{}.svc", text("name"), text("namespace"))
}

/// The restricted Pod Security Standard, but for RDMA, and no more reach into the cluster than pods of this kind need.
#[test]
fn pods_can_do_little() -> anyhow::Result<()> {
    for release in Release::all()? {
        let test = release.of_kind("Pod").map(|pod| &pod["spec"]);
        for pod in release.workloads().map(|w| &w["spec"]["template"]["spec"]).chain(test) {
            let own = &pod["securityContext"];
            assert_eq!(
                (&own["runAsNonRoot"], &own["seccompProfile"]["type"]),
                (&true.into(), &"RuntimeDefault".into())
            );
            // Only who writes the certificates calls the Kubernetes API.
            let certs = pod["serviceAccountName"].as_str().is_some_and(|name| name.contains("-certs"));
            assert_eq!(
                (&pod["automountServiceAccountToken"], &pod["enableServiceLinks"]),
                (&certs.into(), &false.into())
            );
            for reach in ["hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"] {
                assert_eq!(pod[reach], Value::Null, "{}", release.name);
            }
            // The folder where workers of a node meet, if there is one, and a store's disk.
            let of_the_host = |v: &Value| !v["hostPath"].is_null() && v["name"] != "sockets" && v["name"] != "kv";
            ensure!(!list(&pod["volumes"]).iter().any(of_the_host), "{}", release.name);
            for container in list(&pod["containers"]) {
                let own = &container["securityContext"];
                // Who lets a card write into memory may lock memory, and no more.
                let locks = release.name.ends_with("rdma.yaml") && container["command"][0] == "with-ipc-lock";
                let allowed = match locks {
                    true => serde_json::json!({"add": ["IPC_LOCK"], "drop": ["ALL"]}),
                    false => serde_json::json!({"drop": ["ALL"]}),
                };
                assert_eq!(own["allowPrivilegeEscalation"], locks, "{}", release.name);
                assert_eq!(own["readOnlyRootFilesystem"], true);
                assert_eq!(own["capabilities"], allowed, "{}", release.name);
            }
        }
    }
    Ok(())
}

/// Workers ask for the devices, the second network and the right to lock memory; routers do not.
#[test]
fn rdma_is_for_workers() -> anyhow::Result<()> {
    let values = "workers.config.transport=ucx,workers.rdma.resource=rdma/hca,workers.rdma.devices=2,workers.rdma.network=infra/roce";
    let release =
        Release::render("rdma", &["--set", values, "--set", "workers.rdma.ipcLock=true,kvStore.enabled=true"])?;
    for role in release.roles() {
        let (_, container) = release.pod(role)?;
        let template = &release.workload(role)?["spec"]["template"];
        let network = &template["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"];
        let devices = &container["resources"]["limits"]["rdma/hca"];
        let (added, started_by) = (&container["securityContext"]["capabilities"]["add"], &container["command"][0]);
        // Without it the kernel gives a program nothing that its file has.
        assert_eq!(container["securityContext"]["allowPrivilegeEscalation"], role != "router", "{role}");
        match role {
            "router" => {
                let absent = &Value::Null;
                assert_eq!((network, devices, added, started_by), (absent, absent, absent, absent), "{role}");
            }
            _ => {
                let (network_is, devices_are, added_is) =
                    (&"infra/roce".into(), &2.into(), &serde_json::json!(["IPC_LOCK"]));
                assert_eq!((network, devices, added), (network_is, devices_are, added_is), "{role}");
                let file = std::fs::read_to_string(root().join("deploy/Containerfile"))?;
                let program = started_by.as_str().context("a program that has the capability")?;
                ensure!(file.contains(&format!("setcap cap_ipc_lock=ep /usr/local/bin/{program}")), "{program}");
            }
        }
    }
    Ok(())
}

/// Only when asked for, and for workers alone. Nodes then reach the registry, which policies would keep them from.
#[test]
fn workers_may_use_the_network_of_their_nodes() -> anyhow::Result<()> {
    let values = "workers.hostNetwork=true,networkPolicy.nodes={10.0.0.0/16},kvStore.enabled=true";
    let release = Release::render("host network", &["--set", values])?;
    for role in release.roles() {
        let (pod, _) = release.pod(role)?;
        let (network, dns) = (&pod["hostNetwork"], &pod["dnsPolicy"]);
        match role {
            "router" => assert_eq!((network, dns), (&Value::Null, &Value::Null), "{role}"),
            _ => assert_eq!((network, dns), (&true.into(), &"ClusterFirstWithHostNet".into()), "{role}"),
        }
    }
    let rules = &release.one("NetworkPolicy", "etcd")?["spec"]["ingress"];
    let nodes = serde_json::json!({"ipBlock": {"cidr": "10.0.0.0/16"}});
    let lets_in: Vec<bool> = list(rules).iter().map(|rule| list(&rule["from"]).contains(&nodes)).collect();
    assert_eq!(lets_in, [true, false, false], "clients, peers, metrics");
    Ok(())
}

/// The image with kernels is for workers that compute on GPUs, unless the values name an image.
#[test]
fn workers_on_gpus_get_the_image_with_kernels() -> anyhow::Result<()> {
    let gpu = r"decode.resources.limits.nvidia\.com/gpu=1";
    for (values, cuda) in [
        ("workers.config.backend=cuda", &["prefill", "decode"][..]),
        ("decode.config.backend=cuda", &["decode"]),
        (gpu, &["decode"]),
        (&format!("{gpu},workers.config.backend=auto"), &["decode"]),
        (&format!("{gpu},workers.config.backend=cpu"), &[]),
        ("workers.config.backend=cuda,image.tag=mine", &[]),
    ] {
        let release = Release::render("gpu", &["--set", values])?;
        for role in ROLES {
            let (_, container) = release.pod(role)?;
            let image = container["image"].as_str().unwrap_or_default();
            assert_eq!(image.ends_with("-cuda"), cuda.contains(&role), "{values}: {role} has {image}");
        }
    }
    Ok(())
}

/// Each process has the certificate of its own role, and whoever makes them may write these Secrets and no others.
#[test]
fn every_process_shows_the_certificate_of_its_role() -> anyhow::Result<()> {
    let mut seen = BTreeSet::new();
    for release in Release::all()? {
        let made: BTreeSet<&str> = release
            .of_kind("Certificate")
            .filter_map(|certificate| certificate["spec"]["secretName"].as_str())
            .chain(release.of_kind("Role").flat_map(secrets_that_are_written))
            .collect();
        if !release.settings("router")?.values.contains_key("tls_cert") {
            ensure!(made.is_empty(), "{}: {made:?} are for nobody", release.name);
            continue;
        }
        let mut needed = BTreeSet::new();
        for role in ["router", "prefill", "decode", KV_STORE, "etcd"] {
            // A store takes and gives the KV of decode workers.
            let holder = if role == KV_STORE { "decode" } else { role };
            let of_role = |w: &&Value| w["metadata"]["labels"]["app.kubernetes.io/component"] == role;
            let Some(workload) = release.workloads().find(of_role) else { continue };
            let volumes = list(&workload["spec"]["template"]["spec"]["volumes"]);
            let named = |name: &str| {
                let mut named = volumes.iter().filter(|volume| volume["name"] == name);
                named.find_map(|volume| volume["secret"]["secretName"].as_str())
            };
            let (secret, names) = (named("tls"), named("kv-secret"));
            if role != "etcd" {
                let settings = release.settings(role)?;
                let read = settings.text("kv_secret_file").ok();
                let wanted = names.map(|_| "/etc/baton-kv/secret");
                ensure!(read == wanted, "{} {role}: kv_secret_file is {read:?}, not {wanted:?}", release.name);
            }
            needed.extend(names);
            let secured = role == "etcd" || release.settings(role)?.text("tls_cert")? == "/etc/baton-tls/tls.crt";
            ensure!(
                secured && secret.is_some_and(|name| name.ends_with(&format!("-{holder}"))),
                "{}: {role}",
                release.name
            );
            needed.extend(secret);
        }
        if !made.is_empty() {
            let others = made.difference(&needed).filter(|name| !name.ends_with("-ca") && !name.ends_with("-operator"));
            assert_eq!(others.collect::<Vec<_>>(), [&""; 0], "{}", release.name);
            ensure!(needed.is_subset(&made), "{}: {needed:?} are needed, {made:?} are made", release.name);
            seen.insert(release.of_kind("Certificate").next().is_some());
        }
    }
    assert_eq!(seen, BTreeSet::from([false, true]), "both ways to make them are among the value files");
    Ok(())
}

/// The Secrets that a Role lets somebody change.
fn secrets_that_are_written(role: &Value) -> Vec<&str> {
    let rules = list(&role["rules"]).iter().filter(|rule| list(&rule["verbs"]).iter().any(|verb| verb == "update"));
    rules.flat_map(|rule| list(&rule["resourceNames"])).filter_map(Value::as_str).collect()
}

#[test]
fn the_image_is_the_one_the_chart_expects() -> anyhow::Result<()> {
    let file = std::fs::read_to_string(root().join("deploy/Containerfile"))?;
    let release = Release::render("default values", &[])?;
    let (pod, container) = release.pod("decode")?;
    let (user, group) = (&pod["securityContext"]["runAsUser"], &pod["securityContext"]["runAsGroup"]);
    ensure!(file.contains(&format!("\nUSER {user}:{group}\n")), "USER is not {user}:{group}");
    // `baton model list` in the image and the workers of the chart look into the same cache.
    let cache = release.settings("decode")?.text("model_cache")?.to_owned();
    let base = cache.strip_suffix("/baton/models").context("a cache below XDG_CACHE_HOME")?;
    ensure!(file.contains(&format!("\nENV XDG_CACHE_HOME={base}\n")), "XDG_CACHE_HOME is not {base}");
    let version = binary::output(&["--version"])?;
    assert_eq!(container["image"], format!("baton:{}", version.trim().trim_start_matches("baton ")));
    // Every member of the workspace is copied, or cargo could not read the workspace.
    let manifest: toml::Table = std::fs::read_to_string(root().join("Cargo.toml"))?.parse()?;
    let members = manifest["workspace"]["members"].as_array().context("members")?;
    for member in members.iter().filter_map(toml::Value::as_str).map(|m| m.trim_end_matches("/*")) {
        // By itself or with a folder it lies in.
        let mut folders = Path::new(member).ancestors().filter_map(Path::to_str).filter(|folder| !folder.is_empty());
        let copied = folders.any(|folder| file.contains(&format!("\nCOPY {folder} {folder}\n")));
        ensure!(copied, "{member} is not copied into the build");
    }
    Ok(())
}
