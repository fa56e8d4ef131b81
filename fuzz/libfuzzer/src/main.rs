//! Runs the target of `baton-fuzz` that `BATON_FUZZ_TARGET` names, with inputs from libFuzzer, which keeps inputs that reach new code
//! and mutates them further. This program knows nothing of what targets do.
#![no_main]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;

use baton_fuzz::{TARGETS, Target};

fn target() -> &'static Target {
    static TARGET: OnceLock<Target> = OnceLock::new();
    TARGET.get_or_init(|| {
        // libFuzzer's own hook ends the process at every panic, even one that a reader expects of a library and catches.
        drop(std::panic::take_hook());
        let name = std::env::var("BATON_FUZZ_TARGET").unwrap_or_default();
        let found = TARGETS.into_iter().find(|target| target.name == name);
        found.unwrap_or_else(|| {
            eprintln!("no target {name:?}; there are {:?}", TARGETS.map(|target| target.name));
            std::process::exit(2)
        })
    })
}

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let run = target().run;
    if catch_unwind(AssertUnwindSafe(|| run(input))).is_err() {
        // Makes libFuzzer save the input.
        std::process::abort();
    }
});
