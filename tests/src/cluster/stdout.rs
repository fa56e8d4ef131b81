//! What `baton up` prints, line by line.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::ChildStdout;
use std::sync::mpsc::{Receiver, channel};

use anyhow::{Context, anyhow};

use super::HANG;

/// Where a cluster is reached.
#[derive(Debug)]
pub(super) struct Addresses {
    pub http: SocketAddr,
    pub grpc: SocketAddr,
    pub admin: SocketAddr,
    pub registry: String,
    /// What to pass as `--certs`, where that is needed.
    pub certs: Option<String>,
}

/// Lines as they are printed.
#[derive(Debug)]
pub(super) struct Stdout {
    lines: Receiver<String>,
    pub text: String,
}

impl Stdout {
    pub fn new(pipe: ChildStdout) -> Stdout {
        let (send, lines) = channel();
        // Ends with the pipe.
        std::thread::spawn(move || BufReader::new(pipe).lines().map_while(Result::ok).try_for_each(|l| send.send(l)));
        Stdout { lines, text: String::new() }
    }

    /// Reads until a line contains `word`.
    pub fn until(&mut self, word: &str) -> anyhow::Result<()> {
        loop {
            let line = self.lines.recv_timeout(HANG).map_err(|e| anyhow!("{word:?} was not printed: {e}"))?;
            self.text += &line;
            self.text += "\n";
            if line.contains(word) {
                return Ok(());
            }
        }
    }

    /// The router's addresses, and the registry as `--registry` takes it.
    pub fn addresses(&self) -> anyhow::Result<Addresses> {
        let after = |mark: &str| {
            let word = self.text.split_once(mark).and_then(|(_, rest)| rest.split_whitespace().next());
            word.with_context(|| format!("no {mark:?} in {:?}", self.text))
        };
        let address = |mark: &str| after(mark)?.parse().context("an address");
        Ok(Addresses {
            http: address(" http://")?,
            grpc: address("  grpc ")?,
            admin: address("  admin http://")?,
            registry: after(" status --registry ")?.to_owned(),
            certs: after(" --certs ").ok().map(str::to_owned),
        })
    }
}
