//! Ways to break the rules, to show that the checkers see it. Only the simulated shells misbehave; the code under test stays
//! as it is, but for the benchmark's switch that turns verification off.

/// One rule broken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sabotage {
    /// The decode worker compares no digests.
    SkipVerify,
    /// A closed connection is taken for the end of the peer's access to shared memory.
    FreeOnLost,
    /// The prefill worker goes on copying after it was told to stop and said so.
    IgnoreCancel,
    /// The prefill worker says that blocks are copied, and completes, before they are.
    CompleteEarly,
    /// Nobody looks for leases that have run out.
    IgnoreLeases,
    /// Nobody looks for deadlines that have passed.
    IgnoreDeadlines,
    /// The decode worker does not pass on to its sessions what is to be fenced.
    LoseFences,
    /// The decode worker says that a handoff is verified before it has looked.
    AckEarly,
    /// The decode worker is told twice what is verified.
    AnnounceTwice,
    /// A completion does not wait for what it comes after on other connections.
    HurryCompletions,
    /// A completion waits for more on other connections than was sent.
    CountTwice,
    /// The decode worker goes on applying what was arriving of a handoff when that was closed.
    ApplyClosed,
    /// The decode worker lets connections join sessions whose ticket they do not have.
    IgnoreTickets,
    /// The prefill worker gives up what waits to leave over a session's own connection only.
    ForgetOnOne,
    /// The prefill worker takes a batch for one that has left once it is queued.
    FlushEarly,
    /// The prefill worker is told a deadline by the router's clock, not how much time is left.
    ForeignDeadline,
}

impl Sabotage {
    /// Every one.
    pub const ALL: [Sabotage; 16] = [
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
    ];

    /// What it breaks: the checker that must notice.
    pub fn breaks(self) -> &'static str {
        use Sabotage::*;
        match self {
            SkipVerify => "I2",
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
