//! Workers whose unix sockets are files in a folder that they share, as pods of one node do.

use super::*;

fn receiver(folder: &Path, geometry: &PoolGeometry) -> (Receiver, mpsc::Receiver<ReceiverEvent>) {
    let (tell, events) = mpsc::channel();
    let options = ReceiverOptions {
        worker: WorkerId(1),
        tcp: "127.0.0.1:0".parse().unwrap(),
        advertise: None,
        geometry: geometry.clone(),
        pool: pool(geometry, 1).into(),
        ucx: UcxSettings::default(),
        tls: tls(),
        sockets: Some(folder.to_owned()),
        cpus: Cpus::default(),
        courtesy: Courtesy::default(),
        limits: TransferLimits::default(),
        verify: true,
    };
    (Receiver::bind(options, Box::new(move |event| drop(tell.send(event)))).unwrap(), events)
}

fn prefill(folder: Option<&Path>, geometry: &PoolGeometry, transport: TransportChoice) -> Prefill {
    let pool: Pool = pool(geometry, 2).into();
    let options = SenderOptions {
        worker: WorkerId(2),
        geometry: geometry.clone(),
        pool: pool.clone(),
        transport,
        ucx: UcxSettings::default(),
        tls: tls(),
        tcp_connections: connections(),
        sockets: folder.map(Path::to_owned),
        cpus: Cpus::default(),
        courtesy: Courtesy::default(),
        limits: TransferLimits::default(),
        convert: None,
        verify: true,
        on_trouble: |_, _| {},
    };
    Prefill { sender: Sender::new(options).unwrap(), pool, geometry: geometry.clone() }
}

#[test]
fn a_shared_folder_leads_to_shared_memory_and_without_it_kv_goes_over_tcp() {
    let (folder, another) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (folder, another) = (folder.path(), another.path());
    let geometry = small();
    let (receiver, events) = receiver(folder, &geometry);
    let auto = TransportChoice::Auto;
    let ways = [
        (Some(folder), auto, TransportKind::Shm),
        (Some(folder), TransportChoice::Shm, TransportKind::Shm),
        (Some(another), auto, TransportKind::Tcp),
        // In the same network namespace, but the worker listens in its folder.
        (None, auto, TransportKind::Tcp),
    ];
    for (epoch, (folder, choice, kind)) in (1..).zip(ways) {
        let wanted = Wanted { tokens: 100, first: &[0, 0], blocks: &[vec![BlockId(epoch as u32)], vec![]] };
        let target = receiver.reserve(Epoch(epoch), &wanted, PATIENCE).unwrap();
        let sent = prefill(folder, &geometry, choice).send(&target, 0).wait().unwrap();
        assert_eq!(sent.transport, kind, "{folder:?}");
        let event = events.recv_timeout(PATIENCE);
        assert!(matches!(event, Ok(ReceiverEvent::Verified { .. })), "{event:?}");
        receiver.release(Epoch(epoch));
    }
    let wanted = Wanted { tokens: 100, first: &[0, 0], blocks: &[vec![BlockId(7)], vec![]] };
    let target = receiver.reserve(Epoch(9), &wanted, PATIENCE).unwrap();
    let error =
        prefill(Some(another), &geometry, TransportChoice::Shm).send(&target, 0).wait().unwrap_err().to_string();
    assert!(error.contains("--transfer-sockets"), "{error}");
    drop(receiver);
    assert_eq!(std::fs::read_dir(folder).unwrap().count(), 0, "no file is left");
}
