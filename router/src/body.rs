//! Reads the bodies of HTTP requests: each bounded in size and time, all together bounded in memory (I5).

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, HttpBody};
use baton_runtime::Bytes;
use baton_types::ErrorKind;
use futures::StreamExt;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout_at};

use crate::error::RequestError;

/// Longest time a body may take to arrive.
const BODY_TIMEOUT: Duration = Duration::from_secs(60);
/// Bytes that a permit of the memory stands for.
const UNIT: usize = 1 << 10;

/// Memory for the bodies that are being read and parsed.
pub(crate) struct Bodies {
    limit: usize,
    memory: Bytes,
    units: Arc<Semaphore>,
}

/// A body in memory. Its share of the memory is free when it is dropped.
pub(crate) struct Held {
    pub bytes: Vec<u8>,
    _share: Option<OwnedSemaphorePermit>,
}

impl Bodies {
    /// Each body may have `limit` bytes, and all that are held at a time `memory` bytes.
    pub fn new(limit: usize, memory: Bytes) -> Bodies {
        let units = usize::try_from(memory.0).unwrap_or(usize::MAX).div_ceil(UNIT);
        Bodies { limit, memory, units: Arc::new(Semaphore::new(units.min(Semaphore::MAX_PERMITS))) }
    }

    /// Reads the whole body. Fails if it is too large or too slow, or if too many bytes of others are held.
    ///
    /// The share grows with what has arrived: a client that says a length and sends nothing holds nothing. It is never waited for, so no two
    /// bodies wait for each other's end.
    pub async fn read(&self, body: Body) -> Result<Held, RequestError> {
        let until = Instant::now() + BODY_TIMEOUT;
        let said = body.size_hint().exact().map(|length| usize::try_from(length).unwrap_or(usize::MAX));
        if said.is_some_and(|length| length > self.limit) {
            return Err(self.too_large());
        }
        let mut held = Held { bytes: Vec::new(), _share: None };
        let mut share = 0;
        // Costs no memory until it is written to.
        held.bytes.reserve_exact(said.unwrap_or(0));
        let mut chunks = body.into_data_stream();
        loop {
            let slow = |_| RequestError::new(ErrorKind::DeadlineExceeded, "the body did not arrive in time");
            match timeout_at(until, chunks.next()).await.map_err(slow)? {
                None => return Ok(held),
                Some(Ok(chunk)) if held.bytes.len() + chunk.len() <= self.limit => {
                    let length = held.bytes.len() + chunk.len();
                    self.grow(&mut held, &mut share, length)?;
                    held.bytes.extend_from_slice(&chunk);
                }
                Some(Ok(_)) => return Err(self.too_large()),
                Some(Err(error)) => {
                    return Err(RequestError::new(ErrorKind::InvalidArgument, format!("the body broke off: {error}")));
                }
            }
        }
    }

    /// Takes memory for a body of this length, of which `share` units are taken already.
    fn grow(&self, held: &mut Held, share: &mut usize, length: usize) -> Result<(), RequestError> {
        let more = length.div_ceil(UNIT).saturating_sub(*share);
        let taken = u32::try_from(more).ok().and_then(|more| Arc::clone(&self.units).try_acquire_many_owned(more).ok());
        let Some(taken) = taken else {
            let memory = self.memory;
            let full = format!("requests being read fill the {memory} there are for them (--body-memory); retry later");
            return Err(RequestError::new(ErrorKind::ResourceExhausted, full).code("too_many_requests"));
        };
        *share += more;
        match &mut held._share {
            Some(share) => share.merge(taken),
            none => *none = Some(taken),
        }
        Ok(())
    }

    fn too_large(&self) -> RequestError {
        let limit = self.limit;
        let wrong = format!("the body is larger than {limit} bytes, the most this router takes (--body-limit)");
        RequestError::new(ErrorKind::TooLarge, wrong).code("request_too_large")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::stream;

    fn bodies() -> Bodies {
        Bodies::new(4 << 10, Bytes(6 << 10))
    }

    /// A body that does not say its length, in pieces of a KiB. Only `last` tells its end.
    fn pieces(count: usize, last: bool) -> Body {
        let pieces = stream::repeat_with(|| Ok::<_, std::io::Error>(vec![b'x'; 1 << 10])).take(count);
        match last {
            true => Body::from_stream(pieces),
            false => Body::from_stream(pieces.chain(stream::pending())),
        }
    }

    #[tokio::test]
    async fn a_body_is_whole_and_not_too_large() {
        let bodies = bodies();
        assert_eq!(bodies.read(Body::from(vec![1; 4 << 10])).await.unwrap().bytes.len(), 4 << 10);
        assert_eq!(bodies.read(pieces(4, true)).await.unwrap().bytes.len(), 4 << 10);
        for large in [Body::from(vec![1; (4 << 10) + 1]), pieces(5, true)] {
            assert_eq!(bodies.read(large).await.err().unwrap().kind, ErrorKind::TooLarge);
        }
    }

    #[tokio::test]
    async fn all_bodies_together_fit_the_memory() {
        let bodies = bodies();
        let held = bodies.read(Body::from(vec![1; 3 << 10])).await.unwrap();
        // It waits for its end and holds what has come.
        let mut slow = Box::pin(bodies.read(pieces(2, false)));
        assert!(futures::poll!(slow.as_mut()).is_pending());
        let code = |error: RequestError| (error.kind, error.code);
        let full = (ErrorKind::ResourceExhausted, Some("too_many_requests"));
        for more in [Body::from(vec![1; 2 << 10]), pieces(2, true)] {
            assert_eq!(bodies.read(more).await.map(drop).map_err(code), Err(full));
        }
        assert!(bodies.read(Body::from(vec![1; 1 << 10])).await.is_ok());
        drop(slow);
        assert!(bodies.read(pieces(3, true)).await.is_ok());
        drop(held);
        assert!(bodies.read(Body::from(vec![1; 4 << 10])).await.is_ok());
    }

    /// I5: a length that is said and never sent keeps nobody out.
    #[tokio::test]
    async fn a_length_alone_takes_no_memory() {
        struct Silent;
        impl HttpBody for Silent {
            type Data = axum::body::Bytes;
            type Error = std::io::Error;
            fn poll_frame(
                self: std::pin::Pin<&mut Self>,
                _: &mut std::task::Context<'_>,
            ) -> std::task::Poll<Option<Result<hyper::body::Frame<Self::Data>, Self::Error>>> {
                std::task::Poll::Pending
            }
            fn size_hint(&self) -> hyper::body::SizeHint {
                hyper::body::SizeHint::with_exact(4 << 10)
            }
        }
        let bodies = bodies();
        let mut silent: Vec<_> = (0..9).map(|_| Box::pin(bodies.read(Body::new(Silent)))).collect();
        for body in &mut silent {
            assert!(futures::poll!(body.as_mut()).is_pending());
        }
        assert!(bodies.read(Body::from(vec![1; 4 << 10])).await.is_ok());
    }
}
