//! `baton completions`: what a shell needs to complete the command line; and the manual pages, which packages carry.

use std::path::PathBuf;

use anyhow::Context;
use clap::{Arg, ArgMatches, Command, value_parser};
use clap_complete::Shell;

/// `baton completions`.
pub fn completions_command() -> Command {
    let shell = Arg::new("shell").value_name("SHELL").required(true).value_parser(value_parser!(Shell));
    Command::new("completions")
        .about("Prints the completions of a shell")
        .after_help("bash:  source <(baton completions bash)\nzsh:   baton completions zsh > \"${fpath[1]}/_baton\"\nfish:  baton completions fish > ~/.config/fish/completions/baton.fish")
        .arg(shell.help("The shell"))
}

/// `baton manuals`, for those who make packages.
pub fn manuals_command() -> Command {
    let folder = Arg::new("folder").value_name("FOLDER").required(true).value_parser(value_parser!(PathBuf));
    Command::new("manuals").about("Writes the manual pages").hide(true).arg(folder.help("Where to; it must exist"))
}

/// Prints the completions of `baton`.
pub fn completions(matches: &ArgMatches, mut baton: Command) {
    if let Some(shell) = matches.get_one::<Shell>("shell") {
        clap_complete::generate(*shell, &mut baton, "baton", &mut std::io::stdout());
    }
}

/// Writes a manual page for `baton` and each of its commands.
pub fn manuals(matches: &ArgMatches, baton: Command) -> anyhow::Result<()> {
    let folder = matches.get_one::<PathBuf>("folder").cloned().unwrap_or_default();
    clap_mangen::generate_to(baton, &folder).with_context(|| format!("writing manual pages to {}", folder.display()))
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_command_has_a_page_and_every_shell_completes_it() {
        let folder = tempfile::tempdir().unwrap();
        clap_mangen::generate_to(crate::command(), folder.path()).unwrap();
        let commands = ["up", "router", "prefill", "decode", "chat", "model-pull", "status", "scale", "drain"];
        for name in commands {
            let page = std::fs::read_to_string(folder.path().join(format!("baton-{name}.1"))).unwrap();
            assert!(page.contains(".SH SYNOPSIS"), "{name}: {page}");
        }
        assert!(!folder.path().join("baton-manuals.1").exists());
        for shell in [clap_complete::Shell::Bash, clap_complete::Shell::Zsh, clap_complete::Shell::Fish] {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut crate::command(), "baton", &mut script);
            let script = String::from_utf8(script).unwrap();
            assert!(script.contains("drain") && script.contains("max-inflight"), "{shell}");
        }
    }
}
