//! How fast the store is: host memory beside a plain copy of the same bytes, the disk beside fio on the same file system in the same run.
//!
//! ```text
//! cargo run --release -p baton-store --example throughput -- DIRECTORY
//! cargo run --release -p baton-store --example throughput -- DIRECTORY 400 15 8
//! ```
//!
//! The numbers are blocks written and read in a round, rounds, and threads of the store, which is also fio's depth. Each figure is the median of the
//! rounds, in which all take turns. Where other processes use the cores, the best rounds say more: a store computes digests, fio does not. Both write
//! where something was written before, as on a disk that is full: to new space, file systems are slower.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "an example")]

use std::collections::VecDeque;
use std::ops::{Deref, DerefMut};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use baton_kv_store::{BlockKey, BlockName, DiskConfig, Identity, Part, Shape, StoreConfig, Tier};
use baton_store::{Got, KvStore, Pending, Reading, Settings};
use baton_types::{Courtesy, KvDtype, KvGroup, KvLayout, PROTOCOL_VERSION};

const PATIENCE: Duration = Duration::from_secs(120);
/// Buffers of host memory while the disk is measured.
const BUFFERS: u32 = 64;
/// Blocks in the pool that is copied from and to: too many for the caches.
const POOL: usize = 256;
/// Blocks of a turn in host memory.
const TURN: usize = 16;

/// Llama-3.2-1B: 16 layers, 8 KV heads of 64 values in f16; 16 tokens are 512 KiB.
fn shape() -> Shape {
    let group = KvGroup { layers: (0..16).collect(), planes: 2, kv_heads: 8, head_dim: 64, window: None, sinks: 0 };
    let layout =
        KvLayout { version: PROTOCOL_VERSION, model: 1, dtype: KvDtype::F16, block_size: 16, groups: vec![group] };
    Shape::new(&layout).unwrap()
}

fn key(number: u64) -> BlockKey {
    let tokens: Vec<u32> = (0..16).map(|at| (number * 16 + at) as u32).collect();
    let root = BlockName::root("", 16);
    BlockKey { name: root.then(&tokens).name(), parent: root.name(), tokens: tokens.into(), groups: 1 }
}

/// Memory that begins at a page, as a pool does.
struct Pages(Vec<u8>, usize);

impl Pages {
    fn new(bytes: usize) -> Pages {
        let memory = vec![1; bytes + 4096];
        let skip = memory.as_ptr().align_offset(4096);
        Pages(memory, skip)
    }
}

impl Deref for Pages {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.0[self.1..self.0.len() - 4096 + self.1]
    }
}

impl DerefMut for Pages {
    fn deref_mut(&mut self) -> &mut [u8] {
        let end = self.0.len() - 4096 + self.1;
        &mut self.0[self.1..end]
    }
}

struct Bench {
    shape: Shape,
    /// A pool, `[layer][block]` as a worker's is.
    pool: Pages,
    directory: PathBuf,
    blocks: u64,
    threads: usize,
}

impl Bench {
    fn place(&self, number: u64, part: &Part) -> std::ops::Range<usize> {
        let at = (part.layer * POOL + number as usize % POOL) * part.range.len();
        at..at + part.range.len()
    }

    fn gigabytes(&self, begun: Instant, blocks: u64) -> f64 {
        (blocks * self.shape.data_bytes() as u64) as f64 / 1e9 / begun.elapsed().as_secs_f64()
    }

    fn put(&self, store: &KvStore, number: u64) {
        let key = key(number);
        let Ok(filling) = store.put(key) else { panic!("no buffer for block {number}") };
        filling.copy_from(|part| &self.pool[self.place(number, part)]);
    }

    /// Copies a block into a pool, verified.
    fn take(&self, mut reading: Reading, target: &mut [u8], number: u64) {
        let parts: Vec<Part> = self.shape.parts(1).collect();
        for (at, part) in parts.iter().enumerate() {
            reading.copy_part(at, &mut target[self.place(number, part)]).unwrap();
        }
    }

    /// Put, plain copy, get, plain copy back: GB/s. They take turns, a few blocks each.
    fn host(&self) -> [f64; 4] {
        let blocks = 2 * POOL as u64;
        let config = StoreConfig::new(self.shape.clone(), Identity::default(), blocks as u32, None);
        let store = KvStore::open(
            Settings {
                config,
                directory: PathBuf::new(),
                objects: None,
                threads: 0,
                courtesy: Courtesy::default(),
                about: None,
            },
            None,
        )
        .unwrap();
        let parts: Vec<Part> = self.shape.parts(1).collect();
        let (mut buffers, mut target) =
            (Pages::new(blocks as usize * self.shape.stride()), Pages::new(self.pool.len()));
        // Touches every page of the store once.
        (0..blocks).for_each(|number| self.put(&store, number));
        let mut spent = [Duration::ZERO; 4];
        for first in (blocks..2 * blocks).step_by(TURN) {
            let turn = first..first + TURN as u64;
            let buffer = |number: u64| (number - blocks) as usize * self.shape.stride();
            let begun = Instant::now();
            turn.clone().for_each(|number| self.put(&store, number));
            spent[0] += begun.elapsed();
            let begun = Instant::now();
            for (number, part) in turn.clone().flat_map(|number| parts.iter().map(move |part| (number, part))) {
                let to = buffer(number) + part.range.start;
                buffers[to..to + part.range.len()].copy_from_slice(&self.pool[self.place(number, part)]);
            }
            spent[1] += begun.elapsed();
        }
        for first in (blocks..2 * blocks).step_by(TURN) {
            let turn = first..first + TURN as u64;
            let buffer = |number: u64| (number - blocks) as usize * self.shape.stride();
            let begun = Instant::now();
            for number in turn.clone() {
                let Got::Ready(reading) = store.get(key(number)) else { panic!("block {number} is not there") };
                self.take(reading, &mut target, number);
            }
            spent[2] += begun.elapsed();
            let begun = Instant::now();
            for (number, part) in turn.clone().flat_map(|number| parts.iter().map(move |part| (number, part))) {
                let from = buffer(number) + part.range.start;
                target[self.place(number, part)].copy_from_slice(&buffers[from..from + part.range.len()]);
            }
            spent[3] += begun.elapsed();
        }
        spent.map(|spent| (blocks * self.shape.data_bytes() as u64) as f64 / 1e9 / spent.as_secs_f64())
    }

    fn open(&self) -> KvStore {
        let disk = DiskConfig::of_size(2 * self.blocks * self.shape.stride() as u64, &self.shape).unwrap();
        let mut config = StoreConfig::new(self.shape.clone(), Identity::default(), BUFFERS, Some(disk));
        config.limits.writes = 16;
        let (directory, threads) = (self.directory.clone(), self.threads);
        let settings =
            Settings { config, directory, objects: None, threads, courtesy: Courtesy::default(), about: None };
        KvStore::open(settings, None).unwrap()
    }

    /// Puts, until all is on disk: GB/s of data.
    fn write(&self, store: &KvStore, first: u64) -> f64 {
        let (begun, before) = (Instant::now(), store.counters().written_bytes[0]);
        for number in first..first + self.blocks {
            // No faster than the disk, or blocks would be dropped.
            while store.blocks(Tier::Host) + 8 > u64::from(BUFFERS) {
                std::thread::sleep(Duration::from_micros(20));
            }
            self.put(store, number);
        }
        assert!(store.flush(PATIENCE));
        assert_eq!(store.counters().overrun, 0, "blocks were dropped");
        self.gigabytes(begun, (store.counters().written_bytes[0] - before) / self.shape.stride() as u64)
    }

    /// Gets from disk, as a worker does that loads a long prefix: GB/s of data.
    fn read(&self, store: &KvStore, numbers: &[u64], target: &mut [u8]) -> f64 {
        let (begun, mut waiting, mut from_disk) = (Instant::now(), VecDeque::<(u64, Pending)>::new(), 0);
        let mut numbers = numbers.iter().copied();
        loop {
            while waiting.len() < 2 * self.threads {
                let Some(number) = numbers.next() else { break };
                match store.get(key(number)) {
                    Got::Pending(pending) => waiting.push_back((number, pending)),
                    Got::Ready(reading) => self.take(reading, target, number),
                    Got::Missed(why) => panic!("block {number} is {why}"),
                }
            }
            let Some((number, mut pending)) = waiting.pop_front() else { break };
            let reading = pending.wait(PATIENCE).unwrap().unwrap();
            from_disk += 1;
            self.take(reading, target, number);
        }
        self.gigabytes(begun, from_disk)
    }
}

/// GB/s of fio, with records of the same length, one after the other.
fn fio(bench: &Bench, engine: &str, rw: &str) -> Option<f64> {
    let (bytes, file) = (bench.shape.stride() as u64, bench.directory.join("fio"));
    let depth = match engine {
        "psync" => format!(
            "--numjobs={} --thread --offset_increment={}",
            bench.threads,
            bytes * bench.blocks / bench.threads as u64
        ),
        _ => format!("--iodepth={}", bench.threads),
    };
    let size = if engine == "psync" { bytes * (bench.blocks / bench.threads as u64) } else { bytes * bench.blocks };
    let output = Command::new("fio")
        .args(["--name=store", "--direct=1", "--group_reporting", "--output-format=json", "--fallocate=none"])
        .args([format!("--filename={}", file.display()), format!("--bs={bytes}"), format!("--size={size}")])
        .args([format!("--ioengine={engine}"), format!("--rw={rw}")])
        .args(depth.split(' '))
        .output()
        .ok()?;
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).ok()?;
    Some(report["jobs"][0][rw]["bw_bytes"].as_f64()? / 1e9)
}

/// What is measured where there is no fio: one thread that reads or writes the same file.
fn plain(bench: &Bench, rw: &str) -> f64 {
    use std::os::unix::fs::FileExt;
    let path = bench.directory.join("fio");
    let file = std::fs::OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).unwrap();
    let (begun, mut record) = (Instant::now(), vec![7; bench.shape.stride()]);
    let length = record.len() as u64;
    for at in (0..bench.blocks).map(|number| number * length) {
        match rw {
            "write" => file.write_all_at(&record, at).unwrap(),
            _ => file.read_exact_at(&mut record, at).unwrap(),
        }
    }
    file.sync_data().unwrap();
    (bench.blocks * record.len() as u64) as f64 / 1e9 / begun.elapsed().as_secs_f64()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn most(values: Vec<f64>) -> f64 {
    values.into_iter().fold(0.0, f64::max)
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let directory = Path::new(&arguments.next().expect("a directory")).join("baton-throughput");
    let mut number = |otherwise: u64| arguments.next().map_or(otherwise, |text| text.parse().unwrap());
    let (blocks, rounds, threads) = (number(400), number(15), number(8) as usize);
    let shape = shape();
    let mut pool = Pages::new(POOL * shape.data_bytes());
    pool.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at.wrapping_mul(0x9e37_79b9) >> 13) as u8);
    std::fs::create_dir_all(&directory).unwrap();
    let bench = Bench { shape, pool, directory, blocks, threads };
    println!("blocks of {} KiB, {blocks} a round, {rounds} rounds, {threads} threads", bench.shape.data_bytes() >> 10);

    let host: Vec<[f64; 4]> = (0..rounds).map(|_| bench.host()).collect();
    let [put, copied, got, copied_back] = [0, 1, 2, 3].map(|at| median(host.iter().map(|round| round[at]).collect()));
    println!("host put {put:6.2} GB/s, plain copy {copied:6.2}: {:.2}", put / copied);
    println!("host get {got:6.2} GB/s, plain copy {copied_back:6.2}: {:.2}", got / copied_back);

    let mut target = Pages::new(bench.pool.len());
    let mut columns: Vec<(String, Vec<f64>)> = Vec::new();
    let mut note = |name: String, value: f64| match columns.iter_mut().find(|(known, _)| *known == name) {
        Some((_, values)) => values.push(value),
        None => columns.push((name, vec![value])),
    };
    // The files are there, and the store is full.
    let _ = fio(&bench, "libaio", "write");
    let store = bench.open();
    assert!(store.settled(PATIENCE));
    for part in 1..3 {
        let _ = bench.write(&store, (1 << 27) + part * blocks);
    }
    drop(store);
    for round in 0..rounds {
        for rw in ["write", "read"] {
            for engine in ["libaio", "psync", "io_uring"] {
                if let Some(speed) = fio(&bench, engine, rw) {
                    note(format!("disk {rw} fio {engine}"), speed);
                }
            }
        }
        if fio(&bench, "libaio", "read").is_none() {
            ["write", "read"].into_iter().for_each(|rw| note(format!("disk {rw} plain, buffered"), plain(&bench, rw)));
        }
        let store = bench.open();
        assert!(store.settled(PATIENCE));
        // Touches every page of its memory once.
        (0..u64::from(BUFFERS)).for_each(|at| bench.put(&store, (1 << 26) + round * u64::from(BUFFERS) + at));
        assert!(store.flush(PATIENCE));
        note("disk write store".to_owned(), bench.write(&store, round * blocks));
        drop(store);
        let begun = Instant::now();
        let store = bench.open();
        assert!(store.settled(PATIENCE));
        note(
            "recovered records a second".to_owned(),
            store.counters().recovered as f64 / begun.elapsed().as_secs_f64(),
        );
        let numbers = round * blocks..(round + 1) * blocks;
        let there: Vec<u64> = numbers.filter(|number| !store.held(&[key(*number).name]).is_empty()).collect();
        note("disk read store".to_owned(), bench.read(&store, &there, &mut target));
    }
    columns.sort_by(|a, b| a.0.cmp(&b.0));
    for (name, values) in &columns {
        let shown: Vec<String> = values.iter().map(|value| format!("{value:.2}")).collect();
        println!("{name:<28} {:8.2} {:8.2}  ({})", median(values.clone()), most(values.clone()), shown.join(" "));
    }
    let of = |name: &str, pick: fn(Vec<f64>) -> f64| {
        columns.iter().find(|(known, _)| known == name).map(|(_, values)| pick(values.clone()))
    };
    for rw in ["write", "read"] {
        let best = |pick: fn(Vec<f64>) -> f64| {
            let fio = ["libaio", "psync", "io_uring"].map(|engine| of(&format!("disk {rw} fio {engine}"), pick));
            Some(of(&format!("disk {rw} store"), pick)? / fio.into_iter().flatten().reduce(f64::max)?)
        };
        if let (Some(medians), Some(bests)) = (best(median), best(most)) {
            println!("disk {rw}: {medians:.2} of the best fio by medians, {bests:.2} by the best round of each");
        }
    }
    std::fs::remove_dir_all(&bench.directory).unwrap();
}
