//! The object tier: a thread that lists, gets, puts and deletes objects, all calls of the core at once.
//!
//! Each call has a time limit, and how many are made at once is the core's to say. So memory is bounded: a fetch goes straight into its buffer,
//! an upload has a copy of its block. A call that is out of time is dropped; what a file system still does of it counts on ([`CALLS`]).

use std::fmt::Display;
use std::future::Future;
use std::io::{Error, ErrorKind, Result as IoResult};
use std::sync::Arc;
use std::time::Duration;

use baton_kv_store::{
    Buffer, Expect, Identity, Input, Job, Mismatch, ObjectName, ReadError, check_record, object_bytes, object_folder,
};
use futures::StreamExt;
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutPayload};
use tokio::sync::Semaphore;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::task::JoinSet;

use crate::shared::Shared;
use crate::{About, OpenError};

/// Longest time of a call.
const PATIENCE: Duration = Duration::from_secs(10);
/// Threads for a file system, whose calls block.
const FILE_THREADS: usize = 8;
/// Most calls of a file system, with those that are out of time and wait for a thread (I5).
const CALLS: usize = 64;

/// An object store, and where in it the objects are.
#[derive(Clone, Debug)]
pub struct Objects {
    pub(crate) store: Arc<dyn ObjectStore>,
    pub(crate) prefix: Path,
    patience: Duration,
    /// Of a file system: how many more calls there may be.
    slots: Option<Arc<Semaphore>>,
    /// What the objects are of, for those who look.
    pub(crate) about: Option<About>,
}

/// Something for the object store to do.
#[derive(Debug)]
pub(crate) enum Call {
    List { most: u64 },
    Fetch { job: Job, object: ObjectName, into: Buffer, expect: Expect },
    Upload { job: Job, object: ObjectName, from: Buffer, head: Vec<u8> },
    Remove { job: Job, object: ObjectName },
}

impl Objects {
    /// Opens what a URL names: `s3://bucket/prefix` or `file:///directory`, which is made. Nothing is asked of S3 yet: that it is away is no error.
    /// Where S3 is, and as whom to ask, say `AWS_ENDPOINT_URL`, `AWS_REGION`, `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY` and the other variables
    /// of AWS's tools.
    pub fn open(url: &str) -> Result<Objects, OpenError> {
        let failed = |cause: &dyn Display| OpenError::Object { url: url.to_owned(), cause: cause.to_string() };
        let parsed = |prefix: &str| Path::parse(prefix).map_err(|error| failed(&error));
        if let Some(place) = url.strip_prefix("s3://") {
            let (bucket, prefix) = place.split_once('/').unwrap_or((place, ""));
            if bucket.is_empty() {
                return Err(failed(&"it names no bucket"));
            }
            let store = crate::s3::open(bucket, PATIENCE).map_err(|error| failed(&error))?;
            return Ok(Objects::over(Arc::new(store), parsed(prefix)?));
        }
        let Some(directory) = url.strip_prefix("file://").filter(|path| path.starts_with('/')) else {
            return Err(failed(&"it is neither"));
        };
        std::fs::create_dir_all(directory).map_err(|error| failed(&error))?;
        let store = LocalFileSystem::new_with_prefix(directory).map_err(|error| failed(&error))?;
        Ok(Objects { slots: Some(Arc::new(Semaphore::new(CALLS))), ..Objects::over(Arc::new(store), Path::default()) })
    }

    /// Objects below a prefix of a store of the caller's.
    pub fn over(store: Arc<dyn ObjectStore>, prefix: Path) -> Objects {
        Objects { store, prefix, patience: PATIENCE, slots: None, about: None }
    }

    /// Another longest time of a call.
    pub fn with_patience(self, patience: Duration) -> Objects {
        Objects { patience, ..self }
    }

    /// Says what the objects are of, for those who look.
    pub fn with_about(self, about: Option<About>) -> Objects {
        Objects { about, ..self }
    }

    /// Where an identity's objects are.
    pub(crate) fn folder(&self, identity: Identity) -> Path {
        self.prefix.clone().join(object_folder(identity))
    }

    /// Makes a call, within its time.
    pub(crate) async fn within<T>(&self, call: impl Future<Output = IoResult<T>>) -> IoResult<T> {
        let slot = match &self.slots {
            Some(slots) => Some(Arc::clone(slots).try_acquire_owned().map_err(|_| Error::other(Hung))?),
            None => None,
        };
        if let Ok(done) = tokio::time::timeout(self.patience, call).await {
            return done;
        }
        // The file system's threads cannot be stopped. The slot is free when one of them has come so far.
        slot.map(|slot| tokio::task::spawn_blocking(move || drop(slot)));
        Err(ErrorKind::TimedOut.into())
    }

    /// The objects of an identity, the oldest first, up to so many.
    async fn list(&self, identity: Identity, most: u64) -> IoResult<Vec<ObjectName>> {
        let mut listed = self.store.list(Some(&self.folder(identity)));
        let mut found = Vec::new();
        while (found.len() as u64) < most {
            // A page after the other, each within the time of a call.
            let next = self.within(async { listed.next().await.transpose().map_err(Error::other) }).await?;
            let Some(object) = next else { break };
            let name = object.location.filename().and_then(|name| name.parse::<ObjectName>().ok());
            found.extend(name.map(|name| (object.last_modified, name)));
        }
        found.sort_unstable();
        Ok(found.into_iter().map(|(_, name)| name).collect())
    }

    /// Gets an object into a buffer. What does not have the length of an object is none.
    async fn fetch(&self, shared: &Shared, from: &Path, into: Buffer) -> IoResult<Result<(), ReadError>> {
        let wanted = object_bytes(&shared.shape);
        let damaged = Ok(Err(ReadError::Mismatch(Mismatch::Head)));
        let got = match self.store.get(from).await {
            Err(object_store::Error::NotFound { .. }) => return Ok(Err(ReadError::Absent)),
            got => got.map_err(Error::other)?,
        };
        if got.meta.size != wanted {
            return damaged;
        }
        let (mut chunks, mut at) = (got.into_stream(), 0);
        while let Some(chunk) = chunks.next().await.transpose().map_err(Error::other)? {
            if (at + chunk.len()) as u64 > wanted {
                return damaged;
            }
            // SAFETY: the buffer is this fetch's until the core hears of its end.
            unsafe { shared.memory.write(into, at, chunk.len()) }.copy_from_slice(&chunk);
            at += chunk.len();
        }
        if at as u64 == wanted { Ok(Ok(())) } else { Err(ErrorKind::UnexpectedEof.into()) }
    }

    async fn carry_out(&self, shared: &Shared, call: Call) -> Input {
        let identity = shared.identity;
        let path = |object: ObjectName| self.folder(identity).join(object.to_string());
        match call {
            Call::List { most } => {
                let found = self.list(identity, most).await;
                shared.note("object store", "list", &found);
                Input::Listed(found.ok())
            }
            Call::Fetch { job, object, into, expect } => {
                let from = path(object);
                let fetched = self.within(self.fetch(shared, &from, into)).await;
                shared.note("object store", "get", &fetched);
                let checked = fetched.unwrap_or(Err(ReadError::Io)).and_then(|()| {
                    // SAFETY: as above.
                    let record = unsafe { shared.memory.read(into, 0, shared.shape.stride()) };
                    check_record(&shared.shape, record, &expect).map_err(ReadError::Mismatch)
                });
                Input::Read(job, checked)
            }
            Call::Upload { job, object, from, mut head } => {
                let (at, length) = (shared.shape.head_bytes(), shared.shape.data_bytes());
                // SAFETY: the data of a buffer that is being uploaded do not change until the core hears of the upload's end.
                head.extend_from_slice(unsafe { shared.memory.read(from, at, length) });
                let to = path(object);
                let put = async { self.store.put(&to, PutPayload::from(head)).await.map_err(Error::other) };
                let put = self.within(put).await;
                shared.note("object store", "put", &put);
                Input::Uploaded(job, put.is_ok())
            }
            Call::Remove { job, object } => {
                let path = path(object);
                let removed = self.within(async {
                    match self.store.delete(&path).await {
                        Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
                        Err(error) => Err(Error::other(error)),
                    }
                });
                let removed = removed.await;
                shared.note("object store", "delete", &removed);
                Input::Deleted(job, removed.is_ok())
            }
        }
    }
}

/// Too many calls of the file system have not come back.
#[derive(Debug, thiserror::Error)]
#[error("the file system hangs: {CALLS} calls have not come back")]
struct Hung;

/// Starts the thread. It ends when nobody can send it calls any more; what it is doing then is given up.
pub(crate) fn start(shared: &Arc<Shared>, objects: Objects, calls: UnboundedReceiver<Call>) -> Result<(), OpenError> {
    let failed = |cause| OpenError::Host { doing: "start a thread", cause };
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_all().max_blocking_threads(FILE_THREADS).build().map_err(failed)?;
    let shared = Arc::clone(shared);
    let body = move || {
        runtime.block_on(serve(shared, objects, calls));
        // A call of a file system may hang: nobody waits for it.
        runtime.shutdown_background();
    };
    std::thread::Builder::new().name("kv-object".to_owned()).spawn(body).map(drop).map_err(failed)
}

async fn serve(shared: Arc<Shared>, objects: Objects, mut calls: UnboundedReceiver<Call>) {
    let mut running = JoinSet::new();
    let (identity, described) = (shared.identity, objects.clone());
    running.spawn(async move { described.describe(identity).await });
    loop {
        tokio::select! {
            call = calls.recv() => {
                let Some(call) = call else { return };
                let (shared, objects) = (Arc::clone(&shared), objects.clone());
                running.spawn(async move {
                    let answer = objects.carry_out(&shared, call).await;
                    shared.feed(answer);
                });
            }
            Some(_) = running.join_next() => {}
        }
    }
}
