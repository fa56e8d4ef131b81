//! Embeds the compiled CUDA kernels, where `kernels/cuda/build` has made them from the sources as they are; without them the GPU
//! backend says which command to run.

use std::path::{Path, PathBuf};
use std::time::SystemTime;
use std::{env, fs, io};

/// Names and contents of the sources, hashed as `kernels/cuda/build` does (FNV-1a, 64 bits).
fn digest(sources: &Path) -> io::Result<String> {
    let mut files = fs::read_dir(sources)?.map(|file| file.map(|file| file.path())).collect::<io::Result<Vec<_>>>()?;
    files.sort();
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    for file in files {
        let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
        for byte in name.into_bytes().into_iter().chain(fs::read(&file)?) {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }
    Ok(format!("{hash:016x}"))
}

fn main() {
    let (here, out) = (env::var_os("CARGO_MANIFEST_DIR"), env::var_os("OUT_DIR"));
    let (Some(here), Some(out)) = (here.map(PathBuf::from), out.map(PathBuf::from)) else { return };
    println!("cargo::rerun-if-env-changed=BATON_FATBIN");
    let fatbin = env::var_os("BATON_FATBIN").map_or_else(|| here.join("../target/cuda/baton.fatbin"), PathBuf::from);
    let made_of = fatbin.with_extension("sources");
    // A file that is not there counts as changed at every build: until it is made, its folder is watched.
    let folder = fatbin.parent().unwrap_or(&here);
    let made = fatbin.exists() && made_of.exists();
    if !made && !folder.exists() {
        // As if it were old: one that is newer than this run counts as changed since.
        let old = |folder: &Path| fs::File::open(folder)?.set_modified(SystemTime::UNIX_EPOCH);
        if let Err(error) = fs::create_dir_all(folder).and_then(|()| old(folder)) {
            println!("cargo::warning=cannot make {}: {error}", folder.display());
        }
    }
    let watched = if made { vec![&*fatbin, &*made_of] } else { vec![folder] };
    for path in watched.into_iter().chain([&*here.join("cuda/src")]) {
        println!("cargo::rerun-if-changed={}", path.display());
    }
    let made_of = fs::read_to_string(made_of).ok();
    let fresh = made_of.is_some_and(|made_of| digest(&here.join("cuda/src")).is_ok_and(|now| now == made_of.trim()));
    if !fresh && fatbin.exists() {
        // Parameters may have changed, and a kernel would take them for others.
        println!("cargo::warning={} is of other sources and is left out; run kernels/cuda/build", fatbin.display());
    }
    let image = if fresh { fs::read(&fatbin).unwrap_or_default() } else { Vec::new() };
    if let Err(error) = fs::write(out.join("baton.fatbin"), image) {
        println!("cargo::error=cannot write the kernels to {}: {error}", out.display());
    }
}
