//! What a whole answer must look like, as it travels from the router to the workers' samplers. Text only: what it means,
//! and whether it can be compiled, is `crates/grammar`'s affair.

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
}
