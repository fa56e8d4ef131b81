//! What a terminal is sent so that it shows a buffer. Pure.
//!
//! Sequences are those of ECMA-48 that every terminal of today knows, with the 8 colours that people choose themselves.

use std::fmt::Write;

use ratatui::buffer::Buffer;
use ratatui::style::{Color, Modifier};

use super::snapshot::is_shown;

/// Takes the whole screen: the alternate one, without a cursor.
pub const ENTER: &str = "\x1b[?1049h\x1b[?25l\x1b[0m\x1b[2J";
/// Gives it back.
pub const LEAVE: &str = "\x1b[0m\x1b[?25h\x1b[?1049l";
/// Removes everything.
pub const CLEAR: &str = "\x1b[0m\x1b[2J";

/// The bytes that change a screen that shows `before` into one that shows `now`, of the same size. Without colours it stays readable:
/// the rest is bold, dim, underlined and reverse.
pub fn paint(before: &Buffer, now: &Buffer, colours: bool) -> String {
    let (mut text, mut style, mut next) = (String::new(), String::new(), None);
    for (x, y, cell) in before.diff(now) {
        if next != Some((x, y)) {
            // Writing to a String cannot fail; so below.
            let _ = write!(text, "\x1b[{};{}H", y + 1, x + 1);
        }
        let own = sequence(cell.fg, cell.modifier, colours);
        if own != style {
            text += &own;
            style = own;
        }
        // Nothing that came this far may move the cursor.
        text.extend(cell.symbol().chars().map(|c| if is_shown(c) { c } else { '?' }));
        // Where a wide character leaves the cursor is not counted on.
        next = (cell.symbol().len() == 1).then_some((x + 1, y)).filter(|(x, _)| *x < now.area().right());
    }
    if !text.is_empty() {
        text += "\x1b[0m";
    }
    text
}

/// Sets the style of what follows, whatever it was.
fn sequence(colour: Color, modifier: Modifier, colours: bool) -> String {
    let mut text = "\x1b[0".to_owned();
    let modifiers = [(Modifier::BOLD, 1), (Modifier::DIM, 2), (Modifier::UNDERLINED, 4), (Modifier::REVERSED, 7)];
    for (_, code) in modifiers.into_iter().filter(|(each, _)| modifier.contains(*each)) {
        let _ = write!(text, ";{code}");
    }
    let code = match colour {
        Color::Red => Some(31),
        Color::Green => Some(32),
        Color::Yellow => Some(33),
        Color::Blue => Some(34),
        _ => None,
    };
    if let Some(code) = code.filter(|_| colours) {
        let _ = write!(text, ";{code}");
    }
    text + "m"
}

#[cfg(test)]
mod tests {
    use ratatui::layout::Rect;
    use ratatui::style::Style;

    use super::*;

    fn buffer(text: &str, style: Style) -> Buffer {
        let mut buffer = Buffer::empty(Rect::new(0, 0, 12, 2));
        buffer.set_string(1, 1, text, style);
        buffer
    }

    #[test]
    fn only_what_changed_is_sent() {
        let (before, now) = (buffer("12 of 40", Style::new()), buffer("13 of 41", Style::new()));
        assert_eq!(paint(&before, &now, true), "\x1b[2;3H\x1b[0m3\x1b[2;9H1\x1b[0m");
        assert_eq!(paint(&now, &now, true), "");
    }

    #[test]
    fn without_colours_only_the_shape_of_letters_differs() {
        let style = Style::new().fg(Color::Red).add_modifier(Modifier::BOLD | Modifier::REVERSED);
        let (blank, now) = (buffer("", Style::new()), buffer("ab", style));
        assert_eq!(paint(&blank, &now, true), "\x1b[2;2H\x1b[0;1;7;31mab\x1b[0m");
        assert_eq!(paint(&blank, &now, false), "\x1b[2;2H\x1b[0;1;7mab\x1b[0m");
    }

    #[test]
    fn wide_characters_are_placed_and_nothing_is_obeyed() {
        let blank = buffer("", Style::new());
        let mut now = buffer("日本x", Style::new());
        assert_eq!(paint(&blank, &now, true), "\x1b[2;2H\x1b[0m日\x1b[2;4H本\x1b[2;6Hx\x1b[0m");
        assert_eq!(paint(&blank, &buffer("äx", Style::new()), true), "\x1b[2;2H\x1b[0mä\x1b[2;3Hx\x1b[0m");
        // Past what ratatui itself leaves out.
        now.cell_mut((5, 1)).unwrap().set_symbol("\x1b[2J\u{202e}");
        assert!(paint(&blank, &now, true).contains("?[2J?"));
    }
}
