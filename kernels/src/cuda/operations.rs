//! [`Backend`] for [`CudaBackend`]: the operations as launches.

use baton_types::{BlockId, TokenOut};

use super::attention::Rotated;
use super::backend::{CudaBackend, Normed};
use super::device::{Access, Device};
use super::graphs;
use super::memory::Memory;
use super::params::{Add, Element};
use super::queue::bytes_of_mut;
use super::sampling;
use super::weight::{self, CudaWeight, Form};
use crate::WeightSource;
use crate::backend::{AttentionShape, Backend, Input, Norm, Product, Ragged, Room, Rope, StepInputs};
use crate::{Draw, KernelError};

impl<D: Device> Backend for CudaBackend<D> {
    type Buffer = Memory<D>;
    type Weight = CudaWeight<D>;

    fn name(&self) -> String {
        format!("cuda ({})", self.queue.device.properties().name)
    }

    fn buffer(&self, elements: usize) -> Result<Memory<D>, KernelError> {
        let memory = self.queue.memory(elements * size_of::<f32>())?;
        self.queue.fill(memory.floats(elements), 0)?;
        Ok(memory)
    }

    fn operand(&self, elements: usize) -> Result<Memory<D>, KernelError> {
        // For E4M3 the row stays f32 until a kernel quantises it as a whole: its scale depends on all its elements.
        let element = if self.options.fp8 { Element::F32 } else { Element::Bf16 };
        let memory = self.queue.memory(elements * element.bytes())?;
        self.queue.fill(memory.piece(0, memory.bytes()), 0)?;
        Ok(memory.holding(element))
    }

    fn outputs<const N: usize>(&self, rows: usize, widths: [usize; N]) -> Result<[Memory<D>; N], KernelError> {
        assert!(widths.iter().all(|width| width.is_multiple_of(8)), "columns {widths:?} are not aligned");
        let stride = widths.iter().sum();
        let (all, mut first) = (self.buffer(rows * stride)?, 0);
        Ok(widths.map(|width| {
            first += width;
            all.columns(first - width, width, stride)
        }))
    }

    fn upload(&self, values: &[f32]) -> Result<Memory<D>, KernelError> {
        let memory = self.queue.memory(size_of_val(values))?;
        self.queue.write(memory.floats(values.len()), values)?;
        Ok(memory)
    }

    fn weight(&mut self, source: &WeightSource<'_>) -> Result<CudaWeight<D>, KernelError> {
        weight::load(&self.queue, &mut self.staging, source, Form::Bf16)
    }

    fn linear(&mut self, source: &WeightSource<'_>) -> Result<CudaWeight<D>, KernelError> {
        let form = Form::of(source.rows, source.cols, self.options.fp8);
        weight::load(&self.queue, &mut self.staging, source, form)
    }

    fn linears<const N: usize>(&mut self, sources: [&WeightSource<'_>; N]) -> Result<[CudaWeight<D>; N], KernelError> {
        weight::load_together(&self.queue, &mut self.staging, sources, self.options.fp8)
    }

    fn weight_bytes(&self, weight: &CudaWeight<D>) -> usize {
        weight.memory.bytes() + weight.scales.as_ref().map_or(0, Memory::bytes)
    }

    fn elements(&self, buffer: &Memory<D>) -> usize {
        buffer.bytes() / buffer.element().bytes()
    }

    fn reserve(&mut self, room: &Room) -> Result<(), KernelError> {
        self.make_room(room)
    }

    fn read(&mut self, buffer: &Memory<D>, offset: usize, out: &mut [f32]) {
        self.attempt(|b| {
            let (to, mut rest) = (offset + out.len(), &mut *out);
            for run in buffer.runs(offset, to) {
                let (part, others) = rest.split_at_mut(run.bytes() / buffer.element().bytes());
                rest = others;
                match buffer.element() {
                    Element::F32 => b.queue.read(run, bytes_of_mut(part))?,
                    Element::Bf16 | Element::F16 => b.read_halves(run, buffer.element(), part)?,
                }
            }
            Ok(())
        });
    }

    fn padded(&self, rows: usize, most: usize) -> Option<usize> {
        let padded = graphs::bucket(rows).min(most);
        (self.options.graphs && rows > 0 && padded >= rows).then_some(padded)
    }

    fn step(&mut self, inputs: &StepInputs<'_>, mut run: impl FnMut(&mut Self)) {
        self.run_step(inputs, &mut run);
    }

    fn publish(&mut self) {
        self.attempt(|b| b.pool.publish(&b.queue));
    }

    fn finish(&mut self) -> Result<(), KernelError> {
        // Waits also after a failure: work that was put into the stream before it is under way.
        let waited = self.queue.synchronise();
        self.failed.take().map_or(waited, Err)
    }

    fn lost(&mut self) -> Option<KernelError> {
        self.queue.device.lost()
    }

    fn submit(&mut self) -> Result<(), KernelError> {
        self.end_step()
    }

    fn collect(&mut self) -> Result<(), KernelError> {
        self.collect_step()
    }

    fn drain(&mut self) -> Result<(), KernelError> {
        self.failed = None;
        self.sampling.begin();
        self.queue.synchronise()
    }

    fn overlaps(&self) -> bool {
        true
    }

    fn copy_block(&mut self, group: usize, from: BlockId, to: BlockId) {
        self.attempt(|b| {
            b.queue.at_least(&mut b.indices, 2 * size_of::<u32>())?;
            let Some(pair) = &b.indices else { return Ok(()) };
            b.pool.copy_block(&b.queue, group, pair.piece(0, 2 * size_of::<u32>()), from, to)
        });
    }

    fn embed(&mut self, table: &CudaWeight<D>, ids: &[u32], scale: f32, out: &mut Memory<D>) {
        assert_eq!(table.form(), Form::Bf16, "rows of a matrix that is for products alone");
        let all = (table.memory.piece(0, table.memory.bytes()), Element::Bf16);
        let at = self.steps.ids(ids);
        self.attempt(|b| b.gather(all, table.cols, (ids, at), scale, out));
    }

    fn rms_norm(&mut self, norm: &Norm<Memory<D>>, x: &mut Memory<D>, rows: usize) {
        let x = x.heads(rows, norm.weight.bytes() / size_of::<f32>());
        self.attempt(|b| b.normed(norm, (x, None), Normed::InPlace, rows));
    }

    fn add(&mut self, x: &mut Memory<D>, y: &Memory<D>, elements: usize) {
        let (x, y, float) = (x.floats(elements), y.floats(elements), Element::F32);
        let params = Add { x: x.at(), y: y.at(), elements: elements as u64, x_type: float, y_type: float };
        self.attempt(|b| b.queue.launch("baton_add", &params, &[Access::Write(x), Access::Read(y)]));
    }

    fn matmul<const N: usize>(
        &mut self,
        input: Input<'_, Memory<D>>,
        products: [Product<'_, CudaWeight<D>, Memory<D>>; N],
    ) {
        self.attempt(|b| b.multiply(input, products));
    }

    fn rope_and_store_kv(
        &mut self,
        shape: AttentionShape,
        batch: &Ragged,
        rope: &Rope<Memory<D>>,
        q: &mut Memory<D>,
        k: &Memory<D>,
        v: &Memory<D>,
    ) {
        let (rows, (q_width, kv_width)) = (batch.rows(), self.widths(shape));
        let all = |table: &'_ Memory<D>| table.bytes();
        let with = Rotated {
            q: q.rows(rows, q_width),
            k: k.rows(rows, kv_width),
            v: v.rows(rows, kv_width),
            cos: rope.cos.piece(0, all(&rope.cos)),
            sin: rope.sin.piece(0, all(&rope.sin)),
        };
        self.attempt(|b| {
            b.place(shape, batch)?;
            b.placed(shape).map_or(Ok(()), |placed| placed.store(&with))
        });
    }

    fn attention(&mut self, shape: AttentionShape, batch: &Ragged, q: &Memory<D>, out: &mut Memory<D>) {
        let (rows, width) = (batch.rows(), self.widths(shape).0);
        let q = q.rows(rows, width);
        let out = (out.piece(0, rows * width * out.element().bytes()), out.element());
        self.attempt(|b| {
            b.place(shape, batch)?;
            b.placed(shape).map_or(Ok(()), |placed| placed.attend(q, out))
        });
    }

    fn gather_rows(&mut self, x: &Memory<D>, width: usize, rows: &[u32], out: &mut Memory<D>) {
        let x = (x.piece(0, x.bytes()), Element::F32);
        let at = self.steps.sampled(rows);
        self.attempt(|b| b.gather(x, width, (rows, at), 1.0, out));
    }

    fn samples(&self, vocab: usize) -> bool {
        sampling::takes(vocab)
    }

    fn draw(&mut self, logits: &mut Memory<D>, vocab: usize, draws: &[Draw<'_>]) {
        self.attempt(|b| b.sampling.run(&b.queue, logits, vocab, draws));
    }

    fn drawn(&self, number: u32, index: u32, top: Option<u32>) -> TokenOut {
        self.token(number, index, top)
    }
}
