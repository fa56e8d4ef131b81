//! A wire between workers that changes what it carries: they tell each other an address at which this relay listens, and it
//! passes on to where they really are.

use std::collections::BTreeSet;
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use baton_cluster::{Member, Role};
use baton_tests::cluster::{Cluster, processes};

/// What workers advertise. All of 127/8 is this host.
pub const ADDRESS: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);

/// Bytes to pass before a bit of the next one is flipped; less than none: no bit is.
#[derive(Clone, Debug, Default)]
pub struct Flip(Arc<AtomicI64>);

impl Flip {
    /// Once `after` further bytes have gone that way.
    pub fn arm(&self, after: i64) {
        self.0.store(after, Ordering::SeqCst);
    }

    /// Whether it has happened.
    pub fn is_done(&self) -> bool {
        self.0.load(Ordering::SeqCst) < 0
    }

    fn pass(&self, bytes: &mut [u8]) {
        let before = self.0.fetch_sub(bytes.len() as i64, Ordering::SeqCst);
        if let Some(byte) = usize::try_from(before).ok().and_then(|at| bytes.get_mut(at)) {
            *byte ^= 4;
        }
    }
}

/// Bits of what goes to a decode worker's transfer, and of what comes back.
#[derive(Clone, Debug, Default)]
pub struct Flips {
    pub there: Flip,
    pub back: Flip,
}

/// Listens in front of every port of a cluster's workers, and flips bits at a decode worker's transfer: the port that no member
/// of the cluster is known by.
pub fn before(cluster: &Cluster) -> anyhow::Result<Flips> {
    let has = |members: &[Member], role| members.iter().any(|member| member.role == role);
    cluster.wait_for_members(|members| has(members, Role::Prefill) && has(members, Role::Decode))?;
    let known = known(cluster);
    let flips = Flips::default();
    flips.there.arm(-1);
    flips.back.arm(-1);
    for pid in cluster.pids("prefill").into_iter().chain(cluster.pids("decode")) {
        for port in processes::listening_ports(pid) {
            let listener = TcpListener::bind((ADDRESS, port))?;
            let flips = if known.contains(&port) { None } else { Some(flips.clone()) };
            // Ends with the test's process.
            std::thread::spawn(move || {
                for stream in listener.incoming().map_while(Result::ok) {
                    if let Ok(worker) = TcpStream::connect((Ipv4Addr::LOCALHOST, port)) {
                        join(stream, worker, flips.clone());
                    }
                }
            });
        }
    }
    Ok(flips)
}

/// Ports that members of a cluster are known by.
fn known(cluster: &Cluster) -> BTreeSet<u16> {
    let members = cluster.members();
    let urls = members.iter().flat_map(|member| [&member.grpc, &member.admin]);
    urls.filter_map(|url| url.rsplit_once(':')?.1.parse().ok()).collect()
}

/// Where a decode worker takes in KV, this relay aside.
pub fn door(cluster: &Cluster) -> Option<SocketAddr> {
    let known = known(cluster);
    let mut ports = processes::listening_ports(cluster.pid("decode").ok()?).into_iter();
    Some((Ipv4Addr::LOCALHOST, ports.find(|port| !known.contains(port))?).into())
}

/// Where the relay passes on to.
pub fn behind(url: &str) -> Option<SocketAddr> {
    Some((Ipv4Addr::LOCALHOST, url.rsplit_once(':')?.1.parse().ok()?).into())
}

fn join(peer: TcpStream, worker: TcpStream, flips: Option<Flips>) {
    let (Ok(back_from), Ok(back_to)) = (worker.try_clone(), peer.try_clone()) else { return };
    let (there, back) = flips.map(|flips| (flips.there, flips.back)).unzip();
    std::thread::spawn(move || carry(peer, worker, there));
    std::thread::spawn(move || carry(back_from, back_to, back));
}

fn carry(mut from: TcpStream, mut to: TcpStream, flip: Option<Flip>) {
    let mut bytes = vec![0; 64 << 10];
    loop {
        match from.read(&mut bytes) {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Ok(count @ 1..) => {
                flip.iter().for_each(|flip| flip.pass(&mut bytes[..count]));
                if to.write_all(&bytes[..count]).is_err() {
                    break;
                }
            }
            _ => break,
        }
    }
    // Either may be closed already.
    let _ = (to.shutdown(std::net::Shutdown::Write), from.shutdown(std::net::Shutdown::Read));
}
