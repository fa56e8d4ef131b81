use std::sync::Arc;

use super::*;
use crate::cuda::device::{Address, Piece};
use crate::cuda::{Memory, Nowhere};

fn recorder() -> Arc<Recorder<Nowhere>> {
    Arc::new(Recorder::new(Nowhere::default()))
}

/// One stream fills the first half of a memory; another reads 16 bytes at `from`. Returns the problems found.
fn handed_over(ordered: impl Fn(&Recorder<Nowhere>, Stream, Stream), from: usize) -> Vec<String> {
    let device = recorder();
    let (first, second) = (device.stream().unwrap(), device.stream().unwrap());
    let memory = Memory::new(&device, 64).unwrap();
    device.fill(first, memory.piece(0, 32), 1).unwrap();
    ordered(&device, first, second);
    device.read(second, memory.piece(from, 16), &mut [0; 16]).unwrap();
    device.problems()
}

#[test]
fn a_missing_wait_is_found() {
    let through_event = |device: &Recorder<Nowhere>, first, second| {
        let event = device.event().unwrap();
        device.record(event, first).unwrap();
        device.wait(second, event).unwrap();
    };
    assert_eq!(handed_over(through_event, 16), [""; 0]);
    assert_eq!(handed_over(|device, first, _| device.synchronise(first).unwrap(), 16), [""; 0]);
    let late = |device: &Recorder<Nowhere>, first, second| {
        // The wait comes before the event is recorded.
        let event = device.event().unwrap();
        device.wait(second, event).unwrap();
        device.record(event, first).unwrap();
    };
    assert_eq!(handed_over(late, 16).len(), 2);
    let problems = handed_over(|_, _, _| (), 16);
    assert!(problems[0].contains("read") && problems[0].contains("does not wait for fill"), "{problems:?}");
    assert_eq!(handed_over(|_, _, _| (), 32), [""; 0], "other bytes need no order");
}

#[test]
fn memory_past_its_end_or_its_life_is_found() {
    let device = recorder();
    let stream = device.stream().unwrap();
    let memory = Memory::new(&device, 64).unwrap();
    let other = Memory::new(&device, 8).unwrap();
    let at = memory.piece(0, 8).at();
    assert_eq!(device.live_bytes(), 72);
    drop(memory);
    assert_eq!((device.live_bytes(), device.problems().len()), (8, 0));
    device.free(at);
    assert_eq!(device.problems().len(), 1, "twice");
    // `Memory` makes no piece that reaches too far, so this one is made by hand.
    let beyond = Address(other.piece(0, 8).at().0 + 4);
    for (at, why) in [(at, "after it was freed"), (beyond, "8 bytes from 4 on, of 8"), (Address(8), "nobody allocated")]
    {
        let piece = Piece::new(at, 8);
        assert!(device.fill(stream, piece, 0).unwrap_err().to_string().contains(why), "{why}");
    }
}
