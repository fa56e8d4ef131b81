//! What members cost a router and etcd: so many fake members in one process, a watcher in another, and a real etcd, each measured by the
//! processor time that it uses.
//!
//!     cargo run --release -p baton-cluster --example members -- [MEMBERS] [SECONDS] [TTL]
//!
//! 1,000 members, 30 seconds, and members that stay for 5 seconds without a renewal, unless given. First all join, then nothing changes but
//! renewals, then as many as can be announce that they drain, one after another. etcd is the one that `tools/fetch-etcd` prints.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use baton_cluster::{Member, Role, connect};
use baton_types::WorkerId;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Seconds that members stay without a renewal: a worker's default.
const TTL: u64 = 5;
/// Members that announce a drain, a second.
const CHANGES: u64 = 20;

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["watcher", spec] => runtime.block_on(watch(spec)),
        ["members", spec, members, ttl] => runtime.block_on(join(spec, members.parse()?, ttl.parse()?)),
        [] => measure(1000, 30, TTL),
        [members] => measure(members.parse()?, 30, TTL),
        [members, seconds] => measure(members.parse()?, seconds.parse()?, TTL),
        [members, seconds, ttl] => measure(members.parse()?, seconds.parse()?, ttl.parse()?),
        _ => Err("usage: members [MEMBERS] [SECONDS] [TTL]".into()),
    }
}

/// What a router does: follows the view. Says how many members there are, whenever that changes.
async fn watch(spec: &str) -> Result<()> {
    let mut views = connect(spec, None).await?.watch();
    loop {
        let view = views.borrow_and_update().clone();
        println!("{} {}", view.members.len(), view.members.iter().filter(|member| member.draining).count());
        views.changed().await?;
    }
}

/// Members with a connection each, like processes of their own. A line on the input lets one drain.
async fn join(spec: &str, members: u64, ttl: u64) -> Result<()> {
    let mut leases = Vec::new();
    for id in 1..=members {
        let registry = connect(spec, None).await?;
        leases.push((registry.register(member(id), Duration::from_secs(ttl)).await?, registry));
    }
    let (sender, mut lines) = tokio::sync::mpsc::unbounded_channel();
    std::thread::spawn(move || std::io::stdin().lines().map_while(|line| line.ok()).try_for_each(|_| sender.send(())));
    for (lease, _) in &leases {
        if lines.recv().await.is_none() {
            break;
        }
        lease.set_draining();
    }
    std::future::pending().await
}

fn member(id: u64) -> Member {
    Member {
        id: WorkerId(id),
        role: if id.is_multiple_of(2) { Role::Prefill } else { Role::Decode },
        grpc: format!("http://10.{}.{}.{}:8002", id >> 16, id >> 8 & 255, id & 255),
        admin: format!("http://10.{}.{}.{}:9000", id >> 16, id >> 8 & 255, id & 255),
        model: "meta-llama/Llama-3.1-8B-Instruct".to_owned(),
        layout: 0x1234_5678_9abc_def0,
        blocks: 40_000,
        block_size: 16,
        window_tokens: 0,
        max_running: 256,
        context_tokens: 131_072,
        draining: false,
        late_targets: true,
        exchanges: 7,
        kv_secret: 8,
    }
}

/// A process of this measurement, killed when it is dropped.
struct Process {
    name: &'static str,
    child: Child,
}

impl Process {
    fn start(name: &'static str, command: &mut Command) -> Result<Process> {
        baton_runtime::die_with_parent(command);
        Ok(Process { name, child: command.spawn()? })
    }

    /// Processor seconds that it has used.
    fn used(&self) -> Result<f64> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id()))?;
        // The name before may have spaces in it.
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
        let ticks: u64 = [11, 12].iter().filter_map(|field| fields.get(*field)?.parse::<u64>().ok()).sum();
        // The kernel tells times in hundredths of a second, whatever its own clock.
        Ok(ticks as f64 / 100.0)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn etcd(port: u16, peers: u16, data: &Path) -> Result<Process> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tools/fetch-etcd");
    let found = Command::new(script).output()?;
    let path = String::from_utf8(found.stdout)?;
    let (client, peer) = (format!("http://127.0.0.1:{port}"), format!("http://127.0.0.1:{peers}"));
    let mut command = Command::new(path.trim());
    command
        .args(["--name", "members", "--listen-client-urls", &client, "--advertise-client-urls", &client])
        .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
        .args(["--initial-cluster", &format!("members={peer}"), "--data-dir"])
        .arg(data)
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    Process::start("etcd", &mut command)
}

fn measure(members: u64, seconds: u64, ttl: u64) -> Result<()> {
    let free = || -> Result<u16> { Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port()) };
    let (port, data) = (free()?, tempfile::tempdir()?);
    let etcd = etcd(port, free()?, data.path())?;
    let (program, spec) = (std::env::current_exe()?, format!("etcd://127.0.0.1:{port}/members"));
    let mut watcher = Process::start("router", Command::new(&program).args(["watcher", &spec]).stdout(Stdio::piped()))?;
    let out = watcher.child.stdout.take().ok_or("no output")?;
    let (said, views) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        BufReader::new(out).lines().map_while(|line| line.ok()).try_for_each(|line| said.send(line))
    });
    let until = |wanted: &str| loop {
        match views.recv_timeout(Duration::from_secs(300)) {
            Ok(line) if line == wanted => return Ok(()),
            Ok(_) => {}
            Err(error) => return Err(format!("the watcher does not see {wanted}: {error}")),
        }
    };
    until("0 0")?;

    let mut command = Command::new(&program);
    command
        .args(["members", &spec, &members.to_string(), &ttl.to_string()])
        .stdin(Stdio::piped())
        .stdout(Stdio::null());
    let mut joined = Process::start("all members", &mut command)?;
    let (began, before) = (Instant::now(), [etcd.used()?, watcher.used()?, joined.used()?]);
    until(&format!("{members} 0"))?;
    let all = [&etcd, &watcher, &joined];
    println!("{members} members with a ttl of {ttl} s, processor time as a share of one core\n");
    println!("| | {} |", all.map(|process| process.name).join(" | "));
    println!("| :-- | --: | --: | --: |");
    report("all join", began, before, &all)?;

    // A while after the last one has joined.
    std::thread::sleep(Duration::from_secs(TTL));
    let (began, before) = (Instant::now(), [etcd.used()?, watcher.used()?, joined.used()?]);
    std::thread::sleep(Duration::from_secs(seconds));
    report("nothing changes", began, before, &[&etcd, &watcher, &joined])?;

    let changes = members.min(CHANGES * seconds);
    let mut input = joined.child.stdin.take().ok_or("no input")?;
    let (began, before) = (Instant::now(), [etcd.used()?, watcher.used()?, joined.used()?]);
    for _ in 0..changes {
        writeln!(input)?;
        std::thread::sleep(Duration::from_secs(1) / CHANGES as u32);
    }
    until(&format!("{members} {changes}"))?;
    report(&format!("{CHANGES} members a second change"), began, before, &[&etcd, &watcher, &joined])
}

fn report(what: &str, began: Instant, before: [f64; 3], all: &[&Process; 3]) -> Result<()> {
    let passed = began.elapsed().as_secs_f64();
    let mut line = format!("| {what} ({passed:.1} s) |");
    for (process, before) in all.iter().zip(before) {
        line += &format!(" {:.1} % |", (process.used()? - before) / passed * 100.0);
    }
    println!("{line}");
    Ok(())
}
