//! The program under test: `baton`, built once per test process in the profile of the tests.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;

use anyhow::{Context, anyhow, ensure};

/// Builds `baton` and returns its path. Cargo's own lock puts test processes that do this together in a row.
pub fn baton() -> anyhow::Result<PathBuf> {
    static BUILT: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    BUILT.get_or_init(|| build().map_err(|e| format!("{e:#}"))).clone().map_err(|e| anyhow!(e))
}

fn build() -> anyhow::Result<PathBuf> {
    // This program is TARGET/PROFILE/deps/NAME, or TARGET/PROFILE/examples/NAME.
    let own = std::env::current_exe()?;
    let folder = own.parent().and_then(Path::parent).context("this program is in no target directory")?;
    let target = folder.parent().context("a target directory has a parent")?;
    let profile = match folder.file_name().and_then(OsStr::to_str).context("the profile's name")? {
        "debug" => "dev",
        other => other,
    };
    let mut cargo = Command::new(env!("CARGO"));
    // What cargo says of the package whose test this is. Some build scripts look at it, and all would be built anew for that.
    const SAID: [&str; 4] = ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_CRATE_", "CARGO_BIN_"];
    for (name, _) in std::env::vars().filter(|(name, _)| SAID.iter().any(|prefix| name.starts_with(prefix))) {
        cargo.env_remove(name);
    }
    let built = cargo
        // With this package, for the features of dependencies that tests were built with.
        .args(["build", "--quiet", "-p", "baton-cli", "-p", "baton-tests", "--bin", "baton", "--profile", profile])
        .arg("--target-dir")
        .arg(target)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .context("starting cargo")?;
    ensure!(built.status.success(), "building baton: {}", String::from_utf8_lossy(&built.stderr));
    Ok(folder.join("baton"))
}

/// The runtime directory of all commands of this process. It stays until the process has ended.
pub fn runtime_dir() -> &'static Path {
    static DIR: OnceLock<PathBuf> = OnceLock::new();
    DIR.get_or_init(|| std::env::temp_dir().join(format!("baton-tests-{}", std::process::id())))
}

/// A command of this program without settings from the environment of the tests.
pub fn command() -> anyhow::Result<Command> {
    let mut command = Command::new(baton()?);
    for (name, _) in std::env::vars_os() {
        if name.as_encoded_bytes().starts_with(b"BATON_") {
            command.env_remove(name);
        }
    }
    // Where `baton up` keeps its certificates and other commands look for them.
    command.stdin(Stdio::null()).env("XDG_RUNTIME_DIR", runtime_dir());
    Ok(command)
}

/// What a finished command said.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CommandOutput {
    /// Its exit code; None when a signal ended it.
    pub code: Option<i32>,
    /// Its standard output.
    pub out: String,
    /// Its standard error.
    pub err: String,
}

impl From<Output> for CommandOutput {
    fn from(output: Output) -> CommandOutput {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        CommandOutput { code: output.status.code(), out: text(&output.stdout), err: text(&output.stderr) }
    }
}

/// Runs `baton` with these arguments to its end.
pub fn run(args: &[&str]) -> anyhow::Result<CommandOutput> {
    Ok(command()?.args(args).output()?.into())
}

/// The same, for commands that must succeed: what they print.
pub fn output(args: &[&str]) -> anyhow::Result<String> {
    let said = run(args)?;
    ensure!(said.code == Some(0), "baton {} ended with {said:?}", args.join(" "));
    Ok(said.out)
}
