//! The tables of crates and of invariants in docs/ are true.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use anyhow::{Context, ensure};
use serde_json::Value;

type Edges = BTreeMap<String, BTreeSet<String>>;

/// Path of each workspace crate → paths of those it depends on.
fn from_cargo(root: &Path) -> anyhow::Result<Edges> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version=1", "--no-deps", "--offline"])
        .current_dir(root)
        .output()?;
    ensure!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout)?;
    let folder = |path: &str| -> anyhow::Result<String> {
        let relative = Path::new(path).strip_prefix(root)?;
        Ok(relative.to_str().context("a path in UTF-8")?.trim_end_matches("/Cargo.toml").to_owned())
    };
    let mut edges = Edges::new();
    for package in metadata["packages"].as_array().context("packages")? {
        let own = folder(package["manifest_path"].as_str().context("manifest_path")?)?;
        let dependencies = package["dependencies"].as_array().context("dependencies")?;
        let paths = dependencies.iter().filter(|d| d["kind"].is_null()).filter_map(|d| d["path"].as_str());
        edges.insert(own, paths.map(folder).collect::<anyhow::Result<_>>()?);
    }
    Ok(edges)
}

/// The same from the table; `any` is None.
fn from_table(text: &str) -> BTreeMap<String, Option<BTreeSet<String>>> {
    let rows = text.lines().skip_while(|l| !l.starts_with("| crate | depends on")).skip(2);
    rows.take_while(|l| l.starts_with('|'))
        .filter_map(|line| {
            let cells: Vec<&str> = line.split('|').map(str::trim).collect();
            let depends = match *cells.get(2)? {
                "any" => None,
                "–" => Some(BTreeSet::new()),
                list => Some(list.split(',').map(|name| name.trim().to_owned()).collect()),
            };
            Some((cells.get(1)?.to_string(), depends))
        })
        .collect()
}

#[test]
fn the_table_of_crates_is_true() -> anyhow::Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("the workspace")?;
    let table = from_table(&std::fs::read_to_string(root.join("docs/crates.md"))?);
    let edges = from_cargo(root)?;
    let names: BTreeSet<&String> = table.keys().collect();
    ensure!(names == edges.keys().collect(), "crates in the table {names:?}, in the workspace {:?}", edges.keys());
    for (name, wanted) in &table {
        let Some(wanted) = wanted else { continue };
        // The table says `engine` for crates/engine.
        let found: BTreeSet<String> =
            edges[name].iter().map(|path| path.trim_start_matches("crates/").to_owned()).collect();
        ensure!(&found == wanted, "{name} depends on {found:?}; the table says {wanted:?}");
    }
    Ok(())
}

#[test]
fn the_tests_named_for_each_invariant_exist() -> anyhow::Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("the workspace")?;
    let text = std::fs::read_to_string(root.join("docs/invariants.md"))?;
    let rows: Vec<&str> = text.lines().filter(|l| l.starts_with("| I")).collect();
    ensure!(rows.len() == 8, "{} invariants in the table", rows.len());
    for path in rows.iter().flat_map(|row| row.rsplit('|').nth(1)).flat_map(|cell| cell.split('`').skip(1).step_by(2)) {
        ensure!(root.join(path).exists(), "docs/invariants.md names {path}, which is not there");
    }
    Ok(())
}

/// The image is built from what its file names, and cargo wants every member.
#[test]
fn the_image_is_built_from_every_crate() -> anyhow::Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("the workspace")?;
    let text = std::fs::read_to_string(root.join("deploy/Containerfile"))?;
    let copied: BTreeSet<&str> =
        text.lines().filter_map(|line| line.strip_prefix("COPY ")?.split(' ').next()).collect();
    for path in from_cargo(root)?.keys() {
        let top = path.split('/').next().unwrap_or(path);
        ensure!(copied.contains(top), "deploy/Containerfile does not copy {top}, and {path} is in the workspace");
    }
    Ok(())
}

/// A suite or a device for tests that a released binary has is code that nobody runs.
#[test]
fn what_is_released_has_nothing_for_tests_in_it() -> anyhow::Result<()> {
    let output = Command::new(env!("CARGO"))
        .args(["tree", "--package=baton-cli", "--edges=normal,build", "--prefix=none", "--format={p}|{f}", "--offline"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()?;
    ensure!(output.status.success(), "cargo tree: {}", String::from_utf8_lossy(&output.stderr));
    let tree = String::from_utf8(output.stdout)?;
    let mut ours = 0;
    for (package, features) in tree.lines().filter_map(|line| line.split_once('|')) {
        ours += usize::from(package.starts_with("baton-kernels "));
        // A crate that comes again ends in (*).
        let features = features.trim_end_matches(" (*)").split(',');
        let found = features.filter(|f| ["testing", "test-util"].contains(f)).collect::<Vec<_>>();
        ensure!(found.is_empty(), "baton is built with {found:?} of {package}");
    }
    ensure!(ours > 0, "the tree has no kernels: {tree}");
    Ok(())
}
