//! The shell around the tiers below the pool (`baton_roles::tiers`): the worker's own store in host memory, on disk and in an object store, and the threads that copy
//! blocks between it and the pool. Nobody uses a block before all of its prefix is there; but a step may use a layer before the next ones are (I2).

mod copier;
mod courtesy;
mod expected;
mod layered;
mod loading;
pub(crate) mod memory;
mod pace;
mod pins;
mod threads;
mod warm;

use std::cell::Cell;
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use baton_engine::{BlockName, Eviction, Exchange as Prefix, NewSequence, Prefix as CacheKey};
use baton_kv_store::{Counters, DiskConfig, Identity, ObjectConfig, Reason, Shape, StoreConfig, Tier, object_bytes};
use baton_proto::v1;
use baton_roles::tiers::{Command, Effect, Move, first_lacking, usable};
use baton_runtime::metrics as names;
use baton_store::{About, KvStore, Objects, Settings};
use baton_types::{KvLayout, RequestId, SeqId, Time};
use expected::Expected;
pub(crate) use loading::Loading;
use metrics::{counter, gauge};
use pace::Paces;
use pins::Pins;
use threads::{Lane, Load, Parts};

use crate::error::{WorkerError, check};
use crate::news::WorkerNews;
use crate::{Clock, Commands, Node, TiersConfig, WorkerConfig, stored};

/// Fewest tokens that are loaded: less is computed about as soon.
const LEAST: u32 = 64;
/// Threads for the disk.
const DISK_THREADS: usize = 8;
/// A load may take so many times longer than predicted, and so long at least: a prompt waits for it.
const PATIENCE: f64 = 4.0;
const LEAST_PATIENCE: Duration = Duration::from_millis(500);
/// How long a worker that ends goes on writing to its disk and its object store.
const FLUSH: Duration = Duration::from_secs(5);
/// Metrics are updated so often, and the store is told the time.
const COUNT_EVERY: Duration = Duration::from_millis(200);
/// Revision of whatever changes a bit of K or V (I1). KV of another revision is not read.
const NUMERICS: u64 = 3;

/// The store of one worker, and what moves between it and the pool.
pub(crate) struct TiersShell {
    store: Arc<KvStore>,
    clock: Clock,
    /// Bytes of a block in the store.
    block_bytes: usize,
    layout: KvLayout,
    pace: Arc<Paces>,
    /// How long it takes to load what is asked for.
    expected: Arc<Expected>,
    /// The load that was asked for last.
    asked: Cell<Option<Asked>>,
    /// What is wholly in host memory, and the rest.
    loads: [Lane; 2],
    warms: mpsc::SyncSender<warm::Wanted>,
    saves: mpsc::Sender<Box<Move>>,
    /// Loads under way.
    loading: HashMap<SeqId, Arc<Loading>>,
    /// Saves under way of what is to be kept.
    keeping: HashMap<SeqId, Prefix>,
    /// None: nothing is kept.
    pins: Option<Pins>,
    /// When the metrics were updated.
    counted: Instant,
    /// Blocks that were not in a device's memory as they were stored.
    garbled: Arc<AtomicU64>,
}

/// A load that was asked for.
struct Asked {
    request_id: RequestId,
    /// How long it takes once it has begun.
    seconds: f64,
    /// All of it is in host memory.
    near: bool,
}

/// Checks the settings and opens the store; `None`: there is none.
pub(crate) fn open(node: &Node, backend: &str) -> Result<Option<Arc<KvStore>>, WorkerError> {
    let TiersConfig { kv_host, kv_disk, kv_disk_size, kv_object, kv_object_size, kv_min_uses, .. } = &node.config.tiers;
    if !node.config.keeps_kv() {
        return Ok(None);
    }
    let shape = Shape::new(&node.geometry.layout).map_err(store_error)?;
    let below = kv_disk.is_some() || kv_object.is_some();
    let least = if below { 8 * shape.stride() } else { shape.stride() } as u64;
    let must =
        format!("at least {least} bytes for blocks of this model; kv_disk and kv_object need some host memory, too");
    check(kv_host.0 >= least, "kv_host", kv_host, must)?;
    let min_uses = u8::try_from(*kv_min_uses).unwrap_or(0);
    check(min_uses >= 1, "kv_min_uses", *kv_min_uses, "1 to 255")?;
    let slots = u32::try_from(kv_host.0 / shape.stride() as u64).unwrap_or(u32::MAX);
    let disk = kv_disk.as_ref().map(|_| DiskConfig::of_size(kv_disk_size.0, &shape));
    let object = kv_object.as_ref().map(|_| ObjectConfig::of_size(kv_object_size.0, &shape));
    let config = StoreConfig {
        object: object.transpose().map_err(store_error)?,
        min_uses,
        ..StoreConfig::new(shape, identity(node, backend), slots, disk.transpose().map_err(store_error)?)
    };
    let about = About {
        model: node.config.model.to_string(),
        backend: backend.to_owned(),
        tp: node.config.kv.tp,
        layout: node.geometry.layout.clone(),
    };
    let directory = kv_disk.clone().unwrap_or_else(PathBuf::new);
    let objects = kv_object.as_deref().map(Objects::open).transpose()?;
    let courtesy = node.courtesy.clone();
    let settings = Settings { config, directory, objects, threads: DISK_THREADS, courtesy, about: Some(about) };
    Ok(Some(Arc::new(KvStore::open(settings, None)?)))
}

/// Writes what is in host memory only, as far as there is time, before the process ends. The next one finds it.
pub(crate) async fn flush(store: Arc<KvStore>) {
    // It waits for the disk.
    let flushed = tokio::task::spawn_blocking(move || store.flush(FLUSH)).await;
    if !flushed.unwrap_or(false) {
        tracing::warn!(
            "not all KV in host memory could be written to disk or uploaded within {FLUSH:?}; it is computed again"
        );
    }
}

/// What the tiers of a store hold, for the worker's status.
pub(crate) fn told(store: &KvStore) -> Vec<v1::KvTier> {
    let (counters, limits, shape) = (store.counters(), store.limit_bytes(), store.shape());
    let of = |(at, tier): (usize, Tier)| {
        let blocks = store.blocks(tier);
        let each = if tier == Tier::Object { object_bytes(shape) } else { shape.stride() as u64 };
        let there = v1::KvTier {
            tier: tier.as_str().to_owned(),
            blocks,
            bytes: blocks * each,
            limit_bytes: limits[at],
            hit_tokens: Some(counters.hit_tokens[at]),
            verify_failures: counters.verify_failures[at],
            written_bytes: written(&counters, tier),
        };
        // A tier that the worker does not have is not told of.
        (limits[at] > 0).then_some(there)
    };
    Tier::ALL.into_iter().enumerate().filter_map(of).collect()
}

/// The lowest of the tiers that there are.
fn lowest(limits: [u64; Tier::ALL.len()]) -> Tier {
    Tier::ALL.into_iter().rev().find(|tier| limits[*tier as usize] > 0).unwrap_or(Tier::Host)
}

/// Bytes written to a tier, of those that outlive the worker.
fn written(counters: &Counters, tier: Tier) -> u64 {
    match tier {
        Tier::Host => 0,
        Tier::Disk => counters.written_bytes.iter().sum(),
        Tier::Object => counters.uploaded_bytes,
    }
}

fn store_error(error: baton_kv_store::StoreError) -> WorkerError {
    WorkerError::from(baton_store::OpenError::from(error))
}

/// Whose KV this is.
fn identity(node: &Node, backend: &str) -> Identity {
    Identity { layout: node.geometry.layout.fingerprint(), numerics: numerics(&node.config, backend) }
}

/// Whatever changes a bit of KV beside its layout, which has the model and its weights. All CPUs compute the same bits; GPUs of the same name do.
pub(crate) fn numerics(config: &WorkerConfig, backend: &str) -> u64 {
    let kind = if backend.contains("cuda") { backend } else { "cpu" };
    BlockName::root(&format!("{NUMERICS} {kind} {} {:?}", config.kv.tp, config.kv.quantization), 0).name().short()
}

impl TiersShell {
    /// Starts the threads that copy. They end with the shell. `by_layer`: a step can begin before all of its prefix is copied.
    pub fn start<C: Send + 'static>(
        store: Arc<KvStore>,
        node: &Node,
        commands: Commands<C>,
        news: &Arc<WorkerNews>,
        by_layer: bool,
    ) -> Result<TiersShell, WorkerError> {
        stored::follow(&store, news)?;
        let slots = node.config.tiers.kv_host.0 / store.shape().stride() as u64;
        let layout = node.geometry.layout.clone();
        let garbled = Arc::<AtomicU64>::default();
        let pace = Arc::new(Paces::new());
        let parts = Parts { store: &store, node, slots: slots as usize, by_layer, garbled: &garbled, pace: &pace };
        let loads = threads::start_loads(&parts, &commands)?;
        let saves = threads::start_saves(&parts, commands)?;
        let expected = Arc::new(Expected::new(Arc::clone(&pace), lowest(store.limit_bytes())));
        let warms = warm::start(Arc::clone(&store), layout.groups.len(), slots as usize / 8)?;
        let block_bytes = store.shape().data_bytes();
        // A quarter of the slots is left for what comes and goes.
        let most = (slots * u64::from(node.config.max_kept_percent) / 100).min(slots - slots / 4);
        let pins = (node.config.eviction.0 == Eviction::Priority).then(|| Pins::new(most as usize));
        let (clock, counted) = (node.clock, Instant::now());
        let (loading, keeping) = (HashMap::new(), HashMap::new());
        Ok(TiersShell {
            store,
            clock,
            block_bytes,
            layout,
            pace,
            expected,
            asked: Cell::default(),
            loads,
            warms,
            saves,
            loading,
            keeping,
            pins,
            counted,
            garbled,
        })
    }

    /// Tells how many seconds a token takes to load: as what was asked for lately.
    pub fn load_seconds(&self) -> impl Fn() -> f64 + Send + Sync + use<> {
        let expected = Arc::clone(&self.expected);
        let token_bytes = self.block_bytes as f64 / f64::from(self.layout.block_size);
        move || expected.nanos() * token_bytes / 1e9
    }

    /// What to load for a prompt that comes next.
    pub fn sees(&self, new: &NewSequence) -> Option<Command> {
        let prefix = new.prefix.filter(|_| new.params.prompt_logprobs.is_none())?;
        self.load(&new.request_id, prefix, &new.tokens, true)
    }

    /// What to load of a prefix that is to be served to another worker next, or that a prompt may need soon.
    pub fn sees_prefix(&self, wanted: &Prefix) -> Option<Command> {
        self.load(&wanted.request_id, wanted.prefix, &wanted.tokens, true)
    }

    /// `new`: the store is told that this is asked for, once for each request.
    fn load(&self, request_id: &RequestId, prefix: CacheKey, tokens: &[u32], new: bool) -> Option<Command> {
        let size = self.store.shape().block_size();
        let names: Vec<BlockName> = prefix.root.chain(tokens, size).collect();
        let held = self.store.held_groups(&names);
        if new {
            self.store.seen(names);
        }
        let most = held.len().min(tokens.len().saturating_sub(1) / size as usize);
        let blocks = usable(&self.layout, &groups(&held[..most]));
        if (blocks as u32) * size < LEAST {
            return None;
        }
        let tiers = || held.iter().take(blocks).map(|(tier, _)| *tier);
        self.expected.found(tiers());
        let of_bytes = |nanos: f64| nanos * self.block_bytes as f64 / 1e9;
        let seconds = of_bytes(tiers().map(|tier| self.pace.of(tier)).sum());
        let usual = of_bytes(tiers().map(|tier| self.pace.usual(tier)).sum());
        let near = tiers().all(|tier| tier == Tier::Host);
        // Those under way go before it, several at a time.
        let others = self.loading.values().filter(|other| other.near == near);
        let before = others.map(|other| other.seconds).sum::<f64>() / self.loads[usize::from(!near)].threads as f64;
        let most = (usual + before) * PATIENCE;
        let patience = Duration::try_from_secs_f64(most).unwrap_or(Duration::MAX).max(LEAST_PATIENCE);
        self.asked.set(Some(Asked { request_id: request_id.clone(), seconds: usual, near }));
        let tokens = tokens[..blocks * size as usize + 1].to_vec();
        let deadline = self.clock.now().after_ms(patience.as_millis() as u64);
        let prefix = Prefix { request_id: request_id.clone(), tokens, prefix, deadline };
        Some(Command::Load { prefix: Box::new(prefix), seconds })
    }

    /// Carries out an effect of the core; returns its answer, if it has one.
    pub fn perform(&mut self, effect: Effect) -> Option<Command> {
        match effect {
            Effect::Offer(prefix) => return self.lacks(&prefix).map(|first| Command::Save(prefix, first)),
            // It was seen when it came.
            Effect::Returns(wanted) => return self.load(&wanted.request_id, wanted.prefix, &wanted.tokens, false),
            Effect::Warm(prefix, here) => drop(self.warms.try_send((prefix, here))),
            Effect::Load(what) => {
                let asked = self.asked.take().filter(|asked| asked.request_id == what.prefix.request_id);
                let (seconds, near) = asked.map_or((0.0, false), |asked| (asked.seconds, asked.near));
                let (seq, loading) = (what.seq, Arc::new(Loading::of(seconds, near)));
                self.loading.insert(seq, Arc::clone(&loading));
                let begun = self.loads[usize::from(!near)].load(Load { what, loading, asked: Instant::now() });
                return (!begun).then_some(Command::Loaded(seq, None));
            }
            Effect::Save(what) => {
                let seq = what.seq;
                let kept = self.is_kept(&what.prefix).map(|_| what.prefix.clone());
                if self.saves.send(what).is_err() {
                    return Some(Command::Saved(seq, None));
                }
                self.keeping.extend(kept.map(|kept| (seq, kept)));
            }
            Effect::Abort(seq) => {
                self.loading.get(&seq).into_iter().for_each(|loading| loading.give_up());
            }
            Effect::Loaded { tokens, streamed } => {
                counter!(names::LOADED_TOKENS).increment(tokens.into());
                counter!(names::STREAMED_TOKENS).increment(if streamed { tokens.into() } else { 0 });
            }
        }
        None
    }

    /// A load whose layers a step waits for.
    pub fn loading(&self, seq: SeqId) -> Option<Arc<Loading>> {
        self.loading.get(&seq).cloned()
    }

    /// A load has ended.
    pub fn loaded(&mut self, seq: SeqId) {
        self.loading.remove(&seq);
    }

    /// A save has ended.
    pub fn saved(&mut self, seq: SeqId) {
        if let Some(kept) = self.keeping.remove(&seq) {
            // Only what the store took as a whole.
            let _ = self.lacks(&kept);
        }
    }

    /// Until when a prefix is to be kept, if that is asked for and may be.
    fn is_kept(&self, prefix: &Prefix) -> Option<Time> {
        let CacheKey { keep, keep_until, .. } = prefix.prefix;
        keep_until.filter(|until| self.pins.is_some() && keep > 0 && *until > self.clock.now())
    }

    /// The names of a prefix's blocks.
    fn names(&self, prefix: &Prefix) -> Vec<BlockName> {
        let size = self.store.shape().block_size();
        prefix.prefix.root.chain(&prefix.tokens[..prefix.moves(size) as usize], size).collect()
    }

    /// Which blocks of a prefix the store lacks: those after what it holds from the beginning on. What is to be kept and lacks none is kept.
    fn lacks(&mut self, prefix: &Prefix) -> Option<u32> {
        let names = self.names(prefix);
        let held = self.store.held_groups(&names);
        let first = first_lacking(&self.layout, names.len(), &groups(&held));
        let until = self.is_kept(prefix).filter(|_| first.is_none());
        if let (Some(pins), Some(until)) = (&mut self.pins, until) {
            pins.keep(&self.store, &names, until);
        }
        first
    }

    /// Updates the metrics of what the store counts by itself, every now and then.
    pub fn count(&mut self) {
        if self.counted.elapsed() < COUNT_EVERY {
            return;
        }
        self.counted = Instant::now();
        self.store.tick();
        let now = self.clock.now();
        self.pins.iter_mut().for_each(|pins| pins.expire(&self.store, now));
        let counters = self.store.counters();
        for (at, tier) in Tier::ALL.into_iter().enumerate() {
            let name = tier.as_str();
            gauge!(names::TIER_BLOCKS, "tier" => name).set(self.store.blocks(tier) as f64);
            counter!(names::TIER_HIT_TOKENS, "tier" => name).absolute(counters.hit_tokens[at]);
            counter!(names::TIER_READ_BYTES, "tier" => name).absolute(counters.hit_bytes[at]);
            counter!(names::TIER_VERIFY_FAILURES, "tier" => name).absolute(counters.verify_failures[at]);
            counter!(names::TIER_WRITTEN_BYTES, "tier" => name).absolute(written(&counters, tier));
        }
        let garbled = self.garbled.load(Ordering::Relaxed);
        if garbled > 0 {
            counter!(names::TIER_VERIFY_FAILURES, "tier" => "device").absolute(garbled);
        }
        counter!(names::TIER_MOVED_BYTES).absolute(counters.written_bytes[Reason::Moved as usize]);
        counter!(names::TIER_DISK_ERRORS).absolute(counters.disk_errors);
        counter!(names::TIER_OBJECT_ERRORS).absolute(counters.object_errors);
    }
}

/// The layer groups of each block that is held.
fn groups(held: &[(Tier, u32)]) -> Vec<u32> {
    held.iter().map(|(_, groups)| *groups).collect()
}

#[cfg(test)]
mod tests;
