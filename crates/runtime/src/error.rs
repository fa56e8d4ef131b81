//! The errors of this crate. Configuration errors name the field, the origin of the bad value, and the fix.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;

use baton_types::{BatonError, ErrorKind};

/// Where a configured value came from.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Origin {
    /// `--name` on the command line.
    Flag(String),
    /// An environment variable.
    Env(String),
    /// A line of a file, counted from 1.
    File(PathBuf, usize),
    /// The default: nobody set it.
    Default,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Flag(flag) => write!(f, "flag {flag}"),
            Origin::Env(name) => write!(f, "environment variable {name}"),
            Origin::File(path, line) => write!(f, "{}:{line}", path.display()),
            Origin::Default => f.write_str("default"),
        }
    }
}

/// Errors of configuration, telemetry, the admin endpoint and drain.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeError {
    /// A field has a value it cannot take.
    #[error("{field}: {problem} (set by {origin})")]
    Value {
        /// The field's key.
        field: String,
        /// What was given and what is expected.
        problem: String,
        /// Where it was set.
        origin: Origin,
    },
    /// A key in a file that is not a field.
    #[error("{origin}: unknown field {field:?}; {}", hint(.nearest))]
    Unknown {
        /// The key as written.
        field: String,
        /// The field it most likely means.
        nearest: Option<String>,
        /// Where the key is.
        origin: Origin,
    },
    /// The configuration file cannot be read.
    #[error("cannot read the configuration file {}: {source}; check the path given with --config or BATON_CONFIG", .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The configuration file is not TOML.
    #[error("{origin}: not valid TOML: {problem}")]
    Syntax {
        /// Where the syntax breaks.
        origin: Origin,
        /// The parser's message.
        problem: String,
    },
    /// An address cannot be listened on.
    #[error("cannot listen on {addr}: {source}; {}, or choose another address with {flag}", listen_fix(.source))]
    Listen {
        /// The address.
        addr: SocketAddr,
        /// The flag that sets it.
        flag: String,
        /// Why.
        source: std::io::Error,
    },
    /// Another metrics recorder is already installed in this process.
    #[error("a metrics recorder is already installed in this process; install it only with baton_runtime::metrics")]
    Recorder,
    /// The recorder refuses the metric buckets.
    #[error("the metrics recorder cannot be set up: {0}")]
    Buckets(String),
    /// Signal handlers cannot be set up.
    #[error("cannot listen for SIGINT and SIGTERM: {0}")]
    Signals(std::io::Error),
}

fn hint(nearest: &Option<String>) -> String {
    match nearest {
        Some(name) => format!("did you mean {name:?}?"),
        None => "remove it, or see --help for the fields there are".to_owned(),
    }
}

fn listen_fix(source: &std::io::Error) -> &'static str {
    match source.kind() {
        std::io::ErrorKind::AddrInUse => "stop the process that has it",
        std::io::ErrorKind::PermissionDenied => "use a port above 1023",
        _ => "use an address of this host",
    }
}

impl BatonError for RuntimeError {
    fn kind(&self) -> ErrorKind {
        match self {
            RuntimeError::Value { .. }
            | RuntimeError::Unknown { .. }
            | RuntimeError::Syntax { .. }
            | RuntimeError::Listen { .. } => ErrorKind::InvalidArgument,
            RuntimeError::Read { .. } => ErrorKind::NotFound,
            RuntimeError::Recorder | RuntimeError::Buckets(_) | RuntimeError::Signals(_) => ErrorKind::Internal,
        }
    }
}
