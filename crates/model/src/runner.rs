//! [`ModelRunner`] for the decoder: a batch in, one sampled token per sampling row out.

use baton_engine::{Batch, ModelRunner, RunError};
use baton_kernels::Backend;
use baton_types::TokenOut;

use crate::decoder::Inputs;
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
            self.inputs.ids.extend_from_slice(row.tokens);
            for (ragged, table) in self.inputs.batches.iter_mut().zip(row.tables) {
                ragged.push_around(start, len, table.present(), (table.holes() * self.block_size) as usize);
            }
            if row.sample.is_some() {
                self.inputs.sampled.push(self.inputs.ids.len() as u32 - 1);
            }
        }
        self.pad();
        Ok(())
    }

    /// Rows that all are one token and sample are padded to what the backend says, as far as there is room for their logits. Several ranks
    /// exchange within a step, so theirs are not.
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

    /// Makes the batch's copies and runs its rows through all layers.
    fn compute(&mut self, batch: &Batch<'_>, on_layer: &mut dyn FnMut(u32)) -> Result<(), RunError> {
        self.take_batch(batch)?;
        batch.swap_out.iter().for_each(|swap| self.backend.swap_out(swap.group, swap.block, swap.host));
        batch.swap_in.iter().for_each(|swap| self.backend.swap_in(swap.group, swap.host, swap.block));
        batch.copies.iter().for_each(|copy| self.backend.copy_block(copy.group, copy.from, copy.to));
        self.forward(on_layer)
    }

    /// Computes the logits of the sampling rows, as many together as there is room for, and hands each portion to `turn(decoder, first of
    /// the sampling rows, how many)`, on the first of several ranks, which has them; then waits for all, and tells of the layers of a step
    /// that was done as a whole.
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
        self.backend.finish().map_err(|error| RunError(error.to_string()))
    }

    /// For those who look at logits: runs a batch and hands each sampling row's (`[vocab]`) to `each(row index among the sampling
    /// ones, logits)`, on the host.
    pub fn run_logits(
        &mut self,
        batch: &Batch<'_>,
        on_layer: &mut dyn FnMut(u32),
        each: &mut dyn FnMut(&mut Sampler, usize, &mut [f32]),
    ) -> Result<(), RunError> {
        self.compute(batch, on_layer)?;
        self.in_turns(on_layer, |decoder, first, count| {
            for i in 0..count {
                decoder.read_logits(i);
                each(&mut decoder.sampler, first + i, &mut decoder.inputs.logits);
            }
        })
    }
}

impl<B: Backend> ModelRunner for Decoder<B> {
    fn run(
        &mut self,
        batch: &Batch<'_>,
        on_layer: &mut dyn FnMut(u32),
        out: &mut Vec<TokenOut>,
    ) -> Result<(), RunError> {
        self.compute(batch, on_layer)?;
        let samples = batch.rows.iter().filter_map(|row| row.sample.as_ref());
        self.in_turns(on_layer, |decoder, first, count| decoder.choose(samples.clone().skip(first).take(count), out))
    }

    fn lost(&mut self) -> Option<RunError> {
        self.backend.lost().map(|error| RunError(error.to_string()))
    }
}
