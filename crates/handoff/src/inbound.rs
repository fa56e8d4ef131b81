//! The decode end: lends blocks under an epoch and a lease, takes in what peers write to them, and knows when nobody can write to them any
//! more.

mod events;
mod incoming;
mod ledger;
mod members;
mod payload;
mod reach;
mod session;
mod table;

pub use events::{FenceState, ReceiverEvent, ReceiverStats};
pub use ledger::Ledger;
pub use members::Members;
pub use payload::{Payload, PayloadTarget};
pub use reach::PeerReach;
pub use session::Inbound;
pub use table::SessionId;
