//! Whether somebody waits for an answer, and the priorities that say so.

/// The class of a request.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub enum Class {
    /// Somebody waits for the answer.
    #[default]
    Interactive,
    /// Nobody does: it is served with what interactive requests leave, and gives way to them.
    Batch,
}

crate::words!(Class { Interactive = "interactive", Batch = "batch" });

/// Workers know a request's class by its priority: from here on it is batch. So batch work comes after all interactive work also at workers that know
/// no classes.
const BATCH: i32 = 1 << 30;
/// Priorities within a class are from -`WITHIN` to `WITHIN` - 1.
const WITHIN: i32 = 1 << 29;

impl Class {
    /// The lowest and the highest priority that a request may ask for within its class.
    pub const PRIORITIES: (i32, i32) = (-WITHIN, WITHIN - 1);

    /// The priority at workers of a request with this one within its class. Those outside [`Class::PRIORITIES`] count as the nearest inside.
    pub fn at_workers(self, priority: i32) -> i32 {
        let (lowest, highest) = Class::PRIORITIES;
        match self {
            Class::Interactive => priority.clamp(lowest, highest),
            Class::Batch => priority.clamp(lowest, highest) + (BATCH + WITHIN),
        }
    }

    /// The class of a request with this priority at workers.
    pub fn of(priority: i32) -> Class {
        if priority >= BATCH { Class::Batch } else { Class::Interactive }
    }

    /// True for [`Class::Batch`].
    pub fn is_batch(self) -> bool {
        self == Class::Batch
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batch_comes_after_all_interactive_work_and_keeps_its_own_order() {
        let (lowest, highest) = Class::PRIORITIES;
        let all = [i32::MIN, lowest, -1, 0, 1, highest, i32::MAX];
        for class in Class::ALL {
            assert!(all.iter().all(|priority| Class::of(class.at_workers(*priority)) == class), "{class}");
            assert!(all.is_sorted_by_key(|priority| class.at_workers(*priority)));
        }
        assert_eq!(Class::Interactive.at_workers(7), 7, "as it always was");
        assert_eq!(Class::Batch.at_workers(highest), i32::MAX);
        assert_eq!(Class::of(1 << 29), Class::Interactive, "of a router that knows no classes");
    }
}
