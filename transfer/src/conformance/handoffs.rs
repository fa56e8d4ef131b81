//! Handoffs that succeed, and handoffs that are refused before any byte moves.

use super::*;
use crate::FenceState;
use baton_handoff::Descriptor;

for_each_transport![
    one_block,
    many_blocks_in_order,
    a_write_of_many_blocks_arrives_whole,
    more_than_the_queue_holds_waits_and_arrives_whole,
    epochs_and_keys_are_checked,
    holes_and_repeats_are_refused_by_the_sender,
    two_peers_at_once,
    a_receiver_that_restarted_is_another,
    leases_expire,
    a_released_block_can_be_lent_again,
    a_connection_too_many_is_told_so,
];

fn ids(ids: &[u32]) -> Vec<BlockId> {
    ids.iter().map(|id| BlockId(*id)).collect()
}

fn one_block(choice: TransportChoice) {
    let decode = Decode::new(small(), 1);
    let prefill = Prefill::new(small(), 2, choice);
    let target = decode.reserve(7, &[ids(&[3]), vec![]]);
    let stats = prefill.send(&target, 5).wait().unwrap();
    assert_eq!((stats.transport, stats.writes), (kind(choice), 2));
    assert_eq!(stats.bytes, decode.geometry.layout.block_bytes_all_layers(0) as u64);
    assert_eq!(decode.expect_verified(7), b"tail");
    let sent = block(&prefill.pool, &prefill.geometry, 0, BlockId(5));
    assert_eq!(block(&decode.pool, &decode.geometry, 0, BlockId(3)), sent);
    assert_eq!(decode.receiver.stats().verified, 1);
}

fn many_blocks_in_order(choice: TransportChoice) {
    let decode = Decode::new(small(), 1);
    let prefill = Prefill::new(small(), 2, choice);
    let before = pool(&decode.geometry, 1).into();
    let lists = [ids(&[7, 0, 1, 2, 5]), ids(&[11, 3, 10, 0])];
    let stats = prefill.send(&decode.reserve(1, &lists), 2).wait().unwrap();
    assert_eq!(stats.writes, 5 * 2 + 4 * 3);
    decode.expect_verified(1);
    for (group, blocks) in decode.geometry.blocks.clone().into_iter().enumerate() {
        for id in (0..blocks).map(BlockId) {
            let now = block(&decode.pool, &decode.geometry, group, id);
            let want = match lists[group].iter().position(|b| *b == id) {
                Some(index) => block(&prefill.pool, &prefill.geometry, group, BlockId(2 + index as u32)),
                None => block(&before, &decode.geometry, group, id),
            };
            assert_eq!(now, want, "{id} of group {group}");
        }
    }
}

fn epochs_and_keys_are_checked(choice: TransportChoice) {
    let decode = Decode::new(small(), 1);
    let prefill = Prefill::new(small(), 2, choice);
    let layout = &prefill.geometry.layout;
    let target = decode.reserve(7, &[ids(&[3]), vec![]]);
    let descriptor = Descriptor::parse(&target, layout, false).unwrap();
    let refused = |forged: Descriptor| {
        let error = prefill.send(&forged.encode(), 0).wait().unwrap_err();
        assert!(matches!(error, TransferError::Refused { .. }), "{error}");
        error.to_string()
    };
    assert!(refused(Descriptor { epoch: Epoch(8), ..descriptor.clone() }).contains("ended or never was"));
    assert!(refused(Descriptor { key: !descriptor.key, ..descriptor.clone() }).contains("key"));
    // The reservation is still good for its rightful user, once.
    prefill.send(&target, 0).wait().unwrap();
    decode.expect_verified(7);
    assert!(refused(descriptor.clone()).contains("Verified already"));
    assert_eq!(decode.receiver.fence(Epoch(7)), FenceState::Clear);
    assert!(refused(descriptor).contains("ended or never was"));
}

fn a_write_of_many_blocks_arrives_whole(choice: TransportChoice) {
    // More blocks than one queued write holds.
    let geometry = PoolGeometry { blocks: vec![600, 12], ..small() };
    let (decode, prefill) = (Decode::new(geometry.clone(), 1), Prefill::new(geometry, 2, choice));
    let target = decode.reserve(1, &[(0..600).map(BlockId).collect(), vec![]]);
    assert_eq!(prefill.send(&target, 0).wait().unwrap().writes, 600 * 2);
    decode.expect_verified(1);
    for id in (0..600).map(BlockId) {
        let got = block(&decode.pool, &decode.geometry, 0, id);
        assert_eq!(got, block(&prefill.pool, &prefill.geometry, 0, id), "{id}");
    }
}

/// A long cached prefix is written at once, however little the queue holds (I5).
fn more_than_the_queue_holds_waits_and_arrives_whole(choice: TransportChoice) {
    let geometry = PoolGeometry { blocks: vec![1500, 12], ..small() };
    let decode = Decode::new(geometry.clone(), 1);
    let sender = |worker, wrap, room| {
        let limits = TransferLimits { queued_blocks: 300, room, ..TransferLimits::default() };
        Prefill::limited(geometry.clone(), worker, choice, wrap, limits)
    };
    let reserve = |epoch| decode.reserve(epoch, &[(0..1500).map(BlockId).collect(), vec![]]);
    let pairs: Vec<_> = (0..1500).map(|i| (BlockId(i), i)).collect();
    // Nothing leaves, so the queue is full long before it holds everything.
    let (wrap, reached, go) = held(1);
    let prefill = sender(2, wrap, Duration::from_millis(1));
    let mut handoff = prefill.sender.open(&reserve(1), far()).unwrap();
    handoff.write(0, 0, &pairs[..1]).unwrap();
    reached.recv_timeout(PATIENCE).unwrap();
    let error = handoff.write(0, 0, &pairs[1..]).unwrap_err();
    assert!(matches!(error, TransferError::Stalled { epoch: Epoch(1), .. }), "{error}");
    drop(handoff);
    go.send(()).unwrap();
    decode.expect_failed(1);
    decode.expect_fenced(1);
    drop(prefill);
    // With time to leave, everything arrives.
    let prefill = sender(3, Arc::new(|transport| transport), PATIENCE);
    assert_eq!(prefill.send(&reserve(2), 0).wait().unwrap().writes, 1500 * 2);
    decode.expect_verified(2);
    for id in (0..1500).map(BlockId) {
        let got = block(&decode.pool, &decode.geometry, 0, id);
        assert_eq!(got, block(&prefill.pool, &prefill.geometry, 0, id), "{id}");
    }
}

fn holes_and_repeats_are_refused_by_the_sender(choice: TransportChoice) {
    let decode = Decode::new(small(), 1);
    let prefill = Prefill::new(small(), 2, choice);
    let mut handoff = prefill.sender.open(&decode.reserve(1, &[ids(&[3, 4]), vec![]]), far()).unwrap();
    assert_eq!((handoff.epoch(), handoff.tokens(), handoff.block_counts()), (Epoch(1), 100, &[2, 0][..]));
    assert_eq!(handoff.first_blocks(), [0, 1]);
    handoff.write(0, 0, &[(BlockId(1), 0), (BlockId(2), 1)]).unwrap();
    handoff.write(0, 1, &[(BlockId(1), 0)]).unwrap();
    let mut refused = |group, layer, pair| handoff.write(group, layer, &[pair]).unwrap_err().to_string();
    assert!(refused(0, 1, (BlockId(1), 0)).contains("written twice"));
    assert!(refused(0, 1, (BlockId(8), 1)).contains("b8, the pool has 8"));
    assert!(refused(0, 1, (BlockId(1), 2)).contains("2 of 2"));
    assert!(refused(0, 2, (BlockId(1), 1)).contains("2 of 2 in group 0"));
    assert!(refused(2, 0, (BlockId(1), 1)).contains("2 of 2"));
    let (tell, told) = mpsc::channel();
    handoff.complete(vec![], Box::new(move |outcome| tell.send(outcome).unwrap()));
    let error = told.recv_timeout(PATIENCE).unwrap().unwrap_err();
    assert!(matches!(error, TransferError::Incomplete { written: 3, expected: 4, .. }), "{error}");
    // Whether or not the decode side had let the peer in by then, it gets its blocks back.
    match decode.receiver.fence(Epoch(1)) {
        FenceState::Clear => {}
        FenceState::Pending => decode.expect_fenced(1),
    }
    decode.reserve(2, &[ids(&[3, 4]), vec![]]);
}

fn two_peers_at_once(choice: TransportChoice) {
    let decodes = [Decode::new(large(), 1), Decode::new(large(), 2)];
    let prefills = [Prefill::new(large(), 3, choice), Prefill::new(large(), 4, choice)];
    let mut outcomes = Vec::new();
    for round in 0..4u32 {
        for (p, prefill) in prefills.iter().enumerate() {
            for (d, decode) in decodes.iter().enumerate() {
                let first = round * 16 + p as u32 * 8;
                let epoch = u64::from(first) + 1;
                let target = decode.reserve(epoch, &[(first..first + 8).map(BlockId).collect()]);
                outcomes.push((p, d, first, prefill.send(&target, first)));
            }
        }
    }
    for (p, d, first, outcome) in outcomes {
        outcome.wait().unwrap();
        for id in (first..first + 8).map(BlockId) {
            let sent = block(&prefills[p].pool, &prefills[p].geometry, 0, id);
            assert!(block(&decodes[d].pool, &decodes[d].geometry, 0, id) == sent, "{id} from {p} to {d}");
        }
    }
    for decode in &decodes {
        let stats = decode.receiver.stats();
        assert_eq!((stats.verified, stats.sessions), (8, 2));
    }
}

fn a_receiver_that_restarted_is_another(choice: TransportChoice) {
    let old = Decode::new(small(), 1);
    // Kept as long as the peer has it open: a device's memory may not be freed before.
    let _kept = old.pool.clone();
    let address = old.receiver.local_addr().to_string();
    let prefill = Prefill::new(small(), 2, choice);
    let stale = old.reserve(7, &[ids(&[3]), vec![]]);
    prefill.send(&old.reserve(8, &[ids(&[4]), vec![]]), 0).wait().unwrap();
    drop(old);
    let new = Decode::listening(small(), 9, &address);
    // The same epoch at the same address, but from a restarted worker.
    let fresh = new.reserve(7, &[ids(&[3]), vec![]]);
    let before = block(&new.pool, &new.geometry, 0, BlockId(3));
    let error = prefill.send(&stale, 5).wait().unwrap_err();
    assert!(
        matches!(error, TransferError::Connect { .. } | TransferError::PeerLost { .. }),
        "the old session ended, or a new one is refused: {error}"
    );
    let error = prefill.send(&stale, 5).wait().unwrap_err();
    if choice == TransportChoice::Tcp {
        assert!(error.to_string().contains("w1 is not here any more, this is w9"), "{error}");
    }
    assert_eq!(block(&new.pool, &new.geometry, 0, BlockId(3)), before);
    prefill.send(&fresh, 5).wait().unwrap();
    new.expect_verified(7);
    // Dropped before the pool that it has open.
    drop(prefill);
}

fn leases_expire(choice: TransportChoice) {
    let decode = Decode::new(small(), 1);
    let prefill = Prefill::new(small(), 2, choice);
    let blocks = [ids(&[3]), vec![]];
    let target = decode.try_reserve(1, &blocks, Duration::ZERO).unwrap();
    assert_eq!(decode.expect_failed(1), TransferError::Expired { epoch: Epoch(1) });
    decode.expect_fenced(1);
    assert_eq!(decode.receiver.fence(Epoch(1)), FenceState::Clear);
    let error = prefill.send(&target, 0).wait().unwrap_err();
    assert!(matches!(error, TransferError::Refused { epoch: Epoch(1), .. }), "{error}");
    // The lease expires while a peer is writing: the peer is stopped.
    let target = decode.try_reserve(2, &blocks, Duration::from_millis(50)).unwrap();
    let mut handoff = prefill.sender.open(&target, far()).unwrap();
    handoff.write(0, 0, &[(BlockId(0), 0)]).unwrap();
    assert_eq!(decode.expect_failed(2), TransferError::Expired { epoch: Epoch(2) });
    decode.expect_fenced(2);
    let (tell, told) = mpsc::channel();
    let _ = handoff.write(0, 1, &[(BlockId(0), 0)]);
    handoff.complete(vec![], Box::new(move |outcome| tell.send(outcome).unwrap()));
    let error = told.recv_timeout(PATIENCE).unwrap().unwrap_err();
    assert!(matches!(error, TransferError::Fenced { .. } | TransferError::Refused { .. }), "{error}");
    assert_eq!(decode.receiver.stats().reservations, 0);
}

fn a_released_block_can_be_lent_again(choice: TransportChoice) {
    let decode = Decode::new(small(), 1);
    let prefill = Prefill::new(small(), 2, choice);
    let blocks = [ids(&[3]), ids(&[3, 4])];
    for epoch in 1..=20 {
        prefill.send(&decode.reserve(epoch, &blocks), 0).wait().unwrap();
        decode.expect_verified(epoch);
        // I3: the blocks are still lent.
        let again = decode.try_reserve(99, &blocks, PATIENCE);
        assert!(matches!(again, Err(TransferError::Lent { .. })));
        decode.receiver.release(Epoch(epoch));
    }
    let stats = decode.receiver.stats();
    assert_eq!((stats.verified, stats.reservations, stats.sessions), (20, 0, 1), "one session for all");
}

fn a_connection_too_many_is_told_so(choice: TransportChoice) {
    let limits = TransferLimits { connections: 1, ..TransferLimits::default() };
    let decode = Decode::limited(small(), 1, "127.0.0.1:0", limits);
    let prefills = [Prefill::new(small(), 2, choice), Prefill::new(small(), 3, choice)];
    prefills[0].send(&decode.reserve(1, &[ids(&[3]), vec![]]), 0).wait().unwrap();
    let target = decode.reserve(2, &[ids(&[4]), vec![]]);
    let error = prefills[1].send(&target, 0).wait().unwrap_err();
    assert!(error.to_string().contains("as many connections as it may have"), "{error}");
    // I8: others have lost nothing.
    prefills[0].send(&target, 0).wait().unwrap();
}

#[test]
fn other_layouts_are_named_before_anyone_connects() {
    let decode = Decode::new(small(), 1);
    let target = decode.reserve(1, &[ids(&[3]), vec![]]);
    let mut other = small();
    other.layout.dtype = KvDtype::F32;
    let prefill = Prefill::new(other, 2, TransportChoice::Auto);
    let error = prefill.sender.open(&target, far()).err().unwrap();
    assert!(error.to_string().contains("KV dtype: F32 here, F16 at the peer"), "{error}");
}

#[test]
fn auto_takes_shared_memory_here_and_tcp_elsewhere() {
    let decode = Decode::new(small(), 1);
    let prefill = Prefill::new(small(), 2, TransportChoice::Auto);
    let target = decode.reserve(1, &[ids(&[3]), vec![]]);
    assert_eq!(prefill.send(&target, 0).wait().unwrap().transport, TransportKind::Shm);
    // First another host, by its identity; then a host without the unix socket.
    let layout = &prefill.geometry.layout;
    let far_away = |target: &[u8]| {
        let mut descriptor = Descriptor::parse(target, layout, false).unwrap();
        descriptor.host.boot[0] ^= 1;
        descriptor.encode()
    };
    let no_socket = |target: &[u8]| {
        let mut descriptor = Descriptor::parse(target, layout, false).unwrap();
        descriptor.unix = b"baton-nobody-listens-here".to_vec();
        descriptor.encode()
    };
    for (epoch, alter) in [(2, &far_away as &dyn Fn(&[u8]) -> Vec<u8>), (3, &no_socket)] {
        let prefill = Prefill::new(small(), 2 + epoch, TransportChoice::Auto);
        let target = alter(&decode.reserve(epoch, &[ids(&[4]), vec![]]));
        assert_eq!(prefill.send(&target, 0).wait().unwrap().transport, TransportKind::Tcp);
        decode.receiver.release(Epoch(epoch));
        // Shared memory only: there is no path.
        let prefill = Prefill::new(small(), 20 + epoch, TransportChoice::Shm);
        let target = alter(&decode.reserve(epoch + 10, &[ids(&[4]), vec![]]));
        let error = prefill.send(&target, 0).wait().unwrap_err();
        assert!(matches!(error, TransferError::Connect { .. }), "{error}");
        decode.receiver.fence(Epoch(epoch + 10));
    }
}

#[test]
fn options_that_cannot_work_are_named() {
    let bind = |alter: &dyn Fn(&mut ReceiverOptions)| {
        let mut options = ReceiverOptions {
            worker: WorkerId(1),
            tcp: "127.0.0.1:0".parse().unwrap(),
            advertise: None,
            geometry: small(),
            pool: pool(&small(), 1).into(),
            ucx: UcxSettings::default(),
            tls: tls(),
            sockets: None,
            cpus: Cpus::default(),
            courtesy: Courtesy::default(),
            limits: TransferLimits::default(),
            verify: true,
        };
        alter(&mut options);
        Receiver::bind(options, Box::new(|_| {})).err().unwrap().to_string()
    };
    assert!(bind(&|o| o.tcp = "0.0.0.0:0".parse().unwrap()).contains("advertise: missing"));
    assert!(bind(&|o| o.advertise = Some(String::new())).contains("advertise: 0 bytes"));
    assert!(bind(&|o| o.geometry.blocks[0] = 1000).contains("pool:"));
    assert!(bind(&|o| o.geometry.blocks.truncate(1)).contains("geometry.blocks: 1 block counts for 2"));
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let holder = std::net::TcpListener::bind(taken).unwrap();
    assert!(bind(&|o| o.tcp = holder.local_addr().unwrap()).contains("tcp: 127.0.0.1:"));
}

#[test]
fn who_cannot_be_reached_by_ucx_is_written_to_over_tcp() {
    if !ucx_is_here() {
        return;
    }
    let geometry = small();
    let (tell, events) = mpsc::channel();
    let nowhere = UcxSettings { directory: Some("/nonexistent".into()), ..UcxSettings::default() };
    let options = ReceiverOptions {
        worker: WorkerId(1),
        tcp: "127.0.0.1:0".parse().unwrap(),
        advertise: None,
        geometry: geometry.clone(),
        pool: pool(&geometry, 1).into(),
        ucx: nowhere.clone(),
        tls: tls(),
        sockets: None,
        cpus: Cpus::default(),
        courtesy: Courtesy::default(),
        limits: TransferLimits::default(),
        verify: true,
    };
    let receiver = Receiver::bind(options, Box::new(move |event| drop(tell.send(event)))).unwrap();
    assert!(matches!(receiver.prepare_ucx(), Err(TransferError::Ucx { .. })));
    let prefill = Prefill::new(geometry.clone(), 2, TransportChoice::Ucx);
    for epoch in 1..=2 {
        let wanted = Wanted { tokens: 100, first: &[0, 0], blocks: &[ids(&[epoch as u32]), vec![]] };
        let target = receiver.reserve(Epoch(epoch), &wanted, PATIENCE).unwrap();
        assert_eq!(prefill.send(&target, 0).wait().unwrap().transport, TransportKind::Tcp);
        assert!(matches!(events.recv_timeout(PATIENCE), Ok(ReceiverEvent::Verified { .. })));
    }
    // A sender that must use UCX and has none does not start.
    let options = SenderOptions {
        worker: WorkerId(3),
        geometry: geometry.clone(),
        pool: pool(&geometry, 3).into(),
        transport: TransportChoice::Ucx,
        ucx: nowhere,
        tls: tls(),
        tcp_connections: connections(),
        sockets: None,
        cpus: Cpus::default(),
        courtesy: Courtesy::default(),
        limits: TransferLimits::default(),
        convert: None,
        verify: true,
        on_trouble: |_, _| {},
    };
    assert!(matches!(Sender::new(options).err(), Some(TransferError::Ucx { .. })));
}
