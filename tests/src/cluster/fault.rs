//! What the kernel answers to a process, changed (`strace --inject`).

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, ensure};

use crate::needs;

/// Some system calls of a process are answered otherwise, until this is dropped.
#[derive(Debug)]
pub struct Fault(Child);

/// Whether this host has what faults need; says so if not.
pub fn there() -> bool {
    let there = Command::new("strace").arg("--version").output().is_ok_and(|said| said.status.success());
    let scope = std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").unwrap_or_default();
    let may = rustix::process::geteuid().is_root() || matches!(scope.trim(), "" | "0");
    if !(there && may) {
        needs::left_out("needs strace, and to be allowed to attach it to a process, to change what the kernel answers");
    }
    there && may
}

impl Fault {
    /// `calls`, and what becomes of them, as `strace --inject` takes it. Of calls on these files only, if there are any.
    pub fn begins(pid: u32, files: &[PathBuf], calls: &str, what: &str) -> anyhow::Result<Fault> {
        let mut command = Command::new("strace");
        command.args(["-f", "-p", &pid.to_string(), "-o", "/dev/null", "-e", &format!("inject={calls}:{what}")]);
        for file in files {
            command.arg("-P").arg(file);
        }
        let mut child = command.stderr(Stdio::piped()).spawn().context("strace")?;
        let mut said = BufReader::new(child.stderr.take().context("stderr")?);
        let (fault, mut line) = (Fault(child), String::new());
        // It may first say to which files the paths lead.
        while !line.contains(" attached") {
            ensure!(said.read_line(&mut line)? > 0, "{line}");
        }
        // What it says further must not fill the pipe.
        std::thread::spawn(move || std::io::copy(&mut said, &mut std::io::sink()));
        Ok(fault)
    }
}

impl Drop for Fault {
    fn drop(&mut self) {
        // It leaves the process as it was.
        let pid = rustix::process::Pid::from_child(&self.0);
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        let _ = self.0.wait();
    }
}
