//! How long a worker's steps take, by what they compute.
//!
//! A step of decode rows alone takes `base + row · rows + context · tokens of context`: the weights are read once, each row costs its
//! products, and its KV is read. A step that also computes tokens of prompts takes `chunk + token · tokens + pair · pairs` instead of
//! `base`, plus what its rows cost; a pair is one query token and one token that it attends to. These are DistServe's terms (Zhong et al.,
//! "DistServe", OSDI 2024), with products and attention in seconds a unit, so that no property of the model has to be known.

use std::time::Duration;

use crate::fit::Fit;

/// What one step computes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StepWork {
    /// Tokens of prompts.
    pub tokens: u64,
    /// Pairs of a prompt's token and a token that it attends to, itself included.
    pub pairs: u64,
    /// Rows of one token that give a next one.
    pub rows: u64,
    /// Tokens of context that these read, summed.
    pub context: u64,
}

impl StepWork {
    /// Adds the tokens of a prompt from position `from` to `to`, not included.
    #[must_use]
    pub fn with_prompt(mut self, from: u64, to: u64) -> StepWork {
        self.tokens = self.tokens.saturating_add(to - from);
        self.pairs = self.pairs.saturating_add(pairs(from, to));
        self
    }

    /// Both together.
    #[must_use]
    pub fn plus(self, other: StepWork) -> StepWork {
        StepWork {
            tokens: self.tokens.saturating_add(other.tokens),
            pairs: self.pairs.saturating_add(other.pairs),
            rows: self.rows.saturating_add(other.rows),
            context: self.context.saturating_add(other.context),
        }
    }

    /// Adds a sequence that has `context` tokens.
    #[must_use]
    pub fn with_row(mut self, context: u64) -> StepWork {
        self.rows = self.rows.saturating_add(1);
        self.context = self.context.saturating_add(context);
        self
    }
}

/// Pairs of the tokens from position `from` to `to`: the token at position i attends to i + 1.
fn pairs(from: u64, to: u64) -> u64 {
    let below = |n: u64| u128::from(n) * (u128::from(n) + 1) / 2;
    u64::try_from(below(to).saturating_sub(below(from))).unwrap_or(u64::MAX)
}

/// How long steps take. All in seconds, 0 or more; a field of 0 costs nothing or is not known.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct StepCost {
    /// A step of decode rows, whatever their number.
    pub base: f64,
    /// Each row.
    pub row: f64,
    /// Each token of a row's context.
    pub context: f64,
    /// A step that computes tokens of prompts, whatever their number.
    pub chunk: f64,
    /// Each of these tokens.
    pub token: f64,
    /// Each pair of such a token and one that it attends to.
    pub pair: f64,
}

impl StepCost {
    /// How long a step takes, in seconds.
    #[inline]
    pub fn step(&self, work: &StepWork) -> f64 {
        bounded(if work.tokens > 0 {
            self.chunk + self.token * work.tokens as f64 + self.pair * work.pairs as f64 + self.rows(work)
        } else {
            self.base + self.rows(work)
        })
    }

    /// How many pairs of a token and one that it attends to cost as much as the rest of a token; 0 when that is not known.
    pub fn pairs_per_token(&self) -> u32 {
        if self.pair > 0.0 { (self.full_token() / self.pair) as u32 } else { 0 }
    }

    /// What a token costs in a full step, with its part of what the step costs.
    fn full_token(&self) -> f64 {
        self.token + self.chunk / FULL
    }

    fn rows(&self, work: &StepWork) -> f64 {
        self.row * work.rows as f64 + self.context * work.context as f64
    }

    /// How long the prompts' tokens of `work` take, in seconds and in steps of at most `chunk` tokens. Each of these steps also computes the decode rows of
    /// `work`, once.
    #[inline]
    pub fn prompts(&self, work: &StepWork, chunk: u64) -> f64 {
        let steps = work.tokens.div_ceil(chunk.max(1)) as f64;
        bounded(
            steps * (self.chunk + self.rows(work)) + self.token * work.tokens as f64 + self.pair * work.pairs as f64,
        )
    }
}

/// The longest time that is predicted, in seconds. A finite one, so that sums and ratios of times are numbers.
pub(crate) const LONGEST: f64 = 1e18;

/// A time from 0 to [`LONGEST`], in seconds. What is no number counts as 0.
pub(crate) fn bounded(seconds: f64) -> f64 {
    if seconds > 0.0 { seconds.min(LONGEST) } else { 0.0 }
}

/// What a pair of tokens costs at most, as a share of a token, for a model of which nothing is known. Attention does 4 d operations for a pair and layer,
/// where d is the model's width, and the rest of a layer about 24 d² for a token: a share of 1 / (6 d).
const MOST_PAIR: f64 = 0.02;
/// How many times as long an operation of attention takes as one of a layer's products, at most.
const SLOWER: f64 = 8.0;
/// Tokens of a full step: what a step costs may be what its tokens cost, where all are about as large.
const FULL: f64 = 512.0;

/// Learns a worker's [`StepCost`] from its steps.
///
/// Steps with prompts and steps without are fitted apart, so that thousands of the one do not make the other forgotten.
#[derive(Clone, Debug)]
pub struct StepModel {
    rows: Fit<3>,
    prompts: Fit<3>,
    /// As `prompts`, with pairs that cost as much as they can.
    most: Fit<2>,
    /// The most that a pair costs, as a share of a token.
    most_pair: f64,
}

impl Default for StepModel {
    fn default() -> StepModel {
        StepModel { rows: Fit::default(), prompts: Fit::default(), most: Fit::default(), most_pair: MOST_PAIR }
    }
}

impl StepModel {
    /// Of a model that does this share of a token's operations for a pair.
    pub fn of(pair_share: f64) -> StepModel {
        StepModel { most_pair: pair_share * SLOWER, ..StepModel::default() }
    }

    /// Adds a step that took so long.
    pub fn add(&mut self, work: &StepWork, took: Duration) {
        let took = took.as_secs_f64();
        if work.tokens == 0 {
            if work.rows > 0 {
                self.rows.add([1.0, work.rows as f64, work.context as f64], took);
            }
            return;
        }
        // What the rows beside it cost is known from steps of their own. Before it is, a step with rows would say too much of prompts.
        let known = self.rows.coefficients().filter(|_| self.rows.error().is_some());
        let [_, row, context] = match known {
            Some(known) => known,
            None if work.rows == 0 => [0.0; 3],
            None => return,
        };
        let own = took - row * work.rows as f64 - context * work.context as f64;
        // Never less than a tenth: a step with many rows cannot have taken nothing for its prompts.
        let (own, tokens, pairs) = (own.max(took / 10.0), work.tokens as f64, work.pairs as f64);
        self.prompts.add([1.0, tokens, pairs], own);
        self.most.add([1.0, tokens + pairs * self.most_pair], own);
    }

    /// What is known so far.
    pub fn cost(&self) -> StepCost {
        let [base, row, context] = self.rows.coefficients().unwrap_or_default();
        let [chunk, token, pair] = self.prompts.coefficients().unwrap_or_default();
        let cost = StepCost { base, row, context, chunk, token, pair };
        if pair <= cost.full_token() * self.most_pair {
            return cost;
        }
        // A few tokens after long cached prefixes, or very short prompts, do not tell a step's fixed cost from that of its pairs. A long prompt would be
        // predicted to take hours.
        let [chunk, token] = self.most.coefficients().unwrap_or_default();
        StepCost { chunk, token, pair: token * self.most_pair, ..cost }
    }

    /// Median relative error lately of the predicted time of steps without prompts, and of the prompts' part of the others.
    pub fn errors(&self) -> (Option<f64>, Option<f64>) {
        (self.rows.error(), self.prompts.error())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COST: StepCost = StepCost { base: 8e-3, row: 2e-4, context: 5e-8, chunk: 4e-3, token: 3e-5, pair: 1e-8 };

    fn learned() -> StepModel {
        let mut model = StepModel::default();
        for at in 0..400u64 {
            let rows = (0..at * 7 % 33).fold(StepWork::default(), |work, row| work.with_row(100 * row + at % 1000));
            model.add(&rows, Duration::from_secs_f64(COST.step(&rows)));
            let from = at * 131 % 3000;
            let mixed = rows.with_prompt(from, from + 1 + at * 37 % 512);
            model.add(&mixed, Duration::from_secs_f64(COST.step(&mixed)));
        }
        model
    }

    #[test]
    fn a_worker_s_cost_is_learned_from_its_steps_and_predicts_what_it_never_saw() {
        let cost = learned().cost();
        let close = |predicted: f64, truth: f64| {
            let share = predicted / truth;
            assert!((0.95..1.05).contains(&share), "{predicted:?} for {truth:?}: {cost:?}");
        };
        let decode = (0..64).fold(StepWork::default(), |work, _| work.with_row(2000));
        close(cost.step(&decode), COST.step(&decode));
        let alone = StepWork::default().with_prompt(0, 10_000);
        close(cost.prompts(&alone, 512), COST.prompts(&alone, 512));
        let end = decode.with_prompt(9_000, 10_000);
        close(cost.prompts(&end, 512), COST.prompts(&end, 512));
        let (rows, prompts) = learned().errors();
        assert!(rows.unwrap() < 0.05 && prompts.unwrap() < 0.05, "{rows:?} {prompts:?}");
    }

    /// What was learned of a few odd prompts says little of others, and nothing absurd.
    #[test]
    fn short_prompts_do_not_make_long_ones_last_for_hours() {
        let mut model = StepModel::of(2.6e-4);
        for at in 0..40u64 {
            let (from, to) = if at % 4 == 0 { (0, 2 + at % 7) } else { (0, 8) };
            let took = if to == 8 { 20e-3 } else { 5e-3 };
            model.add(&StepWork::default().with_prompt(from, to), Duration::from_secs_f64(took));
        }
        let long = StepWork::default().with_prompt(0, 8000);
        assert!(model.cost().prompts(&long, 512) < 600.0, "{:?}", model.cost());
    }

    /// A worker that has just started has seen a question of a few tokens. A long prompt must not be refused for that: it would never teach better.
    #[test]
    fn one_short_prompt_does_not_say_hours_of_a_long_one_and_a_long_one_says_the_rest() {
        let (short, long) = (StepWork::default().with_prompt(0, 8), StepWork::default().with_prompt(0, 8000));
        // SmolLM2's share, and Llama-3.1-8B's.
        for mut model in [StepModel::of(2.6e-4), StepModel::of(3.3e-5)] {
            model.add(&short, Duration::from_millis(27));
            let predicted = model.cost().prompts(&long, 512);
            assert!((1.0..200.0).contains(&predicted), "{predicted}, where 1,000 such prompts take 27");
            for from in (0..8000).step_by(500) {
                let work = StepWork::default().with_prompt(from, from + 500);
                model.add(&work, Duration::from_secs_f64(COST.step(&work)));
            }
            let (predicted, truth) = (model.cost().prompts(&long, 512), COST.prompts(&long, 512));
            assert!((0.95..1.05).contains(&(predicted / truth)), "{predicted} {truth}");
        }
    }

    /// What was learned must hold for what it was learned from, also where pairs are bounded.
    #[test]
    fn what_pairs_may_not_cost_counts_as_tokens() {
        let truth = StepCost { chunk: 5e-3, pair: 1e-6, ..StepCost::default() };
        let mut model = StepModel::of(1e-4);
        for at in 0..400 {
            let work = StepWork::default().with_prompt(0, 200 + at * 37 % 56);
            model.add(&work, Duration::from_secs_f64(truth.step(&work)));
        }
        let work = StepWork::default().with_prompt(0, 230);
        let (got, want) = (model.cost().step(&work), truth.step(&work));
        assert!((got / want - 1.0).abs() < 0.05, "{got} s for {want} s: {:?}", model.cost());
    }

    /// A decode worker computes only short prompts. What their tokens cost may go to their pairs, and must not be lost.
    #[test]
    fn what_tokens_cost_may_count_as_their_pairs() {
        let truth = StepCost { chunk: 5e-3, pair: 5e-8, ..StepCost::default() };
        let mut model = StepModel::default();
        for at in 0..400 {
            let work = StepWork::default().with_prompt(0, 1 + at * 37 % 256);
            model.add(&work, Duration::from_secs_f64(truth.step(&work)));
        }
        let short = StepWork::default().with_prompt(0, 200);
        let (got, want) = (model.cost().step(&short), truth.step(&short));
        assert!((got / want - 1.0).abs() < 0.05, "{got} s for {want} s: {:?}", model.cost());
    }

    #[test]
    fn a_prompt_costs_the_sum_of_its_chunks() {
        let work = |from, to| StepWork::default().with_prompt(from, to).with_row(500);
        let beside = StepWork::default().with_row(500);
        let sum = COST.step(&work(300, 812)) + COST.step(&work(812, 1324)) + COST.step(&work(1324, 1500));
        let whole = COST.prompts(&beside.with_prompt(300, 1500), 512);
        assert!((sum - whole).abs() < 1e-8, "{sum:?} {whole:?}");
        assert_eq!(COST.prompts(&beside, 512), 0.0, "nothing is left to compute");
    }

    #[test]
    fn pairs_are_worth_what_they_cost() {
        // 3e-5 + 4e-3 / 512 a token, 1e-8 a pair.
        assert_eq!(COST.pairs_per_token(), 3781);
        assert_eq!(StepCost::default().pairs_per_token(), 0, "not known");
        assert_eq!(StepCost { pair: 1.0, ..StepCost::default() }.pairs_per_token(), 0);
    }

    #[test]
    fn steps_with_rows_of_unknown_cost_say_nothing_of_prompts() {
        let mut model = StepModel::default();
        let mixed = StepWork::default().with_prompt(0, 100).with_row(10);
        (0..100).for_each(|_| model.add(&mixed, Duration::from_millis(50)));
        assert_eq!(model.cost(), StepCost::default());
        let alone = StepWork::default().with_prompt(0, 100);
        (0..100).for_each(|_| model.add(&alone, Duration::from_millis(50)));
        assert!(model.cost().token > 0.0 && model.cost().row == 0.0);
    }

    #[test]
    fn no_number_is_too_large() {
        let huge = StepCost { token: f64::MAX, ..COST };
        assert_eq!(huge.prompts(&StepWork::default().with_prompt(0, u64::MAX), 1), LONGEST);
        let most = StepWork::default().with_prompt(0, u64::MAX).with_row(u64::MAX);
        assert_eq!(most.plus(most), StepWork { rows: 2, ..most });
        assert_eq!(pairs(0, u64::MAX), u64::MAX);
        assert_eq!((pairs(0, 3), pairs(2, 4)), (6, 7));
    }
}
