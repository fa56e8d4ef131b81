//! The receiving end: lends blocks of a pool of the shape it is told, again and again, and swallows plain streams.
//!
//! Lines in, each answered by one: `pool LAYOUT COUNTS SEED` first, with the machine; `reserve BLOCKS verified|unverified` with a
//! target; `plain BYTES`, answered before and after the bytes. One driving end at a time; nothing of one stays for the next.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, mpsc};

use baton_types::{BlockId, Epoch, PoolGeometry, WorkerId};

use super::control::{Control, HANDOFF_PATIENCE, PLAIN_CHUNK, lost, machine};
use super::{hex, order};
use crate::cpus::Cpus;
use crate::descriptor::parse_layout;
use crate::error::TransferError;
use crate::options::{Limits, ReceiverOptions, UcxSettings};
use crate::receiver::{Receiver, ReceiverEvent, Wanted};
use crate::segment::Segment;
use crate::threads;

/// Bytes of a pool that a driving end may ask for (I5).
const MOST: f64 = (64u64 << 30) as f64;

/// The receiving end.
#[derive(Clone, Debug)]
pub struct ServeOptions {
    /// Where driving ends connect. With another port than 0, KV over TCP arrives at the two ports after it.
    pub listen: SocketAddr,
    /// Whether it ends with the first of them.
    pub once: bool,
    /// How UCX is set up at this end.
    pub ucx: UcxSettings,
    /// Where this end runs.
    pub cpus: Cpus,
}

/// What happens at the receiving end.
#[derive(Clone, Debug)]
pub enum Served {
    /// Driving ends can connect here.
    Listening(SocketAddr),
    /// One of them is done, or failed.
    Ended(SocketAddr, Result<(), TransferError>),
}

/// Serves [`super::run`], one driving end at a time.
pub fn serve(options: &ServeOptions, mut tell: impl FnMut(Served)) -> Result<(), TransferError> {
    options.cpus.check()?;
    options.cpus.pin();
    let bad = |e: std::io::Error| TransferError::argument("listen", format!("{}: {e}", options.listen));
    let listener = TcpListener::bind(options.listen).map_err(bad)?;
    tell(Served::Listening(listener.local_addr().map_err(bad)?));
    loop {
        let (stream, from) = listener.accept().map_err(lost)?;
        let outcome = session(options, stream);
        if options.once {
            return outcome;
        }
        tell(Served::Ended(from, outcome));
    }
}

fn session(options: &ServeOptions, stream: TcpStream) -> Result<(), TransferError> {
    let mut control = Control::new(stream)?;
    let outcome = begin(options, &mut control).and_then(|mut pool| {
        while let Some(line) = control.hear()? {
            pool.answer(&line, &mut control)?;
        }
        Ok(())
    });
    if let Err(error) = &outcome {
        control.refuse(error)?;
    }
    outcome
}

fn begin(options: &ServeOptions, control: &mut Control) -> Result<Pool, TransferError> {
    let line = control.hear()?.unwrap_or_default();
    let (geometry, seed) = parse_pool(&line)?;
    let here = control.stream().local_addr().map_err(lost)?;
    let pool = Pool::new(options, here, geometry, seed)?;
    control.say(&machine())?;
    Ok(pool)
}

/// Two receivers with the same pool, one after the other.
struct Pool {
    verified: Receiver,
    unverified: Receiver,
    told: mpsc::Receiver<ReceiverEvent>,
    /// Per group, in the order in which they are lent.
    order: Vec<Vec<BlockId>>,
    bytes: usize,
    /// Where plain streams go; empty until there is one.
    plain: Vec<u8>,
    next: Epoch,
}

impl Pool {
    fn new(
        options: &ServeOptions,
        here: SocketAddr,
        geometry: PoolGeometry,
        seed: Option<u64>,
    ) -> Result<Pool, TransferError> {
        let bytes = geometry.bytes();
        let segment = Arc::new(Segment::create("bench-target", bytes)?);
        let (tell, told) = mpsc::channel();
        let instance = threads::random()? << 1;
        let receiver = |verify: bool| {
            let tell = tell.clone();
            let port = match options.listen.port() {
                0 => 0,
                port => port.checked_add(1 + u16::from(!verify)).unwrap_or(0),
            };
            let options = ReceiverOptions {
                worker: WorkerId(instance | u64::from(verify)),
                // Where this driving end has reached this host.
                tcp: SocketAddr::new(here.ip(), port),
                advertise: None,
                geometry: geometry.clone(),
                pool: segment.clone().into(),
                ucx: options.ucx.clone(),
                tls: None,
                cpus: options.cpus.clone(),
                limits: Limits::default(),
                verify,
            };
            Receiver::bind(options, Box::new(move |event| drop(tell.send(event))))
        };
        let (verified, unverified) = (receiver(true)?, receiver(false)?);
        let order = order(&geometry, seed);
        Ok(Pool { verified, unverified, told, order, bytes, plain: Vec::new(), next: Epoch(1) })
    }

    fn answer(&mut self, line: &str, control: &mut Control) -> Result<(), TransferError> {
        let number = |text: &str| text.parse::<usize>().map_err(|_| unknown(line));
        match &*line.split(' ').collect::<Vec<_>>() {
            ["reserve", blocks, "verified"] => self.lend(number(blocks)?, true, control),
            ["reserve", blocks, "unverified"] => self.lend(number(blocks)?, false, control),
            ["plain", bytes] => self.swallow(number(bytes)?, control),
            _ => Err(unknown(line)),
        }
    }

    fn lend(&mut self, count: usize, verify: bool, control: &mut Control) -> Result<(), TransferError> {
        let blocks: Vec<Vec<_>> = self.order.iter().map(|list| list.iter().copied().take(count).collect()).collect();
        let first = vec![0; blocks.len()];
        let wanted = Wanted { tokens: 0, first: &first, blocks: &blocks, heads: &[] };
        let receiver = if verify { &self.verified } else { &self.unverified };
        control.say(&hex::encode(&receiver.reserve(self.next, &wanted, HANDOFF_PATIENCE)?))?;
        self.next = Epoch(self.next.0 + 1);
        match self.told.recv() {
            Ok(ReceiverEvent::Verified { epoch, .. }) => receiver.release(epoch),
            Ok(ReceiverEvent::Failed { error, .. }) => return Err(error),
            Ok(ReceiverEvent::Fenced { .. }) | Err(_) => return Err(TransferError::Closed),
        }
        Ok(())
    }

    fn swallow(&mut self, bytes: usize, control: &mut Control) -> Result<(), TransferError> {
        if bytes > self.bytes {
            return Err(unknown("a plain stream longer than the pool"));
        }
        self.plain.resize(self.bytes, 0);
        control.say("go")?;
        for chunk in self.plain[..bytes].chunks_mut(PLAIN_CHUNK) {
            control.read(chunk)?;
        }
        control.say("done")
    }
}

fn unknown(line: &str) -> TransferError {
    let said: String = line.chars().take(40).collect();
    TransferError::argument("line", format!("{said:?} is none of this program's; both ends must be the same version"))
}

fn parse_pool(line: &str) -> Result<(PoolGeometry, Option<u64>), TransferError> {
    let bad = || unknown(line);
    let ["pool", layout, counts, seed] = &*line.split(' ').collect::<Vec<_>>() else { return Err(bad()) };
    let layout = hex::decode(layout).and_then(|bytes| parse_layout(&bytes).ok()).ok_or_else(bad)?;
    let blocks: Vec<u32> = counts.split(',').map(|n| n.parse().map_err(|_| bad())).collect::<Result<_, _>>()?;
    let seed = if *seed == "-" { None } else { Some(seed.parse().map_err(|_| bad())?) };
    if blocks.len() != layout.groups.len() {
        return Err(bad());
    }
    // I8: an upper bound that cannot overflow; what it admits, exact arithmetic can be done with.
    let most = |(group, blocks): (&baton_types::KvGroup, &u32)| {
        let row = 4.0 * f64::from(group.head_dim) + 64.0;
        let rows = [group.planes, group.kv_heads, layout.block_size, *blocks].into_iter().map(f64::from);
        rows.product::<f64>() * row * group.layers.len() as f64
    };
    let bytes: f64 = layout.groups.iter().zip(&blocks).map(most).sum();
    if bytes > MOST {
        let problem = format!("about {bytes:.1e} bytes, more than {MOST:.1e}; ask for fewer blocks");
        return Err(TransferError::argument("pool", problem));
    }
    Ok((PoolGeometry { layout, blocks }, seed))
}
