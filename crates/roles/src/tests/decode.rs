//! The decode role's table: what every input does in every stage.

use std::fmt::Write;
use std::time::Duration;

use baton_engine::Start;
use baton_handoff::{FenceState, ReceiverEvent, TransferError, TransportKind};
use baton_types::{BlockId, Epoch, SeqId, TokenOut, WorkerId};

use super::rig::{Rig, SEQ, VOCAB, compare, request, rewrite};
use crate::decode::{Answer, Command, Effect};
use crate::{Decode, Input, Loan, Ticket, write_first_token};

const FILE: &str = "decode.txt";
const EPOCH: Epoch = Epoch(1);

type In = Input<Command>;

fn rig() -> Rig<Decode> {
    Rig::new(|_| Decode::new(Duration::from_secs(30), VOCAB))
}

fn generate(start: Start) -> In {
    Input::Command(Command::Generate { ticket: Ticket(7), new: request(start, 6) })
}

fn command(command: Command) -> In {
    Input::Command(command)
}

fn lent(outcome: Result<Vec<u8>, TransferError>) -> In {
    command(Command::Lent { epoch: EPOCH, outcome })
}

fn fence(state: FenceState) -> In {
    command(Command::FenceBegun { epoch: EPOCH, state })
}

fn verified(tail: Vec<u8>) -> In {
    let (epoch, transport) = (EPOCH, TransportKind::Tcp);
    command(Command::Received(ReceiverEvent::Verified {
        epoch,
        tail,
        bytes: 9,
        seconds: 0.1,
        transport,
        digests: vec![],
    }))
}

fn failed(error: TransferError) -> In {
    command(Command::Received(ReceiverEvent::Failed { epoch: EPOCH, error, transport: None }))
}

fn tail(index: u32) -> Vec<u8> {
    write_first_token(&TokenOut { index, id: 7, ..TokenOut::default() })
}

fn corrupt() -> TransferError {
    let (epoch, peer, block) = (EPOCH, WorkerId(9), BlockId(0));
    TransferError::Verify { epoch, peer, group: 0, index: 0, block, want: 1, got: 2 }
}

type Path = Vec<fn() -> In>;
type Named = (&'static str, fn() -> In);

fn stages() -> Vec<(&'static str, Path)> {
    fn receive() -> In {
        generate(Start::Receive)
    }
    fn turn() -> In {
        Input::Turn
    }
    fn taken() -> In {
        lent(Ok(vec![1]))
    }
    fn cancel() -> In {
        command(Command::Cancel(SEQ))
    }
    fn pending() -> In {
        fence(FenceState::Pending)
    }
    fn arrived() -> In {
        verified(tail(0))
    }
    fn broken() -> In {
        failed(corrupt())
    }
    let reserved: Path = vec![receive, turn, taken];
    let with = |more: &[fn() -> In]| [&reserved[..], more].concat();
    vec![
        ("nothing", vec![]),
        ("queued", vec![receive]),
        ("lending", vec![receive, turn]),
        ("reserved", with(&[])),
        ("running on a handoff", with(&[arrived])),
        ("running, computed here", vec![|| generate(Start::Compute), turn]),
        ("cancelled while lending", vec![receive, turn, cancel]),
        ("cancelled, being fenced", with(&[cancel, pending])),
        ("failed, not fenced yet", with(&[broken])),
        ("fenced", with(&[broken, || command(Command::Received(ReceiverEvent::Fenced { epoch: EPOCH }))])),
        ("drains", vec![|| Input::Drain]),
    ]
}

fn inputs() -> Vec<Named> {
    vec![
        ("Generate", || generate(Start::Receive)),
        ("Turn", || Input::Turn),
        ("Cancel", || command(Command::Cancel(SEQ))),
        ("Lent", || lent(Ok(vec![1]))),
        ("Lent, refused", || lent(Err(TransferError::Closed))),
        ("FenceBegun clear", || fence(FenceState::Clear)),
        ("FenceBegun pending", || fence(FenceState::Pending)),
        ("Verified", || verified(tail(0))),
        ("Verified, wrong index", || verified(tail(1))),
        ("Verified, no token", || verified(vec![1])),
        ("Failed, corrupt", || failed(corrupt())),
        ("Failed, withdrawn", || failed(TransferError::Aborted { epoch: EPOCH })),
        ("Fenced", || command(Command::Received(ReceiverEvent::Fenced { epoch: EPOCH }))),
    ]
}

fn effect(effect: &Effect) -> String {
    match effect {
        Effect::Accepted { outcome, .. } => match outcome {
            Ok(SeqId(seq)) => format!("Accepted {seq}"),
            Err(refused) => format!("Refused ({refused})"),
        },
        Effect::Say(_, Answer::Scored(tokens)) => format!("Say Scored {}", tokens.len()),
        Effect::Say(_, Answer::Token(token)) => format!("Say Token {}", token.index),
        Effect::Say(_, Answer::Failed(kind, _)) => format!("Say Failed {kind:?}"),
        Effect::Say(_, answer) => format!("Say {answer:?}"),
        Effect::Lend(Loan { epoch, tokens, first, blocks, .. }) => {
            let counts: Vec<usize> = blocks.iter().map(Vec::len).collect();
            format!("Lend {epoch} {tokens} tokens {counts:?} from {first:?}")
        }
        Effect::Release(epoch) => format!("Release {epoch}"),
        Effect::Fence(epoch) => format!("Fence {epoch}"),
        Effect::Arrived { bytes, .. } => format!("Arrived {bytes}"),
        Effect::HandoffFailed { error, .. } => format!("HandoffFailed {}", error.cause()),
    }
}

fn state(rig: &Rig<Decode>) -> String {
    let role = rig.core.role();
    let stage = role.stage(SEQ).map_or("–".to_owned(), |stage| format!("{stage:?}"));
    let (lent, fencing) = role.epochs();
    format!("{stage}, {lent} lent {fencing} fencing, {}", rig.blocks())
}

fn table() -> String {
    let mut text = String::new();
    for (name, path) in stages() {
        let mut rig = rig();
        path.iter().for_each(|input| rig.input(input()));
        writeln!(text, "## {name}: {}", state(&rig)).unwrap();
        for (label, input) in inputs() {
            let mut rig = self::rig();
            path.iter().for_each(|input| rig.input(input()));
            rig.said.clear();
            rig.input(input());
            let effects: Vec<String> = rig.said.iter().map(effect).collect();
            writeln!(text, "{label:<22} {} -> {}", state(&rig), effects.join("; ")).unwrap();
        }
        text.push('\n');
    }
    text.lines().map(|line| line.trim_end().to_owned() + "\n").collect()
}

#[test]
fn every_stage_and_input_is_as_committed() {
    compare(&table(), FILE);
}

#[test]
#[ignore = "rewrites the committed table"]
fn rewrite_the_decode_table() {
    rewrite(&table(), FILE);
}

/// I3: lent blocks are free only after the fence is confirmed. I6: after that, they are free.
#[test]
fn blocks_are_aside_until_the_fence() {
    let mut rig = rig();
    for input in [generate(Start::Receive), Input::Turn, lent(Ok(vec![1])), command(Command::Cancel(SEQ))] {
        rig.input(input);
    }
    assert_eq!(rig.said.last(), Some(&Effect::Fence(EPOCH)));
    rig.input(fence(FenceState::Pending));
    let blocks = rig.core.engine().counts();
    assert!(blocks.quarantined > 0 && blocks.free + blocks.quarantined == blocks.total);
    rig.input(command(Command::Received(ReceiverEvent::Fenced { epoch: EPOCH })));
    assert!(rig.core.engine().idle());
    assert_eq!(rig.core.role().epochs(), (0, 0));
}
