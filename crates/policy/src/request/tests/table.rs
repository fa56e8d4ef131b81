//! Checks every (state, input) pair against `table.txt`. After an intended change, rewrite the file with
//! `cargo test -p baton-policy rewrite_the_table -- --ignored` and read the difference.

use std::fmt::Write;

use super::*;
use crate::request::State;

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src/request/tests/table.txt");

fn states() -> Vec<(&'static str, Vec<Input>)> {
    let prefilling = vec![split(D1, P1), reserved()];
    let with = |mut before: Vec<Input>, more: Vec<Input>| {
        before.extend(more);
        before
    };
    let prefill_lost = || Input::PrefillLost(lost(ErrorKind::Unavailable));
    let decode_lost = || Input::DecodeLost(lost(ErrorKind::Unavailable));
    vec![
        ("placing", vec![]),
        ("placing again", vec![local(D1), token(0), decode_lost()]),
        ("backing off", vec![local(D1), decode_lost(), Input::NotPlaced(lost(ErrorKind::Unavailable))]),
        ("queued", vec![late(D1, P1)]),
        ("reserving late", vec![late(D1, P1), Input::Due]),
        ("reserving", vec![split(D1, P1)]),
        ("reserving, asked both", vec![meanwhile(D1, P1)]),
        ("prefilling", prefilling.clone()),
        ("prefilling, decode ahead", with(prefilling.clone(), vec![token(1)])),
        ("prefilling, decode ended", with(prefilling.clone(), vec![token(1), finished(FinishReason::Stop)])),
        ("placing prefill", with(prefilling.clone(), vec![prefill_lost()])),
        ("prefilling elsewhere", with(prefilling.clone(), vec![first(0), prefill_lost(), split(D1, P2), reserved()])),
        ("transferring", with(prefilling.clone(), vec![first(0)])),
        ("decoding, none yet", with(prefilling.clone(), vec![first(0), Input::Transferred])),
        ("decoding", with(prefilling.clone(), vec![first(0), token(1)])),
        ("decoding locally", vec![local(D1), token(0)]),
        ("decoding without a handoff", vec![split(D1, P1), Input::Started { cached_tokens: 7 }]),
        ("last attempt", vec![local(D1), decode_lost(), local(D2), decode_lost(), local(D1), token(0)]),
        ("finished", vec![local(D1), finished(FinishReason::Stop)]),
        ("failed", vec![Input::Deadline]),
    ]
}

fn inputs() -> Vec<(&'static str, Input)> {
    let ended = |finish| Input::FirstToken { token: out(0), finish: Some(finish), cached_tokens: 7 };
    let stray = TokenOut { index: 0, id: 5, ..TokenOut::default() };
    let full = || lost(ErrorKind::ResourceExhausted);
    vec![
        ("Placed split", split(D2, P2)),
        ("Placed local", local(D2)),
        ("Placed late", late(D2, P2)),
        ("Placed, ask both", meanwhile(D2, P2)),
        ("Due", Input::Due),
        ("NotPlaced", Input::NotPlaced(lost(ErrorKind::Unavailable))),
        ("Reserved", reserved()),
        ("FirstToken 0", first(0)),
        ("FirstToken 0, ends", ended(FinishReason::Stop)),
        ("FirstToken 1", first(1)),
        ("Transferred", Input::Transferred),
        ("Token 0", token(0)),
        ("Token 0, another id", Input::Token(stray)),
        ("Token 1", token(1)),
        ("Token 2", token(2)),
        ("Token 5", token(5)),
        ("Started", Input::Started { cached_tokens: 7 }),
        ("Finished stop", finished(FinishReason::Stop)),
        ("Finished cancelled", finished(FinishReason::Cancelled)),
        ("DecodeLost", Input::DecodeLost(lost(ErrorKind::Unavailable))),
        ("DecodeLost, full", Input::DecodeLost(full())),
        ("DecodeLost, bad input", Input::DecodeLost(lost(ErrorKind::InvalidArgument))),
        ("PrefillLost", Input::PrefillLost(lost(ErrorKind::Unavailable))),
        ("PrefillLost, bad input", Input::PrefillLost(lost(ErrorKind::InvalidArgument))),
        ("HandoffFailed", Input::HandoffFailed(lost(ErrorKind::Unavailable))),
        ("VerifyFailed", verify()),
        ("Stalled", Input::Stalled(Failure::silent("nothing came"))),
        ("BackoffOver", Input::BackoffOver),
        ("StopMatched", Input::StopMatched),
        ("Deadline", Input::Deadline),
        ("Abort", Input::Abort(lost(ErrorKind::Unavailable))),
        ("ClientGone", Input::ClientGone),
    ]
}

pub(crate) fn state(state: State) -> String {
    match state {
        State::Placing => "Placing".into(),
        State::BackingOff => "BackingOff".into(),
        State::Queued { decode, prefill } => format!("Queued {decode} {prefill}"),
        State::Reserving { decode, prefill } => format!("Reserving {decode} {prefill}"),
        State::PlacingPrefill { decode } => format!("PlacingPrefill {decode}"),
        State::Prefilling { decode, prefill } => format!("Prefilling {decode} {prefill}"),
        State::Transferring { decode, prefill } => format!("Transferring {decode} {prefill}"),
        State::Decoding { decode, prefill: Some(prefill) } => format!("Decoding {decode} {prefill}"),
        State::Decoding { decode, prefill: None } => format!("Decoding {decode} locally"),
        State::Finished => "Finished".into(),
        State::Failed => "Failed".into(),
    }
}

fn action(action: &Action) -> String {
    match action {
        Action::Place { decode, split } => {
            let what = if *split { "split" } else { "local" };
            decode.map_or(format!("Place {what}"), |d| format!("Place prefill for {d}"))
        }
        Action::OpenDecode { worker, local } => {
            format!("OpenDecode {worker}{}", if *local { " locally" } else { "" })
        }
        Action::RunPrefill { worker } => format!("RunPrefill {worker}"),
        Action::QueuePrefill { worker } => format!("QueuePrefill {worker}"),
        Action::SendTarget => "SendTarget".into(),
        Action::Emit(t) => format!("Emit {}", t.index),
        Action::CancelDecode => "CancelDecode".into(),
        Action::CancelPrefill => "CancelPrefill".into(),
        Action::Backoff(d) => format!("Backoff {} ms", d.as_millis()),
        Action::Blame(leg) => format!("Blame {}", leg.as_str()),
        Action::Recovering { leg, cause } => format!("Recovering {} ({:?})", leg.as_str(), cause.kind),
        Action::Finish { reason, cached_tokens } => format!("Finish {reason:?}, {cached_tokens} cached"),
        Action::Fail(f) => format!("Fail {:?}: {}", f.kind, f.message),
    }
}

fn table() -> String {
    let mut text = String::new();
    for (name, before) in states() {
        let (machine, _) = after(before);
        writeln!(text, "## {name}: {}, {} emitted", state(machine.state()), machine.emitted().len()).unwrap();
        for (label, input) in inputs() {
            let (mut machine, mut actions) = (machine.clone(), Vec::new());
            let from = machine.state();
            machine.step(input, &mut actions);
            let actions: Vec<String> = actions.iter().map(action).collect();
            let to = match machine.state() {
                to if to == from && actions.is_empty() => "–".into(),
                to => state(to),
            };
            writeln!(text, "{label:<24}{to:<24}{}", actions.join("; ")).unwrap();
        }
        text.push('\n');
    }
    text.lines().map(|l| l.trim_end().to_owned() + "\n").collect()
}

#[test]
fn every_state_and_input_is_as_committed() {
    let committed = std::fs::read_to_string(FILE).unwrap_or_default();
    for (got, want) in table().lines().zip(committed.lines()) {
        assert_eq!(got, want, "the transition table changed");
    }
    assert_eq!(table().len(), committed.len(), "the transition table changed its size");
}

#[test]
#[ignore = "rewrites the committed table"]
fn rewrite_the_table() {
    std::fs::write(FILE, table()).unwrap();
}
