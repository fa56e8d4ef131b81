//! JSON that comes inside of texts, such as the arguments of calls. It is small as text and large once it is read (I5).

use serde_json::Value;

use crate::body::count;
use crate::error::RequestError;

/// Most elements, names and texts that it may have in one request, all together.
const MAX_VALUES: usize = 256 << 10;

/// How many the texts of a request may still have.
pub(crate) struct Embedded {
    left: usize,
}

impl Default for Embedded {
    fn default() -> Embedded {
        Embedded { left: MAX_VALUES }
    }
}

impl Embedded {
    /// The JSON in a field's text; None if it is none.
    pub fn read(&mut self, field: &str, text: &str) -> Result<Option<Value>, RequestError> {
        let (values, elements) = count(text.as_bytes());
        let Some(left) = self.left.checked_sub(values + elements) else {
            let wrong = format!(
                "{field} has {} elements, names and texts; at most {MAX_VALUES} are allowed in such fields of one request, and {} are left",
                values + elements,
                self.left
            );
            return Err(RequestError::invalid(field, wrong));
        };
        self.left = left;
        Ok(serde_json::from_str(text).ok())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn json_in_texts_is_bounded_over_a_request() {
        let mut embedded = Embedded::default();
        assert_eq!(embedded.read("a", "{\"b\":[1,2]}").unwrap(), Some(json!({"b": [1, 2]})));
        assert_eq!(embedded.read("a", "{").unwrap(), None);
        let many = |count: usize| format!("[{}0]", "0,".repeat(count));
        assert!(embedded.read("a", &many(MAX_VALUES / 2)).unwrap().is_some());
        let error = embedded.read("a", &many(MAX_VALUES / 2)).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("a"));
        assert!(error.message.starts_with("a has 131073 elements"), "{error}");
        assert!(embedded.read("a", &many(9)).is_ok(), "what is refused is not counted");
    }
}
