//! The screen, from the state and the size: in ASCII, and readable without colours. Pure.
//!
//! 80 x 24: title 1, what bounds the cluster 2, times 2, workers 10, handoffs 6, messages 2, keys 1. Of more lines two in three are for
//! workers. With fewer lines handoffs go first.

use ratatui::buffer::Buffer;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Paragraph, Widget, Wrap};

use baton_cluster::Role;

use super::snapshot::{Percentiles, Snapshot};
use super::state::State;
use super::tables;
use crate::units;
use crate::units::{count, duration, few, seconds};

/// The least size that shows anything of use.
pub const LEAST: (u16, u16) = (60, 14);
/// Lines of handoffs at 24 lines, and at most: their head and twelve.
const HANDOFFS: (u16, u16) = (6, 13);
/// Lines of messages.
const MESSAGES: u16 = 2;
/// Lines that are neither workers nor handoffs.
const OTHERS: u16 = 6 + MESSAGES;
/// Lines that workers have at least.
const WORKERS: u16 = 6;

pub const BOLD: Style = Style::new().add_modifier(Modifier::BOLD);
pub const DIM: Style = Style::new().add_modifier(Modifier::DIM);
pub const WRONG: Style = Style::new().fg(Color::Red).add_modifier(Modifier::BOLD);
const TITLE: Style = Style::new().add_modifier(Modifier::REVERSED);

const KEYS: &str = "arrows select  s sort  r reverse  / filter  d drain  +/- scale  ? help  q quit";

const HELP: [&str; 15] = [
    "arrows, j k      select a worker; g G: the first, the last",
    "s, r             sort by the next column, reverse the order",
    "/                show only workers whose name, role, state, model or address",
    "                 has a text; Enter keeps the filter, Esc shows all again",
    "d                drain the selected worker for good, once you confirm it",
    "+, -             one worker more or less of its role, once you confirm it",
    "Ctrl-L           draw everything again",
    "q, Ctrl-C        quit; the cluster goes on",
    "",
    "KV               blocks: # in use, + cached, . free; the share in use",
    "QUEUE            tokens of prompts that are to be computed",
    "WAIT, RUN, ROWS  sequences: waiting, worked on, with a token in each step",
    "STEPS/S          steps of the engine; ROWS times STEPS/S: tokens a second",
    "goodput          requests a second that met both SLOs, of all that ended",
    "                 Any key closes this.",
];

/// Draws everything. `now`: in seconds, as the state was told.
pub fn draw(state: &State, now: f64, buffer: &mut Buffer) {
    let area = *buffer.area();
    buffer.reset();
    if area.width < LEAST.0 || area.height < LEAST.1 {
        let (width, height) = LEAST;
        let text = format!("{width} x {height} are needed, this is {} x {}. q quits.", area.width, area.height);
        return Paragraph::new(text).wrap(Wrap { trim: true }).render(area, buffer);
    }
    let [title, bound, times, workers, handoffs, messages, keys] = Layout::vertical(heights(area.height)).areas(area);
    draw_title(state, title, buffer);
    let body = workers.union(handoffs);
    match &state.snapshot {
        None => Line::raw("Waiting for the first news of the cluster.").render(bound, buffer),
        Some(snapshot) => {
            draw_bound(snapshot, bound, buffer);
            draw_times(snapshot, times, buffer);
            if !state.help {
                tables::workers(state, workers, buffer);
                tables::handoffs(snapshot, handoffs, buffer);
            }
            if state.lost.is_some() {
                buffer.set_style(bound.union(times).union(body), DIM);
            }
        }
    }
    if state.help {
        Paragraph::new(HELP.map(Line::raw).to_vec()).render(body, buffer);
    }
    Paragraph::new(messages_of(state, now, area.width)).render(messages, buffer);
    Line::styled(KEYS, DIM).render(keys, buffer);
}

/// Of the parts in their order.
fn heights(all: u16) -> [Constraint; 7] {
    let (usual, most) = HANDOFFS;
    let both = all - OTHERS;
    let handoffs = match all.checked_sub(24) {
        Some(more) => (usual + more / 3).min(most),
        None => both.saturating_sub(WORKERS).min(usual),
    };
    [1, 2, 2, both - handoffs, handoffs, MESSAGES, 1].map(Constraint::Length)
}

fn draw_title(state: &State, area: Rect, buffer: &mut Buffer) {
    buffer.set_style(area, TITLE);
    let feed = match (&state.lost, &state.snapshot) {
        (Some(_), _) => "NO FEED",
        (None, None) => "waiting",
        (None, Some(snapshot)) if snapshot.router.stale => "old view: no registry",
        (None, Some(_)) => "live",
    };
    let mut left = "baton top".to_owned();
    if let Some(snapshot) = &state.snapshot {
        let router = &snapshot.router;
        let models = router.models.iter().map(|model| model.as_str()).collect::<Vec<_>>().join(", ");
        let (prefill, decode) = (state.present(Role::Prefill), state.present(Role::Decode));
        let up = duration(router.uptime_s);
        left += &format!("  {models}  {prefill} prefill, {decode} decode  router {} up {up}", router.version);
    }
    let room = usize::from(area.width).saturating_sub(feed.len() + 2);
    buffer.set_stringn(area.x, area.y, left, room, BOLD);
    Line::styled(feed, BOLD).right_aligned().render(area, buffer);
}

fn draw_bound(snapshot: &Snapshot, area: Rect, buffer: &mut Buffer) {
    let mut spans = Vec::new();
    if let Some(why) = &snapshot.router.not_ready {
        spans.push(Span::styled(format!("The router is not ready: {why}. "), WRONG));
    }
    let style = if snapshot.bound.over { WRONG } else { BOLD };
    spans.push(Span::styled(snapshot.bound.sentence.as_str(), style));
    Paragraph::new(Line::from(spans)).wrap(Wrap { trim: true }).render(area, buffer);
}

fn draw_times(snapshot: &Snapshot, area: Rect, buffer: &mut Buffer) {
    let stats = &snapshot.stats;
    let line = |name: &str, Percentiles { p50, p90, p99 }: Percentiles, rest: String| {
        let [p50, p90, p99] = [p50, p90, p99].map(seconds);
        Line::raw(format!("{name:<4} p50 {p50:>8}  p90 {p90:>8}  p99 {p99:>8}  {rest}"))
    };
    let failed =
        if stats.failed > 0 { format!(", {} failed", units::count(Some(stats.failed))) } else { String::new() };
    let goodput = format!("goodput {} of {}/s{failed}", few(stats.goodput_per_s), few(stats.requests_per_s));
    let tokens = format!("{} tokens/s, {} running", few(stats.tokens_per_s), count(Some(snapshot.running)));
    Paragraph::new(vec![line("TTFT", stats.ttft_s, goodput), line("ITL", stats.itl_s, tokens)]).render(area, buffer);
}

/// Two lines: that the feed is lost, and what is asked or was said last, with what was said before it where there is room.
fn messages_of(state: &State, now: f64, width: u16) -> Vec<Line<'static>> {
    let mut said: Vec<(String, Style)> = state
        .messages(now)
        .map(|message| (message.text.to_string(), if message.wrong { WRONG } else { Style::new() }))
        .collect();
    said.extend(state.busy.iter().map(|change| (format!("Asking: {}", change.question()), DIM)));
    said.extend(state.pending.iter().map(|change| (format!("{} y/n", change.question()), BOLD)));
    if state.typing {
        said.push((format!("filter: {}_ (Enter keeps it, Esc shows all)", state.filter), BOLD));
    }
    let mut lines = Vec::new();
    if let Some(lost) = &state.lost {
        let (age, again) = ((now - state.seen).max(0.0), (lost.again - now).max(0.0));
        let text = format!("Feed lost; this is {age:.0} s old, next try in {again:.0} s: {}", lost.why);
        lines.push(Line::styled(text, WRONG));
    }
    let room = usize::from(MESSAGES) - lines.len();
    let mut below: Vec<Line<'static>> = Vec::new();
    for (text, style) in said.into_iter().rev() {
        let own = wrapped(&text, width.into()).into_iter().take(room - below.len());
        below.splice(0..0, own.map(|line| Line::styled(line, style)));
    }
    // What was said last is next to the keys.
    lines.extend(vec![Line::default(); room - below.len()]);
    lines.extend(below);
    lines
}

/// Lines of at most so many characters, broken between words.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut().filter(|line| line.chars().count() + 1 + word.chars().count() <= width) {
            Some(line) => *line += &format!(" {word}"),
            None => lines.push(word.to_owned()),
        }
    }
    lines
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::terminal::Key;
    use crate::top::snapshot::Text;
    use crate::top::snapshot::tests::snapshot;
    use crate::top::state::tests::{keys, many, told};

    /// The lines of the screen, without the spaces at their ends.
    pub fn lines(state: &State, now: f64, width: u16, height: u16) -> Vec<String> {
        let mut buffer = Buffer::empty(Rect::new(0, 0, width, height));
        draw(state, now, &mut buffer);
        let rows = buffer.content().chunks(usize::from(width.max(1)));
        rows.map(|row| row.iter().map(|cell| cell.symbol()).collect::<String>().trim_end().to_owned()).collect()
    }

    #[test]
    fn a_cluster_fits_into_80_columns_and_24_lines() {
        let mut state = told(&snapshot(), 1.0);
        let mut later = snapshot();
        later.workers[1].steps = Some(1100);
        state.told(later, 2.0);
        let want = [
            "baton top  random:tiny  1 prefill, 1 decode  router 0.1.0 up 2 min          live",
            "Prefill bounds the cluster: 12345 prompt tokens are to be computed, so a prompt",
            "that comes now waits 1.2 s; 1.0 s to the first token are allowed.",
            "TTFT p50  12.3 ms  p90  20.1 ms  p99   1.50 s  goodput 1.25 of 1.50/s, 2 failed",
            "ITL  p50   450 us  p90   9.9 ms  p99        -  123 tokens/s, 6 running",
            "  NAME     ROLE^   STATE    KV                  QUEUE  WAIT   RUN  ROWS  STEPS/S",
            "> waaaaaa  prefill serving  [#++.......]  10%   12.3k     3     1     0     0.00",
            "  wbbbbbb  decode  serving  [#######++.]  70%       0     0     5     5      100",
            "  wcccccc  decode  lost     -                       -     -     -     -        -",
            "",
            "",
            "",
            "",
            "",
            "",
            "WHEN     REQUEST      FROM -> TO         OVER            KV        IN       RATE",
            "3 s ago  cmpl-0123456 waaaaaa -> wbbbbbb shm        1.5 MiB    3.1 ms 507.4 MB/s",
            "61 s ago cmpl-2       - -> -             tcp          512 B      0 us          -",
            "",
            "",
            "",
            "",
            "",
            KEYS,
        ];
        assert_eq!(lines(&state, 2.0, 80, 24), want);
    }

    #[test]
    fn larger_terminals_show_more() {
        let mut told = many(40);
        told.handoffs = vec![snapshot().handoffs[0].clone(); 12];
        let state = super::super::state::tests::told(&told, 1.0);
        let lines = lines(&state, 1.0, 132, 50);
        assert_eq!(lines.len(), 50);
        assert!(lines[6].contains("wa00000000000000") && lines[6].contains("http://10.0.0.0:8002"), "{}", lines[6]);
        assert_eq!(lines.iter().filter(|line| line.contains("serving")).count(), 27, "{lines:#?}");
        assert_eq!(lines[33], "13 workers below");
        assert_eq!(lines.iter().filter(|line| line.contains("s ago")).count(), 12, "{lines:#?}");
    }

    #[test]
    fn small_terminals_show_workers_and_say_when_they_are_too_small() {
        let state = told(&snapshot(), 1.0);
        let least = lines(&state, 1.0, LEAST.0, LEAST.1);
        assert!(least[6].starts_with("> waaaaaa  prefill serving  [#++.......]  10%"), "{least:#?}");
        assert!(least[13].starts_with("arrows select") && !least.concat().contains("WHEN"), "{least:#?}");
        assert_eq!(lines(&state, 1.0, 70, 10)[0], "60 x 14 are needed, this is 70 x 10. q quits.");
        // Nothing breaks at any size.
        for (width, height) in [(1, 1), (0, 0), (3, 200), (59, 14), (300, 14), (60, 15), (81, 25), (500, 300)] {
            lines(&state, 1.0, width, height);
        }
    }

    #[test]
    fn questions_and_messages_stand_above_the_keys() {
        let mut state = told(&snapshot(), 1.0);
        keys(&mut state, "jd", 1.0);
        let question = "Drain decode worker wbbbbbbbbbbbbbbb2 once its requests are done? y/n";
        assert_eq!(lines(&state, 1.0, 80, 24)[22], question, "{:#?}", lines(&state, 1.0, 80, 24));
        keys(&mut state, "n/dec", 1.0);
        let shown = lines(&state, 1.0, 80, 24);
        assert_eq!(shown[21..23], ["Nothing was changed.", "filter: dec_ (Enter keeps it, Esc shows all)"]);
        assert!(shown.concat().contains("2 of 3 workers match \"dec\"") && !shown.concat().contains("waaaaaa  "));
    }

    #[test]
    fn a_long_message_is_not_cut_off() {
        let mut state = told(&snapshot(), 1.0);
        state.said("Before.", false, 1.0);
        state.said(&format!("{} and {}", "x".repeat(70), "y".repeat(70)), true, 1.0);
        let shown = lines(&state, 1.0, 80, 24);
        assert_eq!(shown[21..23], [format!("{} and", "x".repeat(70)), "y".repeat(70)]);
    }

    #[test]
    fn a_lost_feed_is_said_and_the_last_snapshot_is_dim() {
        let mut state = told(&snapshot(), 1.0);
        state.said("One.", false, 3.0);
        state.said("Two.", false, 3.0);
        state.lost("the router has ended the feed", 2.0, 5.0);
        let mut buffer = Buffer::empty(Rect::new(0, 0, 80, 24));
        draw(&state, 6.0, &mut buffer);
        assert!(buffer.cell((3, 7)).unwrap().style().add_modifier.contains(Modifier::DIM));
        let shown = lines(&state, 6.0, 80, 24);
        assert!(shown[0].ends_with("NO FEED") && shown[7].contains("wbbbbbb"), "{shown:#?}");
        let said = "Feed lost; this is 5 s old, next try in 1 s: the router has ended the feed";
        assert_eq!(shown[21..23], [said, "Two."]);
    }

    #[test]
    fn help_explains_keys_and_columns() {
        let mut state = told(&snapshot(), 1.0);
        keys(&mut state, "?", 1.0);
        let shown = lines(&state, 1.0, 80, 24);
        for line in HELP {
            assert!(shown.iter().any(|shown| shown == line), "{line} is missing or cut off: {shown:#?}");
        }
        state.key(Key::Enter, 1.0);
        assert!(lines(&state, 1.0, 80, 24)[7].contains("wbbbbbb"));
    }

    #[test]
    fn what_is_not_known_yet_is_said() {
        let shown = lines(&State::default(), 0.0, 80, 24);
        assert!(
            shown[0].ends_with("waiting") && shown[1] == "Waiting for the first news of the cluster.",
            "{shown:#?}"
        );
        let mut told = snapshot();
        (told.router.not_ready, told.router.stale) = (Some(Text::from("no workers".to_owned())), true);
        told.workers.clear();
        told.handoffs.clear();
        let shown = lines(&super::super::state::tests::told(&told, 0.0), 0.0, 80, 24);
        assert!(
            shown[0].ends_with("old view: no registry")
                && shown[1].starts_with("The router is not ready: no workers. ")
        );
        assert!(shown.contains(&"No worker is known.".to_owned()), "{shown:#?}");
        assert!(shown.contains(&"No handoff in the last minute.".to_owned()), "{shown:#?}");
    }
}
