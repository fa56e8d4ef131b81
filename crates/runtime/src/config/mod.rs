//! A component's configuration: a struct whose every field is defined once, with [`crate::config!`].
//!
//! That one definition gives the key in a file (`drain_timeout`), the flag (`--drain-timeout`), the environment variable
//! (`BATON_DRAIN_TIMEOUT`), the default, the help text and the errors. `command.rs` reads and merges the sources; this folder
//! knows neither clap nor files.

mod macros;
mod serial;
mod units;
mod value;

pub use baton_types::{Expects, nearest, nearest_within};
pub use serial::{deserialize, serialize, to_toml};
pub use units::{Bytes, format_duration, parse_duration};
pub use value::{Parsed, Plain, Value};

#[doc(hidden)]
pub use baton_types::words;
#[doc(hidden)]
pub use serde;

/// The description of one field, for help texts and loaders.
#[derive(Clone, PartialEq, Debug)]
pub struct Field {
    /// Key in a file, snake_case.
    pub key: &'static str,
    /// Help text, one or more lines.
    pub help: &'static str,
    /// What a value looks like, for help and errors.
    pub expects: &'static str,
    /// True for a yes/no field, whose flag needs no value.
    pub switch: bool,
}

impl Field {
    /// The field's flag, without the dashes.
    pub fn flag(&self) -> String {
        self.key.replace('_', "-")
    }

    /// The field's environment variable.
    pub fn env(&self) -> String {
        format!("BATON_{}", self.key.to_uppercase())
    }
}

/// A component's configuration. Implemented by [`crate::config!`] only.
pub trait Config: Clone + std::fmt::Debug + Default + Send + Sync + 'static {
    /// What the component is, from the struct's documentation.
    const ABOUT: &'static str;

    /// All fields, in the order of definition; those of included structs first.
    fn fields() -> Vec<Field>;

    /// Sets one field. `None`: there is no such field. The error says what was given and what is expected.
    fn set(&mut self, key: &str, value: &Plain) -> Option<Result<(), String>>;

    /// The value of one field; `None` when it is unset or there is no such field.
    fn get(&self, key: &str) -> Option<Plain>;
}
