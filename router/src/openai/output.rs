//! The fields that constrain the answer: `response_format`, and those known from other servers: `structured_outputs`, and the older
//! `guided_*`.

use baton_grammar::{choice, json_schema};
use baton_types::Constraint;
use serde_json::{Value, json};

use super::types::{CommonFields, NamedSchema, ResponseFormat, StructuredOutputs};
use crate::error::RequestError;
use crate::prompt::Wanted;

/// Longest name of a schema, bytes. It may have letters, digits, `_` and `-`.
const MAX_NAME: usize = 64;

/// The constraint that these fields ask for. More than one is an error.
pub(super) fn wanted(fields: &mut CommonFields) -> Result<Option<Wanted>, RequestError> {
    let format = fields.response_format.take().map(response_format).transpose()?.flatten();
    let structured = fields.structured_outputs.take();
    let StructuredOutputs { json, json_object, regex, choice, grammar } = structured.unwrap_or_default();
    let object = json_object.unwrap_or(false).then(|| json_schema(&json!({"type": "object"})));
    let schema = |field, schema: Option<Value>| schema.map(|schema| guided_schema(field, schema)).transpose();
    let choices = |field, texts: Option<Vec<String>>| texts.map(|texts| one_of(field, texts)).transpose();
    let guided = [
        ("structured_outputs.json", schema("structured_outputs.json", json)?),
        ("structured_outputs.json_object", object),
        ("structured_outputs.regex", regex.map(Constraint::Regex)),
        ("structured_outputs.choice", choices("structured_outputs.choice", choice)?),
        ("structured_outputs.grammar", grammar.map(Constraint::Lark)),
        ("guided_json", schema("guided_json", fields.guided_json.take())?),
        ("guided_regex", fields.guided_regex.take().map(Constraint::Regex)),
        ("guided_choice", choices("guided_choice", fields.guided_choice.take())?),
        ("guided_grammar", fields.guided_grammar.take().map(Constraint::Lark)),
    ];
    let guided =
        guided.into_iter().filter_map(|(field, constraint)| Some(Wanted { field, constraint: constraint?.into() }));
    let mut all = format.into_iter().chain(guided);
    let (first, second) = (all.next(), all.next());
    match (&first, second) {
        (Some(first), Some(second)) => {
            let wrong = format!("{} and {} cannot be used together; leave one out", first.field, second.field);
            Err(RequestError::invalid(second.field, wrong))
        }
        _ => Ok(first),
    }
}

/// A schema, given as JSON or as a string that contains JSON.
fn guided_schema(field: &'static str, schema: Value) -> Result<Constraint, RequestError> {
    let Value::String(text) = &schema else { return Ok(json_schema(&schema)) };
    let parsed = serde_json::from_str(text).map_err(|e| {
        let wrong = format!("{field} is a string that is not JSON: {e}; it must be a JSON schema");
        RequestError::invalid(field, wrong)
    });
    Ok(json_schema(&parsed?))
}

fn response_format(format: ResponseFormat) -> Result<Option<Wanted>, RequestError> {
    let constraint = match format.kind.as_str() {
        "text" => return Ok(None),
        "json_object" => {
            return Ok(Some(Wanted {
                field: "response_format",
                constraint: json_schema(&json!({"type": "object"})).into(),
            }));
        }
        "json_schema" => named_schema(format.json_schema)?,
        other => {
            let wrong = format!("response_format.type is {other:?}; it must be text, json_object or json_schema");
            return Err(RequestError::invalid("response_format.type", wrong));
        }
    };
    Ok(Some(Wanted { field: "response_format.json_schema.schema", constraint: constraint.into() }))
}

fn named_schema(named: Option<NamedSchema>) -> Result<Constraint, RequestError> {
    let missing =
        |field: &str, what: &str| RequestError::invalid(field, format!("{field} is missing; it must be {what}"));
    let field = "response_format.json_schema";
    let named = named.ok_or_else(|| missing(field, "an object with a name and a schema"))?;
    let field = "response_format.json_schema.name";
    let name = named.name.ok_or_else(|| missing(field, "a name for the schema"))?;
    let good = |b: u8| b.is_ascii_alphanumeric() || b == b'_' || b == b'-';
    if name.is_empty() || name.len() > MAX_NAME || !name.bytes().all(good) {
        let wrong = format!("{field} is {name:?}; it must be 1 to {MAX_NAME} letters, digits, _ or -");
        return Err(RequestError::invalid(field, wrong));
    }
    let schema = named.schema.ok_or_else(|| missing("response_format.json_schema.schema", "a JSON schema"))?;
    Ok(json_schema(&schema))
}

fn one_of(field: &'static str, texts: Vec<String>) -> Result<Constraint, RequestError> {
    if texts.is_empty() || texts.iter().any(String::is_empty) {
        let wrong = format!("{field} must be a list of at least one text, none of them empty");
        return Err(RequestError::invalid(field, wrong));
    }
    Ok(choice(&texts))
}
