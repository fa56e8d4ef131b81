//! Parses bytes into a typed request. An error says which field is wrong, or where the JSON breaks.

use serde::de::DeserializeOwned;
use serde_json::error::Category;

use crate::error::RequestError;

/// serde's phrases for types, and plain English for them.
const WORDS: [(&str, &str); 8] = [
    ("expected f32", "expected a number"),
    ("expected u32", "expected a whole number, 0 or above"),
    ("expected u64", "expected a whole number, 0 or above"),
    ("expected a JSON number", "expected a number"),
    ("expected a boolean", "expected true or false"),
    ("expected a sequence", "expected an array"),
    ("expected a map", "expected an object"),
    ("expected struct ", "expected an object, a "),
];

/// Reads `body` as a `T`. Skips fields that `T` does not have.
pub(crate) fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, RequestError> {
    serde_json::from_slice(body).or_else(|_| explained(body))
}

/// Reads a bad body once more. This way takes longer, and says which field is wrong.
fn explained<T: DeserializeOwned>(body: &[u8]) -> Result<T, RequestError> {
    let mut json = serde_json::Deserializer::from_slice(body);
    let value = serde_path_to_error::deserialize(&mut json).map_err(|e| refused(&e))?;
    json.end().map_err(|e| syntax(&e))?;
    Ok(value)
}

fn refused(error: &serde_path_to_error::Error<serde_json::Error>) -> RequestError {
    let inner = error.inner();
    if inner.classify() != Category::Data {
        return syntax(inner);
    }
    let path = error.path().to_string();
    let mut said = inner.to_string();
    if let Some(at) = said.rfind(" at line ") {
        said.truncate(at);
    }
    for (serde, person) in WORDS {
        said = said.replace(serde, person);
    }
    match path.as_str() {
        "." | "?" => RequestError::new(baton_types::ErrorKind::InvalidArgument, said),
        _ => RequestError::invalid(path.clone(), format!("{path}: {said}")),
    }
}

fn syntax(error: &serde_json::Error) -> RequestError {
    let mut said = error.to_string();
    if let Some(at) = said.rfind(" at line ") {
        said.truncate(at);
    }
    let wrong = format!("the body is not valid JSON: {said} at line {}, column {}", error.line(), error.column());
    RequestError::new(baton_types::ErrorKind::InvalidArgument, wrong).code("invalid_json")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;

    #[derive(Debug, Deserialize)]
    struct Inner {
        #[allow(dead_code)]
        text: String,
    }

    #[derive(Debug, Deserialize)]
    struct Outer {
        #[allow(dead_code)]
        temperature: Option<f32>,
        #[allow(dead_code)]
        n: Option<u32>,
        #[allow(dead_code)]
        parts: Vec<Inner>,
    }

    #[test]
    fn the_error_names_the_field_or_the_place() {
        let cases = [
            (r#"{"parts":[{"text":"a"},{"text":5}]}"#, Some("parts[1].text"), "expected a string"),
            (r#"{"parts":[],"temperature":"hot"}"#, Some("temperature"), "expected a number"),
            (r#"{"parts":[],"n":-1}"#, Some("n"), "expected a whole number, 0 or above"),
            (r#"{"parts":{}}"#, Some("parts"), "expected an array"),
            (r#"{"n":1}"#, None, "missing field `parts`"),
            ("{\n \"parts\": [}", None, "line 2, column 12"),
            ("{\"parts\":[]", None, "not valid JSON"),
            ("{\"parts\":[]} x", None, "not valid JSON"),
            ("", None, "not valid JSON"),
            ("\u{1}", None, "not valid JSON"),
        ];
        for (body, param, text) in cases {
            let error = parse::<Outer>(body.as_bytes()).unwrap_err();
            assert_eq!(error.param.as_deref(), param, "{body}: {error}");
            assert!(error.message.contains(text), "{body}: {error}");
        }
    }
}
