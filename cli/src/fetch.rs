//! The flags of [`FetchConfig`], under the same names, for subcommands that open a model but read no configuration file.

use anyhow::bail;
use baton_runtime::FetchConfig;
use baton_runtime::config::{Config, Plain};
use clap::{Arg, ArgMatches};

/// One flag for each field of [`FetchConfig`].
pub fn args() -> impl Iterator<Item = Arg> {
    FetchConfig::fields().into_iter().map(|field| {
        let help = field.help.lines().map(str::trim).collect::<Vec<_>>().join(" ");
        Arg::new(field.key).long(field.flag()).value_name(field.key.to_uppercase()).help(help.trim().to_owned())
    })
}

/// The settings that the given flags make.
pub fn settings(matches: &ArgMatches) -> anyhow::Result<FetchConfig> {
    let mut config = FetchConfig::default();
    for field in FetchConfig::fields() {
        let Some(text) = matches.get_one::<String>(field.key) else { continue };
        if let Some(Err(problem)) = config.set(field.key, &Plain::Text(text.clone())) {
            bail!("--{}: {problem}", field.flag());
        }
    }
    Ok(config)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Command;

    #[test]
    fn every_field_can_be_said_and_a_bad_value_names_its_flag() {
        let parse = |words: &[&str]| {
            let command = Command::new("test").args(args());
            settings(&command.try_get_matches_from([&["test"], words].concat()).unwrap())
        };
        let said = ["--model-cache", "/models", "--hub-endpoint", "http://mirror", "--hub-token-file", "/token"];
        let config = parse(&said).unwrap();
        assert_eq!(config.model_cache.as_deref(), Some("/models".as_ref()));
        assert_eq!(config.hub_endpoint.as_deref(), Some("http://mirror"));
        assert_eq!(config.hub_token_file.as_deref(), Some("/token".as_ref()));
        assert!(parse(&["--model-cache="]).unwrap_err().to_string().contains("--model-cache"));
        assert!(parse(&[]).unwrap().hub_endpoint.is_none());
    }
}
