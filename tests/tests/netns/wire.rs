//! A bad network. Each host's `eth0` is a tap device, and a thread of this process carries the frames between them: it delays and
//! slows them, loses some by a seed, and loses all while it is cut. Unlike the kernel's netem it needs no module.

use std::collections::{HashMap, VecDeque};
use std::ffi::c_int;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags, open};
use rustix::io::{Errno, read, write};
use rustix::ioctl::{Setter, ioctl};

use crate::hosts::inside;

/// How bad.
#[derive(Clone, Copy, Debug)]
pub struct Quality {
    /// Of each frame, one way.
    pub delay: Duration,
    /// Towards each host.
    pub bytes_per_second: u64,
    /// Of a thousand frames.
    pub lost: u64,
    pub seed: u64,
}

/// A frame that would wait longer than this for its turn is lost, as at a full queue.
const LONGEST_QUEUE: Duration = Duration::from_millis(500);
/// How often it looks whether it is to end.
const LOOK: Duration = Duration::from_millis(50);
/// An Ethernet frame, with room to spare.
const FRAME: usize = 2048;

type Mac = [u8; 6];

/// Carries frames until it is dropped.
pub struct Wire {
    state: Arc<State>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct State {
    stop: AtomicBool,
    cut: AtomicBool,
    carried: AtomicU64,
    lost: AtomicU64,
}

impl Wire {
    /// Joins the devices `eth0` of these namespaces.
    pub fn between(namespaces: &[File], quality: Quality) -> anyhow::Result<Wire> {
        let hosts = namespaces.iter().map(|namespace| {
            let device = inside(namespace, || open_tap("eth0"))?;
            Ok(Host { device, queue: VecDeque::new(), busy_until: Instant::now() })
        });
        let hosts = hosts.collect::<anyhow::Result<Vec<_>>>()?;
        let state = Arc::new(State::default());
        let carrier = Carrier { hosts, known: HashMap::new(), quality, random: quality.seed, state: state.clone() };
        Ok(Wire { state, thread: Some(std::thread::spawn(move || carrier.run())) })
    }

    /// While it is cut, nothing arrives.
    pub fn cut(&self, cut: bool) {
        self.state.cut.store(cut, Ordering::Relaxed);
    }

    /// (frames that arrived, frames that were lost)
    pub fn carried(&self) -> (u64, u64) {
        (self.state.carried.load(Ordering::Relaxed), self.state.lost.load(Ordering::Relaxed))
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.state.stop.store(true, Ordering::Relaxed);
        let ended = self.thread.take().map(JoinHandle::join);
        assert!(ended.is_none_or(|end| end.is_ok()) || std::thread::panicking(), "the wire broke");
    }
}

/// What a tap device is asked for: `struct ifreq`.
#[repr(C)]
struct Request {
    name: [u8; 16],
    flags: u16,
    rest: [u8; 22],
}

/// A tap without a header of its own (IFF_TAP, IFF_NO_PI), by TUNSETIFF.
fn open_tap(name: &str) -> anyhow::Result<OwnedFd> {
    const TUNSETIFF: rustix::ioctl::Opcode = rustix::ioctl::opcode::write::<c_int>(b'T', 202);
    let device = open("/dev/net/tun", OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty());
    let device = device.context("/dev/net/tun")?;
    let mut request = Request { name: [0; 16], flags: 0x0002 | 0x1000, rest: [0; 22] };
    request.name[..name.len()].copy_from_slice(name.as_bytes());
    // SAFETY: the call reads a `struct ifreq`, which `Request` is.
    unsafe { ioctl(&device, Setter::<TUNSETIFF, Request>::new(request)) }.context("TUNSETIFF")?;
    Ok(device)
}

struct Host {
    device: OwnedFd,
    /// Frames on their way to it, with when they arrive; in that order, since all are delayed alike.
    queue: VecDeque<(Instant, Vec<u8>)>,
    /// When the last byte on its way will have left.
    busy_until: Instant,
}

struct Carrier {
    hosts: Vec<Host>,
    /// Behind which device an address was seen.
    known: HashMap<Mac, usize>,
    quality: Quality,
    random: u64,
    state: Arc<State>,
}

impl Carrier {
    fn run(mut self) {
        let mut frame = [0; FRAME];
        while !self.state.stop.load(Ordering::Relaxed) {
            self.deliver();
            self.wait();
            for from in 0..self.hosts.len() {
                while let Some(bytes) = read(&self.hosts[from].device, &mut frame).ok().filter(|&bytes| bytes >= 12) {
                    self.take(from, &frame[..bytes]);
                }
            }
        }
    }

    /// Until a frame comes or one is due.
    fn wait(&self) {
        let due = self.hosts.iter().filter_map(|host| host.queue.front()).map(|(due, _)| *due).min();
        let time = due.map_or(LOOK, |due| due.saturating_duration_since(Instant::now()).min(LOOK));
        let time = Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() };
        let mut devices: Vec<_> = self.hosts.iter().map(|host| PollFd::new(&host.device, PollFlags::IN)).collect();
        match poll(&mut devices, Some(&time)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => panic!("poll: {error}"),
        }
    }

    fn deliver(&mut self) {
        let now = Instant::now();
        for host in &mut self.hosts {
            while host.queue.front().is_some_and(|(due, _)| *due <= now) {
                let Some((_, frame)) = host.queue.pop_front() else { break };
                // A full device loses a frame, as one does.
                let arrived = !self.state.cut.load(Ordering::Relaxed) && write(&host.device, &frame).is_ok();
                let counter = if arrived { &self.state.carried } else { &self.state.lost };
                counter.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// Puts a frame on its way.
    fn take(&mut self, from: usize, frame: &[u8]) {
        let address = |at: usize| -> Mac { std::array::from_fn(|i| frame[at + i]) };
        self.known.insert(address(6), from);
        let to = self.known.get(&address(0)).copied();
        for host in 0..self.hosts.len() {
            // To whom nobody knows, to all.
            if host != from && to.is_none_or(|to| to == host) {
                self.send(host, frame);
            }
        }
    }

    fn send(&mut self, to: usize, frame: &[u8]) {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let unlucky = (self.random >> 33) % 1000 < self.quality.lost;
        let (now, host) = (Instant::now(), &mut self.hosts[to]);
        let starts = host.busy_until.max(now);
        if unlucky || starts - now > LONGEST_QUEUE {
            self.state.lost.fetch_add(1, Ordering::Relaxed);
            return;
        }
        host.busy_until = starts + Duration::from_secs_f64(frame.len() as f64 / self.quality.bytes_per_second as f64);
        host.queue.push_back((host.busy_until + self.quality.delay, frame.to_vec()));
    }
}
