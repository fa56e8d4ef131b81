//! Time as the pure crates use it: an argument, never read from a clock.

/// Nanoseconds since a start chosen by the driver: that of a process or of a simulation.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Time(pub u64);

impl Time {
    /// This many milliseconds later; saturates.
    pub fn after_ms(self, ms: u64) -> Time {
        Time(self.0.saturating_add(ms.saturating_mul(1_000_000)))
    }
}
