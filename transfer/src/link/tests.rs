use std::io::Write as _;
use std::sync::Arc;

use baton_handoff::TransferLimits;
use baton_types::Epoch;

use super::*;
use crate::segment::Segment;

fn link(stream: UnixStream) -> Link {
    stream.set_nonblocking(true).unwrap();
    let pool = Arc::new(Segment::create("test", 1).unwrap());
    Link::new(Socket::Unix(stream), pool.into(), FrameLimits::new(&TransferLimits::default(), 1))
}

/// I5: a slow reader keeps no more than the bytes it has not consumed, wherever in a frame its reads end.
#[test]
fn what_is_consumed_is_not_kept() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let mut link = link(ours);
    // The first frame has another length than the rest, so that reads do not end where frames do.
    let odd = Frame::Abort { epoch: Epoch(1) }.encode();
    let beats = Frame::Beat.encode().repeat(LOOKAHEAD);
    let (mut frames, mut most) = (0, 0);
    theirs.write_all(&odd).unwrap();
    let writer = std::thread::spawn(move || (0..50).for_each(|_| theirs.write_all(&beats).unwrap()));
    while frames < 1 + 50 * LOOKAHEAD {
        match link.fill().unwrap() {
            Got::Bytes(_) => {}
            Got::Blocked => std::thread::yield_now(),
            Got::Ended => panic!("{frames} frames"),
        }
        while link.next_frame().unwrap().is_some() {
            frames += 1;
        }
        most = most.max(link.inbox.len());
    }
    writer.join().unwrap();
    assert!(most <= 2 * LOOKAHEAD, "{most} bytes kept");
}

#[test]
fn frames_that_wait_are_counted_without_their_payload() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut link = link(ours);
    assert_eq!(link.frames_queued(), 0);
    link.push(&Frame::Beat);
    link.push_staged(Staged::new(vec![0; 3]), Epoch(1));
    link.push_pool((0, 1), Epoch(1));
    link.push(&Frame::Beat);
    assert_eq!(link.frames_queued(), 2);
    link.flush().unwrap();
    assert_eq!((link.frames_queued(), link.has_output()), (0, false));
    drop(theirs);
}
