//! What the user has chosen to see, and has asked for. Pure: keys and news in, effects out; time is an argument, in seconds.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use baton_cluster::Role;

use super::snapshot::{Snapshot, Text, Worker, is_shown};
use super::steps::Steps;
use crate::terminal::Key;

/// Messages that are kept, and for how many seconds.
const MESSAGES: usize = 2;
const SHOWN: f64 = 60.0;
/// Most characters of a filter.
const FILTER: usize = 60;

/// A column by which workers are sorted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Column {
    Name,
    Role,
    State,
    Kv,
    Queue,
    Wait,
    Run,
    Rows,
    Steps,
}

impl Column {
    /// In the order of the table.
    pub const ALL: [Column; 9] = [
        Column::Name,
        Column::Role,
        Column::State,
        Column::Kv,
        Column::Queue,
        Column::Wait,
        Column::Run,
        Column::Rows,
        Column::Steps,
    ];

    fn next(self) -> Column {
        let at = Column::ALL.iter().position(|column| *column == self).map_or(0, |at| at + 1);
        Column::ALL[at % Column::ALL.len()]
    }
}

/// A change of the cluster.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Change {
    Drain { worker: Text, role: Role },
    Scale { role: Role, from: u32, to: u32 },
}

impl Change {
    /// What the user has to confirm.
    pub fn question(&self) -> String {
        match self {
            Change::Drain { worker, role } => {
                format!("Drain {} worker {} once its requests are done?", role.as_str(), worker.first(24))
            }
            Change::Scale { role, from, to } => format!("Scale {} from {from} to {to} workers?", role.as_str()),
        }
    }
}

/// What a key leads to outside.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Effect {
    Quit,
    /// Everything is to be drawn, whatever the terminal shows.
    Redraw,
    /// The user has confirmed this.
    Change(Change),
}

/// A line for the user.
#[derive(Clone, PartialEq, Debug)]
pub struct Message {
    pub text: Text,
    pub wrong: bool,
    at: f64,
}

/// That the feed is away.
#[derive(Clone, PartialEq, Debug)]
pub struct Lost {
    pub why: Text,
    /// When it is tried again.
    pub again: f64,
}

/// All that the view shows.
#[derive(Debug)]
pub struct State {
    pub snapshot: Option<Snapshot>,
    /// When the snapshot came.
    pub seen: f64,
    pub lost: Option<Lost>,
    pub sort: Column,
    pub reversed: bool,
    pub filter: String,
    /// The filter is being typed.
    pub typing: bool,
    /// What waits for a yes or no.
    pub pending: Option<Change>,
    /// What has been confirmed and has not been answered yet.
    pub busy: Option<Change>,
    pub help: bool,
    pub steps: Steps,
    /// The worker that is selected, and its line.
    selected: Option<Text>,
    line: usize,
    messages: Vec<Message>,
    /// How many workers were asked for, of the roles that have another number still.
    aims: BTreeMap<&'static str, u32>,
}

impl Default for State {
    fn default() -> State {
        State {
            snapshot: None,
            seen: 0.0,
            lost: None,
            sort: Column::Role,
            reversed: false,
            filter: String::new(),
            typing: false,
            pending: None,
            busy: None,
            help: false,
            steps: Steps::default(),
            selected: None,
            line: 0,
            messages: Vec::new(),
            aims: BTreeMap::new(),
        }
    }
}

impl State {
    /// The feed tells how the cluster is now.
    pub fn told(&mut self, snapshot: Snapshot, now: f64) {
        self.steps.take(&snapshot.workers, now);
        (self.snapshot, self.seen, self.lost) = (Some(snapshot), now, None);
        for role in [Role::Prefill, Role::Decode] {
            if self.aims.get(role.as_str()).is_some_and(|aim| *aim == self.present(role)) {
                self.aims.remove(role.as_str());
            }
        }
        self.keep_selection();
    }

    /// The feed is away, and is tried again after so many seconds.
    pub fn lost(&mut self, why: &str, after: f64, now: f64) {
        self.lost = Some(Lost { why: Text::from(why.to_owned()), again: now + after });
    }

    /// Who makes a change says something about it.
    pub fn said(&mut self, line: &str, wrong: bool, now: f64) {
        self.messages.push(Message { text: Text::from(line.to_owned()), wrong, at: now });
        let surplus = self.messages.len().saturating_sub(MESSAGES);
        self.messages.drain(..surplus);
    }

    /// The confirmed change has begun, which whoever makes it has said; or this is why not.
    pub fn answered(&mut self, outcome: Result<(), String>, now: f64) {
        let Some(change) = self.busy.take() else { return };
        if let Err(why) = outcome {
            return self.said(&why, true, now);
        }
        match change {
            Change::Scale { role, to, .. } => drop(self.aims.insert(role.as_str(), to)),
            // One less than was asked for, if more was asked for.
            Change::Drain { role, .. } => {
                self.aims.entry(role.as_str()).and_modify(|aim| *aim = aim.saturating_sub(1));
            }
        }
    }

    /// Messages that are not old, the newest last.
    pub fn messages(&self, now: f64) -> impl Iterator<Item = &Message> {
        self.messages.iter().filter(move |message| now - message.at < SHOWN)
    }

    /// Workers of a role that are there to stay.
    pub fn present(&self, role: Role) -> u32 {
        let workers = self.snapshot.iter().flat_map(|snapshot| &snapshot.workers);
        workers.filter(|worker| worker.role() == Some(role) && worker.stays()).count() as u32
    }

    /// The workers that the filter leaves, in order.
    pub fn shown(&self) -> Vec<&Worker> {
        let filter = self.filter.to_lowercase();
        let matches = |worker: &&Worker| {
            let Worker { id, role, model, address, state, .. } = worker;
            let texts = [id, role, model, address, state];
            filter.is_empty() || texts.iter().any(|text| text.as_str().to_lowercase().contains(&filter))
        };
        let workers = self.snapshot.iter().flat_map(|snapshot| &snapshot.workers);
        let mut shown: Vec<&Worker> = workers.filter(matches).collect();
        shown.sort_by(|one, other| {
            let order = self.compare(one, other);
            let order = if self.reversed { order.reverse() } else { order };
            // Equal ones keep their places.
            order.then_with(|| other.role.cmp(&one.role)).then_with(|| one.id.cmp(&other.id))
        });
        shown
    }

    /// Texts from A to Z, numbers from the highest on.
    fn compare(&self, one: &Worker, other: &Worker) -> Ordering {
        let most = |of: &dyn Fn(&Worker) -> Option<f64>| {
            let number = |worker| of(worker).unwrap_or(f64::NEG_INFINITY);
            number(other).total_cmp(&number(one))
        };
        let count = |of: fn(&Worker) -> Option<u64>| most(&|worker| of(worker).map(|count| count as f64));
        match self.sort {
            Column::Name => one.id.cmp(&other.id),
            // Prefill first, as a request meets them.
            Column::Role => other.role.cmp(&one.role),
            Column::State => one.state.cmp(&other.state),
            Column::Kv => most(&Worker::in_use),
            Column::Queue => count(|worker| worker.queued_tokens),
            Column::Wait => count(|worker| worker.waiting),
            Column::Run => count(|worker| worker.running),
            Column::Rows => count(|worker| worker.rows),
            Column::Steps => most(&|worker| self.steps.per_second(&worker.id)),
        }
    }

    /// The line of the selected worker among those shown.
    pub fn line(&self) -> usize {
        self.line
    }

    fn selected(&self) -> Option<&Worker> {
        self.shown().get(self.line).copied()
    }

    /// Keeps the selection at its worker, or at its line if the worker is gone.
    fn keep_selection(&mut self) {
        let shown = self.shown();
        let found = shown.iter().position(|worker| Some(&worker.id) == self.selected.as_ref());
        let line = found.unwrap_or(self.line.min(shown.len().saturating_sub(1)));
        let id = shown.get(line).map(|worker| worker.id.clone());
        (self.line, self.selected) = (line, id);
    }

    fn select(&mut self, line: usize) {
        self.line = line.min(self.shown().len().saturating_sub(1));
        self.selected = self.selected().map(|worker| worker.id.clone());
    }

    /// Takes a key.
    pub fn key(&mut self, key: Key, now: f64) -> Option<Effect> {
        match key {
            Key::Interrupt => return Some(Effect::Quit),
            Key::Redraw => return Some(Effect::Redraw),
            _ => {}
        }
        if let Some(change) = self.pending.take() {
            return self.confirm(change, key, now);
        }
        if self.typing {
            self.edit_filter(key);
            return None;
        }
        if std::mem::take(&mut self.help) {
            return None;
        }
        match key {
            Key::Char('q') => return Some(Effect::Quit),
            Key::Char('?' | 'h') => self.help = true,
            Key::Char('s') => self.sort = self.sort.next(),
            Key::Char('r') => self.reversed = !self.reversed,
            Key::Char('/') => self.typing = true,
            Key::Escape => self.filter.clear(),
            Key::Up | Key::Char('k') => self.select(self.line.saturating_sub(1)),
            Key::Down | Key::Char('j') => self.select(self.line + 1),
            Key::Home | Key::Char('g') => self.select(0),
            Key::End | Key::Char('G') => self.select(usize::MAX),
            Key::Char('d') => self.ask(now, State::drain),
            Key::Char('+' | '=') => self.ask(now, |state, worker| state.scale(worker, 1)),
            Key::Char('-') => self.ask(now, |state, worker| state.scale(worker, -1)),
            _ => {}
        }
        self.keep_selection();
        None
    }

    fn confirm(&mut self, change: Change, key: Key, now: f64) -> Option<Effect> {
        match key {
            Key::Char('y' | 'Y') => {
                self.busy = Some(change.clone());
                return Some(Effect::Change(change));
            }
            Key::Char('n' | 'N' | 'q') | Key::Escape => self.said("Nothing was changed.", false, now),
            // Any other key is a slip.
            _ => self.pending = Some(change),
        }
        None
    }

    fn edit_filter(&mut self, key: Key) {
        match key {
            Key::Char(c) if is_shown(c) && self.filter.chars().count() < FILTER => self.filter.push(c),
            Key::Backspace => drop(self.filter.pop()),
            Key::KillToStart | Key::KillWord => self.filter.clear(),
            Key::Enter => self.typing = false,
            Key::Escape => {
                self.filter.clear();
                self.typing = false;
            }
            _ => {}
        }
        self.keep_selection();
    }

    /// Asks the user to confirm a change of the selected worker, or of its role; or says why it cannot be.
    fn ask(&mut self, now: f64, change: impl Fn(&State, &Worker) -> Result<Change, String>) {
        let asked = match (self.selected(), &self.lost, &self.busy) {
            (_, Some(_), _) => Err("The feed is lost: what is shown may be old, so nothing is changed.".to_owned()),
            (_, _, Some(_)) => Err("The change before has not been answered yet.".to_owned()),
            (None, ..) => Err("No worker is selected.".to_owned()),
            (Some(worker), None, None) => change(self, worker),
        };
        match asked {
            Ok(change) => self.pending = Some(change),
            Err(why) => self.said(&why, true, now),
        }
    }

    fn drain(&self, worker: &Worker) -> Result<Change, String> {
        let Some(role) = worker.role() else {
            return Err(format!("{} is no role that this version knows.", worker.role));
        };
        match worker.state.as_str() {
            "draining" => Err(format!("{} drains already.", worker.id)),
            "lost" => Err(format!("{} is lost: nobody can tell it to drain.", worker.id)),
            _ => Ok(Change::Drain { worker: worker.id.clone(), role }),
        }
    }

    fn scale(&self, worker: &Worker, by: i32) -> Result<Change, String> {
        let Some(role) = worker.role() else {
            return Err(format!("{} is no role that this version knows.", worker.role));
        };
        let from = self.aims.get(role.as_str()).copied().unwrap_or_else(|| self.present(role));
        match (role, from.checked_add_signed(by)) {
            (_, None) => Err(format!("There is no {} worker to take away.", role.as_str())),
            (Role::Decode, Some(0)) => Err("A cluster needs at least one decode worker.".to_owned()),
            (_, Some(to)) => Ok(Change::Scale { role, from, to }),
        }
    }
}

#[cfg(test)]
pub mod tests;
