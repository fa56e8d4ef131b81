//! The two tables of the screen: workers, and the latest handoffs. Pure.

use ratatui::buffer::Buffer;
use ratatui::layout::{Constraint, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span, Text as Lines};
use ratatui::widgets::{Cell, Row, Table, Widget};

use super::snapshot::{Blocks, Handoff, Snapshot, Text, Worker};
use super::state::{Column, State};
use super::view::{BOLD, DIM};
use crate::units::{bytes, count, few, rate, seconds};

/// Characters of a name where there is no room for all of it.
const SHORT: usize = 7;
/// From so many columns on, names are shown in full, and then addresses too.
const FULL: u16 = 90;
const ADDRESSES: u16 = 116;
/// Characters of the bar that shows a pool.
const BAR: usize = 10;

const SELECTED: Style = Style::new().add_modifier(Modifier::REVERSED);

/// Workers in the order of the state, around the selected one, and below them how many others there are.
pub fn workers(state: &State, area: Rect, buffer: &mut Buffer) {
    let (shown, all) = (state.shown(), state.snapshot.as_ref().map_or(0, |snapshot| snapshot.workers.len()));
    let columns = columns(area.width);
    let mut room = usize::from(area.height.saturating_sub(1));
    if shown.len() > room || !state.filter.is_empty() || all == 0 {
        room = room.saturating_sub(1);
    }
    // The selected one stays in the middle where there are more.
    let first = state.line().saturating_sub(room / 2).min(shown.len().saturating_sub(room));
    let seen = shown.iter().enumerate().skip(first).take(room);
    let mut rows: Vec<Row<'_>> =
        seen.map(|(line, worker)| worker_row(state, worker, line == state.line(), &columns)).collect();
    let below = shown.len() - first - rows.len();
    let foot = foot(state, shown.len(), all, first, below);
    let at = Rect { y: area.y + 1 + rows.len() as u16, height: 1, ..area };
    let widths = columns.iter().map(|(_, width)| Constraint::Length(*width));
    let table = Table::new(std::mem::take(&mut rows), widths).header(worker_head(state, &columns));
    table.render(area, buffer);
    if at.y < area.bottom() {
        Line::styled(foot, DIM).render(at, buffer);
    }
}

fn foot(state: &State, shown: usize, all: usize, above: usize, below: usize) -> String {
    if all == 0 {
        return "No worker is known.".to_owned();
    }
    let mut parts = Vec::new();
    if !state.filter.is_empty() {
        parts.push(format!("{shown} of {all} workers match {:?}, Esc shows all", state.filter));
    }
    for (others, place) in [(above, "above"), (below, "below")] {
        if others > 0 {
            parts.push(format!("{others} workers {place}"));
        }
    }
    parts.join("; ")
}

/// A column of the table of workers.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Shown {
    Mark,
    Sorted(Column),
    Address,
}

/// Those that fit, with their widths. One space is between two.
fn columns(width: u16) -> Vec<(Shown, u16)> {
    let each = |column| match column {
        Column::Name if width >= FULL => 17,
        Column::Name | Column::State | Column::Steps => 8,
        Column::Role | Column::Queue => 7,
        Column::Kv => 17,
        Column::Wait | Column::Run | Column::Rows => 5,
    };
    let sorted = Column::ALL.map(|column| (Shown::Sorted(column), each(column)));
    let mut all = [(Shown::Mark, 1)].into_iter().chain(sorted).collect::<Vec<_>>();
    if width >= ADDRESSES {
        let taken: u16 = all.iter().map(|(_, width)| width + 1).sum();
        all.push((Shown::Address, width.saturating_sub(taken)));
    }
    let mut end = 0;
    all.into_iter()
        .take_while(|(_, own)| {
            end += own + 1;
            end <= width + 1
        })
        .collect()
}

fn worker_head(state: &State, columns: &[(Shown, u16)]) -> Row<'static> {
    let cell = |column: &Shown| {
        let name = match column {
            Shown::Mark => return Cell::default(),
            Shown::Address => return Cell::new("ADDRESS"),
            Shown::Sorted(Column::Name) => "NAME",
            Shown::Sorted(Column::Role) => "ROLE",
            Shown::Sorted(Column::State) => "STATE",
            Shown::Sorted(Column::Kv) => "KV",
            Shown::Sorted(Column::Queue) => "QUEUE",
            Shown::Sorted(Column::Wait) => "WAIT",
            Shown::Sorted(Column::Run) => "RUN",
            Shown::Sorted(Column::Rows) => "ROWS",
            Shown::Sorted(Column::Steps) => "STEPS/S",
        };
        let Shown::Sorted(own) = *column else { return Cell::default() };
        if own != state.sort {
            return aligned(own, name.to_owned());
        }
        let up = is_text(own) != state.reversed;
        aligned(own, format!("{name}{}", if up { '^' } else { 'v' })).style(BOLD)
    };
    Row::new(columns.iter().map(|(column, _)| cell(column))).style(Style::new().add_modifier(Modifier::UNDERLINED))
}

fn is_text(column: Column) -> bool {
    matches!(column, Column::Name | Column::Role | Column::State)
}

/// Numbers stand at the right.
fn aligned(column: Column, text: String) -> Cell<'static> {
    match column {
        column if is_text(column) || column == Column::Kv => Cell::new(text),
        _ => right(text),
    }
}

fn right(text: String) -> Cell<'static> {
    Cell::new(Lines::from(text).right_aligned())
}

fn worker_row<'a>(state: &State, worker: &'a Worker, selected: bool, columns: &[(Shown, u16)]) -> Row<'a> {
    let cell = |(column, width): &(Shown, u16)| match column {
        Shown::Mark => Cell::new(if selected { ">" } else { " " }),
        Shown::Address => Cell::new(worker.address.as_str()),
        Shown::Sorted(Column::Name) => {
            Cell::new(if *width > SHORT as u16 + 1 { worker.id.as_str() } else { worker.id.first(SHORT) })
        }
        Shown::Sorted(Column::Role) => Cell::new(worker.role.as_str()),
        Shown::Sorted(Column::State) => Cell::new(worker.state.as_str()),
        Shown::Sorted(Column::Kv) => Cell::new(pool(worker)),
        Shown::Sorted(Column::Queue) => right(count(worker.queued_tokens)),
        Shown::Sorted(Column::Wait) => right(count(worker.waiting)),
        Shown::Sorted(Column::Run) => right(count(worker.running)),
        Shown::Sorted(Column::Rows) => right(count(worker.rows)),
        Shown::Sorted(Column::Steps) => right(few(worker.steps.and_then(|_| state.steps.per_second(&worker.id)))),
    };
    let colour = match worker.state.as_str() {
        "serving" => Style::new(),
        "lost" => Style::new().fg(Color::Red),
        _ => Style::new().fg(Color::Yellow),
    };
    Row::new(columns.iter().map(cell)).style(if selected { colour.patch(SELECTED) } else { colour })
}

/// A bar of a pool's blocks, and the share in use.
fn pool(worker: &Worker) -> Line<'static> {
    let (Some(blocks), Some(in_use)) = (worker.blocks, worker.in_use()) else { return Line::raw("-") };
    let Blocks { total, used, cached, lent, quarantined } = blocks;
    // What there is of a state is seen, however little.
    let part = |of: u64, room: usize| match (of as f64 / total as f64 * BAR as f64).round() as usize {
        0 if of > 0 => 1.min(room),
        part => part.min(room),
    };
    let taken = part(used + lent + quarantined, BAR);
    let kept = part(cached, BAR - taken);
    let colour = if in_use >= 0.9 { Color::Red } else { Color::Green };
    Line::from(vec![
        Span::raw("["),
        Span::styled("#".repeat(taken), Style::new().fg(colour)),
        Span::styled("+".repeat(kept), Style::new().fg(Color::Blue)),
        Span::styled(".".repeat(BAR - taken - kept), DIM),
        Span::raw(format!("] {:>3.0}%", in_use * 100.0)),
    ])
}

/// The latest handoffs.
pub fn handoffs(snapshot: &Snapshot, area: Rect, buffer: &mut Buffer) {
    let head = Row::new([
        Cell::new("WHEN"),
        Cell::new("REQUEST"),
        Cell::new("FROM -> TO"),
        Cell::new("OVER"),
        right("KV".to_owned()),
        right("IN".to_owned()),
        right("RATE".to_owned()),
    ]);
    let widths = [8, 12, 18, 8, 9, 9, 10].map(Constraint::Length);
    let rows = snapshot.handoffs.iter().map(handoff_row);
    Table::new(rows, widths).header(head.style(Style::new().add_modifier(Modifier::UNDERLINED))).render(area, buffer);
    if snapshot.handoffs.is_empty() && area.height > 1 {
        Line::styled("No handoff in the last minute.", DIM).render(Rect { y: area.y + 1, height: 1, ..area }, buffer);
    }
}

fn handoff_row(one: &Handoff) -> Row<'_> {
    let end = |worker: &Option<Text>| worker.as_ref().map_or("-", |id| id.first(SHORT)).to_owned();
    let when = if one.age_ms < 1000 { "now".to_owned() } else { format!("{} s ago", one.age_ms / 1000) };
    let per_second = one.seconds.filter(|seconds| *seconds > 0.0).map(|seconds| one.bytes as f64 / seconds);
    Row::new([
        Cell::new(when),
        Cell::new(one.request.first(12)),
        Cell::new(format!("{} -> {}", end(&one.from), end(&one.to))),
        Cell::new(one.transport.as_str()),
        right(bytes(one.bytes)),
        right(seconds(one.seconds)),
        right(rate(per_second)),
    ])
}
