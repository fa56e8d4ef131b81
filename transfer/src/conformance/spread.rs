//! Pools whose heads are spread over several devices. Peers see each as a single pool. Paths that such a pool cannot take are not tried.

use baton_types::Stripes;

use super::fake::{Broken, memory_over};
use super::*;
use crate::SpreadMemory;

/// A pool of [`large`] with bytes of its own, both as one pool and as the ranks' pools.
struct Scattered {
    whole: Arc<Segment>,
    ranks: Vec<Arc<Segment>>,
    stripes: Stripes,
}

impl Scattered {
    fn new(ranks: u32, seed: u64) -> Scattered {
        let geometry = large();
        let stripes = Stripes::new(&geometry, ranks).unwrap();
        let bytes = geometry.of_ranks(ranks).bytes();
        let segment = |_| Arc::new(Segment::create("test-rank", bytes).unwrap());
        let scattered = Scattered { whole: pool(&geometry, seed), ranks: (0..ranks).map(segment).collect(), stripes };
        scattered.each_piece(|whole, at, rank, offset, len| {
            // SAFETY: nobody else knows the pools yet.
            unsafe { rank.write(offset, &whole.read(at, len)) };
        });
        scattered
    }

    fn each_piece(&self, mut act: impl FnMut(&Segment, usize, &Segment, usize, usize)) {
        let mut at = 0;
        for piece in self.stripes.pieces(0..self.stripes.bytes()) {
            act(&self.whole, at, &self.ranks[piece.rank], piece.offset, piece.len);
            at += piece.len;
        }
    }

    /// The ranks' current bytes, as one pool.
    fn gathered(&self) -> &Arc<Segment> {
        self.each_piece(|whole, at, rank, offset, len| {
            // SAFETY: handoffs are over, and nobody looks at the whole but this test.
            unsafe { whole.write(at, &rank.read(offset, len)) };
        });
        &self.whole
    }

    fn memory(&self) -> SpreadMemory {
        SpreadMemory::new(&large(), self.ranks.iter().map(memory_over).collect()).unwrap()
    }

    /// The pool as a session gets it. A single rank is a plain device pool.
    fn reached(&self) -> Pool {
        match self.ranks.len() {
            1 => Pool::Device(memory_over(&self.ranks[0])),
            _ => Pool::Device(Arc::new(self.memory())),
        }
    }
}

/// From pools of this many ranks into others. 0 ranks: host memory.
#[test]
fn pools_of_any_number_of_devices_hand_over_to_each_other() {
    use TransportChoice::{Auto, Shm, Tcp};
    let pool_of = |ranks: u32, seed| match ranks {
        0 => {
            let pool = Pool::from(pool(&large(), seed));
            (None, pool.clone(), pool)
        }
        _ => {
            let scattered = Scattered::new(ranks, seed);
            let (whole, reached) = (scattered.whole.clone().into(), scattered.reached());
            (Some(scattered), whole, reached)
        }
    };
    for (prefill, decode, choice, over) in [
        (2, 0, Shm, TransportKind::Shm),
        (4, 0, Tcp, TransportKind::Tcp),
        (0, 2, Tcp, TransportKind::Tcp),
        (2, 4, Auto, TransportKind::Tcp),
        (2, 1, Auto, TransportKind::Tcp),
        // The sender learns only by trying that the peer's pool is spread.
        (1, 2, Auto, TransportKind::Tcp),
    ] {
        let (_sent, whole, reached) = pool_of(prefill, 2);
        let plain: Wrap = Arc::new(|transport| transport);
        let prefill_end = Prefill::over(large(), 2, choice, plain, patient(), (whole, reached));
        let (taken, whole, reached) = pool_of(decode, 1);
        let decode_end = Decode::over(large(), 1, "127.0.0.1:0", patient(), (whole, reached));
        let blocks: Vec<_> = [9, 3, 4, 5, 6, 63, 0, 1].map(BlockId).into();
        let stats = prefill_end.send(&decode_end.reserve(1, std::slice::from_ref(&blocks)), 7).wait().unwrap();
        assert_eq!(stats.transport, over, "{prefill} -> {decode}");
        decode_end.expect_verified(1);
        let now = taken.as_ref().map_or(decode_end.pool.clone(), |taken| taken.gathered().clone().into());
        let before = pool(&large(), 1).into();
        for id in (0..large().blocks[0]).map(BlockId) {
            let want = match blocks.iter().position(|to| *to == id) {
                Some(index) => block(&prefill_end.pool, &large(), 0, BlockId(7 + index as u32)),
                None => block(&before, &large(), 0, id),
            };
            assert!(block(&now, &large(), 0, id) == want, "{prefill} -> {decode}: {id}");
        }
    }
}

/// A bit that is wrong in one rank's memory is wrong in the block (I2).
#[test]
fn digests_are_those_of_the_whole_pool_and_of_what_is_in_it() {
    let (scattered, layout) = (Scattered::new(4, 5), large().layout);
    let mut queue = crate::DeviceMemory::queue(&scattered.memory()).unwrap();
    let bytes = layout.block_bytes(0);
    let runs: Vec<_> = (0..6).map(|run| (run * 3 * bytes, layout.first_lane(0, run))).collect();
    // SAFETY: nobody writes to the pool.
    let of = |run: &(usize, u64)| baton_types::digest_block(&unsafe { scattered.whole.read(run.0, bytes) }, run.1);
    let want: Vec<u64> = runs.iter().map(of).collect();
    assert_eq!(queue.digests(&runs, bytes).unwrap(), want);
    let piece = scattered.stripes.pieces(runs[2].0 + bytes / 2..bytes * 64).next().unwrap();
    let rank = &scattered.ranks[piece.rank];
    // SAFETY: nobody else looks at the pool.
    unsafe { rank.write(piece.offset, &[!rank.read(piece.offset, 1)[0]]) };
    let wrong: Vec<_> = queue.digests(&runs, bytes).unwrap().iter().zip(&want).map(|(got, want)| got != want).collect();
    assert_eq!(wrong, [false, false, true, false, false, false]);
}

/// This holds for every rank (I3).
#[test]
fn what_was_written_is_there_once_it_is_settled() {
    let (scattered, bytes) = (Scattered::new(4, 5), large().bytes());
    let mut queue = crate::DeviceMemory::queue(&scattered.memory()).unwrap();
    queue.stage(bytes).unwrap()[..bytes].fill(0x5a);
    queue.write(&[(0, bytes)]).unwrap();
    // SAFETY: nobody writes to the pool.
    let there = || unsafe { scattered.gathered().read(0, bytes) }.iter().filter(|byte| **byte == 0x5a).count();
    assert!(there() < bytes / 100, "it has only begun");
    queue.settle().unwrap();
    assert_eq!(there(), bytes);
}

/// A rank whose device fails does not hold up the others, and is reported.
#[test]
fn a_rank_that_cannot_settle_is_an_error_once_the_others_have() {
    let whole = Scattered::new(2, 5);
    let (rank, bytes) = (&whole.ranks[1], whole.ranks[1].len());
    let memory = SpreadMemory::new(&large(), vec![Arc::new(Broken { bytes }), memory_over(rank)]).unwrap();
    let mut queue = crate::DeviceMemory::queue(&memory).unwrap();
    let stripes = Stripes::new(&large(), 2).unwrap();
    let (mut at, mut there) = (0, None);
    for piece in stripes.pieces(0..stripes.bytes()) {
        there = there.or_else(|| (piece.rank == 1).then_some((at, piece.offset, piece.len)));
        at += piece.len;
    }
    let (at, offset, len) = there.unwrap();
    queue.stage(len).unwrap()[..len].fill(0x5a);
    queue.write(&[(at, len)]).unwrap();
    assert!(queue.settle().unwrap_err().0.contains("it is broken"));
    // SAFETY: nobody writes to the pool.
    assert_eq!(unsafe { rank.read(offset, len) }, vec![0x5a; len]);
}

#[test]
fn what_lies_outside_and_what_is_not_shared_evenly_is_refused() {
    let scattered = Scattered::new(2, 5);
    let mut queue = crate::DeviceMemory::queue(&scattered.memory()).unwrap();
    let bytes = large().bytes();
    for range in [(bytes, 1), (usize::MAX, 2), (0, bytes + 1)] {
        assert!(queue.read(7, &[range]).is_err(), "{range:?}");
        assert!(queue.write(&[range]).is_err(), "{range:?}");
    }
    assert!(queue.write(&[(0, 8)]).unwrap_err().0.contains("than was staged"));
    let refused = |ranks: &[Arc<Segment>]| {
        SpreadMemory::new(&large(), ranks.iter().map(memory_over).collect()).err().unwrap().to_string()
    };
    let three: Vec<_> = [0, 1, 0].map(|rank: usize| scattered.ranks[rank].clone()).into();
    assert_eq!(refused(&three), "ranks: 3 of them cannot share the KV heads of a layer evenly");
    assert!(refused(&scattered.ranks[..1]).contains(&format!("one's pool has {} bytes", bytes / 2)));
}
