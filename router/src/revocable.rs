//! A stream that can be ended from outside, also while nobody polls it.
//!
//! HTTP/2 polls an answer's stream only while its client has room for more. What the stream of a client that never reads holds would stay
//! for as long as the connection does.

use std::future::{Future, pending};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use futures::Stream;
use tokio::task::AbortHandle;
use tokio::time::sleep;

/// A stream that ends early, with a last item, once it is revoked.
pub(crate) struct Revocable<S, T> {
    inner: Arc<Mutex<Inner<S>>>,
    last: Option<T>,
    watch: Option<AbortHandle>,
}

struct Inner<S> {
    /// None once it is revoked.
    stream: Option<S>,
    reader: Option<Arc<Reader>>,
    /// Items that were asked for.
    asked: u64,
    /// The last one was not there.
    pending: bool,
}

/// Who asks for items.
struct Reader {
    waker: Waker,
    /// Was told since it last asked.
    told: AtomicBool,
}

impl Wake for Reader {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.told.store(true, Ordering::Release);
        self.waker.wake_by_ref();
    }
}

impl<S> Inner<S> {
    /// A waker for who asks now. The same one for the same reader, so that no item costs an allocation.
    fn waker(&mut self, asking: &Waker) -> Waker {
        let reader = match self.reader.take() {
            Some(reader) if reader.waker.will_wake(asking) => reader,
            _ => Arc::new(Reader { waker: asking.clone(), told: AtomicBool::new(false) }),
        };
        reader.told.store(false, Ordering::Release);
        Waker::from(Arc::clone(self.reader.insert(reader)))
    }

    /// Whether the next item has not been asked for, although it is there.
    fn is_unread(&self) -> bool {
        !self.pending || self.reader.as_ref().is_some_and(|reader| reader.told.load(Ordering::Acquire))
    }
}

/// A stream that yields the same as `stream`, until what is returned beside it is called. Then `stream` is dropped, and `last` is the last
/// item.
pub(crate) fn revocable<S: Send + 'static, T>(stream: S, last: T) -> (Revocable<S, T>, impl FnOnce() + Send) {
    let inner = Arc::new(Mutex::new(Inner { stream: Some(stream), reader: None, asked: 0, pending: false }));
    // Weak, so that a stream may own what revokes it.
    let revoked = Arc::downgrade(&inner);
    let revoke = move || {
        let Some(inner) = revoked.upgrade() else { return };
        let (stream, reader) = {
            let mut inner = inner.lock().unwrap_or_else(PoisonError::into_inner);
            (inner.stream.take(), inner.reader.take())
        };
        // Not under the lock: whatever it owns is dropped with it.
        drop(stream);
        reader.into_iter().for_each(Reader::wake);
    };
    (Revocable { inner, last: Some(last), watch: None }, revoke)
}

impl<S: Send + 'static, T> Revocable<S, T> {
    /// Completes once nobody has asked for `patience` for an item that is there. Of a client that does not read a short answer nothing else
    /// tells: the whole answer is there, and nothing waits for room.
    pub fn unread(&self, patience: Duration) -> impl Future<Output = ()> + Send + use<S, T> {
        let inner = Arc::downgrade(&self.inner);
        async move {
            let mut before = None;
            loop {
                let Some(now) = inner.upgrade().map(|inner| {
                    let inner = inner.lock().unwrap_or_else(PoisonError::into_inner);
                    inner.is_unread().then_some(inner.asked)
                }) else {
                    return pending().await;
                };
                if now.is_some() && now == before {
                    return;
                }
                before = now;
                sleep(patience).await;
            }
        }
    }

    /// Runs this while the stream lives.
    pub fn until_dropped(&mut self, work: impl Future<Output = ()> + Send + 'static) {
        self.watch = Some(tokio::spawn(work).abort_handle());
    }
}

impl<S, T> Drop for Revocable<S, T> {
    fn drop(&mut self) {
        self.watch.iter().for_each(AbortHandle::abort);
    }
}

impl<S: Stream<Item = T> + Unpin, T: Unpin> Stream for Revocable<S, T> {
    type Item = T;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<T>> {
        let polled = {
            let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
            inner.asked += 1;
            let waker = inner.waker(cx.waker());
            let polled = inner.stream.as_mut().map(|s| Pin::new(s).poll_next(&mut Context::from_waker(&waker)));
            inner.pending = matches!(polled, Some(Poll::Pending));
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
    use tokio::time::timeout;

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

    #[tokio::test(start_paused = true)]
    async fn a_stream_is_unread_when_nobody_asks_for_its_next_item() {
        const PATIENCE: Duration = Duration::from_secs(30);
        let (mut read, _) = revocable(stream::repeat(1).take(3).chain(stream::pending()), 9);
        let unread = tokio::spawn(read.unread(PATIENCE));
        for _ in 0..3 {
            sleep(PATIENCE * 2 / 3).await;
            read.next().await;
        }
        let waits = tokio::spawn(async move { (read.next().await, read) });
        sleep(PATIENCE * 9).await;
        assert!(!unread.is_finished(), "somebody asked each time, and waits");
        waits.abort();
        let (never, _) = revocable(stream::repeat(1), 9);
        never.unread(PATIENCE).await;
        // Waits for an item, is told of it, and does not come for it.
        let (item, items) = futures::channel::mpsc::unbounded();
        let (mut told, _) = revocable(items, 9);
        assert!(futures::poll!(told.next()).is_pending());
        let mut unread = std::pin::pin!(told.unread(PATIENCE));
        assert!(timeout(PATIENCE * 9, unread.as_mut()).await.is_err());
        item.unbounded_send(1).unwrap();
        unread.await;
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
