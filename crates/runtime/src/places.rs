//! Places for a listener's connections (I5). While all are taken, a newcomer gets the place of one that waits for a request: one that never had
//! any, or else the one that has waited the longest. Otherwise whoever opens enough connections and sends nothing would keep everybody out.

use std::collections::BTreeMap;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use futures::task::AtomicWaker;
use hyper::body::{Frame, SizeHint};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, sleep};

/// A connection may be this long without a request before it must make room: a client needs time to send its first one, and to read the end
/// of its last answer.
const GRACE: Duration = Duration::from_secs(1);
/// Most permits of a semaphore; every platform can count this many.
const MOST: usize = 1 << 24;

/// The places of a listener.
#[derive(Debug)]
pub struct Places {
    free: Arc<Semaphore>,
    /// How long a connection may be without a request before it must make room.
    grace: Duration,
    waiting: Mutex<Waiting>,
}

/// The connections that wait for a request, in the order in which they make room.
#[derive(Debug, Default)]
struct Waiting {
    next: u64,
    seats: BTreeMap<Turn, (Instant, Arc<Leave>)>,
}

/// Those that never had a request come first, then those that have waited the longest.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Turn {
    asked: bool,
    number: u64,
}

/// Tells a connection to make room.
#[derive(Debug, Default)]
struct Leave {
    asked: AtomicBool,
    waker: AtomicWaker,
}

/// A connection's place, given back when dropped.
#[derive(Debug)]
pub struct Place {
    seat: Seat,
    _permit: Option<OwnedSemaphorePermit>,
}

/// What the parts of a connection know of its place. Clones share it.
#[derive(Clone, Debug)]
pub struct Seat(Arc<SeatState>);

#[derive(Debug)]
struct SeatState {
    places: Arc<Places>,
    leave: Arc<Leave>,
    state: Mutex<Use>,
}

/// Whether a connection may have to make room.
#[derive(Debug)]
enum Use {
    /// It waits for a request.
    Waiting(Turn),
    /// So many of its requests are being answered.
    Busy(u32),
    /// It is closed.
    Closed,
}

/// A request of a connection is being answered, which keeps its place.
#[derive(Debug)]
pub struct Occupied(Seat);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Places {
    /// So many places, all of them free.
    pub fn new(count: usize) -> Arc<Places> {
        Places::with_grace(count, GRACE)
    }

    /// The same for clients that are so near that a request comes, and an answer is read, within this time.
    pub fn with_grace(count: usize, grace: Duration) -> Arc<Places> {
        let free = Arc::new(Semaphore::new(count.clamp(1, MOST)));
        Arc::new(Places { free, grace, waiting: Mutex::default() })
    }

    /// Takes a place. While none is free, the first of those that wait for a request is told to make room.
    pub async fn take(self: &Arc<Places>) -> Place {
        let permit = loop {
            let free = Arc::clone(&self.free);
            if let Ok(permit) = free.try_acquire_owned() {
                break Some(permit);
            }
            let again = self.make_room();
            tokio::select! {
                // The semaphore is never closed.
                permit = Arc::clone(&self.free).acquire_owned() => break permit.ok(),
                () = sleep(again) => {}
            }
        };
        let leave = Arc::<Leave>::default();
        let turn = self.wait(false, &leave);
        let seat = SeatState { places: Arc::clone(self), leave, state: Mutex::new(Use::Waiting(turn)) };
        Place { seat: Seat(Arc::new(seat)), _permit: permit }
    }

    /// Tells the first that waits to end, if it has waited long enough; returns when to look again.
    fn make_room(&self) -> Duration {
        let mut waiting = lock(&self.waiting);
        let Some(first) = waiting.seats.first_entry() else { return self.grace };
        let left = self.grace.saturating_sub(first.get().0.elapsed());
        if !left.is_zero() {
            return left;
        }
        let (_, leave) = first.remove();
        leave.asked.store(true, Ordering::Release);
        leave.waker.wake();
        self.grace
    }

    fn wait(&self, asked: bool, leave: &Arc<Leave>) -> Turn {
        let mut waiting = lock(&self.waiting);
        let turn = Turn { asked, number: waiting.next };
        waiting.next += 1;
        waiting.seats.insert(turn, (Instant::now(), Arc::clone(leave)));
        turn
    }

    fn forget(&self, turn: Turn) {
        lock(&self.waiting).seats.remove(&turn);
    }
}

impl Place {
    /// What its parts hold.
    pub fn seat(&self) -> Seat {
        self.seat.clone()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Use::Waiting(turn) = std::mem::replace(&mut *lock(&self.seat.0.state), Use::Closed) {
            self.seat.0.places.forget(turn);
        }
    }
}

impl Seat {
    /// A request has come.
    pub fn occupy(&self) -> Occupied {
        let mut now = lock(&self.0.state);
        match &mut *now {
            Use::Busy(requests) => *requests += 1,
            Use::Closed => {}
            Use::Waiting(turn) => {
                self.0.places.forget(*turn);
                // It may have been told to end just now.
                self.0.leave.asked.store(false, Ordering::Release);
                *now = Use::Busy(1);
            }
        }
        Occupied(self.clone())
    }

    /// An error when the connection must make room; otherwise what polls is woken then.
    ///
    /// # Errors
    /// The reason, for whoever reads from the connection.
    pub fn check(&self, cx: &mut Context<'_>) -> io::Result<()> {
        self.0.leave.waker.register(cx.waker());
        match self.0.leave.asked.load(Ordering::Acquire) {
            true => {
                Err(io::Error::new(io::ErrorKind::ConnectionAborted, "its place was needed while it asked nothing"))
            }
            false => Ok(()),
        }
    }
}

impl Drop for Occupied {
    fn drop(&mut self) {
        let seat = &self.0.0;
        let mut now = lock(&seat.state);
        match &mut *now {
            Use::Busy(1) => *now = Use::Waiting(seat.places.wait(true, &seat.leave)),
            Use::Busy(requests) => *requests -= 1,
            Use::Waiting(_) | Use::Closed => {}
        }
    }
}

/// A body that holds something, such as [`Occupied`], until it is over.
pub fn holding(body: Body, what: impl Send + Unpin + 'static) -> Body {
    Body::new(Holding { body, _what: what })
}

struct Holding<T> {
    body: Body,
    _what: T,
}

impl<T: Unpin> HttpBody for Holding<T> {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::{FutureExt, poll};
    use std::pin::pin;

    fn must_leave(place: &Place) -> bool {
        std::future::poll_fn(|cx| Poll::Ready(place.seat.check(cx))).now_or_never().is_some_and(|told| told.is_err())
    }

    /// Takes a place once there is one.
    async fn late(places: &Arc<Places>, until: Duration) -> Option<Place> {
        tokio::time::timeout(until, places.take()).await.ok()
    }

    #[tokio::test(start_paused = true)]
    async fn whoever_waits_the_longest_makes_room() {
        let places = Places::new(2);
        let first = places.take().await;
        sleep(GRACE / 2).await;
        let second = places.take().await;
        let mut third = pin!(places.take());
        assert!(poll!(third.as_mut()).is_pending());
        assert!(!must_leave(&first), "it may be about to send its request");
        sleep(GRACE).await;
        assert!(poll!(third.as_mut()).is_pending());
        assert!(must_leave(&first) && !must_leave(&second));
        drop(first);
        assert!(poll!(third.as_mut()).is_ready());
    }

    #[tokio::test(start_paused = true)]
    async fn whose_request_is_answered_keeps_its_place() {
        let places = Places::new(1);
        let place = places.take().await;
        let (one, other) = (place.seat().occupy(), place.seat().occupy());
        assert!(late(&places, GRACE * 9).await.is_none());
        drop(one);
        assert!(late(&places, GRACE * 9).await.is_none());
        assert!(!must_leave(&place));
        drop(other);
        assert!(late(&places, GRACE / 2).await.is_none());
        assert!(!must_leave(&place), "its client may not have read the answer yet");
        assert!(late(&places, GRACE * 2).await.is_none());
        assert!(must_leave(&place));
    }

    #[tokio::test(start_paused = true)]
    async fn who_never_asked_makes_room_first() {
        let places = Places::new(2);
        let (used, silent) = (places.take().await, places.take().await);
        drop(used.seat().occupy());
        assert!(late(&places, GRACE * 3 / 2).await.is_none());
        assert!(must_leave(&silent) && !must_leave(&used));
    }

    #[tokio::test(start_paused = true)]
    async fn near_clients_make_room_sooner() {
        let near = GRACE / 10;
        let places = Places::with_grace(1, near);
        let silent = places.take().await;
        assert!(late(&places, near / 2).await.is_none());
        assert!(!must_leave(&silent));
        assert!(late(&places, near).await.is_none());
        assert!(must_leave(&silent));
    }

    #[tokio::test(start_paused = true)]
    async fn a_closed_connection_is_forgotten() {
        let places = Places::new(2);
        let (first, second) = (places.take().await, places.take().await);
        let late_end = first.seat().occupy();
        drop(first);
        drop(late_end);
        drop(second);
        assert!(lock(&places.waiting).seats.is_empty());
        assert_eq!(places.free.available_permits(), 2);
    }
}
