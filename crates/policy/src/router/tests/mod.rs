//! Tests of a choice's pinned transitions, of a choice's own rules, and of the fleet.

mod choice;
mod fleet;
mod properties;
mod table;

use std::time::{Duration, Instant};

use baton_types::{Class, ErrorKind, FinishReason, TokenOut, WorkerId};

use super::*;
use crate::placement::{Placed, Reserve};
use crate::request::{Failure, RequestLimits};

const D1: WorkerId = WorkerId(0xd1);
const D2: WorkerId = WorkerId(0xd2);
const P1: WorkerId = WorkerId(0xf1);
const P2: WorkerId = WorkerId(0xf2);
const DEADLINE: Duration = Duration::from_secs(60);

fn split(decode: WorkerId, prefill: WorkerId) -> ChoiceInput {
    ChoiceInput::Placed(Ok((Placed { decode, prefill: Some(prefill) }, Reserve::First)))
}

fn late(decode: WorkerId, prefill: WorkerId) -> ChoiceInput {
    ChoiceInput::Placed(Ok((Placed { decode, prefill: Some(prefill) }, Reserve::Late)))
}

fn meanwhile(decode: WorkerId, prefill: WorkerId) -> ChoiceInput {
    ChoiceInput::Placed(Ok((Placed { decode, prefill: Some(prefill) }, Reserve::Meanwhile)))
}

fn due() -> ChoiceInput {
    ChoiceInput::PrefillSaid(PrefillWord::Due)
}

fn local(decode: WorkerId) -> ChoiceInput {
    ChoiceInput::Placed(Ok((Placed { decode, prefill: None }, Reserve::First)))
}

fn nobody() -> ChoiceInput {
    ChoiceInput::Placed(Err(Failure::new(ErrorKind::Unavailable, "nobody")))
}

fn reserved() -> ChoiceInput {
    ChoiceInput::DecodeSaid(DecodeWord::Reserved { target: vec![7] })
}

fn out(index: u32) -> TokenOut {
    TokenOut { index, id: index + 10, ..TokenOut::default() }
}

fn token(index: u32) -> ChoiceInput {
    ChoiceInput::DecodeSaid(DecodeWord::Token(out(index)))
}

fn finished() -> ChoiceInput {
    ChoiceInput::DecodeSaid(DecodeWord::Finished(FinishReason::Stop))
}

fn first(index: u32) -> ChoiceInput {
    ChoiceInput::PrefillSaid(PrefillWord::FirstToken { token: out(index), finish: None, cached_tokens: 0 })
}

fn transferred() -> ChoiceInput {
    ChoiceInput::PrefillSaid(PrefillWord::Transferred)
}

fn answered(kind: ErrorKind) -> LegEnd {
    LegEnd::Answered { kind, message: "no".into() }
}

fn lost(silent: bool) -> LegEnd {
    let broken = if silent { Broken::TimedOut } else { Broken::Closed };
    LegEnd::Lost { message: "broken pipe".into(), broken }
}

/// Takes all effects that a choice has.
fn effects(choice: &mut Choice) -> Vec<Effect> {
    std::iter::from_fn(|| choice.next_effect()).collect()
}

/// A choice with a clock that only tests move.
struct Scene {
    choice: Choice,
    begun: Instant,
    now: Instant,
    effects: Vec<Effect>,
}

impl Scene {
    fn new() -> Scene {
        Scene::with(Patience { first_token: 2 * DEADLINE, token: 2 * DEADLINE })
    }

    fn with(patience: Patience) -> Scene {
        Scene::of(&[1, 2], false, patience)
    }

    fn of(prompt: &[u32], scored: bool, patience: Patience) -> Scene {
        Scene::in_class(Class::Interactive, prompt, scored, patience)
    }

    fn in_class(class: Class, prompt: &[u32], scored: bool, patience: Patience) -> Scene {
        Scene::asked(|new| NewRequest { class, prompt: prompt.into(), scored, patience, ..new })
    }

    /// Of a request that differs from a usual one.
    fn asked(differs: impl FnOnce(NewRequest) -> NewRequest) -> Scene {
        let now = Instant::now();
        let new = differs(NewRequest {
            prompt: [1, 2].into(),
            names: Vec::new().into(),
            block_size: 2,
            root: crate::NameChain::default(),
            scored: false,
            limits: RequestLimits {
                max_tokens: 8,
                stop_token_ids: vec![99],
                max_attempts: 3,
                worker_wait: Duration::from_secs(2),
            },
            deadline: now + DEADLINE,
            patience: Patience { first_token: 2 * DEADLINE, token: 2 * DEADLINE },
            slo: Default::default(),
            class: Class::Interactive,
            handed_over: false,
            before: None,
        });
        let mut choice = Choice::start(new, now);
        let effects = effects(&mut choice);
        Scene { choice, begun: now, now, effects }
    }

    fn after(inputs: impl IntoIterator<Item = ChoiceInput>) -> Scene {
        let mut scene = Scene::new();
        inputs.into_iter().for_each(|input| drop(scene.step(input)));
        scene
    }

    /// The effects of one input.
    fn step(&mut self, input: ChoiceInput) -> Vec<Effect> {
        self.choice.feed(input, self.now);
        let effects = effects(&mut self.choice);
        self.effects.extend(effects.iter().cloned());
        effects
    }

    /// Moves the clock to the next wake, and wakes the choice.
    fn wake(&mut self) -> Vec<Effect> {
        self.now = self.choice.next_wake().expect("something is waited for");
        self.step(ChoiceInput::Wake)
    }

    fn wakes_in(&self) -> Option<Duration> {
        self.choice.next_wake().map(|at| at - self.now)
    }

    fn emitted(&self) -> Vec<u32> {
        self.effects.iter().filter_map(|e| if let Effect::Emit(t) = e { Some(t.index) } else { None }).collect()
    }
}
