//! The driving end's connection to the receiving end: a child of this process, or a process that listens on another host.

use std::io::{BufRead, BufReader};
use std::net::{TcpStream, ToSocketAddrs};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use baton_types::{PoolGeometry, hex};

use super::MARK;
use super::control::{Control, PLAIN_CHUNK, lost, printable};
use super::request::Request;

/// Longest time for connecting to one address.
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

impl Peer {
    /// Starts `command`, which must call [`super::serve::serve`] and print its address after [`MARK`].
    pub fn child(mut command: Command) -> anyhow::Result<Peer> {
        let failed = "cannot start the benchmark's child";
        let spawned = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
        let mut child = Killed(spawned.context(failed)?);
        let mut output = BufReader::new(child.0.stdout.take().context(failed)?);
        let address = loop {
            let mut line = String::new();
            if output.read_line(&mut line).context(failed)? == 0 {
                bail!("{failed}: it ended without an address");
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

    /// Connects to a process that called [`super::serve::serve`] on HOST:PORT.
    pub fn at(address: &str) -> anyhow::Result<Peer> {
        let mut last = anyhow!("the name stands for no address");
        let bad = || format!("{address:?} is not HOST:PORT, or nobody knows that host");
        for candidate in address.to_socket_addrs().with_context(bad)? {
            match TcpStream::connect_timeout(&candidate, CONNECT) {
                Ok(stream) => return Ok(Peer { control: Control::new(stream)?, machine: String::new(), _child: None }),
                Err(error) => last = error.into(),
            }
        }
        Err(last.context(format!("cannot connect to {address}")))
    }

    /// Has the other end make a pool, whose blocks it lends in the order of `seed`.
    pub(super) fn begin(&mut self, geometry: &PoolGeometry, seed: Option<u64>) -> anyhow::Result<()> {
        self.ask(&Request::Pool(geometry.clone(), seed))?;
        self.machine = printable(&self.answer()?);
        Ok(())
    }

    /// Processor and system of the receiving end.
    pub(super) fn machine(&self) -> &str {
        &self.machine
    }

    fn ask(&mut self, request: &Request) -> anyhow::Result<()> {
        self.control.say(&request.to_string())
    }

    /// A target for this many blocks of each group.
    pub(super) fn reserve(&mut self, blocks: u32, verified: bool) -> anyhow::Result<Vec<u8>> {
        self.ask(&Request::Reserve { blocks: blocks as usize, verified })?;
        let line = self.answer()?;
        hex::decode(&line).ok_or_else(|| lost("its target is no hexadecimal text"))
    }

    /// Sends these bytes in one stream; returns the seconds until the other end has them all.
    pub(super) fn send_plainly(&mut self, bytes: &[u8]) -> anyhow::Result<f64> {
        self.ask(&Request::Plain { bytes: bytes.len() })?;
        self.answer()?;
        let start = Instant::now();
        for chunk in bytes.chunks(PLAIN_CHUNK) {
            self.control.write(chunk)?;
        }
        self.answer()?;
        Ok(start.elapsed().as_secs_f64())
    }

    fn answer(&mut self) -> anyhow::Result<String> {
        self.control.hear()?.ok_or_else(|| lost("it ended"))
    }
}
