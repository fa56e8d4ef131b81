//! When tokens are ready. As in an engine, all requests of a worker get their tokens together, once a step.

use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tokio::time::{Instant, MissedTickBehavior, interval_at};

/// The pace of a worker.
#[derive(Clone, Copy)]
pub struct Pace {
    /// From the arrival of a request to its first token.
    pub first: Duration,
    /// From one step to the next.
    pub step: Duration,
    /// Tokens of a request that a step makes ready; then steps come as much more seldom.
    pub burst: u32,
}

struct Running {
    next: u32,
    end: u32,
    out: UnboundedSender<Range<u32>>,
}

/// The steps of one worker.
#[derive(Clone)]
pub struct Steps(Arc<Mutex<Vec<Running>>>);

impl Steps {
    /// Starts stepping.
    pub fn start(pace: Pace) -> Steps {
        let steps = Steps(Arc::default());
        let shared = steps.clone();
        tokio::spawn(async move {
            let period = pace.step * pace.burst;
            let mut ticks = interval_at(Instant::now() + period, period);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
            loop {
                ticks.tick().await;
                shared.0.lock().unwrap().retain_mut(|running| {
                    let ready = running.next..(running.next + pace.burst).min(running.end);
                    running.next = ready.end;
                    running.out.send(ready).is_ok() && running.next < running.end
                });
            }
        });
        steps
    }

    /// Adds a request. The indices of its tokens come as they are ready; dropping the receiver cancels it.
    pub fn add(&self, tokens: Range<u32>) -> UnboundedReceiver<Range<u32>> {
        let (out, ready) = mpsc::unbounded_channel();
        if !tokens.is_empty() {
            self.0.lock().unwrap().push(Running { next: tokens.start, end: tokens.end, out });
        }
        ready
    }
}
