//! Finds stop strings in text that arrives in pieces, between the detokeniser and the client. Pure.
//!
//! Text that may begin a stop string is held back until it is one or cannot become one. So a client never sees part of a
//! stop string, and the result does not depend on how the text was cut into pieces.

use compact_str::CompactString;

/// The stop strings of one choice, and the text held back because of them.
#[derive(Clone, Debug)]
pub(crate) struct StopMatcher {
    stops: Vec<String>,
    held: String,
}

/// The result of a piece of text.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Released {
    /// Text for the client.
    pub text: CompactString,
    /// A stop string is complete, and `text` is the last text of the answer.
    pub stopped: bool,
}

impl StopMatcher {
    /// A matcher for these stop strings; empty ones are ignored.
    pub fn new(stops: Vec<String>) -> StopMatcher {
        StopMatcher { stops: stops.into_iter().filter(|s| !s.is_empty()).collect(), held: String::new() }
    }

    /// Takes the next piece.
    pub fn push(&mut self, piece: CompactString) -> Released {
        if self.stops.is_empty() {
            return Released { text: piece, stopped: false };
        }
        self.held.push_str(&piece);
        if let Some(at) = self.first_match() {
            self.held.truncate(at);
            return Released { text: std::mem::take(&mut self.held).into(), stopped: true };
        }
        let keep = self.held.len() - self.undecided();
        let rest = self.held.split_off(keep);
        Released { text: std::mem::replace(&mut self.held, rest).into(), stopped: false }
    }

    /// Returns the text that was held back, when the answer ended for another reason.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Byte offset of the first stop string to be complete; of several that end together, the longest.
    fn first_match(&self) -> Option<usize> {
        let found = self.stops.iter().filter_map(|s| self.held.find(s.as_str()).map(|at| (at + s.len(), at)));
        found.min().map(|(_, at)| at)
    }

    /// Bytes at the end of `held` that may begin a stop string.
    fn undecided(&self) -> usize {
        let longest = self.stops.iter().map(String::len).max().unwrap_or(0).min(self.held.len() + 1);
        let tail = |len: &usize| self.held.get(self.held.len() - len..);
        (1..longest)
            .rev()
            .find(|len| tail(len).is_some_and(|t| self.stops.iter().any(|s| s.starts_with(t))))
            .unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The text a client gets, and whether it ended at a stop string.
    fn run<'a>(stops: &[&str], pieces: impl IntoIterator<Item = &'a str>) -> (String, bool) {
        let mut matcher = StopMatcher::new(stops.iter().map(|s| (*s).to_owned()).collect());
        let mut all = String::new();
        for piece in pieces {
            let released = matcher.push(piece.into());
            all += &released.text;
            if released.stopped {
                return (all, true);
            }
        }
        all += &matcher.finish();
        (all, false)
    }

    #[test]
    fn a_stop_string_over_several_pieces_is_found_and_not_delivered() {
        assert_eq!(run(&["\n\nUser:"], ["Hello", "\n", "\nUs", "er", ": me"]), ("Hello".into(), true));
        assert_eq!(run(&["END"], ["the E", "N", "d EN"]), ("the ENd EN".into(), false));
        assert_eq!(run(&["🙂!"], ["a🙂", "?🙂", "!"]), ("a🙂?".into(), true));
        assert_eq!(run(&["aab"], ["aaa", "b"]), ("a".into(), true), "a match that begins inside what is held");
        assert_eq!(run(&[], ["x", "y"]), ("xy".into(), false));
        assert_eq!(run(&[""], ["x"]), ("x".into(), false));
    }

    #[test]
    fn only_what_may_become_a_stop_string_is_held_back() {
        let mut matcher = StopMatcher::new(vec!["###".into()]);
        assert_eq!(matcher.push("ab#".into()).text, "ab");
        assert_eq!(matcher.push("#".into()).text, "");
        assert_eq!(matcher.push("c".into()).text, "##c");
        assert_eq!(matcher.finish(), "");
    }

    proptest! {
        #[test]
        fn the_cuts_between_pieces_do_not_matter(
            text in "[ab🙂]{0,24}",
            stops in prop::collection::vec("[ab🙂]{1,4}", 0..4),
            cuts in prop::collection::vec(0usize..24, 0..6),
        ) {
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let bounds: Vec<usize> = text.char_indices().map(|(i, _)| i).chain([text.len()]).collect();
            let mut at: Vec<usize> = cuts.iter().map(|c| bounds[c % bounds.len()]).chain([0, text.len()]).collect();
            at.sort_unstable();
            let pieces = at.windows(2).map(|w| &text[w[0]..w[1]]);
            let singles = bounds.windows(2).map(|w| &text[w[0]..w[1]]);
            prop_assert_eq!(run(&stops, pieces), run(&stops, singles));
        }
    }
}
