use std::time::Duration;

use baton_handoff::testing::core;
use baton_handoff::{Done, Quiet, TransferLimits};
use baton_types::Epoch;

use super::super::session::outbound;
use super::super::session::tests::plan;
use super::*;

const PATIENCE: Duration = Duration::from_secs(20);

fn completion() -> (Done, mpsc::Receiver<TransferError>) {
    let (tell, told) = mpsc::channel();
    (Done::new(Box::new(move |outcome| drop(outcome.map_err(|error| tell.send(error))))), told)
}

fn is_late(error: &TransferError) -> bool {
    matches!(error, TransferError::Deadline { doing: "waiting for a session with it", .. })
}

#[test]
fn who_waits_for_the_last_session_to_end_is_late_and_given_up_in_time() {
    let (plan, queue) = (plan(), Arc::new(Queue::new(TransferLimits::default()).unwrap()));
    let (release, held) = mpsc::channel::<()>();
    let before = Arc::new(Thread::new(std::thread::spawn(move || held.recv().unwrap_or_default())));
    let (soon, far) = (Instant::now() + Duration::from_millis(50), Instant::now() + 10 * PATIENCE);
    let cores = [(1, soon), (2, soon), (3, far), (4, far)].map(|(epoch, deadline)| core(Epoch(epoch), deadline));
    cores.iter().for_each(|core| queue.begin(core.clone()).unwrap());
    let (done, told) = completion();
    queue.complete(Epoch(1), Vec::new(), done);
    let dialling = {
        let (plan, queue) = (plan.clone(), queue.clone());
        std::thread::spawn(move || dial(&plan, Some(before), &queue, &mut outbound(&plan)).map(drop))
    };

    assert!(is_late(&told.recv_timeout(PATIENCE).unwrap()), "completed, and late");
    let (done, told) = completion();
    queue.complete(Epoch(2), Vec::new(), done);
    assert!(is_late(&told.recv_timeout(PATIENCE).unwrap()), "late, and then completed");
    let (tell, told) = mpsc::channel();
    queue.abort(Epoch(3), Quiet(Some(Box::new(move || tell.send(()).unwrap_or_default()))));
    told.recv_timeout(PATIENCE).expect("nothing reads its blocks");
    assert!(cores[3].failure().is_none(), "it has time");

    assert!(!dialling.is_finished());
    drop(release);
    let error = dialling.join().unwrap().unwrap_err();
    assert!(matches!(error, TransferError::Connect { .. }), "nobody is at its port: {error}");
    assert!(!queue.with(|line| line.idle()), "the last one is still asked for");
}

#[test]
fn a_sender_that_ends_does_not_wait_for_who_does_not_answer() {
    // The system accepts the connection, but nobody serves it.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut target = plan().target.clone();
    target.port = silent.local_addr().unwrap().port();
    let plan = Arc::new(Plan { config: plan().config.clone(), target });
    let queue = Arc::new(Queue::new(TransferLimits::default()).unwrap());
    let begun = Instant::now();
    let dialling = {
        let (plan, queue) = (plan.clone(), queue.clone());
        std::thread::spawn(move || dial(&plan, None, &queue, &mut outbound(&plan)).map(drop))
    };
    let core = core(Epoch(1), begun + Duration::from_millis(50));
    queue.begin(core.clone()).unwrap();
    while core.failure().is_none() {
        assert!(begun.elapsed() < PATIENCE);
        std::thread::yield_now();
    }
    queue.stop();
    assert_eq!(dialling.join().unwrap(), Err(TransferError::Closed));
}

/// I3: whoever takes this session for over must be able to take the one before for over, too.
#[test]
fn a_session_that_panics_ends_after_the_one_before() {
    let (plan, queue) = (plan(), Arc::new(Queue::new(TransferLimits::default()).unwrap()));
    let (release, held) = mpsc::channel::<()>();
    let before = Arc::new(Thread::new(std::thread::spawn(move || held.recv().unwrap_or_default())));
    queue.begin(core(Epoch(1), Instant::now() + Duration::from_millis(20))).unwrap();
    let (tell, told) = mpsc::channel();
    let defect = move |_| {
        tell.send(()).unwrap();
        panic!("a defect in a handoff's owner");
    };
    queue.complete(Epoch(1), Vec::new(), Done::new(Box::new(defect)));
    let dialling = {
        let (plan, queue) = (plan.clone(), queue.clone());
        std::thread::spawn(move || dial(&plan, Some(before), &queue, &mut outbound(&plan)).map(drop))
    };
    told.recv_timeout(PATIENCE).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    assert!(!dialling.is_finished());
    drop(release);
    assert!(dialling.join().is_err());
}
