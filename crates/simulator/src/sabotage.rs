//! Rules that can be broken on purpose, to show that the checkers notice. Only the simulation misbehaves. The code under test is
//! unchanged, except for the benchmark's switch that turns verification off.

/// A rule to break.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sabotage {
    /// The decode worker compares no digests.
    SkipVerify,
    /// The decode worker takes a closed connection as proof that the peer cannot write to shared memory.
    FreeOnLost,
    /// The prefill worker goes on copying after it was told to stop and has said that it did.
    IgnoreCancel,
    /// The prefill worker reports blocks as copied, and completes the handoff, before they are.
    CompleteEarly,
    /// Nobody looks for expired leases.
    IgnoreLeases,
    /// Nobody looks for deadlines that have passed.
    IgnoreDeadlines,
    /// The decode worker does not tell its sessions which epochs to fence.
    LoseFences,
    /// The decode worker says that a handoff is verified before it has checked it.
    AckEarly,
    /// The decode worker is told twice that a handoff is verified.
    AnnounceTwice,
    /// A completion does not wait for earlier writes on other connections.
    HurryCompletions,
    /// A completion waits for more writes on other connections than were sent.
    CountTwice,
    /// The decode worker goes on writing the payload of a handoff that was closed while the payload arrived.
    ApplyClosed,
    /// The decode worker lets connections join sessions without a valid ticket.
    IgnoreTickets,
    /// A cancel at the prefill worker stops only what waits to leave over the session's own connection.
    ForgetOnOne,
    /// The prefill worker counts a batch as sent once it is queued.
    FlushEarly,
    /// The prefill worker is given a deadline by the router's clock instead of the time left.
    ForeignDeadline,
    /// A block that is loaded from a store is not compared with its digests.
    SkipStored,
}

impl Sabotage {
    /// Every rule.
    pub const ALL: [Sabotage; 17] = [
        Sabotage::SkipVerify,
        Sabotage::FreeOnLost,
        Sabotage::IgnoreCancel,
        Sabotage::CompleteEarly,
        Sabotage::IgnoreLeases,
        Sabotage::IgnoreDeadlines,
        Sabotage::LoseFences,
        Sabotage::AckEarly,
        Sabotage::AnnounceTwice,
        Sabotage::HurryCompletions,
        Sabotage::CountTwice,
        Sabotage::ApplyClosed,
        Sabotage::IgnoreTickets,
        Sabotage::ForgetOnOne,
        Sabotage::FlushEarly,
        Sabotage::ForeignDeadline,
        Sabotage::SkipStored,
    ];

    /// The invariant it breaks, and so the checker that must notice.
    pub fn breaks(self) -> &'static str {
        use Sabotage::*;
        match self {
            SkipVerify | SkipStored => "I2",
            FreeOnLost | IgnoreCancel | CompleteEarly => "I3",
            ApplyClosed | IgnoreTickets | ForgetOnOne | FlushEarly => "I3",
            IgnoreLeases | IgnoreDeadlines | ForeignDeadline => "I5",
            LoseFences => "I6",
            AckEarly => "agreement",
            AnnounceTwice => "reported once",
            HurryCompletions | CountTwice => "delivery",
        }
    }
}
