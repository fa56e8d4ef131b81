//! What a whole answer must look like, as it travels from the router to the workers' samplers. Text only: what it means,
//! and whether it can be compiled, is `crates/grammar`'s affair.

use crate::sampling::SamplingError;

/// The language that every answer of a request belongs to.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Constraint {
    /// JSON that a JSON schema accepts; the schema as JSON text.
    JsonSchema(String),
    /// Text that a regular expression matches as a whole.
    Regex(String),
    /// Text of a context-free grammar, in the Lark dialect of `llguidance`; it begins at the rule `start`.
    Lark(String),
}

impl Constraint {
    /// Bytes of text a constraint may have (I5).
    pub const MAX_BYTES: usize = 128 << 10;

    /// The schema, expression or grammar itself.
    pub fn text(&self) -> &str {
        match self {
            Constraint::JsonSchema(text) | Constraint::Regex(text) | Constraint::Lark(text) => text,
        }
    }

    pub(crate) fn validate(&self) -> Result<(), SamplingError> {
        let bytes = self.text().len();
        if (1..=Constraint::MAX_BYTES).contains(&bytes) {
            return Ok(());
        }
        Err(SamplingError { field: "constraint", value: format!("{bytes} bytes"), range: "1 to 131072 bytes" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_is_bounded() {
        let of = |bytes: usize| Constraint::Regex("a".repeat(bytes)).validate().map_err(|e| e.to_string());
        assert_eq!((of(1), of(Constraint::MAX_BYTES)), (Ok(()), Ok(())));
        assert_eq!(of(0), Err("constraint is 0 bytes; it must be 1 to 131072 bytes".to_owned()));
        assert!(of(Constraint::MAX_BYTES + 1).is_err());
    }
}
