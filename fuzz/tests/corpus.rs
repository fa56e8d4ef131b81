//! Replays the corpus of every target and all findings.
#![allow(clippy::unwrap_used)]

use std::path::Path;

use baton_fuzz::{MOST, Mutator, TARGETS};
use baton_types::testing::with_seeds;

#[test]
fn the_corpus_has_no_finding() {
    for target in TARGETS {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let mut count = 0;
        for folder in ["corpus", "findings"].map(|kind| root.join(kind).join(target.name)) {
            for entry in std::fs::read_dir(folder).into_iter().flatten() {
                (target.run)(&std::fs::read(entry.unwrap().path()).unwrap());
                count += 1;
            }
        }
        assert!(count > 0, "{} has a corpus", target.name);
    }
}

#[test]
fn some_mutations_of_the_seeds_have_no_finding() {
    for target in TARGETS {
        with_seeds([7], |seed| {
            let (mut mutator, seeds) = (Mutator::new(seed), (target.seeds)());
            for _ in 0..2_000 {
                let (one, other) = (mutator.below(seeds.len()), mutator.below(seeds.len()));
                (target.run)(&mutator.mutate(&seeds[one], &seeds[other], MOST));
            }
        });
    }
}
