//! Pools in device memory and what reaches them from outside, on kernels compiled for the host: between backends, and between processes.

#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used)]

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::sync::Arc;

use baton_kernels::Backend;
use baton_kernels::cuda::{
    CudaBackend, CudaOptions, HostDevice, Recorded, Recorder, SharedPool, SharingDevice, receive_handle, send_handle,
};
use baton_types::testing::Random;
use baton_types::{
    BlockId, DeviceMemory, DeviceQueue, JobDone, KvDtype, KvGroup, KvLayout, Moving, OpenedBy, PoolGeometry,
    PoolHandle, digest_block,
};

/// Blocks of 1,024 bytes in two layers.
fn geometry() -> PoolGeometry {
    let group = KvGroup { layers: vec![0, 1], planes: 2, kv_heads: 2, head_dim: 8, window: None, sinks: 0 };
    let layout = KvLayout { version: 1, model: 1, dtype: KvDtype::F16, block_size: 16, groups: vec![group] };
    PoolGeometry::uniform(layout, 4)
}

fn noise(bytes: usize, seed: u64) -> Vec<u8> {
    Random(seed).bytes(bytes)
}

fn pool<D: SharingDevice>(device: &Arc<D>) -> SharedPool<D> {
    SharedPool::new(device, geometry().bytes()).unwrap()
}

/// Writes the whole pool by its queue.
fn fill(queue: &mut dyn DeviceQueue, bytes: &[u8]) {
    queue.stage(bytes.len()).unwrap()[..bytes.len()].copy_from_slice(bytes);
    queue.write(&[(0, bytes.len())]).unwrap();
}

fn next(queue: &mut dyn DeviceQueue) -> JobDone {
    loop {
        if let Some(finished) = queue.poll().unwrap() {
            return finished;
        }
        std::thread::yield_now();
    }
}

fn contents(queue: &mut dyn DeviceQueue, mark: u64, ranges: &[(usize, usize)]) -> Vec<u8> {
    queue.read(mark, ranges).unwrap();
    let JobDone::Read(staged) = next(queue) else { panic!("it was a read") };
    staged.bytes().to_vec()
}

#[test]
fn kv_moves_between_pools_and_is_digested_on_the_way() {
    let Some(host) = HostDevice::for_tests() else { return };
    let device = Arc::new(Recorder::new(host));
    let (from, to) = (pool(&device), pool(&device));
    let options = CudaOptions::default();
    let mut backends = [&from, &to].map(|pool| CudaBackend::sharing(pool, geometry(), options).unwrap());
    let bytes = noise(from.bytes(), 3);
    let mut out = from.queue().unwrap();
    fill(&mut *out, &bytes);
    assert_eq!(out.digests(&[(0, 5)], 1024).unwrap(), [digest_block(&bytes[..1024], 5)]); // I2
    let log = device.take_log();
    let when = |wanted: Recorded| log.iter().position(|step| *step == wanted).unwrap();
    assert!(when(Recorded::SeeForeignWrites) < when(Recorded::Launch("baton_move_runs")));
    backends[0].publish();
    let mark = from.mark();
    assert_eq!(mark, 1);

    let handle = to.export().unwrap();
    assert_eq!(out.open(handle, to.bytes()), Ok(OpenedBy::Descriptor));
    let runs =
        [(3072, 1024, 0), (0, 0, 64), (5120, 7168, 128)].map(|(source, target, lane)| Moving { source, target, lane });
    out.copy(mark, &runs, 1024).unwrap();
    let part = Moving { source: 8, target: 2048, lane: 1 };
    out.copy(mark, &[part], 16).unwrap();
    let JobDone::Digests(digests) = next(&mut *out) else { panic!("it was a copy") };
    let want = runs.map(|run| digest_block(&bytes[run.source..][..1024], run.lane));
    assert_eq!(digests, want);
    let JobDone::Digests(digests) = next(&mut *out) else { panic!("it was a copy") };
    assert_eq!(digests, [digest_block(&bytes[8..24], 1)]);

    // What leaves by a network's card is only digested here.
    out.digest(mark, &[(3072, 7), (16, 0)], 1024).unwrap();
    let JobDone::Digests(digests) = next(&mut *out) else { panic!("it was a digest") };
    assert_eq!(digests, [(3072, 7), (16, 0)].map(|(from, lane)| digest_block(&bytes[from..from + 1024], lane)));
    assert!(out.digest(mark, &[(8192, 0)], 16).unwrap_err().to_string().contains("outside the pool"));

    let mut there = to.queue().unwrap();
    let all = contents(&mut *there, 0, &[(0, to.bytes())]);
    let mut want = vec![0xff; to.bytes()];
    for run in runs {
        want[run.target..][..1024].copy_from_slice(&bytes[run.source..][..1024]);
    }
    want[2048..2064].copy_from_slice(&bytes[8..24]);
    assert!(all == want);
    assert_eq!(contents(&mut *there, 0, &[(7168, 8), (7176, 8), (0, 16)]), [&want[7168..7184], &want[..16]].concat());

    for (wrong, why) in [
        (Moving { source: 8192, ..part }, "outside the pool"),
        (Moving { target: usize::MAX - 7, ..part }, "outside the peer's pool"),
        (Moving { source: 4, ..part }, "8 at a time"),
    ] {
        let error = out.copy(mark, &[wrong], 16).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
    assert!(there.copy(0, &[part], 16).unwrap_err().to_string().contains("no peer's pool"));
    drop((out, there));
    assert_eq!(device.open_imports(), 0);
    drop((backends, from, to));
    assert_eq!(device.problems(), [""; 0]);
    assert_eq!(device.live_bytes(), 0, "a queue's parts go with its pool");
}

/// A queue's job comes after what its mark stands for, and after no more: what a backend stores later, it would read half of.
#[test]
fn a_job_waits_for_what_its_mark_stands_for() {
    let Some(host) = HostDevice::for_tests() else { return };
    let device = Arc::new(Recorder::new(host));
    let pool = pool(&device);
    let mut backend = CudaBackend::sharing(&pool, geometry(), CudaOptions::default()).unwrap();
    let mut queue = pool.queue().unwrap();
    let mut stored_and_read = |to, mark: Option<u64>| {
        backend.copy_block(0, BlockId(0), BlockId(to));
        backend.publish();
        contents(&mut *queue, mark.unwrap_or_else(|| pool.mark()), &[(0, pool.bytes())]);
        backend.finish().unwrap();
        device.problems().len()
    };
    assert_eq!((stored_and_read(1, None), stored_and_read(2, None)), (0, 0));
    assert!(stored_and_read(3, Some(2)) > 0, "an earlier mark orders nothing that came later");
}

/// What one queue wrote is there for another once it has settled, and not before.
#[test]
fn a_queue_that_has_settled_has_written() {
    let Some(host) = HostDevice::for_tests() else { return };
    let device = Arc::new(Recorder::new(host));
    let pool = pool(&device);
    let (mut one, mut other) = (pool.queue().unwrap(), pool.queue().unwrap());
    let bytes = noise(pool.bytes(), 1);
    fill(&mut *one, &bytes);
    one.settle().unwrap();
    assert!(contents(&mut *other, 0, &[(0, pool.bytes())]) == bytes);
    assert_eq!(device.problems(), [""; 0]);
    fill(&mut *one, &bytes);
    contents(&mut *other, 0, &[(0, pool.bytes())]);
    assert!(!device.problems().is_empty(), "nobody has waited for it");
}

/// A queue's streams and memory are used again: sessions come and go, a device's streams stay.
#[test]
fn queues_are_made_of_what_earlier_ones_left() {
    let Some(host) = HostDevice::for_tests() else { return };
    let device = Arc::new(Recorder::new(host));
    let pool = pool(&device);
    drop(pool.queue().unwrap());
    let before = device.live_bytes();
    for _ in 0..3 {
        let mut queue = pool.queue().unwrap();
        queue.read(0, &[(0, 64)]).unwrap();
        // Given up with a job under way.
        drop(queue);
    }
    assert_eq!(device.live_bytes(), before);
    assert_eq!(device.problems(), [""; 0]);
}

const ROLE: &str = "BATON_KERNELS_TEST_ROLE";

/// The far end: a pool in a process of its own, whose handle goes out, and whose contents come back.
#[test]
fn child() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let host = HostDevice::for_tests().unwrap();
    let device = Arc::new(if role == "legacy" { host.with_legacy_handles() } else { host });
    let pool = pool(&device);
    let mut queue = pool.queue().unwrap();
    fill(&mut *queue, &vec![0; pool.bytes()]);
    queue.settle().unwrap();
    let socket = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned().unwrap());
    send_handle(&socket, &pool.export().unwrap()).unwrap();
    (&socket).read_exact(&mut [0]).unwrap();
    let digests = queue.digests(&[(1024, 0), (0, 0)], 1024).unwrap();
    println!("digests {:016x} {:016x}", digests[0], digests[1]);
}

#[test]
fn kv_moves_into_another_process() {
    moves_into_another_process("descriptor", OpenedBy::Descriptor);
}

#[test]
fn kv_moves_into_another_process_by_legacy_handles() {
    moves_into_another_process("legacy", OpenedBy::Legacy);
}

fn moves_into_another_process(role: &str, by: OpenedBy) {
    let Some(host) = HostDevice::for_tests() else { return };
    let device = Arc::new(Recorder::new(host));
    let (socket, theirs) = UnixStream::pair().unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child", "--nocapture"])
        .env(ROLE, role)
        .stdin(Stdio::from(OwnedFd::from(theirs)))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    let mut hear = |word: &str| {
        lines.find_map(|line| Some(line.split_once(&format!("{word} "))?.1.to_owned())).expect("the child's word")
    };
    let handle = receive_handle(&socket).unwrap();
    let again = || PoolHandle {
        bytes: handle.bytes.clone(),
        descriptor: handle.descriptor.as_ref().map(|fd| fd.try_clone().unwrap()),
    };

    let pool = pool(&device);
    let mut queue = pool.queue().unwrap();
    let bytes = noise(pool.bytes(), 8);
    fill(&mut *queue, &bytes);
    for wrong in [&handle.bytes[..handle.bytes.len() - 1], b"nothing of the kind"] {
        assert!(queue.open(PoolHandle { bytes: wrong.to_vec(), ..again() }, 8).is_err());
    }
    assert!(queue.open(again(), 1 << 40).unwrap_err().to_string().contains("are needed"));
    assert_eq!(queue.open(again(), pool.bytes()), Ok(by));
    queue.copy(0, &[Moving { source: 4096, target: 1024, lane: 0 }], 1024).unwrap();
    let JobDone::Digests(digests) = next(&mut *queue) else { panic!("it was a copy") };
    (&socket).write_all(b"!").unwrap();
    let zeros = digest_block(&[0; 1024], 0);
    assert_eq!(hear("digests"), format!("{:016x} {zeros:016x}", digest_block(&bytes[4096..5120], 0)));
    assert_eq!(digests, [digest_block(&bytes[4096..5120], 0)]);
    child.wait().unwrap();
    drop(queue);
    // Its process has ended: a descriptor keeps the memory, a legacy handle does not.
    match pool.queue().unwrap().open(again(), 8) {
        Ok(opened) => assert_eq!((opened, by), (by, OpenedBy::Descriptor)),
        Err(error) => {
            assert!(by == OpenedBy::Legacy && error.to_string().contains("opening a peer's memory"), "{error}")
        }
    }
    assert_eq!((device.problems().len(), device.open_imports()), (0, 0));
}
