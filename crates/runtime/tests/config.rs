//! Configuration from all four sources, as a component sees it.
#![allow(clippy::unwrap_used)] // Helpers of tests, not only the tests themselves.

use std::collections::HashMap;
use std::io::Write as _;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use baton_runtime::{Bytes, Config, LoadedConfig, LogFormat, Origin, ProcessConfig, RuntimeError, load_from};

baton_runtime::config! {
    /// A component with a field of every kind.
    pub struct ToyConfig {
        use process: ProcessConfig = ProcessConfig { log: "warn".parse().unwrap(), ..ProcessConfig::default() };
        /// Address of the toy.
        /// It has two lines of help.
        http: SocketAddr = SocketAddr::from(([127, 0, 0, 1], 8000)),
        /// Pool memory.
        pool: Bytes = Bytes::mib(64),
        /// Model to load.
        model: Option<String> = None,
        /// Peers to know.
        peers: Vec<String> = Vec::new(),
        /// Play alone.
        alone: bool = false,
        /// Share of the memory.
        share: f32 = 0.1,
        /// Seed.
        seed: u64 = u64::MAX,
        /// Offset.
        offset: f64 = 0.0,
    }
}

fn load_toy(args: &[&str], env: &[(&str, &str)]) -> Result<LoadedConfig<ToyConfig>, RuntimeError> {
    let command = baton_runtime::args::<ToyConfig>(clap::Command::new("toy"));
    let matches = command.try_get_matches_from(std::iter::once(&"toy").chain(args)).unwrap();
    let env: HashMap<String, String> = env.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
    load_from(&matches, &|name| env.get(name).cloned())
}

fn file(text: &str) -> (tempfile::NamedTempFile, String) {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    let path = file.path().to_str().unwrap().to_owned();
    (file, path)
}

#[test]
fn defaults_hold_where_nothing_is_set() {
    let loaded = load_toy(&[], &[]).unwrap();
    assert_eq!(loaded.config.process.log, "warn".parse().unwrap(), "the component's default for a shared field");
    assert_eq!(loaded.config.pool, Bytes(64 << 20));
    assert_eq!(loaded.config.seed, u64::MAX);
    assert_eq!(loaded.origin("pool"), Origin::Default);
}

#[test]
fn flag_beats_environment_beats_file_beats_default() {
    let (_keep, path) = file("pool = \"1MiB\"\nmodel = \"file\"\nlog = \"debug\"\nlog_format = \"json\"\n");
    let env = [("BATON_POOL", "2MiB"), ("BATON_MODEL", "env"), ("BATON_PEERS", "")];
    let loaded = load_toy(&["--config", &path, "--pool", "3MiB"], &env).unwrap();
    assert_eq!(loaded.config.pool, Bytes::mib(3));
    assert_eq!(loaded.config.model.as_deref(), Some("env"));
    assert_eq!(loaded.config.process.log, "debug".parse().unwrap());
    assert_eq!(loaded.config.process.log_format, LogFormat::Json);
    assert_eq!(loaded.origin("pool"), Origin::Flag("--pool".to_owned()));
    assert_eq!(loaded.origin("model"), Origin::Env("BATON_MODEL".to_owned()));
    assert_eq!(loaded.origin("log"), Origin::File(PathBuf::from(&path), 3));
    assert_eq!(loaded.origin("peers"), Origin::Default, "an empty variable counts as unset");
}

#[test]
fn the_file_may_be_named_by_the_environment() {
    let (_keep, path) = file("alone = true\npeers = [\"a\", \"b\"]\nshare = 0.5\ndrain_timeout = \"2m\"\n");
    let config = load_toy(&[], &[("BATON_CONFIG", &path)]).unwrap().config;
    assert!(config.alone);
    assert_eq!(config.peers, ["a", "b"]);
    assert_eq!(config.share, 0.5);
    assert_eq!(config.process.drain_timeout, Duration::from_secs(120));
}

#[test]
fn switches_need_no_value_and_take_one() {
    assert!(load_toy(&["--alone"], &[]).unwrap().config.alone);
    assert!(!load_toy(&["--alone=false"], &[("BATON_ALONE", "true")]).unwrap().config.alone);
    assert_eq!(load_toy(&["--offset", "-1.5"], &[]).unwrap().config.offset, -1.5);
}

#[test]
fn a_bad_value_names_field_origin_and_fix() {
    let message = |args: &[&str], env: &[(&str, &str)]| load_toy(args, env).unwrap_err().to_string();
    assert_eq!(
        message(&["--drain-timeout", "30"], &[]),
        "drain_timeout: \"30\" is not a duration with its unit, such as 250ms, 2s or 1m (set by flag --drain-timeout)"
    );
    assert_eq!(
        message(&[], &[("BATON_HTTP", "8000")]),
        "http: \"8000\" is not an address and port, such as 127.0.0.1:8000 (set by environment variable BATON_HTTP)"
    );
    let (_keep, path) = file("\n# comment\npool = 512\n");
    assert_eq!(
        message(&["--config", &path], &[]),
        format!("pool: 512 is not a size with its unit, such as 512MiB or 2GiB (set by {path}:3)")
    );
    assert!(message(&["--log", "a=b=c"], &[]).starts_with("log: \"a=b=c\" is not a log filter"));
    assert!(message(&["--log-format", "xml"], &[]).contains("\"xml\" is not one of: text, json"));
}

#[test]
fn an_unknown_field_names_the_nearest_one() {
    let (_keep, path) = file("alone = false\npol = \"1MiB\"\n");
    let message = load_toy(&["--config", &path], &[]).unwrap_err().to_string();
    assert_eq!(message, format!("{path}:2: unknown field \"pol\"; did you mean \"pool\"?"));
    let (_keep, path) = file("[router]\nhttp = \"127.0.0.1:1\"\n");
    let message = load_toy(&["--config", &path], &[]).unwrap_err().to_string();
    assert!(message.contains("router: is a section") && message.ends_with(":1)"), "{message}");
}

#[test]
fn a_broken_or_absent_file_is_named() {
    let (_keep, path) = file("pool = \"1MiB\"\nalone = = 1\n");
    let message = load_toy(&["--config", &path], &[]).unwrap_err().to_string();
    assert!(message.starts_with(&format!("{path}:2: not valid TOML")), "{message}");
    let message = load_toy(&["--config", "/nonexistent/baton.toml"], &[]).unwrap_err().to_string();
    assert!(message.contains("/nonexistent/baton.toml") && message.contains("--config"), "{message}");
}

#[test]
fn the_printed_configuration_reads_back() {
    let args = ["--model", "a \"quoted\" name", "--alone", "--share", "0.3", "--peers", "x,y"];
    let loaded = load_toy(&args, &[]).unwrap();
    let text = loaded.to_toml();
    assert!(
        text.contains("# Address of the toy.\n# It has two lines of help.\nhttp = \"127.0.0.1:8000\"  # default\n")
    );
    assert!(text.contains("alone = true  # flag --alone\n"), "{text}");
    let (_keep, path) = file(&text);
    let again = load_toy(&["--config", &path], &[]).unwrap();
    for field in ToyConfig::fields() {
        assert_eq!(again.config.get(field.key), loaded.config.get(field.key), "{}", field.key);
    }
}

#[test]
fn serde_sees_a_flat_map() {
    let loaded = load_toy(&["--model", "m"], &[]).unwrap();
    let json = serde_json::to_value(&loaded.config).unwrap();
    assert_eq!(json["drain_timeout"], "30s");
    let back: ToyConfig = serde_json::from_value(json).unwrap();
    assert_eq!(back.model.as_deref(), Some("m"));
    let error = serde_json::from_str::<ToyConfig>("{\"modle\": \"m\"}").unwrap_err().to_string();
    assert!(error.contains("did you mean \"model\"?"), "{error}");
}

#[test]
fn help_shows_every_field_with_default_and_variable() {
    let help = baton_runtime::args::<ToyConfig>(clap::Command::new("toy")).render_long_help().to_string();
    for field in ToyConfig::fields() {
        assert!(help.contains(&format!("--{}", field.flag())), "{}", field.key);
        assert!(help.contains(&field.env()), "{}", field.key);
    }
    assert!(help.contains("[default: 64MiB]"), "{help}");
}
