//! A stream that can be ended from outside, also while nobody polls it.
//!
//! HTTP/2 polls an answer's stream only while its client has room for more. What the stream of a client that never reads holds would stay
//! for as long as the connection does.

use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};

use futures::Stream;

/// A stream that ends early, with a last item, once it is revoked.
pub(crate) struct Revocable<S, T> {
    inner: Arc<Mutex<Inner<S>>>,
    last: Option<T>,
}

struct Inner<S> {
    /// None once it is revoked.
    stream: Option<S>,
    /// Who waits for an item.
    waker: Option<Waker>,
}

/// A stream that yields the same as `stream`, until what is returned beside it is called. Then `stream` is dropped, and `last` is the last
/// item.
pub(crate) fn revocable<S: Send + 'static, T>(stream: S, last: T) -> (Revocable<S, T>, impl FnOnce() + Send) {
    let inner = Arc::new(Mutex::new(Inner { stream: Some(stream), waker: None }));
    // Weak, so that a stream may own what revokes it.
    let revoked = Arc::downgrade(&inner);
    let revoke = move || {
        let Some(inner) = revoked.upgrade() else { return };
        let (stream, waker) = {
            let mut inner = inner.lock().unwrap_or_else(PoisonError::into_inner);
            (inner.stream.take(), inner.waker.take())
        };
        // Not under the lock: whatever it owns is dropped with it.
        drop(stream);
        waker.into_iter().for_each(Waker::wake);
    };
    (Revocable { inner, last: Some(last) }, revoke)
}

impl<S: Stream<Item = T> + Unpin, T: Unpin> Stream for Revocable<S, T> {
    type Item = T;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<T>> {
        let polled = {
            let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
            let polled = inner.stream.as_mut().map(|stream| Pin::new(stream).poll_next(cx));
            inner.waker = matches!(polled, Some(Poll::Pending)).then(|| cx.waker().clone());
            polled
        };
        match polled {
            Some(Poll::Ready(None)) => {
                self.last = None;
                Poll::Ready(None)
            }
            Some(polled) => polled,
            None => Poll::Ready(self.last.take()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::StreamExt;
    use futures::stream;

    #[tokio::test]
    async fn a_revoked_stream_is_dropped_at_once_and_ends() {
        let held = Arc::new(());
        let inside = Arc::clone(&held);
        let endless = stream::repeat_with(move || Arc::strong_count(&inside));
        let (mut stream, revoke) = revocable(endless, 0);
        assert_eq!(stream.next().await, Some(2));
        revoke();
        assert_eq!(Arc::strong_count(&held), 1, "nobody has polled it");
        assert_eq!((stream.next().await, stream.next().await), (Some(0), None));
    }

    #[tokio::test]
    async fn who_waits_is_woken() {
        let (mut stream, revoke) = revocable(stream::pending(), 7);
        let waiting = tokio::spawn(async move { stream.next().await });
        tokio::task::yield_now().await;
        revoke();
        assert_eq!(waiting.await.unwrap(), Some(7));
    }

    #[tokio::test]
    async fn a_stream_that_ends_by_itself_has_no_last_item() {
        let (stream, revoke) = revocable(stream::iter([1, 2]), 9);
        let mut stream = stream;
        assert_eq!((stream.next().await, stream.next().await, stream.next().await), (Some(1), Some(2), None));
        revoke();
        assert_eq!(stream.next().await, None);
    }
}
