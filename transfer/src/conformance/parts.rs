//! Workers whose pools differ: in how they split the KV heads, and in the KV type.

use std::ops::Range;

use baton_types::heads_of_rank;

use super::*;
use crate::{Conversion, Converter, Gather, Gathered, HeadPart, head_plan};

for_each_transport![
    heads_find_their_place_between_any_two_degrees,
    parts_of_a_block_are_apart,
    values_change_their_type_on_the_way,
];

/// KV heads of the whole model, per group: more and fewer than ranks.
const HEADS: [u32; 2] = [4, 1];
const BLOCKS: [u32; 2] = [6, 5];

/// Of one rank's pool.
fn geometry(ranks: u32, dtype: KvDtype) -> PoolGeometry {
    let group = |layers: Vec<u32>, heads: u32| KvGroup {
        layers,
        planes: 2,
        kv_heads: heads_of_rank(heads, ranks, 0).len() as u32,
        head_dim: 8,
        window: None,
        sinks: 0,
    };
    let groups = vec![group(vec![0, 2], HEADS[0]), group(vec![1], HEADS[1])];
    PoolGeometry { layout: KvLayout { version: 1, model: 44, dtype, block_size: 4, groups }, blocks: BLOCKS.to_vec() }
}

/// A head's rows of a plane, in a pool of f16: different for every head of the model, wherever it lies.
fn rows(group: usize, layer: usize, block: u32, plane: usize, head: u32) -> Vec<u8> {
    let seed = ((group * 8 + layer) * 64 + block as usize) * 64 + plane * 32 + head as usize;
    (0..32u64)
        .flat_map(|i| ((seed as u64 + i * 7919).wrapping_mul(0x9e37_79b9_7f4a_7c15) as u16).to_le_bytes())
        .collect()
}

/// Where a rank's head of a plane lies.
fn place(geometry: &PoolGeometry, group: usize, layer: usize, block: u32, plane: usize, head: u32) -> Range<usize> {
    let layout = &geometry.layout;
    let start = geometry.block_range(group, layer, BlockId(block)).start;
    let start = start + plane * layout.plane_bytes(group) + head as usize * layout.head_bytes(group);
    start..start + layout.head_bytes(group)
}

/// Calls `each` with every place of a rank's pool and, of the model, group, layer, plane and head.
fn for_each_place(ranks: u32, rank: u32, mut each: impl FnMut(usize, usize, usize, u32, u32)) {
    let layers = [2, 1];
    for (group, layer) in (0..2).flat_map(|g| (0..layers[g]).map(move |l| (g, l))) {
        for (plane, (local, head)) in
            (0..2).flat_map(|p| (0..).zip(heads_of_rank(HEADS[group], ranks, rank)).map(move |h| (p, h)))
        {
            each(group, layer, plane, local, head);
        }
    }
}

/// A prefill rank with its heads of the model's KV: block `b` of the sequence lies in block `b + 1`.
fn prefill_rank(ranks: u32, rank: u32, choice: TransportChoice, convert: Option<Converter>) -> Prefill {
    let geometry = geometry(ranks, KvDtype::F16);
    let pool = pool_on(devices().prefill, &geometry, rank.into());
    for_each_place(ranks, rank, |group, layer, plane, local, head| {
        for block in 0..BLOCKS[group] - 1 {
            let at = place(&geometry, group, layer, block + 1, plane, local);
            write(&pool, at.start, &rows(group, layer, block, plane, head));
        }
    });
    let options = SenderOptions {
        worker: WorkerId(100 + u64::from(rank)),
        geometry: geometry.clone(),
        pool: pool.clone(),
        transport: choice,
        ucx: ucx(),
        tls: tls(),
        tcp_connections: connections(),
        cpus: Cpus::default(),
        limits: Limits::default(),
        convert,
        verify: true,
        on_trouble: |_, _| {},
    };
    Prefill { sender: Sender::new(options).unwrap(), pool, geometry }
}

/// Blocks of a decode rank that a sequence of four and three blocks gets: not in order, not the prefill side's.
fn lent() -> Vec<Vec<BlockId>> {
    vec![[5, 0, 1, 3].map(BlockId).to_vec(), [2, 4, 0].map(BlockId).to_vec()]
}

/// The blocks of a part; none of a group it has no heads of.
fn blocks_of(part: &HeadPart) -> Vec<Vec<BlockId>> {
    let list = |(list, slice): (Vec<BlockId>, &crate::HeadSlice)| if slice.count > 0 { list } else { vec![] };
    lent().into_iter().zip(&part.slices).map(list).collect()
}

fn reserve_part(decode: &Decode, epoch: u64, part: &HeadPart) -> Result<Vec<u8>, TransferError> {
    let wanted = Wanted { tokens: 16, first: &[0, 0], blocks: &blocks_of(part), heads: &part.slices };
    decode.receiver.reserve(Epoch(epoch), &wanted, PATIENCE)
}

/// Moves the sequence from all prefill ranks to one decode rank; the last part is sent after all others are verified.
fn fill(decode: &Decode, prefills: &[Prefill], parts: &[HeadPart]) {
    let targets: Vec<_> = (1..).zip(parts).map(|(epoch, part)| reserve_part(decode, epoch, part).unwrap()).collect();
    let mut gather = Gather::new((1..=parts.len() as u64).map(Epoch));
    let send = |i: usize| prefills[parts[i].source_rank as usize].send(&targets[i], 1);
    let last = parts.len() - 1;
    let early: Vec<_> = (0..last).map(send).collect();
    early.into_iter().for_each(|outcome| assert_eq!(outcome.wait().map(|_| ()), Ok(())));
    for _ in 0..last {
        assert_eq!(gather.step(&decode.event()), Gathered::Nothing, "a part is not the whole");
    }
    send(last).wait().unwrap();
    assert_eq!(gather.step(&decode.event()), Gathered::Whole);
}

/// What lies in a decode rank's pool is what `expected` says of each head, in the blocks lent, and nothing else has changed.
fn check(decode: &Decode, ranks: u32, rank: u32, expected: impl Fn(Vec<u8>) -> Vec<u8>) {
    let before = Pool::from(pool(&decode.geometry, 1000 + u64::from(rank)));
    for_each_place(ranks, rank, |group, layer, plane, local, head| {
        for block in 0..BLOCKS[group] {
            let at = place(&decode.geometry, group, layer, block, plane, local);
            let [got, was] = [&decode.pool, &before].map(|pool| read(pool, &[(at.start, at.len())]));
            let want = match lent()[group].iter().position(|b| b.0 == block) {
                Some(index) => expected(rows(group, layer, index as u32, plane, head)),
                None => was,
            };
            assert!(got == want, "rank {rank} of {ranks}: head {head} of plane {plane}, block {block}, group {group}");
        }
    });
}

fn move_all(
    choice: TransportChoice,
    prefill: u32,
    decode: u32,
    dtype: KvDtype,
    convert: Option<(Converter, Expected)>,
) {
    let (converter, expected) = convert.map_or((None, None), |(c, e)| (Some(c), Some(e)));
    // A device's memory may not go while a peer has it open.
    let mut kept = Vec::new();
    let prefills: Vec<_> = (0..prefill).map(|rank| prefill_rank(prefill, rank, choice, converter.clone())).collect();
    let plan = head_plan(&HEADS, prefill, decode).unwrap();
    for rank in 0..decode {
        let parts: Vec<_> = plan.iter().filter(|part| part.target_rank == rank).cloned().collect();
        let target = Decode::new(geometry(decode, dtype), 1000 + u64::from(rank));
        kept.push(target.pool.clone());
        fill(&target, &prefills, &parts);
        check(&target, decode, rank, |rows| expected.map_or(rows.clone(), |expected| expected(rows)));
    }
}

type Expected = fn(Vec<u8>) -> Vec<u8>;

fn heads_find_their_place_between_any_two_degrees(choice: TransportChoice) {
    for (prefill, decode) in [1, 2, 4, 8].into_iter().flat_map(|p| [1, 2, 4, 8].map(|d| (p, d))) {
        move_all(choice, prefill, decode, KvDtype::F16, None);
    }
}

fn parts_of_a_block_are_apart(choice: TransportChoice) {
    let decode = Decode::new(geometry(1, KvDtype::F16), 1000);
    let prefills: Vec<_> = (0..2).map(|rank| prefill_rank(2, rank, choice, None)).collect();
    let parts = head_plan(&HEADS, 2, 1).unwrap();
    let first = reserve_part(&decode, 1, &parts[0]).unwrap();
    // I3: the same heads of the same blocks are lent once; a sender without slices would write all of them.
    assert!(matches!(reserve_part(&decode, 2, &parts[0]), Err(TransferError::Lent { epoch: Epoch(1), .. })));
    let whole = decode.try_reserve(2, &lent(), PATIENCE);
    assert!(matches!(whole, Err(TransferError::Lent { epoch: Epoch(1), .. })), "{whole:?}");
    let second = reserve_part(&decode, 3, &parts[1]).unwrap();
    // One part is taken back: the other's heads stay lent, and what has arrived there stays as it is.
    prefills[1].send(&second, 1).wait().unwrap();
    decode.expect_verified(3);
    assert_eq!(decode.receiver.fence(Epoch(1)), crate::FenceState::Clear);
    prefills[0].send(&first, 1).wait().unwrap_err();
    let again = reserve_part(&decode, 4, &parts[0]).unwrap();
    prefills[0].send(&again, 1).wait().unwrap();
    decode.expect_verified(4);
    check(&decode, 1, 0, |rows| rows);

    // I8: slices that are not the pools'.
    let mut beyond = parts[0].clone();
    beyond.slices[0].target = 3;
    let error = reserve_part(&decode, 5, &beyond).unwrap_err().to_string();
    assert!(error.contains("wanted.heads: group 0: 2 from 3 on, the decode pool has 4 heads"), "{error}");
    let short = Wanted { tokens: 16, first: &[0, 0], blocks: &lent(), heads: &parts[0].slices[..1] };
    let error = decode.receiver.reserve(Epoch(5), &short, PATIENCE).unwrap_err().to_string();
    assert!(error.contains("wanted.heads: slices for 1 groups, the layout has 2"), "{error}");
    decode.receiver.release(Epoch(3));
    decode.receiver.release(Epoch(4));
    let whole = decode.try_reserve(6, &lent(), PATIENCE).unwrap();
    let error = prefills[0].sender.open(&whole, far()).err().unwrap().to_string();
    assert!(error.contains("layer groups"), "{error}");
}

/// f16 to f32 as nobody would: twice the bits. Every element tells where it came from.
fn doubled(rows: Vec<u8>) -> Vec<u8> {
    let (elements, _) = rows.as_chunks::<2>();
    elements.iter().flat_map(|bits| (u32::from(u16::from_le_bytes(*bits)) * 2).to_le_bytes()).collect()
}

fn values_change_their_type_on_the_way(choice: TransportChoice) {
    // What goes from device to device goes as it is: another path is taken.
    let choice = if choice == TransportChoice::CudaIpc { TransportChoice::Auto } else { choice };
    let convert = |conversion: Conversion<'_>| {
        let Conversion { from, to, block_size, head_dim, source, target } = conversion;
        assert_eq!((from, to, block_size, head_dim), (KvDtype::F16, KvDtype::F32, 4, 8));
        target.copy_from_slice(&doubled(source.to_vec()));
    };
    for (prefill, decode) in [(1, 1), (2, 1), (1, 4), (8, 2)] {
        let convert = (Converter::new(convert), doubled as Expected);
        move_all(choice, prefill, decode, KvDtype::F32, Some(convert));
    }
    // Many batches, more than the socket takes at once.
    let wide = |dtype| PoolGeometry { layout: KvLayout { dtype, ..large().layout }, ..large() };
    let decode = Decode::new(wide(KvDtype::F32), 1);
    let mut prefill = Prefill::new(wide(KvDtype::F16), 2, choice);
    let target = decode.reserve(1, &[(0..32).map(BlockId).collect()]);
    let error = prefill.sender.open(&target, far()).err().unwrap().to_string();
    assert!(error.contains("KV dtype: F16 here, F32 at the peer"), "{error}");
    let convert = Some(Converter::new(|c| c.target.copy_from_slice(&doubled(c.source.to_vec()))));
    let options = SenderOptions {
        worker: WorkerId(3),
        geometry: prefill.geometry.clone(),
        pool: prefill.pool.clone(),
        transport: choice,
        ucx: ucx(),
        tls: tls(),
        tcp_connections: connections(),
        cpus: Cpus::default(),
        limits: Limits::default(),
        convert,
        verify: true,
        on_trouble: |_, _| {},
    };
    prefill.sender = Sender::new(options).unwrap();
    let stats = prefill.send(&target, 8).wait().unwrap();
    assert_eq!(stats.bytes, 32 * decode.geometry.layout.block_bytes_all_layers(0) as u64);
    decode.expect_verified(1);
    for id in 0..32 {
        let sent = block(&prefill.pool, &prefill.geometry, 0, BlockId(8 + id));
        assert!(block(&decode.pool, &decode.geometry, 0, BlockId(id)) == doubled(sent), "block {id}");
    }
}
