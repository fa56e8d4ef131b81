//! The life of a pool that processes share, on the device itself: it is exported, imported, written to and closed, and processes that have
//! it die. The other processes are this program again. Each step says what it found; the first that is wrong is an error.

use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use baton_kernels::KernelError;
use baton_kernels::cuda::{SharedPool, SharingDevice, receive_handle, send_handle};
use baton_types::{DeviceMemory, DeviceQueue, JobDone, Moving, OpenedBy, PoolHandle};

/// What the other process is told to be.
pub const OWNER: &str = "sharing-owner";
pub const GUEST: &str = "sharing-guest";
/// Bytes of a pool: no multiple of a driver's granularity, and enough that a leak of one shows.
const BYTES: usize = (64 << 20) + 4096;
/// Bytes that are copied.
const RUN: usize = 4096;
/// How often a pool is opened and closed to look for leaks.
const ROUNDS: usize = 50;

fn broken(why: impl ToString) -> KernelError {
    KernelError::Device { operation: "sharing".to_owned(), why: why.to_string() }
}

fn expect(holds: bool, what: &str) -> Result<(), KernelError> {
    println!("{what}: {}", if holds { "yes" } else { "NO" });
    if holds { Ok(()) } else { Err(broken(format!("not so: {what}"))) }
}

fn socket_of_input() -> Result<UnixStream, KernelError> {
    Ok(UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned().map_err(broken)?))
}

/// Fills the end of a pool with one byte.
fn fill(pool: &dyn DeviceMemory, byte: u8) -> Result<(), KernelError> {
    let mut queue = pool.queue().map_err(broken)?;
    queue.stage(RUN).map_err(broken)?[..RUN].fill(byte);
    queue.write(&[(BYTES - RUN, RUN)]).and_then(|()| queue.settle()).map_err(broken)
}

/// Whether the end of a pool is this byte.
fn ends_with(pool: &dyn DeviceMemory, byte: u8) -> Result<bool, KernelError> {
    let mut queue = pool.queue().map_err(broken)?;
    queue.read(0, &[(BYTES - RUN, RUN)]).map_err(broken)?;
    loop {
        if let Some(JobDone::Read(staged)) = queue.poll().map_err(broken)? {
            return Ok(staged.bytes().iter().all(|found| *found == byte));
        }
    }
}

/// Copies the end of a queue's pool to the end of the pool that it has opened, and waits for that.
fn copy_end(queue: &mut dyn DeviceQueue) -> Result<(), KernelError> {
    let (source, target) = (BYTES - RUN, BYTES - RUN);
    queue.copy(0, &[Moving { source, target, lane: 0 }], RUN).map_err(broken)?;
    while queue.poll().map_err(broken)?.is_none() {}
    Ok(())
}

/// The other process: has a pool and hands it out.
pub fn owner<D: SharingDevice>(device: Arc<D>) -> Result<(), KernelError> {
    let (socket, pool) = (socket_of_input()?, SharedPool::new(&device, BYTES)?);
    send_handle(&socket, &pool.export().map_err(broken)?).map_err(broken)?;
    // Until this process is killed.
    let _ = (&socket).read(&mut [0]);
    Ok(())
}

/// The other process: opens a pool and copies into it. Then it says so, and lives until it is killed.
pub fn guest<D: SharingDevice>(device: Arc<D>) -> Result<(), KernelError> {
    let (socket, pool) = (socket_of_input()?, SharedPool::new(&device, BYTES)?);
    fill(&pool, 0x42)?;
    let mut queue = pool.queue().map_err(broken)?;
    let opened = receive_handle(&socket).map_err(broken).and_then(|handle| queue.open(handle, BYTES).map_err(broken));
    let by = match opened {
        Ok(by) => by,
        Err(error) => {
            (&socket).write_all(b"-").map_err(broken)?;
            return Err(error);
        }
    };
    copy_end(&mut *queue)?;
    (&socket).write_all(&[if by == OpenedBy::Legacy { b'l' } else { b'd' }]).map_err(broken)?;
    let _ = (&socket).read(&mut [0]);
    Ok(())
}

/// Another process of this program, with a socket as its input; killed when it is dropped.
struct Other {
    child: Child,
    socket: UnixStream,
}

impl Other {
    /// `around`: a program with arguments that starts it.
    fn start(role: &str, host: bool, around: &[&str]) -> Result<Other, KernelError> {
        let (socket, theirs) = UnixStream::pair().map_err(broken)?;
        let program = std::env::current_exe().map_err(broken)?;
        let mut command = match around {
            [] => Command::new(program),
            [first, rest @ ..] => {
                let mut command = Command::new(first);
                command.args(rest).arg(program);
                command
            }
        };
        command.arg(role).args(host.then_some("--host"));
        let child = command.stdin(OwnedFd::from(theirs)).stdout(Stdio::null()).spawn().map_err(broken)?;
        Ok(Other { child, socket })
    }

    /// Its next letter.
    fn letter(&self) -> Result<char, KernelError> {
        let mut letter = [0];
        (&self.socket).read_exact(&mut letter).map_err(|_| broken("the other process has ended"))?;
        Ok(char::from(letter[0]))
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn descriptors() -> Result<usize, KernelError> {
    std::fs::read_dir("/proc/self/fd").map(|open| open.count()).map_err(broken)
}

/// What a peer opens and copies into a pool, in a process started by `around`; the letter it says.
fn visited<D: SharingDevice>(pool: &SharedPool<D>, host: bool, around: &[&str]) -> Result<char, KernelError> {
    fill(pool, 0)?;
    let guest = Other::start(GUEST, host, around)?;
    send_handle(&guest.socket, &pool.export().map_err(broken)?).map_err(broken)?;
    guest.letter()
}

/// Checks all of it. `legacy`: the same device, where memory can be shared by legacy handles only.
pub fn check<D: SharingDevice>(device: Arc<D>, legacy: Arc<D>, host: bool) -> Result<(), KernelError> {
    let (free, pool) = (device.free_memory()?, SharedPool::new(&device, BYTES)?);
    println!("the pool is exported as: {}", pool.exported_as());
    expect(pool.exported_as().starts_with(OpenedBy::Descriptor.as_str()), "a pool is named by a descriptor")?;

    expect(visited(&pool, host, &[])? == 'd', "another process opens it by that")?;
    expect(ends_with(&pool, 0x42)?, "what it copied is here after it was killed")?;
    fill(&pool, 7)?;
    expect(ends_with(&pool, 7)?, "the pool goes on without it")?;

    apart(&pool, host)?;
    owner_dies(&pool, host)?;
    no_leaks(&pool)?;
    drop(pool);
    // A GPU's other users come and go.
    let left = free.saturating_sub(device.free_memory()?);
    expect(left < 2 * BYTES as u64, "the device's memory comes back")?;

    let pool = SharedPool::new(&legacy, BYTES)?;
    println!("the fallback is exported as: {}", pool.exported_as());
    expect(visited(&pool, host, &[])? == 'l', "another process opens the fallback by a legacy handle")?;
    expect(ends_with(&pool, 0x42)?, "what it copied is here")
}

/// As between pods: the peer shares neither IPC nor process namespace with this process.
fn apart<D: SharingDevice>(pool: &SharedPool<D>, host: bool) -> Result<(), KernelError> {
    let around = ["unshare", "--ipc", "--pid", "--fork", "--kill-child"];
    let may = Command::new(around[0]).args(&around[1..]).arg("true").stderr(Stdio::null()).status();
    if !may.is_ok_and(|status| status.success()) {
        println!("not tried: this process may not make namespaces");
        return Ok(());
    }
    expect(visited(pool, host, &around)? == 'd', "a process in other IPC and process namespaces opens it, too")?;
    expect(ends_with(pool, 0x42)?, "what it copied is here")
}

/// A pool whose owner dies before it is opened here, and after.
fn owner_dies<D: SharingDevice>(pool: &SharedPool<D>, host: bool) -> Result<(), KernelError> {
    for when in ["after", "before"] {
        let owner = Other::start(OWNER, host, &[])?;
        let handle = receive_handle(&owner.socket).map_err(broken)?;
        let mut queue = pool.queue().map_err(broken)?;
        let owner = if when == "before" { None } else { Some(owner) };
        let opened = queue.open(handle, BYTES);
        drop(owner);
        // A driver may refuse a dead process's memory. What matters is that the device is as good as before.
        match opened {
            Ok(_) => expect(copy_end(&mut *queue).is_ok(), "its pool takes copies after its owner has died")?,
            Err(error) if when == "before" => println!("a dead owner's pool is refused: {error}"),
            Err(error) => return Err(broken(error)),
        }
        drop(queue);
        fill(pool, 9)?;
        expect(ends_with(pool, 9)?, &format!("the device is well with an owner that died {when} its pool was opened"))?;
    }
    Ok(())
}

/// Opening and closing leave nothing, whether they succeed or not.
fn no_leaks<D: SharingDevice>(pool: &SharedPool<D>) -> Result<(), KernelError> {
    let round = || -> Result<(), KernelError> {
        let mut queue = pool.queue().map_err(broken)?;
        queue.open(pool.export().map_err(broken)?, BYTES).map_err(broken)?;
        copy_end(&mut *queue)?;
        let lost = PoolHandle { descriptor: None, ..pool.export().map_err(broken)? };
        let wrong = PoolHandle {
            bytes: lost.bytes.clone(),
            descriptor: std::fs::File::open("/dev/null").ok().map(OwnedFd::from),
        };
        // By its name in a fabric it may still be opened.
        let _ = queue.open(lost, BYTES);
        let _ = queue.open(wrong, BYTES);
        Ok(())
    };
    round()?;
    let (before, free) = (descriptors()?, pool.device().free_memory()?);
    (0..ROUNDS).try_for_each(|_| round())?;
    expect(descriptors()? <= before, "no descriptor is left of it")?;
    let lost = free.saturating_sub(pool.device().free_memory()?);
    expect(lost < BYTES as u64, "no memory is left of it")
}
