//! Clients that are not ours: the official `openai` package and a gRPC client that knows only what reflection tells it.
#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, ensure};
use baton_tests::cluster::{Cluster, ClusterOptions};

const SCRIPTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/e2e");

/// A Python with the packages that `requirements.txt` pins.
#[derive(Clone, Debug)]
struct Python {
    program: PathBuf,
    /// Where the packages are, when the program does not know.
    packages: Option<PathBuf>,
}

impl Python {
    /// Installs once, below the target directory, again when the pins change: in a virtual environment, or beside it where
    /// Python comes without `venv`.
    fn installed() -> anyhow::Result<Python> {
        static ONE: Mutex<()> = Mutex::new(());
        let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        let pins = Path::new(SCRIPTS).join("requirements.txt");
        let wanted = std::fs::read_to_string(&pins)?;
        let folder = target()?.join("test-venv");
        let (stamp, packages) = (folder.join("installed.txt"), folder.join("packages"));
        if std::fs::read_to_string(&stamp).ok() != Some(wanted.clone()) {
            std::fs::create_dir_all(&folder)?;
            let made = Command::new("python3").args(["-m", "venv", "--clear"]).arg(&folder).output();
            let made = made.context("these tests need python3")?.status.success();
            let mut pip = Command::new(if made { folder.join("bin/python") } else { "python3".into() });
            pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r"]).arg(&pins);
            if !made {
                pip.args(["--root-user-action", "ignore", "--target"]).arg(&packages);
            }
            succeed(&mut pip)?;
            std::fs::write(&stamp, wanted)?;
        }
        let own = folder.join("bin/python");
        Ok(match packages.exists() {
            false => Python { program: own, packages: None },
            true => Python { program: "python3".into(), packages: Some(packages) },
        })
    }

    /// Runs one of the scripts; returns what it printed.
    fn run(&self, script: &str, args: &[&str]) -> anyhow::Result<String> {
        let mut command = Command::new(&self.program);
        command.arg(Path::new(SCRIPTS).join(script)).args(args).env("PYTHONDONTWRITEBYTECODE", "1");
        command.envs(self.packages.iter().map(|path| ("PYTHONPATH", path)));
        succeed(&mut command)
    }
}

fn succeed(command: &mut Command) -> anyhow::Result<String> {
    let output = command.output().with_context(|| format!("starting {command:?}"))?;
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    ensure!(output.status.success(), "{command:?} ended with {}\n{out}{err}", output.status);
    Ok(out.into_owned())
}

/// The target directory: of this program's TARGET/PROFILE/deps/NAME.
fn target() -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe()?;
    Ok(own.ancestors().nth(3).context("this program is in no target directory")?.to_owned())
}

#[test]
fn the_openai_client_and_a_grpc_client_work_unchanged() {
    let python = Python::installed().unwrap();
    let cluster = Cluster::start(ClusterOptions::new("smollm2")).unwrap();
    let base = format!("http://{}/v1", cluster.http());
    print!("{}", python.run("openai_client.py", &["--base-url", &base, "--model", "smollm2"]).unwrap());
    let target = cluster.grpc().to_string();
    print!("{}", python.run("grpc_client.py", &["--target", &target, "--model", "smollm2"]).unwrap());
    // Some of those requests were broken off (I6).
    cluster.wait_idle().unwrap();
    cluster.stop().unwrap();
}
