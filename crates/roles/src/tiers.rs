//! Blocks that move between the pool and the worker's own store below it: host memory and a disk.
//!
//! | part | owns | ends when |
//! | --- | --- | --- |
//! | load | blocks that the store's thread writes to | they are written and verified, or the store says that they are not |
//! | save | blocks that the store's thread reads | the store says that it has read them |
//!
//! A prompt waits for its prefix to be loaded, as for one that is fetched ([`crate::exchange`]), and so does another worker that is to be served
//! this prefix. If that fails, or takes too long, the prompt is computed. Where there is nothing else to compute, a prompt does not wait for the last of it,
//! the copying from host memory: its first step takes each layer as it comes ([`crate::StepLaunch::behind`]). If a block is found damaged then, that step has
//! failed, and its request is tried again. What an ended sequence leaves in the prefix cache is saved, block by
//! block, as far as the store lacks it. So is what a preempted one leaves, which is loaded before it starts again.

mod held;

use std::collections::BTreeMap;

use baton_engine::{BlockTable, Digest, Engine, EngineError, Event, Exchange as Prefix, HOLE};
use baton_types::{BlockId, SeqId, Time};

use crate::submit::{Desk, clear};

pub use held::{Copied, first_lacking, usable};

/// Most loads, and most saves, at a time (I5).
pub(crate) const MOST: usize = 16;
/// How long a save may take, in milliseconds: its blocks are in use until then.
const SAVE_MS: u64 = 10_000;

/// Blocks that are to be copied.
#[derive(Clone, PartialEq, Debug)]
pub struct Move {
    /// The sequence that owns them meanwhile.
    pub seq: SeqId,
    /// The prefix.
    pub prefix: Prefix,
    /// Index of the first block that is to be copied.
    pub first: u32,
    /// Per layer group: the prefix's blocks from there on, [`HOLE`] where a window has passed one.
    pub blocks: Vec<Vec<BlockId>>,
    /// Of a save: what those of them were verified with that came here from elsewhere.
    pub known: Vec<Digest>,
}

/// A command.
#[derive(Clone, PartialEq, Debug)]
pub enum Command {
    /// The store holds this prefix of a prompt that comes next.
    Load {
        /// The prefix, with its deadline.
        prefix: Box<Prefix>,
        /// How long loading all of it takes, as predicted, in seconds.
        seconds: f64,
    },
    /// All of a load is in host memory, and its layers are being copied and verified in ascending order.
    Streams(SeqId),
    /// Nothing writes to the blocks of a load any more. If all are written and verified (I2), these are the digests. Sent once for each [`Effect::Load`].
    Loaded(SeqId, Option<Vec<Digest>>),
    /// The store lacks blocks of this prefix, from this block on.
    Save(Box<Prefix>, u32),
    /// Nothing reads the blocks of a save any more. The second part is the layer group and the block of one that is not what it was when it came (I2).
    /// Sent once for each [`Effect::Save`].
    Saved(SeqId, Option<(usize, BlockId)>),
}

/// What it wants done.
#[derive(Clone, PartialEq, Debug)]
pub enum Effect {
    /// A sequence has ended, or was preempted, that leaves this prefix in the cache. Answered by [`Command::Save`], if the store lacks any of it.
    Offer(Box<Prefix>),
    /// A sequence that was preempted, or whose prefix had no room, could start now. Answered by [`Command::Load`], if the store holds any of this.
    Returns(Box<Prefix>),
    /// There is no room for a prefix yet, of which so many tokens are in the pool. What is slow to read may be brought to host memory meanwhile.
    Warm(Box<Prefix>, u32),
    /// Copy the store's blocks into these, and verify them.
    Load(Box<Move>),
    /// Copy these blocks into the store.
    Save(Box<Move>),
    /// A load is of no use any more: end it soon.
    Abort(SeqId),
    /// For metrics: a prefix was loaded.
    Loaded {
        /// Tokens of it that were not in the pool.
        tokens: u32,
        /// Its prompt did not wait for the last of it.
        streamed: bool,
    },
}

#[derive(Debug)]
enum Part {
    Load(Prefix, u32),
    /// A load whose blocks a prompt has taken over, and how many tokens it brings.
    Joined(u32),
    Save,
}

/// What moves between the pool and the store of one worker.
#[derive(Debug, Default)]
pub(crate) struct Tiers {
    open: BTreeMap<SeqId, Part>,
}

impl Tiers {
    /// Whether an event of the engine is about one of its sequences.
    pub fn owns(&self, seq: SeqId) -> bool {
        self.open.contains_key(&seq)
    }

    /// The load that brings a prefix, if one does.
    pub fn brings(&self, prefix: &Prefix, block_size: u32) -> Option<SeqId> {
        let wanted = &prefix.tokens[..prefix.moves(block_size) as usize];
        let brings = |part: &Part| match part {
            Part::Load(load, _) => {
                load.prefix.root == prefix.prefix.root
                    && load.moves(block_size) as usize >= wanted.len()
                    && load.tokens.starts_with(wanted)
            }
            Part::Joined(_) | Part::Save => false,
        };
        self.open.iter().find(|(_, part)| brings(part)).map(|(seq, _)| *seq)
    }

    /// `computes`: how long the tokens from one position to another take to compute, in seconds; 0 where that is not known.
    pub fn command(
        &mut self,
        desk: Desk<'_>,
        command: Command,
        computes: impl Fn(u32, u32) -> f64,
        now: Time,
        out: &mut Vec<Effect>,
    ) {
        match command {
            Command::Load { prefix, seconds } => self.load(desk, *prefix, seconds, computes, out),
            Command::Streams(seq) => {
                if let Some(Part::Load(..)) = self.open.get(&seq) {
                    desk.engine.streams(seq);
                }
            }
            Command::Loaded(seq, digests) => self.loaded(desk.engine, seq, digests.as_deref(), out),
            Command::Save(prefix, first) => {
                let prefix = Prefix { deadline: now.after_ms(SAVE_MS), ..*prefix };
                self.save(desk, prefix, first, out);
            }
            Command::Saved(seq, changed) => self.saved(desk.engine, seq, changed),
        }
    }

    fn load(
        &mut self,
        desk: Desk<'_>,
        prefix: Prefix,
        seconds: f64,
        computes: impl Fn(u32, u32) -> f64,
        out: &mut Vec<Effect>,
    ) {
        let (here, moves) = (desk.engine.here(&prefix.prefix, &prefix.tokens), prefix.moves(desk.engine.block_size()));
        let known = computes(here, moves);
        // What is in the pool already is not loaded.
        let seconds = seconds * f64::from(moves.saturating_sub(here)) / f64::from(moves.max(1));
        let loads = self.open.values().filter(|part| !matches!(part, Part::Save)).count();
        if here == moves {
            // If it is evicted before its prompt starts, the prompt asks for it.
            desk.engine.asks_later(prefix.request_id);
            return;
        }
        if desk.draining || (known > 0.0 && known <= seconds) {
            return;
        }
        let room = loads < MOST && desk.engine.fits_behind_queue(&prefix);
        let fetch = if room { desk.engine.fetch(prefix.clone(), desk.events).map(Some) } else { Ok(None) };
        match fetch {
            Ok(Some(seq)) => drop(self.open.insert(seq, Part::Load(prefix, here))),
            // Its prompt waits for room, too, and asks again when there is.
            Ok(None) | Err(EngineError::NoRoom { .. }) => {
                desk.engine.asks_later(prefix.request_id.clone());
                out.push(Effect::Warm(Box::new(prefix), here));
            }
            // It is on its way already, or can never be fetched.
            Err(_) => {}
        }
    }

    /// A step that is launched now takes over the blocks of a load.
    pub fn joined(&mut self, load: SeqId, block_size: u32) {
        if let Some(part) = self.open.get_mut(&load)
            && let Part::Load(prefix, here) = part
        {
            *part = Part::Joined(prefix.moves(block_size) - *here);
        }
    }

    fn loaded(&mut self, engine: &mut Engine, seq: SeqId, digests: Option<&[Digest]>, out: &mut Vec<Effect>) {
        let here = match self.open.remove(&seq) {
            Some(Part::Load(_, here)) => here,
            Some(Part::Joined(tokens)) => {
                return out.extend(digests.map(|_| Effect::Loaded { tokens, streamed: true }));
            }
            _ => return clear(engine, seq),
        };
        match digests.and_then(|digests| engine.fetched(seq, digests).ok()) {
            Some(tokens) => out.push(Effect::Loaded { tokens: tokens - here, streamed: false }),
            // The store's thread is done with the blocks.
            None => drop(engine.abort(seq, false)),
        }
    }

    fn saved(&mut self, engine: &mut Engine, seq: SeqId, changed: Option<(usize, BlockId)>) {
        match self.open.remove(&seq) {
            Some(_) => {
                if let Err(error) = engine.release(seq) {
                    tracing::error!(%seq, %error, "blocks that were saved could not be freed");
                }
            }
            None => clear(engine, seq),
        }
        if let Some((group, block)) = changed {
            engine.spoilt(group, block);
        }
    }

    fn save(&mut self, desk: Desk<'_>, prefix: Prefix, first: u32, out: &mut Vec<Effect>) {
        let saves = self.open.values().filter(|part| matches!(part, Part::Save)).count();
        if desk.draining || saves >= MOST {
            return;
        }
        // Refused where some of it has been evicted meanwhile.
        let Ok(seq) = desk.engine.serve(prefix.clone()) else { return };
        self.open.insert(seq, Part::Save);
        let blocks = blocks_from(desk.engine, seq, first);
        let each = blocks.iter().enumerate().flat_map(|(group, list)| list.iter().map(move |block| (group, *block)));
        let digest = |(group, block)| Some(Digest { group, block, of: desk.engine.digest(group, block)? });
        let known = each.filter_map(digest).collect();
        out.push(Effect::Save(Box::new(Move { seq, prefix, first, blocks, known })));
    }

    /// Handles an event of one of its sequences.
    pub fn event(&mut self, engine: &mut Engine, event: Event, out: &mut Vec<Effect>) {
        match event {
            Event::Reserved { seq, .. } => {
                let Some(Part::Load(prefix, _)) = self.open.get(&seq) else { return };
                let first = engine.lent_from(seq).unwrap_or(0);
                let blocks = blocks_from(engine, seq, first);
                out.push(Effect::Load(Box::new(Move { seq, prefix: prefix.clone(), first, blocks, known: vec![] })));
            }
            // Its deadline has passed: the store's thread is told, and says when it is done.
            Event::Failed { seq, .. } => {
                if let Some(Part::Load(..)) = self.open.remove(&seq) {
                    out.push(Effect::Abort(seq));
                }
            }
            other => {
                let seq = other.seq();
                tracing::error!(%seq, "blocks that move compute nothing");
                let _ = engine.abort(seq, true);
                if let Some(Part::Load(..)) = self.open.remove(&seq) {
                    out.push(Effect::Abort(seq));
                }
            }
        }
    }
}

/// A sequence's blocks from this index on, by group.
fn blocks_from(engine: &Engine, seq: SeqId, first: u32) -> Vec<Vec<BlockId>> {
    let from = |table: &BlockTable| table.blocks().get(first as usize..).unwrap_or_default().to_vec();
    engine.tables(seq).unwrap_or_default().iter().map(from).collect()
}

/// Whether a group's window has passed a block.
pub fn is_hole(block: BlockId) -> bool {
    block == HOLE
}
