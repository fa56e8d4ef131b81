//! Whole processes: signals, drain, the admin endpoint, and children whose parent is killed.
//!
//! The children are this same test binary; the environment variable `CHILD` gives them their role. They report on stdout.
//! That pipe closes when the last of them has ended, which shows the end of a grandchild that the test cannot wait for.
#![allow(clippy::unwrap_used)] // Helpers of tests, not only the tests themselves.

use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::process::{Child, ChildStdout, Command, Stdio};

use baton_runtime::{
    AdminRoutes, AdminServer, LogFilter, LogFormat, Process, ProcessConfig, Readiness, RuntimeError, Shutdown,
    die_with_parent, listen, telemetry,
};
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const CHILD: &str = "RUNTIME_TEST_CHILD";

#[test]
fn as_child() {
    match std::env::var(CHILD).as_deref() {
        Ok("parent") => parent(),
        Ok("chatty") => chatty(),
        Ok(role) => component(role == "stuck"),
        Err(_) => {} // Run as an ordinary test: nothing to do.
    }
}

/// A component that drains at once, or never if `stuck`.
#[tokio::main]
async fn component(stuck: bool) {
    let process = Process::start("toy", &ProcessConfig::default(), Default::default()).await.unwrap();
    process.shutdown.outlive_hangups().unwrap();
    let shutdown = process.shutdown.clone();
    process.tasks.spawn("work", async move {
        shutdown.draining().await;
        println!("child draining");
        if stuck {
            std::future::pending::<()>().await;
        }
    });
    process.readiness.ready();
    println!("child ready {}", process.admin_addr());
    let outcome = process.join().await;
    println!("child ended {outcome:?}");
    std::process::exit(0);
}

/// Starts a component that must die with this process, and waits to be killed.
fn parent() {
    let mut command = child_command("idle");
    die_with_parent(&mut command);
    let mut child = command.spawn().unwrap();
    child.wait().unwrap();
}

fn child_command(role: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "as_child", "--nocapture"]).env(CHILD, role);
    command
}

struct Running {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Running {
    fn start(role: &str) -> Running {
        let mut command = child_command(role);
        command.stdout(Stdio::piped());
        die_with_parent(&mut command);
        let mut child = command.spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Running { child, lines }
    }

    /// Reads up to the next line that has `word` after "child ", and returns the rest of that line.
    fn expect(&mut self, word: &str) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            assert_ne!(self.lines.read_line(&mut line).unwrap(), 0, "the child ended before it said {word:?}");
            // The child's test harness may have written the beginning of the line.
            if let Some((_, rest)) = line.split_once(&format!("child {word}")) {
                return rest.trim().to_owned();
            }
        }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_signal_drains_and_ends_cleanly() {
    for signal in [Signal::TERM, Signal::INT] {
        let mut child = Running::start("idle");
        child.expect("ready");
        child.signal(signal);
        child.expect("draining");
        assert_eq!(child.expect("ended"), "Clean");
        assert!(child.child.wait().unwrap().success());
    }
}

#[test]
fn a_hangup_ends_nothing() {
    let mut child = Running::start("idle");
    let admin: SocketAddr = child.expect("ready").parse().unwrap();
    for _ in 0..2 {
        child.signal(Signal::HUP);
        assert_eq!(get_blocking(admin, "/ready"), (200, "ready\n".to_owned()));
    }
    child.signal(Signal::TERM);
    assert_eq!(child.expect("ended"), "Clean");
}

#[test]
fn an_interrupt_cuts_the_drain_and_a_second_term_does_not() {
    let mut child = Running::start("stuck");
    let admin: SocketAddr = child.expect("ready").parse().unwrap();
    assert_eq!(get_blocking(admin, "/ready"), (200, "ready\n".to_owned()));
    child.signal(Signal::TERM);
    child.expect("draining");
    assert_eq!(get_blocking(admin, "/ready"), (503, "draining\n".to_owned()), "the admin endpoint outlives the drain");
    assert_eq!(get_blocking(admin, "/health").0, 200);
    child.signal(Signal::TERM);
    assert_eq!(get_blocking(admin, "/ready"), (503, "draining\n".to_owned()), "SIGTERM may come again");
    child.signal(Signal::INT);
    assert_eq!(child.expect("ended"), "Cut([\"work\"])");
}

#[test]
fn a_child_does_not_outlive_a_killed_parent() {
    let mut middle = Running::start("parent");
    middle.expect("ready");
    middle.signal(Signal::KILL);
    middle.child.wait().unwrap();
    assert_eq!(middle.expect("ended"), "Clean", "the grandchild drained");
    // End of file: nobody holds the pipe any more, so the grandchild has ended.
    middle.lines.read_to_end(&mut Vec::new()).unwrap();
}

#[tokio::test]
async fn the_admin_endpoint_tells_health_readiness_and_metrics() {
    let readiness = Readiness::new("loading the model");
    let shutdown = Shutdown::new(std::time::Duration::from_secs(1));
    let metrics = baton_runtime::metrics::install().unwrap();
    let route = |path| axum::Router::new().route(path, axum::routing::get(|| async { "more" }));
    let routes = AdminRoutes { open: route("/open"), guarded: route("/extra") };
    let any = SocketAddr::from(([127, 0, 0, 1], 0));
    let server = AdminServer::start(any, None, readiness.clone(), metrics, shutdown.clone(), routes).await.unwrap();
    let at = server.addr();
    assert_ne!(at.port(), 0);
    assert_eq!(get(at, "/health").await, (200, "alive\n".to_owned()));
    assert_eq!(get(at, "/ready").await, (503, "loading the model\n".to_owned()));
    readiness.ready();
    readiness.wait().await;
    assert_eq!(get(at, "/ready").await.0, 200);
    metrics::counter!(baton_runtime::metrics::VERIFY_FAILURES).increment(1);
    assert!(get(at, "/metrics").await.1.contains("baton_verify_failures_total 1"));
    for path in ["/open", "/extra"] {
        assert_eq!(get(at, path).await, (200, "more".to_owned()));
    }
    assert_eq!(get(at, "/nothing").await.0, 404);
    shutdown.start("test");
    assert_eq!(get(at, "/ready").await, (503, "draining\n".to_owned()));
}

#[tokio::test]
async fn a_port_in_use_names_address_flag_and_fix() {
    let held = listen(SocketAddr::from(([127, 0, 0, 1], 0)), "--http").await.unwrap();
    let addr = held.local_addr().unwrap();
    let error = listen(addr, "--http").await.unwrap_err();
    assert!(matches!(error, RuntimeError::Listen { .. }));
    let text = error.to_string();
    for want in [addr.to_string().as_str(), "--http", "stop the process that has it"] {
        assert!(text.contains(want), "{want} is missing in {text}");
    }
}

/// One GET over a new connection: status and body.
async fn get(addr: SocketAddr, path: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(addr).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}

#[tokio::main(flavor = "current_thread")]
async fn get_blocking(addr: SocketAddr, path: &str) -> (u16, String) {
    get(addr, path).await
}

/// A log line for each of many events, on a pipe that nobody reads: the process goes on.
#[test]
fn a_process_whose_log_nobody_reads_goes_on() {
    let mut command = child_command("chatty");
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    die_with_parent(&mut command);
    let mut child = command.spawn().unwrap();
    let mut running = Running { lines: BufReader::new(child.stdout.take().unwrap()), child };
    running.expect("said all");
    let mut log = String::new();
    running.child.stderr.take().unwrap().read_to_string(&mut log).unwrap();
    assert!(
        log.contains("line 0 ") && log.contains("log lines were dropped") && log.contains("the last"),
        "{}",
        log.len()
    );
    assert!(running.child.wait().unwrap().success());
}

/// Logs more than is kept, then some more once it is read.
fn chatty() {
    telemetry::init("toy", &LogFilter::default(), LogFormat::Text);
    for number in 0..20_000 {
        tracing::info!("line {number} {}", "x".repeat(100));
    }
    println!("child said all");
    // Until the lines that wait are read, more are dropped.
    for _ in 0..40 {
        std::thread::sleep(std::time::Duration::from_millis(50));
        tracing::info!("the last");
    }
    baton_runtime::flush_logs();
}
