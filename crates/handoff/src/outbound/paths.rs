//! The paths to one decode worker: which transports there are, how fast each was, and which ones are paused.
//!
//! Pure: no clock, no I/O. The sender keeps one [`Paths`] per decode worker, asks it before each session, and tells it how sessions and
//! handoffs ended.
//!
//! How a path is chosen:
//! - A path that fails is paused. Each further failure in a row doubles the pause. After the pause the path is ready again.
//! - Of the ready paths the first in the order given to [`Paths::new`] is taken, unless another was measured to be clearly faster.
//! - Two network paths are compared only once both were measured. So where speed decides, each of them gets some handoffs. Shared memory
//!   and copies between GPUs are not left for such a trial.
//! - Speed is a moving average: bytes over the seconds spent carrying them. It counts only once several handoffs were measured.

use std::time::{Duration, Instant};

use baton_types::OpenedBy;

use super::done::TransferStats;
use super::meter::Meter;
use crate::error::TransferError;
use crate::limits::TransportKind;

/// Pause of a path that has failed once.
const FIRST_PAUSE: Duration = Duration::from_secs(5);
/// The longest pause.
const MAX_PAUSE: Duration = Duration::from_secs(300);
/// Another path is preferred if its rate is more than this many times the rate of the first one.
const FASTER: f64 = 1.25;
/// Share of the older measurements that is kept with each new one.
const KEPT: f64 = 0.8;
/// Handoffs in a row with changed bytes that count as one failure. A single one may be chance, and says nothing against the path.
const CORRUPTED: u32 = 3;
/// Handoffs after which a path counts as measured.
const MEASURED: u64 = 8;

/// What a sender knows of one path to a decode worker, for people to read.
#[derive(Clone, PartialEq, Debug)]
pub struct PathReport {
    /// The path's transport.
    pub transport: TransportKind,
    /// Whether a session over it is open.
    pub in_use: bool,
    /// Connections that carry blocks in that session; 0 when the path is not in use.
    pub connections: usize,
    /// Verified handoffs that it carried.
    pub handoffs: u64,
    /// How often it failed with handoffs under way, or could not be set up.
    pub failures: u64,
    /// How fast blocks arrive over it: a moving average over handoffs. Counts only the time in which blocks were on their way or being
    /// verified.
    pub bytes_per_second: Option<f64>,
    /// Why it is not in use; None when it is.
    pub unused: Option<String>,
    /// What the peer's pool in a device's memory was opened by, in the open session.
    pub opened_by: Option<OpenedBy>,
}

/// One transport to one decode worker.
#[derive(Clone, Debug)]
struct Path {
    transport: TransportKind,
    /// Why it can never be used; None when it can.
    barred: Option<String>,
    /// Moving sums over handoffs: bytes moved, and seconds they took.
    bytes: f64,
    seconds: f64,
    handoffs: u64,
    failures: u64,
    /// Failures since it last carried a handoff.
    in_a_row: u32,
    last_failure: Option<(Instant, String)>,
    /// Handoffs with changed bytes since the path last carried a verified one, or since they last counted as a failure.
    corrupted: u32,
}

impl Path {
    /// When its pause ends; None when it has carried a handoff since its last failure.
    fn paused_until(&self) -> Option<Instant> {
        let (at, _) = self.last_failure.as_ref().filter(|_| self.in_a_row > 0)?;
        let pause = FIRST_PAUSE * 2u32.saturating_pow(self.in_a_row - 1).min(1 << 16);
        Some(*at + pause.min(MAX_PAUSE))
    }

    fn rate(&self) -> Option<f64> {
        (self.seconds > 0.0).then(|| self.bytes / self.seconds)
    }

    /// Its rate in bytes per second, once enough handoffs were measured.
    fn measured(&self) -> Option<f64> {
        self.rate().filter(|_| self.handoffs >= MEASURED)
    }

    fn is_paused(&self, now: Instant) -> bool {
        self.paused_until().is_some_and(|until| now < until)
    }
}

/// The paths to one decode worker.
#[derive(Clone, Debug)]
pub struct Paths {
    /// In the order in which they are tried when nothing is known of them.
    paths: Vec<Path>,
    /// Whether a path may be preferred for its speed.
    compares: bool,
    /// Transport of the open session, and its number of connections.
    in_use: Option<(TransportKind, usize)>,
    /// What the open session has opened the worker's pool by, if that is in a device's memory.
    opened_by: Option<OpenedBy>,
    /// The worker does not know yet that a session which may have mapped its pool has ended.
    untold: bool,
}

impl Paths {
    /// Paths over these transports, the one to try first in front. Each comes with the reason if it can never be used. `compares`: whether
    /// speed may decide between them.
    pub fn new(paths: impl IntoIterator<Item = (TransportKind, Option<String>)>, compares: bool) -> Paths {
        let path = |(transport, barred)| Path {
            transport,
            barred,
            bytes: 0.0,
            seconds: 0.0,
            handoffs: 0,
            failures: 0,
            in_a_row: 0,
            last_failure: None,
            corrupted: 0,
        };
        Paths { paths: paths.into_iter().map(path).collect(), compares, in_use: None, opened_by: None, untold: false }
    }

    /// The transports to try, best first. Paused ones come last, the one whose pause ends first before the others: better than nothing.
    pub fn order(&self, now: Instant) -> Vec<TransportKind> {
        let usable = self.paths.iter().filter(|path| path.barred.is_none());
        let (mut paused, mut ready): (Vec<&Path>, Vec<&Path>) = usable.partition(|path| path.is_paused(now));
        paused.sort_by_key(|path| path.paused_until());
        let best = (1..ready.len()).fold(0, |best, at| if self.prefers(ready[at], ready[best]) { at } else { best });
        if best > 0 {
            let best = ready.remove(best);
            ready.insert(0, best);
        }
        ready.into_iter().chain(paused).map(|path| path.transport).collect()
    }

    fn prefers(&self, path: &Path, to: &Path) -> bool {
        self.compares
            && match (path.measured(), to.measured()) {
                (Some(rate), Some(other)) => rate > other * FASTER,
                (None, Some(_)) => !matches!(to.transport, TransportKind::Shm | TransportKind::CudaIpc),
                _ => false,
            }
    }

    /// Why no path is usable; None when one is.
    pub fn barred(&self) -> Option<&str> {
        let all = self.paths.iter().all(|path| path.barred.is_some());
        self.paths.first().filter(|_| all)?.barred.as_deref()
    }

    /// A session has begun. The worker takes that as the end of all sessions before it.
    pub fn begun(&mut self, transport: TransportKind, connections: usize) {
        (self.in_use, self.opened_by) = (Some((transport, connections)), None);
        self.untold = false;
    }

    /// The session has opened the worker's pool in a device's memory.
    pub fn opened(&mut self, by: OpenedBy) {
        self.opened_by = Some(by);
    }

    /// The session has ended, and has unmapped the worker's pool. `near`: it ran over a unix socket, so the worker waits until it is told
    /// that, or until this process ends.
    pub fn over(&mut self, near: bool) {
        self.in_use = None;
        self.untold |= near;
    }

    /// The worker knows that all sessions have ended, or is gone, or has been told in vain for too long.
    pub fn told(&mut self) {
        self.untold = false;
    }

    /// Whether the worker does not know yet that a session has unmapped its pool.
    pub fn is_untold(&self) -> bool {
        self.untold
    }

    /// Whether the open session uses another path than would be taken now.
    pub fn would_change(&self, now: Instant) -> bool {
        self.in_use.is_some_and(|(transport, _)| self.order(now).first() != Some(&transport))
    }

    /// Whether a session is open.
    pub fn is_used(&self) -> bool {
        self.in_use.is_some()
    }

    fn is_over(&self, transport: TransportKind) -> bool {
        self.in_use.is_some_and(|(of, _)| of == transport)
    }

    /// A handoff over this path has ended. `meter` says what the session has carried since the last one.
    pub fn ended(
        &mut self,
        transport: TransportKind,
        outcome: &Result<TransferStats, TransferError>,
        meter: &mut Meter,
        now: Instant,
    ) {
        match outcome {
            Ok(_) => {
                let (bytes, time) = meter.take(now);
                self.carried(transport, bytes, time);
            }
            Err(error @ TransferError::Verify { .. }) => self.blamed(transport, error, now),
            Err(_) => {}
        }
    }

    /// A path could not be set up, broke with handoffs under way, or changed bytes. If there is another path, this one is avoided for a
    /// while, though not after a single change of bytes.
    pub fn blamed(&mut self, transport: TransportKind, error: &TransferError, now: Instant) {
        match error.is_corruption() {
            true => self.corrupted(transport, error.to_string(), now),
            false => self.failed(transport, error.to_string(), now),
        }
    }

    /// A path could not be set up, or broke with handoffs under way.
    fn failed(&mut self, transport: TransportKind, why: String, now: Instant) {
        if let Some(path) = self.find(transport) {
            path.failures += 1;
            path.in_a_row = path.in_a_row.saturating_add(1);
            path.last_failure = Some((now, why));
        }
    }

    /// Bytes of a handoff were changed on this path.
    fn corrupted(&mut self, transport: TransportKind, why: String, now: Instant) {
        let Some(path) = self.find(transport) else { return };
        path.corrupted += 1;
        if path.corrupted >= CORRUPTED {
            path.corrupted = 0;
            self.failed(transport, why, now);
        }
    }

    /// A handoff over this path was verified. Since the last one, `bytes` bytes were carried in `time`.
    pub fn carried(&mut self, transport: TransportKind, bytes: u64, time: Duration) {
        if let Some(path) = self.find(transport) {
            path.handoffs += 1;
            path.in_a_row = 0;
            path.corrupted = 0;
            if bytes > 0 {
                path.bytes = path.bytes * KEPT + bytes as f64;
                path.seconds = path.seconds * KEPT + time.as_secs_f64();
            }
        }
    }

    fn find(&mut self, transport: TransportKind) -> Option<&mut Path> {
        self.paths.iter_mut().find(|path| path.transport == transport)
    }

    /// A report on every path, for people to read.
    pub fn report(&self, now: Instant) -> Vec<PathReport> {
        let report = |path: &Path| PathReport {
            transport: path.transport,
            in_use: self.is_over(path.transport),
            connections: self
                .in_use
                .filter(|(transport, _)| *transport == path.transport)
                .map_or(0, |(_, count)| count),
            handoffs: path.handoffs,
            failures: path.failures,
            bytes_per_second: path.rate(),
            unused: (!self.is_over(path.transport)).then(|| self.unused(path, now)),
            opened_by: self.opened_by.filter(|_| self.is_over(path.transport)),
        };
        self.paths.iter().map(report).collect()
    }

    fn unused(&self, path: &Path, now: Instant) -> String {
        if let Some(why) = &path.barred {
            return why.clone();
        }
        let failure = path.last_failure.as_ref().zip(path.paused_until().filter(|until| now < *until));
        if let Some(((at, why), until)) = failure {
            let (ago, left) = (now.saturating_duration_since(*at).as_secs(), (until - now).as_secs() + 1);
            return format!("failed {ago} s ago: {why}; tried again in {left} s at the earliest");
        }
        let other = self.paths.iter().find(|other| self.is_over(other.transport));
        match other {
            None => "no session now".to_owned(),
            Some(other)
                if path.measured().zip(other.measured()).is_some_and(|(rate, other)| rate <= other * FASTER) =>
            {
                format!("not clearly faster than {}", other.transport.as_str())
            }
            Some(other) => format!("in reserve behind {}", other.transport.as_str()),
        }
    }
}

#[cfg(test)]
mod tests {
    use TransportKind::{CudaIpc, Shm, Tcp, Ucx};
    use baton_types::{BlockId, Epoch, WorkerId};

    use super::*;

    const S: Duration = Duration::from_secs(1);

    #[test]
    fn a_worker_is_told_by_the_next_session_or_by_itself() {
        let mut paths = all();
        paths.begun(Tcp, 1);
        paths.over(false);
        assert!(!paths.is_untold(), "from another host nothing is mapped");
        paths.begun(Shm, 1);
        paths.over(true);
        paths.over(false);
        assert!(paths.is_untold(), "a session that could not begin has told nothing");
        paths.begun(Tcp, 1);
        assert!(!paths.is_untold());
        paths.over(true);
        paths.told();
        assert!(!paths.is_untold());
    }

    #[test]
    fn what_a_pool_was_opened_by_is_told_of_the_open_session_alone() {
        let (mut paths, t) = (Paths::new([(CudaIpc, None), (Tcp, None)], true), Instant::now());
        let told = |paths: &Paths| paths.report(t).iter().map(|path| path.opened_by).collect::<Vec<_>>();
        paths.begun(CudaIpc, 1);
        assert_eq!(told(&paths), [None, None], "not yet");
        paths.opened(OpenedBy::Legacy);
        assert_eq!(told(&paths), [Some(OpenedBy::Legacy), None]);
        paths.over(true);
        assert_eq!(told(&paths), [None, None]);
        paths.begun(Tcp, 1);
        assert_eq!(told(&paths), [None, None], "it says nothing of the session before");
    }

    /// Carries as many handoffs as a measurement needs.
    fn measure(paths: &mut Paths, transport: TransportKind, bytes: u64) {
        (0..MEASURED).for_each(|_| paths.carried(transport, bytes, S));
    }

    fn all() -> Paths {
        Paths::new([(Shm, None), (Ucx, None), (Tcp, None)], true)
    }

    #[test]
    fn the_next_one_stands_in_for_a_path_that_fails_until_its_pause_is_over() {
        let (mut paths, t) = (all(), Instant::now());
        assert_eq!(paths.order(t), [Shm, Ucx, Tcp]);
        paths.begun(Shm, 1);
        paths.failed(Shm, "cut".into(), t);
        paths.over(true);
        assert_eq!(paths.order(t), [Ucx, Tcp, Shm]);
        paths.begun(Ucx, 1);
        assert!(!paths.would_change(t + S * 4));
        assert!(paths.would_change(t + S * 5));
        assert_eq!(paths.order(t + S * 5), [Shm, Ucx, Tcp]);
    }

    #[test]
    fn pauses_double_up_to_a_bound_and_end_with_a_handoff() {
        let (mut paths, mut t) = (all(), Instant::now());
        for pause in [5, 10, 20, 40, 80, 160, 300, 300] {
            paths.failed(Shm, "cut".into(), t);
            assert_eq!(paths.order(t + S * pause - S), [Ucx, Tcp, Shm], "{pause}");
            t += S * pause;
            assert_eq!(paths.order(t)[0], Shm, "{pause}");
        }
        paths.carried(Shm, 1, S);
        paths.failed(Shm, "cut".into(), t);
        assert_eq!(paths.order(t + S * 5)[0], Shm);
        for _ in 0..100 {
            paths.failed(Shm, "cut".into(), t);
        }
        assert_eq!(paths.order(t + MAX_PAUSE)[0], Shm);
    }

    #[test]
    fn changed_bytes_are_a_failure_when_they_come_in_a_row() {
        let (mut paths, t) = (all(), Instant::now());
        for _ in 0..5 {
            paths.corrupted(Shm, "flipped".into(), t);
            paths.corrupted(Shm, "flipped".into(), t);
            assert_eq!(paths.order(t)[0], Shm, "chance");
            paths.carried(Shm, 1, S);
        }
        (0..CORRUPTED).for_each(|_| paths.corrupted(Shm, "flipped".into(), t));
        assert_eq!(paths.order(t), [Ucx, Tcp, Shm]);
        assert_eq!(paths.report(t)[0].failures, 1);
    }

    #[test]
    fn only_a_handoff_that_is_verified_or_changed_says_something_of_its_path() {
        let (mut paths, mut meter, t) = (all(), Meter::default(), Instant::now());
        let (epoch, peer) = (Epoch(1), WorkerId(1));
        meter.submitted(epoch, 1000, t);
        meter.flushed(t + S);
        paths.ended(Shm, &Err(TransferError::Deadline { epoch, peer, doing: "waiting" }), &mut meter, t + S);
        assert_eq!((paths.report(t)[0].handoffs, paths.report(t)[0].failures), (0, 0));
        paths.ended(
            Shm,
            &Ok(TransferStats { bytes: 1000, seconds: 1.0, verify_seconds: 0.1, transport: Shm, writes: 1, slices: 1 }),
            &mut meter,
            t + S,
        );
        assert_eq!((paths.report(t)[0].handoffs, paths.report(t)[0].bytes_per_second), (1, Some(1000.0)));
        paths.blamed(Shm, &TransferError::PeerLost { peer, cause: "cut".into() }, t);
        assert_eq!(paths.report(t)[0].failures, 1);
        let changed = TransferError::Verify { epoch, peer, group: 0, index: 0, block: BlockId(0), want: 1, got: 2 };
        (0..CORRUPTED).for_each(|_| paths.ended(Shm, &Err(changed.clone()), &mut meter, t + S));
        assert_eq!(paths.report(t)[0].failures, 2);
    }

    #[test]
    fn paused_paths_are_better_than_none_and_barred_ones_are_not() {
        let mut paths = Paths::new([(Shm, Some("another host".into())), (Ucx, None), (Tcp, None)], true);
        let t = Instant::now();
        paths.failed(Tcp, "refused".into(), t);
        paths.failed(Ucx, "refused".into(), t + S);
        assert_eq!(paths.order(t + S * 2), [Tcp, Ucx], "the first to come back first");
        assert_eq!(paths.barred(), None);
        let none = Paths::new([(Shm, Some("another host".into()))], false);
        assert_eq!((none.order(t), none.barred()), (vec![], Some("another host")));
    }

    #[test]
    fn network_paths_are_measured_and_the_clearly_faster_one_is_taken() {
        let mut paths = Paths::new([(Shm, Some("another host".into())), (Ucx, None), (Tcp, None)], true);
        let t = Instant::now();
        paths.carried(Ucx, 1000, S);
        assert_eq!(paths.order(t), [Ucx, Tcp], "one handoff is no measurement");
        measure(&mut paths, Ucx, 1000);
        assert_eq!(paths.order(t), [Tcp, Ucx], "not measured yet");
        measure(&mut paths, Tcp, 1200);
        assert_eq!(paths.order(t), [Ucx, Tcp], "not clearly faster");
        measure(&mut paths, Tcp, 3000);
        assert_eq!(paths.order(t), [Tcp, Ucx]);
        // A sender that asks for a transport is not given another one for its speed.
        let mut asked = Paths::new([(Ucx, None), (Tcp, None)], false);
        measure(&mut asked, Ucx, 1000);
        measure(&mut asked, Tcp, 9000);
        assert_eq!(asked.order(t), [Ucx, Tcp]);
    }

    #[test]
    fn shared_memory_is_not_left_to_try_others() {
        let (mut paths, t) = (all(), Instant::now());
        measure(&mut paths, Shm, 1000);
        assert_eq!(paths.order(t), [Shm, Ucx, Tcp]);
        measure(&mut paths, Tcp, 2000);
        assert_eq!(paths.order(t), [Tcp, Shm, Ucx], "by its measure, which it got while standing in");
    }

    #[test]
    fn the_average_moves() {
        let mut paths = all();
        paths.carried(Shm, 1000, S);
        paths.carried(Shm, 2000, S);
        // A handoff without bytes of its own leaves the average as it is.
        paths.carried(Shm, 0, Duration::ZERO);
        let report = &paths.report(Instant::now())[0];
        assert_eq!((report.bytes_per_second, report.handoffs), (Some(2800.0 / 1.8), 3));
    }

    #[test]
    fn reports_say_why_a_path_is_not_used() {
        let mut paths = Paths::new([(Shm, None), (Ucx, Some("not set up".into())), (Tcp, None)], true);
        let t = Instant::now();
        let why = |paths: &Paths, now| paths.report(now).into_iter().map(|path| path.unused).collect::<Vec<_>>();
        assert_eq!(why(&paths, t)[0].as_deref(), Some("no session now"));
        paths.begun(Shm, 1);
        assert_eq!(why(&paths, t), [None, Some("not set up".into()), Some("in reserve behind shm".into())]);
        paths.failed(Shm, "lost w1: it closed the connection".into(), t);
        paths.begun(Tcp, 1);
        let failed = "failed 2 s ago: lost w1: it closed the connection; tried again in 3 s at the earliest";
        assert_eq!(why(&paths, t + S * 2 + S / 2), [Some(failed.into()), Some("not set up".into()), None]);
        measure(&mut paths, Tcp, 1000);
        measure(&mut paths, Shm, 1100);
        assert_eq!(why(&paths, t + S * 9)[0].as_deref(), Some("not clearly faster than tcp"));
    }
}
