//! Two hundred requests over a network that is slow, far, lossy, and gone for five seconds.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use baton_tests::cluster::client::{Client, apart, greedy, prompt};
use baton_tests::cluster::{HANG, connect, models, wait_all_free};
use baton_tests::local::{Local, Options};
use baton_transfer::TransferLimits;
use baton_types::SamplingParams;
use tonic::Code;

use crate::hosts::{REGISTRY, ROUTER, address, three_hosts};
use crate::wire::{Quality, Wire};

const REQUESTS: u64 = 200;
const CLIENTS: usize = 8;
/// How many are answered when the wire is cut.
const CUT_AFTER: u64 = 60;
const CUT: Duration = Duration::from_secs(5);
const TOKENS: u32 = 12;

fn tokens_of(number: u64) -> Vec<u32> {
    prompt(16 + (number as usize * 37) % 240, number)
}

/// How often a client that was refused asks again, and how long it waits before that.
const TRIES: u32 = 30;
const PAUSE: Duration = Duration::from_secs(1);

/// What a request may be refused with: another time, it may be answered.
const LATER: [Code; 3] = [Code::Unavailable, Code::ResourceExhausted, Code::DeadlineExceeded];

/// How the requests ended: right answers, by code how often one was refused, and the longest time to either.
#[derive(Debug, Default)]
struct Ends {
    right: u64,
    refused: BTreeMap<String, u64>,
    slowest: Duration,
}

/// Asks for one after the other until all were answered.
async fn ask(client: Client, next: &AtomicU64, want: &[Vec<u32>], ends: &Mutex<Ends>) -> anyhow::Result<()> {
    loop {
        let number = next.fetch_add(1, Ordering::Relaxed);
        let Some(want) = want.get(number as usize) else { return Ok(()) };
        let mut tries = 0;
        while !answered(&client, number, want, ends).await? {
            tries += 1;
            ensure!(tries < TRIES, "request {number} is refused again and again");
            tokio::time::sleep(PAUSE).await;
        }
    }
}

/// Within which a request ends (I5): it may begin as the wire is cut, and whoever asks for it or moves its KV notices the silence of a
/// peer, of the next one that is tried, and of both again as frames go on being lost.
fn bound() -> Duration {
    CUT + 5 * TransferLimits::default().silence
}

/// Whether a request was answered rather than refused.
async fn answered(client: &Client, number: u64, want: &[u32], ends: &Mutex<Ends>) -> anyhow::Result<bool> {
    let request = apart(greedy(tokens_of(number), TOKENS));
    let start = Instant::now();
    let outcome = tokio::time::timeout(bound(), client.ask(request)).await;
    let outcome = outcome.with_context(|| format!("request {number} neither answered nor refused"))?;
    let mut ends = ends.lock().unwrap();
    ends.slowest = ends.slowest.max(start.elapsed());
    match outcome {
        Ok(answer) => {
            ensure!(answer.ids == want, "request {number}: {:?}, alone {want:?}", answer.ids); // I1
            ends.right += 1;
            Ok(true)
        }
        // The error says what happened; a stream that breaks off without a word does not, nor does a defect.
        Err(error) => match error.downcast_ref::<tonic::Status>() {
            Some(status) if LATER.contains(&status.code()) => {
                *ends.refused.entry(format!("{:?}", status.code())).or_default() += 1;
                Ok(false)
            }
            _ => Err(error.context(format!("request {number} is refused"))),
        },
    }
}

/// Cuts the wire once so many were answered, and mends it.
async fn cut(wire: &Wire, ends: &Mutex<Ends>) {
    while ends.lock().unwrap().right < CUT_AFTER {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    wire.cut(true);
    tokio::time::sleep(CUT).await;
    wire.cut(false);
}

#[test]
fn over_a_bad_network_answers_are_right_or_refused_and_every_block_comes_back() {
    let _alone = crate::alone();
    let model = models::tiny().unwrap();
    let quality = Quality { delay: Duration::from_millis(20), bytes_per_second: 4 << 20, lost: 10, seed: 7 };
    let Some(hosts) = three_hosts(model.path(), Some(quality)) else { return };
    let params = SamplingParams { temperature: 0.0, max_tokens: TOKENS, ..SamplingParams::default() };
    let mut local = Local::open(model.path(), Options::default()).unwrap();
    let mut alone =
        |number| local.one(&tokens_of(number), &params).unwrap().into_iter().map(|token| token.id).collect();
    let want: Vec<Vec<u32>> = (0..REQUESTS).map(&mut alone).collect();
    let wire = hosts.wire.as_ref().unwrap();
    let ends = Mutex::new(Ends::default());
    let work = || {
        crate::runtime()?.block_on(async {
            let client = Client::connect(address(ROUTER, 8001)).await?;
            let next = AtomicU64::new(0);
            let asking = (0..CLIENTS).map(|_| ask(client.clone(), &next, &want, &ends));
            let (asked, ()) = tokio::join!(futures::future::try_join_all(asking), cut(wire, &ends));
            asked?;
            // Both workers are back, and hold nothing: not even what was on its way when the wire was cut (I3, I6).
            let mut views = connect(REGISTRY).await?.watch();
            tokio::time::timeout(HANG, views.wait_for(|view| view.members.len() == 2)).await??;
            wait_all_free(REGISTRY).await
        })
    };
    hosts.visit(work).unwrap();
    let (ends, (carried, lost)) = (ends.lock().unwrap(), wire.carried());
    println!("{ends:?}; {carried} frames carried, {lost} lost");
    assert_eq!(ends.right, REQUESTS);
    assert!(lost > carried / 200, "the network was not that bad");
    drop(ends);
    hosts.stop().unwrap();
}
