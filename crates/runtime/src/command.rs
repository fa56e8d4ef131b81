//! Reads a component's configuration. A flag wins over the environment, that over the file, that over the default.
//!
//! The only place that reads the environment, through a function that tests can replace. Knows no field by name.

mod file;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use clap::{Arg, ArgAction, ArgMatches, Command};

use crate::config::{Config, Plain, to_toml};
use crate::error::{Origin, RuntimeError};

const FILE_FLAG: &str = "config";
const FILE_ENV: &str = "BATON_CONFIG";
const CHECK_FLAG: &str = "check-config";

/// A configuration and where each of its values came from.
#[derive(Clone, Debug)]
pub struct LoadedConfig<T> {
    /// The effective values.
    pub config: T,
    origins: BTreeMap<&'static str, Origin>,
}

impl<T: Config> LoadedConfig<T> {
    /// Where the value of `key` came from.
    pub fn origin(&self, key: &str) -> Origin {
        self.origins.get(key).cloned().unwrap_or(Origin::Default)
    }

    /// The effective configuration as a commented TOML file.
    pub fn to_toml(&self) -> String {
        to_toml(&self.config, |key| self.origin(key).to_string())
    }

    /// The error for a value that its type allows but the component does not.
    pub fn refuse(&self, key: &str, problem: impl Into<String>) -> RuntimeError {
        RuntimeError::Value { field: key.to_owned(), problem: problem.into(), origin: self.origin(key) }
    }
}

/// Adds a flag for every field of `T`, plus `--config FILE` and `--check-config`.
pub fn args<T: Config>(command: Command) -> Command {
    let file = Arg::new(FILE_FLAG)
        .long(FILE_FLAG)
        .value_name("FILE")
        .help(format!("Configuration file (TOML) [env: {FILE_ENV}]"))
        .value_parser(clap::value_parser!(PathBuf));
    let check = Arg::new(CHECK_FLAG)
        .long(CHECK_FLAG)
        .action(ArgAction::SetTrue)
        .help("Print the effective configuration with the origin of each value, and exit");
    let defaults = T::default();
    let fields = T::fields().into_iter().map(|field| {
        let default = match defaults.get(field.key) {
            Some(value) => format!("[default: {}] ", show(&value)),
            None => String::new(),
        };
        let lines: Vec<&str> = field.help.lines().map(str::trim).collect();
        let arg = Arg::new(field.key)
            .long(field.flag())
            .help(format!("{} {default}[env: {}]", lines.join(" ").trim(), field.env()))
            .allow_negative_numbers(true);
        match field.switch {
            true => arg.value_name("true|false").num_args(0..=1).require_equals(true).default_missing_value("true"),
            false => arg.value_name(field.key.to_uppercase()),
        }
    });
    command.arg(file).arg(check).args(fields)
}

/// Loads the configuration from parsed flags, this process's environment, and the configuration file that one of them names.
pub fn load<T: Config>(matches: &ArgMatches) -> Result<T, RuntimeError> {
    load_from(matches, &environment).map(|loaded| loaded.config)
}

/// The text to print before exiting, if `--check-config` was given; otherwise `None`. Errors are those of [`load`].
pub fn check_config<T: Config>(matches: &ArgMatches) -> Result<Option<String>, RuntimeError> {
    if !matches.try_get_one::<bool>(CHECK_FLAG).ok().flatten().copied().unwrap_or(false) {
        return Ok(None);
    }
    load_from::<T>(matches, &environment).map(|loaded| Some(loaded.to_toml()))
}

fn environment(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

/// Like [`load`], with the environment given by a function. An empty variable counts as unset.
pub fn load_from<T: Config>(
    matches: &ArgMatches,
    env: &dyn Fn(&str) -> Option<String>,
) -> Result<LoadedConfig<T>, RuntimeError> {
    let env = |name: &str| env(name).filter(|value| !value.is_empty());
    let mut loaded = LoadedConfig { config: T::default(), origins: BTreeMap::new() };
    let flag_file = matches.try_get_one::<PathBuf>(FILE_FLAG).ok().flatten().cloned();
    if let Some(path) = flag_file.or_else(|| env(FILE_ENV).map(PathBuf::from)) {
        let text =
            std::fs::read_to_string(&path).map_err(|source| RuntimeError::Read { path: path.clone(), source })?;
        apply_file(&mut loaded, &path, &text)?;
    }
    for field in T::fields() {
        if let Some(text) = env(&field.env()) {
            apply(&mut loaded, field.key, &Plain::Text(text), Origin::Env(field.env()))?;
        }
        if let Some(text) = matches.try_get_one::<String>(field.key).ok().flatten() {
            apply(&mut loaded, field.key, &Plain::Text(text.clone()), Origin::Flag(format!("--{}", field.flag())))?;
        }
    }
    Ok(loaded)
}

fn apply_file<T: Config>(loaded: &mut LoadedConfig<T>, path: &Path, text: &str) -> Result<(), RuntimeError> {
    for entry in file::entries(path, text)? {
        apply(loaded, &entry.key, &entry.value, entry.origin)?;
    }
    Ok(())
}

fn apply<T: Config>(
    loaded: &mut LoadedConfig<T>,
    key: &str,
    value: &Plain,
    origin: Origin,
) -> Result<(), RuntimeError> {
    let fields = T::fields();
    match loaded.config.set(key, value) {
        Some(Ok(())) => {
            if let Some(field) = fields.iter().find(|f| f.key == key) {
                loaded.origins.insert(field.key, origin);
            }
            Ok(())
        }
        Some(Err(problem)) => Err(RuntimeError::Value { field: key.to_owned(), problem, origin }),
        None => {
            let nearest = crate::config::nearest(key, fields.iter().map(|f| f.key)).map(str::to_owned);
            Err(RuntimeError::Unknown { field: key.to_owned(), nearest, origin })
        }
    }
}

fn show(value: &Plain) -> String {
    match value {
        Plain::Bool(v) => v.to_string(),
        Plain::Int(v) => v.to_string(),
        Plain::Float(v) => v.to_string(),
        Plain::Text(v) => v.clone(),
        Plain::List(v) => v.join(","),
    }
}
