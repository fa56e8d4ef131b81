//! Composes grammars from parts: schemas, literal texts, choices.

use baton_types::Constraint;
use serde_json::{Value, json};

use crate::GrammarError;

/// White space allowed between the parts of JSON: one space, or a line break and an indent. It is bounded so that a model that likes white
/// space cannot fill the answer with it (I5).
const WHITE_SPACE: &str = " |\n {0,16}";

/// A constraint to JSON that a schema accepts. Clients cannot set schema keys that change how it is compiled.
pub fn json_schema(schema: &Value) -> Constraint {
    Constraint::JsonSchema(schema.to_string())
}

/// A constraint to one of several texts.
pub fn choice(texts: &[String]) -> Constraint {
    let all: Vec<String> = texts.iter().map(|text| literal(text)).collect();
    Constraint::Lark(format!("start: {}", all.join(" | ")))
}

/// A text, as part of a Lark rule.
pub fn literal(text: &str) -> String {
    // The Lark dialect writes strings as JSON does.
    Value::from(text).to_string()
}

/// JSON that a schema accepts, as part of a Lark rule.
pub fn json_rule(schema: &Value) -> String {
    format!("%json {}", with_options(schema.clone()))
}

fn with_options(mut schema: Value) -> Value {
    if let Value::Object(keys) = &mut schema {
        keys.insert("x-guidance".to_owned(), json!({"whitespace_pattern": WHITE_SPACE}));
    }
    schema
}

/// Parses the schema of a constraint and sets the compiler's options in it.
pub(crate) fn parse_schema(text: &str, constraint: &Constraint) -> Result<Value, GrammarError> {
    let schema: Value = serde_json::from_str(text).map_err(|e| GrammarError::refused(constraint, e))?;
    match schema {
        Value::Object(_) => Ok(with_options(schema)),
        Value::Bool(true) => Ok(with_options(json!({}))),
        _ => Err(GrammarError::refused(constraint, "a schema is an object")),
    }
}
