//! `baton chat` where people use it: in a terminal, and in a pipe.
#![allow(clippy::unwrap_used)]

use std::io::Write;
use std::process::{Command, Stdio};

use anyhow::{Context, ensure};
use baton_tests::binary;
use baton_tests::cluster::{Cluster, ClusterOptions};

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/e2e/chat_terminal.py");

#[test]
fn a_conversation_in_a_terminal_and_a_question_in_a_pipe() -> anyhow::Result<()> {
    let cluster = Cluster::start(ClusterOptions::new("smollm2"))?;
    let mut script = Command::new("python3");
    script.arg(SCRIPT).arg(binary::baton()?).arg(cluster.url()).env("TERM", "xterm");
    let talked = script.output().context("this test needs python3")?;
    ensure!(talked.status.success(), "{}", String::from_utf8_lossy(&talked.stderr));

    let ask = |words: &[&str], piped: Option<&str>| -> anyhow::Result<String> {
        let mut command = binary::command()?;
        command.args(["chat", "--max-tokens", "12", "--router", &cluster.url()]).args(words);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        child.stdin.take().context("a pipe")?.write_all(piped.unwrap_or_default().as_bytes())?;
        let output = child.wait_with_output()?;
        ensure!(output.status.success() == (piped.is_some() || !words.is_empty()), "{output:?}");
        Ok(String::from_utf8(output.stdout)?)
    };
    let (given, piped) = (ask(&["Why is the sky blue?"], None)?, ask(&[], Some("Why is the sky blue?\n"))?);
    ensure!(given == piped && given.trim().len() > 10, "{given:?} and {piped:?}");
    ask(&[], None)?;
    // One answer was broken off (I6).
    cluster.wait_idle()?;
    cluster.stop()
}
