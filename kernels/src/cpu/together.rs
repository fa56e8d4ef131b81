//! Which rows of a step attend together: rows of sequences that have blocks in common are put side by side, so that
//! [`super::attention`] reads and widens such a block once for all of them.
//!
//! Pure. [`Plan::renew`] makes tasks of a [`Ragged`]'s tiles. A tile with 16 rows is a task by itself; a smaller one joins those
//! whose tables name the same block where both first see one. They are sorted by their tables, so a tree of prefixes (A of eight
//! sequences, then B of four of them) needs nothing more: neighbours share as far as they agree. A plan decides time, never
//! results: a row's slots are taken in the row's own order whoever is beside it (I1).
//!
//! More rows in a task widen less, more tasks keep more threads busy: [`Tables::pieces`] weighs the two. Where nothing is shared
//! every tile is a task. Knows nothing of KV types, and reads no K or V.

use std::cmp::Reverse;
use std::ops::Range;

use baton_types::BlockId;

use crate::backend::{Ragged, Span, TILE_ROWS};

/// Widening a slot takes about as long as folding it into this many queries.
const WIDENING: usize = 3;

/// What a query sees of its sequence.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Sight {
    /// This many latest tokens, itself included; None: all.
    pub window: Option<usize>,
    /// And this many first ones, which a plan leaves out: they are few.
    pub sinks: usize,
    /// Tokens of a block.
    pub block_size: usize,
}

impl Sight {
    /// First position that a query at `position` sees; the sinks are apart where it does not see all between them and itself.
    pub fn first(&self, position: usize) -> usize {
        let window = self.window.filter(|_| self.evicts(position));
        window.map_or(0, |w| position + 1 - w)
    }

    /// Whether a query at `position` no longer sees all before it.
    pub fn evicts(&self, position: usize) -> bool {
        self.window.is_some_and(|w| position >= self.sinks + w)
    }
}

/// Who does the work.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Labour {
    /// Threads.
    pub threads: usize,
    /// KV heads: each task is run once for every one.
    pub kv_heads: usize,
    /// Query heads of a KV head.
    pub group: usize,
}

/// Up to [`TILE_ROWS`] rows of one sequence.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tile {
    /// First row of the batch's buffers.
    pub row: usize,
    /// At least 1.
    pub rows: usize,
    /// Of the first row, in its sequence.
    pub position: usize,
    /// Where block 0 of its sequence would stand in [`Ragged::blocks`], wrapping, so that what lies behind [`Span::hidden`]
    /// stands where it does.
    pub table: usize,
    /// First entry of its block table: where its sinks stand.
    pub sinks: usize,
    /// Rows of its task before it.
    pub place: usize,
}

impl Tile {
    /// Behind the last position it sees.
    pub fn end(&self) -> usize {
        self.position + self.rows
    }
}

/// Tiles that attend together.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Task {
    /// Of [`Plan::tiles`].
    pub tiles: Range<usize>,
    /// Behind the last position of which two neighbours share the block; 0: nothing is shared.
    pub shared: usize,
    /// Estimated, in slots of a query.
    cost: usize,
}

/// The tasks of a step. Made once for all layers of a group.
#[derive(Default, Debug)]
pub struct Plan {
    /// What it was made from.
    spans: Vec<Span>,
    blocks: Vec<BlockId>,
    conditions: (Sight, Labour),
    tiles: Vec<Tile>,
    tasks: Vec<Task>,
    /// While it is made: tiles with their families, and the families.
    sorted: Vec<(usize, Tile)>,
    families: Vec<Family>,
}

/// Tiles that share blocks with the first of them.
#[derive(Clone, Copy, Debug)]
struct Family {
    first: Tile,
    /// Index of the first block that all of them see who see any from there on.
    common: usize,
}

/// A step's block tables and who reads them.
#[derive(Clone, Copy)]
pub struct Tables<'a> {
    /// [`Ragged::blocks`].
    pub blocks: &'a [BlockId],
    /// What is seen of them.
    pub sight: Sight,
}

impl Plan {
    /// Makes the plan of a step, unless it is there already.
    pub fn renew(&mut self, batch: &Ragged, sight: Sight, labour: Labour) {
        let conditions = (sight, labour);
        if self.conditions == conditions && self.spans == batch.spans() && self.blocks == batch.blocks() {
            return;
        }
        self.conditions = conditions;
        self.clear(batch.capacity());
        self.spans.extend_from_slice(batch.spans());
        self.blocks.extend_from_slice(batch.blocks());
        self.sort(batch);
        self.divide();
        // Those that take longest first, so that the threads end together.
        self.tasks.sort_unstable_by_key(|task| (Reverse(task.cost), task.tiles.start));
    }

    /// Empties it; from then on a batch of the same room makes it allocate nothing.
    fn clear(&mut self, (spans, blocks): (usize, usize)) {
        fn room<T>(of: &mut Vec<T>, count: usize) {
            of.clear();
            of.reserve(count);
        }
        room(&mut self.spans, spans);
        room(&mut self.blocks, blocks);
        room(&mut self.tiles, spans);
        room(&mut self.tasks, spans);
        room(&mut self.sorted, spans);
        room(&mut self.families, spans);
    }

    /// Its tasks.
    pub fn tasks(&self) -> &[Task] {
        &self.tasks
    }

    /// Tiles of the tasks.
    pub fn tiles(&self) -> &[Tile] {
        &self.tiles
    }

    /// Puts the tiles that may share blocks side by side.
    fn sort(&mut self, batch: &Ragged) {
        let Plan { blocks, sorted, families, conditions: (sight, _), .. } = self;
        let tables = Tables { blocks, sight: *sight };
        for &(span, first) in batch.tiles() {
            let Span { row, len, start, table: sinks, hidden } = batch.spans()[span];
            let rows = TILE_ROWS.min(len - first);
            let table = sinks.wrapping_sub(hidden / sight.block_size);
            let tile = Tile { row: row + first, rows, position: start + first, table, sinks, place: 0 };
            let from = tables.seen(&tile).start;
            let joined = families.iter().position(|family| tables.meet(&family.first, &tile));
            let family = joined.unwrap_or(families.len());
            match families.get_mut(family) {
                Some(family) => family.common = family.common.max(from),
                None => families.push(Family { first: tile, common: from }),
            }
            sorted.push((family, tile));
        }
        sorted.sort_unstable_by(|(a, x), (b, y)| {
            let from = |family: usize, tile| tables.from(tile, families[family].common);
            a.cmp(b).then_with(|| from(*a, x).cmp(from(*b, y))).then(x.row.cmp(&y.row))
        });
    }

    /// Makes tasks of families.
    fn divide(&mut self) {
        let Plan { blocks, sorted, tiles, tasks, conditions: (sight, labour), .. } = self;
        let tables = Tables { blocks, sight: *sight };
        tiles.extend(sorted.iter().map(|(_, tile)| *tile));
        let alone: usize = tiles.iter().map(|tile| tables.cost(std::slice::from_ref(tile), labour)).sum();
        let mut first = 0;
        for family in sorted.chunk_by(|(a, _), (b, _)| a == b) {
            let end = first + family.len();
            let rows: usize = tiles[first..end].iter().map(|tile| tile.rows).sum();
            let most = rows.div_ceil(tables.pieces(&tiles[first..end], labour, alone)).min(TILE_ROWS);
            while first < end {
                let (start, mut place) = (first, 0);
                while first < end && (place == 0 || place + tiles[first].rows <= most) {
                    tiles[first].place = place;
                    place += tiles[first].rows;
                    first += 1;
                }
                let members = &tiles[start..first];
                let shared = members.windows(2).map(|pair| tables.shared(&pair[0], &pair[1]).end).max().unwrap_or(0);
                tasks.push(Task { tiles: start..first, shared, cost: tables.cost(members, labour) });
            }
        }
    }
}

impl<'a> Tables<'a> {
    /// The block of a tile's sequence at an index that it sees.
    pub fn block(&self, tile: &Tile, index: usize) -> BlockId {
        self.blocks[tile.table.wrapping_add(index)]
    }

    /// Indices of the blocks a tile sees.
    fn seen(&self, tile: &Tile) -> Range<usize> {
        let size = self.sight.block_size;
        self.sight.first(tile.position) / size..tile.end().div_ceil(size)
    }

    /// The blocks it sees from an index on that is not before the first.
    fn from(&self, tile: &Tile, index: usize) -> &'a [BlockId] {
        let end = self.seen(tile).end;
        let at = |index| tile.table.wrapping_add(index);
        if index < end { &self.blocks[at(index)..at(end)] } else { &[] }
    }

    /// Whether two tiles share a block and gain from it.
    fn meet(&self, a: &Tile, b: &Tile) -> bool {
        let (x, y) = (self.seen(a), self.seen(b));
        let at = x.start.max(y.start);
        let both = at < x.end.min(y.end) && a.rows.max(b.rows) < TILE_ROWS;
        both && self.block(a, at) == self.block(b, at)
    }

    /// Positions of the blocks that two tiles share from where both see one.
    fn shared(&self, a: &Tile, b: &Tile) -> Range<usize> {
        let start = self.seen(a).start.max(self.seen(b).start);
        let same = self.from(a, start).iter().zip(self.from(b, start)).take_while(|(x, y)| x == y).count();
        let size = self.sight.block_size;
        if same > 0 { start * size..(start + same) * size } else { 0..0 }
    }

    /// Tokens a tile sees.
    fn visible(&self, tile: &Tile) -> usize {
        tile.end().saturating_sub(self.sight.first(tile.position))
    }

    /// What one KV head of these tiles takes together, in slots folded into a query: each shared slot is widened once.
    fn cost(&self, tiles: &[Tile], labour: &Labour) -> usize {
        let folded: usize = tiles.iter().map(|tile| self.visible(tile) * tile.rows * labour.group).sum();
        let seen: usize = tiles.iter().map(|tile| self.visible(tile)).sum();
        let shared: usize = tiles.windows(2).map(|pair| self.shared(&pair[0], &pair[1]).len()).sum();
        folded + WIDENING * seen.saturating_sub(shared)
    }

    /// Into how many tasks a family is best divided: the fewest rounds of the threads, or the least work where there is more to
    /// do beside it. `alone` is what the whole step costs when nothing is shared.
    fn pieces(&self, family: &[Tile], labour: &Labour, alone: usize) -> usize {
        let rows: usize = family.iter().map(|tile| tile.rows).sum();
        let (one, many) = (rows.div_ceil(TILE_ROWS), family.len());
        let apart: usize = family.iter().map(|tile| self.cost(std::slice::from_ref(tile), labour)).sum();
        let gain = apart - self.cost(family, labour);
        let ends = |pieces: usize| {
            // Each cut loses what two neighbours share, on average.
            let all = apart - gain * (many - pieces) / (many - 1).max(1);
            let rounds = (pieces * labour.kv_heads).div_ceil(labour.threads) * all / pieces;
            rounds.max((alone - apart + all) * labour.kv_heads / labour.threads)
        };
        (one.min(many)..=many).min_by_key(|&pieces| ends(pieces)).unwrap_or(many)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::Random;

    const ALL: Sight = Sight { window: None, sinks: 0, block_size: 16 };
    const ONE: Labour = Labour { threads: 1, kv_heads: 3, group: 3 };

    /// A batch of one row each, with so many tokens and this table.
    fn decode(sequences: &[(usize, Vec<u32>)]) -> Ragged {
        let mut batch = Ragged::default();
        for (tokens, table) in sequences {
            batch.push(tokens - 1, 1, &table.iter().copied().map(BlockId).collect::<Vec<_>>());
        }
        batch
    }

    fn plan(batch: &Ragged, sight: Sight, labour: Labour) -> Plan {
        let mut plan = Plan::default();
        plan.renew(batch, sight, labour);
        plan
    }

    /// Rows of each task, and how far its neighbours share.
    fn tasks(plan: &Plan) -> Vec<(Vec<usize>, usize)> {
        let rows = |task: &Task| plan.tiles[task.tiles.clone()].iter().map(|tile| tile.row).collect();
        plan.tasks.iter().map(|task| (rows(task), task.shared)).collect()
    }

    /// `count` sequences of 160 tokens that share the first 9 blocks.
    fn family(count: u32, first: u32) -> impl Iterator<Item = (usize, Vec<u32>)> {
        (0..count).map(move |i| (160, (first..first + 9).chain([first + 10 + i]).collect()))
    }

    #[test]
    fn without_shared_blocks_every_tile_is_a_task_the_longest_first() {
        let mut batch = decode(&[(16, vec![0]), (40, vec![1, 2, 3]), (24, vec![4, 5])]);
        batch.push(0, 35, &[6, 7, 8].map(BlockId));
        let plan = plan(&batch, ALL, ONE);
        let rows: Vec<_> = plan.tasks.iter().map(|task| (plan.tiles[task.tiles.start].row, task.shared)).collect();
        assert_eq!(rows, [(19, 0), (3, 0), (35, 0), (1, 0), (2, 0), (0, 0)]);
        assert!(plan.tasks.iter().all(|task| task.tiles.len() == 1));
    }

    /// A of six sequences, then B of three of them, which come apart in the batch; and one that shares nothing.
    #[test]
    fn a_tree_of_prefixes_is_sorted_so_that_neighbours_share_most() {
        let a_b = |own| (70, vec![1, 2, 3, 4, own]);
        let a = |own| (50, vec![1, 2, own, own + 1]);
        let batch = decode(&[a(50), a_b(10), a(60), (40, vec![30, 31, 32]), a_b(11), a(70), a_b(12)]);
        let plan = plan(&batch, ALL, ONE);
        assert_eq!(tasks(&plan), [(vec![1, 4, 6, 0, 2, 5], 64), (vec![3], 0)]);
    }

    #[test]
    fn a_family_is_divided_so_that_no_thread_waits() {
        let sizes = |count: u32, threads: usize, others: u32| {
            let alone = (0..others).map(|i| (160, (1000 + 10 * i..1010 + 10 * i).collect()));
            let batch = decode(&family(count, 0).chain(alone).collect::<Vec<_>>());
            let plan = plan(&batch, ALL, Labour { threads, ..ONE });
            let shared = plan.tasks.iter().filter(|task| task.shared > 0);
            shared.map(|task| task.tiles.len()).collect::<Vec<_>>()
        };
        // Three KV heads on two threads: of one task for each, the third would keep one thread waiting.
        assert_eq!(sizes(8, 1, 0), [8]);
        assert_eq!(sizes(8, 2, 0), [4, 4]);
        assert_eq!(sizes(8, 3, 0), [8]);
        assert_eq!(sizes(8, 2, 20), [8], "others fill the gap");
        assert_eq!(sizes(32, 1, 0), [16, 16], "no task has more rows");
        assert!(sizes(3, 64, 0).is_empty(), "a thread for each");
    }

    /// Sequences whose windows begin at different blocks share those that both see.
    #[test]
    fn windows_share_what_they_have_in_common() {
        let sight = Sight { window: Some(40), ..ALL };
        let table = |own: u32| (0..7).chain(own..own + 4).collect::<Vec<u32>>();
        let batch = decode(&[(100, table(20)), (125, table(30)), (170, table(40)), (90, table(50))]);
        let plan = plan(&batch, sight, ONE);
        assert_eq!(tasks(&plan), [(vec![3, 0, 1], 112), (vec![2], 0)]);
    }

    #[test]
    fn a_plan_is_made_anew_when_anything_changed() {
        let mut sequences: Vec<_> = family(3, 0).collect();
        let mut plan = plan(&decode(&sequences), ALL, ONE);
        plan.tasks.clear();
        plan.renew(&decode(&sequences), ALL, ONE);
        assert_eq!(plan.tasks, [], "it was there already");
        sequences[2].1[0] = 99;
        plan.renew(&decode(&sequences), ALL, ONE);
        assert_eq!(tasks(&plan), [(vec![0, 1], 144), (vec![2], 0)]);
        plan.renew(&decode(&sequences), Sight { window: Some(8), ..ALL }, ONE);
        assert_eq!(plan.tasks.len(), 3);
    }

    /// On any tables: every row is in one task, tasks fit, and the estimate is never above that of every tile alone.
    #[test]
    fn every_row_is_planned_once_and_nothing_gets_dearer() {
        let mut random = Random(5);
        for _ in 0..300 {
            let mut below = |n: usize| (random.bits() % n as u64) as usize;
            let mut batch = Ragged::default();
            for _ in 0..1 + below(20) {
                let (start, len) = (below(90), [1, 1, 1, 7, 33][below(5)]);
                let table: Vec<_> = (0..8).map(|at| BlockId((4 * at + below(3)) as u32)).collect();
                batch.push(start, len, &table);
            }
            let sight = Sight { window: [None, Some(30)][below(2)], ..ALL };
            let labour = Labour { threads: 1 + below(8), kv_heads: 1 + below(4), group: 1 + below(8) };
            let plan = plan(&batch, sight, labour);
            let mut rows: Vec<usize> = plan.tiles.iter().flat_map(|tile| tile.row..tile.row + tile.rows).collect();
            rows.sort_unstable();
            assert!(rows.into_iter().eq(0..batch.rows()));
            let mut tiles: Vec<usize> = plan.tasks.iter().flat_map(|task| task.tiles.clone()).collect();
            tiles.sort_unstable();
            assert!(tiles.into_iter().eq(0..plan.tiles.len()));
            for task in &plan.tasks {
                let mut place = 0;
                for tile in &plan.tiles[task.tiles.clone()] {
                    assert_eq!(tile.place, place);
                    place += tile.rows;
                }
                assert!(place <= TILE_ROWS);
            }
            let tables = Tables { blocks: batch.blocks(), sight };
            let alone: usize = plan.tiles.iter().map(|tile| tables.cost(std::slice::from_ref(tile), &labour)).sum();
            assert!(plan.tasks.iter().map(|task| task.cost).sum::<usize>() <= alone);
        }
    }
}
