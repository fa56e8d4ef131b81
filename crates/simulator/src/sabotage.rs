//! Ways to break the rules, to show that the checkers see it. Only the simulated shells misbehave; the code under test stays
//! as it is.

/// One rule broken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sabotage {
    /// The decode worker frees blocks as soon as it has asked for a fence (I3).
    FreeBeforeFenced,
    /// The decode worker frees blocks as soon as a handoff has failed (I3).
    FreeOnFailed,
    /// A closed connection is taken for the end of the peer's access to shared memory (I3).
    FreeOnLost,
    /// The prefill worker goes on copying after it was told to stop and said so (I3).
    IgnoreCancel,
    /// The prefill worker frees local blocks when its last write is queued (I3).
    FreeLocalEarly,
    /// The prefill worker says that blocks are copied before they are (I2).
    CompleteEarly,
    /// The decode worker drops what its sessions say of fences (I5).
    LoseFences,
    /// Nobody looks for leases that have run out (I5).
    IgnoreLeases,
    /// Nobody looks for deadlines that have passed (I5).
    IgnoreDeadlines,
    /// The decode worker forgets blocks of reservations it takes back (I6).
    LeakOnCancel,
}

impl Sabotage {
    /// Every one.
    pub const ALL: [Sabotage; 10] = [
        Sabotage::FreeBeforeFenced,
        Sabotage::FreeOnFailed,
        Sabotage::FreeOnLost,
        Sabotage::IgnoreCancel,
        Sabotage::FreeLocalEarly,
        Sabotage::CompleteEarly,
        Sabotage::LoseFences,
        Sabotage::IgnoreLeases,
        Sabotage::IgnoreDeadlines,
        Sabotage::LeakOnCancel,
    ];

    /// The invariant it breaks.
    pub fn breaks(self) -> &'static str {
        use Sabotage::*;
        match self {
            FreeBeforeFenced | FreeOnFailed | FreeOnLost | IgnoreCancel | FreeLocalEarly => "I3",
            CompleteEarly => "I3",
            LoseFences | LeakOnCancel => "I6",
            IgnoreLeases | IgnoreDeadlines => "I5",
        }
    }
}
