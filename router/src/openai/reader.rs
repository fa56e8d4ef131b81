//! Between a choice's text and the answer's JSON: what is text and what is a call, whole or streamed.

use baton_types::FinishReason;

use crate::tools::{Read, ToolParser};

/// One choice's text on its way to text and calls.
#[derive(Clone, Debug)]
pub(crate) struct Reader(Option<ToolParser>);

impl Reader {
    /// Passes text through when there is no parser.
    pub fn new(parser: Option<ToolParser>) -> Reader {
        Reader(parser)
    }

    /// Takes the next piece.
    pub fn push(&mut self, text: &str) -> Read {
        match &mut self.0 {
            Some(parser) => parser.push(text),
            None => Read { text: text.to_owned(), calls: Vec::new() },
        }
    }

    /// The choice has ended.
    pub fn finish(&mut self) -> Read {
        self.0.as_mut().map(ToolParser::finish).unwrap_or_default()
    }

    /// Why the choice ended, in the API's words: one that made calls stops for them.
    pub fn finish_reason(&self, reason: FinishReason) -> &'static str {
        match reason {
            FinishReason::Stop if self.0.as_ref().is_some_and(ToolParser::called) => "tool_calls",
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
            FinishReason::Cancelled => "cancelled",
        }
    }
}
