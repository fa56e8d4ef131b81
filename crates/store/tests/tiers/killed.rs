//! The process is killed at any time.

use std::process::{Command, Stdio};
use std::time::Duration;

use baton_kv_store::{Miss, Tier};
use baton_types::testing::Random;

use crate::common::{config, get, on_disk, open, put};

const DIRECTORY: &str = "BATON_TEST_KV_DIRECTORY";

/// Not a test: the process that is killed. It puts blocks for ever.
#[test]
#[ignore = "run by the test below"]
fn puts_for_ever() {
    let Some(directory) = std::env::var_os(DIRECTORY) else { return };
    let store = open(directory.as_ref(), config(16));
    println!("begun");
    for number in (0..200).cycle() {
        let _ = put(&store, number);
        std::thread::sleep(Duration::from_micros(50));
    }
}

#[test]
fn what_a_killed_process_left_is_right_or_not_there() {
    let directory = tempfile::tempdir().unwrap();
    let (mut random, mut recovered) = (Random(7), 0);
    for round in 0..12 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "killed::puts_for_ever", "--ignored", "--nocapture"])
            .env(DIRECTORY, directory.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_millis(60 + random.below(150)));
        child.kill().unwrap();
        child.wait().unwrap();
        let store = open(directory.path(), config(16));
        recovered += store.blocks(Tier::Disk);
        for number in on_disk(&store, 0..200) {
            // Where writes go through the page cache, the kernel may leave one half done; `get` looks that nothing else is wrong.
            match get(&store, number) {
                Ok(tier) => assert_eq!(tier, Tier::Disk, "round {round}, block {number}"),
                Err(why) => assert_eq!(why, Miss::Damaged, "round {round}, block {number}"),
            }
        }
        store.check().unwrap();
    }
    assert!(recovered > 200, "{recovered}");
}
