//! TCP with TLS: the suite runs over it, too. The tests here are about peers that are set up differently.

use std::cell::Cell;

use super::*;
use crate::Tls;
use rustls::client::Resumption;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::version::TLS13;
use rustls::{ClientConfig, RootCertStore, ServerConfig};

thread_local! {
    static ON: Cell<bool> = const { Cell::new(false) };
}

/// Runs a test in which whatever goes over TCP goes over TLS.
pub(super) fn with_tls(test: impl FnOnce()) {
    struct Off;
    impl Drop for Off {
        fn drop(&mut self) {
            ON.set(false);
        }
    }
    let _off = Off;
    ON.set(true);
    test();
}

/// The TLS settings of both ends in this thread's tests.
pub(super) fn tls() -> Option<Tls> {
    ON.get().then(|| of("worker", "worker"))
}

/// Settings with this certificate, which accept peers of this authority.
fn of(certificate: &str, authority: &str) -> Tls {
    with(certificate, authority, false)
}

/// The same; `permissive`: also peers without TLS.
fn with(certificate: &str, authority: &str, permissive: bool) -> Tls {
    let file = |name: String| Path::new(env!("CARGO_MANIFEST_DIR")).join("src/conformance/certificates").join(name);
    let certificates = |name: String| -> Vec<CertificateDer<'static>> {
        CertificateDer::pem_file_iter(file(name)).unwrap().map(Result::unwrap).collect()
    };
    let chain = certificates(format!("{certificate}.pem"));
    let key = PrivateKeyDer::from_pem_file(file(format!("{certificate}-key.pem"))).unwrap();
    let mut roots = RootCertStore::empty();
    certificates(format!("{authority}-authority.pem")).into_iter().for_each(|root| roots.add(root).unwrap());
    let (roots, provider) = (Arc::new(roots), Arc::new(ring::default_provider()));
    let verifier = WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone()).build().unwrap();
    let server = ServerConfig::builder_with_provider(provider.clone()).with_protocol_versions(&[&TLS13]).unwrap();
    let mut server =
        server.with_client_cert_verifier(verifier).with_single_cert(chain.clone(), key.clone_key()).unwrap();
    server.send_tls13_tickets = 0;
    let client = ClientConfig::builder_with_provider(provider).with_protocol_versions(&[&TLS13]).unwrap();
    let mut client = client.with_root_certificates(roots).with_client_auth_cert(chain, key).unwrap();
    client.resumption = Resumption::disabled();
    Tls::new(Arc::new(client), Arc::new(server), permissive)
}

/// The outcome of a handoff between a decode worker and a prefill worker with these settings. The handoff of `friend` must succeed.
fn between(decode: Option<Tls>, prefill: Option<Tls>, friend: Option<Tls>) -> Result<TransferStats, TransferError> {
    let (geometry, (tell, events)) = (large(), mpsc::channel());
    let pools = [1, 2].map(|worker| Pool::from(pool(&geometry, worker)));
    let options = ReceiverOptions {
        worker: WorkerId(1),
        tcp: "127.0.0.1:0".parse().unwrap(),
        advertise: None,
        geometry: geometry.clone(),
        pool: pools[0].clone(),
        ucx: UcxSettings::default(),
        tls: decode,
        sockets: None,
        cpus: Cpus::default(),
        courtesy: Courtesy::default(),
        limits: TransferLimits::default(),
        verify: true,
    };
    let receiver = Receiver::bind(options, Box::new(move |event| drop(tell.send(event)))).unwrap();
    let sender = |worker, tls| {
        let options = SenderOptions {
            worker: WorkerId(worker),
            geometry: geometry.clone(),
            pool: pools[1].clone(),
            transport: TransportChoice::Tcp,
            ucx: UcxSettings::default(),
            tls,
            tcp_connections: connections(),
            sockets: None,
            cpus: Cpus::default(),
            courtesy: Courtesy::default(),
            limits: TransferLimits::default(),
            convert: None,
            verify: true,
            on_trouble: |_, _| {},
        };
        Prefill { sender: Sender::new(options).unwrap(), pool: pools[1].clone(), geometry: geometry.clone() }
    };
    let reserve = |epoch: u64| {
        let blocks = [(0..4).map(|number| BlockId(4 * epoch as u32 + number)).collect()];
        let wanted = Wanted { tokens: 1, first: &[0], blocks: &blocks };
        receiver.reserve(Epoch(epoch), &wanted, PATIENCE).unwrap()
    };
    let target = reserve(1);
    let outcome = sender(2, prefill).send(&target, 0).wait();
    let served = sender(3, friend).send(&reserve(2), 8).wait();
    assert_eq!(served.map(|stats| stats.transport), Ok(TransportKind::Tcp));
    // I8: a refused peer has cost nobody anything. Its reservation is unchanged, for whoever comes with its key.
    let verified = |event| matches!(event, Ok(ReceiverEvent::Verified { .. }));
    assert!(verified(events.recv_timeout(PATIENCE)));
    assert_eq!(outcome.is_ok(), verified(events.try_recv().map_err(|_| mpsc::RecvTimeoutError::Timeout)));
    outcome
}

#[test]
fn workers_of_one_authority_exchange_kv() {
    let mine = || Some(of("worker", "worker"));
    let bytes = 4 * large().layout.block_bytes_all_layers(0) as u64;
    assert_eq!(between(mine(), mine(), mine()).map(|stats| stats.bytes), Ok(bytes));
}

#[test]
fn while_a_cluster_goes_over_to_tls_both_are_understood() {
    let mine = || Some(of("worker", "worker"));
    let both = || Some(with("worker", "worker", true));
    // Before, while and after: at each step, each worker gets on with those a step before it.
    for (decode, prefill) in [(None, both()), (both(), None), (both(), both()), (both(), mine()), (mine(), both())] {
        let what =
            format!("{:?} {:?}", decode.as_ref().map(Tls::is_permissive), prefill.as_ref().map(Tls::is_permissive));
        let outcome = between(decode, prefill, both());
        assert!(outcome.is_ok(), "{what}: {outcome:?}");
    }
    // But who shows a stranger's certificate is not asked in at another door.
    let stranger = Some(with("stranger", "worker", true));
    assert!(between(mine(), stranger, mine()).is_err());
}

#[test]
fn whoever_is_set_up_in_another_way_is_refused_and_told_why() {
    let mine = || Some(of("worker", "worker"));
    // Settings that a decode worker accepts that takes only strangers.
    let friend = || Some(of("stranger", "worker"));
    for (decode, prefill, friend, want) in [
        (mine(), None, mine(), "it wants TLS, which this worker is not set up for"),
        (None, mine(), None, "it does not speak TLS; set up TLS (tls_cert) on both workers or on neither"),
        // The wrong authority, for either end and for both.
        (Some(of("worker", "stranger")), mine(), friend(), "it refuses this worker"),
        (mine(), Some(of("stranger", "worker")), mine(), "it refuses this worker"),
        (mine(), Some(of("worker", "stranger")), mine(), "its certificate is refused"),
        (mine(), Some(of("stranger", "stranger")), mine(), "its certificate is refused"),
    ] {
        let error = between(decode, prefill, friend).unwrap_err();
        assert!(matches!(error, TransferError::Connect { .. }), "{error}");
        assert!(error.to_string().contains(want), "{want}: {error}");
    }
}

#[test]
fn with_tls_the_choice_leaves_out_what_encrypts_nothing() {
    if !ucx_is_here() {
        return;
    }
    with_tls(|| {
        let decode = Decode::new(large(), 1);
        let send = |worker: u64, transport| {
            let (geometry, pool) = (large(), Pool::from(pool(&large(), worker)));
            let options = SenderOptions {
                worker: WorkerId(worker),
                geometry: geometry.clone(),
                pool: pool.clone(),
                transport,
                ucx: ucx(),
                tls: tls(),
                tcp_connections: connections(),
                sockets: None,
                cpus: Cpus::default(),
                courtesy: Courtesy::default(),
                limits: patient(),
                convert: None,
                verify: true,
                on_trouble: |_, _| {},
            };
            let prefill = Prefill { sender: Sender::new(options).unwrap(), pool, geometry };
            let block = BlockId(worker as u32);
            prefill.send(&decode.reserve(worker, &[vec![block]]), 0).wait().unwrap();
            let paths = prefill.sender.paths().remove(0).1;
            paths.into_iter().find(|path| path.transport == TransportKind::Ucx).unwrap()
        };
        assert!(send(2, TransportChoice::Ucx).in_use);
        assert!(send(3, TransportChoice::Auto).unused.unwrap().contains("it encrypts nothing"));
    });
}
