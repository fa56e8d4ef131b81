//! Reads calls out of an answer's text as it arrives.
//!
//! A call is delivered only when it is complete, because only then is it certain to be a call. Text that looked like a call
//! but is none (broken JSON, a function that was not offered) is delivered as text: nothing is lost. What the client gets
//! does not depend on how the text was cut into pieces.
//!
//! Where a call is forced, the answer is nothing else. If its length cuts it off, what there is of the call is delivered.

use std::sync::Arc;

use baton_model_text::ToolSyntax;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::Call;

const CLOSE: &str = "</tool_call>";

/// The parser of one answer.
#[derive(Clone, Debug)]
pub(crate) struct ToolParser {
    syntax: ToolSyntax,
    names: Arc<[String]>,
    parallel: bool,
    /// The answer can be nothing but calls.
    forced: bool,
    /// Text not yet known to be text or a call.
    held: String,
    state: State,
    calls: u32,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// Only white space so far.
    Begin,
    /// After text or a call.
    Text,
    /// `held`, after leading white space, begins with a possible call.
    Call,
    /// No more calls: the rest is text.
    Plain,
}

/// What became certain with a piece of text.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Read {
    /// Text that is not a call.
    pub text: String,
    /// Complete calls.
    pub calls: Vec<Call>,
}

/// A call as models write it.
#[derive(Deserialize)]
struct Written {
    name: String,
    #[serde(alias = "parameters")]
    arguments: Option<Box<RawValue>>,
}

/// What the held text begins with.
enum Verdict {
    /// Not known yet.
    Open,
    /// Calls, and their length in bytes.
    Calls(Vec<Written>, usize),
    /// No call; this many leading bytes are text.
    Text(usize),
}

impl ToolParser {
    /// A parser that has read nothing yet.
    pub fn new(syntax: ToolSyntax, names: Arc<[String]>, parallel: bool) -> ToolParser {
        ToolParser { syntax, names, parallel, forced: false, held: String::new(), state: State::Begin, calls: 0 }
    }

    /// The same for an answer that a grammar lets be nothing but calls.
    pub fn forced(self) -> ToolParser {
        ToolParser { forced: true, ..self }
    }

    /// Takes the next piece.
    pub fn push(&mut self, piece: &str) -> Read {
        self.held.push_str(piece);
        // A call ends with one of these characters. A piece without them cannot complete it.
        let may_complete = self.state != State::Call || piece.contains(['}', ']', '>']);
        let mut read = Read::default();
        if may_complete || !self.plausible() {
            while self.step(&mut read, false) {}
        }
        read
    }

    /// Ends the answer, and returns what the held text is.
    pub fn finish(&mut self) -> Read {
        let mut read = Read::default();
        if self.forced && self.state == State::Call && matches!(self.verdict(true), Verdict::Text(_)) {
            self.cut_off(&mut read);
            return read;
        }
        while self.step(&mut read, true) {}
        let rest = std::mem::take(&mut self.held);
        // White space around calls is dropped.
        if self.calls == 0 || !rest.trim().is_empty() {
            read.text += &rest;
        }
        read
    }

    /// Delivers the calls in `held`, the last of which is not complete.
    fn cut_off(&mut self, read: &mut Read) {
        let (at, _) = self.json();
        let held = std::mem::take(&mut self.held);
        let mut rest = held[at..].trim_start_matches('[');
        loop {
            let (name, arguments, length) = match first::<Written>(rest) {
                Ok(Some((call, length))) => {
                    (call.name, call.arguments.map_or_else(String::new, |a| a.get().to_owned()), length)
                }
                _ => match begun_call(rest) {
                    Some((name, arguments)) => (name, arguments.to_owned(), rest.len()),
                    None => return,
                },
            };
            read.calls.push(Call::new(self.calls, name, arguments));
            self.calls += 1;
            rest = rest[length..].trim_start_matches([',', ' ']);
        }
    }

    /// Whether the answer had a call.
    pub fn called(&self) -> bool {
        self.calls > 0
    }

    /// Decides about the beginning of `held`. True when something became certain and there may be more.
    fn step(&mut self, read: &mut Read, ended: bool) -> bool {
        match self.state {
            State::Plain => {
                let keep = if self.calls > 0 { self.held.trim_end().len() } else { self.held.len() };
                self.release(keep, read);
                false
            }
            State::Call => match self.verdict(ended) {
                Verdict::Open => false,
                Verdict::Text(bytes) => {
                    self.release(bytes, read);
                    self.state = if self.syntax == ToolSyntax::Hermes { State::Text } else { State::Plain };
                    true
                }
                Verdict::Calls(written, bytes) => {
                    self.held.drain(..bytes);
                    for call in written {
                        let arguments = call.arguments.map_or_else(|| "{}".to_owned(), |a| a.get().to_owned());
                        read.calls.push(Call::new(self.calls, call.name, arguments));
                        self.calls += 1;
                    }
                    self.state = if self.parallel { State::Text } else { State::Plain };
                    true
                }
            },
            State::Begin | State::Text => self.look(read),
        }
    }

    /// Looks for the beginning of a call, and releases the text before it. White space before a possible call stays held.
    fn look(&mut self, read: &mut Read) -> bool {
        let marker = self.syntax.marker();
        if self.syntax == ToolSyntax::Llama {
            return self.look_at_once();
        }
        let found = self.held.find(marker);
        let sure = found.unwrap_or_else(|| self.held.len() - begun(&self.held, marker));
        let sure = self.held[..sure].trim_end().len();
        self.release(sure, read);
        if found.is_some() {
            self.state = State::Call;
        }
        found.is_some()
    }

    /// For Llama, whose marker is optional: an answer with calls begins with one.
    fn look_at_once(&mut self) -> bool {
        let marker = self.syntax.marker();
        let rest = &self.held[self.lead()..];
        if !rest.starts_with('{') && !rest.starts_with(marker) {
            if marker.starts_with(rest) {
                return false;
            }
            self.state = State::Plain;
            return true;
        }
        self.state = State::Call;
        true
    }

    /// Bytes of `held` before a call: white space and, between two calls of Llama, a semicolon.
    fn lead(&self) -> usize {
        let rest = self.held.trim_start();
        let between = self.syntax == ToolSyntax::Llama && self.calls > 0;
        let rest = if between { rest.strip_prefix(';').unwrap_or(rest).trim_start() } else { rest };
        self.held.len() - rest.len()
    }

    fn release(&mut self, bytes: usize, read: &mut Read) {
        if bytes > 0 {
            read.text.extend(self.held.drain(..bytes));
            if self.state == State::Begin {
                self.state = State::Text;
            }
        }
    }

    /// The byte offset in `held` where the call's JSON begins, and that JSON.
    fn json(&self) -> (usize, &str) {
        let call = &self.held[self.lead()..];
        let json = call.strip_prefix(self.syntax.marker()).unwrap_or(call).trim_start();
        (self.held.len() - json.len(), json)
    }

    /// True when the JSON begins as a call's does, or has not begun yet.
    fn plausible(&self) -> bool {
        let first = if self.syntax == ToolSyntax::Mistral { '[' } else { '{' };
        let (_, json) = self.json();
        json.is_empty() || json.starts_with(first)
    }

    fn verdict(&self, ended: bool) -> Verdict {
        let (at, json) = self.json();
        let text = Verdict::Text(match self.syntax {
            ToolSyntax::Hermes => self.lead() + self.syntax.marker().len(),
            // White space at the end stays held until the text after it is known.
            ToolSyntax::Llama | ToolSyntax::Mistral => self.held.trim_end().len(),
        });
        if !self.plausible() {
            return text;
        }
        let read = match self.syntax {
            ToolSyntax::Mistral => first::<Vec<Written>>(json),
            ToolSyntax::Hermes | ToolSyntax::Llama => {
                first::<Written>(json).map(|found| found.map(|(call, bytes)| (vec![call], bytes)))
            }
        };
        let (calls, bytes) = match read {
            Ok(Some((calls, bytes))) if calls.iter().all(|c| self.offered(c)) && !calls.is_empty() => {
                (calls, at + bytes)
            }
            Ok(None) if !ended => return Verdict::Open,
            _ => return text,
        };
        if !self.parallel && calls.len() > 1 {
            return text;
        }
        if self.syntax != ToolSyntax::Hermes {
            return Verdict::Calls(calls, bytes);
        }
        let rest = self.held[bytes..].trim_start();
        match rest.strip_prefix(CLOSE) {
            Some(rest) => Verdict::Calls(calls, self.held.len() - rest.len()),
            // The end of the answer closes the call as well.
            None if ended && CLOSE.starts_with(rest) => Verdict::Calls(calls, self.held.len()),
            None if CLOSE.starts_with(rest) => Verdict::Open,
            None => text,
        }
    }

    fn offered(&self, call: &Written) -> bool {
        let object = call.arguments.as_ref().is_none_or(|a| a.get().starts_with('{'));
        object && self.names.contains(&call.name)
    }
}

/// The name in a call's JSON that breaks off, as the grammar writes it, and its arguments so far. None before the name is complete.
fn begun_call(json: &str) -> Option<(String, &str)> {
    let named = json.strip_prefix("{\"name\": ")?;
    let (name, length) = first::<String>(named).ok()??;
    let rest = &named[length..];
    let arguments = [", \"arguments\": ", ", \"parameters\": "].iter().find_map(|before| rest.strip_prefix(before));
    Some((name, arguments.unwrap_or_default()))
}

/// The first JSON value of a text, and its length in bytes. None while it is incomplete.
fn first<T: for<'de> Deserialize<'de>>(json: &str) -> Result<Option<(T, usize)>, serde_json::Error> {
    let mut values = serde_json::Deserializer::from_str(json).into_iter::<T>();
    match values.next() {
        Some(Ok(value)) => Ok(Some((value, values.byte_offset()))),
        Some(Err(e)) if !e.is_eof() => Err(e),
        _ => Ok(None),
    }
}

/// Number of bytes at the end of a text that may begin the marker.
pub(crate) fn begun(text: &str, marker: &str) -> usize {
    let longest = marker.len().saturating_sub(1).min(text.len());
    let begins = |len: &usize| text.get(text.len() - len..).is_some_and(|tail| marker.starts_with(tail));
    (1..=longest).rev().find(begins).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Feeds these pieces to a parser; returns the text and the calls (name, arguments).
    fn read(syntax: ToolSyntax, parallel: bool, pieces: &[&str]) -> (String, Vec<(String, String)>) {
        let mut parser = ToolParser::new(syntax, ["f".to_owned(), "g".to_owned()].into(), parallel);
        let mut all = Read::default();
        let mut add = |read: Read| {
            all.text += &read.text;
            all.calls.extend(read.calls);
        };
        pieces.iter().for_each(|piece| add(parser.push(piece)));
        add(parser.finish());
        assert!(all.calls.iter().zip(0..).all(|(call, index)| call.index == index && call.id.len() == 9));
        (all.text, all.calls.into_iter().map(|c| (c.name, c.arguments)).collect())
    }

    fn calls(all: &[(&str, &str)]) -> Vec<(String, String)> {
        all.iter().map(|(name, arguments)| ((*name).to_owned(), (*arguments).to_owned())).collect()
    }

    const CALL: &str = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": \"</tool_call> {\\\"\"}}\n</tool_call>";

    #[test]
    fn hermes() {
        let arguments = "{\"x\": \"</tool_call> {\\\"\"}";
        let all = |text: &str| read(ToolSyntax::Hermes, true, &[text]);
        assert_eq!(all(CALL), (String::new(), calls(&[("f", arguments)])));
        let two = format!("So.\n{CALL}\n{CALL}\n");
        assert_eq!(all(&two), ("So.".to_owned(), calls(&[("f", arguments), ("f", arguments)])));
        let open = "<tool_call>{\"name\": \"g\"}";
        assert_eq!(all(open), (String::new(), calls(&[("g", "{}")])), "the end of the answer closes it");
        assert_eq!(read(ToolSyntax::Hermes, false, &[&two]), (format!("So.\n{CALL}"), calls(&[("f", arguments)])));
    }

    #[test]
    fn llama() {
        let all = |text: &str| read(ToolSyntax::Llama, true, &[text]);
        let call = "{\"name\": \"f\", \"parameters\": {\"x\": 1}}";
        assert_eq!(all(call), (String::new(), calls(&[("f", "{\"x\": 1}")])));
        assert_eq!(all(&format!("<|python_tag|>{call}; {call}")).1.len(), 2);
        assert_eq!(all("{\"name\": \"Bob\", \"age\": 3}").1, []);
        let text = format!("Call {call}");
        assert_eq!(all(&text), (text, vec![]));
        let pieces = [call, " {\"name\": \"f\"text", "\n"];
        assert_eq!(read(ToolSyntax::Llama, true, &pieces), all(&pieces.concat()), "white space at the end");
    }

    #[test]
    fn mistral() {
        let all = |text: &str| read(ToolSyntax::Mistral, true, &[text]);
        let two = "[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {}}, {\"name\": \"g\", \"arguments\": {\"a\": [1]}}]";
        assert_eq!(all(two), (String::new(), calls(&[("f", "{}"), ("g", "{\"a\": [1]}")])));
        assert_eq!(all("[TOOL_CALLS] nothing").0, "[TOOL_CALLS] nothing");
    }

    #[test]
    fn a_forced_call_that_is_cut_off_is_given_as_far_as_it_goes() {
        let cut = |syntax, text: &str| {
            let mut parser = ToolParser::new(syntax, ["f".to_owned(), "g".to_owned()].into(), true).forced();
            let mut all = parser.push(text);
            let rest = parser.finish();
            all.calls.extend(rest.calls);
            let calls = all.calls.into_iter().map(|c| (c.name, c.arguments)).collect::<Vec<_>>();
            (all.text + &rest.text, calls)
        };
        let hermes = |text: &str| cut(ToolSyntax::Hermes, text);
        let half = "<tool_call>\n{\"name\": \"g\", \"arguments\": {\"x\": \"a";
        assert_eq!(hermes(half), (String::new(), calls(&[("g", "{\"x\": \"a")])));
        let arguments = "{\"x\": \"</tool_call> {\\\"\"}";
        assert_eq!(hermes(&format!("{CALL}\n{half}")).1, calls(&[("f", arguments), ("g", "{\"x\": \"a")]));
        assert_eq!(hermes("<tool_call>\n{\"name\": \"g\", \"argu").1, calls(&[("g", "")]));
        assert_eq!(hermes("<tool_call>\n{\"name\": \"g").1, []);
        let llama = "{\"name\": \"f\", \"parameters\": {\"x\": [1,";
        assert_eq!(cut(ToolSyntax::Llama, llama).1, calls(&[("f", "{\"x\": [1,")]));
        let mistral = "[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {}}, {\"name\": \"g\", \"arguments\": {\"a\": 1";
        assert_eq!(cut(ToolSyntax::Mistral, mistral), (String::new(), calls(&[("f", "{}"), ("g", "{\"a\": 1")])));
        assert_eq!(hermes(CALL).1.len(), 1);
    }

    #[test]
    fn what_is_no_call_is_text() {
        for text in [
            "plain",
            " a < b, <tool ",
            "<tool_call>",
            "<tool_call> is how a call begins {not} with this",
            "<tool_call>{\"name\": \"h\", \"arguments\": {}}</tool_call>",
            "<tool_call>{\"name\": \"f\", \"arguments\": []}</tool_call>",
            "<tool_call>{\"name\": \"f\", \"arguments\": {</tool_call>",
            "<tool_call>{\"name\": \"f\", \"arguments\": {}} and more",
            "{\"name\": \"f\"",
            "[TOOL_CALLS] [{\"name\": \"f\"}, {\"name\": 5}]",
            " \n ",
        ] {
            for syntax in [ToolSyntax::Hermes, ToolSyntax::Llama, ToolSyntax::Mistral] {
                assert_eq!(read(syntax, true, &[text]), (text.to_owned(), vec![]), "{syntax:?}");
            }
        }
        let broken = "<tool_call>{\"name\": }</tool_call>\n".to_owned() + CALL;
        let (text, calls) = read(ToolSyntax::Hermes, true, &[&broken]);
        assert_eq!((text.as_str(), calls.len()), ("<tool_call>{\"name\": }</tool_call>", 1), "one after a broken one");
    }

    #[test]
    fn text_is_given_out_as_soon_as_it_cannot_be_a_call() {
        let mut parser = ToolParser::new(ToolSyntax::Hermes, ["f".to_owned()].into(), true);
        let mut next = |piece: &str| parser.push(piece).text;
        assert_eq!(
            (next("a "), next("<tool"), next("box> "), next("b")),
            ("a".into(), "".into(), " <toolbox>".into(), " b".into())
        );
        assert_eq!((next("<tool_call>"), next("x")), ("".into(), "<tool_call>x".into()));
    }

    proptest! {
        #[test]
        fn the_cut_does_not_matter(
            parts in proptest::collection::vec(proptest::sample::select(vec![
                "<tool_call>", "</tool_call>", "\n", " ", "{\"name\": \"f\"", ", \"arguments\": {\"x\": 1}", "}", "text", "é",
                "{", "[", "]", "[TOOL_CALLS]", "<", "{\"name\": \"g\"}", ";",
            ]), 0..14),
            cuts in proptest::collection::vec(any::<proptest::sample::Index>(), 0..6),
            which in 0..3usize, parallel in any::<bool>(),
        ) {
            let syntax = [ToolSyntax::Hermes, ToolSyntax::Llama, ToolSyntax::Mistral][which];
            let text = parts.concat();
            let mut at: Vec<usize> = cuts.iter().map(|c| c.index(text.len() + 1)).filter(|&c| text.is_char_boundary(c)).collect();
            at.extend([0, text.len()]);
            at.sort_unstable();
            let pieces: Vec<&str> = at.windows(2).map(|w| &text[w[0]..w[1]]).collect();
            let whole = read(syntax, parallel, &[&text]);
            prop_assert_eq!(&read(syntax, parallel, &pieces), &whole);
            if whole.1.is_empty() {
                prop_assert_eq!(whole.0, text, "nothing is lost");
            }
        }
    }
}
