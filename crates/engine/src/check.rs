//! I6 from the sequences' side: the blocks they own are exactly those that the pools say are owned.

use std::collections::BTreeMap;

use baton_kv_cache::{BlockState, BlockTable, HOLE};
use baton_types::SeqId;

use crate::sequence::{Phase, Sequence, Turn};
use crate::{Engine, EngineError};

type Check = Result<(), EngineError>;

fn broken(what: String) -> Check {
    Err(EngineError::Inconsistent(what))
}

impl Engine {
    /// Checks every invariant that must hold between two calls. Takes time linear in the number of blocks: runs at
    /// every step in debug builds, on demand otherwise.
    pub fn check(&self) -> Check {
        if let Some(defect) = &self.defect {
            return Err(defect.clone().into());
        }
        self.pools.check()?;
        self.check_lists()?;
        self.check_owners()?;
        self.sequences.iter().try_for_each(|(seq, sequence)| self.check_sequence(*seq, sequence))
    }

    fn check_lists(&self) -> Check {
        let of = |want: fn(&Phase) -> bool| self.sequences.values().filter(move |s| want(&s.phase)).map(|s| s.turn);
        let in_order = |want| {
            let mut turns: Vec<Turn> = of(want).collect();
            turns.sort();
            turns
        };
        if !self.waiting.iter().eq(&in_order(|phase| matches!(phase, Phase::Waiting))) {
            return broken(format!("the queue {:?} is not the waiting sequences in order", self.waiting));
        }
        if self.running != in_order(|phase| matches!(phase, Phase::Running(_))) {
            return broken(format!("the batch {:?} is not the running sequences in order", self.running));
        }
        if !self.receiving.iter().eq(&in_order(|phase| matches!(phase, Phase::Receiving(_)))) {
            return broken(format!("{:?} are not the receiving sequences in order", self.receiving));
        }
        let parked = self.sequences.values().filter(|s| s.parked.is_some()).count();
        if self.parked as usize != parked {
            return broken(format!("{} are said to be parked, and {parked} are", self.parked));
        }
        let (running, receiving) = (self.running(), self.receiving());
        if running + receiving > self.config.max_running {
            return broken(format!("{running} running, {receiving} receiving: over max_running"));
        }
        Ok(())
    }

    /// Every owned block has its owner's state and as many owners as the pool says, and no block in use is without an
    /// owner.
    fn check_owners(&self) -> Check {
        let mut owners: BTreeMap<(usize, u32), u32> = BTreeMap::new();
        let lived = self.sequences.iter().map(|(seq, s)| match &s.phase {
            Phase::Receiving(lent) => (seq, lent.as_slice(), lent.shared() as usize, BlockState::Lent),
            _ => (seq, s.tables(), usize::MAX, BlockState::Used),
        });
        // A quarantined block that others may read stays in use.
        let gone = self.quarantine.iter().map(|(seq, q)| (seq, q.as_slice(), 0, BlockState::Quarantined));
        for (seq, tables, shared, rest) in lived.chain(gone) {
            for (group, at, block) in blocks(tables) {
                let Some(pool) = self.pools.group(group) else { return broken(format!("{seq}: no group {group}")) };
                let (state, _) = pool.state(block)?;
                let want = if at < shared { BlockState::Used } else { rest };
                if state != want && (state, want) != (BlockState::Used, BlockState::Quarantined) {
                    return broken(format!(
                        "block {block} of group {group} is {state:?}, its owner {seq} has it {want:?}"
                    ));
                }
                *owners.entry((group, block.0)).or_default() += 1;
            }
        }
        for s in self.sequences.values() {
            let Phase::Running(tables) = &s.phase else { continue };
            for (group, block) in tables.sources().iter().enumerate() {
                *owners.entry((group, block.0)).or_default() += 1;
            }
        }
        let counts = self.counts();
        let owned = counts.used + counts.lent + counts.quarantined;
        if owned as usize != owners.len() {
            return broken(format!("{owned} blocks are owned by somebody, {} owners' blocks are known", owners.len()));
        }
        for ((group, block), found) in owners {
            let refs =
                self.pools.group(group).map_or(Ok((BlockState::Free, 0)), |p| p.state(baton_types::BlockId(block)))?.1;
            if refs != found {
                return broken(format!("block {block} of group {group} counts {refs} owners, has {found}"));
            }
        }
        Ok(())
    }

    fn check_sequence(&self, seq: SeqId, s: &Sequence) -> Check {
        for table in s.tables() {
            let needed = self.pools.blocks_for(table.tokens()) as usize;
            let (before, after) = table.present();
            let gap = table.blocks().len() - before.len() - after.len();
            let all = before.iter().chain(after).all(|block| *block != HOLE);
            if table.blocks().len() != needed || table.tokens() < s.computed || table.holes() as usize != gap || !all {
                let (have, tokens) = (table.blocks().len(), table.tokens());
                return broken(format!("{seq}: {have} blocks for {tokens} tokens, {} computed", s.computed));
            }
        }
        let progress = match s.phase {
            Phase::Waiting | Phase::Receiving(_) => s.computed == 0,
            Phase::Running(_) => s.computed < s.len(),
            Phase::Held(_) => s.computed + 1 == s.len(),
        };
        if !progress {
            return broken(format!("{seq} is {} with {} of {} tokens computed", s.phase.name(), s.computed, s.len()));
        }
        let flight =
            s.flight.rows <= self.in_flight && s.flight.chosen <= s.flight.rows && s.flight.rows <= s.flight.tokens;
        if !flight || s.in_step() && !matches!(s.phase, Phase::Running(_)) {
            return broken(format!("{seq} is {} and marked as part of a step", s.phase.name()));
        }
        if s.doomed.is_some() && !s.in_step() {
            return broken(format!("{seq} has ended and is still {}", s.phase.name()));
        }
        Ok(())
    }
}

/// Group, index and id of each block that is present.
fn blocks(tables: &[BlockTable]) -> impl Iterator<Item = (usize, usize, baton_types::BlockId)> {
    let all = tables
        .iter()
        .enumerate()
        .flat_map(|(group, table)| table.blocks().iter().enumerate().map(move |(at, block)| (group, at, *block)));
    all.filter(|(_, _, block)| *block != HOLE)
}

#[cfg(test)]
mod tests {
    use baton_types::{PoolGeometry, RequestId, SamplingParams};

    use super::*;
    use crate::sequence::Doom;
    use crate::{CacheConfig, EngineConfig, NewSequence, Order, Share, Start, Time, fake};
    use baton_kv_cache::Hit;

    /// One sequence in each phase, one quarantine, and no step in flight: ids 0 running, 1 receiving, 2 waiting, 3 gone.
    fn engine() -> Engine {
        let config = EngineConfig {
            token_budget: 8,
            chunk: 8,
            pack_tokens: u32::MAX,
            max_running: 3,
            max_waiting: 3,
            context_tokens: 100,
            local_prefill_tokens: 0,
            reserve_ahead: 16,
            order: Order::Fcfs,
            overtakes: 0,
            cache: CacheConfig::default(),
        };
        let mut engine = Engine::new(config, &PoolGeometry::uniform(fake::tiny_layout(4), 10)).unwrap();
        let mut submit = |start, prompt: u32| {
            let (request_id, params) = (RequestId::default(), SamplingParams::default());
            let tokens = vec![1; prompt as usize];
            engine
                .submit(NewSequence {
                    request_id,
                    tokens,
                    prompt_tokens: prompt,
                    params,
                    start,
                    deadline: None,
                    prefix: None,
                    priority: 0,
                    share: Share::default(),
                    parked: false,
                })
                .unwrap()
        };
        submit(Start::Compute, 8);
        submit(Start::Receive, 8);
        submit(Start::Compute, 24);
        let gone = submit(Start::Receive, 4);
        let mut events = Vec::new();
        let step = engine.plan(Time(0), &mut events).unwrap();
        engine.apply(step, &mut vec![Default::default()], &mut events);
        // Lent ahead of its turn: the sequence before it does not fit.
        let lent = engine.pools.lend(&Hit::default(), None, 4).unwrap();
        engine.sequences.get_mut(&gone).unwrap().phase = Phase::Receiving(lent);
        engine.receiving.extend(engine.waiting.pop_last());
        engine.abort(gone, true).unwrap();
        engine
    }

    fn sequence(engine: &mut Engine, id: u64) -> &mut Sequence {
        engine.sequences.get_mut(&SeqId(id)).unwrap()
    }

    /// Each way to break an invariant is detected.
    #[test]
    fn check_sees_each_corruption() {
        type Damage = fn(&mut Engine);
        let breaks: [(&str, Damage); 16] = [
            ("forgotten in the queue", |e| e.waiting.clear()),
            ("twice in the queue", |e| assert!(e.waiting.insert(Turn { turn: 9, tag: 0, seq: SeqId(2) }))),
            ("forgotten in the batch", |e| e.running.clear()),
            ("a stranger in the batch", |e| e.running.push(Turn { turn: 9, tag: 0, seq: SeqId(9) })),
            ("forgotten among the receiving", |e| e.receiving.clear()),
            ("more than max_running", |e| e.config.max_running = 1),
            ("a sequence lost with its blocks", |e| {
                e.sequences.remove(&SeqId(0));
                e.running.clear();
            }),
            ("a quarantine lost", |e| e.quarantine.clear()),
            ("leaked blocks", |e| drop(e.pools.allocate(4).unwrap())),
            ("lent blocks in use", |e| {
                let tables = e.pools.allocate(4).unwrap();
                e.running.push(Turn { turn: 1, tag: 0, seq: SeqId(1) });
                e.receiving.clear();
                sequence(e, 1).phase = Phase::Running(tables);
            }),
            ("two owners of the same blocks", |e| {
                let twin = engine();
                let quarantine = twin.quarantine.into_values().next().unwrap();
                e.quarantine.insert(SeqId(7), quarantine);
            }),
            ("computed beyond its tables", |e| sequence(e, 0).computed = 200),
            ("nothing left to compute", |e| sequence(e, 0).computed += 1),
            ("a waiting one with progress", |e| sequence(e, 2).computed = 1),
            ("in a step that is not", |e| sequence(e, 0).flight.rows = 1),
            ("ended but still here", |e| sequence(e, 0).doomed = Some(Doom::Free)),
        ];
        for (name, damage) in breaks {
            let mut engine = engine();
            assert_eq!(engine.check(), Ok(()));
            damage(&mut engine);
            assert!(engine.check().is_err(), "{name}");
        }
    }
}
