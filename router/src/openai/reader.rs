//! Splits a choice's text into thoughts, text and calls, for whole and for streamed answers.

use baton_types::FinishReason;
use compact_str::CompactString;

use crate::reasoning::{Reasoning, Split};
use crate::tools::{Call, Read, ToolParser};

/// Splits one choice's text into thoughts, text and calls.
#[derive(Clone, Debug, Default)]
pub(crate) struct Reader {
    /// None: there are no thoughts.
    reasoning: Option<Reasoning>,
    /// None: there are no calls.
    parser: Option<ToolParser>,
    /// Thoughts are split off and dropped.
    hides: bool,
    /// Pieces that belong to the thoughts; about as many tokens.
    thought: u32,
}

/// What a choice said.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Said {
    pub reasoning: String,
    pub text: CompactString,
    pub calls: Vec<Call>,
}

impl Reader {
    /// A reader that has read nothing yet. `hides`: nobody wants the thoughts.
    pub fn new(reasoning: Option<Reasoning>, hides: bool, parser: Option<ToolParser>) -> Reader {
        Reader { reasoning, parser, hides, thought: 0 }
    }

    /// Takes the text of the next token.
    pub fn push(&mut self, text: CompactString) -> Said {
        let Some(reasoning) = &mut self.reasoning else { return self.read(Split { text, ..Split::default() }, false) };
        let split = reasoning.push(&text);
        self.thought += u32::from(!text.is_empty() && reasoning.thinks());
        self.read(split, false)
    }

    /// Ends the choice, and returns what was held back.
    pub fn finish(&mut self) -> Said {
        let split = self.reasoning.as_mut().map(Reasoning::finish).unwrap_or_default();
        self.read(split, true)
    }

    fn read(&mut self, split: Split, ended: bool) -> Said {
        let Split { reasoning, text } = split;
        let reasoning = if self.hides { String::new() } else { reasoning };
        let Some(parser) = &mut self.parser else { return Said { reasoning, text, calls: Vec::new() } };
        let Read { mut text, mut calls } = if text.is_empty() { Read::default() } else { parser.push(&text) };
        if ended {
            let rest = parser.finish();
            text += &rest.text;
            calls.extend(rest.calls);
        }
        Said { reasoning, text: text.into(), calls }
    }

    /// Tokens of the thoughts so far.
    pub fn thought(&self) -> u32 {
        self.thought
    }

    /// Why the choice ended, in the API's words. A choice that stopped after calls reports `tool_calls`.
    pub fn finish_reason(&self, reason: FinishReason) -> &'static str {
        match reason {
            FinishReason::Stop if self.parser.as_ref().is_some_and(ToolParser::called) => "tool_calls",
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
            FinishReason::Cancelled => "cancelled",
        }
    }
}
