//! Waiting beside a busy stream at little cost. An answer waits for its next token, and beside it for a deadline, for its client to leave and
//! for the process to end. These come seldom, and must not cost something with each token.

use std::future::{Future, pending, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker, ready};

use futures::task::AtomicWaker;
use tokio::time::{Instant, Sleep, sleep_until};

/// A future that is polled only after it was woken.
pub(crate) struct Dormant<T> {
    future: Pin<Box<dyn Future<Output = T> + Send>>,
    bell: Arc<Bell>,
    waker: Waker,
}

/// Rung by what the future waits for.
struct Bell {
    rung: AtomicBool,
    waiting: AtomicWaker,
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.rung.store(true, Ordering::Release);
        self.waiting.wake();
    }
}

impl<T> Dormant<T> {
    /// The same future, at less cost. It may not be polled again once it has completed.
    pub fn new(future: impl Future<Output = T> + Send + 'static) -> Dormant<T> {
        let bell = Arc::new(Bell { rung: AtomicBool::new(true), waiting: AtomicWaker::new() });
        Dormant { future: Box::pin(future), waker: Arc::clone(&bell).into(), bell }
    }
}

impl<T> Future for Dormant<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        // Registered before it looks, so that no ring is missed.
        self.bell.waiting.register(cx.waker());
        if !self.bell.rung.swap(false, Ordering::Acquire) {
            return Poll::Pending;
        }
        let Dormant { future, waker, .. } = &mut *self;
        future.as_mut().poll(&mut Context::from_waker(waker))
    }
}

/// A timer for a time that mostly moves on. It is set anew only when it must ring earlier, or has rung.
pub(crate) struct Alarm(Pin<Box<Sleep>>);

impl Alarm {
    /// An alarm set to this time, until it is polled for another.
    pub fn new(at: Instant) -> Alarm {
        Alarm(Box::pin(sleep_until(at)))
    }

    /// Completes at this time; never without one.
    pub async fn rings(&mut self, at: Option<Instant>) {
        match at {
            Some(at) => poll_fn(|cx| self.poll_at(at, cx)).await,
            None => pending().await,
        }
    }

    /// Ready from this time on.
    pub fn poll_at(&mut self, at: Instant, cx: &mut Context<'_>) -> Poll<()> {
        let sleep = &mut self.0;
        if at < sleep.deadline() {
            sleep.as_mut().reset(at);
        }
        ready!(sleep.as_mut().poll(cx));
        while Instant::now() < at {
            sleep.as_mut().reset(at);
            ready!(sleep.as_mut().poll(cx));
        }
        Poll::Ready(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::poll;
    use std::time::Duration;
    use tokio::sync::oneshot;
    use tokio::time::timeout;

    #[tokio::test]
    async fn a_dormant_future_is_polled_only_when_it_was_woken() {
        let (wake, woken) = oneshot::channel();
        let polls = Arc::new(std::sync::atomic::AtomicU32::new(0));
        let (counted, mut woken) = (Arc::clone(&polls), Box::pin(woken));
        let mut dormant = Dormant::new(poll_fn(move |cx| {
            counted.fetch_add(1, Ordering::Relaxed);
            woken.as_mut().poll(cx)
        }));
        for _ in 0..5 {
            assert!(poll!(&mut dormant).is_pending());
        }
        assert_eq!(polls.load(Ordering::Relaxed), 1);
        let other_task = tokio::spawn(async move { timeout(Duration::from_secs(60), dormant).await });
        tokio::task::yield_now().await;
        wake.send(7).unwrap();
        assert_eq!(other_task.await.unwrap().unwrap().unwrap(), 7, "it wakes the task that polled it last");
        assert_eq!(polls.load(Ordering::Relaxed), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn an_alarm_rings_at_the_time_that_it_is_asked_for_last() {
        let start = Instant::now();
        let after = |seconds| Some(start + Duration::from_secs(seconds));
        let mut alarm = Alarm::new(start + Duration::from_secs(50));
        for (asked, rings) in [(20, 20), (30, 30), (25, 30), (90, 90)] {
            assert!(poll!(Box::pin(alarm.rings(after(500)))).is_pending());
            alarm.rings(after(asked)).await;
            assert_eq!(Some(Instant::now()), after(rings), "asked for {asked}");
        }
        assert!(timeout(Duration::from_secs(900), alarm.rings(None)).await.is_err());
    }
}
