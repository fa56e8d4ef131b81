//! The errors of this crate. Configuration errors name the field, the origin of the bad value, and the fix.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;

use baton_types::{BatonError, ErrorKind};

use crate::secret::LEAST_SECRET;

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
    /// Traces cannot be sent there.
    #[error("otlp_endpoint {0}: {1}")]
    Otlp(String, String),
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
    /// A file of certificates or keys cannot be used.
    #[error("{field}: {}: {problem}; a file in PEM is needed", .path.display())]
    Certificate {
        /// The field that names the file.
        field: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        problem: String,
    },
    /// A file does not hold a secret.
    #[error("{field}: {}: {problem}; a file with at least {LEAST_SECRET} random bytes is needed", .path.display())]
    Secret {
        /// The field that names the file.
        field: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        problem: String,
    },
    /// Of files that are needed together one is missing.
    #[error("{field} is not set; TLS needs {with} together")]
    TlsFiles {
        /// The field that is missing.
        field: &'static str,
        /// The fields that are needed.
        with: &'static str,
    },
    /// An internal listener that others can reach has no TLS.
    #[error(
        "{field} is {address}, which other machines can reach, and has no TLS; set tls_cert, tls_key and tls_ca (`baton certs` makes them), \
         use an address of 127.0.0.0/8, or say insecure_internal if nobody else reaches that network"
    )]
    Insecure {
        /// The field with the address.
        field: &'static str,
        /// The address.
        address: SocketAddr,
    },
    /// A certificate cannot be made.
    #[error("a certificate cannot be made: {0}")]
    MakeCertificate(String),
    /// A file cannot be written.
    #[error("cannot write {}: {problem}", .path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        problem: String,
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
            | RuntimeError::Certificate { .. }
            | RuntimeError::Secret { .. }
            | RuntimeError::TlsFiles { .. }
            | RuntimeError::Insecure { .. }
            | RuntimeError::Otlp(..)
            | RuntimeError::Listen { .. } => ErrorKind::InvalidArgument,
            RuntimeError::Read { .. } => ErrorKind::NotFound,
            RuntimeError::MakeCertificate(_) | RuntimeError::Write { .. } => ErrorKind::Internal,
            RuntimeError::Recorder | RuntimeError::Buckets(_) | RuntimeError::Signals(_) => ErrorKind::Internal,
        }
    }
}
