//! `baton kv` of an object store.

use std::fmt::Write;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail};
use baton_store::{Bucket, Identity, KeptObjects, ObjectSum};
use serde_json::{Value, json};

use super::report::{computed, identity, model};
use crate::units::{bytes, duration};

/// Lists what is in an object store; `data`: reads and checks all of it.
pub fn look(url: &str, data: bool, as_json: bool) -> anyhow::Result<()> {
    let (bucket, found) = find(url)?;
    let mut seen = Vec::new();
    for kept in found {
        let checked =
            if data { bucket.check(&kept).with_context(|| format!("reading {}", kept.folder))? } else { None };
        seen.push((kept, checked));
    }
    match as_json {
        true => println!("{:#}", json(&seen)),
        false => print!("{}", table(&seen, data, SystemTime::now())),
    }
    let damaged: u64 = seen.iter().filter_map(|(_, sum)| *sum).map(|sum| sum.damaged).sum();
    if damaged > 0 {
        bail!("{damaged} objects are damaged; workers compute these blocks again. Is the object store well?");
    }
    Ok(())
}

/// Frees the objects of all identities but those to `keep`.
pub fn gc(url: &str, keep: &[Identity], does: bool, as_json: bool) -> anyhow::Result<()> {
    if keep.is_empty() {
        bail!(
            "of an object store, gc frees what is of no --keep IDENTITY, and none is given; `baton kv ls` shows identities"
        );
    }
    let (bucket, mut found) = find(url)?;
    found.retain(|kept| !keep.contains(&kept.identity));
    for kept in found.iter().filter(|_| does) {
        bucket.remove(kept).with_context(|| format!("removing {}", kept.folder))?;
    }
    let sum: u64 = found.iter().map(|kept| kept.bytes).sum();
    if as_json {
        let folders: Vec<Value> =
            found.iter().map(|kept| json!({"folder": kept.folder, "bytes": kept.bytes})).collect();
        println!("{:#}", json!({ "done": does, "bytes": sum, "folders": folders }));
        return Ok(());
    }
    for kept in &found {
        println!("{}: all of it: of another identity, {}", kept.folder, bytes(kept.bytes));
    }
    match does {
        true => println!("{} freed", bytes(sum)),
        false => println!("{} to free; --yes does it", bytes(sum)),
    }
    Ok(())
}

fn find(url: &str) -> anyhow::Result<(Bucket, Vec<KeptObjects>)> {
    let bucket = Bucket::open(url)?;
    let found = bucket.look().with_context(|| format!("listing {url}"))?;
    if found.is_empty() {
        bail!("there is no KV in {url}; give the URL of --kv-object");
    }
    Ok((bucket, found))
}

/// Each identity with what is there of it.
fn table(seen: &[(KeptObjects, Option<ObjectSum>)], data: bool, now: SystemTime) -> String {
    let mut text = String::new();
    for (at, (kept, checked)) in seen.iter().enumerate() {
        if at > 0 {
            text.push('\n');
        }
        let _ = writeln!(text, "{}", kept.folder);
        let mut line = |name: &str, value: String| {
            let _ = writeln!(text, "  {name:<10} {value}");
        };
        line("identity", identity(kept.identity));
        if let Some(about) = &kept.about {
            line("model", model(about));
            line("computed", computed(about));
        }
        let age =
            kept.age(now).map_or_else(|| "not known".to_owned(), |age| format!("{} ago", duration(age.as_secs())));
        line("written", age);
        let tokens = kept.about.as_ref().map(|about| kept.blocks * u64::from(about.layout.block_size));
        let tokens = tokens.map_or_else(String::new, |tokens| format!("{tokens} tokens, "));
        line("objects", format!("{} blocks, {tokens}{}", kept.blocks, bytes(kept.bytes)));
        match checked {
            Some(ObjectSum { whole, damaged, gone }) => {
                line("checked", format!("{whole} whole, {damaged} damaged, {gone} removed meanwhile"));
            }
            None if data => line(
                "checked",
                "cannot be read: there is no description beside the objects; a worker that opens the store puts it there".to_owned(),
            ),
            None => {}
        }
    }
    text
}

/// The same as JSON.
fn json(seen: &[(KeptObjects, Option<ObjectSum>)]) -> Value {
    let one = |(kept, checked): &(KeptObjects, Option<ObjectSum>)| {
        let written = kept.written.and_then(|at| at.duration_since(UNIX_EPOCH).ok()).map(|at| at.as_secs());
        json!({
            "folder": kept.folder,
            "identity": identity(kept.identity),
            "about": kept.about,
            "written_unix_s": written,
            "blocks": kept.blocks,
            "bytes": kept.bytes,
            "tokens": kept.about.as_ref().map(|about| kept.blocks * u64::from(about.layout.block_size)),
            "whole": checked.map(|sum| sum.whole),
            "damaged": checked.map(|sum| sum.damaged),
            "gone": checked.map(|sum| sum.gone),
        })
    };
    json!({ "data_checked": seen.iter().any(|(_, sum)| sum.is_some()), "objects": seen.iter().map(one).collect::<Vec<_>>() })
}
