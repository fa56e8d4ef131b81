//! A step's batch, and what happens to its sequences once it is computed or has failed.

use baton_types::{SeqId, TokenOut};

use crate::sequence::{Doom, Phase, Sequence, Turn};
use crate::{Batch, Engine, Event, Order, Row, RunError, Sample, Score, SequenceError, Start, Step, StepRow};

/// Placeholder for a token that is not known yet.
const UNKNOWN: [u32; 1] = [0];

impl Engine {
    /// Passes the step's batch, rows in the order of [`Step::rows`], to `f`: a call of the runner that launches it,
    /// collects it, or both.
    pub fn with_batch<R>(&mut self, step: &Step, f: impl FnOnce(&Batch<'_>) -> R) -> R {
        let mut rows = recycle(std::mem::take(&mut self.spare_rows));
        let mut copies = std::mem::take(&mut self.spare_copies);
        copies.clear();
        for row in &step.rows {
            let Some(sequence) = self.sequences.get(&row.seq) else { continue };
            // The first row makes the sequence's copies. Its second row may be planned before they are made.
            if let (Phase::Running(tables), true) = (&sequence.phase, row.begins()) {
                copies.extend(tables.copies());
            }
            let (prompt, generated) = sequence.tokens.split_at(sequence.prompt_tokens as usize);
            let sample = Sample { params: &sequence.params, index: row.index, prompt, generated };
            let known = sequence.tokens.get(row.start as usize..(row.start + row.len) as usize);
            let (first, scored) = row.scores;
            let score = Score {
                after: first.saturating_sub(row.start + 1),
                tokens: sequence.tokens.get(first as usize..(first + scored) as usize).unwrap_or_default(),
                top: sequence.params.prompt_logprobs.unwrap_or_default(),
            };
            rows.push(Row {
                seq: row.seq,
                tokens: known.unwrap_or(&UNKNOWN),
                follows: if known.is_none() { row.follows } else { None },
                start: row.start,
                tables: sequence.tables(),
                score: (scored > 0).then_some(score),
                sample: row.samples.then_some(sample),
            });
        }
        let result = f(&Batch { rows: &rows, copies: &copies });
        self.spare_rows = recycle(rows);
        self.spare_copies = copies;
        result
    }

    /// Applies the oldest step in flight, which is computed. `out` has what the runner gave for its rows; it is taken
    /// out of it.
    ///
    /// When `out` is not what the step asked for, every sequence of the step fails.
    pub fn apply(&mut self, step: Step, out: &mut Vec<TokenOut>, events: &mut Vec<Event>) {
        if let Err(error) = self.check_output(&step, out) {
            out.clear();
            return self.end_step(step, error, events);
        }
        let mut tokens = out.drain(..);
        for row in &step.rows {
            let scored = tokens.by_ref().take(row.scores.1 as usize).collect();
            let token = if row.samples { tokens.next() } else { None };
            self.apply_row(row, scored, token, events);
        }
        drop(tokens);
        self.finish_step(step);
    }

    /// The runner failed on the oldest step in flight: every sequence of that step fails.
    pub fn fail(&mut self, step: Step, error: RunError, events: &mut Vec<Event>) {
        self.end_step(step, error.into(), events);
    }

    fn check_output(&self, step: &Step, out: &[TokenOut]) -> Result<(), SequenceError> {
        let due = step.rows.iter().map(|row| row.gives() as usize).sum();
        if out.len() != due {
            return Err(SequenceError::Output { due, what: format!("{} tokens", out.len()) });
        }
        let expected = step.rows.iter().flat_map(|row| {
            let (first, scored) = row.scores;
            (first..first + scored).chain(row.samples.then_some(row.index)).map(|index| (row.seq, index))
        });
        match expected.zip(out).find(|((_, expected), token)| token.index != *expected) {
            Some(((seq, expected), token)) => {
                let what = format!("token {} of sequence {seq} where {expected} was due", token.index);
                Err(SequenceError::Output { due, what })
            }
            None => Ok(()),
        }
    }

    fn apply_row(&mut self, row: &StepRow, scored: Vec<TokenOut>, token: Option<TokenOut>, events: &mut Vec<Event>) {
        let seq = row.seq;
        let decode = u64::from(row.samples && row.len == 1);
        if let Some(sequence) = self.sequences.get_mut(&seq) {
            sequence.unverified = false;
        }
        let Some(sequence) = self.landed(row) else {
            self.decoded_wasted += decode;
            return;
        };
        sequence.computed += row.len;
        if !scored.is_empty() {
            sequence.scored = row.scores.0 + row.scores.1;
            events.push(Event::Scored { seq, tokens: scored });
        }
        self.advance_turn(seq);
        let sealed = self.sequences.get(&seq).is_some_and(|sequence| sequence.sealed);
        self.settle(seq, token.is_some());
        let Some(mut token) = token else { return };
        if let Some(why) = token.failed.take() {
            return self.end_failed(seq, SequenceError::NoToken(why), events);
        }
        let Some(sequence) = self.sequences.get_mut(&seq) else { return };
        let (request_id, cached_tokens, turn) = (sequence.request_id.clone(), sequence.cached_tokens(), sequence.turn);
        let finish = sequence.push(&token);
        self.decoded += decode;
        if sequence.start == Start::ComputeAndHold {
            if let Phase::Running(tables) = std::mem::replace(&mut sequence.phase, Phase::Waiting) {
                sequence.phase = Phase::Held(tables);
            }
            self.running.retain(|other| *other != turn);
            events.push(Event::Prefilled { seq, request_id, token, finish, cached_tokens });
            return;
        }
        events.push(Event::Token { seq, request_id: request_id.clone(), token, cached_tokens });
        if !sealed && finish.is_none() {
            self.keep_early(seq);
        }
        if let Some(reason) = finish {
            self.end(seq, Doom::Free);
            events.push(Event::Finished { seq, request_id, reason, cached_tokens });
        }
    }

    /// Takes a row out of flight. Returns its sequence, unless that ended before.
    fn landed(&mut self, row: &StepRow) -> Option<&mut Sequence> {
        let sequence = self.sequences.get_mut(&row.seq)?;
        let flight = &mut sequence.flight;
        flight.rows -= 1;
        flight.tokens -= row.len;
        flight.chosen -= u32::from(row.samples);
        let over = flight.rows == 0;
        match sequence.doomed {
            // The row was computed in vain: its token is not delivered.
            Some(doom) => {
                if over {
                    self.remove(row.seq, doom);
                }
                None
            }
            None => self.sequences.get_mut(&row.seq),
        }
    }

    /// Ends a sequence and disposes of its blocks: now, or with the last step in flight that writes to them (I3).
    pub(crate) fn end(&mut self, seq: SeqId, doom: Doom) {
        match self.sequences.get_mut(&seq) {
            Some(sequence) if sequence.in_step() => sequence.doomed = Some(doom),
            _ => drop(self.remove(seq, doom)),
        }
    }

    /// Under [`Order::ShortestFirst`], moves a sequence's turn forward as less of its prompt is left.
    fn advance_turn(&mut self, seq: SeqId) {
        let Order::ShortestFirst = self.config.order else { return };
        let Some(sequence) = self.sequences.get(&seq) else { return };
        let old = sequence.turn;
        let turn = self.config.turn(old.class().at_workers(0), sequence.remaining());
        if turn < old.turn {
            self.set_turn(old, Turn { turn, ..old });
        }
    }

    fn end_step(&mut self, step: Step, error: SequenceError, events: &mut Vec<Event>) {
        for row in &step.rows {
            if self.landed(row).is_some() {
                self.end_failed(row.seq, error.clone(), events);
            }
        }
        self.finish_step(step);
    }

    fn finish_step(&mut self, step: Step) {
        let first = (self.steps + 1).checked_sub(u64::from(self.in_flight));
        debug_assert_eq!(Some(step.number), first, "a step out of turn, or of another engine");
        self.in_flight = self.in_flight.saturating_sub(1);
        self.joined &= step.behind.is_none();
        self.spare_steps.push(step.rows);
        debug_assert_eq!(self.check(), Ok(()), "I6");
    }
}

/// Empties the buffer and makes it usable for rows with other lifetimes.
fn recycle<'b>(mut rows: Vec<Row<'_>>) -> Vec<Row<'b>> {
    rows.clear();
    // Collecting a vector's own iterator reuses its memory, and no row is copied because there is none.
    rows.into_iter().map_while(|_| None).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recycled_buffer_is_the_same_buffer() {
        let rows: Vec<Row<'static>> = Vec::with_capacity(33);
        let place = rows.as_ptr() as usize;
        let again: Vec<Row<'_>> = recycle(rows);
        assert_eq!((again.as_ptr() as usize, again.capacity()), (place, 33));
    }
}
