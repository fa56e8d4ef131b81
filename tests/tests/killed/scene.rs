//! A cluster whose prefill workers are struck: what it is asked, when the moment is, and what is counted.

use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use baton_cluster::Role;
use baton_proto::v1::{BlockCounts, GenerateRequest};
use baton_tests::cluster::client::{Answer, Client, apart, prompt, sampled};
use baton_tests::cluster::pool::Pool;
use baton_tests::cluster::{Cluster, ClusterOptions, HANG, Worker, models, status, wait};
use baton_tests::tiny::random_u64;
use baton_transfer::TransferLimits;
use baton_types::{PoolGeometry, testing};
use tempfile::TempDir;
use tokio::task::JoinHandle;

/// Requests at a time.
const AT_ONCE: usize = 3;
/// Different requests.
const REQUESTS: u64 = 4;
/// Few enough that what comes free is soon used again, and enough for the longest request while all the others' are kept aside:
/// a worker is left, so nothing may be refused.
const BLOCKS: u32 = 640;
/// Between two looks at the decode worker's blocks.
const LOOK: Duration = Duration::from_millis(10);

/// What must be as without the fault. How much of the prompt a second attempt found cached may differ.
type Told = (Vec<u32>, String);

/// A request's number and its end.
pub type Asked = Vec<(usize, JoinHandle<anyhow::Result<(Answer, Instant)>>)>;

/// How the rounds went.
#[derive(Debug, Default)]
pub struct Tally {
    /// Rounds in which a handoff was cut in the middle.
    pub cut: u64,
    right: u64,
    /// The longest time from a blow to the end of a request.
    ended: Duration,
    /// The longest time that blocks were quarantined after they could be had back.
    aside: Duration,
    /// The longest time from there until none was in use.
    free: Duration,
    /// Blocks that were used again while a worker stood still.
    pub reused: usize,
    /// Blocks, kept aside until then, that changed after it went on.
    pub late: usize,
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Tally { cut, right, ended, aside, free, reused, late } = self;
        write!(f, "{cut} rounds cut a handoff in the middle; {right} answers right, after at most {ended:?}; ")?;
        write!(f, "blocks quarantined for at most {aside:?}, all free after at most {free:?}; ")?;
        write!(f, "{reused} blocks reused meanwhile, {late} kept aside were written to late")
    }
}

pub struct Scene {
    pub cluster: Cluster,
    pub transport: &'static str,
    /// Whether the prefill worker itself writes into the decode worker's pool.
    pub one_sided: bool,
    pub pool: Pool,
    pub geometry: PoolGeometry,
    pub tally: Tally,
    decode: Worker,
    client: Client,
    requests: Vec<(GenerateRequest, Told)>,
    /// What several requests at once take when nothing goes wrong; until that is known, what nothing takes.
    span: Duration,
    random: Box<dyn Iterator<Item = u64>>,
    _model: TempDir,
    _alone: MutexGuard<'static, ()>,
}

impl Scene {
    /// One at a time: two cores are all there may be.
    pub fn new(transport: &'static str, env: Vec<(String, String)>) -> Scene {
        static ONE: Mutex<()> = Mutex::new(());
        let alone = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        let seed = testing::seed().unwrap_or(1);
        println!("over {transport}, seed {seed}");
        let model = models::slow().unwrap();
        let memory = format!("{}B", u64::from(BLOCKS) * models::block_bytes(model.path()).unwrap());
        let log = "info,baton_transfer=debug,baton_handoff=debug".to_owned();
        let args = vec!["--kv-memory".to_owned(), memory, "--log".to_owned(), log];
        let options = ClusterOptions { prefill: 2, transport, env, args, ..ClusterOptions::new(&model) };
        let cluster = Cluster::start(options).unwrap();
        let client = cluster.client().unwrap();
        let decode = cluster.wait_for_worker(Role::Decode, |_| true).unwrap();
        let geometry = models::pool_geometry(model.path(), decode.blocks().total).unwrap();
        let requests = (0..REQUESTS).map(|number| {
            let request = sampled(prompt(900 + 500 * number as usize, number), 16, number);
            let told = told(cluster.block_on(client.ask(apart(request.clone()))).unwrap());
            (request, told)
        });
        let requests = requests.collect();
        let (one_sided, random) = (transport != "tcp", Box::new(random_u64(seed, transport)));
        let (pool, tally, span) = (Pool::of(&decode).unwrap(), Tally::default(), HANG);
        let mut scene = Scene {
            cluster,
            transport,
            one_sided,
            pool,
            geometry,
            tally,
            decode,
            client,
            requests,
            span,
            random,
            _model: model,
            _alone: alone,
        };
        let start = Instant::now();
        let asked = scene.ask_some();
        scene.collect(asked, start);
        scene.span = start.elapsed();
        println!("several requests at once take {:?}", scene.span);
        scene.tally = Tally::default();
        scene
    }

    /// Within which a peer's end is noticed, and what it held given back (I5).
    fn noticed(&self) -> Duration {
        TransferLimits::default().silence + self.span
    }

    /// Within which every request ends, and every block is free: two workers may have to notice, one after the other, and then all is
    /// computed again by half as many, beside one that starts (I5).
    fn bound(&self) -> Duration {
        2 * TransferLimits::default().silence + 8 * self.span
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.random.next().unwrap() % limit.max(1)
    }

    /// Some requests at once, of which nothing is cached, so that all of it travels.
    pub fn ask_some(&mut self) -> Asked {
        let asked = (0..AT_ONCE).map(|_| {
            let number = self.below(REQUESTS) as usize;
            let (client, request, bound) = (self.client.clone(), apart(self.requests[number].0.clone()), self.bound());
            let ask = async move { Ok((tokio::time::timeout(bound, client.ask(request)).await??, Instant::now())) };
            (number, self.cluster.spawn(ask))
        });
        asked.collect()
    }

    /// Waits for the ends: the answer it always was, and nothing else while there is a worker to give it.
    pub fn collect(&mut self, asked: Asked, since: Instant) {
        for (number, answer) in asked {
            let ended = self.cluster.block_on(answer).unwrap();
            let (answer, at) = ended.expect("an answer within the bound"); // I5
            assert!(told(answer) == self.requests[number].1, "request {number} has another answer"); // I1
            self.tally.right += 1;
            self.tally.ended = self.tally.ended.max(at.saturating_duration_since(since));
        }
    }

    /// Waits for a random moment, and names a prefill worker that has something to do then; None: it is too late.
    pub fn moment(&mut self) -> Option<Worker> {
        wait(|| (self.blocks().lent > 0).then_some(())).unwrap();
        let after = self.below(self.span.as_micros() as u64);
        std::thread::sleep(Duration::from_micros(after));
        let mut busy = self.cluster.workers_of(Role::Prefill);
        busy.retain(|worker| worker.status.running > 0);
        let which = self.below(busy.len() as u64) as usize;
        (which < busy.len()).then(|| busy.swap_remove(which))
    }

    /// Of the handoffs from `victim` that ended too early since the log was so long: how many layers of blocks had arrived,
    /// and of how many. Only those of which something but not all had.
    pub fn cuts(&self, log: usize, victim: &Worker) -> Vec<(u64, u64)> {
        let log = &self.cluster.log()[log..];
        let peer = format!("peer={}", victim.member.id);
        let cut = log.lines().filter(|line| line.contains("handoff cut short") && line.contains(&peer));
        let number = |line: &str, name: &str| -> u64 {
            let (_, rest) = line.split_once(&format!(" {name}=")).unwrap();
            rest.split_whitespace().next().unwrap().parse().unwrap()
        };
        let cuts = cut.map(|line| (number(line, "arrived"), number(line, "of")));
        cuts.filter(|(arrived, of)| 0 < *arrived && arrived < of).collect()
    }

    fn blocks(&self) -> BlockCounts {
        self.cluster.block_on(status(&self.decode.member)).unwrap().blocks.unwrap()
    }

    /// Waits until no block is in use that is not kept aside; answers how many are.
    pub fn until_only_aside(&self) -> u32 {
        let aside = || {
            let blocks = self.blocks();
            (blocks.used + blocks.lent == 0).then_some(blocks.quarantined)
        };
        wait(aside).unwrap()
    }

    /// Notes when blocks are quarantined from now on.
    pub fn watch(&self) -> Watch {
        let member = self.decode.member.clone();
        Watch(self.cluster.spawn(async move {
            let mut last = None;
            loop {
                let blocks = status(&member).await.ok().and_then(|status| status.blocks).unwrap_or_default();
                if blocks.quarantined > 0 {
                    last = Some(Instant::now());
                }
                if blocks.total > 0 && blocks.free + blocks.cached == blocks.total {
                    return (last, Instant::now());
                }
                tokio::time::sleep(LOOK).await;
            }
        }))
    }

    /// Waits until no block is in use, by the worker's status and by its metrics.
    pub fn until_all_free(&mut self, since: Instant, watch: Watch) {
        let free = self.cluster.block_on(async { tokio::time::timeout(self.bound(), watch.0).await });
        let (aside, free) = free.expect("all blocks free within the bound").unwrap(); // I5, I6
        let after = |at: Instant| at.saturating_duration_since(since);
        let aside = aside.map_or(Duration::ZERO, after);
        assert!(aside <= self.noticed(), "blocks are kept aside for {aside:?}"); // I5
        self.tally.aside = self.tally.aside.max(aside);
        self.tally.free = self.tally.free.max(after(free));
        let metrics = self.decode.metrics().unwrap();
        for state in ["used", "lent", "quarantined"] {
            assert_eq!(metrics.sum("baton_kv_blocks", &format!("state=\"{state}\"")), 0.0, "{state}");
        }
    }

    /// Waits until whoever stands still since then has been silent for longer than a peer waits for it.
    pub fn outlast_silence(&self, since: Instant) {
        let over = since + TransferLimits::default().silence + Duration::from_millis(500);
        std::thread::sleep(over.saturating_duration_since(Instant::now()));
    }

    /// Nothing is in use, and nothing was logged as an error.
    pub fn end(self) {
        self.cluster.wait_idle().unwrap();
        drop(self.client);
        self.cluster.stop().unwrap();
    }
}

/// A look at the decode worker's blocks every now and then, until none is in use: when some were quarantined last, and when
/// that was.
pub struct Watch(JoinHandle<(Option<Instant>, Instant)>);

fn told(answer: Answer) -> Told {
    (answer.ids, answer.text)
}
