//! [`ModelRunner`] for the decoder: a batch in, one sampled token per sampling row out.

use baton_engine::{Batch, ModelRunner, Row, RunError};
use baton_kernels::{Backend, Draw, KernelError};
use baton_types::TokenOut;

use crate::choose::{Flight, draw, plain};
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
            match self.followed(row)? {
                Some(id) => self.inputs.ids.push(id),
                None => self.inputs.ids.extend_from_slice(row.tokens),
            }
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

    /// In place of a row's token, what the step launched before this one chooses, for the backend or already known.
    fn followed(&self, row: &Row<'_>) -> Result<Option<u32>, RunError> {
        let Some(place) = row.follows else { return Ok(None) };
        let id = self.flights.back().and_then(|flight| flight.id(place as usize));
        let none = || RunError(format!("row of sequence {} follows a step that is not in flight", row.seq));
        if row.tokens.len() == 1 { id.ok_or_else(none).map(Some) } else { Err(none()) }
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
    fn compute(
        &mut self,
        batch: &Batch<'_>,
        on_layer: &mut dyn FnMut(u32),
        draws: &[Draw<'_>],
    ) -> Result<(), RunError> {
        batch.swap_out.iter().for_each(|swap| self.backend.swap_out(swap.group, swap.block, swap.host));
        batch.swap_in.iter().for_each(|swap| self.backend.swap_in(swap.group, swap.host, swap.block));
        batch.copies.iter().for_each(|copy| self.backend.copy_block(copy.group, copy.from, copy.to));
        self.forward(on_layer, draws)
    }

    /// Computes the logits of the sampling rows, as many together as there is room for, and hands each portion to `turn(decoder, first of
    /// the sampling rows, how many)`, on the first of several ranks, which has them; then tells of the layers of a step that was done as a
    /// whole.
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

    /// For those who look at logits: runs a batch and hands each sampling row's (`[vocab]`) to `each(row index among the sampling
    /// ones, logits)`, on the host.
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
        self.backend.finish().map_err(failed)
    }

    /// Waits for what was launched, and nobody hears of it.
    pub(crate) fn abandon(&mut self) {
        while let Some(flight) = self.flights.pop_front() {
            // Whatever it says: the step has failed.
            if self.backend.collect().is_err() {
                self.drain();
            }
            self.spare.push(flight);
        }
    }

    /// Waits until nothing of a step that failed is under way, half of which the backend may have been given: its blocks go to others
    /// next (I3).
    pub(crate) fn drain(&mut self) {
        if let Err(error) = self.backend.drain() {
            self.lost.get_or_insert(failed(error));
        }
    }

    /// Asks for all of a step, and waits for none of it but the logits of rows whose tokens are chosen here.
    fn ask(&mut self, batch: &Batch<'_>, on_layer: &mut dyn FnMut(u32), flight: &mut Flight) -> Result<(), RunError> {
        self.take_batch(batch)?;
        let samples = batch.rows.iter().filter_map(|row| row.sample.as_ref());
        // Tokens of a padded step can be drawn within it.
        let there = self.backend.samples(self.config.vocab_size as usize);
        if self.inputs.padded.is_some() && there && samples.clone().all(plain) {
            let draws: Vec<Draw<'_>> = samples.enumerate().map(|(row, sample)| draw(row, sample)).collect();
            self.compute(batch, on_layer, &draws)?;
            flight.drawn(draws.len());
            self.in_turns(on_layer, |_, _, _| ())?;
        } else {
            self.compute(batch, on_layer, &[])?;
            let turn =
                |decoder: &mut Self, first, count| decoder.choose(samples.clone().skip(first).take(count), flight);
            self.in_turns(on_layer, turn)?;
        }
        self.backend.submit().map_err(failed)
    }
}

fn failed(error: KernelError) -> RunError {
    RunError(error.to_string())
}

impl<B: Backend> ModelRunner for Decoder<B> {
    fn launch(&mut self, batch: &Batch<'_>, on_layer: &mut dyn FnMut(u32)) -> Result<(), RunError> {
        let mut flight = self.spare.pop().unwrap_or_default();
        flight.clear();
        let asked = self.ask(batch, on_layer, &mut flight);
        match &asked {
            Ok(()) => self.flights.push_back(flight),
            Err(_) => {
                self.spare.push(flight);
                self.drain();
            }
        }
        asked
    }

    fn collect(&mut self, batch: &Batch<'_>, out: &mut Vec<TokenOut>) -> Result<(), RunError> {
        let Some(mut flight) = self.flights.pop_front() else {
            return Err(RunError("no step was launched".to_owned()));
        };
        let collected = self.backend.collect().map_err(failed);
        if collected.is_ok() {
            let samples = batch.rows.iter().filter_map(|row| row.sample.as_ref());
            self.tell(samples, &mut flight, out);
        }
        self.spare.push(flight);
        if collected.is_err() {
            self.drain();
        }
        collected
    }

    fn overlaps(&self) -> bool {
        self.backend.overlaps() && self.ranks() == 1
    }

    fn device(&self) -> Option<String> {
        self.backend.overlaps().then(|| self.backend.name())
    }

    fn lost(&mut self) -> Option<RunError> {
        self.lost.clone().or_else(|| self.backend.lost().map(failed))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use baton_engine::{CacheConfig, Engine, EngineConfig, Event, NewSequence, Order, Start, Step, SwapConfig, Time};
    use baton_kernels::cuda::{CudaBackend, CudaOptions, Nowhere, Recorder};
    use baton_model_files::RandomModel;
    use baton_types::{KvDtype, PoolGeometry, RequestId, SamplingParams};

    use super::*;
    use crate::{Limits, kv_layout};

    /// An engine over a model on a device that computes nothing and records all that it is asked for.
    struct Scene {
        engine: Engine,
        runner: Decoder<CudaBackend<Recorder<Nowhere>>>,
        device: Arc<Recorder<Nowhere>>,
        events: Vec<Event>,
    }

    impl Scene {
        fn new() -> Scene {
            let model = RandomModel::parse("random:tiny").unwrap().unwrap().open().unwrap();
            let layout = kv_layout(model.config(), model.fingerprint(), KvDtype::F16, 16);
            let geometry = PoolGeometry::uniform(layout, 8);
            let limits = EngineConfig {
                token_budget: 32,
                chunk: 32,
                pack_tokens: 32,
                max_running: 4,
                max_waiting: 4,
                context_tokens: 64,
                local_tokens: 0,
                order: Order::default(),
                cache: CacheConfig::default(),
                swap: SwapConfig::default(),
            };
            let engine = Engine::new(limits, &geometry).unwrap();
            let device = Arc::new(Recorder::new(Nowhere::default()));
            let backend = CudaBackend::new(Arc::clone(&device), geometry.clone(), CudaOptions::default()).unwrap();
            let limits = Limits { tokens: 32, samples: 4, context: 64, table_entries: 8 };
            let runner = Decoder::load(&model, &geometry.layout, backend, limits).unwrap();
            Scene { engine, runner, device, events: Vec::new() }
        }

        /// Plans a step and launches it.
        fn launch(&mut self) -> (Step, Result<(), RunError>) {
            let step = self.engine.plan(Time(0), &mut self.events).expect("a step");
            let runner = &mut self.runner;
            let launched = self.engine.with_batch(&step, |batch| runner.launch(batch, &mut |_| ()));
            (step, launched)
        }

        /// The same of a new sequence alone.
        fn launch_new(&mut self, max_tokens: u32) -> (Step, Result<(), RunError>) {
            let new = NewSequence {
                request: RequestId("r".to_owned()),
                tokens: (0..20).collect(),
                prompt_tokens: 20,
                params: SamplingParams { max_tokens, temperature: 0.0, ..SamplingParams::default() },
                start: Start::Compute,
                deadline: None,
                prefix: None,
                priority: 0,
            };
            self.engine.submit(new).unwrap();
            self.launch()
        }

        fn collect(&mut self, step: &Step) -> Result<(), RunError> {
            let runner = &mut self.runner;
            self.engine.with_batch(step, |batch| runner.collect(batch, &mut Vec::new()))
        }

        /// The step failed: its blocks are free from here on.
        fn fail(&mut self, step: Step, error: RunError) {
            self.engine.fail(step, error, &mut self.events);
        }
    }

    /// I3, I6: what a launch had queued before it failed reads and writes blocks that are free as soon as that is told.
    #[test]
    fn nothing_of_a_step_is_under_way_when_its_launch_has_failed() {
        let mut scene = Scene::new();
        let (step, launched) = scene.launch_new(4);
        launched.unwrap();
        assert!(!scene.device.under_way().is_empty());
        // Behind one that is not collected, in the midst of a layer.
        scene.device.refuse("baton_gate_mul");
        let (second, launched) = scene.launch();
        assert!(launched.as_ref().unwrap_err().0.contains("baton_gate_mul"));
        assert_eq!(scene.device.under_way(), [""; 0]);
        assert_eq!(scene.runner.lost(), None, "the next may go well");
        scene.collect(&step).unwrap();
        scene.fail(step, RunError("planted".to_owned()));
        scene.fail(second, launched.unwrap_err());
        assert!(scene.engine.idle());
        scene.device.refuse("");
        let (step, launched) = scene.launch_new(1);
        assert_eq!(launched, Ok(()));
        assert_eq!(scene.collect(&step), Ok(()));
        scene.fail(step, RunError("over".to_owned()));
        assert_eq!(scene.device.problems(), [""; 0]);
    }

    #[test]
    fn a_device_that_cannot_be_waited_for_behind_a_failure_is_lost() {
        for at_launch in [true, false] {
            let mut scene = Scene::new();
            if at_launch {
                scene.device.refuse("baton_gate_mul");
            }
            scene.device.refuse_waits(true);
            let (step, launched) = scene.launch_new(1);
            assert_eq!(launched.is_err(), at_launch);
            let failed = if at_launch { launched } else { scene.collect(&step) };
            assert!(!scene.device.under_way().is_empty(), "and nobody knows until when");
            scene.device.refuse_waits(false);
            assert!(scene.runner.lost().is_some(), "also when it says no more of it");
            scene.fail(step, failed.unwrap_err());
        }
    }
}
