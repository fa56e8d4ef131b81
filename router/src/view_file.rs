//! The latest view in a file, so that a router that restarts while the registry is away serves at once (I7).
//!
//! What is saved may be old. Its workers are asked by id, so another process at a worker's address takes nothing
//! ([`baton_proto::OnlyFor`]).

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use std::{fs, io};

use baton_cluster::{MAX_MEMBERS, Member, View};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio::time::timeout;

/// How soon a view that could not be saved is tried again.
const RETRY: Duration = Duration::from_secs(5);

/// What is in the file. A later version may add fields.
#[derive(Serialize, Deserialize)]
struct Saved {
    members: Vec<Member>,
}

/// Reads the members that were saved. A file that is missing or cannot be used is as good as none; why it cannot be used is logged.
pub(crate) fn read(path: &Path) -> Vec<Member> {
    let read = || -> io::Result<Vec<Member>> {
        let Saved { mut members } = serde_json::from_slice(&fs::read(path)?)?;
        members.truncate(MAX_MEMBERS);
        members.retain(|member| member.validate().is_ok());
        Ok(members)
    };
    match read() {
        Ok(members) => {
            tracing::info!(path = %path.display(), members = members.len(), "starts with the view that was saved");
            members
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
        Err(error) => {
            tracing::warn!(path = %path.display(), %error, "the saved view cannot be read; starts without one");
            Vec::new()
        }
    }
}

/// Saves each view that the registry has confirmed, until the views end. What changes while one is written is in the next.
pub(crate) async fn keep(path: PathBuf, mut views: watch::Receiver<Arc<View>>) {
    let mut saved = Vec::new();
    let mut failing = false;
    loop {
        // What could not be saved is tried again, also without a change.
        let changed = match failing {
            true => timeout(RETRY, views.changed()).await.unwrap_or(Ok(())),
            false => views.changed().await,
        };
        if changed.is_err() {
            return;
        }
        let view = Arc::clone(&views.borrow_and_update());
        if view.stale || view.members == saved {
            continue;
        }
        let (to, members) = (path.clone(), view.members.clone());
        let written = tokio::task::spawn_blocking(move || write(&to, members)).await;
        let written = written.unwrap_or_else(|_| Err(io::Error::other("writing panicked")));
        match &written {
            Ok(()) => saved = view.members.clone(),
            Err(error) if !failing => {
                tracing::warn!(path = %path.display(), %error, "the view cannot be saved (--view-file)");
            }
            Err(_) => {}
        }
        failing = written.is_err();
    }
}

/// Replaces the file as a whole.
fn write(path: &Path, members: Vec<Member>) -> io::Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".new");
    let new = path.with_file_name(name);
    let mut file = fs::File::create(&new)?;
    file.write_all(&serde_json::to_vec(&Saved { members })?)?;
    // Before it has the name, so that a machine that fails leaves the old file or the new one.
    file.sync_all()?;
    fs::rename(&new, path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_cluster::Role;
    use baton_types::WorkerId;

    fn member(id: u64) -> Member {
        Member {
            id: WorkerId(id),
            role: Role::Decode,
            grpc: "http://127.0.0.1:9001".into(),
            admin: "http://127.0.0.1:9002".into(),
            model: "m".into(),
            layout: 7,
            blocks: 64,
            block_size: 16,
            window_tokens: 0,
            max_running: 0,
            context_tokens: 0,
            draining: false,
            late_targets: false,
            exchanges: 0,
            kv_secret: 0,
        }
    }

    #[tokio::test]
    async fn the_last_view_that_was_confirmed_is_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("view.json");
        assert_eq!(read(&path), []);
        let (views, seen) = watch::channel(Arc::default());
        let keeping = tokio::spawn(keep(path.clone(), seen));
        let view = |id, stale| Arc::new(View { members: vec![member(id)], stale, ..View::default() });
        for (id, stale) in [(1, false), (2, true)] {
            views.send_replace(view(id, stale));
            while read(&path).is_empty() {
                tokio::time::sleep(std::time::Duration::from_millis(1)).await;
            }
        }
        drop(views);
        keeping.await.unwrap();
        assert_eq!(read(&path), [member(1)], "the registry has not confirmed the later one");
    }

    #[test]
    fn a_file_that_cannot_be_used_is_as_good_as_none() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("view.json");
        let bad = Member { id: WorkerId(0), ..member(1) };
        for text in ["", "{", "[]", &serde_json::to_string(&Saved { members: vec![bad] }).unwrap()] {
            fs::write(&path, text).unwrap();
            assert_eq!(read(&path), [], "{text}");
        }
        // A later version's fields are skipped.
        let mut value = serde_json::to_value(Saved { members: vec![member(3)] }).unwrap();
        value["later"] = 1.into();
        value["members"][0]["later"] = 1.into();
        fs::write(&path, value.to_string()).unwrap();
        assert_eq!(read(&path), [member(3)]);
    }
}
