//! What a worker has to do, and how long it will take for more.

use std::time::Duration;

use crate::{StepCost, StepWork};

/// What a worker has to do, and what that costs there.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Backlog {
    /// Tokens of prompts that are to be computed, and sequences that give tokens of their answers.
    pub work: StepWork,
    /// Blocks of the KV pool that no sequence owns, less those that waiting sequences will take. Below 0 where there are not enough for them.
    pub room: i64,
    /// Most tokens of prompts in a step.
    pub step_tokens: u32,
    /// What its steps cost.
    pub cost: StepCost,
}

impl Backlog {
    /// How long it takes until the prompts that are here are computed.
    pub fn queue(&self) -> Duration {
        self.cost.prompts(&self.work, self.step_tokens.into())
    }

    /// How long the missing tokens of one more prompt take, once it is its turn: those from position `cached` on. Steps also compute what
    /// answers need.
    pub fn prompt(&self, cached: u64, tokens: u64) -> Duration {
        let rows = StepWork { tokens: 0, pairs: 0, ..self.work };
        self.cost.prompts(&rows.with_prompt(cached.min(tokens), tokens), self.step_tokens.into())
    }

    /// The time between two tokens of an answer, once a sequence of `tokens` tokens is beside those that are here.
    pub fn token(&self, tokens: u64) -> Duration {
        self.cost.step(&StepWork { tokens: 0, pairs: 0, ..self.work }.with_row(tokens))
    }

    /// The same backlog with more to do.
    #[must_use]
    pub fn with(self, work: StepWork, blocks: u32) -> Backlog {
        Backlog { work: self.work.plus(work), room: self.room - i64::from(blocks), ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COST: StepCost = StepCost { base: 8e-3, row: 1e-3, context: 1e-6, chunk: 4e-3, token: 1e-4, pair: 0.0 };

    fn ms(time: Duration) -> u128 {
        time.as_micros().div_ceil(100) / 10
    }

    #[test]
    fn what_is_here_comes_first_and_answers_slow_prompts_down() {
        let idle = Backlog { step_tokens: 100, cost: COST, ..Backlog::default() };
        assert_eq!((ms(idle.queue()), ms(idle.prompt(0, 200)), ms(idle.prompt(150, 200))), (0, 28, 9));
        assert_eq!(idle.prompt(300, 200), Duration::ZERO, "all is there");
        let busy = idle.with(StepWork::default().with_prompt(0, 1000).with_row(1000), 7);
        assert_eq!((ms(busy.queue()), busy.room), (160, -7), "ten steps, each with a row");
        assert_eq!(ms(busy.prompt(0, 200)), 32);
        assert_eq!((ms(idle.token(0)), ms(busy.token(3000))), (9, 14));
    }
}
