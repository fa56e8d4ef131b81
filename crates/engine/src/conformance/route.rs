//! One way for the suite's requests to go through a runner: when they join, in which chunks, in which blocks.

use std::collections::VecDeque;

use baton_kv_cache::{CacheConfig, Hit, KvPools, Need, Prefix, Readers, Tables};
use baton_types::{SeqId, TokenOut};

use super::{Answers, Request, Setup, Violation};
use crate::{Batch, ModelRunner, Row, Sample, Score};

/// One way for the requests to go through a runner.
#[derive(Clone, Copy)]
pub(super) struct Route {
    pub rule: &'static str,
    /// Most tokens of a row.
    pub chunk: u32,
    /// Request `i` joins at step `i * stagger`.
    pub stagger: u32,
    /// Rows in descending order of requests.
    pub reversed: bool,
    /// Blocks out of order, with gaps.
    pub scattered: bool,
    /// After this many tokens of its answer, a sequence goes on in other blocks.
    pub restart_after: Option<usize>,
    pub restart: Restart,
    /// Steps are launched before the previous one is collected, if the runner overlaps steps.
    pub ahead: bool,
}

/// How KV gets into a sequence's other blocks.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Restart {
    /// All of it is computed again.
    Compute,
    /// Full blocks are shared with the old tables, and the partial block after them is copied.
    Cached,
}

/// A launched row of one request.
#[derive(Clone, Copy)]
struct Planned {
    at: usize,
    start: usize,
    end: usize,
    /// Position of the first token of the prompt that it scores, and how many it scores.
    scores: (usize, usize),
    /// Index in the answer of the token it samples.
    index: Option<u32>,
    follows: Option<u32>,
}

struct Live<'a> {
    request: &'a Request,
    tokens: Vec<u32>,
    computed: usize,
    /// Tokens in flight. `chosen`: how many of their rows sample. `place`: place of the last such row's token among all
    /// that its step gives.
    flying: usize,
    chosen: usize,
    place: u32,
    tables: Tables,
    /// Leading tokens of the prompt that are scored, or planned to be; the first has no score.
    scored: usize,
    scores: Vec<TokenOut>,
    answer: Vec<TokenOut>,
    restarted: bool,
}

impl Live<'_> {
    fn done(&self, setup: &Setup) -> bool {
        self.answer.len() == setup.answer_tokens as usize
    }

    /// Its next row. `None` when it is done or must wait for a token.
    fn plan(&mut self, at: usize, chunk: u32, setup: &Setup) -> Option<Planned> {
        let waits = self.chosen > 0 && self.request.params.looks_back();
        let index = self.answer.len() + self.chosen;
        if waits || index == setup.answer_tokens as usize {
            return None;
        }
        let (start, all) = (self.computed + self.flying, self.tokens.len() + self.chosen);
        let end = start.saturating_add(chunk as usize).min(all);
        let follows = (end > self.tokens.len()).then_some(self.place);
        self.flying += end - start;
        self.chosen += usize::from(end == all);
        let scores = match self.request.params.prompt_logprobs {
            Some(_) => {
                let first = self.scored.max(start + 1);
                (first, (end + 1).min(self.request.prompt.len()).saturating_sub(first))
            }
            None => (0, 0),
        };
        self.scored = self.scored.max(scores.0 + scores.1);
        Some(Planned { at, start, end, scores, index: (end == all).then_some(index as u32), follows })
    }

    fn row(&self, planned: &Planned) -> Row<'_> {
        let (prompt, generated) = self.tokens.split_at(self.request.prompt.len());
        let params = &self.request.params;
        let (first, scored) = planned.scores;
        let score = || Score {
            after: (first - planned.start - 1) as u32,
            tokens: &prompt[first..first + scored],
            top: params.prompt_logprobs.unwrap_or_default(),
        };
        Row {
            seq: SeqId(planned.at as u64),
            tokens: self.tokens.get(planned.start..planned.end).unwrap_or(&[0]),
            follows: planned.follows,
            start: planned.start as u32,
            tables: self.tables.as_slice(),
            score: (scored > 0).then(score),
            sample: planned.index.map(|index| Sample { params, index, prompt, generated }),
        }
    }
}

impl Route {
    /// All requests at once, in blocks of their own.
    pub(super) fn plain() -> Route {
        Route {
            rule: "",
            chunk: u32::MAX,
            stagger: 0,
            reversed: false,
            scattered: false,
            restart_after: None,
            restart: Restart::Compute,
            ahead: false,
        }
    }

    /// Runs the requests and returns their answers.
    pub(super) fn run<R: ModelRunner>(
        &self,
        setup: &Setup,
        runner: &mut R,
        requests: &[Request],
    ) -> Result<Answers, Violation> {
        let failed = |error: baton_kv_cache::KvError| Violation { rule: "setup", detail: error.to_string() };
        let mut pools = KvPools::new(&setup.geometry, CacheConfig::default()).map_err(failed)?;
        let mut live = Vec::new();
        for request in requests {
            let most = request.prompt.len() as u32 + setup.answer_tokens;
            let tables = self.place(&mut pools, most).map_err(failed)?;
            let (tokens, scores, answer) = (request.prompt.clone(), Vec::new(), Vec::new());
            live.push(Live {
                request,
                tokens,
                computed: 0,
                flying: 0,
                chosen: 0,
                place: 0,
                tables,
                scored: 1,
                scores,
                answer,
                restarted: false,
            });
        }
        let (mut step, mut flights) = (0, VecDeque::new());
        let most = if self.ahead && runner.overlaps() { 2 } else { 1 };
        while live.iter().any(|l| !l.done(setup)) {
            while flights.len() < most {
                let planned = self.plan(setup, &mut live, step);
                step += 1;
                if planned.is_empty() {
                    break;
                }
                self.launch(setup, runner, &mut live, &planned)?;
                flights.push_back(planned);
            }
            if let Some(planned) = flights.pop_front() {
                self.collect(setup, runner, &mut live, planned)?;
            }
            live.iter_mut().try_for_each(|l| pools.copied(&mut l.tables)).map_err(failed)?;
            let restarts = |l: &Live<'_>| Some(l.answer.len()) == self.restart_after && !l.restarted;
            // The longest first: shorter requests then write to blocks that longer ones had.
            for l in live.iter_mut().rev().filter(|l| restarts(l)) {
                (l.computed, l.restarted) = (self.restart(&mut pools, l).map_err(failed)?, true);
            }
        }
        Ok(live.into_iter().map(|l| [l.scores, l.answer].concat()).collect())
    }

    /// Moves a sequence to other tables. Returns how many of its tokens these already hold.
    fn restart(&self, pools: &mut KvPools, l: &mut Live<'_>) -> Result<usize, baton_kv_cache::KvError> {
        let covered = l.tables.tokens();
        let (other, computed) = match self.restart {
            Restart::Compute => (self.place(pools, covered)?, 0),
            Restart::Cached => {
                pools.index(&mut l.tables, &l.tokens[..l.computed], Readers::Nobody, true)?;
                let hit = pools.lookup(&Prefix::default(), &l.tokens);
                (pools.seat(&hit, None, Need::whole(covered))?, hit.tokens() as usize)
            }
        };
        pools.free(std::mem::replace(&mut l.tables, other))?;
        Ok(computed)
    }

    /// Tables for `tokens` tokens; scattered ones take every other block, the highest first.
    fn place(&self, pools: &mut KvPools, tokens: u32) -> Result<Tables, baton_kv_cache::KvError> {
        if !self.scattered {
            return pools.seat(&Hit::default(), Some(Prefix::default()), Need::whole(tokens));
        }
        let size = pools.block_size();
        let (mut kept, mut given_back) = (pools.allocate(0)?, Vec::new());
        for covered in (0..tokens).step_by(size as usize) {
            given_back.push(pools.allocate(1)?);
            pools.grow(&mut kept, (covered + size).min(tokens))?;
        }
        given_back.into_iter().try_for_each(|gap| pools.free(gap))?;
        Ok(kept)
    }

    /// The rows of a step.
    fn plan(&self, setup: &Setup, live: &mut [Live<'_>], step: u32) -> Vec<Planned> {
        let joined = |at: &usize| step >= *at as u32 * self.stagger;
        let mut order: Vec<usize> = (0..live.len()).filter(joined).collect();
        if self.reversed {
            order.reverse();
        }
        let planned: Vec<_> = order.into_iter().filter_map(|at| live[at].plan(at, self.chunk, setup)).collect();
        let mut given = 0;
        for row in &planned {
            given += row.scores.1 as u32;
            if row.index.is_some() {
                live[row.at].place = given;
                given += 1;
            }
        }
        planned
    }

    fn launch<R: ModelRunner>(
        &self,
        setup: &Setup,
        runner: &mut R,
        live: &mut [Live<'_>],
        planned: &[Planned],
    ) -> Result<(), Violation> {
        let rows: Vec<Row<'_>> = planned.iter().map(|row| live[row.at].row(row)).collect();
        // A sequence's copies are made once, before its first row.
        let begins = planned.iter().filter(|row| live[row.at].computed == row.start);
        let copies: Vec<_> = begins.flat_map(|row| live[row.at].tables.copies()).collect();
        let batch = Batch { rows: &rows, copies: &copies };
        let mut layers = Vec::new();
        let launched = runner.launch(&batch, &mut |layer| layers.push(layer));
        launched.map_err(|error| Violation { rule: self.rule, detail: error.to_string() })?;
        if !layers.iter().copied().eq(0..setup.geometry.layout.layers() as u32) {
            return Err(Violation { rule: "on_layer: every layer once, ascending", detail: format!("{layers:?}") });
        }
        Ok(())
    }

    fn collect<R: ModelRunner>(
        &self,
        setup: &Setup,
        runner: &mut R,
        live: &mut [Live<'_>],
        planned: Vec<Planned>,
    ) -> Result<(), Violation> {
        let rows: Vec<Row<'_>> = planned.iter().map(|row| live[row.at].row(row)).collect();
        let batch = Batch { rows: &rows, copies: &[] };
        let mut out = Vec::new();
        let collected = runner.collect(&batch, &mut out);
        collected.map_err(|error| Violation { rule: self.rule, detail: error.to_string() })?;
        let due = planned.iter().flat_map(|row| {
            let (first, scored) = row.scores;
            (first as u32..(first + scored) as u32).chain(row.index)
        });
        let due: Vec<u32> = due.collect();
        let came: Vec<u32> = out.iter().map(|token| token.index).collect();
        if came != due {
            let detail = format!("indices {came:?} where {due:?} were due");
            return Err(Violation { rule: "what each row scores and samples, in row order", detail });
        }
        if let Some(token) = out.iter().find(|token| token.id >= setup.vocab) {
            return Err(Violation { rule: "token ids lie in the vocabulary", detail: format!("{token:?}") });
        }
        let mut tokens = out.into_iter();
        for Planned { at, start, end, scores, index, .. } in planned {
            let l = &mut live[at];
            l.computed += end - start;
            l.flying -= end - start;
            l.scores.extend(tokens.by_ref().take(scores.1));
            if let Some(token) = index.and_then(|_| tokens.next()) {
                l.chosen -= 1;
                l.tokens.push(token.id);
                l.answer.push(token);
            }
        }
        Ok(())
    }
}
