//! What a worker has to do, and how long it will take for more.

use crate::step::bounded;
use crate::{StepCost, StepWork};

/// What a worker has to do, and what that costs there.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Backlog {
    /// Tokens of prompts that are to be computed, and sequences that give tokens of their answers.
    pub work: StepWork,
    /// Sequences that will give tokens once their KV has arrived.
    pub coming: Coming,
    /// Blocks of the KV pool that no sequence owns, less those that waiting sequences will take. Below 0 where there are not enough for them.
    pub room: i64,
    /// Most tokens of prompts in a step.
    pub step_tokens: u32,
    /// Tokens that a step has left beside a chunk of a long prompt: prompts that lack no more are computed in these, before their turn.
    pub spare: u32,
    /// What its steps cost.
    pub cost: StepCost,
    /// What of this is batch work.
    pub batch: BatchWork,
}

/// The part of a backlog that is batch work: it comes after interactive work, and gives its blocks to it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct BatchWork {
    /// Tokens of its prompts, and its sequences that give tokens of their answers.
    pub work: StepWork,
    /// Its sequences that will give tokens once their KV has arrived.
    pub coming: Coming,
    /// Blocks that interactive sequences may take from it: those that it has, and those that its waiting sequences will take.
    pub blocks: i64,
}

/// Sequences that a worker does not compute yet.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Coming {
    /// How many.
    pub rows: u64,
    /// Their tokens.
    pub context: u64,
}

impl Coming {
    fn plus(self, other: Coming) -> Coming {
        let (rows, context) = (self.rows.saturating_add(other.rows), self.context.saturating_add(other.context));
        Coming { rows, context }
    }
}

/// A long prompt waits for this many times what is here: short ones that come later go before it.
const OVERTAKEN: f64 = 1.15;

impl Backlog {
    /// How long it takes until the prompts that are here are computed, in seconds.
    #[inline]
    pub fn queue(&self) -> f64 {
        self.cost.prompts(&self.work, self.step_tokens.into())
    }

    /// How long a prompt that lacks so many tokens waits for those that are here, in seconds.
    #[inline]
    pub fn wait(&self, missing: u64) -> f64 {
        if missing > self.spare.into() {
            return bounded(self.queue() * OVERTAKEN);
        }
        self.cost.prompts(&self.next_step(), self.step_tokens.into())
    }

    /// How long the next step takes, in seconds: who comes is not heard before its end. 0: there is nothing to compute.
    #[inline]
    pub fn step(&self) -> f64 {
        let next = self.next_step();
        if next.tokens == 0 && next.rows == 0 { 0.0 } else { self.cost.step(&next) }
    }

    fn next_step(&self) -> StepWork {
        let Backlog { work, step_tokens, .. } = self;
        let share = (f64::from(*step_tokens) / work.tokens.max(1) as f64).min(1.0);
        StepWork { tokens: work.tokens.min((*step_tokens).into()), pairs: (work.pairs as f64 * share) as u64, ..*work }
    }

    /// How many seconds the missing tokens of one more prompt take, once it is its turn: those from position `cached` on. Steps also compute what
    /// answers need.
    #[inline]
    pub fn prompt(&self, cached: u64, tokens: u64) -> f64 {
        let rows = StepWork { tokens: 0, pairs: 0, ..self.work };
        self.cost.prompts(&rows.with_prompt(cached.min(tokens), tokens), self.step_tokens.into())
    }

    /// The answers that are expected here once `wait` is over, where each takes `lasts`, both in seconds: those that are here end one after the other, and those
    /// that come begin one after the other. With equal arrivals all the time, it is as many as now.
    pub fn answers(&self, wait: f64, lasts: f64) -> StepWork {
        let lasts = lasts.max(1e-9);
        let (left, begun) = ((1.0 - wait / lasts).max(0.0), (lasts / wait.max(1e-9)).min(1.0));
        let expected = |now: u64, coming: u64| (now as f64 * left + coming as f64 * begun).round() as u64;
        let rows = expected(self.work.rows, self.coming.rows);
        StepWork { rows, context: expected(self.work.context, self.coming.context), ..StepWork::default() }
    }

    /// The most likely mean time from token to token of an answer with `context` tokens that begins after `wait` and takes `lasts`, in seconds.
    ///
    /// Of its time, it shares with each answer that is here, and with each that is coming, what it does on average where these began and begin at
    /// any time. As many more come in the time of one answer as there are now, or fewer: one answer says little of how often they come.
    pub fn token(&self, wait: f64, lasts: f64, context: u64) -> f64 {
        let (wait, lasts) = (bounded(wait), bounded(lasts).max(1e-9));
        let here = (1.0 - wait / lasts).max(0.0).powi(2) / 2.0;
        let coming = if lasts >= wait { 1.0 - wait / (2.0 * lasts) } else { lasts / (2.0 * wait) };
        let (now, soon) = (self.work.rows as f64, self.coming.rows as f64);
        let more = lasts / (lasts + wait) / 2.0 * (now + soon) / (now + soon + 1.0);
        let beside = |now: u64, soon: u64| {
            let (now, soon) = (now as f64, soon as f64);
            now * here + soon * coming + (now + soon) * more
        };
        let rows = 1.0 + beside(self.work.rows, self.coming.rows);
        let context = context as f64 + beside(self.work.context, self.coming.context);
        bounded(self.cost.base + self.cost.row * rows + self.cost.context * context)
    }

    /// The backlog that an interactive request finds: it goes before the prompts of batch work and before what comes of it, and may take its
    /// blocks. Batch answers that are being given go on beside it as long as there is room.
    #[must_use]
    pub fn for_interactive(self) -> Backlog {
        let Backlog { mut work, mut coming, batch, .. } = self;
        work.tokens = work.tokens.saturating_sub(batch.work.tokens);
        work.pairs = work.pairs.saturating_sub(batch.work.pairs);
        coming.rows = coming.rows.saturating_sub(batch.coming.rows);
        coming.context = coming.context.saturating_sub(batch.coming.context);
        Backlog { work, coming, room: self.room.saturating_add(batch.blocks), batch: BatchWork::default(), ..self }
    }

    /// The backlog that a request finds whose tenant has a share of its own: of the prompts, at most so many tokens and the step that is being
    /// computed go before it, however many are here.
    #[must_use]
    pub fn for_tenant(self, before: u64) -> Backlog {
        let StepWork { tokens, pairs, .. } = self.work;
        let most = before.saturating_add(self.step_tokens.into());
        if tokens <= most {
            return self;
        }
        let pairs = (pairs as f64 * (most as f64 / tokens as f64)) as u64;
        Backlog { work: StepWork { tokens: most, pairs, ..self.work }, ..self }
    }

    /// The same backlog with more batch work to do, as [`Backlog::with`].
    #[must_use]
    pub fn with_batch(self, work: StepWork, blocks: u32) -> Backlog {
        let added = Backlog::default().with(work, blocks);
        let BatchWork { work: own, coming, blocks: owned } = self.batch;
        let batch = BatchWork {
            work: own.plus(added.work),
            coming: coming.plus(added.coming),
            blocks: owned.saturating_sub(added.room),
        };
        Backlog { batch, ..self.with(work, blocks) }
    }

    /// The same backlog with more to do: prompts' tokens of `work`, and its rows once their KV is there.
    #[must_use]
    pub fn with(self, work: StepWork, blocks: u32) -> Backlog {
        let StepWork { tokens, pairs, rows, context } = work;
        let prompts = StepWork { tokens, pairs, ..StepWork::default() };
        let room = self.room.saturating_sub(i64::from(blocks));
        Backlog { work: self.work.plus(prompts), coming: self.coming.plus(Coming { rows, context }), room, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::step::LONGEST;

    const COST: StepCost = StepCost { base: 8e-3, row: 1e-3, context: 1e-6, chunk: 4e-3, token: 1e-4, pair: 0.0 };

    fn ms(time: f64) -> u64 {
        (time * 1e3).round() as u64
    }

    #[test]
    fn what_is_here_comes_first_and_answers_slow_prompts_down() {
        let idle = Backlog { step_tokens: 100, cost: COST, ..Backlog::default() };
        assert_eq!((ms(idle.queue()), ms(idle.prompt(0, 200)), ms(idle.prompt(150, 200))), (0, 28, 9));
        assert_eq!(idle.prompt(300, 200), 0.0, "all is there");
        let work = StepWork::default().with_prompt(0, 1000).with_row(1000);
        let busy = Backlog { work, ..idle };
        assert_eq!(ms(busy.queue()), 160, "ten steps, each with a row");
        assert_eq!(ms(busy.prompt(0, 200)), 32);
        let roomy = Backlog { spare: 20, ..busy };
        assert_eq!((ms(roomy.wait(21)), ms(roomy.wait(20))), (184, 16), "it goes with the next step");
        assert_eq!((ms(Backlog { spare: 20, ..idle }.wait(20))), 0);
        let answers = Backlog { work: StepWork::default().with_row(1000), ..idle };
        assert_eq!([idle, answers, busy].map(|load| ms(load.step())), [0, 10, 16]);
        let more = idle.with(work, 7);
        assert_eq!((ms(more.queue()), more.room, more.coming.rows), (140, -7, 1), "its row comes later");
    }

    #[test]
    fn an_interactive_request_goes_before_batch_work_and_takes_its_room() {
        let (own, batch) = (StepWork::default().with_prompt(0, 300), StepWork::default().with_prompt(0, 700));
        let idle = Backlog { step_tokens: 100, cost: COST, room: 50, ..Backlog::default() };
        let busy = idle.with(own.with_row(40), 20).with_batch(batch.with_row(60), 70);
        assert_eq!((ms(busy.queue()), busy.room, busy.coming.rows), (140, -40, 2), "batch waits for all");
        let seen = busy.for_interactive();
        assert_eq!((ms(seen.queue()), seen.room, seen.coming), (42, 30, Coming { rows: 1, context: 40 }));
        let rows = StepWork::default().with_row(100);
        let gives = Backlog { work: rows, batch: BatchWork { work: rows, blocks: 9, ..BatchWork::default() }, ..idle };
        assert_eq!((gives.for_interactive().work.rows, gives.for_interactive().room), (1, 59), "it goes on beside");
        let untold = Backlog { batch: BatchWork::default(), ..busy };
        assert_eq!(untold.for_interactive(), untold, "of a worker that knows no classes all counts");
    }

    #[test]
    fn a_tenant_waits_for_its_share_and_for_the_step_that_is_computed() {
        let work = StepWork { tokens: 4000, pairs: 8000, rows: 3, context: 300 };
        let busy = Backlog { work, step_tokens: 100, cost: COST, ..Backlog::default() };
        let found = |before| busy.for_tenant(before).work;
        assert_eq!(found(900), StepWork { tokens: 1000, pairs: 2000, ..work }, "answers go on");
        assert_eq!((found(3900), found(u64::MAX)), (work, work));
        assert_eq!(ms(busy.for_tenant(900).queue()), ms(Backlog { work: found(900), ..busy }.queue()));
    }

    /// A worker may say anything.
    #[test]
    fn no_load_is_too_much() {
        let huge = StepWork { tokens: u64::MAX, pairs: u64::MAX, rows: u64::MAX, context: u64::MAX };
        let cost = StepCost { token: 1e300, ..COST };
        let load = Backlog { work: huge, room: i64::MIN, cost, ..Backlog::default() };
        let load = load.with(huge.with_row(u64::MAX).with_prompt(0, u64::MAX), u32::MAX);
        assert_eq!((load.queue(), load.wait(1), load.prompt(0, u64::MAX)), (LONGEST, LONGEST, LONGEST));
        let batch = BatchWork { work: huge, coming: Coming { rows: 9, context: 9 }, blocks: i64::MAX };
        let odd = Backlog { batch, ..Backlog::default() }.for_interactive().with_batch(huge, u32::MAX);
        assert_eq!((odd.for_interactive().work.tokens, odd.for_interactive().coming.rows), (0, 0));
        assert_eq!(load.answers(f64::INFINITY, 0.0).rows, 0);
        let token = |wait, lasts| load.token(wait, lasts, u64::MAX);
        for (wait, lasts) in [(0.0, 1.0), (0.0, f64::INFINITY), (f64::INFINITY, f64::INFINITY), (f64::INFINITY, 0.0)] {
            assert!((1.0..=LONGEST).contains(&token(wait, lasts)), "{wait} {lasts}: {}", token(wait, lasts));
        }
        assert!(load.answers(0.0, f64::INFINITY).with_row(1).rows == u64::MAX);
    }

    #[test]
    fn answers_end_and_begin_while_one_waits() {
        let row = StepWork::default().with_row(100);
        let ten = (0..10).fold(StepWork::default(), |work, _| work.plus(row));
        let at = |waiting, wait: u32| {
            let (coming, work) = (Coming { rows: waiting, context: 100 * waiting }, ten);
            Backlog { work, coming, ..Backlog::default() }.answers(f64::from(wait), 10.0).rows
        };
        assert_eq!((at(0, 0), at(0, 5), at(0, 10), at(0, 99)), (10, 5, 0, 0), "those that are here end");
        assert_eq!((at(5, 5), at(10, 10), at(100, 100)), (10, 10, 10), "one a second comes, and one a second ends");
        assert_eq!(at(5, 0), 15, "all come at once");
    }

    #[test]
    fn a_token_takes_what_answers_beside_it_add() {
        let row = StepWork::default().with_row(0);
        let many = |rows: u64| (0..rows).fold(StepWork::default(), |work, _| work.plus(row));
        let rows = |here: u64, coming: u64, wait: f64| {
            let coming = Coming { rows: coming, context: 0 };
            let load = Backlog { work: many(here), coming, cost: COST, ..Backlog::default() };
            (load.token(wait, 10.0, 0) - COST.base) / COST.row - 1.0
        };
        let near = |rows: f64, least: f64| assert!((least - 1e-9..least + 0.3).contains(&rows), "{rows}");
        near(rows(0, 0, 5.0), 0.0);
        near(rows(1, 0, 0.0), 0.5 + 0.25);
        near(rows(1, 0, 99.0), 0.0);
        near(rows(0, 1, 0.0), 1.0 + 0.25);
        near(rows(0, 1, 90.0), 0.05);
        // As many end as come: it is as many as now.
        assert!((95.0..=100.0).contains(&rows(100, 0, 0.0)), "{}", rows(100, 0, 0.0));
        assert!((95.0..=105.0).contains(&rows(100, 50, 5.0)), "{}", rows(100, 50, 5.0));
    }
}
