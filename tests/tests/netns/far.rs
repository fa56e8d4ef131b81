//! What several connections carry over a long way with losses, beside one. It measures, so it is not run with the others:
//!
//!     cargo test --workspace --test netns -- --ignored --nocapture far
//!
//! One run, in turn; only the ratio between the rows says something, since a thread of this process carries every frame.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, ChildStdout, Stdio};
use std::time::Duration;

use crate::hosts::{DECODE, Hosts, joined};
use crate::wire::Quality;

const PORT: u16 = 7400;

/// Ends with the measurement. What it says is kept, so that it can go on saying so.
struct Listening(Child, BufReader<ChildStdout>);

impl Drop for Listening {
    fn drop(&mut self) {
        // Gone already is as good.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The receiving end, once it listens.
fn listen(hosts: &Hosts) -> Listening {
    let mut command = hosts.command("decode").unwrap();
    command.args(["bench", "transfer", "--listen", &format!("{DECODE}:{PORT}")]).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let said = BufReader::new(child.stdout.take().unwrap());
    let (mut listening, mut line) = (Listening(child, said), String::new());
    listening.1.read_line(&mut line).unwrap();
    assert!(line.starts_with("listening"), "{line:?}");
    listening
}

#[test]
#[ignore = "measures"]
fn several_connections_over_a_far_and_lossy_way() {
    let _alone = crate::alone();
    for lost in [0, 1, 10] {
        let quality = Quality { delay: Duration::from_millis(20), bytes_per_second: 64 << 20, lost, seed: 7 };
        let Some(hosts) = joined(Some(quality)) else { return };
        let _listening = listen(&hosts);
        let tokens = if lost < 10 { "500" } else { "100" };
        let mut command = hosts.command("prefill").unwrap();
        command.args(["bench", "transfer", "--to", &format!("{DECODE}:{PORT}"), "--connections", "1,4,8"]);
        let output = command.args(["--tokens", tokens, "--round-trips", "5"]).output().unwrap();
        println!("20 ms of delay each way, {lost} of 1,000 frames lost\n\n{}", String::from_utf8_lossy(&output.stdout));
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}
