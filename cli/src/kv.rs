//! `baton kv`: what is in a folder of KV on disk or in an object store, whether it is whole, and what of it is of no use. It asks no process: only
//! the folder, or the object store, is read.

mod objects;
mod report;

use std::path::Path;

use anyhow::{Context, bail};
use baton_store::{Folder, Identity, Kept, Looked};
use clap::{Arg, ArgAction, ArgMatches, Command};

use report::Seen;

/// `baton kv`.
pub fn command() -> Command {
    let directory = Arg::new("dir").value_name("DIR|URL").required(true).help(
        "The folder given by --kv-disk, or the URL given by --kv-object (s3://BUCKET/PREFIX, file:///DIRECTORY); folders in it, as `baton up` makes them, \
         are looked at as well",
    );
    let json = Arg::new("json").long("json").action(ArgAction::SetTrue).help("Prints JSON");
    let sub = |name: &'static str, about: &'static str| {
        Command::new(name).about(about).arg(directory.clone()).arg(json.clone())
    };
    let keep = Arg::new("keep").long("keep").value_name("IDENTITY").action(ArgAction::Append).help(
        "Also removes the files of every other identity; `baton kv ls` shows identities. May be given more than once",
    );
    let yes = Arg::new("yes").long("yes").action(ArgAction::SetTrue).help("Does it; else it is only said");
    Command::new("kv")
        .about("Looks into KV on disk (--kv-disk) or in an object store (--kv-object), checks it, and frees what is of no use")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommand(sub("ls", "Lists what is there: reads the heads of a folder's records, or lists objects"))
        .subcommand(
            sub("stat", "Reads all of it and checks each checksum and digest; exit status 1 if a record is damaged")
                .after_help("torn: a write that a crash cut off, which a store expects. damaged: whole once, and changed since. Both are computed again, never used."),
        )
        .subcommand(
            sub("gc", "Says what no worker could use and how many bytes that is; --yes frees it")
                .after_help("Of no use are segments whose records are all dead, torn or damaged. It is refused while a worker has the folder open. Of an object store it frees what is of no --keep IDENTITY. Example:  baton kv gc ~/.cache/baton-kv --yes")
                .arg(keep)
                .arg(yes),
        )
}

/// Lists, checks or frees.
pub fn run(matches: &ArgMatches) -> anyhow::Result<()> {
    let Some((name, matches)) = matches.subcommand() else { return Ok(()) };
    let root = matches.get_one::<String>("dir").context("a folder is needed")?;
    let (json, is_gc) = (matches.get_flag("json"), name == "gc");
    if root.contains("://") {
        return match is_gc {
            true => objects::gc(root, &to_keep(matches)?, matches.get_flag("yes"), json),
            false => objects::look(root, name == "stat", json),
        };
    }
    let folders = Folder::find(Path::new(root))?;
    if folders.is_empty() {
        bail!("there is no KV in {root}; give the folder of --kv-disk, in which files end in .baton-kv");
    }
    match name {
        _ if is_gc => gc(&folders, matches, json),
        name => look(&folders, name == "stat", json),
    }
}

fn look(folders: &[Folder], data: bool, json: bool) -> anyhow::Result<()> {
    let mut seen = Vec::new();
    for folder in folders {
        let in_use = folder.in_use()?;
        for file in &folder.files {
            let looked = file.look(data).with_context(|| format!("reading {}", file.path.display()))?;
            seen.push(Seen { file: file.clone(), looked, in_use });
        }
    }
    match json {
        true => println!("{:#}", report::json(&seen, data)),
        false => print!("{}", report::table(&seen, data, std::time::SystemTime::now())),
    }
    let damaged: u64 = seen.iter().map(Seen::damaged).sum();
    if data && damaged > 0 {
        bail!("{damaged} records are damaged; workers compute these blocks again. Is the disk well?");
    }
    Ok(())
}

/// What gc frees.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Waste {
    /// All of a file, whose identity nobody has.
    File,
    /// These segments of a file.
    Segments(Vec<u32>),
}

/// What of a file is of no use. `keep`: the identities that workers have; none: all may be of use.
fn waste(file: &Kept, looked: Option<&Looked>, keep: &[Identity]) -> Option<Waste> {
    if !keep.is_empty() && !keep.contains(&file.name.identity) {
        return Some(Waste::File);
    }
    let useless = looked?.segments.iter().filter(|sum| sum.useless()).map(|sum| sum.segment);
    Some(useless.collect::<Vec<_>>()).filter(|list| !list.is_empty()).map(Waste::Segments)
}

/// The identities given by --keep.
fn to_keep(matches: &ArgMatches) -> anyhow::Result<Vec<Identity>> {
    matches.get_many::<String>("keep").into_iter().flatten().map(|text| identity(text)).collect()
}

fn gc(folders: &[Folder], matches: &ArgMatches, json: bool) -> anyhow::Result<()> {
    let keep = to_keep(matches)?;
    let does = matches.get_flag("yes");
    // All are looked at before anything is freed.
    for folder in folders {
        folder.alone(|_| Ok(()))?;
    }
    let mut freed = Vec::new();
    for folder in folders {
        folder.alone(|folder| {
            for file in &folder.files {
                // With the data: a record that is damaged is no reason to keep a segment.
                let looked = file.look(true)?;
                let Some(waste) = waste(file, looked.as_ref(), &keep) else { continue };
                match &waste {
                    _ if !does => {}
                    Waste::File => folder.remove(file)?,
                    Waste::Segments(list) => list.iter().try_for_each(|segment| folder.punch(file, *segment))?,
                }
                freed.push((file.clone(), waste));
            }
            Ok(())
        })?;
    }
    match json {
        true => println!("{:#}", report::freed_json(&freed, does)),
        false => print!("{}", report::freed(&freed, does)),
    }
    Ok(())
}

/// An identity as `baton kv ls` writes it.
fn identity(text: &str) -> anyhow::Result<Identity> {
    let read = text.split_once('-').and_then(|(layout, numerics)| {
        let number = |text: &str| u64::from_str_radix(text, 16).ok().filter(|_| text.len() == 16);
        Some(Identity { layout: number(layout)?, numerics: number(numerics)? })
    });
    read.with_context(|| {
        format!(
            "--keep is {text:?}; it must be an identity as `baton kv ls` shows it: 16 hexadecimal digits, -, 16 more"
        )
    })
}

#[cfg(test)]
mod tests {
    use baton_store::{FileName, SegmentSum};

    use super::*;

    #[test]
    fn what_workers_could_use_is_no_waste() {
        let ours = Identity { layout: 1, numerics: 2 };
        let name = FileName { identity: ours, stride: 8192, records: 4 };
        let file = Kept { path: "x".into(), name, segments: 3, bytes: 9, written: None, about: None };
        let sum = |segment, live, dead| SegmentSum { segment, live, dead, ..SegmentSum::default() };
        let looked = Looked { segments: vec![sum(0, 1, 3), sum(2, 0, 4)], record_bytes: 8192, block_tokens: 16 };
        assert_eq!(waste(&file, Some(&looked), &[]), Some(Waste::Segments(vec![2])));
        assert_eq!(waste(&file, Some(&looked), &[ours]), Some(Waste::Segments(vec![2])));
        assert_eq!(waste(&file, Some(&looked), &[Identity { layout: 1, numerics: 3 }]), Some(Waste::File));
        assert_eq!(waste(&file, None, &[]), None, "what cannot be read may be of use");
    }

    #[test]
    fn an_identity_is_read_as_it_is_shown() {
        let shown = "00000000000000ab-ffffffffffffffff";
        assert_eq!(identity(shown).unwrap(), Identity { layout: 0xab, numerics: u64::MAX });
        for wrong in ["", "ab", "ab-cd", "00000000000000ab-fffffffffffffffg"] {
            assert!(identity(wrong).unwrap_err().to_string().contains("--keep"), "{wrong}");
        }
    }
}
