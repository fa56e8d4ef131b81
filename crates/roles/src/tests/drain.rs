//! The drain's table: what every input does in every stage.

use std::fmt::Write;
use std::time::{Duration, Instant};

use super::rig::{compare, rewrite};
use crate::{Drain, DrainEffect, DrainInput, Snapshot};

const FILE: &str = "drain.txt";
const DEADLINE: Duration = Duration::from_secs(30);

/// An input, and whether the deadline has come.
type Fed = (DrainInput, bool);

struct Scene {
    drain: Drain,
    begun: Instant,
}

impl Scene {
    fn after(inputs: impl FnOnce(Instant) -> Vec<Fed>) -> Scene {
        let mut scene = Scene { drain: Drain::default(), begun: Instant::now() };
        inputs(scene.begun).into_iter().for_each(|fed| drop(scene.feed(fed)));
        scene
    }

    /// The effects of one input.
    fn feed(&mut self, (input, late): Fed) -> Vec<DrainEffect> {
        let now = if late { self.begun + DEADLINE } else { self.begun };
        self.drain.feed(input, now);
        std::iter::from_fn(|| self.drain.next_effect()).collect()
    }

    fn stands(&self) -> String {
        let serves = if self.drain.serves() { "serves" } else { "does not serve" };
        let wake = self.drain.next_wake().map(|at| format!(", wake in {} s", (at - self.begun).as_secs()));
        format!("{serves}{}", wake.unwrap_or_default())
    }
}

fn held(sequences: u32, idle: bool, draining: bool) -> DrainInput {
    DrainInput::Held(Snapshot { running: sequences, idle, draining, ..Snapshot::default() })
}

fn asked(begun: Instant) -> DrainInput {
    DrainInput::Asked { until: begun + DEADLINE }
}

fn scenes() -> Vec<(&'static str, Scene)> {
    let busy = (held(3, false, true), false);
    vec![
        ("serving", Scene::after(|_| vec![busy])),
        ("draining", Scene::after(|begun| vec![(asked(begun), false), busy])),
        ("revoking", Scene::after(|begun| vec![(asked(begun), false), (held(0, true, true), false)])),
        ("closed", Scene::after(|_| vec![(DrainInput::Forced, false), (DrainInput::Revoked, false)])),
    ]
}

fn inputs(begun: Instant) -> [(&'static str, DrainInput); 8] {
    [
        ("Asked", asked(begun)),
        ("Forced", DrainInput::Forced),
        ("EngineEnded", DrainInput::EngineEnded),
        ("Held, busy", held(2, false, true)),
        ("Held, idle, not draining", held(0, true, false)),
        ("Held, idle", held(0, true, true)),
        ("Wake", DrainInput::Wake),
        ("Revoked", DrainInput::Revoked),
    ]
}

fn table() -> String {
    let mut text = String::new();
    for (name, scene) in scenes() {
        writeln!(text, "## {name}: {}", scene.stands()).unwrap();
        for (late, when) in [(false, ""), (true, ", late")] {
            for (label, input) in inputs(scene.begun) {
                let mut scene = Scene { drain: scene.drain.clone(), begun: scene.begun };
                let said: Vec<String> = scene.feed((input, late)).iter().map(|effect| format!("{effect:?}")).collect();
                let label = format!("{label}{when}");
                writeln!(text, "{label:<32}{:<29}-> {}", scene.stands(), said.join("; ")).unwrap();
            }
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
fn rewrite_the_drains_table() {
    rewrite(&table(), FILE);
}
