//! [`ModelRunner`] for the decoder: takes a batch, returns the tokens that its rows score and sample.

use baton_engine::{Batch, ModelRunner, Row, RunError};
use baton_kernels::{Backend, Draw};
use baton_types::TokenOut;

use crate::choose::{PendingTokens, plain_draws, wants};
use crate::decoder::Inputs;
use crate::error::step_failed;
use crate::{Decoder, Sampler};

impl<B: Backend> Decoder<B> {
    fn take_batch(&mut self, batch: &Batch<'_>) -> Result<(), RunError> {
        let vocab = self.config.vocab_size;
        self.inputs.ids.clear();
        self.inputs.sampled.clear();
        self.inputs.batches.iter_mut().for_each(|b| b.clear());
        for row in batch.rows {
            if let Some(id) = row.tokens.iter().find(|&&id| id >= vocab) {
                return Err(RunError(format!("token id {id} is outside the vocabulary of {vocab}")));
            }
            let (start, len) = (row.start as usize, row.tokens.len());
            if start + len > self.limits.context || self.inputs.ids.len() + len > self.limits.tokens {
                return Err(RunError(format!("{len} tokens at position {start} exceed the limits {:?}", self.limits)));
            }
            match self.followed(row)? {
                Some(id) => self.inputs.ids.push(id),
                None => self.inputs.ids.extend_from_slice(row.tokens),
            }
            for (ragged, table) in self.inputs.batches.iter_mut().zip(row.tables) {
                ragged.push_around(start, len, table.present(), (table.holes() * self.block_size) as usize);
            }
            if let Some(score) = row.score {
                let first = (self.inputs.ids.len() - len) as u32 + score.after;
                self.inputs.sampled.extend(first..first + score.tokens.len() as u32);
            }
            if row.sample.is_some() {
                self.inputs.sampled.push(self.inputs.ids.len() as u32 - 1);
            }
        }
        self.pad();
        Ok(())
    }

    /// The id to embed for a row whose token comes from the previous step: a reference to the backend's draw, or the token if it is known.
    fn followed(&self, row: &Row<'_>) -> Result<Option<u32>, RunError> {
        let Some(place) = row.follows else { return Ok(None) };
        let id = self.pending.back().and_then(|pending| pending.id(place as usize));
        let none = || RunError(format!("row of sequence {} follows a step that is not in flight", row.seq));
        if row.tokens.len() == 1 { id.ok_or_else(none).map(Some) } else { Err(none()) }
    }

    /// Pads a step in which every row is one token and samples, to the size that the backend asks for, if the logits buffer has room. Steps
    /// of several ranks are not padded, because ranks exchange within a step.
    fn pad(&mut self) {
        let alone = self.ranks() == 1;
        let Inputs { ids, batches, sampled, padded, .. } = &mut self.inputs;
        let (rows, most) = (ids.len(), self.limits.samples.min(self.limits.tokens));
        let single = alone && sampled.len() == rows && batches.iter().all(|batch| batch.spans().len() == rows);
        let to = if single { self.backend.padded(rows, most) } else { None };
        *padded = to.map(|_| rows);
        if let Some(to) = to {
            ids.resize(to, 0);
            sampled.extend(rows as u32..to as u32);
            batches.iter_mut().for_each(|batch| batch.pad_to(to));
        }
    }

    /// Does the batch's copies, then runs its rows through all layers.
    fn compute(
        &mut self,
        batch: &Batch<'_>,
        on_layer: &mut dyn FnMut(u32),
        draws: &[Draw<'_>],
    ) -> Result<(), RunError> {
        batch.copies.iter().for_each(|copy| self.backend.copy_block(copy.group, copy.from, copy.to));
        self.forward(on_layer, draws)
    }

    /// Computes the logits that are wanted, in portions that fit the logits buffer, and calls `turn(decoder, first row of logits, count)` for
    /// each portion. Of several ranks only rank 0 has the logits and calls `turn`. For a padded step, `on_layer` is called at the end for all
    /// layers.
    fn in_turns(
        &mut self,
        on_layer: &mut dyn FnMut(u32),
        mut turn: impl FnMut(&mut Self, usize, usize),
    ) -> Result<(), RunError> {
        let padded = self.inputs.padded;
        let (mut first, all) = (0, padded.unwrap_or(self.inputs.sampled.len()));
        while first < all {
            let count = self.limits.samples.min(all - first);
            if padded.is_none() {
                self.logits(first, count)?;
            }
            if self.rank() == 0 {
                turn(self, first, count);
            }
            first += count;
        }
        if padded.is_some() {
            self.backend.publish();
            (0..self.config.layers).for_each(on_layer);
        }
        Ok(())
    }

    /// Runs a batch for callers that look at logits: calls `each(sampler, index of the sampling row, logits)` with each row (`[vocab]`) on
    /// the host.
    pub fn run_logits(
        &mut self,
        batch: &Batch<'_>,
        on_layer: &mut dyn FnMut(u32),
        each: &mut dyn FnMut(&mut Sampler, usize, &mut [f32]),
    ) -> Result<(), RunError> {
        self.take_batch(batch)?;
        self.compute(batch, on_layer, &[])?;
        self.in_turns(on_layer, |decoder, first, count| {
            for i in 0..count {
                decoder.read_logits(i);
                each(&mut decoder.sampler, first + i, &mut decoder.inputs.logits);
            }
        })?;
        self.backend.finish().map_err(step_failed)
    }

    /// Waits for all launched steps and discards their results.
    pub(crate) fn abandon(&mut self) {
        while let Some(pending) = self.pending.pop_front() {
            // The result does not matter: the step has failed.
            if self.backend.collect().is_err() {
                self.drain();
            }
            self.spare.push(pending);
        }
    }

    /// Waits until nothing of a failed step is under way. The backend may have started part of it, and the step's blocks go to other
    /// sequences next (I3).
    pub(crate) fn drain(&mut self) {
        if let Err(error) = self.backend.drain() {
            self.lost.get_or_insert(step_failed(error));
        }
    }

    /// Submits a whole step. Waits for nothing except the logits of rows whose tokens the host chooses.
    fn ask(
        &mut self,
        batch: &Batch<'_>,
        on_layer: &mut dyn FnMut(u32),
        pending: &mut PendingTokens,
    ) -> Result<(), RunError> {
        self.take_batch(batch)?;
        let wants = wants(batch);
        // The tokens of a padded step can be drawn as part of the step.
        let there = self.inputs.padded.is_some() && self.backend.samples(self.config.vocab_size as usize);
        if let Some(draws) = there.then(|| plain_draws(wants.clone())).flatten() {
            self.compute(batch, on_layer, &draws)?;
            pending.drawn(draws.len());
            self.in_turns(on_layer, |_, _, _| ())?;
        } else {
            self.compute(batch, on_layer, &[])?;
            let turn =
                |decoder: &mut Self, first, count| decoder.choose(wants.clone().skip(first).take(count), pending);
            self.in_turns(on_layer, turn)?;
        }
        self.backend.submit().map_err(step_failed)
    }
}

impl<B: Backend> ModelRunner for Decoder<B> {
    fn launch(&mut self, batch: &Batch<'_>, on_layer: &mut dyn FnMut(u32)) -> Result<(), RunError> {
        let mut pending = self.spare.pop().unwrap_or_default();
        pending.clear();
        let asked = self.ask(batch, on_layer, &mut pending);
        match &asked {
            Ok(()) => self.pending.push_back(pending),
            Err(_) => {
                self.spare.push(pending);
                self.drain();
            }
        }
        asked
    }

    fn collect(&mut self, batch: &Batch<'_>, out: &mut Vec<TokenOut>) -> Result<(), RunError> {
        let Some(mut pending) = self.pending.pop_front() else {
            return Err(RunError("no step was launched".to_owned()));
        };
        let collected = self.backend.collect().map_err(step_failed);
        if collected.is_ok() {
            self.tell(wants(batch), &mut pending, out);
        }
        self.spare.push(pending);
        if collected.is_err() {
            self.drain();
        }
        collected
    }

    /// Ranks report a layer once all have stored theirs, which is after they have read it.
    fn reads_by_layer(&self) -> bool {
        self.ranks() == 1
    }

    fn overlaps(&self) -> bool {
        self.backend.overlaps() && self.ranks() == 1
    }

    fn device(&self) -> Option<String> {
        self.backend.overlaps().then(|| self.backend.name())
    }

    fn lost(&mut self) -> Option<RunError> {
        self.lost.clone().or_else(|| self.backend.lost().map(step_failed))
    }
}

#[cfg(test)]
mod tests;
