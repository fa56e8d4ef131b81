//! Which pods go when a workload gets smaller. Pure: what is known of the pods comes in from outside.

/// A pod as it looks from here.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Candidate {
    pub name: String,
    pub ready: bool,
    /// Requests that it answers or that wait for it; None when it did not say.
    pub requests: Option<u32>,
    /// Blocks of its prefix cache that nobody uses now.
    pub cached: u32,
}

/// What Kubernetes is told of a pod that goes; it removes those with the lowest first, among pods that are ready.
pub const COST_OF_LEAVING: i32 = -1000;

/// The `count` pods that go: those that are not ready, then the idle, then those with the fewest requests; among equals those whose loss costs the
/// least prefix cache.
pub fn leaving(mut pods: Vec<Candidate>, count: usize) -> Vec<Candidate> {
    pods.sort_by_key(|pod| (pod.ready, pod.requests.unwrap_or(u32::MAX), pod.cached, pod.name.clone()));
    pods.truncate(count);
    pods
}

/// The pods of a StatefulSet that go where `to` are left: those with the highest numbers, whatever they have to do.
pub fn numbered_from(pods: Vec<Candidate>, to: u32) -> Vec<Candidate> {
    let mut going: Vec<_> = pods.into_iter().filter(|pod| number(&pod.name).is_some_and(|at| at >= to)).collect();
    going.sort_by_key(|pod| std::cmp::Reverse(number(&pod.name)));
    going
}

/// The number of a pod of a StatefulSet, which its name ends with.
pub fn number(pod: &str) -> Option<u32> {
    pod.rsplit_once('-')?.1.parse().ok()
}

impl std::fmt::Display for Candidate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (self.ready, self.requests) {
            (false, _) => write!(f, "{} (not ready)", self.name),
            (true, None) => write!(f, "{} (did not answer)", self.name),
            (true, Some(requests)) => write!(f, "{} ({requests} requests, {} cached blocks)", self.name, self.cached),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(name: &str, ready: bool, requests: Option<u32>, cached: u32) -> Candidate {
        Candidate { name: name.to_owned(), ready, requests, cached }
    }

    #[test]
    fn idle_pods_with_little_cache_go_first() {
        let pods = [
            pod("busy", true, Some(9), 0),
            pod("warm", true, Some(0), 800),
            pod("cold", true, Some(0), 3),
            pod("silent", true, None, 0),
            pod("starting", false, None, 0),
            pod("few", true, Some(1), 0),
        ];
        let order: Vec<_> = leaving(pods.to_vec(), 6).into_iter().map(|pod| pod.name).collect();
        assert_eq!(order, ["starting", "cold", "warm", "few", "busy", "silent"]);
        assert_eq!(leaving(pods.to_vec(), 2).len(), 2);
        assert!(leaving(pods.to_vec(), 0).is_empty());
    }

    #[test]
    fn numbered_pods_go_from_the_last_on() {
        let pods = ["kv-store-2", "kv-store-10", "kv-store-0", "kv-store-9"].map(|name| pod(name, true, Some(1), 5));
        let going = |to| numbered_from(pods.to_vec(), to).into_iter().map(|pod| pod.name).collect::<Vec<_>>();
        assert_eq!(going(9), ["kv-store-10", "kv-store-9"]);
        assert_eq!(going(0).len(), 4);
        assert!(going(11).is_empty());
        assert_eq!((number("kv-store-10"), number("decode-6c9f-x2x"), number("pod")), (Some(10), None, None));
    }

    #[test]
    fn a_candidate_says_what_its_loss_costs() {
        assert_eq!(pod("a", true, Some(2), 5).to_string(), "a (2 requests, 5 cached blocks)");
        assert_eq!(pod("a", false, Some(2), 5).to_string(), "a (not ready)");
    }
}
