//! A stream that can be ended from outside, also while nobody polls it.
//!
//! HTTP/2 polls an answer's stream only while its client has room for more. What the stream of a client that never reads holds would stay
//! for as long as the connection does.

use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use futures::Stream;

/// A stream that ends early, with a last item, once it is revoked.
pub(crate) struct Revocable<S, T> {
    stream: Arc<Mutex<Option<S>>>,
    last: Option<T>,
}

/// A stream that yields the same as `stream`, until what is returned beside it is called. Then `stream` is dropped, and `last` is the last
/// item.
pub(crate) fn revocable<S: Send + 'static, T>(stream: S, last: T) -> (Revocable<S, T>, impl FnOnce() + Send) {
    let stream = Arc::new(Mutex::new(Some(stream)));
    // Weak, so that a stream may own what revokes it.
    let revoked = Arc::downgrade(&stream);
    let revoke = move || {
        let stream = revoked.upgrade();
        let taken = stream.as_ref().map(|stream| stream.lock().unwrap_or_else(PoisonError::into_inner).take());
        drop(taken);
    };
    (Revocable { stream, last: Some(last) }, revoke)
}

impl<S: Stream<Item = T> + Unpin, T: Unpin> Stream for Revocable<S, T> {
    type Item = T;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<T>> {
        let polled = {
            let mut stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
            stream.as_mut().map(|stream| Pin::new(stream).poll_next(cx))
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
    async fn a_stream_that_ends_by_itself_has_no_last_item() {
        let (stream, revoke) = revocable(stream::iter([1, 2]), 9);
        let mut stream = stream;
        assert_eq!((stream.next().await, stream.next().await, stream.next().await), (Some(1), Some(2), None));
        revoke();
        assert_eq!(stream.next().await, None);
    }
}
