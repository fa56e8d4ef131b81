//! What one worker has to do, as far as a router knows: what the worker said last, and what was sent to it since.

use std::time::{Duration, Instant};

use baton_latency::{Backlog, BatchWork, Coming, StepWork};
use baton_types::Class;

/// For so long after a request's stream was opened, the worker may not have taken it in.
const UNTOLD: Duration = Duration::from_millis(2);
/// A request whose stream is not open after this long went another way.
const LOST: Duration = Duration::from_secs(5);
/// Most requests that are counted apart (I5).
const MOST: usize = 1024;

/// The load of one worker.
#[derive(Clone, Debug, Default)]
pub(super) struct Load {
    told: Option<(Backlog, Instant)>,
    /// Routers that place requests here, this one included; 0: not known.
    routers: u32,
    sent: Vec<Sent>,
}

/// What a request adds to a worker's load.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Adds {
    pub work: StepWork,
    pub blocks: u32,
    pub class: Class,
    /// Its stream is opened when its prompt's turn is near elsewhere, whenever that is.
    pub late: bool,
}

/// A request that was placed here.
#[derive(Clone, Copy, Debug)]
struct Sent {
    /// Number of its placement.
    number: u64,
    placed: Instant,
    /// When its stream was opened.
    opened: Option<Instant>,
    adds: Adds,
}

impl Load {
    /// The worker says what it had to do at that time.
    pub fn told(&mut self, backlog: Backlog, routers: u32, at: Instant) {
        (self.told, self.routers) = (Some((backlog, at)), routers);
        self.forget(at);
    }

    /// Routers that place requests here; 1 at least.
    pub fn routers(&self) -> u64 {
        self.routers.max(1).into()
    }

    /// Whether the worker has learned how long prompts take.
    pub fn knows_prompts(&self) -> bool {
        self.told.is_some_and(|(told, _)| told.cost.chunk + told.cost.token + told.cost.pair > 0.0)
    }

    /// A request was placed here that adds so much.
    pub fn sent(&mut self, number: u64, adds: Adds, now: Instant) {
        if self.sent.len() >= MOST {
            self.forget(now);
        }
        if self.told.is_some() && self.sent.len() < MOST {
            self.sent.push(Sent { number, placed: now, opened: None, adds });
        }
    }

    /// The stream of the request with this placement is opened.
    pub fn opened(&mut self, number: u64, now: Instant) {
        if let Some(sent) = self.sent.iter_mut().find(|sent| sent.number == number) {
            sent.opened = Some(now);
        }
    }

    /// The request with this placement has begun to answer, here or elsewhere, or has ended.
    pub fn begun(&mut self, number: u64) {
        self.sent.retain(|sent| sent.number != number);
    }

    /// Forgets what the worker knew at that time.
    fn forget(&mut self, at: Instant) {
        let since = |sent: Instant| at.saturating_duration_since(sent);
        self.sent.retain(|sent| match sent.opened {
            Some(opened) => since(opened) < UNTOLD,
            None => sent.adds.late || since(sent.placed) < LOST,
        });
    }

    /// What the worker has to do now; `None`: it never said. Other routers see the same and choose alike, so each is taken to have sent as much
    /// here as this one did. What was queued when the worker spoke, it has worked on since.
    /// `in_flight`: requests of this router here. Where it is the only router, there are no more.
    pub fn now(&self, in_flight: u32, now: Instant) -> Option<Backlog> {
        let (mut told, at) = self.told?;
        if self.routers == 1 && in_flight == 0 {
            (told.work, told.coming, told.batch) = (StepWork::default(), Coming::default(), BatchWork::default());
        }
        let routers = self.routers();
        let add = |backlog: Backlog, sent: &Sent| {
            let Adds { work: StepWork { tokens, pairs, rows, context }, blocks, class, .. } = sent.adds;
            let [tokens, pairs, rows, context] = [tokens, pairs, rows, context].map(|n| n.saturating_mul(routers));
            let (work, blocks) = (StepWork { tokens, pairs, rows, context }, blocks.saturating_mul(routers as u32));
            match class {
                Class::Interactive => backlog.with(work, blocks),
                Class::Batch => backlog.with_batch(work, blocks),
            }
        };
        let mut load = self.sent.iter().fold(told, add);
        let began = if told.work.tokens > 0 { Some(at) } else { self.sent.iter().find_map(|sent| sent.opened) };
        let worked = began.map_or(0.0, |began| now.saturating_duration_since(began).as_secs_f64());
        let queue = load.queue();
        if worked > 0.0 && queue > 0.0 {
            let left = 1.0 - (worked / queue).min(1.0);
            let scaled = |n: u64| (n as f64 * left) as u64;
            (load.work.tokens, load.work.pairs) = (scaled(load.work.tokens), scaled(load.work.pairs));
        }
        Some(load)
    }
}

#[cfg(test)]
mod tests {
    use baton_latency::StepCost;

    use super::*;

    fn adds(work: StepWork, blocks: u32) -> Adds {
        Adds { work, blocks, ..Adds::default() }
    }

    fn rows(load: &Load) -> Option<(u64, i64)> {
        load.now(1, Instant::now()).map(|backlog| (backlog.coming.rows, backlog.room))
    }

    #[test]
    fn what_was_sent_counts_until_the_worker_says_so_itself() {
        let (mut load, begun) = (Load::default(), Instant::now());
        let work = StepWork::default().with_row(10);
        let row = adds(work, 5);
        let at = |ms: u64| begun + Duration::from_millis(ms);
        load.sent(1, row, at(0));
        assert_eq!(rows(&load), None, "nothing is known of it");
        let empty = Backlog { room: 100, ..Backlog::default() };
        load.told(empty, 1, at(1));
        load.sent(2, row, at(2));
        load.sent(3, row, at(3));
        assert_eq!(rows(&load), Some((2, 90)));
        load.opened(2, at(10));
        load.told(empty, 1, at(11));
        assert_eq!(rows(&load), Some((2, 90)), "it may not know of it yet");
        load.told(empty.with(work, 5), 1, at(12));
        assert_eq!(rows(&load), Some((2, 90)), "its own word, and one that was not opened");
        load.sent(4, row, at(20));
        load.begun(4);
        assert_eq!(rows(&load), Some((2, 90)), "it needed nothing here");
        load.told(empty, 1, at(5003));
        assert_eq!(rows(&load), Some((0, 100)), "the other was never opened");
        load.sent(5, Adds { late: true, ..row }, at(5003));
        load.told(empty, 1, at(60_000));
        assert_eq!(rows(&load), Some((1, 95)), "its prompt still waits elsewhere");
        load.opened(5, at(60_001));
        load.told(empty.with(work, 5), 1, at(60_010));
        assert_eq!(rows(&load), Some((1, 95)), "its own word");
    }

    #[test]
    fn other_routers_do_alike() {
        let (mut load, now) = (Load::default(), Instant::now());
        load.told(Backlog::default(), 3, now);
        load.sent(1, adds(StepWork::default().with_row(10), 5), now);
        assert_eq!(rows(&load), Some((3, -15)));
    }

    #[test]
    fn what_is_sent_counts_for_its_class() {
        let (mut load, now, row) = (Load::default(), Instant::now(), StepWork::default().with_row(10));
        load.told(Backlog { room: 100, ..Backlog::default() }, 1, now);
        load.sent(1, adds(row, 5), now);
        load.sent(2, Adds { class: Class::Batch, ..adds(row.with_prompt(0, 50), 7) }, now);
        let all = load.now(2, now).unwrap();
        let seen = all.for_interactive();
        assert_eq!((all.coming.rows, all.room, all.work.tokens), (2, 88, 50));
        assert_eq!((seen.coming.rows, seen.room, seen.work.tokens), (1, 95, 0));
    }

    #[test]
    fn batch_work_is_worked_on_last() {
        let (mut load, begun) = (Load::default(), Instant::now());
        let cost = StepCost { token: 1e-3, ..StepCost::default() };
        let work = |tokens| StepWork { tokens, ..StepWork::default() };
        let batch = BatchWork { work: work(60), ..BatchWork::default() };
        load.told(Backlog { work: work(100), batch, cost, step_tokens: 50, ..Backlog::default() }, 1, begun);
        let at = |ms| {
            let load = load.now(1, begun + Duration::from_millis(ms)).unwrap();
            (load.work.tokens, load.for_interactive().work.tokens)
        };
        assert_eq!((at(0), at(25), at(75)), ((100, 40), (75, 15), (25, 0)));
    }

    #[test]
    fn a_worker_works_on_while_it_says_nothing() {
        let (mut load, begun) = (Load::default(), Instant::now());
        let cost = StepCost { token: 1e-3, ..StepCost::default() };
        let at = |ms: u64| begun + Duration::from_millis(ms);
        let tokens = |load: &Load, ms| load.now(1, at(ms)).unwrap().work.tokens;
        let work = StepWork { tokens: 100, ..StepWork::default() };
        load.told(Backlog { work, cost, step_tokens: 50, ..Backlog::default() }, 1, begun);
        assert_eq!((tokens(&load, 0), tokens(&load, 25), tokens(&load, 200)), (100, 75, 0));
        load.told(Backlog { cost, step_tokens: 50, ..Backlog::default() }, 1, at(200));
        load.sent(1, adds(work, 0), at(300));
        assert_eq!(tokens(&load, 320), 100, "its stream is not open yet");
        load.opened(1, at(320));
        assert_eq!(tokens(&load, 340), 80);
        load.begun(1);
        load.told(Backlog { work, cost, ..Backlog::default() }, 1, at(400));
        assert_eq!(load.now(0, at(400)).unwrap().work.tokens, 0, "all of it has ended");
        load.told(Backlog { work, cost, ..Backlog::default() }, 2, at(400));
        assert_eq!(load.now(0, at(400)).unwrap().work.tokens, 100, "it may be another router's");
    }

    /// I5.
    #[test]
    fn no_more_is_kept_than_may() {
        let (mut load, now) = (Load::default(), Instant::now());
        load.told(Backlog::default(), 1, now);
        (0..2 * MOST).for_each(|at| load.sent(at as u64, adds(StepWork::default().with_row(1), 1), now));
        assert_eq!(rows(&load), Some((MOST as u64, -(MOST as i64))));
    }
}
