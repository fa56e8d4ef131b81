//! Takes a hub's large files from workers that have them already, and leaves the rest to the hub.
//!
//! The hub tells the digest and the length of each file, so a peer is not trusted with more than time. What one peer began the next one ends,
//! or the hub: all of them go on with the same partial file.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::sync::mpsc::SyncSender;
use std::time::Duration;

use baton_types::random_u64;
use hf_hub::api::sync::ApiError;

use super::hub::{Event, Fetch};
use super::registry::sha256_of;
use super::spec::RepositorySpec;
use super::store;

/// Files that have fewer bytes come from the hub.
const LEAST: usize = 1 << 20;
/// Peers that are asked for a file at most.
const MOST: usize = 8;
const CONNECTS: Duration = Duration::from_secs(2);
/// Bytes of one read.
const CHUNK: usize = 1 << 20;

/// A file as the hub describes it.
struct Blob {
    sha256: String,
    size: u64,
}

impl Fetch<'_> {
    /// A file that peers have, or have the rest of. `None`: the hub has to give it.
    pub(super) fn peers_give(&self, file: &str) -> Option<PathBuf> {
        if self.options.peers.is_empty() {
            return None;
        }
        let what = format!("{}/{file}", self.spec.id);
        let blob = self.described(file, &what)?;
        for peer in addresses(&self.options.peers) {
            match self.peer_gives(peer, &blob, &what) {
                Ok(()) => {
                    let path = self.publish(file, &blob.sha256);
                    tracing::info!("{what}: taken from {peer}");
                    self.progress.finish(&what);
                    return path.inspect_err(|error| tracing::warn!("{what}: {error}")).ok();
                }
                Err(problem) => tracing::debug!("{what}: not from {peer}: {problem}"),
            }
        }
        None
    }

    /// `None`: it is small, or has no digest, or the hub says nothing of it now.
    fn described(&self, file: &str, what: &str) -> Option<Blob> {
        let (api, url) = (self.api.clone(), self.api.repo(self.repo()).url(file));
        let told = self.supervise(what, move |_| api.metadata(&url)).ok()?.ok()?;
        let (sha256, size) = (told.etag().to_owned(), told.size());
        (is_sha256(&sha256) && size >= LEAST).then_some(Blob { sha256, size: size as u64 })
    }

    fn peer_gives(&self, peer: SocketAddr, blob: &Blob, what: &str) -> Result<(), String> {
        let partial = self.blob_path(&blob.sha256).with_extension("part");
        let (url, size, to) = (format!("http://{peer}/blobs/{}", blob.sha256), blob.size, partial.clone());
        let taken = self.supervise(what, move |events| take(&url, &to, size, &events));
        taken.map_err(|error| error.to_string())?.map_err(|error| error.to_string())?;
        let sha256 = sha256_of(&partial).map_err(|error| error.to_string())?;
        if sha256 != blob.sha256 {
            // Nobody knows which part of it is wrong.
            std::fs::remove_file(&partial).map_err(|error| error.to_string())?;
            return Err(format!("its SHA-256 is {sha256}, not {}", blob.sha256));
        }
        Ok(())
    }

    /// Gives a finished file its name, as the hub's client does: by its digest, and by a link of its name.
    fn publish(&self, file: &str, sha256: &str) -> std::io::Result<PathBuf> {
        let (blob, repository) = (self.blob_path(sha256), self.cache.repo(self.repo()));
        std::fs::rename(blob.with_extension("part"), &blob)?;
        repository.create_ref(&self.commit)?;
        let path = repository.pointer_path(&self.commit).join(file);
        let folder = path.parent().unwrap_or(&path);
        std::fs::create_dir_all(folder)?;
        // Out of the folders of the file's name, of the commit and of all commits.
        let up = "../".repeat(2 + Path::new(file).components().count() - 1);
        std::os::unix::fs::symlink(format!("{up}blobs/{sha256}"), &path)?;
        Ok(path)
    }

    fn blob_path(&self, sha256: &str) -> PathBuf {
        self.cache.repo(self.repo()).blob_path(sha256)
    }
}

fn is_sha256(text: &str) -> bool {
    text.len() == 64 && text.chars().all(|c| c.is_ascii_digit() || ('a'..='f').contains(&c))
}

/// All addresses that peers' names have now, in no order: so those that start together ask different ones.
fn addresses(peers: &[String]) -> Vec<SocketAddr> {
    let of = |peer: &String| {
        let resolved = peer.to_socket_addrs();
        resolved.inspect_err(|error| tracing::debug!("no peer at {peer}: {error}")).into_iter().flatten()
    };
    let mut all: Vec<SocketAddr> = peers.iter().flat_map(of).collect();
    all.sort_by_cached_key(|_| random_u64());
    all.truncate(MOST);
    all
}

/// Appends to the partial file what it lacks.
fn take(url: &str, partial: &Path, size: u64, events: &SyncSender<Event>) -> Result<(), ApiError> {
    partial.parent().map_or(Ok(()), std::fs::create_dir_all)?;
    let mut file = OpenOptions::new().append(true).create(true).open(partial)?;
    let had = file.metadata()?.len();
    if had < size {
        append(url, &mut file, (had, size), events)?;
    }
    Ok(file.sync_all()?)
}

fn append(url: &str, file: &mut File, (had, size): (u64, u64), events: &SyncSender<Event>) -> Result<(), ApiError> {
    let agent: ureq::Agent =
        ureq::Agent::config_builder().timeout_connect(Some(CONNECTS)).max_redirects(0).build().into();
    let response = agent.get(url).header("Range", format!("bytes={had}-")).call().map_err(Box::new)?;
    let status = response.status().as_u16();
    if status != 206 {
        return Err(std::io::Error::other(format!("it answers {status}")).into());
    }
    let mut body = response.into_body().into_reader().take(size - had);
    let (mut done, mut chunk) = (had, vec![0; CHUNK]);
    while done < size {
        let came = body.read(&mut chunk)?;
        if came == 0 {
            return Err(std::io::Error::other("the connection was cut").into());
        }
        file.write_all(&chunk[..came])?;
        done += came as u64;
        // The listener may have given up.
        let _ = events.send(Event { done, size: Some(size) });
    }
    Ok(())
}

/// A file of a hub's model in the cache, complete and checked, by its digest. `None`: there is none, or `spec` is no model of a hub.
pub fn shared(cache: &Path, spec: &str, sha256: &str) -> Option<PathBuf> {
    let repository = RepositorySpec::parse(spec).filter(|_| is_sha256(sha256))?;
    let cache = hf_hub::Cache::new(store::hub_dir(cache));
    Some(cache.model(repository.id).blob_path(sha256)).filter(|path| path.is_file())
}
