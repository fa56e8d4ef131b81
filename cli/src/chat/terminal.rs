//! The terminal while a line is edited: keys come one by one, and the line is drawn again after each.

use std::io::{self, Read, Write};

use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};

use super::editor::{Edited, Editor, Key};

/// Columns where the terminal does not say.
const USUAL: usize = 80;

/// Gives the terminal's settings back when it is dropped.
struct Raw(Termios);

impl Raw {
    fn begin() -> io::Result<Raw> {
        let before = tcgetattr(io::stdin())?;
        let mut raw = before.clone();
        raw.make_raw();
        // Line ends of what other threads print stay as they are.
        raw.output_modes = before.output_modes;
        tcsetattr(io::stdin(), OptionalActions::Drain, &raw)?;
        Ok(Raw(before))
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        // Nothing can be done about it here.
        let _ = tcsetattr(io::stdin(), OptionalActions::Drain, &self.0);
    }
}

/// Reads a line. `None`: the input has ended.
pub fn read_line(editor: &mut Editor, prompt: &str) -> io::Result<Option<Edited>> {
    let _raw = Raw::begin()?;
    let (mut keys, mut out) = (Keys::new(io::stdin().lock()), io::stdout());
    loop {
        draw(editor, prompt, &mut out)?;
        let Some(key) = keys.next()? else { return Ok(None) };
        if key == Key::Redraw {
            write!(out, "\x1b[2J\x1b[H")?;
        }
        match editor.key(key) {
            Edited::Going => {}
            edited => {
                if let Edited::Line(line) = &edited {
                    // All of a long line stays on the screen.
                    write!(out, "\r\x1b[K{prompt}{line}")?;
                }
                write!(out, "\r\n")?;
                out.flush()?;
                return Ok(Some(edited));
            }
        }
    }
}

fn draw(editor: &Editor, prompt: &str, out: &mut impl Write) -> io::Result<()> {
    let columns = tcgetwinsize(io::stdout()).map_or(USUAL, |size| usize::from(size.ws_col));
    let columns = if columns == 0 { USUAL } else { columns };
    let before = prompt.chars().count();
    let (text, cursor) = editor.view(columns.saturating_sub(before));
    write!(out, "\r\x1b[K{prompt}{text}\r\x1b[{}C", before + cursor)?;
    out.flush()
}

/// Keys from the bytes that a terminal sends.
pub struct Keys<R>(R);

impl<R: Read> Keys<R> {
    /// Reads from here.
    pub fn new(input: R) -> Keys<R> {
        Keys(input)
    }

    fn byte(&mut self) -> io::Result<Option<u8>> {
        let mut byte = [0];
        loop {
            match self.0.read(&mut byte) {
                Ok(0) => return Ok(None),
                Ok(_) => return Ok(Some(byte[0])),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// The next key; `None` at the end. Keys that mean nothing here are left out.
    pub fn next(&mut self) -> io::Result<Option<Key>> {
        loop {
            let Some(byte) = self.byte()? else { return Ok(None) };
            let key = match byte {
                b'\r' | b'\n' => Some(Key::Enter),
                0x7f | 0x08 => Some(Key::Backspace),
                0x1b => self.escaped()?,
                0x01..=0x1a => control(byte),
                0x20.. => self.character(byte)?.map(Key::Char),
                _ => None,
            };
            if key.is_some() {
                return Ok(key);
            }
        }
    }

    /// The rest of a character in UTF-8. `None`: it is none.
    fn character(&mut self, first: u8) -> io::Result<Option<char>> {
        let mut bytes = vec![first];
        let length = match first {
            0xc0..=0xdf => 2,
            0xe0..=0xef => 3,
            0xf0.. => 4,
            _ => 1,
        };
        while bytes.len() < length {
            match self.byte()? {
                Some(byte) => bytes.push(byte),
                None => break,
            }
        }
        Ok(std::str::from_utf8(&bytes).ok().and_then(|text| text.chars().next()))
    }

    /// The rest of a sequence that begins with escape, as xterm sends it.
    fn escaped(&mut self) -> io::Result<Option<Key>> {
        Ok(match self.byte()? {
            Some(b'b') => Some(Key::WordLeft),
            Some(b'f') => Some(Key::WordRight),
            Some(b'[' | b'O') => {
                let mut numbers = Vec::new();
                loop {
                    match self.byte()? {
                        Some(byte @ (b'0'..=b'9' | b';')) => numbers.push(byte),
                        Some(last) => break named(&numbers, last),
                        None => break None,
                    }
                }
            }
            _ => None,
        })
    }
}

fn control(byte: u8) -> Option<Key> {
    Some(match byte + b'@' {
        b'A' => Key::Home,
        b'B' => Key::Left,
        b'C' => Key::Interrupt,
        b'D' => Key::EndOfInput,
        b'E' => Key::End,
        b'F' => Key::Right,
        b'K' => Key::KillToEnd,
        b'L' => Key::Redraw,
        b'N' => Key::Down,
        b'P' => Key::Up,
        b'U' => Key::KillToStart,
        b'W' => Key::KillWord,
        _ => return None,
    })
}

fn named(numbers: &[u8], last: u8) -> Option<Key> {
    // 5 is Control, 3 is Alt.
    let by_word = numbers.ends_with(b";5") || numbers.ends_with(b";3");
    Some(match (last, numbers) {
        (b'A', _) => Key::Up,
        (b'B', _) => Key::Down,
        (b'C', _) if by_word => Key::WordRight,
        (b'C', _) => Key::Right,
        (b'D', _) if by_word => Key::WordLeft,
        (b'D', _) => Key::Left,
        (b'H', _) | (b'~', b"1" | b"7") => Key::Home,
        (b'F', _) | (b'~', b"4" | b"8") => Key::End,
        (b'~', b"3") => Key::Delete,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_read_from_what_terminals_send() {
        let bytes = b"a\xc3\xa4\x1b[A\x1bOD\x1b[1;5C\x1b[3~\x1b[15~\x01\x03\x17\xffz\x1b[H\r";
        let mut keys = Keys::new(&bytes[..]);
        let read: Vec<Key> = std::iter::from_fn(|| keys.next().unwrap()).collect();
        let want = [
            Key::Char('a'),
            Key::Char('ä'),
            Key::Up,
            Key::Left,
            Key::WordRight,
            Key::Delete,
            Key::Home,
            Key::Interrupt,
            Key::KillWord,
        ];
        assert_eq!(read[..want.len()], want);
        assert!(!read[want.len()..].contains(&Key::Char('\u{fffd}')), "what is no text is left out: {read:?}");
    }
}
