//! What the two ends of a benchmark tell each other beside the handoffs: short lines over a TCP connection, bounded in length and
//! time. The plain stream's bytes go over the same connection.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};

/// Longest time for one handoff.
pub(super) const HANDOFF_PATIENCE: Duration = Duration::from_secs(60);
/// Longest silence between two lines, so that a peer that vanished blocks nobody (I5).
const SILENCE: Duration = Duration::from_secs(120);
/// Most bytes of a line: enough for a layout of many layers, or a target with a block count for each of its groups.
const LINE: u64 = 4 << 20;
/// Bytes of one write of the plain stream.
pub(super) const PLAIN_CHUNK: usize = 256 << 10;
/// What failed when the connection did.
pub(super) const TALK: &str = "cannot talk to the benchmark's other end";
/// Prefix of a line with an error instead of an answer.
const ERROR: &str = "error ";

/// One end of the connection.
pub(super) struct Control {
    input: BufReader<TcpStream>,
}

impl Control {
    pub(super) fn new(stream: TcpStream) -> anyhow::Result<Control> {
        tune(&stream).context(TALK)?;
        Ok(Control { input: BufReader::new(stream) })
    }

    pub(super) fn stream(&self) -> &TcpStream {
        self.input.get_ref()
    }

    pub(super) fn say(&mut self, line: &str) -> anyhow::Result<()> {
        self.input.get_mut().write_all(format!("{line}\n").as_bytes()).context(TALK)
    }

    /// Tells the other end why it gets no answer.
    pub(super) fn refuse(&mut self, error: &anyhow::Error) -> anyhow::Result<()> {
        self.say(&format!("{ERROR}{}", format!("{error:#}").replace('\n', " ")))
    }

    /// The next line; None when the other end is done.
    pub(super) fn hear(&mut self) -> anyhow::Result<Option<String>> {
        let mut line = String::new();
        self.input.by_ref().take(LINE).read_line(&mut line).context(TALK)?;
        match line.strip_suffix('\n') {
            None if line.is_empty() => Ok(None),
            None => Err(anyhow!("a line of {} bytes without an end", line.len()).context(TALK)),
            Some(said) => match said.strip_prefix(ERROR) {
                Some(why) => bail!("the other end cannot measure: {why}"),
                None => Ok(Some(said.to_owned())),
            },
        }
    }

    pub(super) fn read(&mut self, bytes: &mut [u8]) -> anyhow::Result<()> {
        self.input.read_exact(bytes).context(TALK)
    }

    pub(super) fn write(&mut self, bytes: &[u8]) -> anyhow::Result<()> {
        self.input.get_mut().write_all(bytes).context(TALK)
    }
}

/// Sets what a handoff's connections have, since the plain stream is compared with them. But reads and writes wait, for a while.
fn tune(stream: &TcpStream) -> std::io::Result<()> {
    baton_transfer::tune(stream)?;
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(SILENCE))?;
    stream.set_write_timeout(Some(SILENCE))
}

pub(super) fn lost(cause: &'static str) -> anyhow::Error {
    anyhow!(cause).context(TALK)
}

/// Processor and system of this host, in one line.
pub(super) fn machine() -> String {
    let read = |path| std::fs::read_to_string(path).unwrap_or_default();
    let info = read("/proc/cpuinfo");
    let name = info.lines().find_map(|line| Some(line.strip_prefix("model name")?.split_once(':')?.1.trim()));
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let system = read("/proc/sys/kernel/osrelease");
    printable(&format!("{} × {cpus}, Linux {}", name.unwrap_or(std::env::consts::ARCH), system.trim()))
}

/// A peer's text made safe to show: without control characters, and short.
pub(super) fn printable(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(200).collect()
}
