//! The benchmark's child: reserves all its blocks again and again, and swallows a plain stream.
//!
//! First line in: layout in hex, blocks per group, UCX's directory and settings in hex. First line out: the plain stream's port. Then for each line in,
//! which says whether to check what comes, a target out. Ends with its input.

use std::ffi::OsString;
use std::io::{BufRead, Read, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use baton_types::{BlockId, Epoch, PoolGeometry, WorkerId};

use super::{MARK, PLAIN_CHUNK, VERIFIED, hex};
use crate::descriptor::parse_layout;
use crate::error::TransferError;
use crate::options::{Limits, ReceiverOptions, UcxSettings};
use crate::receiver::{Receiver, ReceiverEvent, Wanted};
use crate::segment::Segment;
use crate::{tcp, threads};

/// The receiving half of [`super::run`], over this process's standard input and output.
pub fn serve() -> Result<(), TransferError> {
    let mut lines = std::io::stdin().lock().lines();
    let (geometry, ucx) = parse_first(&lines.next().and_then(Result::ok).unwrap_or_default())?;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(|e| TransferError::os("listen", e))?;
    let port = listener.local_addr().map_err(|e| TransferError::os("listen", e))?.port();
    let bytes = geometry.bytes();
    threads::spawn("plain-stream".into(), move || {
        if let Err(error) = swallow(&listener, bytes) {
            tracing::debug!(%error, "the plain stream ended");
        }
    })?;
    say(&port.to_string())?;

    let segment = Arc::new(Segment::create("bench-target", bytes)?);
    let (tell, told) = mpsc::channel();
    let receiver = |verify: bool| {
        let tell = tell.clone();
        let options = ReceiverOptions {
            worker: WorkerId(u64::from(std::process::id()) << 1 | u64::from(verify)),
            tcp: (Ipv4Addr::LOCALHOST, 0).into(),
            advertise: None,
            geometry: geometry.clone(),
            segment: segment.clone(),
            ucx: ucx.clone(),
            limits: Limits::default(),
            verify,
        };
        Receiver::bind(options, Box::new(move |event| drop(tell.send(event))))
    };
    // Two of them have the same pool, one after the other.
    let (verified, unverified) = (receiver(true)?, receiver(false)?);
    let all: Vec<Vec<BlockId>> = geometry.blocks.iter().map(|n| (0..*n).map(BlockId).collect()).collect();
    let first = vec![0; all.len()];
    let wanted = Wanted { tokens: 0, first: &first, blocks: &all, heads: &[] };
    for (epoch, line) in (1..).map(Epoch).zip(lines) {
        let Ok(line) = line else { break };
        let receiver = if line == VERIFIED { &verified } else { &unverified };
        say(&hex::encode(&receiver.reserve(epoch, &wanted, Duration::from_secs(600))?))?;
        match told.recv() {
            Ok(ReceiverEvent::Verified { epoch, .. }) => receiver.release(epoch),
            Ok(ReceiverEvent::Failed { error, .. }) => return Err(error),
            Ok(ReceiverEvent::Fenced { .. }) | Err(_) => return Err(TransferError::Closed),
        }
    }
    Ok(())
}

fn say(line: &str) -> Result<(), TransferError> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{MARK}{line}").and_then(|()| out.flush()).map_err(|e| TransferError::os("answer the benchmark", e))
}

fn parse_first(line: &str) -> Result<(PoolGeometry, UcxSettings), TransferError> {
    let bad =
        || TransferError::argument("standard input", "its first line is no geometry; this half is started by run");
    let &[layout, counts, directory, settings] = &*line.split(' ').collect::<Vec<_>>() else {
        return Err(bad());
    };
    let directory = hex::decode(directory).ok_or_else(bad)?;
    let directory = (!directory.is_empty()).then(|| PathBuf::from(OsString::from_vec(directory)));
    let settings = hex::decode(settings).and_then(|text| String::from_utf8(text).ok()).ok_or_else(bad)?;
    let options = settings.parse().map_err(|_| bad())?;
    let layout = hex::decode(layout).and_then(|bytes| parse_layout(&bytes).ok()).ok_or_else(bad)?;
    let blocks = counts.split(',').map(|n| n.parse().map_err(|_| bad())).collect::<Result<_, _>>()?;
    Ok((PoolGeometry { layout, blocks }, UcxSettings { directory, options }))
}

/// Reads `bytes` at a time and answers each with one byte.
fn swallow(listener: &TcpListener, bytes: usize) -> std::io::Result<()> {
    let (mut stream, _) = listener.accept()?;
    tcp::tune(&stream)?;
    stream.set_nonblocking(false)?;
    let mut pool = vec![0; bytes];
    loop {
        for chunk in pool.chunks_mut(PLAIN_CHUNK) {
            stream.read_exact(chunk)?;
        }
        stream.write_all(&[1])?;
    }
}
