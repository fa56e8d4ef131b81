//! The driving end's connection to the receiving end: a child of this process, or a process that listens on another host.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use baton_handoff::TransferError;
use baton_types::PoolGeometry;

use super::control::{Control, PLAIN_CHUNK, lost, printable};
use super::request::Request;
use super::{MARK, hex};
use crate::segment::Segment;
use crate::tcp;

/// Longest time for connecting.
const CONNECT: Duration = Duration::from_secs(10);

/// The receiving end.
pub struct Peer {
    control: Control,
    machine: String,
    /// Killed when this is dropped.
    _child: Option<Killed>,
}

struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What a plain stream carries: the first `bytes` bytes of `pool`.
pub(super) struct Plain<'a> {
    pub pool: &'a Segment,
    pub bytes: usize,
}

impl Peer {
    /// Starts `command`, which must call [`super::serve`] and print its address after [`MARK`].
    pub fn child(mut command: Command) -> Result<Peer, TransferError> {
        let failed = |e: &dyn std::fmt::Display| TransferError::os("start the benchmark's child", e);
        let spawned = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
        let mut child = Killed(spawned.map_err(|e| failed(&e))?);
        let mut output = BufReader::new(child.0.stdout.take().ok_or_else(|| failed(&"no pipe"))?);
        let address = loop {
            let mut line = String::new();
            if output.read_line(&mut line).map_err(|e| failed(&e))? == 0 {
                return Err(failed(&"it ended without an address"));
            }
            if let Some((_, address)) = line.split_once(MARK) {
                break address.trim().to_owned();
            }
        };
        let mut peer = Peer::at(&address)?;
        // Later output is not read. The pipe stays open, since writing to a closed one would end the child.
        child.0.stdout = Some(output.into_inner());
        peer._child = Some(child);
        Ok(peer)
    }

    /// Connects to a process that called [`super::serve`] on HOST:PORT.
    pub fn at(address: &str) -> Result<Peer, TransferError> {
        let bad = || TransferError::argument("address", format!("{address:?} is not HOST:PORT"));
        let (host, port) = address.rsplit_once(':').ok_or_else(bad)?;
        let port = port.parse().map_err(|_| bad())?;
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let stream = tcp::connect(host, port, Instant::now() + CONNECT).map_err(|e| lost(format!("{address}: {e}")))?;
        Ok(Peer { control: Control::new(stream)?, machine: String::new(), _child: None })
    }

    /// Has the other end make a pool, whose blocks it lends in the order of `seed`.
    pub(super) fn begin(&mut self, geometry: &PoolGeometry, seed: Option<u64>) -> Result<(), TransferError> {
        self.ask(&Request::Pool(geometry.clone(), seed))?;
        self.machine = printable(&self.answer()?);
        Ok(())
    }

    /// Processor and system of the receiving end.
    pub(super) fn machine(&self) -> &str {
        &self.machine
    }

    fn ask(&mut self, request: &Request) -> Result<(), TransferError> {
        self.control.say(&request.to_string())
    }

    /// A target for this many blocks of each group.
    pub(super) fn reserve(&mut self, blocks: u32, verified: bool) -> Result<Vec<u8>, TransferError> {
        self.ask(&Request::Reserve { blocks: blocks as usize, verified })?;
        let line = self.answer()?;
        hex::decode(&line).ok_or_else(|| lost("its target is no hexadecimal text"))
    }

    /// Sends the first bytes of a pool in one stream; returns the seconds until the other end has them all.
    pub(super) fn send_plainly(&mut self, plain: &Plain) -> Result<f64, TransferError> {
        self.ask(&Request::Plain { bytes: plain.bytes })?;
        self.answer()?;
        let start = Instant::now();
        for offset in (0..plain.bytes).step_by(PLAIN_CHUNK) {
            let len = PLAIN_CHUNK.min(plain.bytes - offset);
            let source = plain.pool.at(offset, len).ok_or_else(|| lost("the plain stream is longer than the pool"))?;
            // SAFETY: a checked range of a mapping nothing writes to.
            self.control.write(unsafe { std::slice::from_raw_parts(source, len) })?;
        }
        self.answer()?;
        Ok(start.elapsed().as_secs_f64())
    }

    fn answer(&mut self) -> Result<String, TransferError> {
        self.control.hear()?.ok_or_else(|| lost("it ended"))
    }
}
