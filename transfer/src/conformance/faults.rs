//! Injects faults between a session and its transport. All else is the transport's own, including its depth and digests, so that a
//! fault meets what workers run.

use std::collections::VecDeque;

use super::*;

/// A transport with hooks: `before` runs before a batch is submitted, `after` once one is flushed. Both get the batch's number, from 1 on.
struct Faulty<B, A> {
    /// Declared before `inner`, so that a hook that blocks in its drop delays the unmapping.
    before: B,
    after: A,
    inner: Box<dyn Transport>,
    submitted: usize,
    /// Batches not yet flushed, oldest first.
    in_flight: VecDeque<(usize, WriteBatch)>,
}

impl<B, A> Transport for Faulty<B, A>
where
    B: FnMut(usize, &mut WriteBatch, &mut Link) + Send,
    A: FnMut(usize, &WriteBatch) + Send,
{
    fn kind(&self) -> TransportKind {
        self.inner.kind()
    }
    fn depth(&self) -> usize {
        self.inner.depth()
    }
    fn submit(&mut self, mut load: Load, links: &mut Links) -> Result<(), TransferError> {
        self.submitted += 1;
        (self.before)(self.submitted, &mut load.batch, &mut links.own);
        self.in_flight.push_back((self.submitted, load.batch.clone()));
        self.inner.submit(load, links)
    }
    fn poll(&mut self, links: &mut Links) -> Result<Progress, TransferError> {
        let progress = self.inner.poll(links)?;
        if progress == Progress::Flushed
            && let Some((number, batch)) = self.in_flight.pop_front()
        {
            (self.after)(number, &batch);
        }
        Ok(progress)
    }
    fn digests(&self) -> bool {
        self.inner.digests()
    }
    fn take_digests(&mut self) -> Vec<(u32, u64)> {
        self.inner.take_digests()
    }
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.inner.fd()
    }
    fn cancel(&mut self, epoch: Epoch, links: &mut Links) -> Result<(), TransferError> {
        self.in_flight.retain(|(_, batch)| batch.epoch != epoch);
        self.inner.cancel(epoch, links)
    }
}

fn faulty<B, A>(before: B, after: A, inner: Box<dyn Transport>) -> Box<dyn Transport>
where
    B: FnMut(usize, &mut WriteBatch, &mut Link) + Send + 'static,
    A: FnMut(usize, &WriteBatch) + Send + 'static,
{
    Box::new(Faulty { before, after, inner, submitted: 0, in_flight: VecDeque::new() })
}

/// Runs a hook before each batch, on the session's thread, which it may hold up. `make` makes one hook for each transport.
pub(super) fn before_each<B>(make: impl Fn() -> B + Send + Sync + 'static) -> Wrap
where
    B: FnMut(usize, &mut WriteBatch, &mut Link) + Send + 'static,
{
    Arc::new(move |inner| faulty(make(), |_: usize, _: &WriteBatch| {}, inner))
}

/// Changes batches on their way.
pub(super) fn altered(alter: impl Fn(&mut WriteBatch) + Send + Sync + Copy + 'static) -> Wrap {
    before_each(move || move |_: usize, batch: &mut WriteBatch, _: &mut Link| alter(batch))
}

/// Runs a hook after each batch that was flushed, before the peer is told of it.
pub(super) fn after_each(after: impl Fn(usize, &WriteBatch) + Send + Sync + Clone + 'static) -> Wrap {
    Arc::new(move |inner| faulty(|_: usize, _: &mut WriteBatch, _: &mut Link| {}, after.clone(), inner))
}

/// Calls `at` with each batch's number before it goes.
pub(super) fn watched(at: impl Fn(usize) + Send + Sync + Clone + 'static) -> Wrap {
    before_each(move || {
        let at = at.clone();
        move |number: usize, _: &mut WriteBatch, _: &mut Link| at(number)
    })
}

/// A sender that stops at its `at`th batch: it tells so, and waits to be told to go on.
pub(super) fn held(at: usize) -> (Wrap, mpsc::Receiver<()>, mpsc::Sender<()>) {
    let (reached, is_reached) = mpsc::channel();
    let (go, may_go) = mpsc::channel();
    let may_go = Arc::new(std::sync::Mutex::new(may_go));
    let wrap = watched(move |batch| {
        if batch == at {
            reached.send(()).unwrap();
            may_go.lock().unwrap().recv_timeout(PATIENCE).unwrap();
        }
    });
    (wrap, is_reached, go)
}
