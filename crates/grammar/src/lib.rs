//! Structured output: turns a [`baton_types::Constraint`] into the tokens that may come next.
//!
//! The router compiles a constraint early, to refuse a bad one before any work is done ([`Grammars::prepare`]). The sampler masks logits
//! with it ([`Matchers::mask`]). `llguidance` matches grammars. This crate gives it the model's vocabulary, sets its limits, and keeps
//! its state a function of the constraint and the generated tokens (I1). It knows no requests, schedulers or sockets.

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
