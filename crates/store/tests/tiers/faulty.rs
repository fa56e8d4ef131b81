//! An object store that fails, is slow, does not answer or ends too soon.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use futures::StreamExt;
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    ObjectStoreExt, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};

/// What is wrong with an object store.
#[derive(Debug, Default)]
pub struct Faults {
    pub calls: AtomicU32,
    pub fails: AtomicBool,
    pub hangs: AtomicBool,
    pub delay_ms: AtomicU32,
    /// Gets end after so many bytes; 0: they do not.
    pub cut: AtomicUsize,
}

impl Faults {
    async fn go(&self) -> Result<()> {
        self.calls.fetch_add(1, SeqCst);
        tokio::time::sleep(Duration::from_millis(self.delay_ms.load(SeqCst).into())).await;
        if self.hangs.load(SeqCst) {
            std::future::pending::<()>().await;
        }
        match self.fails.load(SeqCst) {
            true => Err(Error::Generic { store: "faulty", source: "it fails".into() }),
            false => Ok(()),
        }
    }
}

/// An object store in memory, and what is wrong with it.
#[derive(Clone, Debug, Default)]
pub struct Faulty {
    pub objects: Arc<InMemory>,
    pub faults: Arc<Faults>,
}

impl fmt::Display for Faulty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("faulty")
    }
}

impl ObjectStore for Faulty {
    fn put_opts<'s, 'l, 'a>(
        &'s self,
        at: &'l Path,
        bytes: PutPayload,
        options: PutOptions,
    ) -> BoxFuture<'a, Result<PutResult>>
    where
        's: 'a,
        'l: 'a,
    {
        Box::pin(async move {
            self.faults.go().await?;
            self.objects.put_opts(at, bytes, options).await
        })
    }

    fn get_opts<'s, 'l, 'a>(&'s self, at: &'l Path, options: GetOptions) -> BoxFuture<'a, Result<GetResult>>
    where
        's: 'a,
        'l: 'a,
    {
        Box::pin(async move {
            self.faults.go().await?;
            let got = self.objects.get_opts(at, options).await?;
            let cut = self.faults.cut.load(SeqCst);
            if cut == 0 {
                return Ok(got);
            }
            let (meta, range, attributes, extensions) =
                (got.meta.clone(), got.range.clone(), got.attributes.clone(), got.extensions.clone());
            let bytes = got.bytes().await?.slice(..cut);
            let payload = GetResultPayload::Stream(futures::stream::iter([Ok(bytes)]).boxed());
            Ok(GetResult { payload, meta, range, attributes, extensions })
        })
    }

    fn delete_stream(&self, at: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        let (objects, faults) = (Arc::clone(&self.objects), Arc::clone(&self.faults));
        at.then(move |at| {
            let (objects, faults) = (Arc::clone(&objects), Arc::clone(&faults));
            async move {
                faults.go().await?;
                let at = at?;
                objects.delete(&at).await.map(|()| at)
            }
        })
        .boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let (listed, faults) = (self.objects.list(prefix), Arc::clone(&self.faults));
        futures::stream::once(async move {
            match faults.go().await {
                Ok(()) => listed,
                Err(error) => futures::stream::iter([Err(error)]).boxed(),
            }
        })
        .flatten()
        .boxed()
    }

    fn put_multipart_opts<'s, 'l, 'a>(
        &'s self,
        at: &'l Path,
        options: PutMultipartOptions,
    ) -> BoxFuture<'a, Result<Box<dyn MultipartUpload>>>
    where
        's: 'a,
        'l: 'a,
    {
        self.objects.put_multipart_opts(at, options)
    }

    fn list_with_delimiter<'s, 'l, 'a>(&'s self, prefix: Option<&'l Path>) -> BoxFuture<'a, Result<ListResult>>
    where
        's: 'a,
        'l: 'a,
    {
        self.objects.list_with_delimiter(prefix)
    }

    fn copy_opts<'s, 'l, 'm, 'a>(
        &'s self,
        from: &'l Path,
        to: &'m Path,
        options: CopyOptions,
    ) -> BoxFuture<'a, Result<()>>
    where
        's: 'a,
        'l: 'a,
        'm: 'a,
    {
        self.objects.copy_opts(from, to, options)
    }
}
