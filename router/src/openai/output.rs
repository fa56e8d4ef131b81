//! The fields that constrain the answer: `response_format`, and the `guided_*` fields known from other servers.

use baton_grammar::{choice, json_schema};
use baton_types::Constraint;
use serde_json::{Value, json};

use super::types::{CommonFields, NamedSchema, ResponseFormat};
use crate::error::RequestError;
use crate::prompt::Wanted;

/// Longest name of a schema, bytes. It may have letters, digits, `_` and `-`.
const MAX_NAME: usize = 64;

/// The constraint that these fields ask for. More than one is an error.
pub(super) fn wanted(fields: &mut CommonFields) -> Result<Option<Wanted>, RequestError> {
    let format = fields.response_format.take().map(response_format).transpose()?.flatten();
    let guided = [
        ("guided_json", fields.guided_json.take().map(guided_schema).transpose()?),
        ("guided_regex", fields.guided_regex.take().map(Constraint::Regex)),
        ("guided_choice", fields.guided_choice.take().map(one_of).transpose()?),
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
fn guided_schema(schema: Value) -> Result<Constraint, RequestError> {
    let Value::String(text) = &schema else { return Ok(json_schema(&schema)) };
    let parsed = serde_json::from_str(text).map_err(|e| {
        let wrong = format!("guided_json is a string that is not JSON: {e}; it must be a JSON schema");
        RequestError::invalid("guided_json", wrong)
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

fn one_of(texts: Vec<String>) -> Result<Constraint, RequestError> {
    if texts.is_empty() || texts.iter().any(String::is_empty) {
        let wrong = "guided_choice must be a list of at least one text, none of them empty";
        return Err(RequestError::invalid("guided_choice", wrong));
    }
    Ok(choice(&texts))
}
