//! How well a cluster serves a workload: placement, index, engine and latency model are the real ones, over devices whose steps take as long as
//! their arithmetic and memory allow ([`Hardware`]). No faults: [`crate::run`] has those.

use baton_policy::Slo;

mod cluster;
mod early;
mod hardware;
mod outcome;
mod worker;
mod workload;

pub use hardware::Hardware;
pub use outcome::{Outcome, Served, Spread};
pub use workload::{NAMED, Prompt, agents, faster};

/// How workers are chosen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Policy {
    /// In turn.
    RoundRobin,
    /// The worker with the fewest requests.
    LeastLoaded,
    /// Where the router sent most of the prompt before; else the worker with the fewest requests.
    Affinity,
    /// The worker that says it holds most of the prompt; else the one with the fewest requests.
    Held,
    /// Where the predicted time is least.
    Predicted,
    /// The same, but whether a request is rejected follows from the load at present.
    PresentLoad,
}

/// A cluster.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Setup {
    /// Each worker's model and device.
    pub hardware: Hardware,
    /// Prefill workers.
    pub prefills: usize,
    /// Decode workers.
    pub decodes: usize,
    /// Routers; each request comes to the next one.
    pub routers: usize,
    /// How workers are chosen.
    pub policy: Policy,
    /// With [`Policy::Predicted`] and [`Policy::PresentLoad`]: most tokens that a decode worker computes of a prompt.
    pub local: u32,
    /// With [`Policy::Predicted`] and [`Policy::PresentLoad`]: what would miss it is rejected.
    pub slo: Slo,
}

/// Serves all prompts.
pub fn serve(setup: &Setup, prompts: &[Prompt]) -> Outcome {
    cluster::Cluster::new(setup, prompts).play()
}
