//! Which GPUs a worker gets. Pure.
//!
//! Every GPU is divided into equal shares of its memory, and a worker has one share of each GPU that it computes on: so many GPUs in a row
//! as it has tensor-parallel ranks. The number of shares is chosen once, because a running worker keeps the memory that it has.

use std::ops::Range;

/// GPUs in a row: the first, and the one after the last.
pub type Gpus = Range<u32>;

/// The GPUs of this machine that workers compute on.
#[derive(Clone, Copy, Debug)]
pub struct Devices {
    gpus: u32,
    shares: u32,
}

impl Devices {
    /// `gpus` GPUs, at least 1, for workers that have these numbers of ranks: with as few shares as all of them need. None: some worker has
    /// more ranks than there are GPUs.
    pub fn new(gpus: u32, ranks: &[u32]) -> Option<Devices> {
        // Wide workers first: they have the least choice.
        let mut ranks = ranks.to_vec();
        ranks.sort_unstable_by(|a, b| b.cmp(a));
        let mut shares = 1;
        loop {
            let devices = Devices { gpus, shares };
            match devices.place_all(&ranks) {
                true => return Some(devices),
                false if ranks.first().is_some_and(|widest| *widest > gpus) => return None,
                false => shares += 1,
            }
        }
    }

    fn place_all(self, ranks: &[u32]) -> bool {
        let mut taken = Vec::new();
        ranks.iter().all(|ranks| self.pick(&taken, *ranks).map(|gpus| taken.push(gpus)).is_some())
    }

    /// How many workers share a GPU, at most.
    pub fn shares(self) -> u32 {
        self.shares
    }

    /// The GPUs for another worker of so many ranks, beside those that have `taken` theirs: the least shared ones. None: there is no room.
    pub fn pick(self, taken: &[Gpus], ranks: u32) -> Option<Gpus> {
        let starts = (0..self.gpus).step_by(ranks.max(1) as usize).filter(|start| start + ranks <= self.gpus);
        let load = |gpu: u32| taken.iter().filter(|range| range.contains(&gpu)).count() as u32;
        let loads = starts.map(|start| ((start..start + ranks).map(load).max().unwrap_or_default(), start));
        let (load, start) = loads.min()?;
        (load < self.shares).then(|| start..start + ranks)
    }
}

/// How many NVIDIA GPUs this machine, or this container, has.
pub fn count() -> u32 {
    let entries = std::fs::read_dir("/dev").into_iter().flatten().flatten();
    let number = |name: &str| name.strip_prefix("nvidia").is_some_and(|rest| rest.parse::<u32>().is_ok());
    entries.filter(|entry| entry.file_name().to_str().is_some_and(number)).count() as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_spread_over_gpus_and_share_as_few_as_they_can() {
        // GPUs, ranks of each worker, shares, and where the workers go.
        for (gpus, ranks, shares, places) in [
            (1, vec![1, 1], 2, vec![0..1, 0..1]),
            (2, vec![1, 1], 1, vec![0..1, 1..2]),
            (2, vec![1, 1, 1], 2, vec![0..1, 1..2, 0..1]),
            (8, vec![4, 2, 2], 1, vec![0..4, 4..6, 6..8]),
            (8, vec![2; 4], 1, vec![0..2, 2..4, 4..6, 6..8]),
            (3, vec![2, 1], 1, vec![0..2, 2..3]),
            (3, vec![2, 2], 2, vec![0..2, 0..2]),
            (4, vec![4, 1], 2, vec![0..4, 0..1]),
        ] {
            let devices = Devices::new(gpus, &ranks).unwrap();
            assert_eq!(devices.shares(), shares, "{gpus} {ranks:?}");
            let mut taken: Vec<Gpus> = Vec::new();
            for ranks in &ranks {
                taken.push(devices.pick(&taken, *ranks).unwrap());
            }
            assert_eq!(taken, places, "{gpus} {ranks:?}");
        }
        assert!(Devices::new(2, &[4]).is_none());
    }

    #[test]
    fn a_full_machine_has_no_room_until_a_worker_has_gone() {
        let devices = Devices::new(2, &[1, 1]).unwrap();
        assert_eq!(devices.pick(&[0..1, 1..2], 1), None);
        let other = std::slice::from_ref(&(1..2));
        assert_eq!(devices.pick(other, 1), Some(0..1));
        assert_eq!(devices.pick(other, 2), None, "it needs both");
    }
}
