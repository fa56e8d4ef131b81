//! A prefill worker that is killed, or stands still for longer than anybody waits, while KV is on its way from it: no wrong token
//! (I1, I2), an answer to every request within the bound, since another worker is left (I5), every block free again (I6), and no
//! block that was reused changed by a worker that wakes up and believes it may still write (I3).
//!
//! Each round strikes at a random moment of several prompts at once, and counts only when the decode worker had some but not
//! all of a handoff. `BATON_TEST_ROUNDS=50 BATON_TEST_SEED=7 cargo test -p baton-tests --test killed -- --nocapture` for more.
#![allow(clippy::unwrap_used)]

#[path = "killed/scene.rs"]
mod scene;

use std::time::Instant;

use baton_tests::cluster::Worker;
use baton_tests::cluster::pool::changed_blocks;
use baton_tests::cluster::processes::stands_still;
use baton_tests::cluster::wait;
use baton_tests::ucx;
use rustix::process::Signal;

use scene::{Asked, Scene};

/// Rounds without more being asked for: of each kind one.
const ROUNDS: u64 = 2;
/// A round may come too early or too late to cut anything; so many for one that does.
const TRIES: u64 = 5;

/// A number from the environment.
fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().expect("a number"))
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Blow {
    Kill,
    Stop,
}

/// Strikes until so many rounds have cut a handoff in the middle.
fn strike(mut scene: Scene) {
    let rounds = setting("BATON_TEST_ROUNDS", ROUNDS);
    let mut tries = 0;
    while scene.tally.cut < rounds {
        tries += 1;
        assert!(tries <= TRIES * rounds, "no handoff was cut in the middle: {}", scene.tally);
        let blow = if scene.tally.cut.is_multiple_of(2) { Blow::Kill } else { Blow::Stop };
        let start = Instant::now();
        let asked = scene.ask_some();
        let before = scene.cluster.log().len();
        let Some(victim) = scene.moment() else {
            scene.collect(asked, start);
            continue;
        };
        match blow {
            Blow::Kill => kill(&mut scene, &victim, asked),
            Blow::Stop => stop(&mut scene, &victim, asked),
        }
        let cuts = scene.cuts(before, &victim);
        println!("round {tries}: {blow:?} of {} cut {cuts:?}", victim.member.id);
        scene.tally.cut += u64::from(!cuts.is_empty());
    }
    println!("{} {tries} tries; {}", scene.transport, scene.tally);
    scene.end();
}

fn kill(scene: &mut Scene, victim: &Worker, asked: Asked) {
    let watch = scene.watch();
    scene.cluster.signal(victim.pid, Signal::KILL).unwrap();
    let struck = Instant::now();
    scene.collect(asked, struck);
    scene.until_all_free(struck, watch);
    // Another one was started in its place.
    scene.cluster.wait_idle().unwrap();
}

fn stop(scene: &mut Scene, victim: &Worker, asked: Asked) {
    let mut watch = scene.watch();
    scene.cluster.signal(victim.pid, Signal::STOP).unwrap();
    let mut struck = Instant::now();
    wait(|| stands_still(victim.pid).then_some(())).unwrap();
    scene.collect(asked, struck);
    // Over TCP only the decode worker writes to its pool, so it takes the blocks back by itself. Otherwise those that the victim
    // may still write to stay aside for as long as it stands still.
    scene.until_only_aside();
    if !scene.one_sided {
        scene.until_all_free(struck, watch);
        watch = scene.watch();
    }
    let before = scene.pool.bytes().unwrap();
    let asked = Instant::now();
    let others = scene.ask_some();
    scene.collect(others, asked);
    let aside = scene.until_only_aside();
    scene.outlast_silence(struck);
    let stopped = scene.pool.bytes().unwrap();
    let reused = changed_blocks(&scene.geometry, &before, &stopped);
    scene.cluster.signal(victim.pid, Signal::CONT).unwrap();
    if scene.one_sided {
        struck = Instant::now();
        scene.until_all_free(struck, watch);
    }
    // The victim too has let go of everything.
    scene.cluster.wait_idle().unwrap();
    let changed = changed_blocks(&scene.geometry, &stopped, &scene.pool.bytes().unwrap());
    scene.tally.reused += reused.len();
    scene.tally.late += changed.len();
    assert!(!reused.is_empty());
    assert!(changed.is_disjoint(&reused), "written to late: {changed:?}, reused: {reused:?}"); // I3
    assert!(changed.len() <= aside as usize, "{changed:?}, but only {aside} were kept aside"); // I3
}

#[test]
fn over_shm() {
    strike(Scene::new("shm", vec![]));
}

#[test]
fn over_tcp() {
    strike(Scene::new("tcp", vec![]));
}

#[test]
#[ignore = "the suites of transfer and flipped.rs have UCX, too: just soak"]
fn over_ucx() {
    let Some(library) = ucx::library() else { return };
    strike(Scene::new("ucx", ucx::env(library)));
}
