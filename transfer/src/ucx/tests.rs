//! Two workers of one process with real UCX between them. Skipped where UCX is missing.

use std::os::unix::net::UnixStream;

use baton_handoff::{BlockWrite, FrameLimits, TransferLimits};
use baton_types::BlockId;

use super::*;
use crate::conformance::{large, ucx, ucx_is_here};
use crate::link::{Link, Socket};
use crate::links::Links;
use crate::options::{UcxOptions, UcxSettings};
use crate::segment::Segment;

/// Segment of `bytes` bytes, all `value`, registered with UCX over `tls`.
fn engine(tls: &str, bytes: usize, value: u8) -> Arc<UcxEngine> {
    let pool = Segment::create("ucx-test", bytes).unwrap();
    // SAFETY: nobody else knows the segment yet.
    unsafe { pool.write(0, &vec![value; bytes]) };
    let options = UcxOptions(vec![("UCX_TLS".into(), tls.into())]);
    Arc::new(UcxEngine::open(&UcxSettings { options, ..ucx() }, Arc::new(pool).into()).unwrap())
}

fn bytes(engine: &UcxEngine, offset: usize, len: usize) -> Vec<u8> {
    // SAFETY: read once nothing is under way.
    unsafe { engine.pool().host().ok().unwrap().read(offset, len) }
}

/// Drives both sides until `requests` are done.
fn finish(requests: Vec<Request>, sides: [&Worker; 2]) -> Result<(), String> {
    let start = Instant::now();
    for request in requests {
        while !request.poll()? {
            sides.iter().for_each(|side| _ = side.progress());
            assert!(start.elapsed() < Duration::from_secs(30), "nothing moves");
        }
    }
    Ok(())
}

/// Checks that a put over `tls` is applied once flushed. Returns the transports' names.
fn put_and_flush(tls: &str) -> Vec<String> {
    let (near, far) = (engine(tls, 1 << 20, 7), engine(tls, 1 << 20, 1));
    let target = Worker::new(&far).unwrap();
    let (address, key) = (target.address().unwrap(), far.pack_key().unwrap());
    let endpoint = Endpoint::connect(Worker::new(&near).unwrap(), &address, &key).unwrap();
    let base = far.base();
    let mut requests = Vec::new();
    for (from, len, to) in [(0, 300_000, 4096), (300_001, 17, 700_001), (0, 64 << 10, 800_000)] {
        let start = near.pool().at(from, len).unwrap();
        // SAFETY: inside the registered segment, which nobody changes; the other one waits to be written to.
        requests.extend(unsafe { endpoint.put(start, len, base + to, to != 4096) }.unwrap());
    }
    requests.extend(endpoint.flush().unwrap());
    finish(requests, [endpoint.worker(), &target]).unwrap();
    for (offset, len, value) in [(0, 4096, 1), (4096, 300_000, 7), (700_000, 1, 1), (700_001, 17, 7), (700_018, 9, 1)] {
        assert_eq!(bytes(&far, offset, len), vec![value; len], "{tls}: {len} bytes at {offset}");
    }
    endpoint.transports().unwrap()
}

#[test]
fn a_flushed_put_is_in_the_peers_memory() {
    if !ucx_is_here() {
        return;
    }
    assert_eq!(put_and_flush("tcp"), ["tcp"]);
    // Whatever transports UCX chooses by itself.
    let over = put_and_flush("all");
    assert!(!over.is_empty());
}

/// A batch of the first blocks of a layer, each to the same offset in the other pool.
fn batch(epoch: u64, layer: usize) -> WriteBatch {
    let geometry = large();
    let len = geometry.layout.block_bytes(0);
    let starts = (0..4).map(|index| (index, geometry.block_range(0, layer, BlockId(index)).start));
    let writes = starts.map(|(index, start)| BlockWrite { index, source: start, target: start }).collect();
    let (epoch, source_len) = (Epoch(epoch), len);
    WriteBatch { epoch, group: 0, layer, source_len, len, lane: 0, writes, after: 0, digest: false }
}

#[test]
fn batches_are_under_way_together_and_named_in_their_order_once_applied() {
    if !ucx_is_here() {
        return;
    }
    let geometry = large();
    let (near, far) = (engine("tcp", geometry.bytes(), 7), engine("tcp", geometry.bytes(), 1));
    let target = Worker::new(&far).unwrap();
    let (worker, key) = (target.address().unwrap(), far.pack_key().unwrap());
    let access = Access { base: far.base(), bytes: geometry.bytes() as u64, worker, key };
    let mut ucx = Ucx::connect(&near, WorkerId(1), &geometry, &access, true).unwrap();
    let [mut link, mut peer] = <[UnixStream; 2]>::from(UnixStream::pair().unwrap()).map(|end| {
        end.set_nonblocking(true).unwrap();
        let link = Link::new(Socket::Unix(end), near.pool().clone(), FrameLimits::new(&TransferLimits::default(), 1));
        Links::new(link, Vec::new())
    });
    for layer in 0..ucx.depth() {
        ucx.submit(Load::new(batch(1 + layer as u64 % 2, layer)), &mut link).unwrap();
        // Sent is not applied: the peer does not make progress yet.
        assert_ne!(ucx.poll(&mut link).unwrap(), Progress::Flushed);
    }
    let start = Instant::now();
    while ucx.in_flight.iter().any(|sent| !sent.requests.is_empty()) {
        target.progress();
        ucx.settle().unwrap();
        assert!(start.elapsed() < Duration::from_secs(30), "nothing moves");
    }
    // The second handoff is cancelled, so no frame names its blocks.
    ucx.cancel(Epoch(2), &mut link).unwrap();
    while !ucx.in_flight.is_empty() {
        assert_eq!(ucx.poll(&mut link).unwrap(), Progress::Flushed);
    }
    link.own.flush().unwrap();
    peer.own.fill().unwrap();
    let mut named = Vec::new();
    while let Some(Frame::Write(head)) = peer.own.next_frame().unwrap() {
        named.push((head.epoch, head.layer));
    }
    assert_eq!(named, [(Epoch(1), 0), (Epoch(1), 2)]);
    for layer in 0..ucx.depth() {
        let range = geometry.block_range(0, layer, BlockId(3));
        assert_eq!(bytes(&far, range.start, range.len()), vec![7; range.len()], "layer {layer}");
    }
}

#[test]
fn an_endpoint_whose_peer_is_gone_fails_and_closes() {
    if !ucx_is_here() {
        return;
    }
    let (near, far) = (engine("tcp", 4096, 7), engine("tcp", 4096, 1));
    let target = Worker::new(&far).unwrap();
    let (address, key) = (target.address().unwrap(), far.pack_key().unwrap());
    let mut endpoint = Endpoint::connect(Worker::new(&near).unwrap(), &address, &key).unwrap();
    finish(endpoint.flush().unwrap().into_iter().collect(), [endpoint.worker(), &target]).unwrap();
    drop(target);
    let start = Instant::now();
    while endpoint.failure().is_none() {
        // SAFETY: inside the registered segment; the memory it goes to is not read again.
        let put = unsafe { endpoint.put(near.at(0, 4096).unwrap(), 4096, far.base(), true) };
        drop(put);
        endpoint.worker().progress();
        assert!(start.elapsed() < Duration::from_secs(30), "still open");
    }
    endpoint.close();
    assert!(endpoint.flush().is_err());
}

#[test]
fn settings_that_ucx_does_not_take_are_named() {
    if !ucx_is_here() {
        return;
    }
    let pool = Arc::new(Segment::create("ucx-test", 4096).unwrap());
    let open = |name: &str, value: &str| {
        let options = UcxOptions(vec![(name.into(), value.into())]);
        UcxEngine::open(&UcxSettings { options, ..ucx() }, pool.clone().into())
            .err()
            .map(|e| e.to_string())
            .unwrap_or_default()
    };
    let error = open("TLS", "carrier-pigeon");
    assert!(error.contains("UCX cannot start"), "{error}");
    let error = open("MAX_RNDV_LANES", "many");
    assert!(error.contains("ucx options: MAX_RNDV_LANES=many"), "{error}");
}
