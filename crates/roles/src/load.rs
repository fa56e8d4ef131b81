//! How loaded a worker is, for who decides how many workers there should be, and for who chooses among them.

use std::ops::Range;
use std::time::Duration;

use baton_engine::{Engine, Step, Time};
use baton_latency::{Backlog, BatchWork, Coming, StepCost, StepWork};

/// What a worker has to do, in time.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Load {
    /// Prompt tokens that are to be computed here. Of a prompt that has not started, all count, though some may be cached.
    pub queued_tokens: u64,
    /// How long these will take at the rate of the latest prompts; zero before the first. A prompt that arrives now has its first
    /// token after that and its own computation.
    pub ahead: Duration,
    /// Mean time between two tokens of an answer; zero: there were none.
    pub inter_token: Duration,
    /// The shortest step that gave tokens of answers: no worker of this kind is faster; zero: there was none.
    pub fastest: Duration,
    /// Share of the time in which prompts were computed, 0 to 1.
    pub prefilling: f64,
}

/// What an engine has to do where steps cost so much.
pub fn backlog(engine: &Engine, cost: StepCost) -> Backlog {
    let (mut work, mut coming) = (StepWork::default(), Coming::default());
    let mut batch = BatchWork { blocks: engine.batch_blocks(), ..BatchWork::default() };
    for (class, Range { start, end }) in engine.prompts() {
        let adds = |work: StepWork| work.with_prompt(start.into(), end.into());
        (work, batch.work) = (adds(work), if class.is_batch() { adds(batch.work) } else { batch.work });
    }
    for (class, tokens) in engine.answers() {
        let adds = |work: StepWork| work.with_row(tokens.into());
        (work, batch.work) = (adds(work), if class.is_batch() { adds(batch.work) } else { batch.work });
    }
    for (class, tokens) in engine.arriving() {
        let adds = |coming: Coming| Coming { rows: coming.rows + 1, context: coming.context + u64::from(tokens) };
        (coming, batch.coming) = (adds(coming), if class.is_batch() { adds(batch.coming) } else { batch.coming });
    }
    let limits = engine.config();
    let step_tokens = limits.chunk.max(limits.pack_tokens).min(limits.token_budget);
    let spare = limits.token_budget.saturating_sub(limits.chunk);
    Backlog { work, coming, room: engine.room(), step_tokens, spare, cost, batch }
}

/// What a step computes. A row of one token that samples is a decode row, also when it is a prompt's last token.
pub fn work(step: &Step) -> StepWork {
    step.rows().iter().fold(StepWork::default(), |work, row| {
        let (start, end) = (u64::from(row.start), u64::from(row.start + row.len));
        if row.samples && row.len == 1 { work.with_row(end) } else { work.with_prompt(start, end) }
    })
}

/// What is measured lately covers at least this time, and at most twice that.
const SPAN: Duration = Duration::from_secs(15);

/// The steps lately, over two spans: the present one and the one before.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Recent {
    began: Time,
    before: Sums,
    now: Sums,
    fastest: Option<Duration>,
}

/// Sums over steps.
#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    /// Tokens of answers, and the time of each one's step, in seconds.
    tokens: u64,
    waited: f64,
    /// Time of the steps that computed prompts, in seconds.
    prefilling: f64,
}

impl Recent {
    /// Adds a step that took so long, gave so many tokens of answers, and may have computed prompts.
    pub(crate) fn add(&mut self, tokens: u64, prefills: bool, took: Duration, now: Time) {
        *self = self.at(now);
        let seconds = took.as_secs_f64();
        self.now.tokens += tokens;
        self.now.waited += tokens as f64 * seconds;
        if prefills {
            self.now.prefilling += seconds;
        }
        if tokens > 0 {
            self.fastest = Some(self.fastest.map_or(took, |fastest| fastest.min(took)));
        }
    }

    /// Adds what is measured to a load.
    pub(crate) fn measure(&self, load: &mut Load, now: Time) {
        let Recent { began, before, now: latest, fastest } = self.at(now);
        let tokens = before.tokens + latest.tokens;
        load.inter_token = Duration::from_secs_f64((before.waited + latest.waited) / tokens.max(1) as f64);
        load.fastest = fastest.unwrap_or_default();
        // A span without steps was idle.
        let seconds = now.0.saturating_sub(began.0) as f64 / 1e9 + SPAN.as_secs_f64();
        load.prefilling = ((before.prefilling + latest.prefilling) / seconds).min(1.0);
    }

    /// The spans as they are at this time.
    fn at(self, now: Time) -> Recent {
        let spans = u128::from(now.0.saturating_sub(self.began.0)) / SPAN.as_nanos();
        let empty = Sums::default();
        match spans {
            0 => self,
            1 => Recent { began: self.began.after_ms(SPAN.as_millis() as u64), before: self.now, now: empty, ..self },
            _ => Recent { began: now, before: empty, now: empty, ..self },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_engine::{CacheConfig, EngineConfig, NewSequence, Order, Share, Start, fake};
    use baton_types::{Class, PoolGeometry, RequestId, SamplingParams};

    #[test]
    fn a_backlog_says_what_of_it_is_batch_work() {
        let config = EngineConfig {
            token_budget: 16,
            chunk: 8,
            pack_tokens: 16,
            max_running: 8,
            max_waiting: 8,
            context_tokens: 100,
            local_prefill_tokens: 0,
            reserve_ahead: 16,
            order: Order::default(),
            overtakes: 0,
            cache: CacheConfig::default(),
        };
        let mut engine = Engine::new(config, &PoolGeometry::uniform(fake::tiny_layout(4), 100)).unwrap();
        let starts = [(Start::Compute, 12), (Start::Receive, 20)];
        for (class, (start, tokens)) in Class::ALL.into_iter().flat_map(|class| starts.map(|start| (class, start))) {
            let new = NewSequence {
                request_id: RequestId("r".into()),
                tokens: vec![1; tokens],
                prompt_tokens: tokens as u32,
                params: SamplingParams { max_tokens: 3, ..SamplingParams::default() },
                start,
                deadline: None,
                prefix: None,
                priority: class.at_workers(0),
                share: Share::default(),
                parked: false,
            };
            engine.submit(new).unwrap();
        }
        let all = backlog(&engine, StepCost::default());
        assert_eq!((all.work.tokens, all.coming), (24, Coming { rows: 2, context: 40 }));
        assert_eq!((all.batch.work.tokens, all.batch.coming), (12, Coming { rows: 1, context: 20 }));
        assert_eq!((all.batch.blocks, all.for_interactive().room), (3 + 5, all.room + 8));
    }

    fn at(seconds: f64) -> Time {
        Time((seconds * 1e9) as u64)
    }

    fn measured(recent: &Recent, seconds: f64) -> Load {
        let mut load = Load::default();
        recent.measure(&mut load, at(seconds));
        load
    }

    #[test]
    fn the_time_between_tokens_is_that_of_the_last_two_spans() {
        let (mut recent, ms) = (Recent::default(), Duration::from_millis);
        let mean = |recent: &Recent, seconds| measured(recent, seconds).inter_token;
        assert_eq!(mean(&recent, 1.0), Duration::ZERO);
        recent.add(1, false, ms(10), at(1.0));
        recent.add(3, false, ms(30), at(2.0));
        assert_eq!(mean(&recent, 2.0), ms(25), "each token counts");
        recent.add(4, false, ms(75), at(16.0));
        assert_eq!(mean(&recent, 16.0), ms(50));
        assert_eq!(mean(&recent, 29.9), ms(50));
        assert_eq!(mean(&recent, 30.1), ms(75), "the first span is over");
        assert_eq!(mean(&recent, 45.1), Duration::ZERO);
        recent.add(1, false, ms(12), at(100.0));
        assert_eq!(mean(&recent, 114.0), ms(12));
        assert_eq!(measured(&recent, 114.0).fastest, ms(10));
    }

    #[test]
    fn prefilling_is_the_share_of_the_time_in_which_prompts_were_computed() {
        let (mut recent, second) = (Recent::default(), Duration::from_secs(1));
        for time in 1..=60 {
            recent.add(0, time % 2 == 0, second, at(f64::from(time)));
        }
        let share = measured(&recent, 60.0).prefilling;
        assert!((0.4..0.6).contains(&share), "{share}");
        assert_eq!(measured(&recent, 61.0).fastest, Duration::ZERO, "no answer got a token");
        assert!(measured(&recent, 70.0).prefilling < share);
        assert_eq!(measured(&recent, 120.0).prefilling, 0.0);
    }
}
