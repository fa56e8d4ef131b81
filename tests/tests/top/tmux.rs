//! A program in a terminal: a session of tmux, which says what its screen shows.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, ensure};
use baton_tests::binary;
use baton_tests::cluster::{HANG, wait};

/// What runs in the terminal: the program, and then how it ended and whether the terminal's settings are as they were.
const SCRIPT: &str =
    "before=$(stty -g); \"$@\"; echo ended $? $(test \"$before\" = \"$(stty -g)\" && echo well); exec sleep 1000";

/// A terminal. It goes with this.
#[derive(Debug)]
pub struct Terminal {
    dir: tempfile::TempDir,
}

impl Terminal {
    /// A terminal of so many columns and lines, in which `baton` runs with these arguments and these variables of the environment.
    pub fn start(size: (u16, u16), env: &[(&str, &str)], args: &[&str]) -> anyhow::Result<Terminal> {
        let terminal = Terminal { dir: tempfile::tempdir()? };
        let (width, height) = (size.0.to_string(), size.1.to_string());
        let mut words = vec!["new-session", "-d", "-x", &width, "-y", &height, "env"];
        let env: Vec<String> = env.iter().map(|(name, value)| format!("{name}={value}")).collect();
        words.extend(env.iter().map(String::as_str));
        let baton = binary::baton()?;
        words.extend(["sh", "-c", SCRIPT, "sh", baton.to_str().context("a path in UTF-8")?]);
        words.extend(args);
        terminal.tmux(&words)?;
        Ok(terminal)
    }

    fn tmux(&self, words: &[&str]) -> anyhow::Result<String> {
        let socket = self.dir.path().join("tmux");
        let mut command = Command::new("tmux");
        // Nothing of the host's settings, and nothing that is a setting of baton.
        command.env_clear().envs(std::env::vars_os().filter(|(name, _)| name == "PATH" || name == "HOME"));
        command.env("TERM", "xterm-256color").env("LC_ALL", "C.UTF-8").env("XDG_RUNTIME_DIR", binary::runtime_dir());
        let said = command.arg("-S").arg(socket).args(["-f", "/dev/null"]).args(words).output()?;
        ensure!(said.status.success(), "tmux {words:?}: {}", String::from_utf8_lossy(&said.stderr));
        Ok(String::from_utf8(said.stdout)?)
    }

    /// The lines of the screen.
    pub fn screen(&self) -> anyhow::Result<Vec<String>> {
        Ok(self.tmux(&["capture-pane", "-p"])?.lines().map(|line| line.trim_end().to_owned()).collect())
    }

    /// The screen with the sequences that set colours.
    pub fn coloured(&self) -> anyhow::Result<String> {
        self.tmux(&["capture-pane", "-p", "-e"])
    }

    /// Types keys, as tmux names them.
    pub fn keys(&self, keys: &[&str]) -> anyhow::Result<()> {
        self.tmux(&[&["send-keys"], keys].concat()).map(drop)
    }

    /// Gives the terminal another size.
    pub fn resize(&self, (width, height): (u16, u16)) -> anyhow::Result<()> {
        self.tmux(&["resize-window", "-x", &width.to_string(), "-y", &height.to_string()]).map(drop)
    }

    /// Waits until the screen is as wished, and prints and gives it. `what`: for the error, and above the print.
    pub fn until(&self, what: &str, wish: impl Fn(&[String]) -> bool) -> anyhow::Result<Vec<String>> {
        let shown = wait(|| self.screen().ok().filter(|screen| wish(screen)));
        let shown = shown.with_context(|| format!("within {HANG:?} not {what}: {:#?}", self.screen()))?;
        println!("--- {what}\n{}", shown.join("\n"));
        Ok(shown)
    }

    /// The process that `baton` runs in.
    pub fn pid(&self) -> anyhow::Result<u32> {
        let shell: u32 = self.tmux(&["display-message", "-p", "#{pane_pid}"])?.trim().parse()?;
        let children = Path::new("/proc").join(format!("{shell}/task/{shell}/children"));
        let all = std::fs::read_to_string(children)?;
        all.split_whitespace().next().context("the program has ended")?.parse().context("a process id")
    }

    /// Waits until the program has ended with this code; the terminal must be as it was.
    pub fn ended(&self, code: i32) -> anyhow::Result<Vec<String>> {
        let ended = |screen: &[String]| screen.iter().any(|line| line.starts_with("ended "));
        let shown = self.until("the end", ended)?;
        ensure!(
            shown.contains(&format!("ended {code} well")),
            "its end with {code} and the terminal's settings: {shown:#?}"
        );
        let modes = self.tmux(&["display-message", "-p", "alternate screen #{alternate_on}, cursor #{cursor_flag}"])?;
        ensure!(modes.trim() == "alternate screen 0, cursor 1", "{modes}");
        Ok(shown)
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // It may have gone.
        let _ = self.tmux(&["kill-server"]);
    }
}
