//! Tests of the state: keys and news in, effects and messages out.

use super::*;
use crate::top::snapshot::Blocks;
use crate::top::snapshot::tests::snapshot;

/// A state that was told this.
pub fn told(snapshot: &Snapshot, now: f64) -> State {
    let mut state = State::default();
    state.told(snapshot.clone(), now);
    state
}

/// Types this; what it led to last.
pub fn keys(state: &mut State, text: &str, now: f64) -> Option<Effect> {
    text.chars().map(|c| state.key(Key::Char(c), now)).last().flatten()
}

/// So many decode workers.
pub fn many(number: usize) -> Snapshot {
    let worker = |at: usize| Worker {
        id: Text::from(format!("wa{at:014}")),
        role: Text::from("decode".to_owned()),
        state: Text::from("serving".to_owned()),
        address: Text::from(format!("http://10.0.0.{at}:8002")),
        blocks: Some(Blocks { total: 100, used: at as u64, ..Blocks::default() }),
        ..Worker::default()
    };
    Snapshot { workers: (0..number).map(worker).collect(), ..Snapshot::default() }
}

fn ids(state: &State) -> Vec<&str> {
    state.shown().iter().map(|worker| worker.id.first(7)).collect()
}

fn selected(state: &State) -> Option<&str> {
    state.selected().map(|worker| worker.id.first(7))
}

fn last(state: &State) -> &str {
    state.messages.last().map_or("", |message| message.text.as_str())
}

#[test]
fn workers_are_sorted_by_any_column_and_the_other_way_round() {
    let mut state = told(&snapshot(), 1.0);
    assert_eq!(ids(&state), ["waaaaaa", "wbbbbbb", "wcccccc"], "prefill first");
    let mut by = BTreeMap::new();
    for column in Column::ALL {
        state.sort = column;
        by.insert(format!("{column:?}"), ids(&state).concat());
        let up = ids(&state)[0].to_owned();
        state.reversed = true;
        assert!(*ids(&state)[0] != up || column == Column::Steps, "{column:?} the other way round");
        state.reversed = false;
    }
    assert_eq!(by["Kv"], "wbbbbbbwaaaaaawcccccc", "the fullest first, and who says nothing last");
    assert_eq!(by["Queue"], "waaaaaawbbbbbbwcccccc");
    assert_eq!(by["Rows"], "wbbbbbbwaaaaaawcccccc");
    assert_eq!(by["State"], "wccccccwaaaaaawbbbbbb");
    state.sort = Column::Steps;
    keys(&mut state, "s", 1.0);
    assert_eq!(state.sort, Column::Name, "after the last column the first");
}

#[test]
fn the_selection_stays_with_its_worker() {
    let mut state = told(&snapshot(), 1.0);
    keys(&mut state, "j", 1.0);
    assert_eq!(selected(&state), Some("wbbbbbb"));
    keys(&mut state, "r", 1.0);
    assert_eq!((selected(&state), state.line()), (Some("wbbbbbb"), 0), "decode comes first now");
    let mut fewer = snapshot();
    fewer.workers.remove(1);
    state.told(fewer, 2.0);
    assert_eq!(selected(&state), Some("wcccccc"), "the worker that took its line");
    keys(&mut state, "jjjjj", 2.0);
    assert_eq!((selected(&state), state.line()), (Some("waaaaaa"), 1), "no further than the end");
    state.told(Snapshot::default(), 3.0);
    assert_eq!(keys(&mut state, "kjdG+", 3.0), None);
    assert_eq!(selected(&state), None);
    assert_eq!(last(&state), "No worker is selected.");
}

#[test]
fn the_filter_leaves_workers_that_have_its_text() {
    let mut state = told(&snapshot(), 1.0);
    keys(&mut state, "/DECOq", 1.0);
    assert!(state.typing && ids(&state).is_empty(), "keys are text while it is typed");
    state.key(Key::Backspace, 1.0);
    state.key(Key::Char('\u{9b}'), 1.0);
    state.key(Key::Enter, 1.0);
    assert_eq!((ids(&state), state.filter.as_str()), (vec!["wbbbbbb", "wcccccc"], "DECO"));
    assert_eq!(selected(&state), Some("wbbbbbb"));
    for (text, found) in [("lost", 1), (":7001", 1), ("tiny", 3), ("wccc", 1)] {
        state.filter = text.to_owned();
        assert_eq!(ids(&state).len(), found, "{text}");
    }
    state.key(Key::Escape, 1.0);
    assert_eq!(ids(&state).len(), 3);
    keys(&mut state, "/x", 1.0);
    state.key(Key::Escape, 1.0);
    assert!(!state.typing && state.filter.is_empty());
    assert_eq!(keys(&mut state, "q", 1.0), Some(Effect::Quit));
}

#[test]
fn nothing_changes_before_it_is_confirmed() {
    let mut state = told(&snapshot(), 1.0);
    assert_eq!(keys(&mut state, "jd", 1.0), None);
    let drain = Change::Drain { worker: Text::from("wbbbbbbbbbbbbbbb2".to_owned()), role: Role::Decode };
    assert_eq!(state.pending.as_ref(), Some(&drain));
    assert_eq!(keys(&mut state, "d+jsx", 1.0), None);
    state.key(Key::Enter, 1.0);
    assert_eq!(state.pending.as_ref(), Some(&drain), "only a yes or no ends it");
    for no in [Key::Char('n'), Key::Char('q'), Key::Escape] {
        state.pending = Some(drain.clone());
        assert_eq!((state.key(no, 1.0), &state.pending), (None, &None));
        assert_eq!(last(&state), "Nothing was changed.");
    }
    keys(&mut state, "d", 1.0);
    assert_eq!(keys(&mut state, "y", 1.0), Some(Effect::Change(drain.clone())));
    assert_eq!(keys(&mut state, "dy", 1.0), None);
    assert_eq!(last(&state), "The change before has not been answered yet.");
    state.answered(Err("no\x1b[2J".to_owned()), 1.0);
    assert_eq!((last(&state), &state.busy), ("no?[2J", &None));
    state.pending = Some(drain);
    assert_eq!(state.key(Key::Interrupt, 1.0), Some(Effect::Quit), "at any time");
}

#[test]
fn a_role_is_scaled_from_what_was_asked_for_last() {
    let mut state = told(&snapshot(), 1.0);
    let scale = |from, to| Some(Effect::Change(Change::Scale { role: Role::Decode, from, to }));
    assert_eq!(keys(&mut state, "j+y", 1.0), scale(1, 2), "the lost one does not count");
    state.answered(Ok(()), 1.0);
    assert_eq!(keys(&mut state, "+y", 1.0), scale(2, 3), "before the second is there");
    state.answered(Ok(()), 1.0);
    let mut more = many(3);
    state.told(more.clone(), 2.0);
    assert_eq!(keys(&mut state, "-y", 2.0), scale(3, 2));
    state.answered(Ok(()), 2.0);
    more.workers.truncate(2);
    state.told(more.clone(), 3.0);
    more.workers.truncate(1);
    state.told(more, 4.0);
    assert_eq!((keys(&mut state, "-", 4.0), &state.pending), (None, &None));
    assert_eq!(last(&state), "A cluster needs at least one decode worker.");
}

#[test]
fn a_drain_leaves_one_less_of_those_that_were_asked_for() {
    let mut state = told(&many(3), 1.0);
    keys(&mut state, "+y", 1.0);
    state.answered(Ok(()), 1.0);
    keys(&mut state, "dy", 1.0);
    state.answered(Ok(()), 1.0);
    assert_eq!(state.aims.get("decode"), Some(&3));
}

#[test]
fn what_cannot_be_changed_is_said_with_the_reason() {
    let mut state = told(&snapshot(), 1.0);
    keys(&mut state, "Gd", 1.0);
    assert_eq!(last(&state), "wccccccccccccccc3 is lost: nobody can tell it to drain.");
    let mut other = snapshot();
    other.workers[2].state = Text::from("draining".to_owned());
    other.workers[0].role = Text::from("embed".to_owned());
    state.told(other, 2.0);
    keys(&mut state, "d", 2.0);
    assert_eq!(last(&state), "wccccccccccccccc3 drains already.");
    state.sort = Column::Name;
    keys(&mut state, "g+", 2.0);
    assert_eq!(last(&state), "embed is no role that this version knows.");
    state.lost("gone", 1.0, 3.0);
    keys(&mut state, "jd", 3.0);
    assert_eq!(last(&state), "The feed is lost: what is shown may be old, so nothing is changed.");
    assert_eq!(state.pending, None);
    assert_eq!(state.messages(3.0).count(), 2);
    assert_eq!(state.messages(3.0 + SHOWN).count(), 0, "they do not stay");
}
