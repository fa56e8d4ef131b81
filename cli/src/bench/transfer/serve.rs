//! The receiving end: lends blocks of a pool of the requested shape, again and again, and reads plain streams.
//!
//! Each line in is a [`Request`], answered by lines: a pool, which comes first, by a description of the machine; a reservation by its
//! target; a plain stream by a line before its bytes and one after. Serves one driving end at a time, and keeps nothing for the next.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::{Arc, mpsc};

use anyhow::{Context, Error, bail};
use baton_transfer::{Cpus, Receiver, ReceiverEvent, ReceiverOptions, Segment, TransferLimits, UcxSettings, Wanted};
use baton_types::{BlockId, Decoding, Epoch, PoolGeometry, WorkerId, hex, random_u64};

use super::control::{Control, HANDOFF_PATIENCE, PLAIN_CHUNK, TALK, machine};
use super::measure::order;
use super::request::{Request, unknown};

/// Options of the receiving end.
#[derive(Clone, Debug)]
pub struct ServeOptions {
    /// Address that driving ends connect to. Unless its port is 0, KV over TCP arrives at the two ports after it.
    pub listen: SocketAddr,
    /// Whether to end after the first driving end.
    pub once: bool,
    /// How UCX is set up at this end.
    pub ucx: UcxSettings,
    /// The folder of sockets that both ends share, if they do.
    pub sockets: Option<PathBuf>,
    /// CPUs this end runs on.
    pub cpus: Cpus,
}

/// Events of the receiving end.
#[derive(Debug)]
pub enum Served {
    /// Driving ends can connect here.
    Listening(SocketAddr),
    /// A driving end is done, or has failed.
    Ended(SocketAddr, anyhow::Result<()>),
}

/// Serves [`super::measure::run`], one driving end at a time.
pub fn serve(options: &ServeOptions, mut tell: impl FnMut(Served)) -> anyhow::Result<()> {
    options.cpus.check()?;
    options.cpus.pin();
    let bad = || format!("cannot listen on {}", options.listen);
    let listener = TcpListener::bind(options.listen).with_context(bad)?;
    tell(Served::Listening(listener.local_addr().with_context(bad)?));
    loop {
        let (stream, from) = listener.accept().context(TALK)?;
        let outcome = session(options, stream);
        if options.once {
            return outcome;
        }
        tell(Served::Ended(from, outcome));
    }
}

fn session(options: &ServeOptions, stream: TcpStream) -> anyhow::Result<()> {
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

fn begin(options: &ServeOptions, control: &mut Control) -> anyhow::Result<Pool> {
    let line = control.hear()?.unwrap_or_default();
    let Request::Pool(geometry, seed) = Request::parse(&line).map_err(Error::msg)? else { bail!(unknown(&line)) };
    let here = control.stream().local_addr().context(TALK)?;
    let pool = Pool::new(options, here, geometry, seed)?;
    control.say(&machine())?;
    Ok(pool)
}

/// Two receivers with the same pool, used one at a time.
struct Pool {
    verified: Receiver,
    unverified: Receiver,
    told: mpsc::Receiver<ReceiverEvent>,
    /// Per group: blocks in the order in which they are lent.
    order: Vec<Vec<BlockId>>,
    bytes: usize,
    /// Buffer for plain streams; empty until the first.
    plain: Vec<u8>,
    next: Epoch,
}

impl Pool {
    fn new(
        options: &ServeOptions,
        here: SocketAddr,
        geometry: PoolGeometry,
        seed: Option<u64>,
    ) -> anyhow::Result<Pool> {
        let bytes = geometry.bytes();
        let segment = Arc::new(Segment::create("bench-target", bytes)?);
        let (tell, told) = mpsc::channel();
        let instance = random_u64() << 1;
        let receiver = |verify: bool| {
            let tell = tell.clone();
            let port = match options.listen.port() {
                0 => 0,
                port => port.checked_add(1 + u16::from(!verify)).unwrap_or(0),
            };
            let options = ReceiverOptions {
                worker: WorkerId(instance | u64::from(verify)),
                // The address at which this driving end reached this host.
                tcp: SocketAddr::new(here.ip(), port),
                advertise: None,
                geometry: geometry.clone(),
                pool: segment.clone().into(),
                ucx: options.ucx.clone(),
                tls: None,
                sockets: options.sockets.clone(),
                cpus: options.cpus.clone(),
                courtesy: baton_worker::courtesy(Decoding::default()),
                limits: TransferLimits::default(),
                verify,
            };
            Receiver::bind(options, Box::new(move |event| drop(tell.send(event))))
        };
        let (verified, unverified) = (receiver(true)?, receiver(false)?);
        let order = order(&geometry, seed);
        Ok(Pool { verified, unverified, told, order, bytes, plain: Vec::new(), next: Epoch(1) })
    }

    fn answer(&mut self, line: &str, control: &mut Control) -> anyhow::Result<()> {
        match Request::parse(line).map_err(Error::msg)? {
            Request::Reserve { blocks, verified } => self.lend(blocks, verified, control),
            Request::Plain { bytes } => self.swallow(bytes, control),
            Request::Pool(..) => bail!(unknown(line)),
        }
    }

    fn lend(&mut self, count: usize, verify: bool, control: &mut Control) -> anyhow::Result<()> {
        let blocks: Vec<Vec<_>> = self.order.iter().map(|list| list.iter().copied().take(count).collect()).collect();
        let first = vec![0; blocks.len()];
        let wanted = Wanted { tokens: 0, first: &first, blocks: &blocks };
        let receiver = if verify { &self.verified } else { &self.unverified };
        control.say(&hex::encode(&receiver.reserve(self.next, &wanted, HANDOFF_PATIENCE)?))?;
        self.next = Epoch(self.next.0 + 1);
        match self.told.recv() {
            Ok(ReceiverEvent::Verified { epoch, .. }) => receiver.release(epoch),
            Ok(ReceiverEvent::Failed { error, .. }) => return Err(error.into()),
            Ok(ReceiverEvent::Fenced { .. }) | Err(_) => bail!("the handoff has no outcome"),
        }
        Ok(())
    }

    fn swallow(&mut self, bytes: usize, control: &mut Control) -> anyhow::Result<()> {
        if bytes > self.bytes {
            bail!("a plain stream of {bytes} bytes; the pool has {}", self.bytes);
        }
        self.plain.resize(self.bytes, 0);
        control.say("go")?;
        for chunk in self.plain[..bytes].chunks_mut(PLAIN_CHUNK) {
            control.read(chunk)?;
        }
        control.say("done")
    }
}
