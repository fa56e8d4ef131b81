//! Models from a hub: over real sockets, with the faults that networks have.
#![allow(clippy::unwrap_used)] // A panic is how a test fails.

mod support;

use std::io::Read;
use std::net::TcpListener;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::Duration;

use baton_model_files::fetch::{HubOptions, NoProgress, Progress, Source, find, list, resolve_with};
use baton_model_files::{Model, ModelFileError};
use baton_model_text::fetch as text;
use baton_types::{BatonError, ErrorKind};
use sha2::{Digest, Sha256};
use support::hub::{COMMIT, Fault, Hub};
use support::{gguf, noise, safetensors};
use tempfile::TempDir;

struct Case {
    hub: Hub,
    cache: TempDir,
    options: HubOptions,
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

impl Case {
    fn new() -> Case {
        let hub = Hub::start();
        let options = HubOptions { endpoint: Some(hub.endpoint()), ..HubOptions::default() };
        Case { hub, cache: tempfile::tempdir().unwrap(), options }
    }

    /// A repository with one large GGUF-named file of noise.
    fn with_file(size: usize) -> (Case, Vec<u8>) {
        let case = Case::new();
        let bytes = noise("model", size);
        case.hub.add("m.gguf", &bytes, Some(&sha256(&bytes)));
        (case, bytes)
    }

    fn resolve(&self, spec: &str) -> Result<PathBuf, ModelFileError> {
        resolve_with(spec, self.cache.path(), &self.options, &NoProgress)
    }

    fn content(&self) -> Vec<u8> {
        std::fs::read(self.resolve("org/name").unwrap()).unwrap()
    }
}

#[test]
fn a_gguf_file_is_picked_fetched_and_remembered() {
    let case = Case::new();
    let file = gguf::llama().bytes();
    case.hub.add("tiny-Q4_K_M.gguf", &file, Some(&sha256(&file)));
    case.hub.add("tiny-Q8_0.gguf", b"another", None);
    case.hub.add("README.md", b"hello", None);
    let path = case.resolve("org/name").unwrap();
    assert_eq!(Model::open(&path).unwrap().name(), "Tiny");
    assert_eq!(case.hub.take_log(), ["tiny-Q4_K_M.gguf 0"]);
    assert_eq!(case.resolve("org/name").unwrap(), path);
    assert_eq!(case.hub.take_log(), [""; 0], "what is there is not asked for again");
    for spec in ["org/name:q8_0", "org/name:tiny-Q8_0.gguf"] {
        assert_eq!(std::fs::read(case.resolve(spec).unwrap()).unwrap(), b"another");
    }
    let specs: Vec<String> = list(case.cache.path()).unwrap().into_iter().map(|model| model.spec).collect();
    assert_eq!(specs, ["org/name", "org/name:q8_0", "org/name:tiny-Q8_0.gguf"]);
    let error = case.resolve("org/name:Q2_K").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(error.to_string().contains("tiny-Q4_K_M.gguf, tiny-Q8_0.gguf"), "{error}");
}

#[test]
fn a_sharded_directory_opens_as_a_model() {
    let case = Case::new();
    let all = safetensors::tensors("llama", "F32");
    let (mut first, mut second) = (all.clone(), all.clone());
    first.retain(|name, _| name.contains("layers.0"));
    second.retain(|name, _| !name.contains("layers.0"));
    let shard = |name: &String| if first.contains_key(name) { "one.safetensors" } else { "two.safetensors" };
    let map: serde_json::Map<_, _> = all.keys().map(|name| (name.clone(), shard(name).into())).collect();
    let index = serde_json::json!({ "weight_map": map }).to_string();
    case.hub.add("model.safetensors.index.json", index.as_bytes(), None);
    for (name, tensors) in [("one.safetensors", &first), ("two.safetensors", &second)] {
        let bytes = safetensors::bytes(tensors);
        case.hub.add(name, &bytes, Some(&sha256(&bytes)));
    }
    case.hub.add("config.json", safetensors::base_config("llama").to_string().as_bytes(), None);
    case.hub.add("tokenizer.json", safetensors::tokenizer_json().to_string().as_bytes(), None);
    let dir = case.resolve("org/name").unwrap();
    assert!(dir.ends_with(COMMIT));
    let model = Model::open(&dir).unwrap();
    assert_eq!(model.name(), "org/name");
    let listed = list(case.cache.path()).unwrap();
    assert!(listed[0].bytes > safetensors::bytes(&all).len() as u64, "{listed:?}");
}

#[test]
fn the_text_of_a_directory_is_fetched_without_its_weights() {
    let case = Case::new();
    let weights = safetensors::bytes(&safetensors::tensors("llama", "F32"));
    case.hub.add("model.safetensors", &weights, Some(&sha256(&weights)));
    case.hub.add("config.json", safetensors::base_config("llama").to_string().as_bytes(), None);
    case.hub.add("tokenizer.json", safetensors::tokenizer_json().to_string().as_bytes(), None);
    let (cache, hub) = (|| Some(case.cache.path().to_owned()), || case.options.endpoint.clone());
    let texts = text::Source::new(cache(), hub(), None).unwrap();
    let text = texts.open_text("org/name", &NoProgress).unwrap();
    assert_eq!((text.name(), text.vocab_size(), text.context_length()), ("org/name", safetensors::VOCAB as u32, 256));
    assert_eq!(case.hub.take_log(), ["config.json 0", "tokenizer.json 0"]);
    assert_eq!(list(case.cache.path()).unwrap(), [], "a model without weights is none");
    texts.open_text("org/name", &NoProgress).unwrap();
    assert_eq!(case.hub.take_log(), [""; 0], "what is there is not asked for again");

    let models = Source::new(cache(), hub(), None).unwrap();
    let model = find(&models, "org/name", &NoProgress).unwrap().open().unwrap();
    assert_eq!(case.hub.take_log(), ["model.safetensors 0"], "the rest");
    assert_eq!((model.name(), model.path()), (text.name(), text.path()));
    assert_eq!(list(case.cache.path()).unwrap().len(), 1);
}

#[test]
fn the_text_of_a_gguf_file_is_its_beginning() {
    let case = Case::new();
    let mut file = gguf::llama();
    // A header of over 4 MiB, and weights of as much.
    file.set("filler", gguf::Meta::Strs(vec!["a text of sixteen".to_owned(); 200_000]));
    file.tensor("filler", &[1 << 20], gguf::F32);
    let bytes = file.bytes();
    case.hub.add("m.gguf", &bytes, Some(&sha256(&bytes)));
    let source = text::Source::new(Some(case.cache.path().to_owned()), case.options.endpoint.clone(), None).unwrap();
    let open = || source.open_text("org/name", &NoProgress).unwrap();
    // The third answer is whole; the fourth begins at the start of the file, although its middle was requested.
    let whole = Fault::CutAfter(usize::MAX);
    case.hub.faults("m.gguf", &[Fault::CutAfter(70_000), Fault::Status(503), whole, Fault::IgnoreRange]);
    let model = open();
    assert_eq!((model.name(), model.context_length(), model.chat_template().is_some()), ("Tiny", 128, true));
    let (first, second, third) = ("m.gguf 0-2097151", "m.gguf 2097152-4194303", "m.gguf 4194304-8388607");
    assert_eq!(case.hub.take_log(), [first, first, first, second, third]);
    assert!(std::fs::metadata(model.path()).unwrap().len() <= 8 << 20 && bytes.len() > 8 << 20);
    assert_eq!(list(case.cache.path()).unwrap(), [], "a model without weights is none");
    open();
    assert_eq!(case.hub.take_log(), [""; 0], "what is there is not asked for again");
    assert_eq!(case.content(), bytes);
    case.hub.take_log();
    assert_eq!(std::fs::read(open().path()).unwrap(), bytes, "the whole has the text");
}

#[test]
fn the_text_of_a_file_that_is_no_model_is_an_error() {
    let (case, _) = Case::with_file(100_000);
    let source = text::Source::new(Some(case.cache.path().to_owned()), case.options.endpoint.clone(), None).unwrap();
    let error = source.open_text("org/name", &NoProgress).unwrap_err().to_string();
    assert!(error.contains("m.gguf") && error.contains("GGUF"), "{error}");
    case.hub.add("m.gguf", &gguf::llama().bytes()[..1000], None);
    let error = source.open_text("org/name", &NoProgress).unwrap_err().to_string();
    assert!(error.contains("truncated") && error.contains("1000"), "{error}");
}

#[test]
fn the_text_does_not_wait_for_another_process_that_fetches_the_weights() {
    let case = Case::new();
    let weights = safetensors::bytes(&safetensors::tensors("llama", "F32"));
    case.hub.add("model.safetensors", &weights, Some(&sha256(&weights)));
    case.hub.add("config.json", safetensors::base_config("llama").to_string().as_bytes(), None);
    case.hub.add("tokenizer.json", safetensors::tokenizer_json().to_string().as_bytes(), None);
    case.hub.faults("model.safetensors", &[Fault::Hang]);
    let whole = HubOptions { silence: Duration::from_secs(3), attempts: 1, ..case.options.clone() };
    std::thread::scope(|scope| {
        let slow = scope.spawn(|| resolve_with("org/name", case.cache.path(), &whole, &NoProgress));
        while !case.hub.take_log().iter().any(|line| line.starts_with("model.safetensors")) {
            std::thread::sleep(Duration::from_millis(10));
        }
        let cache = Some(case.cache.path().to_owned());
        let source = text::Source::new(cache, case.options.endpoint.clone(), None).unwrap();
        source.open_text("org/name", &NoProgress).unwrap();
        assert!(!slow.is_finished());
        assert!(slow.join().unwrap().unwrap_err().to_string().contains("silent"));
    });
}

#[test]
fn a_revision_is_a_branch_a_tag_or_a_commit() {
    let (case, bytes) = Case::with_file(1000);
    let read = |spec: &str| std::fs::read(case.resolve(spec).unwrap()).unwrap();
    assert_eq!(read("org/name@v1.2"), bytes);
    assert_eq!(read("org/name@v1.2:m.gguf"), bytes);
    let specs: Vec<String> = list(case.cache.path()).unwrap().into_iter().map(|model| model.spec).collect();
    assert_eq!(specs, ["org/name@v1.2", "org/name@v1.2:m.gguf"]);
    let error = case.resolve("org/name@v9").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(error.to_string().contains("org/name@v9") && error.to_string().contains("revision"), "{error}");
}

#[test]
fn a_cut_connection_goes_on_where_it_broke() {
    let (case, bytes) = Case::with_file(3_000_000);
    case.hub.faults("m.gguf", &[Fault::CutAfter(1_000_000), Fault::CutAfter(0), Fault::CutAfter(500_000)]);
    assert_eq!(case.content(), bytes);
    let starts: Vec<usize> =
        case.hub.take_log().iter().map(|line| line.rsplit(' ').next().unwrap().parse().unwrap()).collect();
    assert_eq!(starts, [0, 1_000_000, 1_000_000, 1_500_000]);
}

/// A hub with one large file, and workers that have a copy of it.
fn with_peers(copies: usize) -> (Case, Vec<u8>, Vec<Hub>) {
    let (mut case, bytes) = Case::with_file(3_000_000);
    let copy = |_| {
        let peer = Hub::start();
        peer.add("m.gguf", &bytes, Some(&sha256(&bytes)));
        peer
    };
    let peers: Vec<Hub> = (0..copies).map(copy).collect();
    case.options.peers = peers.iter().map(Hub::peer).collect();
    (case, bytes, peers)
}

fn asked(hubs: &[Hub]) -> Vec<String> {
    hubs.iter().flat_map(Hub::take_log).collect()
}

#[test]
fn a_large_file_comes_from_a_worker_that_has_it() {
    let (case, bytes, peers) = with_peers(1);
    case.hub.add("config.json", b"{}", None);
    let path = case.resolve("org/name").unwrap();
    assert!(std::fs::read(&path).unwrap() == bytes);
    assert_eq!((asked(&peers), case.hub.take_log()), (vec!["m.gguf 0".to_owned()], vec![]));
    // It is in the cache as if the hub had given it.
    let (read, names) =
        (std::fs::read_link(&path).unwrap(), text::shared(case.cache.path(), "org/name", &sha256(&bytes)));
    assert_eq!(read.file_name().unwrap().to_str(), Some(&sha256(&bytes)[..]));
    assert_eq!(names.unwrap().canonicalize().unwrap(), path.canonicalize().unwrap());
    assert_eq!(case.resolve("org/name").unwrap(), path);
    assert_eq!((asked(&peers), case.hub.take_log()), (vec![], vec![]));
}

#[test]
fn what_one_worker_began_another_one_or_the_hub_ends() {
    let (case, bytes, peers) = with_peers(2);
    peers.iter().for_each(|peer| peer.faults("m.gguf", &[Fault::CutAfter(1_000_000)]));
    assert!(case.content() == bytes);
    assert_eq!(
        asked(&peers).into_iter().collect::<std::collections::BTreeSet<_>>().len(),
        2,
        "each where the other was cut"
    );
    assert_eq!(case.hub.take_log(), ["m.gguf 2000000"]);
}

#[test]
fn a_workers_wrong_file_is_noticed_and_a_worker_without_it_left() {
    let (case, bytes, peers) = with_peers(1);
    peers[0].faults("m.gguf", &[Fault::Damage]);
    assert!(case.content() == bytes);
    assert_eq!(case.hub.take_log(), ["m.gguf 0"], "nothing of what was wrong is kept");

    for fault in [Fault::Status(404), Fault::Status(503), Fault::Status(302), Fault::IgnoreRange] {
        let (case, bytes, peers) = with_peers(1);
        peers[0].faults("m.gguf", &[fault]);
        assert!(case.content() == bytes);
        assert_eq!(case.hub.take_log(), ["m.gguf 0"], "{fault:?}");
    }
    let (mut case, bytes, _) = with_peers(0);
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    case.options.peers = vec![closed.to_string(), "no.such.host.invalid:1".to_owned()];
    assert!(case.content() == bytes);

    let (mut case, bytes, peers) = with_peers(1);
    case.options.silence = Duration::from_secs(1);
    peers[0].faults("m.gguf", &[Fault::Hang]);
    assert!(case.content() == bytes);
    assert_eq!(case.hub.take_log(), ["m.gguf 1500000"], "a worker that says nothing is given up");
}

#[test]
fn a_later_process_goes_on_with_what_an_earlier_one_left() {
    let (mut case, bytes) = Case::with_file(1_000_000);
    case.options.attempts = 1;
    case.hub.faults("m.gguf", &[Fault::CutAfter(400_000)]);
    let error = case.resolve("org/name").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.to_string().contains("org/name/m.gguf"), "{error}");
    assert_eq!(list(case.cache.path()).unwrap(), [], "nothing half-done is shown");
    assert_eq!(case.content(), bytes);
    assert_eq!(case.hub.take_log(), ["m.gguf 0", "m.gguf 400000"]);
}

#[test]
fn a_server_without_ranges_and_a_finished_part_are_recovered_from() {
    let (case, bytes) = Case::with_file(100_000);
    // The second answer starts over although a range was requested. The joined file is too long, so the download begins anew.
    case.hub.faults("m.gguf", &[Fault::CutAfter(60_000), Fault::IgnoreRange]);
    assert_eq!(case.content(), bytes);
    assert_eq!(case.hub.take_log(), ["m.gguf 0", "m.gguf 60000", "m.gguf 0"]);

    // As after kill -9 between the last byte and the file's name.
    let (case, bytes) = Case::with_file(100_000);
    let blobs = case.cache.path().join("hub/models--org--name/blobs");
    std::fs::create_dir_all(&blobs).unwrap();
    std::fs::write(blobs.join(sha256(&bytes)).with_extension("part"), &bytes).unwrap();
    assert_eq!(case.content(), bytes);
    assert_eq!(case.hub.take_log(), ["m.gguf 100000", "m.gguf 0"]);
}

#[test]
fn damage_is_noticed_and_kept_nowhere() {
    let (case, bytes) = Case::with_file(50_000);
    case.hub.faults("m.gguf", &[Fault::Damage]);
    assert_eq!(case.content(), bytes, "a second attempt gets it right");

    let (case, _) = Case::with_file(50_000);
    case.hub.faults("m.gguf", &[Fault::Damage; 5]);
    let error = case.resolve("org/name").unwrap_err();
    assert!(matches!(&error, ModelFileError::Digest { property: "the SHA-256", .. }), "{error}");
    let left = std::fs::read_dir(case.cache.path().join("hub/models--org--name/blobs")).unwrap();
    assert!(left.flatten().all(|entry| entry.path().extension().is_some_and(|e| e == "lock")));
}

#[test]
fn silence_ends_with_an_error_not_with_a_hang() {
    let (mut case, bytes) = Case::with_file(200_000);
    case.hub.faults("m.gguf", &[Fault::Hang]);
    case.options.silence = Duration::from_secs(2);
    let error = case.resolve("org/name").unwrap_err();
    assert!(error.to_string().contains("silent for 2s"), "{error}");
    drop(bytes);

    // A server that accepts and never answers.
    let mute = TcpListener::bind("127.0.0.1:0").unwrap();
    case.options.endpoint = Some(format!("http://{}", mute.local_addr().unwrap()));
    let error = case.resolve("org/other").unwrap_err();
    assert!(error.to_string().contains("org/other: the hub was silent"), "{error}");
}

#[test]
fn refusals_and_nonsense_are_told_apart() {
    let (mut case, _) = Case::with_file(1000);
    let error = case.resolve("org/absent").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    case.hub.faults("m.gguf", &[Fault::Status(403)]);
    let error = case.resolve("org/name").unwrap_err();
    assert!(error.to_string().contains("token"), "{error}");
    assert_eq!(case.hub.take_log().len(), 1, "a refusal is not tried again");
    case.hub.faults("m.gguf", &[Fault::Status(503)]);
    assert!(case.resolve("org/name").is_ok(), "an overloaded hub is");

    let secret = Case::with_file(1000).0;
    secret.hub.require_token("s3cret");
    assert!(secret.resolve("org/name").unwrap_err().to_string().contains("token"));
    let options = HubOptions { token: Some("s3cret".to_owned()), ..secret.options.clone() };
    assert!(!format!("{options:?}").contains("s3cret"));
    assert!(resolve_with("org/name", secret.cache.path(), &options, &NoProgress).is_ok());

    let hostile = Case::with_file(1000).0;
    hostile.hub.add_name("../../../outside.gguf");
    let error = hostile.resolve("org/name").unwrap_err();
    assert!(error.to_string().contains("../../../outside.gguf"), "{error}");

    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    case.options.endpoint = Some(format!("http://{closed}"));
    assert_eq!(case.resolve("org/other").unwrap_err().kind(), ErrorKind::Unavailable);
}

#[test]
fn several_at_once_fetch_it_once() {
    let (case, bytes) = Case::with_file(500_000);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(|| case.content())).collect();
        threads.into_iter().for_each(|thread| assert!(thread.join().unwrap() == bytes));
    });
    assert_eq!(case.hub.take_log(), ["m.gguf 0"]);
}

#[derive(Default)]
struct Record(Mutex<Vec<(String, u64, Option<u64>)>>);

impl Progress for Record {
    fn update(&self, what: &str, done: u64, total: Option<u64>) {
        self.0.lock().unwrap().push((what.to_owned(), done, total));
    }

    fn finish(&self, what: &str) {
        self.0.lock().unwrap().push((what.to_owned(), u64::MAX, None));
    }
}

#[test]
fn progress_reaches_the_whole_and_counts_what_was_there() {
    let (case, _) = Case::with_file(300_000);
    case.hub.faults("m.gguf", &[Fault::CutAfter(100_000)]);
    let record = Record::default();
    resolve_with("org/name", case.cache.path(), &case.options, &record).unwrap();
    let events = record.0.into_inner().unwrap();
    let (last, bytes) = events.split_last().unwrap();
    assert_eq!(*last, ("org/name/m.gguf".to_owned(), u64::MAX, None));
    assert!(bytes.windows(2).all(|pair| pair[0].1 <= pair[1].1), "{bytes:?}");
    assert_eq!(bytes.last().unwrap().1, 300_000);
    assert!(bytes.iter().all(|(what, _, total)| what == "org/name/m.gguf" && *total == Some(300_000)));
}

#[test]
fn https_endpoints_are_spoken_to_in_tls() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let server = std::thread::spawn(move || {
        let mut first = [0u8; 3];
        listener.accept().unwrap().0.read_exact(&mut first).unwrap();
        first
    });
    let case = Case::new();
    let options = HubOptions { endpoint: Some(format!("https://{address}")), attempts: 1, ..HubOptions::default() };
    let error = resolve_with("org/name", case.cache.path(), &options, &NoProgress).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert_eq!(server.join().unwrap()[..2], [0x16, 3], "a TLS handshake");
}
