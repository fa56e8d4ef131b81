//! An Envoy that does what an HTTPRoute or Ingresses of the chart ask for, as a gateway made of it would: hosts, paths, backends, timeouts. What
//! they leave out is as Envoy has it.

use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, ensure};
use baton_runtime::config::parse_duration;
use baton_runtime::die_with_parent;
use baton_tests::cluster::{Cluster, wait};
use serde_json::{Value, json};

use crate::chart::{Release, list, port, root};

/// A running Envoy.
pub struct Gateway {
    process: Child,
    /// Where clients come in, by HTTP/1.1 and HTTP/2.
    pub address: SocketAddr,
}

impl Drop for Gateway {
    fn drop(&mut self) {
        // It may have ended, which is as well.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// One path of one host.
struct Way {
    host: String,
    prefix: String,
    /// Name of the Service's port.
    port: String,
    /// As Envoy writes it; None: nothing is asked for.
    timeout: Option<String>,
}

impl Gateway {
    /// Starts one that leads to a cluster's router as the manifests of these kinds say.
    pub fn start(release: &Release, kind: &str, cluster: &Cluster) -> anyhow::Result<Gateway> {
        let ways = match kind {
            "HTTPRoute" => http_routes(release)?,
            _ => ingresses(release)?,
        };
        let folder = tempfile::tempdir()?;
        let (settings, admin) = (folder.path().join("envoy.json"), folder.path().join("admin"));
        std::fs::write(&settings, bootstrap(release, ways, cluster)?.to_string())?;
        let found = Command::new(root().join("tools/fetch-envoy")).output()?;
        ensure!(found.status.success(), "{}", String::from_utf8_lossy(&found.stderr));
        let mut command = Command::new(String::from_utf8(found.stdout)?.trim());
        command.arg("--config-path").arg(&settings).arg("--admin-address-path").arg(&admin);
        command.args(["--use-dynamic-base-id", "--concurrency", "1", "--log-level", "error"]).stdout(Stdio::null());
        die_with_parent(&mut command);
        let process = command.spawn().context("starting envoy")?;
        // Stopped from here on when something fails.
        let mut gateway = Gateway { process, address: SocketAddr::from(([127, 0, 0, 1], 0)) };
        let admin: SocketAddr = wait(|| std::fs::read_to_string(&admin).ok()?.trim().parse().ok())?;
        gateway.address = wait(|| {
            // By HTTP/1.1: it takes no HTTP/1.0.
            let asked = async { reqwest::get(format!("http://{admin}/listeners?format=json")).await?.json().await };
            let listeners: Value = cluster.block_on(asked).ok()?;
            let socket = &list(&listeners["listener_statuses"]).first()?["local_address"]["socket_address"];
            format!("{}:{}", socket["address"].as_str()?, socket["port_value"]).parse().ok()
        })?;
        Ok(gateway)
    }
}

fn text(value: &Value) -> anyhow::Result<String> {
    Ok(value.as_str().with_context(|| format!("{value} is not a text"))?.to_owned())
}

/// The host names of a list; all, where it names none.
fn hosts(names: &Value) -> anyhow::Result<Vec<String>> {
    let names: Vec<String> = list(names).iter().map(text).collect::<Result<_, _>>()?;
    Ok(if names.is_empty() { vec!["*".to_owned()] } else { names })
}

/// The ports of the router's Service.
fn ports(release: &Release) -> anyhow::Result<&[Value]> {
    let service = release.of_kind("Service").find(|service| service["metadata"]["name"] == "test-baton-router");
    Ok(list(&service.context("the router's Service")?["spec"]["ports"]))
}

fn http_routes(release: &Release) -> anyhow::Result<Vec<Way>> {
    let mut ways = Vec::new();
    for spec in release.of_kind("HTTPRoute").map(|route| &route["spec"]) {
        for (host, rule) in
            hosts(&spec["hostnames"])?.iter().flat_map(|h| list(&spec["rules"]).iter().map(move |r| (h, r)))
        {
            let [backend] = list(&rule["backendRefs"]) else { anyhow::bail!("{rule} has not one backend") };
            ensure!(backend["name"] == "test-baton-router", "{backend}");
            let port = ports(release)?.iter().find(|port| port["port"] == backend["port"]);
            let port = text(&port.with_context(|| format!("{backend}: no such port"))?["name"])?;
            let timeout =
                rule["timeouts"]["request"].as_str().map(parse_duration).transpose().map_err(anyhow::Error::msg)?;
            let timeout = timeout.map(|time: Duration| format!("{}s", time.as_secs_f64()));
            for matched in list(&rule["matches"]) {
                ensure!(matched["path"]["type"] == "PathPrefix", "{matched}");
                let prefix = text(&matched["path"]["value"])?;
                ways.push(Way { host: host.clone(), prefix, port: port.clone(), timeout: timeout.clone() });
            }
        }
    }
    Ok(ways)
}

/// The time that a request may take is left to annotations, which each controller has its own of: here it is any.
fn ingresses(release: &Release) -> anyhow::Result<Vec<Way>> {
    let mut ways = Vec::new();
    for rule in release.of_kind("Ingress").flat_map(|ingress| list(&ingress["spec"]["rules"])) {
        for path in list(&rule["http"]["paths"]) {
            let service = &path["backend"]["service"];
            ensure!(path["pathType"] == "Prefix" && service["name"] == "test-baton-router", "{path}");
            let (prefix, port) = (text(&path["path"])?, text(&service["port"]["name"])?);
            let host = rule["host"].as_str().unwrap_or("*").to_owned();
            ways.push(Way { host, prefix, port, timeout: Some("0s".to_owned()) });
        }
    }
    Ok(ways)
}

fn bootstrap(release: &Release, mut ways: Vec<Way>, cluster: &Cluster) -> anyhow::Result<Value> {
    ensure!(!ways.is_empty(), "{}: no way leads to the router", release.name);
    // Of the paths of a host the longest that fits is taken.
    ways.sort_by_key(|way| std::cmp::Reverse(way.prefix.len()));
    let mut names: Vec<&str> = ways.iter().map(|way| way.host.as_str()).collect();
    names.sort_unstable();
    names.dedup();
    let of = |host: &str| ways.iter().filter(|way| way.host == host).map(route).collect::<Vec<Value>>();
    let hosts: Vec<Value> =
        names.iter().map(|host| json!({"name": host, "domains": [host], "routes": of(host)})).collect();
    let clusters: Vec<Value> =
        ports(release)?.iter().map(|port| backend(release, port, cluster)).collect::<Result<_, _>>()?;
    let here = json!({"socket_address": {"address": "127.0.0.1", "port_value": 0}});
    let manager = json!({
        "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "gateway",
        "strip_any_host_port": true,
        "route_config": {"virtual_hosts": hosts},
        "http_filters": [{
            "name": "envoy.filters.http.router",
            "typed_config": {"@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"},
        }],
    });
    let chain = json!({"filters": [{"name": "http", "typed_config": manager}]});
    Ok(json!({
        "admin": {"address": here},
        "static_resources": {
            "listeners": [{"name": "gateway", "address": here, "filter_chains": [chain]}],
            "clusters": clusters,
        },
    }))
}

fn route(way: &Way) -> Value {
    let matched = match way.prefix.as_str() {
        "/" => json!({"prefix": "/"}),
        path => json!({"path_separated_prefix": path}),
    };
    let mut route = json!({"cluster": way.port});
    way.timeout.iter().for_each(|timeout| route["timeout"] = json!(timeout));
    json!({"match": matched, "route": route})
}

/// The router's listener that a port of the Service leads to.
fn backend(release: &Release, service: &Value, cluster: &Cluster) -> anyhow::Result<Value> {
    let target = text(&service["targetPort"])?;
    port(release.pod("router")?.1, &target).with_context(|| format!("the router has no port {target}"))?;
    let address = match target.as_str() {
        "http" => cluster.http(),
        "grpc" => cluster.grpc(),
        other => anyhow::bail!("nothing is known of a port {other}"),
    };
    let protocol = match service["appProtocol"].as_str() {
        Some("http") => json!({"http_protocol_options": {}}),
        Some("kubernetes.io/h2c") => json!({"http2_protocol_options": {}}),
        other => anyhow::bail!("nothing is known of a protocol {other:?}"),
    };
    let socket = json!({"address": address.ip().to_string(), "port_value": address.port()});
    Ok(json!({
        "name": service["name"],
        "connect_timeout": "5s",
        "load_assignment": {
            "cluster_name": service["name"],
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": {"socket_address": socket}}}]}],
        },
        "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
            "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
            "explicit_http_config": protocol,
        }},
    }))
}
