//! Tracks each answer's state in its grammar, on the thread that samples.
//!
//! A matcher is looked up by its constraint and the tokens it has consumed, never by a name. If there is none, it is rebuilt by replaying
//! the tokens. So an answer that was split, resumed, preempted or recomputed goes on as if nothing had happened (I1).

use std::collections::VecDeque;
use std::sync::Arc;

use baton_types::Constraint;
use llguidance::Matcher;

use crate::{GrammarError, Grammars};

/// Most answers whose matchers are kept (I5). Other answers are replayed at each token.
const KEPT: usize = 256;

/// The matchers of the answers under way.
pub struct Matchers {
    grammars: Arc<Grammars>,
    /// Most recently used last.
    live: VecDeque<Live>,
}

struct Live {
    constraint: Arc<Constraint>,
    matcher: Matcher,
    seen: Vec<u32>,
}

impl Matchers {
    /// Matchers for answers of the model of `grammars`.
    pub fn new(grammars: Arc<Grammars>) -> Matchers {
        Matchers { grammars, live: VecDeque::new() }
    }

    /// Writes to `allowed`, in place of its contents, which of `vocab` tokens may follow `generated`: bit `i` of word `w` is token `32 w
    /// + i`. `ends` are the tokens that end the answer: they may follow exactly where the answer is complete.
    ///
    /// # Errors
    /// When the constraint cannot be compiled, when `generated` is not the beginning of an answer under it, or when nothing can follow.
    pub fn mask(
        &mut self,
        constraint: &Arc<Constraint>,
        generated: &[u32],
        ends: &[u32],
        vocab: usize,
        allowed: &mut Vec<u32>,
    ) -> Result<(), GrammarError> {
        let mut live = self.take(constraint, generated)?;
        // A matcher that failed is not kept.
        live.follow(generated)?;
        live.mask(ends, vocab, allowed)?;
        if self.live.len() >= KEPT {
            self.live.pop_front();
        }
        self.live.push_back(live);
        Ok(())
    }

    /// Drops the matcher of an answer that ended after `generated`.
    pub fn ended(&mut self, constraint: &Arc<Constraint>, generated: &[u32]) {
        let is = |live: &Live| live.seen == generated && live.constraint == *constraint;
        if let Some(at) = self.live.iter().rposition(is) {
            self.live.remove(at);
        }
    }

    /// Takes the matcher that has consumed the longest prefix of `generated`, or makes a new one.
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

    fn mask(&mut self, ends: &[u32], vocab: usize, out: &mut Vec<u32>) -> Result<(), GrammarError> {
        let stuck = |e: &dyn std::fmt::Display| GrammarError::stuck(&self.constraint, self.seen.len(), e);
        let stopped = self.matcher.is_stopped();
        let complete = stopped || self.matcher.is_accepting().map_err(|e| stuck(&e))?;
        // Only an end token can follow a complete answer that cannot be extended.
        let allowed = if stopped { None } else { Some(self.matcher.compute_mask()) };
        let allowed = match allowed.transpose() {
            Err(e) if !complete => return Err(stuck(&e)),
            allowed => allowed.ok().flatten(),
        };
        let words = vocab.div_ceil(32);
        out.clear();
        out.extend(allowed.iter().flat_map(|allowed| allowed.as_slice()).copied().take(words));
        out.resize(words, 0);
        if let Some(last) = out.last_mut().filter(|_| !vocab.is_multiple_of(32)) {
            *last &= (1 << (vocab % 32)) - 1;
        }
        for id in ends.iter().map(|&id| id as usize).filter(|&id| id < vocab) {
            let (word, bit) = (&mut out[id / 32], 1 << (id % 32));
            *word = if complete { *word | bit } else { *word & !bit };
        }
        if out.iter().any(|&word| word != 0) {
            return Ok(());
        }
        Err(stuck(&"no token of the model's vocabulary can follow"))
    }
}
