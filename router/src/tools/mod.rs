//! Functions a model may call. The prompt describes them, calls are read out of the answer, and a grammar forces a call where
//! the client asks for one.
//!
//! The chat template defines how a model writes calls ([`ToolSyntax`]). A model whose template knows no tools can still be
//! made to call: the prompt explains it in words (`plain.rs`), and the grammar does the rest. Pure.

mod grammar;
mod parser;
mod plain;

use std::sync::Arc;

use baton_model_text::ToolSyntax;
use baton_types::random_u64;
use serde_json::Value;

pub(crate) use grammar::grammar;
pub(crate) use parser::{Read, ToolParser, begun};
pub(crate) use plain::plain;

/// The tools of one request, at least one.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Tools {
    /// The tools as the client sent them.
    pub specs: Vec<Value>,
    /// The functions' names, in the same order.
    pub names: Arc<[String]>,
    /// Whether a tool must be called.
    pub choice: Choice,
    /// Whether an answer may have more than one call.
    pub parallel: bool,
}

/// Whether a tool must be called.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Choice {
    /// The model decides.
    Auto,
    /// At least one call, of any tool.
    Required,
    /// A call of this tool, by its index in the list.
    Named(usize),
}

impl Tools {
    /// The tools that an answer may call, each with its parameters' schema. A named choice leaves only that tool.
    fn callable(&self) -> impl Iterator<Item = (&str, Option<&Value>)> {
        let wanted = move |at: usize| !matches!(self.choice, Choice::Named(only) if only != at);
        let all = self.names.iter().zip(&self.specs).enumerate().filter(move |(at, _)| wanted(*at));
        all.map(|(_, (name, spec))| (name.as_str(), spec.pointer("/function/parameters").filter(|p| !p.is_null())))
    }

    /// A parser for one answer.
    pub fn parser(&self, syntax: ToolSyntax) -> ToolParser {
        let parser = ToolParser::new(syntax, Arc::clone(&self.names), self.parallel);
        if self.choice == Choice::Auto { parser } else { parser.forced() }
    }
}

/// A call the model made.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Call {
    /// Index of the call in the answer, from 0.
    pub index: u32,
    /// The id that the call's result refers to. Nine letters and digits: some templates refuse anything else.
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
