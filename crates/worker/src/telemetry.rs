//! What both roles count of transfers in the same way.

use baton_runtime::metrics as names;
use baton_transfer::{TransferError, TransportKind};
use metrics::counter;

/// Counts a handoff that failed at this end; not one that its owner has withdrawn, since nothing is wrong with that.
pub fn count_failure(transport: Option<TransportKind>, error: &TransferError) {
    if !error.is_withdrawal() {
        let labels = [("transport", transport.map_or("none", TransportKind::as_str)), ("cause", error.cause())];
        counter!(names::TRANSFER_FAILURES, &labels).increment(1);
    }
}
