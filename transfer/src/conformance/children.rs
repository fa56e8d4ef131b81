//! Processes that tests stop and kill: this test binary again, in one of the roles below. They exchange lines over standard input and
//! output.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};

use rustix::process::{Pid, Signal, WaitOptions};

use baton_types::hex;

use super::*;

/// Prefix of the lines that are meant for the parent, since a test binary prints others.
const MARK: &str = "@ ";
const ROLE: &str = "BATON_TRANSFER_TEST_ROLE";
/// Environment variable: the number of TCP connections.
const CONNECTIONS: &str = "BATON_TRANSFER_TEST_CONNECTIONS";
const TLS: &str = "BATON_TRANSFER_TEST_TLS";

/// The command that runs this binary in a role.
fn command(role: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    match setup() {
        Some(setup) => command.args(&setup.child),
        None => command.args(["--exact", "conformance::children::started", "--nocapture", "--test-threads=1"]),
    };
    command.env(ROLE, role).env(device::VARIABLE, devices().encode());
    command.env(CONNECTIONS, connections().to_string());
    if tls().is_some() {
        command.env(TLS, "");
    }
    command
}

/// A child, and the lines exchanged with it. Killed when dropped.
pub(super) struct Process {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Process {
    pub(super) fn start(role: &str) -> Process {
        let mut child = command(role).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (input, output) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Process { child, input, output }
    }

    pub(super) fn say(&mut self, line: &str) {
        writeln!(self.input, "{line}").unwrap();
    }

    /// The child's next line.
    pub(super) fn hear(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert_ne!(self.output.read_line(&mut line).unwrap(), 0, "the child ended");
            if let Some((_, ours)) = line.split_once(MARK) {
                return ours.trim().to_owned();
            }
        }
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Stops it, and waits until it has stopped.
    pub(super) fn freeze(&self) {
        rustix::process::kill_process(self.pid(), Signal::STOP).unwrap();
        let (_, status) = rustix::process::waitpid(Some(self.pid()), WaitOptions::UNTRACED).unwrap().unwrap();
        assert!(status.stopped());
    }

    pub(super) fn thaw(&self) {
        rustix::process::kill_process(self.pid(), Signal::CONT).unwrap();
    }

    pub(super) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Not a test: what a [`Process`] runs.
#[cfg(test)]
#[test]
fn started() {
    child(|| None);
}

/// Plays the role that a case of the suite started this process for, with the same device. Does nothing in any other process.
///
/// # Panics
/// When the role fails.
pub fn child(device: impl FnOnce() -> Option<Setup>) {
    let Ok(role) = std::env::var(ROLE) else { return };
    if let Some(setup) = device() {
        set_up(setup);
    }
    device::use_devices(device::Devices::parse(&std::env::var(device::VARIABLE).unwrap_or_default()));
    let count = std::env::var(CONNECTIONS).ok().and_then(|count| count.parse().ok()).unwrap_or(1);
    with_connections(count, || match std::env::var_os(TLS) {
        Some(_) => with_tls(|| play_as(&role)),
        None => play_as(&role),
    });
}

fn play_as(role: &str) {
    match role {
        "decode" => decode(patient()),
        "alert decode" => decode(alert()),
        "idle shm" => idle(TransportChoice::Shm),
        "idle tcp" => idle(TransportChoice::Tcp),
        "idle cuda-ipc" => idle(TransportChoice::CudaIpc),
        "idle ucx" => idle(TransportChoice::Ucx),
        "prefill shm" => prefill(TransportChoice::Shm),
        "prefill tcp" => prefill(TransportChoice::Tcp),
        "prefill cuda-ipc" => prefill(TransportChoice::CudaIpc),
        "prefill ucx" => prefill(TransportChoice::Ucx),
        "leaks" => leaks(),
        other => panic!("no role {other}"),
    }
}

fn tell(line: &str) {
    println!("{MARK}{line}");
}

/// For each line, reserves the number of blocks it names, tells the target, and tells the outcome.
fn decode(limits: TransferLimits) {
    let decode = Decode::limited(large(), std::process::id().into(), "127.0.0.1:0", limits);
    let mut free = 0;
    for (epoch, line) in (1..).zip(std::io::stdin().lines()) {
        let count: u32 = line.unwrap().parse().unwrap();
        tell(&hex::encode(&decode.reserve(epoch, &[(free..free + count).map(BlockId).collect()])));
        free += count;
        match decode.event() {
            ReceiverEvent::Verified { .. } => tell("verified"),
            ReceiverEvent::Failed { error, .. } => {
                tell(&format!("failed: {error}"));
                decode.expect_fenced(epoch);
            }
            ReceiverEvent::Fenced { .. } => panic!("fenced without a failure"),
        }
    }
}

/// Writes to the given target. At the third batch it tells so, and waits for a line before it goes on.
fn prefill(choice: TransportChoice) {
    let stop = watched(|batch| {
        if batch == 3 {
            tell("writing");
            std::io::stdin().read_line(&mut String::new()).unwrap();
        }
    });
    let prefill = Prefill::faulty(large(), std::process::id().into(), choice, stop);
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    let outcome = prefill.send(&hex::decode(line.trim()).unwrap(), 0).wait();
    tell(&format!("{outcome:?}"));
    // Stays, with the peer's pool mapped, until told to go.
    std::io::stdin().read_line(&mut String::new()).unwrap();
}

/// Writes all layers but the last to the given target, and tells so, or why it cannot. Waits for a line before it writes the last.
fn idle(choice: TransportChoice) {
    let (reached, is_reached) = mpsc::channel();
    let written = watched(move |batch| {
        if batch == 7 {
            reached.send(()).unwrap();
        }
    });
    let prefill = Prefill::limited(large(), std::process::id().into(), choice, written, alert());
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    let mut handoff = prefill.sender.open(&hex::decode(line.trim()).unwrap(), far()).unwrap();
    let pairs: Vec<_> = (0..handoff.block_counts()[0]).map(|i| (BlockId(i), i)).collect();
    (0..7).for_each(|layer| handoff.write(0, layer, &pairs).unwrap());
    while is_reached.recv_timeout(Duration::from_millis(10)).is_err() && handoff.failure().is_none() {}
    tell(&handoff.failure().map_or("written".to_owned(), |error| error.to_string()));
    std::io::stdin().read_line(&mut line).unwrap();
    let _ = handoff.write(0, 7, &pairs);
    let (report, reported) = mpsc::channel();
    handoff.complete(vec![], Box::new(move |outcome| report.send(outcome).unwrap()));
    tell(&format!("{:?}", reported.recv_timeout(PATIENCE).unwrap()));
}

/// Ends handoffs in every way, then tells whether threads or descriptors are left.
fn leaks() {
    let count = |what: &str| std::fs::read_dir(format!("/proc/self/{what}")).unwrap().count();
    let mut choices = vec![TransportChoice::Shm, TransportChoice::Tcp];
    if ucx_is_here() {
        // UCX makes some things once per process, which stay.
        end_in_every_way(TransportChoice::Ucx);
        choices.push(TransportChoice::Ucx);
    }
    let before = (count("task"), count("fd"));
    choices.into_iter().for_each(end_in_every_way);
    device::use_devices(device::BOTH);
    [TransportChoice::CudaIpc, TransportChoice::Tcp].into_iter().for_each(end_in_every_way);
    let after = (count("task"), count("fd"));
    tell(if before == after { "clean".into() } else { format!("{before:?} then {after:?}") }.as_str());
}

fn end_in_every_way(choice: TransportChoice) {
    let decode = Decode::new(large(), 1);
    let prefill = Prefill::new(large(), 2, choice);
    let second = Prefill::new(large(), 3, choice);
    for epoch in 1..=5 {
        let target = decode.reserve(epoch, &[vec![BlockId(epoch as u32)]]);
        prefill.send(&target, 0).wait().unwrap();
    }
    second.send(&decode.reserve(6, &[vec![BlockId(6)]]), 0).wait().unwrap();
    drop(prefill.sender.open(&decode.reserve(7, &[vec![BlockId(7)]]), far()).unwrap());
    second.sender.open(&decode.reserve(8, &[vec![BlockId(8)]]), far()).unwrap().abort(Box::new(|| {}));
    drop(decode);
}
