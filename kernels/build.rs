//! Embeds the compiled CUDA kernels, where `kernels/cuda/build` has made them since their sources last changed; without them the
//! GPU backend says which command to run.

use std::path::{Path, PathBuf};
use std::time::SystemTime;
use std::{env, fs};

fn changed(path: &Path) -> Option<SystemTime> {
    fs::metadata(path).and_then(|metadata| metadata.modified()).ok()
}

fn main() {
    let (here, out) = (env::var_os("CARGO_MANIFEST_DIR"), env::var_os("OUT_DIR"));
    let (Some(here), Some(out)) = (here.map(PathBuf::from), out.map(PathBuf::from)) else { return };
    println!("cargo::rerun-if-env-changed=BATON_FATBIN");
    let fatbin = env::var_os("BATON_FATBIN").map_or_else(|| here.join("../target/cuda/baton.fatbin"), PathBuf::from);
    println!("cargo::rerun-if-changed={}", fatbin.display());
    let sources = here.join("cuda/src");
    println!("cargo::rerun-if-changed={}", sources.display());
    let newest = fs::read_dir(&sources).ok().and_then(|files| files.flatten().filter_map(|f| changed(&f.path())).max());
    let fresh = changed(&fatbin).is_some_and(|made| newest.is_none_or(|newest| made >= newest));
    if !fresh && fatbin.exists() {
        // Parameters may have changed, and a kernel would take them for others.
        println!(
            "cargo::warning={} is older than its sources and is left out; run kernels/cuda/build",
            fatbin.display()
        );
    }
    let image = if fresh { fs::read(&fatbin).unwrap_or_default() } else { Vec::new() };
    if let Err(error) = fs::write(out.join("baton.fatbin"), image) {
        println!("cargo::error=cannot write the kernels to {}: {error}", out.display());
    }
}
