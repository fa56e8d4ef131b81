//! One line of input that can be edited, with the lines before it. Pure: keys in, what to show out.

use crate::terminal::Key;

/// Lines that are remembered.
const REMEMBERED: usize = 1000;

/// What a key led to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Edited {
    /// The line changed, or the place in it.
    Going,
    /// The line is complete.
    Line(String),
    /// Ctrl-C: the line is empty now. `empty`: it was so before.
    Interrupted { empty: bool },
    /// Ctrl-D on an empty line.
    Ended,
}

/// The line that is being edited.
#[derive(Debug, Default)]
pub struct Editor {
    line: Vec<char>,
    /// Where the next character goes.
    at: usize,
    history: Vec<String>,
    /// The line of the history that is shown; one past the last: the new one.
    shown: usize,
    /// The new line, while one of the history is shown.
    new: Vec<char>,
}

impl Editor {
    /// Takes a key.
    pub fn key(&mut self, key: Key) -> Edited {
        match key {
            Key::Char(c) => {
                self.line.insert(self.at, c);
                self.at += 1;
            }
            Key::Enter => return Edited::Line(self.enter()),
            Key::Backspace if self.at > 0 => {
                self.at -= 1;
                self.line.remove(self.at);
            }
            Key::Delete if self.at < self.line.len() => drop(self.line.remove(self.at)),
            Key::EndOfInput if self.line.is_empty() => return Edited::Ended,
            Key::EndOfInput if self.at < self.line.len() => drop(self.line.remove(self.at)),
            Key::Left => self.at = self.at.saturating_sub(1),
            Key::Right => self.at = (self.at + 1).min(self.line.len()),
            Key::WordLeft => self.at = self.word_before(),
            Key::WordRight => self.at = self.word_after(),
            Key::Home => self.at = 0,
            Key::End => self.at = self.line.len(),
            Key::Up if self.shown > 0 => self.show(self.shown - 1),
            Key::Down if self.shown < self.history.len() => self.show(self.shown + 1),
            Key::KillToStart => {
                self.line.drain(..self.at);
                self.at = 0;
            }
            Key::KillToEnd => self.line.truncate(self.at),
            Key::KillWord => {
                let from = self.word_before();
                self.line.drain(from..self.at);
                self.at = from;
            }
            Key::Interrupt => {
                let empty = self.line.is_empty();
                self.clear();
                return Edited::Interrupted { empty };
            }
            Key::Backspace | Key::Delete | Key::EndOfInput | Key::Up | Key::Down | Key::Redraw | Key::Escape => {}
        }
        Edited::Going
    }

    fn clear(&mut self) {
        self.line.clear();
        (self.at, self.shown) = (0, self.history.len());
    }

    fn enter(&mut self) -> String {
        let line: String = self.line.iter().collect();
        if !line.trim().is_empty() && self.history.last() != Some(&line) {
            self.history.push(line.clone());
            if self.history.len() > REMEMBERED {
                self.history.remove(0);
            }
        }
        self.clear();
        line
    }

    fn show(&mut self, entry: usize) {
        if self.shown == self.history.len() {
            self.new = std::mem::take(&mut self.line);
        }
        self.line = match self.history.get(entry) {
            Some(line) => line.chars().collect(),
            None => std::mem::take(&mut self.new),
        };
        (self.shown, self.at) = (entry, self.line.len());
    }

    fn word_before(&self) -> usize {
        let before = &self.line[..self.at];
        let end = before.iter().rposition(|c| !c.is_whitespace()).map_or(0, |at| at + 1);
        before[..end].iter().rposition(|c| c.is_whitespace()).map_or(0, |at| at + 1)
    }

    fn word_after(&self) -> usize {
        let after = &self.line[self.at..];
        let begin = after.iter().position(|c| !c.is_whitespace()).unwrap_or(after.len());
        let end = after[begin..].iter().position(|c| c.is_whitespace()).unwrap_or(after.len() - begin);
        self.at + begin + end
    }

    /// The part of the line to show in so many columns, and the column of the cursor. A long line is cut off so that the cursor is seen.
    pub fn view(&self, columns: usize) -> (String, usize) {
        // The cursor takes a column, also at the end.
        let room = columns.saturating_sub(1).max(2);
        let mut from = 0;
        let mut before: usize = self.line[..self.at].iter().map(|c| width(*c)).sum();
        while before > room {
            before -= width(self.line[from]);
            from += 1;
        }
        let mut taken = 0;
        let fits = |c: &&char| {
            taken += width(**c);
            taken <= room
        };
        (self.line[from..].iter().take_while(fits).collect(), before)
    }
}

/// Columns of a character in a terminal: none for what joins the one before, two for East Asian scripts and most pictures. After Unicode's
/// East Asian Width; rare characters may be wrong, which moves the cursor but changes no text.
fn width(c: char) -> usize {
    match u32::from(c) {
        0x300..=0x36f | 0x200b..=0x200f | 0x20d0..=0x20ff | 0xfe00..=0xfe0f => 0,
        0x1100..=0x115f
        | 0x2e80..=0x303e
        | 0x3041..=0xa4cf
        | 0xac00..=0xd7a3
        | 0xf900..=0xfaff
        | 0xfe30..=0xfe6f
        | 0xff00..=0xff60
        | 0xffe0..=0xffe6
        | 0x1f300..=0x1faff
        | 0x20000..=0x3fffd => 2,
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn typed(editor: &mut Editor, text: &str) {
        text.chars().for_each(|c| assert_eq!(editor.key(Key::Char(c)), Edited::Going));
    }

    fn edit(text: &str, keys: &[Key]) -> String {
        let mut editor = Editor::default();
        typed(&mut editor, text);
        keys.iter().for_each(|key| drop(editor.key(*key)));
        match editor.key(Key::Enter) {
            Edited::Line(line) => line,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_line_is_edited_at_any_place() {
        use Key::{
            Backspace, Char, Delete, End, Home, KillToEnd, KillToStart, KillWord, Left, Right, WordLeft, WordRight,
        };
        assert_eq!(edit("hällo", &[Left, Left, Backspace, Char('x')]), "häxlo");
        assert_eq!(edit("abc", &[Home, Delete, Right, Char('-')]), "b-c");
        assert_eq!(edit("abc", &[Home, Backspace, Left, End, Right, Delete]), "abc", "nothing beyond the ends");
        assert_eq!(edit("one two  three", &[WordLeft, KillWord]), "one three");
        assert_eq!(edit("one two three", &[WordLeft, WordLeft, WordRight, Char('!')]), "one two! three");
        assert_eq!(edit("one two", &[WordLeft, KillToStart]), "two");
        assert_eq!(edit("one two", &[WordLeft, KillToEnd]), "one ");
        assert_eq!(edit("ab", &[Home, Key::EndOfInput]), "b", "it deletes where the line has something");
    }

    #[test]
    fn lines_before_come_back_and_the_new_one_is_kept() {
        let mut editor = Editor::default();
        for line in ["first", "second", "second", "  "] {
            typed(&mut editor, line);
            editor.key(Key::Enter);
        }
        typed(&mut editor, "new");
        let shown = |editor: &Editor| editor.view(80).0;
        editor.key(Key::Up);
        assert_eq!(shown(&editor), "second");
        editor.key(Key::Up);
        editor.key(Key::Up);
        assert_eq!(shown(&editor), "first", "once each, and nothing before the first");
        (0..4).for_each(|_| drop(editor.key(Key::Down)));
        assert_eq!(shown(&editor), "new");
        assert_eq!(editor.key(Key::Interrupt), Edited::Interrupted { empty: false });
        assert_eq!(editor.key(Key::Interrupt), Edited::Interrupted { empty: true });
        assert_eq!(editor.key(Key::EndOfInput), Edited::Ended);
    }

    #[test]
    fn the_cursor_is_seen_in_a_long_line() {
        let mut editor = Editor::default();
        typed(&mut editor, "0123456789");
        assert_eq!(editor.view(5), ("6789".to_owned(), 4));
        editor.key(Key::Home);
        assert_eq!(editor.view(5), ("0123".to_owned(), 0));
        let mut wide = Editor::default();
        typed(&mut wide, "日本e\u{301}");
        assert_eq!(wide.view(20).1, 5);
        assert_eq!(wide.view(4), ("本e\u{301}".to_owned(), 3));
    }
}
