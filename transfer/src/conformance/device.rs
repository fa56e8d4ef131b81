//! Which ends of a test have their pools on a device. Makes pools, and reads and changes what they hold, on a device or the host.

use std::cell::Cell;

use super::fake::memory_over;
use super::*;
use crate::JobDone;

/// Which ends have their pools on a device.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct Devices {
    pub prefill: bool,
    pub decode: bool,
}

thread_local! {
    static DEVICES: Cell<Devices> = const { Cell::new(Devices { prefill: false, decode: false }) };
}

/// The environment variable by which a child learns of them.
pub(super) const VARIABLE: &str = "BATON_TRANSFER_TEST_DEVICES";

pub(super) const BOTH: Devices = Devices { prefill: true, decode: true };

/// Sets them from now on, for this thread and the processes it starts.
pub(super) fn use_devices(devices: Devices) {
    DEVICES.set(devices);
}

pub(super) fn devices() -> Devices {
    DEVICES.get()
}

impl Devices {
    pub(super) fn encode(self) -> String {
        format!("{}{}", u8::from(self.prefill), u8::from(self.decode))
    }

    pub(super) fn parse(text: &str) -> Devices {
        Devices { prefill: text.starts_with('1'), decode: text.ends_with('1') }
    }
}

/// Bytes of staging memory that a test asks of a device.
const PIECE: usize = 1 << 20;

/// A pool with the bytes of [`pool`], on a device or the host.
pub(super) fn pool_on(device: bool, geometry: &PoolGeometry, seed: u64) -> Pool {
    if !device {
        return pool(geometry, seed).into();
    }
    let memory = match setup() {
        Some(setup) => (setup.memory)(geometry.bytes()),
        None => memory_over(&Arc::new(Segment::create("test-device", geometry.bytes()).unwrap())),
    };
    let there = Pool::Device(memory);
    for (piece, bytes) in noise(geometry.bytes(), seed).chunks(PIECE).enumerate() {
        write(&there, piece * PIECE, bytes);
    }
    there
}

/// The bytes of ranges of a pool, one behind another. Tests read only what nobody writes to: blocks that are verified, fenced or never
/// lent. Or they flip a bit on its way, on the thread that moves it.
pub(super) fn read(pool: &Pool, ranges: &[(usize, usize)]) -> Vec<u8> {
    match pool {
        // SAFETY: as above.
        Pool::Host(segment) => ranges.iter().flat_map(|(at, len)| unsafe { segment.read(*at, *len) }).collect(),
        Pool::Device(memory) => {
            let mut queue = memory.queue().unwrap();
            queue.read(memory.mark(), ranges).unwrap();
            loop {
                if let Some(JobDone::Read(staged)) = queue.poll().unwrap() {
                    return staged.bytes().to_vec();
                }
                std::thread::yield_now();
            }
        }
    }
}

/// Changes bytes of a pool that the caller may write to.
pub(super) fn write(pool: &Pool, at: usize, bytes: &[u8]) {
    match pool {
        // SAFETY: nobody else looks at these bytes meanwhile.
        Pool::Host(segment) => unsafe { segment.write(at, bytes) },
        Pool::Device(memory) => {
            let mut queue = memory.queue().unwrap();
            queue.stage(bytes.len()).unwrap()[..bytes.len()].copy_from_slice(bytes);
            queue.write(&[(at, bytes.len())]).unwrap();
            queue.settle().unwrap();
        }
    }
}
