//! Splits a choice's text into text and calls, for whole and for streamed answers.

use baton_types::FinishReason;

use crate::tools::{Read, ToolParser};

/// Splits one choice's text into text and calls.
#[derive(Clone, Debug)]
pub(crate) struct Reader(Option<ToolParser>);

impl Reader {
    /// A reader. Without a parser it passes all text through.
    pub fn new(parser: Option<ToolParser>) -> Reader {
        Reader(parser)
    }

    /// Takes the next piece.
    pub fn push(&mut self, text: String) -> Read {
        match &mut self.0 {
            Some(parser) => parser.push(&text),
            None => Read { text, calls: Vec::new() },
        }
    }

    /// Ends the choice, and returns what was held back.
    pub fn finish(&mut self) -> Read {
        self.0.as_mut().map(ToolParser::finish).unwrap_or_default()
    }

    /// Why the choice ended, in the API's words. A choice that stopped after calls reports `tool_calls`.
    pub fn finish_reason(&self, reason: FinishReason) -> &'static str {
        match reason {
            FinishReason::Stop if self.0.as_ref().is_some_and(ToolParser::called) => "tool_calls",
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
            FinishReason::Cancelled => "cancelled",
        }
    }
}
