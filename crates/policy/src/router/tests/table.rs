//! Checks every (state, input) pair of a choice against `table.txt`. After an intended change, rewrite the file with
//! `cargo test -p baton-policy rewrite_the_choices_table -- --ignored` and read the difference.

use std::fmt::Write;

use super::*;
use crate::request::tests::table::state;

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src/router/tests/table.txt");

fn scenes() -> Vec<(&'static str, Scene)> {
    let decode_lost = || ChoiceInput::DecodeEnded(LegEnd::Early);
    let prefilling = || vec![split(D1, P1), reserved()];
    let more = |inputs: Vec<ChoiceInput>| Scene::after(prefilling().into_iter().chain(inputs));
    let path_lost = || ChoiceInput::DecodeEnded(answered(ErrorKind::PathLost));
    vec![
        ("placing", Scene::new()),
        ("placing again", Scene::after([local(D1), token(0), decode_lost()])),
        ("backing off", Scene::after([local(D1), token(0), decode_lost(), nobody()])),
        ("queued", Scene::after([late(D1, P1)])),
        ("reserving late", Scene::after([late(D1, P1), due()])),
        ("prefilling late", Scene::after([late(D1, P1), due(), reserved()])),
        ("reserving", Scene::after([split(D1, P1)])),
        ("reserving, asked both", Scene::after([meanwhile(D1, P1)])),
        ("prefilling", more(vec![])),
        ("prefilling, decode ahead", more(vec![token(1)])),
        ("prefilling, decode ended", more(vec![token(1), finished()])),
        ("prefilling, path lost", more(vec![path_lost()])),
        ("placing prefill", more(vec![ChoiceInput::PrefillEnded(LegEnd::Early)])),
        ("transferring", more(vec![first(0)])),
        ("transferring, path lost", more(vec![first(0), path_lost()])),
        ("decoding, none yet", more(vec![first(0), transferred()])),
        ("decoding", more(vec![first(0), transferred(), token(1)])),
        ("decoding locally", Scene::after([local(D1), token(0)])),
        ("finished", Scene::after([local(D1), token(0), finished()])),
        ("failed", Scene::after([ChoiceInput::Stopping])),
    ]
}

fn inputs() -> Vec<(&'static str, ChoiceInput)> {
    let started = DecodeWord::Started { cached_tokens: 7 };
    let ends = PrefillWord::FirstToken { token: out(0), finish: Some(FinishReason::Stop), cached_tokens: 7 };
    let decode_ended = ChoiceInput::DecodeEnded;
    let prefill_ended = ChoiceInput::PrefillEnded;
    vec![
        ("Placed split", split(D2, P2)),
        ("Placed local", local(D2)),
        ("Placed late", late(D2, P2)),
        ("Placed, ask both", meanwhile(D2, P2)),
        ("Placed nobody", nobody()),
        ("Decode: reserved", reserved()),
        ("Decode: started", ChoiceInput::DecodeSaid(started)),
        ("Decode: token 0", token(0)),
        ("Decode: token 1", token(1)),
        ("Decode: token 2", token(2)),
        ("Decode: finished", finished()),
        ("Decode ended early", decode_ended(LegEnd::Early)),
        ("Decode: unavailable", decode_ended(answered(ErrorKind::Unavailable))),
        ("Decode: path lost", decode_ended(answered(ErrorKind::PathLost))),
        ("Decode: data loss", decode_ended(answered(ErrorKind::DataLoss))),
        ("Decode: bad input", decode_ended(answered(ErrorKind::InvalidArgument))),
        ("Decode lost", decode_ended(lost(false))),
        ("Decode drains", decode_ended(LegEnd::Draining { message: "no".into() })),
        ("Decode left", decode_ended(LegEnd::Left { worker: D1 })),
        ("Prefill: due", due()),
        ("Prefill: token 0", first(0)),
        ("Prefill: token 0, ends", ChoiceInput::PrefillSaid(ends)),
        ("Prefill: transferred", transferred()),
        ("Prefill ended early", prefill_ended(LegEnd::Early)),
        ("Prefill: unavailable", prefill_ended(answered(ErrorKind::Unavailable))),
        ("Prefill: path lost", prefill_ended(answered(ErrorKind::PathLost))),
        ("Prefill: data loss", prefill_ended(answered(ErrorKind::DataLoss))),
        ("Prefill drains", prefill_ended(LegEnd::Draining { message: "no".into() })),
        ("Prefill silent", prefill_ended(lost(true))),
        ("Taken: sent", ChoiceInput::Taken(Taken::Sent)),
        ("Taken: stop matched", ChoiceInput::Taken(Taken::StopMatched)),
        ("Taken: client gone", ChoiceInput::Taken(Taken::ClientGone)),
        ("Client gone", ChoiceInput::ClientGone),
        ("Stopping", ChoiceInput::Stopping),
        ("Wake now", ChoiceInput::Wake),
    ]
}

fn effect(effect: &Effect) -> String {
    match effect {
        Effect::Place(ask) => {
            let Ask { split, decode, avoid, .. } = &**ask;
            let what = if *split { "split" } else { "local" };
            let what = decode.map_or(what.to_owned(), |d| format!("prefill for {d}"));
            let avoid: String = avoid.iter().map(|worker| format!(" but {worker}")).collect();
            format!("Place {what}{avoid}")
        }
        Effect::OpenDecode { worker, local, sequence } => {
            format!("OpenDecode {worker}{} with {}", if *local { " locally" } else { "" }, sequence.tokens.len())
        }
        Effect::OpenPrefill { worker, target, sequence } => {
            let late = if target.is_none() { " without a target" } else { "" };
            format!("OpenPrefill {worker} with {}{late}", sequence.tokens.len())
        }
        Effect::SendTarget(_) => "SendTarget".into(),
        Effect::DropDecode => "DropDecode".into(),
        Effect::DropPrefill => "DropPrefill".into(),
        Effect::Emit(t) => format!("Emit {}", t.index),
        Effect::EmitScored(tokens) => format!("EmitScored {}", tokens.len()),
        Effect::Recovering { leg, cause } => format!("Recovering {} ({:?})", leg.as_str(), cause.kind),
        Effect::Judge(Verdict { on, outcome: Outcome::Failed, .. }) => format!("Blame {on}"),
        Effect::Judge(Verdict { on, outcome: Outcome::Worked(_), .. }) => format!("Praise {on}"),
        Effect::Note { placed, .. } => match placed.prefill {
            Some(prefill) => format!("Note {} {prefill}", placed.decode),
            None => format!("Note {}", placed.decode),
        },
        Effect::Finish { reason, cached_tokens } => format!("Finish {reason:?}, {cached_tokens} cached"),
        Effect::Fail(f) => format!("Fail {:?}: {}", f.kind, f.message),
    }
}

/// One line of the table: the state after a step, and the step's effects. A wake is added when it changed and is near.
fn row(label: &str, mut scene: Scene, step: impl FnOnce(&mut Scene) -> Vec<Effect>) -> String {
    let (from, wake) = (scene.choice.state(), scene.choice.next_wake());
    let effects = step(&mut scene);
    let mut said: Vec<String> = effects.iter().map(effect).collect();
    if scene.choice.next_wake() != wake {
        let soon = scene.wakes_in().filter(|time| *time < Duration::from_secs(2));
        said.extend(soon.map(|time| format!("wake in {} ms", time.as_millis())));
    }
    let to = match scene.choice.state() {
        to if to == from && said.is_empty() => "–".into(),
        to => state(to),
    };
    format!("{label:<24}{to:<24}{}", said.join("; "))
}

fn table() -> String {
    let mut text = String::new();
    for (at, (name, scene)) in scenes().iter().enumerate() {
        let again = || scenes().swap_remove(at).1;
        writeln!(text, "## {name}: {}, {} emitted", state(scene.choice.state()), scene.emitted().len()).unwrap();
        for (label, input) in inputs() {
            writeln!(text, "{}", row(label, again(), |scene| scene.step(input))).unwrap();
        }
        if scene.choice.next_wake().is_some() {
            writeln!(text, "{}", row("Wake when asked", again(), Scene::wake)).unwrap();
        }
        text.push('\n');
    }
    text.lines().map(|l| l.trim_end().to_owned() + "\n").collect()
}

#[test]
fn every_state_and_input_is_as_committed() {
    let committed = std::fs::read_to_string(FILE).unwrap_or_default();
    for (got, want) in table().lines().zip(committed.lines()) {
        assert_eq!(got, want, "the choice's table changed");
    }
    assert_eq!(table().len(), committed.len(), "the choice's table changed its size");
}

#[test]
#[ignore = "rewrites the committed table"]
fn rewrite_the_choices_table() {
    std::fs::write(FILE, table()).unwrap();
}
