//! Which KV heads go where when prefill and decode split them over different numbers of workers (tensor parallelism).
//!
//! Pure: from (heads, prefill ranks, decode ranks) to runs of heads, one for each pair of ranks that have some in common.
//! A rank holds a contiguous run of heads; with more ranks than heads, each head is held by several. The decode side
//! reserves once for each part of its ranks, with a descriptor for that part's prefill rank ([`crate::Wanted::heads`]);
//! a rank's KV is whole when all its parts are verified ([`crate::Gather`]). Knows nothing of pools and bytes.

use std::ops::Range;

use baton_types::heads_of_rank;

use crate::error::TransferError;

/// A run of heads: where it begins among the heads of the source pool, and of the target pool, and how long it is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct HeadSlice {
    /// First head in the prefill pool.
    pub source: u32,
    /// First head in the decode pool.
    pub target: u32,
    /// Number of heads; 0 when nothing of the group travels between the two.
    pub count: u32,
}

impl HeadSlice {
    /// All heads of a pool.
    pub fn all(heads: u32) -> HeadSlice {
        HeadSlice { source: 0, target: 0, count: heads }
    }

    /// Heads of the decode pool.
    pub(crate) fn target_heads(&self) -> Range<u32> {
        self.target..self.target.saturating_add(self.count)
    }

    /// Ok when it lies within pools of so many heads.
    pub(crate) fn check(&self, source: u32, target: u32) -> Result<(), String> {
        let within = |first: u32, heads: u32| first.checked_add(self.count).is_some_and(|end| end <= heads);
        match (within(self.source, source), within(self.target, target)) {
            (true, true) => Ok(()),
            (false, _) => Err(format!("{} from {} on, the prefill pool has {source} heads", self.count, self.source)),
            (_, false) => Err(format!("{} from {} on, the decode pool has {target} heads", self.count, self.target)),
        }
    }
}

/// What one prefill rank sends to one decode rank.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HeadPart {
    /// Prefill rank.
    pub source_rank: u32,
    /// Decode rank.
    pub target_rank: u32,
    /// Per layer group; at least one is not empty.
    pub slices: Vec<HeadSlice>,
}

/// Every part, by decode rank and then by prefill rank. `heads` are the model's KV heads per layer group. Each head of each
/// decode rank comes from exactly one prefill rank; where several hold it, the decode ranks that want it are spread
/// over them.
pub fn head_plan(heads: &[u32], prefill: u32, decode: u32) -> Result<Vec<HeadPart>, TransferError> {
    for &heads in heads {
        for (field, ranks) in [("prefill", prefill), ("decode", decode)] {
            if heads == 0 || ranks == 0 || !heads.is_multiple_of(ranks) && !ranks.is_multiple_of(heads) {
                let problem = format!("{ranks} ranks for {heads} KV heads; one must be a multiple of the other");
                return Err(TransferError::argument(field, problem));
            }
        }
    }
    let pairs = (0..decode).flat_map(|target| (0..prefill).map(move |source| (source, target)));
    let part = |(source_rank, target_rank)| {
        let slice = |&heads: &u32| shared(heads, (prefill, source_rank), (decode, target_rank));
        HeadPart { source_rank, target_rank, slices: heads.iter().map(slice).collect() }
    };
    Ok(pairs.map(part).filter(|part| part.slices.iter().any(|slice| slice.count > 0)).collect())
}

/// What of one group goes from a prefill rank to a decode rank, each given as (ranks, rank).
fn shared(heads: u32, (prefill, source): (u32, u32), (decode, target): (u32, u32)) -> HeadSlice {
    let (has, wants) = (heads_of_rank(heads, prefill, source), heads_of_rank(heads, decode, target));
    let (first, end) = (has.start.max(wants.start), has.end.min(wants.end));
    let nothing = HeadSlice { source: 0, target: 0, count: 0 };
    if first >= end {
        return nothing;
    }
    // Ranks that hold the same heads, on either side; the k-th of the wanting ones is served by its share of the holders.
    let (holders, wanting) = ((prefill / heads).max(1), (decode / heads).max(1));
    if source % holders != target % wanting * holders / wanting {
        return nothing;
    }
    HeadSlice { source: first - has.start, target: first - wants.start, count: end - first }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEGREES: [u32; 4] = [1, 2, 4, 8];

    /// Every head of every decode rank comes from one place, and that place holds it.
    #[test]
    fn every_wanted_head_comes_once_from_a_rank_that_holds_it() {
        for heads in DEGREES {
            for (prefill, decode) in DEGREES.into_iter().flat_map(|p| DEGREES.map(|d| (p, d))) {
                let plan = head_plan(&[heads], prefill, decode).unwrap();
                for rank in 0..decode {
                    let wants = heads_of_rank(heads, decode, rank);
                    let mut from = vec![None; wants.len()];
                    for part in plan.iter().filter(|part| part.target_rank == rank) {
                        let [slice] = part.slices[..] else { panic!("one group") };
                        let has = heads_of_rank(heads, prefill, part.source_rank);
                        assert_eq!(slice.check(has.len() as u32, wants.len() as u32), Ok(()));
                        for i in 0..slice.count {
                            assert_eq!(has.start + slice.source + i, wants.start + slice.target + i);
                            let place = &mut from[(slice.target + i) as usize];
                            assert_eq!(place.replace(part.source_rank), None, "sent twice");
                        }
                    }
                    assert!(from.iter().all(Option::is_some), "{heads} heads, {prefill} -> {decode}, rank {rank}");
                }
            }
        }
    }

    #[test]
    fn runs_are_as_few_and_as_long_as_can_be() {
        let slices = |heads, prefill, decode| {
            let plan = head_plan(&[heads], prefill, decode).unwrap();
            plan.iter().map(|p| (p.source_rank, p.target_rank, p.slices[0])).collect::<Vec<_>>()
        };
        let slice = |source, target, count| HeadSlice { source, target, count };
        assert_eq!(slices(8, 1, 1), [(0, 0, HeadSlice::all(8))]);
        assert_eq!(slices(8, 2, 1), [(0, 0, slice(0, 0, 4)), (1, 0, slice(0, 4, 4))]);
        assert_eq!(slices(8, 1, 2), [(0, 0, slice(0, 0, 4)), (0, 1, slice(4, 0, 4))]);
        // Two heads held by four ranks each: eight targets spread over all of them, four over every other one.
        let sources = |decode| slices(2, 8, decode).iter().map(|(source, ..)| *source).collect::<Vec<_>>();
        assert_eq!(sources(8), [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(sources(4), [0, 2, 4, 6]);
        assert_eq!(sources(1), [0, 4]);
    }

    #[test]
    fn groups_may_have_different_heads_and_impossible_degrees_are_named() {
        // One head that every rank holds, beside eight.
        let plan = head_plan(&[8, 1], 2, 4).unwrap();
        let counts = plan.iter().map(|p| (p.source_rank, p.target_rank, p.slices[0].count, p.slices[1].count));
        assert_eq!(counts.collect::<Vec<_>>(), [(0, 0, 2, 1), (0, 1, 2, 1), (1, 2, 2, 1), (1, 3, 2, 1)]);
        assert!(head_plan(&[8], 3, 1).unwrap_err().to_string().contains("prefill: 3 ranks for 8 KV heads"));
        assert!(head_plan(&[8], 1, 0).unwrap_err().to_string().contains("decode: 0 ranks"));
    }
}
