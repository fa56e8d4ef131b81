//! The constraint on a whole answer, as it travels from the router to the workers' samplers. It is text only: `crates/grammar` interprets
//! and compiles it.

/// The language that an answer must belong to.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Constraint {
    /// JSON that a JSON schema accepts. Holds the schema as JSON text.
    JsonSchema(String),
    /// Text that a regular expression matches as a whole. Holds the expression.
    Regex(String),
    /// Text that a context-free grammar accepts, beginning at its rule `start`. Holds the grammar in the Lark dialect of `llguidance`.
    Lark(String),
}

impl Constraint {
    /// Most bytes of a constraint's text (I5).
    pub const MAX_BYTES: usize = 128 << 10;

    /// The schema, expression or grammar itself.
    pub fn text(&self) -> &str {
        match self {
            Constraint::JsonSchema(text) | Constraint::Regex(text) | Constraint::Lark(text) => text,
        }
    }
}
