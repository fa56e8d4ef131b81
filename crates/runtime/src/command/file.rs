//! A configuration file as a flat list of keys and plain values, each with its line.

use std::path::Path;

use toml::de::{DeTable, DeValue};

use crate::config::Plain;
use crate::error::{Origin, RuntimeError};

/// One `key = value`.
pub(super) struct Entry {
    pub key: String,
    pub value: Plain,
    pub origin: Origin,
}

/// All entries, sorted by key.
pub(super) fn entries(path: &Path, text: &str) -> Result<Vec<Entry>, RuntimeError> {
    let at = |offset: usize| {
        let before = text.as_bytes().get(..offset).unwrap_or_default();
        Origin::File(path.to_owned(), before.iter().filter(|byte| **byte == b'\n').count() + 1)
    };
    let table = DeTable::parse(text).map_err(|e| RuntimeError::Syntax {
        origin: at(e.span().map_or(0, |span| span.start)),
        problem: e.message().to_owned(),
    })?;
    let mut entries = Vec::new();
    for (key, value) in table.into_inner() {
        let origin = at(key.span().start);
        let field = key.into_inner().into_owned();
        match plain(value.get_ref()) {
            Ok(value) => entries.push(Entry { key: field, value, origin }),
            Err(problem) => return Err(RuntimeError::Value { field, problem: problem.to_owned(), origin }),
        }
    }
    Ok(entries)
}

fn plain(value: &DeValue<'_>) -> Result<Plain, &'static str> {
    match value {
        DeValue::String(text) => Ok(Plain::Text(text.to_string())),
        DeValue::Boolean(flag) => Ok(Plain::Bool(*flag)),
        // A number too large for an i64 stays text, which wider types can still read.
        DeValue::Integer(number) => Ok(i64::from_str_radix(number.as_str(), number.radix())
            .map_or_else(|_| Plain::Text(number.as_str().to_owned()), Plain::Int)),
        DeValue::Float(number) => number.as_str().parse().map(Plain::Float).map_err(|_| "is not a number"),
        DeValue::Array(items) => {
            items.iter().map(|item| text(item.get_ref())).collect::<Result<_, _>>().map(Plain::List)
        }
        DeValue::Datetime(_) => Err("is a date; put it in quotes"),
        DeValue::Table(_) => Err("is a section; fields stand at the top of the file"),
    }
}

fn text(item: &DeValue<'_>) -> Result<String, &'static str> {
    match item {
        DeValue::String(text) => Ok(text.to_string()),
        _ => Err("has an item that is no text; put each item in quotes"),
    }
}
