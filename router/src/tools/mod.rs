//! Functions a model may call: told to it in the prompt, read out of its answer, and forced by a grammar where the client asks.
//!
//! How a model writes calls is its template's affair ([`ToolSyntax`]). One whose template knows no tools can still be made to
//! call: it is told in words (`plain.rs`), and the grammar does the rest. Pure.

mod grammar;
mod parser;
mod plain;

use std::sync::Arc;

use baton_model_text::ToolSyntax;
use serde_json::Value;

use crate::random::random_u64;
pub(crate) use grammar::grammar;
pub(crate) use parser::{Read, ToolParser};
pub(crate) use plain::plain;

/// The tools of one request, at least one.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Tools {
    /// As the client sent them.
    pub specs: Vec<Value>,
    /// Their names, in the same order.
    pub names: Arc<[String]>,
    /// Whether they must be called.
    pub choice: Choice,
    /// Whether an answer may have more than one call.
    pub parallel: bool,
}

/// Whether a tool is to be called.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Choice {
    /// As the model likes.
    Auto,
    /// At least one, whichever.
    Required,
    /// This one; its place in the list.
    Named(usize),
}

impl Tools {
    /// The tools an answer may call; with a forced choice nothing else is in it.
    fn callable(&self) -> impl Iterator<Item = (&str, Option<&Value>)> {
        let wanted = move |at: usize| !matches!(self.choice, Choice::Named(only) if only != at);
        let all = self.names.iter().zip(&self.specs).enumerate().filter(move |(at, _)| wanted(*at));
        all.map(|(_, (name, spec))| (name.as_str(), spec.pointer("/function/parameters").filter(|p| !p.is_null())))
    }

    /// Reads one answer.
    pub fn parser(&self, syntax: ToolSyntax) -> ToolParser {
        ToolParser::new(syntax, Arc::clone(&self.names), self.parallel)
    }
}

/// A call the model made.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Call {
    /// Its number in the answer.
    pub index: u32,
    /// What its result refers to. Letters and digits only, nine of them: some templates refuse anything else.
    pub id: String,
    /// The function.
    pub name: String,
    /// A JSON object, as the model wrote it.
    pub arguments: String,
}

impl Call {
    fn new(index: u32, name: String, arguments: String) -> Call {
        let id = format!("{:09x}", random_u64() & 0xf_ffff_ffff);
        Call { index, id, name, arguments }
    }
}
