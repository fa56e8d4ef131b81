//! What is in an object store, for people and tools. Only [`Bucket::remove`] changes anything.
//!
//! Each identity's objects are in a folder of their own, with a description beside them that the store's thread puts there once. Calls wait for the
//! object store, each for as long as a worker would.

use std::collections::BTreeMap;
use std::future::Future;
use std::io::{Error, Result as IoResult};
use std::time::{Duration, SystemTime};

use baton_kv_store::{Expect, Identity, ObjectName, Place, Shape, check_record, object_bytes, object_identity};
use futures::{StreamExt, TryStreamExt};
use object_store::path::Path;
use object_store::{ObjectStoreExt, PutPayload};
use tokio::runtime::Runtime;

use crate::{About, Objects, OpenError};

/// Name of the description in the folder of an identity.
const ABOUT: &str = "about.json";
/// Objects that are read or removed at a time.
const AT_ONCE: usize = 16;

/// An object store, as `--kv-object` names it.
#[derive(Debug)]
pub struct Bucket {
    objects: Objects,
    runtime: Runtime,
}

/// The objects of one identity.
#[derive(Clone, PartialEq, Debug)]
pub struct KeptObjects {
    /// Their folder, from the beginning of the bucket or directory.
    pub folder: String,
    /// Whose KV.
    pub identity: Identity,
    /// How many.
    pub blocks: u64,
    /// Their bytes.
    pub bytes: u64,
    /// When one was last put.
    pub written: Option<SystemTime>,
    /// What they are of; None: there is no description, or it is of something else. Then they cannot be read.
    pub about: Option<About>,
}

/// What was found in the objects of an identity.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ObjectSum {
    /// Their checksum and digests are right.
    pub whole: u64,
    /// They are not.
    pub damaged: u64,
    /// They were removed meanwhile.
    pub gone: u64,
}

impl Objects {
    /// Puts what the objects of this identity are of beside them, unless it is there. It helps people, no more.
    pub(crate) async fn describe(&self, identity: Identity) {
        let Some(about) = &self.about else { return };
        let (path, text) = (self.folder(identity).join(ABOUT), serde_json::to_vec_pretty(about).unwrap_or_default());
        let put = async {
            let there = match self.store.get(&path).await {
                Ok(got) => got.bytes().await.is_ok_and(|there| there == text),
                Err(_) => false,
            };
            if !there {
                self.store.put(&path, PutPayload::from(text)).await.map_err(Error::other)?;
            }
            Ok(())
        };
        if let Err(error) = self.within(put).await {
            tracing::debug!(%error, "cannot say what the KV in the object store is of; `baton kv stat` will not read it");
        }
    }
}

impl Bucket {
    /// Opens what a URL names, as [`Objects::open`] does.
    ///
    /// # Errors
    /// The URL is wrong.
    pub fn open(url: &str) -> Result<Bucket, OpenError> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|cause| OpenError::Host { doing: "start a runtime", cause })?;
        Ok(Bucket { objects: Objects::open(url)?, runtime })
    }

    /// Lists what is there, by folder.
    ///
    /// # Errors
    /// The object store does not answer in time, or refuses.
    pub fn look(&self) -> IoResult<Vec<KeptObjects>> {
        self.runtime.block_on(async {
            let mut found = BTreeMap::new();
            let mut listed = self.objects.store.list(Some(&self.objects.prefix));
            while let Some(object) = self.next(&mut listed).await? {
                let (location, size) = (&object.location, object.size);
                let Some((folder, identity)) = folder_of(location) else { continue };
                let new = || KeptObjects {
                    folder: folder.clone(),
                    identity,
                    blocks: 0,
                    bytes: 0,
                    written: None,
                    about: None,
                };
                let kept: &mut KeptObjects = found.entry(folder.clone()).or_insert_with(new);
                if location.filename().is_some_and(|name| name.parse::<ObjectName>().is_ok()) {
                    (kept.blocks, kept.bytes) = (kept.blocks + 1, kept.bytes + size);
                    kept.written = kept.written.max(Some(object.last_modified.into()));
                }
            }
            let mut kept: Vec<KeptObjects> = found.into_values().filter(|kept| kept.blocks > 0).collect();
            for kept in &mut kept {
                kept.about = self.about(kept).await;
            }
            Ok(kept)
        })
    }

    async fn next<T>(
        &self,
        listed: &mut (impl futures::Stream<Item = object_store::Result<T>> + Unpin),
    ) -> IoResult<Option<T>> {
        self.objects.within(async { listed.next().await.transpose().map_err(Error::other) }).await
    }

    async fn about(&self, kept: &KeptObjects) -> Option<About> {
        let path = Path::from(kept.folder.as_str()).join(ABOUT);
        let got = self.objects.within(async {
            let got = self.objects.store.get(&path).await.map_err(Error::other)?;
            got.bytes().await.map_err(Error::other)
        });
        let about: About = serde_json::from_slice(&got.await.ok()?).ok()?;
        (about.layout.block_size > 0 && about.layout.fingerprint() == kept.identity.layout).then_some(about)
    }

    /// Reads all objects of an identity and checks their checksums and digests (I2). None: there is no description.
    ///
    /// # Errors
    /// The object store does not answer in time, or refuses.
    pub fn check(&self, kept: &KeptObjects) -> IoResult<Option<ObjectSum>> {
        let Some(about) = &kept.about else { return Ok(None) };
        let shape = Shape::new(&about.layout).map_err(Error::other)?;
        let checked = self.runtime.block_on(self.each(kept, |location| self.is_whole(kept.identity, &shape, location)));
        let mut sum = ObjectSum::default();
        for whole in checked? {
            match whole {
                Some(true) => sum.whole += 1,
                Some(false) => sum.damaged += 1,
                None => sum.gone += 1,
            }
        }
        Ok(Some(sum))
    }

    async fn is_whole(&self, identity: Identity, shape: &Shape, location: Path) -> IoResult<Option<bool>> {
        let Some(object) = location.filename().and_then(|name| name.parse::<ObjectName>().ok()) else {
            return Ok(None);
        };
        let got = async {
            match self.objects.store.get(&location).await {
                Err(object_store::Error::NotFound { .. }) => Ok(None),
                // What is too large is no object, and is not read.
                Ok(got) if got.meta.size > object_bytes(shape) => Ok(Some(Default::default())),
                Ok(got) => got.bytes().await.map(Some).map_err(Error::other),
                Err(error) => Err(Error::other(error)),
            }
        };
        let Some(bytes) = self.objects.within(got).await? else { return Ok(None) };
        let expect = Expect { identity, place: Place::NOWHERE, name: object.name };
        Ok(Some(bytes.len() as u64 == object_bytes(shape) && check_record(shape, &bytes, &expect).is_ok()))
    }

    /// Removes the objects of an identity and their description. Workers that have them find them gone, and compute.
    ///
    /// # Errors
    /// The object store does not answer in time, or refuses.
    pub fn remove(&self, kept: &KeptObjects) -> IoResult<()> {
        let delete = |location: Path| async move {
            let deleted = async {
                match self.objects.store.delete(&location).await {
                    Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
                    Err(error) => Err(Error::other(error)),
                }
            };
            self.objects.within(deleted).await
        };
        self.runtime.block_on(async {
            self.each(kept, delete).await?;
            delete(Path::from(kept.folder.as_str()).join(ABOUT)).await
        })
    }

    /// Does something with each object of an identity, some at a time.
    async fn each<T, F: Future<Output = IoResult<T>>>(
        &self,
        kept: &KeptObjects,
        does: impl Fn(Path) -> F,
    ) -> IoResult<Vec<T>> {
        let folder = Path::from(kept.folder.as_str());
        let listed = self.objects.store.list(Some(&folder)).map_err(Error::other);
        let objects = listed.try_filter(|object| {
            let is = object.location.filename().is_some_and(|name| name.parse::<ObjectName>().is_ok());
            futures::future::ready(is)
        });
        objects.map_ok(|object| does(object.location)).try_buffer_unordered(AT_ONCE).try_collect().await
    }
}

/// The folder of an identity in which this is, as a text, and the identity.
fn folder_of(location: &Path) -> Option<(String, Identity)> {
    let (folder, _) = location.as_ref().rsplit_once('/')?;
    let identity = object_identity(folder.rsplit('/').next()?)?;
    Some((folder.to_owned(), identity))
}

impl KeptObjects {
    /// How long ago one was last put.
    pub fn age(&self, now: SystemTime) -> Option<Duration> {
        now.duration_since(self.written?).ok()
    }
}
