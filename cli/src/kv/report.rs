//! The output of `baton kv`, as text and as JSON. Pure: it reads no file.

use std::fmt::Write;
use std::time::{SystemTime, UNIX_EPOCH};

use baton_store::{About, Identity, Kept, Looked, SegmentSum};
use serde_json::{Value, json};

use super::Waste;
use crate::units::{bytes, duration};

/// A file that was looked at.
pub struct Seen {
    pub file: Kept,
    /// None: it has no description, so that its records cannot be read.
    pub looked: Option<Looked>,
    /// Whether a process has its folder open, and which one says so.
    pub in_use: Option<Option<u32>>,
}

impl Seen {
    fn sum(&self, of: impl Fn(&SegmentSum) -> u64) -> u64 {
        self.looked.iter().flat_map(|looked| &looked.segments).map(of).sum()
    }

    /// Damaged records.
    pub fn damaged(&self) -> u64 {
        self.sum(|sum| sum.damaged)
    }
}

/// Each file with what is in it; `data`: all was read, not only heads.
pub fn table(seen: &[Seen], data: bool, now: SystemTime) -> String {
    let mut text = String::new();
    for (at, one) in seen.iter().enumerate() {
        if at > 0 {
            text.push('\n');
        }
        let _ = writeln!(text, "{}", one.file.path.display());
        let mut line = |name: &str, value: String| {
            let _ = writeln!(text, "  {name:<10} {value}");
        };
        line("identity", identity(one.file.name.identity));
        if let Some(about) = &one.file.about {
            line("model", model(about));
            line("computed", computed(about));
        }
        let age =
            one.file.age(now).map_or_else(|| "not known".to_owned(), |age| format!("{} ago", duration(age.as_secs())));
        line("written", age);
        line(
            "on disk",
            format!("{} of {}", bytes(one.file.bytes), bytes(u64::from(one.file.segments) * one.file.segment_bytes())),
        );
        match &one.looked {
            None => line(
                "records",
                "cannot be read: there is no description beside the file; a worker that opens the folder writes it"
                    .to_owned(),
            ),
            Some(looked) => {
                let (live, dead) = (one.sum(|sum| sum.live), one.sum(|sum| sum.dead));
                let (count, of) = (looked.segments.len(), one.file.segments);
                let each = bytes(one.file.segment_bytes());
                line("segments", format!("{count} of {of} written to, {each} each"));
                line(
                    "live",
                    format!(
                        "{live} blocks, {} tokens, {}",
                        live * u64::from(looked.block_tokens),
                        bytes(live * looked.record_bytes)
                    ),
                );
                line("dead", format!("{dead} blocks, {}", bytes(dead * looked.record_bytes)));
                let foreign = one.sum(|sum| sum.foreign);
                if foreign > 0 {
                    line("foreign", format!("{foreign} records of another identity or version"));
                }
                let (torn, damaged) = (one.sum(|sum| sum.torn), one.damaged());
                match data {
                    true => line("checked", format!("{} whole, {torn} torn, {damaged} damaged", live + dead)),
                    false => {
                        line("heads", format!("{torn} torn, {damaged} damaged; `baton kv stat` reads the KV, too"))
                    }
                }
            }
        }
        if let Some(process) = one.in_use {
            let by = process.map_or_else(|| "a process".to_owned(), |id| format!("process {id}"));
            line("in use", format!("by {by}: what it is writing now may look torn or damaged"));
        }
    }
    text
}

/// The same as JSON, with a sum of each segment.
pub fn json(seen: &[Seen], data: bool) -> Value {
    let segment = |sum: &SegmentSum| json!({ "segment": sum.segment, "live": sum.live, "dead": sum.dead, "torn": sum.torn, "damaged": sum.damaged, "foreign": sum.foreign });
    let one = |one: &Seen| {
        let segments: Option<Vec<Value>> =
            one.looked.as_ref().map(|looked| looked.segments.iter().map(segment).collect());
        let written = one.file.written.and_then(|at| at.duration_since(UNIX_EPOCH).ok()).map(|at| at.as_secs());
        let tokens = one.looked.as_ref().map(|looked| u64::from(looked.block_tokens) * one.sum(|sum| sum.live));
        json!({
            "file": one.file.path.display().to_string(),
            "identity": identity(one.file.name.identity),
            "about": one.file.about,
            "written_unix_s": written,
            "bytes": one.file.bytes,
            "segment_bytes": one.file.segment_bytes(),
            "record_bytes": one.file.name.stride,
            "blocks": one.sum(|sum| sum.live),
            "tokens": tokens,
            "live_bytes": one.sum(|sum| sum.live) * one.file.name.stride,
            "dead_bytes": one.sum(|sum| sum.dead) * one.file.name.stride,
            "whole": one.sum(|sum| sum.live + sum.dead),
            "torn": one.sum(|sum| sum.torn),
            "damaged": one.damaged(),
            "in_use": one.in_use.is_some(),
            "process": one.in_use.flatten(),
            "segments": segments,
        })
    };
    json!({ "data_checked": data, "files": seen.iter().map(one).collect::<Vec<_>>() })
}

/// The model of some KV, with its layout.
pub fn model(about: &About) -> String {
    let layout = &about.layout;
    let layers: usize = layout.groups.iter().map(|group| group.layers.len()).sum();
    let (kind, size) = (layout.dtype.as_str(), layout.block_size);
    format!("{}, {layers} layers, KV in {kind}, blocks of {size} tokens", about.model)
}

/// What computed some KV.
pub fn computed(about: &About) -> String {
    format!("by {}, tensor parallel {}", about.backend, about.tp)
}

fn freed_bytes(file: &Kept, waste: &Waste) -> u64 {
    match waste {
        Waste::File => file.bytes,
        Waste::Segments(list) => list.len() as u64 * file.segment_bytes(),
    }
}

/// What gc frees, or has freed if `done`.
pub fn freed(all: &[(Kept, Waste)], done: bool) -> String {
    let mut text = String::new();
    for (file, waste) in all {
        let what = match waste {
            Waste::File => "all of it: of another identity".to_owned(),
            Waste::Segments(list) => format!("{} segments without a live block", list.len()),
        };
        let _ = writeln!(text, "{}: {what}, {}", file.path.display(), bytes(freed_bytes(file, waste)));
    }
    let sum = bytes(all.iter().map(|(file, waste)| freed_bytes(file, waste)).sum());
    let _ = match (all.is_empty(), done) {
        (true, _) => writeln!(text, "Everything may be of use to a worker; there is nothing to free."),
        (false, true) => writeln!(text, "{sum} freed."),
        (false, false) => writeln!(text, "{sum} can be freed; nothing was changed. --yes does it."),
    };
    text
}

/// The same as JSON.
pub fn freed_json(all: &[(Kept, Waste)], done: bool) -> Value {
    let one = |(file, waste): &(Kept, Waste)| {
        let segments = match waste {
            Waste::File => None,
            Waste::Segments(list) => Some(list),
        };
        json!({ "file": file.path.display().to_string(), "segments": segments, "bytes": freed_bytes(file, waste) })
    };
    json!({ "freed": done, "files": all.iter().map(one).collect::<Vec<_>>() })
}

pub fn identity(of: Identity) -> String {
    format!("{:016x}-{:016x}", of.layout, of.numerics)
}

#[cfg(test)]
mod tests {
    use baton_store::FileName;

    use super::*;

    fn seen() -> Seen {
        let name = FileName { identity: Identity { layout: 1, numerics: 2 }, stride: 8192, records: 4 };
        let file = Kept { path: "d/x".into(), name, segments: 8, bytes: 65536, written: Some(UNIX_EPOCH), about: None };
        let sum = SegmentSum { segment: 3, live: 2, dead: 1, damaged: 1, ..SegmentSum::default() };
        let looked = Looked { segments: vec![sum], record_bytes: 8192, block_tokens: 16 };
        Seen { file, looked: Some(looked), in_use: Some(Some(77)) }
    }

    #[test]
    fn a_file_is_told_by_what_is_alive_what_is_not_and_who_has_it() {
        let text = table(&[seen()], true, UNIX_EPOCH + std::time::Duration::from_secs(600));
        for part in [
            "2 blocks, 32 tokens, 16.0 KiB",
            "1 blocks, 8.0 KiB",
            "3 whole, 0 torn, 1 damaged",
            "process 77",
            "10 min ago",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
        let json = json(&[seen()], true);
        let file = &json["files"][0];
        assert_eq!(
            (file["tokens"].as_u64(), file["damaged"].as_u64(), file["process"].as_u64()),
            (Some(32), Some(1), Some(77))
        );
        let unread = table(&[Seen { looked: None, ..seen() }], false, UNIX_EPOCH);
        assert!(unread.contains("cannot be read"), "{unread}");
    }

    #[test]
    fn gc_says_how_many_bytes_and_whether_it_was_done() {
        let all = [(seen().file, Waste::Segments(vec![1, 2])), (seen().file, Waste::File)];
        assert!(freed(&all, false).ends_with("128 KiB can be freed; nothing was changed. --yes does it.\n"));
        assert!(freed(&all, true).ends_with("128 KiB freed.\n"));
        assert!(freed(&[], true).contains("nothing to free"));
    }
}
