//! Metrics of transfers that both roles count in the same way.

use baton_runtime::metrics as names;
use baton_transfer::{TransferError, TransportKind};
use metrics::counter;

/// Counts a handoff that failed at this end. A handoff withdrawn by its owner does not count: nothing is wrong with it.
pub fn count_failure(transport: Option<TransportKind>, error: &TransferError) {
    if !error.is_withdrawal() {
        let labels = [("transport", transport.map_or("none", TransportKind::as_str)), ("cause", error.cause())];
        counter!(names::TRANSFER_FAILURES, &labels).increment(1);
    }
}
