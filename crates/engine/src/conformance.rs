//! What every [`ModelRunner`] must do, as a suite that runs against any of them: [`check`].
//!
//! Each route through the same requests (alone, chunked, batched, staggered, in other blocks, computed again, swapped, a step launched behind
//! another) must give the same tokens, bit by bit with their log probabilities (I1); every call must report its layers and its tokens as the
//! trait says.

use std::collections::VecDeque;

use baton_kv_cache::{CacheConfig, Hit, KvPools, Need, Prefix, Readers, Tables};
use baton_types::{BlockId, PoolGeometry, SamplingParams, SeqId, TokenOut};

use crate::{Batch, BlockSwap, ModelRunner, Row, Sample};

/// What the suite runs against.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The pool each runner made by the factory has; at least [`Setup::blocks`] blocks a group.
    pub geometry: PoolGeometry,
    /// Token ids lie below this, at least 2.
    pub vocab: u32,
    /// Tokens generated per request.
    pub answer_tokens: u32,
}

/// A rule that does not hold.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
#[error("{rule}: {detail}")]
pub struct Violation {
    /// The rule.
    pub rule: &'static str,
    /// What happened.
    pub detail: String,
}

type Answers = Vec<Vec<TokenOut>>;

impl Setup {
    /// Blocks each group of the pool, and of host memory, needs.
    pub fn blocks(&self) -> u32 {
        let (size, answer) = (self.geometry.layout.block_size, self.answer_tokens);
        // Twice the blocks of all requests, so that there is always another place for each.
        let of_all: u32 = requests(self).iter().map(|r| (r.prompt.len() as u32 + answer).div_ceil(size)).sum();
        2 * of_all
    }
}

/// Runs the suite. `make` gives a fresh runner, its pool untouched, with [`Setup::blocks`] blocks of host memory, for each
/// route.
pub fn check<R: ModelRunner>(setup: &Setup, mut make: impl FnMut() -> R) -> Result<(), Violation> {
    let requests = requests(setup);
    let size = setup.geometry.layout.block_size;
    let mut alone = Answers::new();
    for request in &requests {
        let one = std::slice::from_ref(request);
        alone.extend(Route { rule: "runs alone", ..Route::plain() }.run(setup, &mut make(), one)?);
    }
    let plain = Route::plain();
    let routes = [
        Route { rule: "batch invariance", ..plain },
        Route { rule: "row order invariance", reversed: true, ..plain },
        Route { rule: "chunking invariance, 1 token", chunk: 1, ..plain },
        Route { rule: "chunking invariance, 3 tokens", chunk: 3, ..plain },
        Route { rule: "chunking invariance, one block", chunk: size, ..plain },
        Route { rule: "joining at any step", stagger: 1, chunk: 5, ..plain },
        Route { rule: "block tables are followed", scattered: true, ..plain },
        Route { rule: "computed again in other blocks", restart_after: Some(2), chunk: 7, ..plain },
        Route { rule: "computed again from its own prefix", restart_after: Some(2), restart: Restart::Cached, ..plain },
        Route {
            rule: "computed again from its own prefix, in chunks",
            restart_after: Some(3),
            restart: Restart::Cached,
            chunk: 3,
            ..plain
        },
        Route { rule: "launched behind another", ahead: true, ..plain },
        Route {
            rule: "launched behind another, in chunks",
            ahead: true,
            chunk: 3,
            stagger: 2,
            scattered: true,
            ..plain
        },
        Route { rule: "swapped out and in", restart_after: Some(2), restart: Restart::Swapped, ..plain },
        Route {
            rule: "swapped out and in, at any step",
            restart_after: Some(1),
            restart: Restart::Swapped,
            chunk: 5,
            stagger: 3,
            scattered: true,
            ..plain
        },
        Route {
            rule: "all of these",
            restart: Restart::Compute,
            chunk: 2,
            stagger: 2,
            reversed: true,
            scattered: true,
            restart_after: Some(1),
            ahead: false,
        },
    ];
    for route in routes {
        let answers = route.run(setup, &mut make(), &requests)?;
        for (at, (found, wanted)) in answers.iter().zip(&alone).enumerate() {
            if found != wanted {
                let detail = format!("request {at} says {found:?}; alone it says {wanted:?}");
                return Err(Violation { rule: route.rule, detail });
            }
        }
    }
    Ok(())
}

struct Request {
    prompt: Vec<u32>,
    params: SamplingParams,
}

/// Prompts around block boundaries, each with other sampling parameters.
fn requests(setup: &Setup) -> Vec<Request> {
    let size = setup.geometry.layout.block_size;
    let off = SamplingParams { max_tokens: setup.answer_tokens, temperature: 0.0, ..SamplingParams::default() };
    let sampled = SamplingParams { temperature: 0.9, top_k: 40, top_p: 0.95, seed: 7, ..off.clone() };
    let params = [
        off.clone(),
        SamplingParams { top_logprobs: Some(3), ..off.clone() },
        sampled.clone(),
        SamplingParams { seed: 8, min_p: 0.05, top_logprobs: Some(0), ..sampled.clone() },
        SamplingParams { presence_penalty: 0.5, frequency_penalty: 0.5, repetition_penalty: 1.2, ..off },
        SamplingParams { logit_bias: vec![(1, 2.0)], repetition_penalty: 1.1, ..sampled },
    ];
    let lengths = [1, 2, size - 1, size, size + 1, 3 * size + 5];
    let token = |request: usize, at: u32| (at * 7919 + request as u32 * 104_729 + at * at * 31) % setup.vocab;
    let prompt = |request, length: u32| (0..length.max(1)).map(|at| token(request, at)).collect();
    let pairs = lengths.into_iter().zip(params).enumerate();
    pairs.map(|(request, (length, params))| Request { prompt: prompt(request, length), params }).collect()
}

/// One way through the requests.
#[derive(Clone, Copy)]
struct Route {
    rule: &'static str,
    /// Most tokens of a row.
    chunk: u32,
    /// Request `i` joins at step `i * stagger`.
    stagger: u32,
    /// Rows in descending order of requests.
    reversed: bool,
    /// Blocks out of order, with gaps.
    scattered: bool,
    /// After so many tokens of the answer, it goes on in other blocks.
    restart_after: Option<usize>,
    restart: Restart,
    /// Steps are launched before the one before them is collected, by a runner that can.
    ahead: bool,
}

/// How KV comes into a sequence's other blocks.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Restart {
    /// All of it is computed again.
    Compute,
    /// Full blocks are shared with what was, the block after them is copied.
    Cached,
    /// Through host memory: of every second sequence at once, of the others a step later.
    Swapped,
}

/// A row that was launched, of a request.
#[derive(Clone, Copy)]
struct Planned {
    at: usize,
    start: usize,
    end: usize,
    /// Of the token it samples.
    index: Option<u32>,
    follows: Option<u32>,
}

struct Live<'a> {
    request: &'a Request,
    tokens: Vec<u32>,
    computed: usize,
    /// Tokens in flight, how many there choose others, and which of its step's the last of those is.
    flying: usize,
    chosen: usize,
    place: u32,
    tables: Tables,
    answer: Vec<TokenOut>,
    restarted: bool,
    swap_out: Vec<BlockSwap>,
    swap_in: Vec<BlockSwap>,
    /// Has no row in the next step.
    away: bool,
}

impl Live<'_> {
    fn done(&self, setup: &Setup) -> bool {
        self.answer.len() == setup.answer_tokens as usize
    }

    /// Its next row, if it need not wait for a token.
    fn plan(&mut self, at: usize, chunk: u32, setup: &Setup) -> Option<Planned> {
        let waits = self.chosen > 0 && self.request.params.looks_back();
        let index = self.answer.len() + self.chosen;
        if self.away || waits || index == setup.answer_tokens as usize {
            return None;
        }
        let (start, all) = (self.computed + self.flying, self.tokens.len() + self.chosen);
        let end = start.saturating_add(chunk as usize).min(all);
        let follows = (end > self.tokens.len()).then_some(self.place);
        self.flying += end - start;
        self.chosen += usize::from(end == all);
        Some(Planned { at, start, end, index: (end == all).then_some(index as u32), follows })
    }

    fn row(&self, planned: &Planned) -> Row<'_> {
        let (prompt, generated) = self.tokens.split_at(self.request.prompt.len());
        let params = &self.request.params;
        Row {
            seq: SeqId(planned.at as u64),
            tokens: self.tokens.get(planned.start..planned.end).unwrap_or(&[0]),
            follows: planned.follows,
            start: planned.start as u32,
            tables: self.tables.as_slice(),
            sample: planned.index.map(|index| Sample { params, index, prompt, generated }),
        }
    }
}

impl Route {
    fn plain() -> Route {
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

    fn run<R: ModelRunner>(&self, setup: &Setup, runner: &mut R, requests: &[Request]) -> Result<Answers, Violation> {
        let failed = |error: baton_kv_cache::KvError| Violation { rule: "setup", detail: error.to_string() };
        let mut pools = KvPools::new(&setup.geometry, CacheConfig::default()).map_err(failed)?;
        let (mut live, mut hosts) = (Vec::new(), vec![0; pools.groups()]);
        for request in requests {
            let most = request.prompt.len() as u32 + setup.answer_tokens;
            let tables = self.place(&mut pools, most).map_err(failed)?;
            let (tokens, answer) = (request.prompt.clone(), Vec::new());
            let (swap_out, swap_in) = (Vec::new(), Vec::new());
            live.push(Live {
                request,
                tokens,
                computed: 0,
                flying: 0,
                chosen: 0,
                place: 0,
                tables,
                answer,
                restarted: false,
                swap_out,
                swap_in,
                away: false,
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
            live.iter_mut().for_each(|l| l.away = false);
            let restarts = |l: &Live<'_>| Some(l.answer.len()) == self.restart_after && !l.restarted;
            // The longest first: the shorter ones then write where those were.
            for (at, l) in live.iter_mut().enumerate().rev().filter(|(_, l)| restarts(l)) {
                (l.computed, l.restarted) = (self.restart(&mut pools, l, &mut hosts).map_err(failed)?, true);
                l.away = self.restart == Restart::Swapped && at % 2 == 1;
            }
        }
        Ok(live.into_iter().map(|l| l.answer).collect())
    }

    /// Other tables; how much of the sequence is in them.
    fn restart(
        &self,
        pools: &mut KvPools,
        l: &mut Live<'_>,
        hosts: &mut [u32],
    ) -> Result<usize, baton_kv_cache::KvError> {
        let covered = l.tables.tokens();
        let (other, computed) = match self.restart {
            Restart::Compute => (self.place(pools, covered)?, 0),
            Restart::Cached => {
                pools.index(&mut l.tables, &l.tokens[..l.computed], Readers::Nobody, true)?;
                let hit = pools.lookup(&Prefix::default(), &l.tokens);
                (pools.seat(&hit, None, Need::whole(covered))?, hit.tokens() as usize)
            }
            Restart::Swapped => {
                let other = self.place(pools, covered)?;
                let filled = pools.blocks_for(l.computed as u32) as usize;
                for (group, (ours, theirs)) in l.tables.as_slice().iter().zip(other.as_slice()).enumerate() {
                    for (from, to) in ours.blocks().iter().zip(theirs.blocks()).take(filled) {
                        let host = BlockId(hosts[group]);
                        hosts[group] += 1;
                        l.swap_out.push(BlockSwap { group, block: *from, host });
                        l.swap_in.push(BlockSwap { group, block: *to, host });
                    }
                }
                (other, l.computed)
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
        for (place, row) in (0..).zip(planned.iter().filter(|row| row.index.is_some())) {
            live[row.at].place = place;
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
        let swap_out: Vec<_> = live.iter_mut().flat_map(|l| std::mem::take(&mut l.swap_out)).collect();
        let swap_in: Vec<_> = planned.iter().flat_map(|row| std::mem::take(&mut live[row.at].swap_in)).collect();
        let rows: Vec<Row<'_>> = planned.iter().map(|row| live[row.at].row(row)).collect();
        // What a sequence begins with is copied once, before its first row.
        let begins = planned.iter().filter(|row| live[row.at].computed == row.start);
        let copies: Vec<_> = begins.flat_map(|row| live[row.at].tables.copies()).collect();
        let batch = Batch { rows: &rows, copies: &copies, swap_out: &swap_out, swap_in: &swap_in };
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
        let batch = Batch { rows: &rows, copies: &[], swap_out: &[], swap_in: &[] };
        let mut out = Vec::new();
        let collected = runner.collect(&batch, &mut out);
        collected.map_err(|error| Violation { rule: self.rule, detail: error.to_string() })?;
        let due: Vec<u32> = planned.iter().filter_map(|row| row.index).collect();
        let came: Vec<u32> = out.iter().map(|token| token.index).collect();
        if came != due {
            let detail = format!("indices {came:?} where {due:?} were due");
            return Err(Violation { rule: "one token for each row that samples, in row order", detail });
        }
        if let Some(token) = out.iter().find(|token| token.id >= setup.vocab) {
            return Err(Violation { rule: "token ids lie in the vocabulary", detail: format!("{token:?}") });
        }
        let mut tokens = out.into_iter();
        for Planned { at, start, end, index, .. } in planned {
            let l = &mut live[at];
            l.computed += end - start;
            l.flying -= end - start;
            if let Some(token) = index.and_then(|_| tokens.next()) {
                l.chosen -= 1;
                l.tokens.push(token.id);
                l.answer.push(token);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RunError;
    use crate::fake::{FakeModel, KvMemory, tiny_layout};

    fn setup(block_size: u32) -> Setup {
        let mut setup =
            Setup { geometry: PoolGeometry::uniform(tiny_layout(block_size), 1), vocab: 1000, answer_tokens: 5 };
        setup.geometry.blocks = vec![setup.blocks(), setup.blocks()];
        setup
    }

    type Fault = fn(&mut FakeModel, &Batch<'_>, &mut dyn FnMut(u32), &mut Vec<TokenOut>) -> Result<(), RunError>;

    /// A runner with one planted fault.
    struct Faulty {
        inner: FakeModel,
        fault: Fault,
        out: Vec<TokenOut>,
    }

    impl ModelRunner for Faulty {
        fn launch(&mut self, b: &Batch<'_>, on: &mut dyn FnMut(u32)) -> Result<(), RunError> {
            (self.fault)(&mut self.inner, b, on, &mut self.out)
        }
        fn collect(&mut self, _: &Batch<'_>, out: &mut Vec<TokenOut>) -> Result<(), RunError> {
            out.append(&mut self.out);
            Ok(())
        }
    }

    fn verdict(fault: Fault) -> &'static str {
        let setup = setup(4);
        let inner = || FakeModel::new(setup.geometry.clone(), setup.vocab);
        let make = || Faulty { inner: inner(), fault, out: Vec::new() };
        check(&setup, make).err().map_or("passes", |violation| violation.rule)
    }

    #[test]
    fn the_fake_conforms() {
        for block_size in [1, 2, 4, 16] {
            let setup = setup(block_size);
            assert_eq!(check(&setup, || FakeModel::new(setup.geometry.clone(), setup.vocab)), Ok(()));
            assert_eq!(check(&setup, || FakeModel::new(setup.geometry.clone(), setup.vocab).late()), Ok(()));
        }
    }

    #[test]
    fn each_planted_fault_is_found() {
        assert_eq!(verdict(|m, b, on, out| m.run(b, on, out)), "passes");
        let late = verdict(|m, b, on, out| m.run(b, &mut |layer| on(2 - layer), out));
        assert_eq!(late, "on_layer: every layer once, ascending");
        let silent = verdict(|m, b, _, out| m.run(b, &mut |_| {}, out));
        assert_eq!(silent, "on_layer: every layer once, ascending");
        let swapped = verdict(|m, b, on, out| {
            m.run(b, on, out)?;
            out.reverse();
            Ok(())
        });
        // All indices of the first step are 0, so the tokens tell.
        assert_eq!(swapped, "batch invariance");
        let one_short = verdict(|m, b, on, out| {
            m.run(b, on, out)?;
            out.truncate(4);
            Ok(())
        });
        assert_eq!(one_short, "one token for each row that samples, in row order");
        // The last row's result depends on how many rows there are.
        let batch_dependent = verdict(|m, b, on, out| {
            m.run(b, on, out)?;
            out.iter_mut().for_each(|token| token.id = (token.id + u32::from(b.rows.len() > 1)) % 1000);
            Ok(())
        });
        assert_eq!(batch_dependent, "batch invariance");
        // Result depends on where in the pool the sequence lies.
        let placed = verdict(|m, b, on, out| {
            m.run(b, on, out)?;
            let ordered = b.rows.iter().all(|row| row.tables[0].blocks().is_sorted_by(|a, b| b.0 == a.0 + 1));
            out.iter_mut().for_each(|token| token.id = (token.id + u32::from(!ordered)) % 1000);
            Ok(())
        });
        assert_eq!(placed, "block tables are followed");
        // The KV of a chunk's first token is lost.
        let chunked = verdict(|m, b, on, out| {
            m.run(b, on, out)?;
            for row in b.rows.iter().filter(|row| row.start > 0 && row.tokens.len() < 4 && row.sample.is_none()) {
                let slot = row.tables[0]
                    .slot(row.start, 4)
                    .map_or(0, |(block, slot)| block.0 as usize * 64 + slot as usize * 8);
                m.memory_mut().store(slot, &[0]);
            }
            Ok(())
        });
        assert!(chunked.starts_with("chunking invariance"), "{chunked}");
        let uncopied = verdict(|m, b, on, out| m.run(&Batch { copies: &[], ..*b }, on, out));
        assert_eq!(uncopied, "computed again from its own prefix");
        // What is left where it was.
        let unswapped = verdict(|m, b, on, out| m.run(&Batch { swap_out: &[], swap_in: &[], ..*b }, on, out));
        assert_eq!(unswapped, "swapped out and in");
        // Written to host memory only after the pool's blocks have been given to others.
        let swapped_late = verdict(|m, b, on, out| {
            m.run(&Batch { swap_out: &[], swap_in: &[], ..*b }, on, out)?;
            out.clear();
            m.run(b, &mut |_| {}, out)
        });
        assert_eq!(swapped_late, "swapped out and in");
    }
}
