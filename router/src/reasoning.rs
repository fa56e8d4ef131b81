//! Splits what a model thinks from its answer, as the text arrives.
//!
//! Thoughts stand between two marks ([`THOUGHTS`]) before the answer. Some templates end the prompt with the first mark; the answer then
//! begins within the thoughts. What is split does not depend on how the text was cut into pieces. Pure.

use baton_model_text::THOUGHTS;
use compact_str::CompactString;

use crate::tools::begun;

/// The thoughts and the answer's text that became certain with a piece of text.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Split {
    pub reasoning: String,
    pub text: CompactString,
}

/// The splitter of one answer.
#[derive(Clone, Debug)]
pub(crate) struct Reasoning {
    state: State,
    /// Text not yet known to be thoughts or answer.
    held: String,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// Only white space so far, or a part of the first mark.
    Begin,
    /// After the first mark, before the first character of the thoughts.
    Opening,
    Thinking,
    /// After the thoughts, before the first character of the answer.
    Between,
    Answer,
}

impl Reasoning {
    /// A splitter that has read nothing yet. `open`: the prompt ended with the first mark.
    pub fn new(open: bool) -> Reasoning {
        Reasoning { state: if open { State::Opening } else { State::Begin }, held: String::new() }
    }

    /// Whether the text that comes next belongs to the thoughts, as far as is known.
    pub fn thinks(&self) -> bool {
        matches!(self.state, State::Opening | State::Thinking)
    }

    /// Takes the next piece.
    pub fn push(&mut self, text: &str) -> Split {
        if self.state == State::Answer {
            return Split { text: text.into(), ..Split::default() };
        }
        self.held.push_str(text);
        let mut split = Split::default();
        while self.step(&mut split) {}
        split
    }

    /// Ends the answer, and returns what was held back.
    pub fn finish(&mut self) -> Split {
        let held = std::mem::take(&mut self.held);
        match std::mem::replace(&mut self.state, State::Answer) {
            State::Opening | State::Thinking => Split { reasoning: held.trim_end().to_owned(), ..Split::default() },
            State::Between => Split::default(),
            State::Begin | State::Answer => Split { text: held.into(), ..Split::default() },
        }
    }

    /// Drops white space. True when something else is there, which begins `next`.
    fn skip_space(&mut self, next: State) -> bool {
        let space = self.held.len() - self.held.trim_start().len();
        self.held.drain(..space);
        if !self.held.is_empty() {
            self.state = next;
        }
        !self.held.is_empty()
    }

    /// Decides about the beginning of `held`. True when the state changed and there may be more.
    fn step(&mut self, split: &mut Split) -> bool {
        let (open, close) = THOUGHTS;
        match self.state {
            State::Begin => {
                let begins = self.held.trim_start();
                if let Some(thoughts) = begins.strip_prefix(open) {
                    (self.held, self.state) = (thoughts.to_owned(), State::Opening);
                } else if open.starts_with(begins) {
                    return false;
                } else {
                    self.state = State::Answer;
                }
                true
            }
            State::Opening => self.skip_space(State::Thinking),
            State::Thinking => {
                let found = self.held.find(close);
                let sure = found.unwrap_or_else(|| self.held.len() - begun(&self.held, close));
                let thoughts = self.held[..sure].trim_end().len();
                split.reasoning += &self.held[..thoughts];
                self.held.drain(..found.map_or(thoughts, |at| at + close.len()));
                if found.is_some() {
                    self.state = State::Between;
                }
                found.is_some()
            }
            State::Between => self.skip_space(State::Answer),
            State::Answer => {
                split.text += &std::mem::take(&mut self.held);
                false
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read(open: bool, pieces: &[&str]) -> (String, String) {
        let mut reasoning = Reasoning::new(open);
        let (mut thoughts, mut text) = (String::new(), String::new());
        for split in pieces.iter().map(|piece| reasoning.push(piece)).collect::<Vec<_>>() {
            thoughts += &split.reasoning;
            text += &split.text;
        }
        let rest = reasoning.finish();
        (thoughts + &rest.reasoning, text + &rest.text)
    }

    #[test]
    fn thoughts_and_answer() {
        let both = |thoughts: &str, text: &str| (thoughts.to_owned(), text.to_owned());
        assert_eq!(read(false, &["<think>\nso.\n\nyes\n</think>\n\nHi <think>"]), both("so.\n\nyes", "Hi <think>"));
        assert_eq!(read(true, &["so\n</think>\n\nHi"]), both("so", "Hi"));
        assert_eq!(read(false, &["<think>\n\n</think>\n\nHi\n"]), both("", "Hi\n"));
        assert_eq!(read(false, &[" Hi </think>"]), both("", " Hi </think>"), "who does not think");
        assert_eq!(read(true, &["cut off </thi"]), both("cut off </thi", ""));
        assert_eq!(read(false, &[" <thi"]), both("", " <thi"));
        assert_eq!(read(true, &["x</think>\n"]), both("x", ""));
    }

    #[test]
    fn thoughts_are_given_out_as_they_come() {
        let mut reasoning = Reasoning::new(false);
        let mut next = |piece: &str| reasoning.push(piece).reasoning;
        assert_eq!(
            (next("<think>\n"), next("one "), next("two </"), next("b")),
            ("".into(), "one".into(), " two".into(), " </b".into())
        );
        assert!(reasoning.thinks());
    }

    proptest! {
        #[test]
        fn the_cut_does_not_matter(
            parts in proptest::collection::vec(proptest::sample::select(vec![
                "<think>", "</think>", "\n", " ", "text", "é", "<", "</", "think>",
            ]), 0..10),
            cuts in proptest::collection::vec(any::<proptest::sample::Index>(), 0..6), open in any::<bool>(),
        ) {
            let text = parts.concat();
            let mut at: Vec<usize> = cuts.iter().map(|c| c.index(text.len() + 1)).filter(|&c| text.is_char_boundary(c)).collect();
            at.extend([0, text.len()]);
            at.sort_unstable();
            let pieces: Vec<&str> = at.windows(2).map(|w| &text[w[0]..w[1]]).collect();
            prop_assert_eq!(read(open, &pieces), read(open, &[&text]));
        }
    }
}
