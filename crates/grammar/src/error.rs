//! Errors of a constraint, or of an answer under it.

use baton_types::{BatonError, Constraint, ErrorKind};

/// Most characters of the compiler's message that are passed on.
const LONGEST_REASON: usize = 400;

/// Any failure of this crate.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum GrammarError {
    /// The constraint is invalid, or larger than the limits allow.
    #[error("the {what} cannot be used: {reason}")]
    Refused {
        /// Kind of constraint: schema, expression or grammar.
        what: &'static str,
        /// The compiler's message.
        reason: String,
    },
    /// No token can follow the answer so far, or finding out takes more than the limits allow.
    #[error("the answer cannot go on under its {what} after {tokens} tokens: {reason}")]
    Stuck {
        /// Kind of constraint: schema, expression or grammar.
        what: &'static str,
        /// Tokens of the answer so far.
        tokens: usize,
        /// The matcher's message.
        reason: String,
    },
    /// The model's vocabulary cannot be indexed.
    #[error("structured output is not possible with this model's vocabulary: {0}")]
    Vocabulary(String),
}

impl BatonError for GrammarError {
    fn kind(&self) -> ErrorKind {
        match self {
            // Another worker would give the same error.
            GrammarError::Refused { .. } | GrammarError::Stuck { .. } => ErrorKind::InvalidArgument,
            GrammarError::Vocabulary(_) => ErrorKind::Internal,
        }
    }
}

impl GrammarError {
    pub(crate) fn refused(constraint: &Constraint, reason: impl ToString) -> GrammarError {
        GrammarError::Refused { what: what(constraint), reason: brief(&reason.to_string()) }
    }

    pub(crate) fn stuck(constraint: &Constraint, tokens: usize, reason: impl ToString) -> GrammarError {
        GrammarError::Stuck { what: what(constraint), tokens, reason: brief(&reason.to_string()) }
    }
}

fn what(constraint: &Constraint) -> &'static str {
    match constraint {
        Constraint::JsonSchema(_) => "JSON schema",
        Constraint::Regex(_) => "regular expression",
        Constraint::Lark(_) => "grammar",
    }
}

/// The first line of a message, shortened. Backtraces, dumps and excerpts follow that line.
fn brief(said: &str) -> String {
    let said = said.lines().next().unwrap_or_default().trim();
    // The position of an expression in the grammar that wraps it means nothing to the client.
    let said = said.strip_prefix("at 1(8): ").unwrap_or(said);
    match said {
        "NoExtensionBias" => return "nothing can follow".to_owned(),
        panic if panic.starts_with("panic: ") => return "the compiler failed on it".to_owned(),
        _ => {}
    }
    match said.char_indices().nth(LONGEST_REASON) {
        Some((at, _)) => format!("{}…", &said[..at]),
        None => said.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_brief() {
        let of = |said: &str| GrammarError::refused(&Constraint::Regex("x".to_owned()), said).to_string();
        assert_eq!(of("bad (\n<non-verbose/>"), "the regular expression cannot be used: bad (");
        assert!(of("panic: x\n<backtrace>\n1\n</backtrace>").ends_with("the compiler failed on it"));
        assert!(of(&"é".repeat(9000)).chars().count() < 500);
    }
}
