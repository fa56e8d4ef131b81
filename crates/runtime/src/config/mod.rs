//! What a component's configuration is: a struct whose every field is defined once, with [`crate::config!`].
//!
//! From that one definition follow the key in a file (`drain_timeout`), the flag (`--drain-timeout`), the environment
//! variable (`BATON_DRAIN_TIMEOUT`), the default, the help text and the errors. How the sources are read and merged is
//! `command.rs`; this folder knows neither clap nor files.

mod macros;
mod serial;
mod units;
mod value;

pub use serial::{deserialize, serialize, to_toml};
pub use units::{Bytes, format_duration, parse_duration};
pub use value::{Parsed, Plain, Value};

#[doc(hidden)]
pub use serde;

/// One field, as help texts and loaders see it.
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
    /// Its flag, without the dashes.
    pub fn flag(&self) -> String {
        self.key.replace('_', "-")
    }

    /// Its environment variable.
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

    /// The value of one field; `None` when it is unset, or is no field.
    fn get(&self, key: &str) -> Option<Plain>;
}

/// The name in `names` most like `word`, if one is close enough to be what was meant.
pub fn nearest<'a>(word: &str, names: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    nearest_within(word, names, usize::MAX)
}

/// The same, at most `most` edits away.
pub fn nearest_within<'a>(word: &str, names: impl IntoIterator<Item = &'a str>, most: usize) -> Option<&'a str> {
    let limit = (word.chars().count() / 3 + 1).min(most);
    names.into_iter().map(|name| (distance(word, name), name)).filter(|(d, _)| *d <= limit).min().map(|(_, name)| name)
}

/// Edits (insert, delete, replace) between two words.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.iter().enumerate() {
            let replace = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = replace.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_name_is_near_or_absent() {
        let names = ["http", "grpc", "drain_timeout"];
        assert_eq!(nearest("htpp", names), Some("http"));
        assert_eq!(nearest("drain_timout", names), Some("drain_timeout"));
        assert_eq!(nearest("drain-timeout", names), Some("drain_timeout"));
        assert_eq!(nearest("colour", names), None);
        assert_eq!(nearest_within("drain_time", names, 2), None);
        assert_eq!(nearest_within("drain_timeo", names, 2), Some("drain_timeout"));
        assert_eq!(distance("kitten", "sitting"), 3);
        assert_eq!(distance("", "abc"), 3);
    }
}
