//! What a test needs of its host, and may lack there: UCX, root, network namespaces. A GPU is none of it: `tests/gpu.sh` is for hosts
//! that have one.

use std::fmt::Display;

/// Says that the calling test is left out, and why. Fails it where `BATON_REQUIRE_ALL` is set, as `.ci/run` sets it, so that a green
/// run there has left out nothing. `baton-kernels` has the same rule for the CUDA headers.
///
/// # Panics
/// When `BATON_REQUIRE_ALL` is set and not empty.
pub fn left_out(why: impl Display) {
    let all = std::env::var_os("BATON_REQUIRE_ALL").is_some_and(|value| !value.is_empty());
    assert!(!all, "BATON_REQUIRE_ALL is set, and this test cannot run here: {why}");
    println!("skipped: {why}");
}
