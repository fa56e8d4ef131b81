//! What operators ask of `baton up`: other numbers of workers, and that one goes.

use std::collections::BTreeMap;
use std::sync::Arc;

use baton_cluster::{Role, View};
use baton_proto::v1::{self, supervisor_server};
use baton_types::WorkerId;
use tokio::sync::{mpsc, oneshot};
use tonic::{Response, Status};

use super::{Kind, Leaving, Supervisor, terminate};

/// Most workers of one role on one machine.
const MAX_WORKERS: u32 = 64;

/// A request of an operator, answered when it is met.
pub(super) struct Request {
    what: What,
    done: oneshot::Sender<Result<v1::ScaleResponse, Status>>,
}

pub(super) enum What {
    /// So many processes of each kind.
    Scale { wanted: BTreeMap<Kind, usize>, at_once: bool },
    /// One worker less, or another in its place.
    Drain { worker: WorkerId, pid: u32, replace: bool, at_once: bool },
}

impl Supervisor {
    /// Begins what an operator asks for.
    pub(super) fn take(&mut self, request: Request) {
        let at_once = match &request.what {
            What::Scale { wanted, at_once } => {
                if let Err(refused) = self.check_stores(wanted).and_then(|()| self.check_room(wanted)) {
                    let _ = request.done.send(Err(refused));
                    return;
                }
                self.supersede(wanted);
                self.wanted.extend(wanted.iter().map(|(kind, count)| (*kind, *count)));
                *at_once
            }
            What::Drain { worker, pid, replace, at_once } => {
                let at_once = *at_once;
                if let Err(refused) = self.drain(*worker, *pid, *replace) {
                    // The caller may have disconnected; so below.
                    let _ = request.done.send(Err(refused));
                    return;
                }
                at_once
            }
        };
        if at_once {
            let _ = request.done.send(Ok(self.goal()));
        } else {
            self.pending.push(request);
        }
    }

    /// Refuses KV stores where there is nothing to start them by.
    fn check_stores(&self, wanted: &BTreeMap<Kind, usize>) -> Result<(), Status> {
        if wanted.get(&Kind::KvStore).is_some_and(|count| *count > 0) && !self.args.contains_key(&Kind::KvStore) {
            return Err(Status::failed_precondition(
                "`baton up` starts KV stores only where all workers compute on the CPU; start `baton kv-store` beside, with --computed-by as \
                 the workers' log names their backend",
            ));
        }
        Ok(())
    }

    /// Refuses numbers of workers for which the GPUs have no room.
    fn check_room(&self, wanted: &BTreeMap<Kind, usize>) -> Result<(), Status> {
        let Some(devices) = self.devices else { return Ok(()) };
        let count = |kind| wanted.get(kind).or_else(|| self.wanted.get(kind)).copied().unwrap_or_default();
        let mut taken = Vec::new();
        for (kind, ranks) in &self.ranks {
            for _ in 0..count(kind) {
                let Some(gpus) = devices.pick(&taken, *ranks) else {
                    let shares = devices.shares();
                    return Err(Status::invalid_argument(format!(
                        "the GPUs have no room for so many workers: each was divided among {shares} when the cluster was started; \
                         start it with as many workers as there will be at most"
                    )));
                };
                taken.push(gpus);
            }
        }
        Ok(())
    }

    /// Fails the requests that wait for another number of the same kinds: it will not be reached any more.
    fn supersede(&mut self, wanted: &BTreeMap<Kind, usize>) {
        let differs = |request: &mut Request| match &request.what {
            What::Scale { wanted: before, .. } => {
                before.iter().any(|(kind, count)| wanted.get(kind).is_some_and(|new| new != count))
            }
            What::Drain { .. } => false,
        };
        for request in self.pending.extract_if(.., differs) {
            let _ = request.done.send(Err(Status::aborted("a later request asked for another number of workers")));
        }
    }

    fn drain(&mut self, worker: WorkerId, pid: u32, replace: bool) -> Result<(), Status> {
        let its = self.processes.iter().find(|p| p.pid == pid && p.kind != Kind::Router && p.stays());
        let process =
            its.ok_or_else(|| Status::not_found("no worker of this `baton up` is that process, or it ends already"))?;
        let kind = process.kind;
        let wanted = self.wanted.get(&kind).copied().unwrap_or_default();
        if kind == Kind::Decode && wanted <= 1 && !replace {
            return Err(Status::failed_precondition(
                "it is the last decode worker, and a cluster needs one; use --replace",
            ));
        }
        if replace && self.room(kind).is_none() {
            return Err(Status::failed_precondition(
                "no GPU has room for another worker beside it; scale down and up instead",
            ));
        }
        tracing::info!(process = kind.name(), pid, replace, "is to be drained");
        let Some(process) = self.processes.iter_mut().find(|p| p.pid == pid) else { return Ok(()) };
        process.leaving = Some(Leaving { worker, replaced: replace });
        if !replace {
            self.supersede(&BTreeMap::from([(kind, wanted.saturating_sub(1))]));
            self.wanted.insert(kind, wanted.saturating_sub(1));
        }
        Ok(())
    }

    /// Tells the processes to stop that are to be drained, where enough others serve: requests never find nobody.
    pub(super) fn retire(&mut self) {
        let view = Arc::clone(&*self.views.borrow());
        let leave = self.processes.iter().filter_map(|p| p.leaving);
        let leave: Vec<WorkerId> = leave.map(|leaving| leaving.worker).collect();
        for process in self.processes.iter_mut().filter(|p| !p.stopping) {
            let (Some(leaving), Some(role)) = (process.leaving, process.kind.role()) else { continue };
            let wanted = self.wanted.get(&process.kind).copied().unwrap_or_default();
            let needed = if leaving.replaced { wanted } else { wanted.min(1) };
            if others(&view, role, &leave) >= needed {
                tracing::info!(process = process.kind.name(), pid = process.pid, "draining");
                terminate(process);
            }
        }
    }

    /// How many workers there will be.
    fn goal(&self) -> v1::ScaleResponse {
        let count = |kind| self.wanted.get(&kind).copied().unwrap_or_default() as u32;
        let (prefill, decode) = (count(Kind::Prefill), count(Kind::Decode));
        v1::ScaleResponse { prefill, decode, kv_store: Some(count(Kind::KvStore)) }
    }

    /// Answers the requests that are met: the wanted number runs and no process of the kind, or not the one named, is still draining.
    pub(super) fn answer_requests(&mut self) {
        let processes = &self.processes;
        let met = |request: &mut Request| match &request.what {
            What::Scale { wanted, .. } => {
                wanted.iter().all(|(kind, count)| processes.iter().filter(|p| p.kind == *kind).count() == *count)
            }
            What::Drain { pid, .. } => processes.iter().all(|p| p.pid != *pid),
        };
        let goal = self.goal();
        for request in self.pending.extract_if(.., met) {
            let _ = request.done.send(Ok(goal));
        }
    }
}

/// How many workers serve, without those that leave.
fn others(view: &View, role: Role, leave: &[WorkerId]) -> usize {
    view.serving(role).filter(|member| !leave.contains(&member.id)).count()
}

/// The gRPC service `Supervisor`.
pub(super) struct Service {
    pub requests: mpsc::Sender<Request>,
}

impl Service {
    async fn ask(&self, what: What) -> Result<Response<v1::ScaleResponse>, Status> {
        let stopping = || Status::unavailable("the cluster is stopping");
        let (done, answer) = oneshot::channel();
        self.requests.send(Request { what, done }).await.map_err(|_| stopping())?;
        answer.await.map_err(|_| stopping())?.map(Response::new)
    }
}

#[tonic::async_trait]
impl supervisor_server::Supervisor for Service {
    async fn scale(&self, request: tonic::Request<v1::ScaleRequest>) -> Result<Response<v1::ScaleResponse>, Status> {
        let v1::ScaleRequest { prefill, decode, kv_store, at_once } = request.into_inner();
        for (field, count) in [("prefill", prefill), ("decode", decode), ("kv_store", kv_store)] {
            if count.is_some_and(|n| n > MAX_WORKERS) {
                return Err(Status::invalid_argument(format!(
                    "{field} is above {MAX_WORKERS}, the most for one machine"
                )));
            }
        }
        if decode == Some(0) {
            return Err(Status::invalid_argument("decode is 0; a cluster needs at least one decode worker"));
        }
        let wanted = [(Kind::Prefill, prefill), (Kind::Decode, decode), (Kind::KvStore, kv_store)];
        let wanted = wanted.into_iter().filter_map(|(kind, n)| n.map(|n| (kind, n as usize))).collect();
        self.ask(What::Scale { wanted, at_once }).await
    }

    async fn drain(&self, request: tonic::Request<v1::DrainRequest>) -> Result<Response<v1::ScaleResponse>, Status> {
        let v1::DrainRequest { pid, replace, at_once, worker } = request.into_inner();
        self.ask(What::Drain { worker: WorkerId(worker), pid, replace, at_once }).await
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use baton_cluster::{Member, ViewReceiver};

    use super::super::devices::Devices;
    use super::super::{Process, member};
    use super::*;

    fn supervisor() -> Supervisor {
        let mut supervisor = Supervisor::new("nothing-is-started".into(), None);
        supervisor.scale(Kind::Prefill, 1);
        supervisor.scale(Kind::Decode, 1);
        supervisor
    }

    fn ask(supervisor: &mut Supervisor, what: What) -> oneshot::Receiver<Result<v1::ScaleResponse, Status>> {
        let (done, answer) = oneshot::channel();
        supervisor.take(Request { what, done });
        answer
    }

    fn scale(kind: Kind, count: usize, at_once: bool) -> What {
        What::Scale { wanted: BTreeMap::from([(kind, count)]), at_once }
    }

    #[test]
    fn a_request_that_another_takes_the_place_of_fails() {
        let mut supervisor = supervisor();
        let mut first = ask(&mut supervisor, scale(Kind::Decode, 2, false));
        let mut other_kind = ask(&mut supervisor, scale(Kind::Prefill, 4, false));
        let mut same = ask(&mut supervisor, scale(Kind::Decode, 2, false));
        assert!(first.try_recv().is_err(), "it waits");
        let second = ask(&mut supervisor, scale(Kind::Decode, 3, true)).try_recv().unwrap().unwrap();
        assert_eq!((second.prefill, second.decode), (4, 3));
        for superseded in [&mut first, &mut same] {
            assert_eq!(superseded.try_recv().unwrap().unwrap_err().code(), tonic::Code::Aborted);
        }
        assert!(other_kind.try_recv().is_err());
    }

    #[test]
    fn a_process_that_is_none_of_its_workers_is_not_drained() {
        let mut supervisor = supervisor();
        let drain = What::Drain { worker: WorkerId(1), pid: std::process::id(), replace: false, at_once: true };
        let refused = ask(&mut supervisor, drain).try_recv().unwrap().unwrap_err();
        assert_eq!(refused.code(), tonic::Code::NotFound);
        assert_eq!(supervisor.goal().decode, 1);
    }

    #[test]
    fn stores_are_scaled_where_there_is_a_way_to_start_them() {
        let mut supervisor = supervisor();
        let refused = ask(&mut supervisor, scale(Kind::KvStore, 1, true)).try_recv().unwrap().unwrap_err();
        assert_eq!(refused.code(), tonic::Code::FailedPrecondition);
        assert!(refused.message().contains("--computed-by"), "{refused}");
        assert_eq!(supervisor.goal().kv_store, Some(0));
        // None is what there is.
        assert!(ask(&mut supervisor, scale(Kind::KvStore, 0, true)).try_recv().unwrap().is_ok());
        supervisor.define(Kind::KvStore, Vec::new());
        let said = ask(&mut supervisor, scale(Kind::KvStore, 2, true)).try_recv().unwrap().unwrap();
        assert_eq!((said.prefill, said.decode, said.kv_store), (1, 1, Some(2)));
    }

    /// A process of `supervisor`; its pid.
    fn process(supervisor: &mut Supervisor, kind: Kind) -> u32 {
        let child = tokio::process::Command::new("sleep").arg("60").kill_on_drop(true).spawn().unwrap();
        let pid = child.id().unwrap();
        supervisor.processes.push(Process {
            kind,
            child,
            pid,
            started: Instant::now(),
            stopping: false,
            leaving: None,
            gpus: None,
            number: 0,
        });
        pid
    }

    #[test]
    fn the_gpus_hold_only_so_many_workers() {
        let mut supervisor = supervisor();
        let devices = Devices::new(4, &[2, 1]).unwrap();
        supervisor.spread(devices, BTreeMap::from([(Kind::Prefill, 2), (Kind::Decode, 1)]));
        for (prefill, decode, fits) in
            [(1, 1, true), (1, 2, true), (1, 3, false), (2, 0, true), (2, 1, false), (0, 4, true)]
        {
            let wanted = BTreeMap::from([(Kind::Prefill, prefill), (Kind::Decode, decode)]);
            let answer = ask(&mut supervisor, What::Scale { wanted, at_once: true }).try_recv().unwrap();
            assert_eq!(answer.is_ok(), fits, "{prefill} {decode}: {answer:?}");
        }
    }

    /// A view in which decode workers of these ids serve.
    fn serving(ids: &[u64]) -> ViewReceiver {
        let address = "127.0.0.1:1".parse().unwrap();
        let any = member(address, address, None);
        let member = |id: &u64| Member { id: WorkerId(*id), role: Role::Decode, ..any.clone() };
        let view = View { members: ids.iter().map(member).collect(), ..View::default() };
        tokio::sync::watch::channel(Arc::new(view)).1
    }

    #[tokio::test]
    async fn a_drained_process_stops_once_enough_others_serve() {
        // Whether it is replaced, workers that are wanted before, who serves, and whether it is told to stop then.
        for (replace, before, ids, stops) in [
            (true, 1, vec![7], false),
            (true, 1, vec![7, 8], true),
            (true, 2, vec![7, 8], false),
            (true, 2, vec![7, 8, 9], true),
            (false, 2, vec![7], false),
            (false, 2, vec![7, 8], true),
            (false, 3, vec![7, 8], true),
        ] {
            let mut supervisor = supervisor();
            supervisor.scale(Kind::Decode, before);
            let pid = process(&mut supervisor, Kind::Decode);
            let drain = What::Drain { worker: WorkerId(7), pid, replace, at_once: true };
            ask(&mut supervisor, drain).try_recv().unwrap().unwrap();
            supervisor.views = serving(&ids);
            supervisor.retire();
            assert_eq!(supervisor.processes[0].stopping, stops, "{replace} {before} {ids:?}");
            // It does not count any more, so another is started if one is wanted.
            assert_eq!(supervisor.count(Kind::Decode), 0);
        }
    }
}
