//! Time as the pure crates know it: an argument, never asked for.

/// Nanoseconds since an epoch the driver chooses: a process start, or the start of a simulation.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Time(pub u64);

impl Time {
    /// This many milliseconds later; saturates.
    pub fn after_ms(self, ms: u64) -> Time {
        Time(self.0.saturating_add(ms.saturating_mul(1_000_000)))
    }
}
