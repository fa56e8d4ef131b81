//! The terminal while keys are read one by one: its settings, and which keys the bytes are that it sends.

use std::io::{self, Read};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};

/// Columns and lines where the terminal does not say.
const USUAL: (u16, u16) = (80, 24);
/// The rest of a sequence comes within this time of its escape, also over a slow line. If nothing does, it was the key.
const ESCAPE: Duration = Duration::from_millis(50);

/// A key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Key {
    Char(char),
    Enter,
    Backspace,
    Delete,
    Left,
    Right,
    WordLeft,
    WordRight,
    Home,
    End,
    Up,
    Down,
    /// Deletes to the beginning, to the end, and the word before.
    KillToStart,
    KillToEnd,
    KillWord,
    /// Ctrl-C.
    Interrupt,
    /// Ctrl-D.
    EndOfInput,
    /// Ctrl-L.
    Redraw,
    /// Escape, by itself.
    Escape,
}

/// Gives the terminal's settings back when it is dropped.
pub struct Raw(Termios);

impl Raw {
    /// Keys come one by one from now on, and are not shown.
    pub fn begin() -> io::Result<Raw> {
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

/// Columns and lines of the terminal.
pub fn size() -> (u16, u16) {
    let told = tcgetwinsize(io::stdout()).map_or(USUAL, |size| (size.ws_col, size.ws_row));
    if told.0 == 0 || told.1 == 0 { USUAL } else { told }
}

/// What is typed. A read gives one byte; after an escape that nothing follows it gives none, once.
#[derive(Debug, Default)]
pub struct Keyboard {
    escape: bool,
}

impl Read for Keyboard {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if std::mem::take(&mut self.escape) && !follows()? {
            return Ok(0);
        }
        let one = buffer.len().min(1);
        let read = rustix::io::read(io::stdin(), &mut buffer[..one])?;
        self.escape = read == 1 && buffer[0] == 0x1b;
        Ok(read)
    }
}

/// Whether more is typed soon.
fn follows() -> io::Result<bool> {
    let within = Timespec { tv_sec: 0, tv_nsec: ESCAPE.subsec_nanos().into() };
    let stdin = io::stdin();
    Ok(poll(&mut [PollFd::new(&stdin, PollFlags::IN)], Some(&within))? > 0)
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
            None => Some(Key::Escape),
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

    #[test]
    fn an_escape_that_nothing_follows_is_a_key() {
        let (escape, rest) = (&b"\x1b"[..], &b"y"[..]);
        // A read that gives nothing, between the two.
        let mut keys = Keys::new(Pause(vec![escape, b"", rest, b""]));
        let read: Vec<Key> = std::iter::from_fn(|| keys.next().unwrap()).collect();
        assert_eq!(read, [Key::Escape, Key::Char('y')]);
    }

    /// Gives one of these at each read.
    struct Pause(Vec<&'static [u8]>);

    impl Read for Pause {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            if self.0.is_empty() { Ok(0) } else { self.0.remove(0).read(buffer) }
        }
    }
}
