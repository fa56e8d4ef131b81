//! Structured output: from a [`baton_types::Constraint`] to the tokens that may come next.
//!
//! The router compiles a constraint to refuse a bad one before anything is spent ([`Grammars::prepare`]); the sampler
//! masks logits with it ([`Matchers::mask`]). Grammars are matched by `llguidance`; this crate gives it the model's
//! vocabulary, bounds it, and keeps its state a function of the constraint and the tokens generated (I1). Knows no
//! requests, schedulers or sockets.

#![forbid(unsafe_code)]

mod compose;
mod error;
mod grammars;
mod matchers;
mod vocabulary;

pub use compose::{choice, json_rule, json_schema, literal};
pub use error::GrammarError;
pub use grammars::Grammars;
pub use matchers::Matchers;
