//! The output of `baton status`, as a table and as JSON. Pure: it sends no requests.

use baton_cluster::{Member, Role};
use baton_proto::v1;
use baton_types::WorkerId;
use serde_json::{Value, json};

/// A worker that was asked, and its answer.
pub struct Answered {
    pub role: Role,
    /// 0: not known, because a pod did not answer.
    pub id: WorkerId,
    /// Where it serves: an address, or the name of its pod.
    pub at: String,
    /// Where its admin endpoint is, and which model it serves, if the cluster's registry was asked.
    pub admin: String,
    pub model: String,
    pub answer: anyhow::Result<v1::StatusResponse>,
}

impl Answered {
    /// A member of the cluster.
    pub fn member(member: Member, answer: anyhow::Result<v1::StatusResponse>) -> Answered {
        let Member { role, id, grpc, admin, model, .. } = member;
        Answered { role, id, at: grpc, admin, model, answer }
    }
}

/// A table of the workers, and below it the transport that KV takes between each pair.
pub fn table(workers: &[Answered]) -> String {
    let mut text = format!(
        "{:<9} {:<19} {:<24} {:>7} {:>7} {:>9} {:>9} {:>9} {:>9}  STATE\n",
        "ROLE", "ID", "GRPC", "RUNNING", "WAITING", "FREE", "CACHED", "IN USE", "LENT"
    );
    workers.iter().for_each(|worker| text += &worker_line(worker));
    let pairs = pairs(workers);
    if !pairs.is_empty() {
        text +=
            &format!("\n{:<19} {:<19} {:<5} {:>11} {:>9}  OTHER PATHS\n", "KV FROM", "TO", "OVER", "SPEED", "HANDOFFS");
        pairs.iter().for_each(|(from, peer)| text += &pair_line(*from, peer, pool_of(workers, peer.id)));
    }
    text
}

fn worker_line(worker: &Answered) -> String {
    let (role, id) = (worker.role.as_str(), worker.id.to_string());
    match &worker.answer {
        Ok(s) => {
            let b = s.blocks.unwrap_or_default();
            format!(
                "{role:<9} {id:<19} {:<24} {:>7} {:>7} {:>9} {:>9} {:>9} {:>9}  {}\n",
                worker.at,
                s.running,
                s.waiting,
                b.free,
                b.cached,
                b.used,
                b.lent + b.quarantined,
                state(s)
            )
        }
        Err(error) => format!("{role:<9} {id:<19} {:<24} unreachable: {error:#}\n", worker.at),
    }
}

fn state(status: &v1::StatusResponse) -> &'static str {
    if status.draining { "draining" } else { "serving" }
}

/// The pairs (sender, receiver) of KV. Receivers that are no longer members are left out.
fn pairs(workers: &[Answered]) -> Vec<(WorkerId, &v1::Peer)> {
    let is_member = |peer: &&v1::Peer| workers.iter().any(|worker| worker.id.0 == peer.id);
    let answered = workers.iter().filter_map(|worker| Some((worker.id, worker.answer.as_ref().ok()?)));
    answered.flat_map(|(from, status)| status.peers.iter().filter(is_member).map(move |peer| (from, peer))).collect()
}

/// What the worker says others open its pool by, and why by nothing better.
fn pool_of(workers: &[Answered], id: u64) -> &str {
    let status = workers.iter().find(|worker| worker.id.0 == id).and_then(|worker| worker.answer.as_ref().ok());
    status.map_or("", |status| &status.pool_by)
}

/// What a peer's pool in a GPU's memory is open by. `pool` says why by nothing better, if it is about the same.
fn opened<'a>(path: &'a v1::Path, pool: &'a str) -> Option<&'a str> {
    let by = Some(path.opened_by.as_str()).filter(|by| !by.is_empty())?;
    Some(if pool.starts_with(by) && pool.contains(": ") { pool } else { by })
}

fn pair_line(from: WorkerId, peer: &v1::Peer, pool: &str) -> String {
    let used = peer.paths.iter().find(|path| path.in_use);
    let over = used.map_or("-", |path| &path.transport);
    let speed = used.and_then(|path| path.bytes_per_second).map_or_else(|| "-".to_owned(), speed);
    let handoffs: u64 = peer.paths.iter().map(|path| path.handoffs).sum();
    let how = used.and_then(|path| Some(format!("{} by {}", path.transport, opened(path, pool)?)));
    let others = how.into_iter().chain(peer.paths.iter().filter(|path| !path.in_use).map(other));
    let others = others.collect::<Vec<_>>().join("; ");
    format!("{:<19} {:<19} {over:<5} {speed:>11} {handoffs:>9}  {others}\n", from.to_string(), WorkerId(peer.id))
}

fn other(path: &v1::Path) -> String {
    let measured = path.bytes_per_second.map(|rate| format!(" ({})", speed(rate))).unwrap_or_default();
    format!("{}{measured}: {}", path.transport, path.unused)
}

fn speed(bytes_per_second: f64) -> String {
    match bytes_per_second {
        rate if rate >= 1e9 => format!("{:.1} GB/s", rate / 1e9),
        rate => format!("{:.1} MB/s", rate / 1e6),
    }
}

/// The same as JSON, with the figures of every path.
pub fn json(workers: &[Answered]) -> Value {
    let pairs = pairs(workers).into_iter().map(|(from, peer)| {
        let used = peer.paths.iter().find(|path| path.in_use).map(|path| &path.transport);
        let paths: Vec<Value> = peer.paths.iter().map(path_json).collect();
        json!({ "from": from.to_string(), "to": WorkerId(peer.id).to_string(), "over": used, "paths": paths })
    });
    json!({ "workers": workers.iter().map(worker_json).collect::<Vec<_>>(), "pairs": pairs.collect::<Vec<_>>() })
}

fn worker_json(asked: &Answered) -> Value {
    let mut worker = json!({
        "role": asked.role.as_str(),
        "id": asked.id.to_string(),
        "grpc": asked.at,
        "admin": asked.admin,
        "model": asked.model,
    });
    match &asked.answer {
        Ok(s) => {
            let b = s.blocks.unwrap_or_default();
            worker["state"] = state(s).into();
            worker["pool_by"] = s.pool_by.clone().into();
            worker["tiers"] = super::tiers::json(&s.tiers);
            worker["running"] = s.running.into();
            worker["waiting"] = s.waiting.into();
            worker["blocks"] = json!({
                "total": b.total,
                "free": b.free,
                "cached": b.cached,
                "used": b.used,
                "lent": b.lent,
                "quarantined": b.quarantined,
            });
        }
        Err(error) => {
            worker["state"] = "unreachable".into();
            worker["error"] = format!("{error:#}").into();
        }
    }
    worker
}

fn path_json(path: &v1::Path) -> Value {
    json!({
        "transport": path.transport,
        "in_use": path.in_use,
        "connections": path.connections,
        "handoffs": path.handoffs,
        "failures": path.failures,
        "bytes_per_second": path.bytes_per_second,
        "unused": (!path.in_use).then_some(&path.unused),
        "opened_by": Some(&path.opened_by).filter(|by| !by.is_empty()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(id: u64, role: Role, answer: anyhow::Result<v1::StatusResponse>) -> Answered {
        let at = format!("http://127.0.0.1:{id}");
        Answered { role, id: WorkerId(id), at, admin: String::new(), model: "m".into(), answer }
    }

    fn path(transport: &str, rate: Option<f64>, unused: &str) -> v1::Path {
        v1::Path {
            transport: transport.into(),
            in_use: unused.is_empty(),
            connections: u32::from(unused.is_empty()),
            handoffs: 3,
            failures: 1,
            bytes_per_second: rate,
            unused: unused.into(),
            opened_by: String::new(),
        }
    }

    fn workers() -> Vec<Answered> {
        let paths = vec![path("shm", Some(8.14e9), ""), path("tcp", Some(2.5e8), "in reserve behind shm")];
        // The peer with id 9 has left the cluster.
        let peers = vec![v1::Peer { id: 2, paths: paths.clone() }, v1::Peer { id: 9, paths }];
        let status = v1::StatusResponse { peers, ..Default::default() };
        let gone = anyhow::anyhow!("no answer");
        vec![asked(1, Role::Prefill, Ok(status)), asked(2, Role::Decode, Err(gone))]
    }

    #[test]
    fn pairs_stand_below_the_workers_in_plain_words() {
        let text = table(&workers());
        let last: Vec<&str> = text.lines().last().unwrap().split_whitespace().collect();
        let (from, to) = (WorkerId(1).to_string(), WorkerId(2).to_string());
        let want = [&from, &to, "shm", "8.1", "GB/s", "6", "tcp", "(250.0", "MB/s):", "in", "reserve", "behind", "shm"];
        assert_eq!(last, want);
        assert!(text.contains("unreachable: no answer"));
        assert!(!table(&workers()[1..]).contains("KV FROM"));
    }

    #[test]
    fn a_gpus_pool_is_said_to_be_open_by_something_and_why_by_nothing_better() {
        let said = |opened_by: &str, pool_by: &str| {
            let path = v1::Path { opened_by: opened_by.into(), ..path("cuda-ipc", None, "") };
            let peers = vec![v1::Peer { id: 2, paths: vec![path] }];
            let status = |status| asked(2, Role::Decode, Ok(status));
            let decode = status(v1::StatusResponse { pool_by: pool_by.into(), ..Default::default() });
            let prefill = asked(1, Role::Prefill, Ok(v1::StatusResponse { peers, ..Default::default() }));
            table(&[prefill, decode]).lines().last().unwrap().split_once("3  ").unwrap().1.to_owned()
        };
        assert_eq!(said("descriptor", "descriptor, fabric handle"), "cuda-ipc by descriptor");
        let legacy = "legacy CUDA IPC handle";
        let why = "legacy CUDA IPC handle: GPU, allocation: not supported";
        assert_eq!(said(legacy, why), format!("cuda-ipc by {why}"));
        assert_eq!(said(legacy, ""), format!("cuda-ipc by {legacy}"), "of a version that does not say");
        assert_eq!(said("", why), "");
    }

    #[test]
    fn json_has_every_path() {
        let json = json(&workers());
        assert_eq!(json["workers"][1]["state"], "unreachable");
        assert_eq!(json["pairs"].as_array().unwrap().len(), 1);
        let pair = &json["pairs"][0];
        assert_eq!((&pair["over"], &pair["paths"][0]["unused"]), (&Value::from("shm"), &Value::Null));
        assert_eq!(pair["paths"][1]["unused"], "in reserve behind shm");
        assert_eq!(pair["paths"][1]["bytes_per_second"], 2.5e8);
    }
}
