//! The `tojson` filter with the spacing of Python's `json.dumps`, which models saw in training, and without HTML escapes.

use std::io::{self, Write};

use minijinja::value::Kwargs;
use minijinja::{Error, ErrorKind, Value};
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};

pub(super) fn to_json(value: Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = options.get("indent")?;
    // Accepted but without effect: non-ASCII text is never escaped here.
    let _: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    let text = match indent {
        Some(width) => write(&value, PrettyFormatter::with_indent(" ".repeat(width.min(16)).as_bytes())),
        None => write(&value, Spaced),
    };
    text.map(Value::from_safe_string)
}

fn write<F: Formatter>(value: &Value, formatter: F) -> Result<String, Error> {
    let fail = |e: &dyn std::fmt::Display| Error::new(ErrorKind::BadSerialization, e.to_string());
    let mut out = Vec::new();
    value.serialize(&mut Serializer::with_formatter(&mut out, formatter)).map_err(|e| fail(&e))?;
    String::from_utf8(out).map_err(|e| fail(&e))
}

/// Writes on one line, with the separators `, ` and `: `.
struct Spaced;

impl Spaced {
    fn separate<W: ?Sized + Write>(writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }
}

impl Formatter for Spaced {
    fn begin_array_value<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        Self::separate(writer, first)
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        Self::separate(writer, first)
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}
