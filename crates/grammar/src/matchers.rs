//! Where each answer stands in its grammar, on the thread that samples.
//!
//! A matcher is found by its constraint and the tokens it has seen, never by a name, and made by replaying them when there is
//! none: an answer that was split, resumed, preempted or recomputed goes on as if nothing had happened (I1).

use std::collections::VecDeque;
use std::sync::Arc;

use baton_types::Constraint;
use llguidance::Matcher;

use crate::{GrammarError, Grammars};

/// Answers whose matchers are kept (I5); others are replayed at each token.
const KEPT: usize = 256;

/// The matchers of the answers under way.
pub struct Matchers {
    grammars: Arc<Grammars>,
    /// Used last, last.
    live: VecDeque<Live>,
}

struct Live {
    constraint: Arc<Constraint>,
    matcher: Matcher,
    seen: Vec<u32>,
}

impl Matchers {
    /// For answers of the model of `grammars`.
    pub fn new(grammars: Arc<Grammars>) -> Matchers {
        Matchers { grammars, live: VecDeque::new() }
    }

    /// Sets the logits (`[vocab]`) of all tokens that may not follow `generated` to negative infinity. `ends` are the tokens
    /// that end the answer: they are left exactly where it is complete.
    ///
    /// # Errors
    /// When the constraint cannot be compiled, `generated` is no beginning of an answer under it, or nothing can follow.
    pub fn mask(
        &mut self,
        constraint: &Arc<Constraint>,
        generated: &[u32],
        ends: &[u32],
        logits: &mut [f32],
    ) -> Result<(), GrammarError> {
        let mut live = self.take(constraint, generated)?;
        // A matcher that failed is not kept.
        live.follow(generated)?;
        live.mask(ends, logits)?;
        if self.live.len() >= KEPT {
            self.live.pop_front();
        }
        self.live.push_back(live);
        Ok(())
    }

    /// The answer whose matcher was used last has ended.
    pub fn ended(&mut self) {
        self.live.pop_back();
    }

    /// The matcher that has seen most of `generated` and nothing else.
    fn take(&mut self, constraint: &Arc<Constraint>, generated: &[u32]) -> Result<Live, GrammarError> {
        let fits = |live: &Live| generated.starts_with(&live.seen) && live.constraint == *constraint;
        let found = (0..self.live.len()).filter(|&at| fits(&self.live[at])).max_by_key(|&at| self.live[at].seen.len());
        match found.and_then(|at| self.live.remove(at)) {
            Some(live) => Ok(live),
            None => {
                let matcher = self.grammars.start(constraint)?;
                Ok(Live { constraint: constraint.clone(), matcher, seen: Vec::new() })
            }
        }
    }
}

impl Live {
    fn follow(&mut self, generated: &[u32]) -> Result<(), GrammarError> {
        for &id in generated.get(self.seen.len()..).unwrap_or_default() {
            self.matcher
                .consume_token(id)
                .map_err(|e| GrammarError::stuck(&self.constraint, self.seen.len(), format!("token {id}: {e}")))?;
            self.seen.push(id);
        }
        Ok(())
    }

    fn mask(&mut self, ends: &[u32], logits: &mut [f32]) -> Result<(), GrammarError> {
        let stuck = |e: &dyn std::fmt::Display| GrammarError::stuck(&self.constraint, self.seen.len(), e);
        let stopped = self.matcher.is_stopped();
        let complete = stopped || self.matcher.is_accepting().map_err(|e| stuck(&e))?;
        // Nothing but an end can follow a complete answer that cannot be longer.
        let allowed = if stopped { None } else { Some(self.matcher.compute_mask()) };
        let allowed = match allowed.transpose() {
            Err(e) if !complete => return Err(stuck(&e)),
            allowed => allowed.ok().flatten(),
        };
        let kept: Vec<(usize, f32)> =
            ends.iter().filter_map(|&id| Some((id as usize, *logits.get(id as usize)?))).collect();
        match allowed {
            Some(allowed) => (0u32..)
                .zip(logits.iter_mut())
                .filter(|(id, _)| !allowed.is_allowed(*id))
                .for_each(|(_, logit)| *logit = f32::NEG_INFINITY),
            None => logits.fill(f32::NEG_INFINITY),
        }
        for (id, logit) in kept {
            logits[id] = if complete { logit } else { f32::NEG_INFINITY };
        }
        if logits.iter().any(|&x| x > f32::NEG_INFINITY) {
            return Ok(());
        }
        Err(stuck(&"no token of the model's vocabulary can follow"))
    }
}
