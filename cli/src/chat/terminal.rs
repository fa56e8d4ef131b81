//! The line that is edited, drawn again after each key.

use std::io::{self, Write};

use super::editor::{Edited, Editor};
use crate::terminal::{Key, Keyboard, Keys, Raw, size};

/// Reads a line. `None`: the input has ended.
pub fn read_line(editor: &mut Editor, prompt: &str) -> io::Result<Option<Edited>> {
    let _raw = Raw::begin()?;
    let (mut keys, mut out) = (Keys::new(Keyboard::default()), io::stdout());
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
    let columns = usize::from(size().0);
    let before = prompt.chars().count();
    let (text, cursor) = editor.view(columns.saturating_sub(before));
    write!(out, "\r\x1b[K{prompt}{text}\r\x1b[{}C", before + cursor)?;
    out.flush()
}
