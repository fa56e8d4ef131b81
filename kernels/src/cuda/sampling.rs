//! Sampling on the device: one copy of the parameters to it, a kernel each for masks, changes of logits and sampling, and one small copy
//! back when the step is submitted.
//!
//! Sampled tokens stay on the device until the next step samples. So that step's embedding can look them up before the host knows them.

use baton_types::TokenOut;

use super::device::{Access, Address, Device, Piece};
use super::memory::Memory;
use super::params::{
    AdjustLogits, Element, Embed, LogitEntry, MAX_TOP_LOGPROBS, MaskLogits, NO_LOGPROBS, NO_ROW, Sample, SampleRow,
    Sampled,
};
use super::pinned::{Landings, Uploads};
use super::queue::{Queue, bytes_of, bytes_of_mut};
use crate::backend::Room;
use crate::{Draw, KernelError, MAX_LOGIT_CHANGES};

/// Largest vocabulary that the kernels take. It must also be a multiple of 8.
const MAX_VOCAB: usize = 1 << 22;

/// Whether the kernels take a vocabulary of this size.
pub(super) fn takes(vocab: usize) -> bool {
    vocab > 0 && vocab.is_multiple_of(8) && vocab <= MAX_VOCAB
}

/// The state and memory of sampling, allocated once.
pub(super) struct Draws<D: Device> {
    /// The bytes that are copied to the device next.
    bytes: Vec<u8>,
    uploads: Uploads<D>,
    inputs: Option<Memory<D>>,
    /// The model's own logits, for log probabilities, if the logits to sample from are changed.
    raw: Option<Memory<D>>,
    out: Option<Memory<D>>,
    /// Tokens that the present step samples, so far.
    count: usize,
    /// The step's draws, if all of them were sent at its start.
    sent: Option<Packed>,
    landings: Landings<D>,
    /// The tokens of the step that was collected last.
    pub chosen: Vec<Sampled>,
}

impl<D: Device> Default for Draws<D> {
    fn default() -> Self {
        let (inputs, raw, out) = (None, None, None);
        let (uploads, landings) = (Uploads::default(), Landings::default());
        Draws { bytes: Vec::new(), uploads, inputs, raw, out, count: 0, sent: None, landings, chosen: Vec::new() }
    }
}

/// The parts of the packed draws. A pair is (byte offset, number of items).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Packed {
    entries: (usize, usize),
    mask_rows: (usize, usize),
    /// Byte offset.
    masks: usize,
    /// Rows of logits up to and including the last one sampled from.
    rows: usize,
    /// Number of draws, padding included.
    draws: usize,
    /// Whether log probabilities are wanted for a row whose logits are changed.
    raw: bool,
}

/// u32 words of a mask: a bit per token.
fn mask_words(vocab: usize) -> usize {
    vocab.div_ceil(32)
}

/// Packs draws into `out`: their parameters, then parameters without a row up to `padded` draws, then changes of logits, row numbers of
/// masks, and masks.
fn pack(draws: &[Draw<'_>], padded: usize, out: &mut Vec<u8>) -> Packed {
    out.clear();
    for draw in draws {
        let p = draw.params;
        let row = SampleRow {
            seed: p.seed,
            index: draw.index,
            temperature: p.temperature,
            top_k: p.top_k,
            top_p: p.top_p,
            min_p: p.min_p,
            top_logprobs: p.top_logprobs.map_or(NO_LOGPROBS, |top| top.min(MAX_TOP_LOGPROBS as u32)),
            row: draw.row as u32,
            padding: 0,
        };
        out.extend_from_slice(bytes_of(&[row]));
    }
    let none = SampleRow { row: NO_ROW, ..SampleRow::default() };
    (draws.len()..padded).for_each(|_| out.extend_from_slice(bytes_of(&[none])));
    let entries = out.len();
    for draw in draws {
        let row = draw.row as u32;
        for c in draw.changes {
            let entry = LogitEntry { row, id: c.id, divide: c.divide, subtract: c.subtract, add: c.add };
            out.extend_from_slice(bytes_of(&[entry]));
        }
    }
    let mask_rows = out.len();
    let masked = || draws.iter().filter_map(|draw| Some((draw.row as u32, draw.mask?)));
    masked().for_each(|(row, _)| out.extend_from_slice(bytes_of(&[row])));
    let masks = out.len();
    masked().for_each(|(_, mask)| out.extend_from_slice(bytes_of(mask)));
    Packed {
        entries: (entries, draws.iter().map(|draw| draw.changes.len()).sum()),
        mask_rows: (mask_rows, masked().count()),
        masks,
        rows: draws.iter().map(|draw| draw.row + 1).max().unwrap_or(0).max(padded),
        draws: draws.len().max(padded),
        raw: draws
            .iter()
            .any(|draw| draw.params.top_logprobs.is_some() && (draw.mask.is_some() || !draw.changes.is_empty())),
    }
}

/// A sampled token as [`TokenOut`].
pub(super) fn token(index: u32, top: Option<u32>, chosen: &Sampled) -> TokenOut {
    let plain = TokenOut { index, id: chosen.id, ..TokenOut::default() };
    let Some(top) = top else { return plain };
    let top = chosen.top_ids.iter().copied().zip(chosen.top_logprobs).take(top as usize);
    TokenOut { logprob: Some(chosen.logprob), top: top.collect(), logits_digest: Some(chosen.digest), ..plain }
}

impl<D: Device> Draws<D> {
    /// Reserves room for all draws of steps within these bounds.
    pub fn reserve(&mut self, queue: &Queue<D>, room: &Room) -> Result<(), KernelError> {
        if room.samples == 0 || !takes(room.vocab) {
            return Ok(());
        }
        let mask = size_of::<u32>() * (1 + mask_words(room.vocab));
        let draw = size_of::<SampleRow>() + MAX_LOGIT_CHANGES * size_of::<LogitEntry>() + mask;
        queue.at_least(&mut self.inputs, room.samples * draw)?;
        queue.at_least(&mut self.raw, room.samples * room.vocab * size_of::<f32>())?;
        // A step may sample for all its rows, some at a time.
        let out = room.samples.max(room.rows) * size_of::<Sampled>();
        queue.at_least(&mut self.out, out)?;
        self.bytes.reserve(room.samples * draw);
        self.chosen.reserve(room.samples.max(room.rows));
        self.uploads.reserve(queue, room.samples * draw)?;
        self.landings.reserve(queue, out)
    }

    /// Device memory of the sampled tokens, where embeddings look them up.
    pub fn drawn(&self) -> Option<Piece<'_>> {
        self.out.as_ref().map(|out| out.piece(0, out.bytes()))
    }

    /// Begins a step.
    pub fn begin(&mut self) {
        (self.count, self.sent) = (0, None);
    }

    /// Copies all draws of a step of `rows` rows to the device. They have no masks or changes, so the launches that follow depend on their
    /// number alone.
    pub fn send(&mut self, queue: &Queue<D>, draws: &[Draw<'_>], rows: usize) -> Result<(), KernelError> {
        self.sent = Some(self.bring(queue, draws, rows)?);
        Ok(())
    }

    fn bring(&mut self, queue: &Queue<D>, draws: &[Draw<'_>], rows: usize) -> Result<Packed, KernelError> {
        let packed = pack(draws, rows, &mut self.bytes);
        queue.at_least(&mut self.inputs, self.bytes.len())?;
        if let Some(inputs) = &self.inputs {
            self.uploads.send(queue, inputs.piece(0, self.bytes.len()), &self.bytes)?;
        }
        Ok(packed)
    }

    /// Lets the draws that were sent be run once more, since their first run was not done.
    pub fn again(&mut self) {
        self.count = 0;
    }

    /// Notes that the step has sampled `count` tokens, possibly by a graph instead of [`Self::run`].
    pub fn replayed(&mut self, count: usize) {
        (self.count, self.sent) = (count, None);
    }

    /// Samples tokens for `draws`. They follow those that the step has sampled so far.
    pub fn run(
        &mut self,
        queue: &Queue<D>,
        logits: &Memory<D>,
        vocab: usize,
        draws: &[Draw<'_>],
    ) -> Result<(), KernelError> {
        let packed = match self.sent {
            Some(packed) => packed,
            None => self.bring(queue, draws, 0)?,
        };
        let (first, all) = (self.count, self.count + packed.draws);
        self.count += draws.len();
        let floats = packed.rows * vocab;
        if packed.raw {
            queue.at_least(&mut self.raw, floats * size_of::<f32>())?;
        }
        if self.out.as_ref().is_none_or(|out| out.bytes() < all * size_of::<Sampled>()) {
            if first > 0 {
                let why = format!("{all} tokens of a step, more than there is room for");
                return Err(KernelError::Device { operation: "baton_sample".to_owned(), why });
            }
            queue.at_least(&mut self.out, all * size_of::<Sampled>())?;
        }
        let (Some(inputs), Some(out)) = (&self.inputs, &self.out) else { return Ok(()) };
        let (logits, word) = (logits.floats(floats), size_of::<u32>());
        let raw = match &self.raw {
            Some(raw) if packed.raw => raw.floats(floats),
            _ => logits,
        };
        if packed.raw {
            let (none, element, width) = (Address::default(), Element::F32, vocab as u32);
            let (table, out, count, scale) = (logits.at(), raw.at(), packed.rows as u32, 1.0);
            let (table_type, out_type, drawn) = (element, element, none);
            let params = Embed { table, rows: none, out, table_type, out_type, count, width, scale, drawn };
            queue.launch("baton_embed", &params, &[Access::Read(logits), Access::Write(raw)])?;
        }
        let (at, count) = packed.mask_rows;
        let rows = inputs.piece(at, count * word);
        let masks = inputs.piece(packed.masks, count * mask_words(vocab) * word);
        let params = MaskLogits {
            logits: logits.at(),
            rows: rows.at(),
            masks: masks.at(),
            count: count as u32,
            vocab: vocab as u32,
        };
        queue.launch(
            "baton_mask_logits",
            &params,
            &[Access::Write(logits), Access::Read(rows), Access::Read(masks)],
        )?;
        let (at, count) = packed.entries;
        let entries = inputs.piece(at, count * size_of::<LogitEntry>());
        let params =
            AdjustLogits { logits: logits.at(), entries: entries.at(), count: count as u32, vocab: vocab as u32 };
        queue.launch("baton_adjust_logits", &params, &[Access::Write(logits), Access::Read(entries)])?;
        let rows = inputs.piece(0, packed.draws * size_of::<SampleRow>());
        let out = out.piece(first * size_of::<Sampled>(), packed.draws * size_of::<Sampled>());
        let (count, vocab) = (packed.draws as u32, vocab as u32);
        let params = Sample { logits: logits.at(), raw: raw.at(), rows: rows.at(), out: out.at(), count, vocab };
        let touches = [Access::Read(logits), Access::Read(raw), Access::Read(rows), Access::Write(out)];
        queue.launch("baton_sample", &params, &touches)
    }

    /// Ends the step and queues the copy of its tokens to the host.
    pub fn submit(&mut self, queue: &Queue<D>) -> Result<(), KernelError> {
        let bytes = self.count * size_of::<Sampled>();
        self.begin();
        let drawn = self.out.as_ref().filter(|_| bytes > 0).map(|out| out.piece(0, bytes));
        self.landings.fetch(queue, drawn)
    }

    /// Waits for the oldest step that was submitted and not collected, and takes its tokens.
    pub fn collect(&mut self, queue: &Queue<D>) -> Result<(), KernelError> {
        self.chosen.clear();
        let bytes = self.landings.take(queue)?;
        self.chosen.resize(bytes.len() / size_of::<Sampled>(), Sampled::default());
        bytes_of_mut(&mut self.chosen).copy_from_slice(bytes);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use baton_types::SamplingParams;

    use super::*;
    use crate::LogitChange;

    #[test]
    fn parts_lie_behind_one_another_and_logits_are_kept_only_where_they_change() {
        let plain = SamplingParams::default();
        let logprobs = SamplingParams { top_logprobs: Some(99), ..plain.clone() };
        let changes = [LogitChange::none(3), LogitChange { add: 1.0, ..LogitChange::none(9) }];
        let draw = |row, params, mask, changes| Draw { row, params, index: 0, mask, changes };
        let mut bytes = vec![1];
        let packed = pack(&[draw(4, &logprobs, None, &[]), draw(1, &plain, Some(&[7]), &changes)], 0, &mut bytes);
        let want = Packed { entries: (80, 2), mask_rows: (120, 1), masks: 124, rows: 5, draws: 2, raw: false };
        assert_eq!((packed, bytes.len()), (want, 128));
        assert_eq!(bytes[28..32], [20, 0, 0, 0], "as many as there is room for");
        assert!(pack(&[draw(0, &logprobs, None, &changes)], 0, &mut bytes).raw);
        assert!(pack(&[draw(0, &logprobs, Some(&[7]), &[])], 0, &mut bytes).raw);
        assert_eq!(pack(&[], 0, &mut bytes).rows, 0);
        let padded = pack(&[draw(0, &plain, None, &[])], 3, &mut bytes);
        assert_eq!((padded.draws, padded.rows, bytes.len()), (3, 3, 120));
        assert_eq!((&bytes[32..36], &bytes[72..76]), (&[0; 4][..], &[255; 4][..]), "places without a row");
    }

    #[test]
    fn rows_of_any_length_but_those_the_kernels_take_are_left_to_the_host() {
        assert_eq!([0, 8, 12, 1 << 22, (1 << 22) + 8].map(takes), [false, true, false, true, false]);
    }
}
