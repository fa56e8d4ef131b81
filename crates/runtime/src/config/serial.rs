//! A whole configuration in serde's form, and as commented TOML.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde::de::{Deserialize, Deserializer, Error};
use serde::ser::{SerializeMap, Serializer};

use super::{Config, Plain, nearest};

/// Serialises as a flat map of the fields that are set.
pub fn serialize<T: Config, S: Serializer>(config: &T, to: S) -> Result<S::Ok, S::Error> {
    let mut map = to.serialize_map(None)?;
    for field in T::fields() {
        if let Some(value) = config.get(field.key) {
            map.serialize_entry(field.key, &value)?;
        }
    }
    map.end()
}

/// Deserialises a flat map over the defaults. An unknown field is an error that names the nearest known one.
pub fn deserialize<'de, T: Config, D: Deserializer<'de>>(from: D) -> Result<T, D::Error> {
    let entries = BTreeMap::<String, Plain>::deserialize(from)?;
    let mut config = T::default();
    for (key, value) in entries {
        match config.set(&key, &value) {
            Some(Ok(())) => {}
            Some(Err(problem)) => return Err(D::Error::custom(format!("{key}: {problem}"))),
            None => {
                let fields = T::fields();
                let hint = nearest(&key, fields.iter().map(|f| f.key)).unwrap_or("another name");
                return Err(D::Error::custom(format!("unknown field {key:?}; did you mean {hint:?}?")));
            }
        }
    }
    Ok(config)
}

/// The configuration as a TOML file that reads back to the same values. Each field stands under its help text and is
/// followed by the comment `note(key)`: where the value came from. Unset fields become comments.
pub fn to_toml<T: Config>(config: &T, note: impl Fn(&str) -> String) -> String {
    let mut out = String::new();
    for field in T::fields() {
        for line in field.help.trim_end().lines() {
            let _ = writeln!(out, "# {}", line.trim());
        }
        // Writing to a String cannot fail.
        let _ = match config.get(field.key) {
            Some(value) => writeln!(out, "{} = {}  # {}\n", field.key, toml_value(value), note(field.key)),
            None => writeln!(out, "# {} is not set; it would be {}\n", field.key, field.expects),
        };
    }
    out
}

fn toml_value(value: Plain) -> toml::Value {
    match value {
        Plain::Bool(v) => toml::Value::Boolean(v),
        Plain::Int(v) => toml::Value::Integer(v),
        Plain::Float(v) => toml::Value::Float(v),
        Plain::Text(v) => toml::Value::String(v),
        Plain::List(v) => toml::Value::Array(v.into_iter().map(toml::Value::String).collect()),
    }
}
