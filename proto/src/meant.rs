//! Which worker a call is meant for.
//!
//! An address outlives the worker behind it: another process may listen there by now, with another model. A router may not know yet, above
//! all while the registry is away. So each call names its worker, and any other worker refuses it before it reads the prompt.

use baton_types::WorkerId;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::{Request, Status};

/// Metadata key of a call: the id of the worker it is meant for.
const MEANT: &str = "baton-worker";
/// Metadata key in a status by which a worker says that the call was meant for another.
const ANOTHER: &str = "baton-another-worker";

/// Adds to each call which worker it is meant for.
#[derive(Clone, Debug)]
pub struct MeantFor(MetadataValue<Ascii>);

impl MeantFor {
    /// Calls are meant for this worker.
    pub fn new(worker: WorkerId) -> MeantFor {
        MeantFor(MetadataValue::from(worker.0))
    }
}

impl Interceptor for MeantFor {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        request.metadata_mut().insert(MEANT, self.0.clone());
        Ok(request)
    }
}

/// Refuses calls that are meant for another worker. Calls that name none are let through.
#[derive(Clone, Copy, Debug)]
pub struct OnlyFor(pub WorkerId);

impl Interceptor for OnlyFor {
    fn call(&mut self, request: Request<()>) -> Result<Request<()>, Status> {
        match request.metadata().get(MEANT) {
            Some(meant) if meant.as_bytes() != self.0.0.to_string().as_bytes() => Err(another_worker_status(self.0)),
            _ => Ok(request),
        }
    }
}

/// The status of a worker that got a call that was meant for another. A router that does not know the metadata key reads it as
/// "unavailable".
pub fn another_worker_status(here: WorkerId) -> Status {
    let mut status = Status::unavailable(format!("the worker that was here is gone; this one is {here}"));
    status.metadata_mut().insert(ANOTHER, MetadataValue::from_static("1"));
    status
}

/// True for a status made by [`another_worker_status`].
pub fn says_another_worker(status: &Status) -> bool {
    status.metadata().contains_key(ANOTHER)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_worker_that_a_call_names_takes_it() {
        let call = |id| MeantFor::new(WorkerId(id)).call(Request::new(())).unwrap();
        for id in [1, u64::MAX] {
            assert!(OnlyFor(WorkerId(id)).call(call(id)).is_ok());
            let refused = OnlyFor(WorkerId(id - 1)).call(call(id)).unwrap_err();
            assert!(says_another_worker(&refused));
        }
        assert!(OnlyFor(WorkerId(1)).call(Request::new(())).is_ok(), "it names nobody");
        assert!(!says_another_worker(&Status::unavailable("no")));
    }
}
