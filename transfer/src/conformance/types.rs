//! Workers whose pools have different KV types: the sender converts to the receiver's.

use super::*;
use crate::{Conversion, Converter};

for_each_transport![
    values_change_their_type_on_the_way,
    values_of_many_batches_change_their_type,
    who_cannot_convert_refuses_another_type,
];

/// A made-up conversion from f16 to f32: twice the bits. So every element tells where it came from.
fn doubled(rows: Vec<u8>) -> Vec<u8> {
    let (elements, _) = rows.as_chunks::<2>();
    elements.iter().flat_map(|bits| (u32::from(u16::from_le_bytes(*bits)) * 2).to_le_bytes()).collect()
}

fn of_type(dtype: KvDtype, geometry: PoolGeometry) -> PoolGeometry {
    PoolGeometry { layout: KvLayout { dtype, ..geometry.layout }, ..geometry }
}

/// Two groups of several heads, in blocks of several slots.
fn mixed() -> PoolGeometry {
    let group =
        |layers: Vec<u32>, kv_heads| KvGroup { layers, planes: 2, kv_heads, head_dim: 8, window: None, sinks: 0 };
    let groups = vec![group(vec![0, 2], 4), group(vec![1], 1)];
    let layout = KvLayout { version: 1, model: 44, dtype: KvDtype::F16, block_size: 4, groups };
    PoolGeometry { layout, blocks: vec![8, 7] }
}

/// A sender that converts its values.
fn converting(geometry: PoolGeometry, choice: TransportChoice, converter: Converter) -> Prefill {
    let mut prefill = Prefill::new(geometry, 2, choice);
    let options = SenderOptions {
        worker: WorkerId(2),
        geometry: prefill.geometry.clone(),
        pool: prefill.pool.clone(),
        transport: choice,
        ucx: ucx(),
        tls: tls(),
        tcp_connections: connections(),
        sockets: None,
        cpus: Cpus::default(),
        courtesy: Courtesy::default(),
        limits: TransferLimits::default(),
        convert: Some(converter),
        verify: true,
        on_trouble: |_, _| {},
    };
    prefill.sender = Sender::new(options).unwrap();
    prefill
}

/// CUDA IPC cannot convert, so another path is taken.
fn over(choice: TransportChoice) -> TransportChoice {
    if choice == TransportChoice::CudaIpc { TransportChoice::Auto } else { choice }
}

/// Checks that every lent block holds what was sent, converted, and that no other block has changed.
fn check(decode: &Decode, prefill: &Prefill, lent: &[Vec<BlockId>], first: u32) {
    let before = Pool::from(pool(&decode.geometry, 1));
    for (group, list) in lent.iter().enumerate() {
        for id in (0..decode.geometry.blocks[group]).map(BlockId) {
            let index = list.iter().position(|block| *block == id);
            let want = match index {
                Some(index) => doubled(block(&prefill.pool, &prefill.geometry, group, BlockId(first + index as u32))),
                None => block(&before, &decode.geometry, group, id),
            };
            assert!(block(&decode.pool, &decode.geometry, group, id) == want, "{id} of group {group}");
        }
    }
}

fn values_change_their_type_on_the_way(choice: TransportChoice) {
    let convert = |conversion: Conversion<'_>| {
        let Conversion { from, to, block_size, head_dim, source, target } = conversion;
        assert_eq!((from, to, block_size, head_dim), (KvDtype::F16, KvDtype::F32, 4, 8));
        target.copy_from_slice(&doubled(source.to_vec()));
    };
    let decode = Decode::new(of_type(KvDtype::F32, mixed()), 1);
    let prefill = converting(mixed(), over(choice), Converter::new(convert));
    // Neither in order nor at the prefill side's indexes.
    let lent = [[5, 0, 1, 3].map(BlockId).to_vec(), [2, 4, 0].map(BlockId).to_vec()];
    prefill.send(&decode.reserve(1, &lent), 1).wait().unwrap();
    decode.expect_verified(1);
    check(&decode, &prefill, &lent, 1);
}

/// More than the socket takes at once.
fn values_of_many_batches_change_their_type(choice: TransportChoice) {
    let decode = Decode::new(of_type(KvDtype::F32, large()), 1);
    let convert = Converter::new(|c| c.target.copy_from_slice(&doubled(c.source.to_vec())));
    let prefill = converting(large(), over(choice), convert);
    let lent = first(32);
    let stats = prefill.send(&decode.reserve(1, &lent), 8).wait().unwrap();
    assert_eq!(stats.bytes, 32 * decode.geometry.layout.block_bytes_all_layers(0) as u64);
    decode.expect_verified(1);
    check(&decode, &prefill, &lent, 8);
}

fn who_cannot_convert_refuses_another_type(choice: TransportChoice) {
    let decode = Decode::new(of_type(KvDtype::F32, large()), 1);
    let prefill = Prefill::new(large(), 2, choice);
    let error = prefill.sender.open(&decode.reserve(1, &first(1)), far()).err().unwrap().to_string();
    assert!(error.contains("KV dtype: F16 here, F32 at the peer"), "{error}");
}
