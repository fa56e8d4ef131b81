//! How fast KV goes from a pool of this process into one of another on the same device: runs copied and digested as workers do it, without
//! a network, an engine or a model. The other process is this program again.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Instant;

use baton_kernels::KernelError;
use baton_kernels::conformance::Random;
use baton_kernels::cuda::{SharedPool, SharingDevice, receive_handle, send_handle};
use baton_types::{DEVICE_JOBS, DeviceError, DeviceMemory, DeviceQueue, JobDone, Moving};

use crate::{Figure, ROUNDS, Sizes};

/// What the other process is told to be.
pub const TARGET: &str = "handoff-target";
/// Runs of a job.
const RUNS: usize = 256;
/// Before what the other process says.
const MARK: &str = "@ ";

fn broken(why: impl ToString) -> KernelError {
    KernelError::Device { operation: "handoff".to_owned(), why: why.to_string() }
}

/// All runs of a pool, each to the same place in the other.
fn runs(sizes: &Sizes) -> Vec<Moving> {
    let (count, bytes) = sizes.runs;
    let run = |i: usize| Moving { source: i * bytes, target: i * bytes, lane: (i * bytes / 8) as u64 };
    (0..count).map(run).collect()
}

/// Wrapping sum of the digests of what is in a pool.
fn digest(queue: &mut dyn DeviceQueue, sizes: &Sizes) -> Result<u64, DeviceError> {
    let all: Vec<(usize, u64)> = runs(sizes).iter().map(|run| (run.source, run.lane)).collect();
    Ok(queue.digests(&all, sizes.runs.1)?.into_iter().fold(0, u64::wrapping_add))
}

/// The other process: hands out its pool, and says what is in it once it is asked.
pub fn target<D: SharingDevice>(device: Arc<D>, sizes: &Sizes) -> Result<(), KernelError> {
    let (count, bytes) = sizes.runs;
    let pool = SharedPool::new(&device, count * bytes)?;
    let socket = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned().map_err(broken)?);
    send_handle(&socket, &pool.export().map_err(broken)?).map_err(broken)?;
    (&socket).read_exact(&mut [0]).map_err(broken)?;
    let found = pool.queue().and_then(|mut queue| digest(&mut *queue, sizes)).map_err(broken)?;
    println!("{MARK}{found:016x}");
    Ok(())
}

/// The other process, killed when it is dropped.
struct Target {
    child: Child,
    /// Its input, over which it sends its pool's handle.
    socket: UnixStream,
    says: BufReader<std::process::ChildStdout>,
}

impl Target {
    fn start(host: bool) -> Result<Self, KernelError> {
        let mut command = Command::new(std::env::current_exe().map_err(broken)?);
        let (socket, theirs) = UnixStream::pair().map_err(broken)?;
        command.arg(TARGET).args(host.then_some("--host")).stdin(OwnedFd::from(theirs)).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(broken)?;
        let out = child.stdout.take().ok_or_else(|| broken("no output"))?;
        Ok(Target { child, socket, says: BufReader::new(out) })
    }

    /// Its next word.
    fn word(&mut self) -> Result<String, KernelError> {
        let mut line = String::new();
        while self.says.read_line(&mut line).map_err(broken)? > 0 {
            if let Some(word) = line.strip_prefix(MARK) {
                return Ok(word.trim().to_owned());
            }
            line.clear();
        }
        Err(broken("the other process has ended"))
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Fills a pool with noise.
fn fill(queue: &mut dyn DeviceQueue, sizes: &Sizes) -> Result<(), DeviceError> {
    let (count, bytes) = sizes.runs;
    let mut random = Random(5);
    for at in 0..count {
        let part = &mut queue.stage(bytes)?[..bytes];
        part.chunks_mut(8).for_each(|lane| lane.copy_from_slice(&random.bits().to_le_bytes()[..lane.len()]));
        queue.write(&[(at * bytes, bytes)])?;
    }
    Ok(())
}

/// Copies all runs, several jobs at a time; the sum of their digests.
fn copy(queue: &mut dyn DeviceQueue, mark: u64, sizes: &Sizes) -> Result<u64, DeviceError> {
    let (runs, mut sum, mut pending) = (runs(sizes), 0u64, 0);
    let mut jobs = runs.chunks(RUNS).peekable();
    while jobs.peek().is_some() || pending > 0 {
        if pending < DEVICE_JOBS
            && let Some(job) = jobs.next()
        {
            queue.copy(mark, job, sizes.runs.1)?;
            pending += 1;
            continue;
        }
        if let Some(JobDone::Digests(digests)) = queue.poll()? {
            pending -= 1;
            sum = digests.into_iter().fold(sum, u64::wrapping_add);
        }
    }
    Ok(sum)
}

/// Measures, and fails unless the other process finds what was sent.
pub fn bench<D: SharingDevice>(device: Arc<D>, sizes: &Sizes, host: bool) -> Result<(), KernelError> {
    let (count, bytes) = sizes.runs;
    let pool = SharedPool::new(&device, count * bytes)?;
    let mut queue = pool.queue().map_err(broken)?;
    fill(&mut *queue, sizes).map_err(broken)?;
    let want = digest(&mut *queue, sizes).map_err(broken)?;
    let mut target = Target::start(host)?;
    let handle = receive_handle(&target.socket).map_err(broken)?;
    let by = queue.open(handle, count * bytes).map_err(broken)?;
    let mut rounds = [0.0; ROUNDS];
    // The first does not count.
    for round in 0..=ROUNDS {
        let began = Instant::now();
        if copy(&mut *queue, pool.mark(), sizes).map_err(broken)? != want {
            return Err(broken("what was copied has another digest than what was written"));
        }
        if let Some(at) = round.checked_sub(1) {
            rounds[at] = began.elapsed().as_secs_f64();
        }
    }
    target.socket.write_all(b"!").map_err(broken)?;
    let there = target.word()?;
    if there != format!("{want:016x}") {
        return Err(broken(format!("the other process finds {there}, not {want:016x}")));
    }
    rounds.sort_by(f64::total_cmp);
    let case = format!("{count} runs of {bytes} bytes, digested, pool opened by {by}");
    Figure { what: "ipc", case, seconds: rounds[ROUNDS / 2], bytes: count * bytes, operations: 0 }.print(sizes);
    Ok(())
}
