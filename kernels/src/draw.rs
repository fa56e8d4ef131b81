//! What [`crate::Backend::sample`] is told of a row of logits. Pure; nothing here chooses.

use baton_types::SamplingParams;

/// Most logits of a row that a backend changes before it chooses. Beyond it, which a row's own sequence alone decides (I1), the
/// caller does.
pub const MAX_LOGIT_CHANGES: usize = 1024;

/// A change of one logit: `x = (x > 0 ? x / divide : x · divide) - subtract + add`.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct LogitChange {
    /// Which.
    pub id: u32,
    /// The repetition penalty, or 1.
    pub divide: f32,
    /// Presence and frequency penalties, or 0.
    pub subtract: f32,
    /// Bias, or 0.
    pub add: f32,
}

impl LogitChange {
    /// One that changes nothing.
    pub fn none(id: u32) -> Self {
        LogitChange { id, divide: 1.0, subtract: 0.0, add: 0.0 }
    }

    /// The logit after it.
    pub fn of(&self, x: f32) -> f32 {
        (if x > 0.0 { x / self.divide } else { x * self.divide }) - self.subtract + self.add
    }
}

/// How to choose one token: mask, changes, then temperature, top-k, top-p, min-p and one draw, a function of (seed, index) (I1).
#[derive(Clone, Copy, Debug)]
pub struct Draw<'a> {
    /// Row of the logits.
    pub row: usize,
    /// Temperature, filters, seed, log probabilities. Those of the logits as they are, before mask and changes.
    pub params: &'a SamplingParams,
    /// Number of the token in its answer.
    pub index: u32,
    /// Bit `i` of word `w` allows token `32 w + i`; None: all.
    pub mask: Option<&'a [u32]>,
    /// Of different logits of the vocabulary, at most [`MAX_LOGIT_CHANGES`].
    pub changes: &'a [LogitChange],
}

impl Draw<'_> {
    /// Whether it is from the logits as they are.
    pub fn plain(&self) -> bool {
        self.mask.is_none() && self.changes.is_empty()
    }
}
