//! Which CPUs transfer threads run on.

use super::*;

/// The first CPU that this process may use. None if it is the only one, since a test would show nothing then.
fn first() -> Option<Cpus> {
    let all = Cpus::allowed().unwrap();
    let text = all.to_string();
    let one = text.split(|letter: char| !letter.is_ascii_digit()).next().unwrap().parse().unwrap();
    (one != all).then_some(one)
}

/// Where the sessions of a handoff run whose two ends are told these CPUs: the sender's, and the receiver's.
fn sessions_of(cpus: &Cpus) -> [Cpus; 2] {
    let geometry = small();
    let (tell, received) = mpsc::channel();
    let options = ReceiverOptions {
        worker: WorkerId(1),
        tcp: "127.0.0.1:0".parse().unwrap(),
        advertise: None,
        geometry: geometry.clone(),
        pool: pool(&geometry, 1).into(),
        ucx: UcxSettings::default(),
        tls: tls(),
        sockets: None,
        cpus: cpus.clone(),
        courtesy: Courtesy::default(),
        limits: TransferLimits::default(),
        verify: true,
    };
    let receiver = Receiver::bind(options, Box::new(move |_| drop(tell.send(Cpus::allowed().unwrap())))).unwrap();
    let options = SenderOptions {
        worker: WorkerId(2),
        geometry: geometry.clone(),
        pool: pool(&geometry, 2).into(),
        transport: TransportChoice::Auto,
        ucx: UcxSettings::default(),
        tls: tls(),
        tcp_connections: connections(),
        sockets: None,
        cpus: cpus.clone(),
        courtesy: Courtesy::default(),
        limits: TransferLimits::default(),
        convert: None,
        verify: true,
        on_trouble: |_, _| {},
    };
    let sender = Sender::new(options).unwrap();
    let wanted = Wanted { tokens: 100, first: &[0, 0], blocks: &[vec![BlockId(1)], vec![]] };
    let target = receiver.reserve(Epoch(1), &wanted, PATIENCE).unwrap();
    let mut handoff = sender.open(&target, far()).unwrap();
    (0..geometry.layout.groups[0].layers.len()).for_each(|layer| handoff.write(0, layer, &[(BlockId(0), 0)]).unwrap());
    let (tell, sent) = mpsc::channel();
    let done = move |outcome: Result<_, _>| drop(tell.send((outcome.is_ok(), Cpus::allowed().unwrap())));
    handoff.complete(Vec::new(), Box::new(done));
    // Both callbacks run on their sessions' threads.
    let (whole, sender_ran_on) = sent.recv_timeout(PATIENCE).unwrap();
    assert!(whole);
    [sender_ran_on, received.recv_timeout(PATIENCE).unwrap()]
}

#[test]
fn sessions_run_on_the_cpus_that_are_named() {
    let Some(one) = first() else { return };
    assert_eq!(sessions_of(&one), [one.clone(), one.clone()]);
    assert_ne!(Cpus::allowed().unwrap(), one, "this thread is where it was");
}

#[test]
fn the_two_ends_have_different_cpus_if_none_are_named_and_there_are_few() {
    let [sender, receiver] = sessions_of(&Cpus::default());
    let all = Cpus::allowed().unwrap();
    // Of two CPUs with neighbouring numbers one is even.
    match all.to_string().contains('-') && all.first(16) == all {
        true => assert!(sender.are_apart(&receiver) && sender.are_among(&all) && receiver.are_among(&all)),
        false => assert!(sender.are_among(&all) && receiver.are_among(&all)),
    }
}
