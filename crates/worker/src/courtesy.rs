//! How a worker's threads that copy KV give way to its steps.

use std::time::Duration;

use baton_types::{Courtesy, Decoding, Processor};
use rustix::time::{ClockId, clock_gettime};

/// Of all processors' time, what one thread that copies may use while answers are decoded on them. Most of it is the steps'.
const SHARE: f64 = 1.0 / 16.0;

/// For threads that copy KV in a process whose steps are computed on the machine's processors.
pub fn courtesy(decoding: Decoding) -> Courtesy {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    Courtesy::beside(decoding, SHARE * processors as f64, Processor { ran, rest })
}

fn ran() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.try_into().unwrap_or(0), time.tv_nsec.try_into().unwrap_or(0))
}

fn rest(time: Duration) {
    if time.is_zero() { std::thread::yield_now() } else { std::thread::sleep(time) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_thread_ran_is_its_own_time_on_a_processor() {
        let before = ran();
        rest(Duration::from_millis(50));
        let rested = ran() - before;
        assert!(rested < Duration::from_millis(50), "{rested:?} while it slept");
        while ran() - before < Duration::from_millis(2) {
            rest(Duration::ZERO);
        }
    }
}
