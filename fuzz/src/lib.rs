//! Fuzz targets: how a worker handles bytes from a peer, how a router handles a client's body, and how model files are read. A target
//! takes any byte string. It must neither panic nor loop, and its assertions hold for every input.
//!
//! `cargo run --profile fuzz -p baton-fuzz -- TARGET SECONDS` mutates the corpus under `fuzz/corpus` for a while; tests replay
//! it. A target returns a signature of its input's outcome. The runner keeps inputs with new signatures. Nothing measures which code
//! ran, which has two consequences:
//!
//! - Of two ways to the same outcome, the second is not kept.
//! - Mutations do not get past some checks, such as checksums. Code behind them needs a seed, or the target must satisfy the check.
//!
//! `fuzz/libfuzzer` runs the same targets guided by coverage.

#![forbid(unsafe_code)]

/// The requests of `baton bench transfer`. `baton` is a program, not a library, so its file is compiled here as well.
#[path = "../../cli/src/bench/transfer/request.rs"]
mod benchmark;
mod bodies;
mod models;
mod mutate;
mod registry;
mod sessions;

use std::hash::{DefaultHasher, Hash, Hasher};

use baton_handoff::{
    Descriptor, Frame, FrameHead, FrameLimits, Hello, Host, JoinTicket, Over, PREFIX, TransferError, TransferLimits,
    parse_body, parse_prefix,
};
use baton_proto::{ConvertError, v1};
use baton_types::{
    BlockId, Epoch, FinishReason, KvDtype, KvGroup, KvLayout, PoolGeometry, SamplingParams, TokenOut, WorkerId,
};
use benchmark::Request;
use prost::Message;

pub use mutate::Mutator;

/// A fuzz target.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Its name, which is also the name of its corpus folder.
    pub name: &'static str,
    /// Tries an input; returns a signature of its outcome.
    pub run: fn(&[u8]) -> u64,
    /// The inputs to begin with.
    pub seeds: fn() -> Vec<Vec<u8>>,
}

/// Most bytes of an input.
pub const MOST: usize = 4096;

/// Every target.
pub const TARGETS: [Target; 12] = [
    Target { name: "handshake", run: handshake, seeds: handshake_seeds },
    Target { name: "frame", run: frame, seeds: frame_seeds },
    Target { name: "descriptor", run: descriptor, seeds: descriptor_seeds },
    Target { name: "benchmark", run: benchmark, seeds: benchmark_seeds },
    Target { name: "decode-session", run: sessions::decode, seeds: sessions::decode_seeds },
    Target { name: "prefill-session", run: sessions::prefill, seeds: sessions::prefill_seeds },
    Target { name: "request", run: request, seeds: request_seeds },
    Target { name: "http-body", run: bodies::body, seeds: bodies::body_seeds },
    Target { name: "registry", run: registry::registry, seeds: registry::registry_seeds },
    Target { name: "gguf", run: models::gguf, seeds: models::gguf_seeds },
    Target { name: "safetensors", run: models::safetensors, seeds: models::safetensors_seeds },
    Target { name: "chat-template", run: models::chat, seeds: models::chat_seeds },
];

/// A pool of two groups of different shapes.
pub(crate) fn geometry() -> PoolGeometry {
    let group =
        |layers: Vec<u32>, kv_heads, window| KvGroup { layers, planes: 2, kv_heads, head_dim: 5, window, sinks: 0 };
    let groups = vec![group(vec![0, 3], 3, None), group(vec![1, 2, 4], 1, Some(8))];
    let layout = KvLayout { version: 1, model: 42, dtype: KvDtype::F16, block_size: 1, groups };
    PoolGeometry { layout, blocks: vec![8, 12] }
}

/// The signature of an outcome: a hash of its text without digits, so that only new kinds of outcome count.
pub(crate) fn signature(outcome: &impl std::fmt::Debug) -> u64 {
    let mut hasher = DefaultHasher::new();
    format!("{outcome:?}").chars().filter(|c| !c.is_ascii_digit()).collect::<String>().hash(&mut hasher);
    hasher.finish()
}

fn handshake(input: &[u8]) -> u64 {
    let hello = Hello::parse(input.get(..Hello::LEN).unwrap_or(input));
    if let Ok(hello) = hello {
        assert_eq!(hello.encode(), input[..Hello::LEN]);
    }
    let rest = input.get(Hello::LEN..).and_then(|rest| rest.split_first());
    let visitor = rest.map(|(kind, body)| {
        let frame = parse_body(&FrameHead::matching(*kind, body), body);
        frame.map(|frame| baton_handoff::visitor(&frame, WorkerId(2)).map_err(|_| "turned away"))
    });
    signature(&(hello.map(drop), visitor))
}

fn handshake_seeds() -> Vec<Vec<u8>> {
    let hello = Hello { fingerprint: geometry().layout.fingerprint() }.encode();
    let identify = |you| {
        let bytes = Frame::Identify { me: WorkerId(1), you: WorkerId(you), over: Over::Stream }.encode();
        [&hello[..], &bytes[4..5], &bytes[PREFIX..]].concat()
    };
    let join = Frame::Join { ticket: JoinTicket { session: 1, token: 2 }, stream: 3 }.encode();
    vec![hello.clone(), identify(2), identify(3), [&hello[..], &join[4..5], &join[PREFIX..]].concat()]
}

fn frame(input: &[u8]) -> u64 {
    let limits =
        FrameLimits::new(&TransferLimits { blocks_per_handoff: 64, tail_bytes: 64, ..TransferLimits::default() }, 2);
    if let Some(prefix) = input.first_chunk::<PREFIX>()
        && let Ok(head) = parse_prefix(*prefix, &limits)
    {
        // Bounded before anything is read.
        assert!(head.len <= 1 << 16, "{} bytes in a frame", head.len);
        let body = input.get(PREFIX..PREFIX + head.len);
        if let Some(Ok(frame)) = body.map(|body| parse_body(&head, body)) {
            assert_eq!(frame.encode(), input[..PREFIX + head.len]);
        }
    }
    let Some((kind, body)) = input.split_first() else { return 0 };
    let parsed = parse_body(&FrameHead::matching(*kind, body), body);
    if let Ok(frame) = &parsed {
        assert_eq!(frame.encode()[PREFIX..], *body, "{frame:?}");
    }
    signature(&parsed.map(|frame| outline(&frame)))
}

/// A frame without its lists and without texts chosen by its sender.
fn outline(frame: &Frame) -> String {
    format!("{frame:?}").split(['[', '"']).next().unwrap_or_default().to_owned()
}

fn frame_seeds() -> Vec<Vec<u8>> {
    let frames = sessions::frames_to_decode().into_iter().chain(sessions::frames_to_prefill());
    let unsealed = |frame: Frame| {
        let bytes = frame.encode();
        [&bytes[4..5], &bytes[PREFIX..]].concat()
    };
    let whole = Frame::Abort { epoch: Epoch(3) }.encode();
    frames.map(unsealed).chain([whole]).collect()
}

/// Parses the input as it is, and with the correct fingerprint of its layout, since a malicious peer can compute it.
fn descriptor(input: &[u8]) -> u64 {
    signature(&(parsed(input), Descriptor::matching(input).map(|matching| parsed(&matching))))
}

/// Outcomes of parsing a descriptor: without conversion of element types, and with it.
fn parsed(input: &[u8]) -> [Result<(), String>; 2] {
    let ours = geometry().layout;
    let [as_is, converted] = [false, true].map(|converts| {
        Descriptor::parse(input, &ours, converts).inspect(|descriptor| {
            assert_eq!(descriptor.counts.len(), ours.groups.len());
            assert_eq!(adapted(descriptor, converts), ours);
            let again = Descriptor::parse(&descriptor.encode(), &ours, converts);
            assert_eq!(again.as_ref(), Ok(descriptor));
        })
    });
    assert!(as_is.is_err() || as_is == converted, "{as_is:?}, {converted:?}");
    [as_is, converted].map(|parsed| {
        parsed.map(drop).map_err(|error| match error {
            TransferError::Descriptor { field, problem } => format!("{field} {problem}"),
            TransferError::Layout(mismatch) => mismatch.field.to_owned(),
            other => other.to_string(),
        })
    })
}

/// The descriptor's layout, with what the prefill side can adapt to, the element type, replaced by ours.
fn adapted(descriptor: &Descriptor, converts: bool) -> KvLayout {
    let theirs = descriptor.layout.clone();
    if converts { KvLayout { dtype: geometry().layout.dtype, ..theirs } } else { theirs }
}

/// Parses a request to the receiving end of a transfer benchmark.
fn benchmark(input: &[u8]) -> u64 {
    let Ok(line) = std::str::from_utf8(input) else { return 0 };
    let parsed = Request::parse(line);
    match &parsed {
        Ok(Request::Pool(geometry, _)) => assert!(geometry.bytes() <= 64 << 30, "{geometry:?}"),
        Ok(_) => {}
        Err(error) => assert!(error.len() < 1000, "{error}"),
    }
    if let Ok(line) = &parsed {
        assert_eq!(Request::parse(&line.to_string()).as_ref(), Ok(line));
    }
    signature(&parsed.map_err(|error| error.contains("a smaller one")))
}

fn benchmark_seeds() -> Vec<Vec<u8>> {
    let mut large = geometry();
    large.blocks = vec![u32::MAX, 1];
    let lines = [
        Request::Pool(geometry(), Some(7)),
        Request::Pool(geometry(), None),
        Request::Pool(large, None),
        Request::Reserve { blocks: 3, verified: true },
        Request::Reserve { blocks: 9, verified: false },
        Request::Plain { bytes: 65_536 },
    ];
    lines.iter().map(|line| line.to_string().into_bytes()).collect()
}

/// A reservation of worker 2, epoch 1, key 7.
pub(crate) fn target(counts: [u32; 2]) -> Descriptor {
    Descriptor {
        worker: WorkerId(2),
        epoch: Epoch(1),
        key: 7,
        tokens: 9,
        first: vec![0, 1],
        counts: counts.to_vec(),
        layout: geometry().layout,
        device: false,
        host: Host { boot: [3; 16], place: 4 },
        unix: b"baton-x".to_vec(),
        address: "localhost".into(),
        port: 4000,
    }
}

fn descriptor_seeds() -> Vec<Vec<u8>> {
    let ours = geometry().layout;
    let foreign = KvLayout { block_size: 32, dtype: KvDtype::Q8, ..ours.clone() };
    let quantised = KvLayout { dtype: KvDtype::Q8, ..ours.clone() };
    let mut fewer = ours;
    fewer.groups[0].kv_heads = 1;
    let of = |layout: KvLayout| Descriptor { layout, ..target([2, 1]) };
    let device = Descriptor { device: true, ..target([2, 1]) };
    let targets = [target([2, 1]), target([0, 0]), device, of(foreign), of(quantised), of(fewer)];
    targets.map(|target| target.encode()).to_vec()
}

/// Decodes requests and answers between router and workers, and converts them with checks.
fn request(input: &[u8]) -> u64 {
    let Some((which, bytes)) = input.split_first() else { return 0 };
    match which % 5 {
        0 => {
            let request = v1::PrefillRequest::decode(bytes).map_err(|_| "no message");
            let checked = request.map(|request| {
                let _ = descriptor(&request.target);
                sampled(request.sequence)
            });
            signature(&checked)
        }
        1 => {
            let event = v1::PrefillEvent::decode(bytes).map_err(|_| "no message");
            signature(&event.map(|event| match event.event {
                Some(v1::prefill_event::Event::FirstToken(first)) => (token(first.token), finish(first.finish)),
                _ => (false, None),
            }))
        }
        2 => {
            let event = v1::DecodeEvent::decode(bytes).map_err(|_| "no message");
            signature(&event.map(|event| match event.event {
                Some(v1::decode_event::Event::Token(other)) => token(Some(other)),
                _ => false,
            }))
        }
        3 => {
            let sampling = v1::WorkerSampling::decode(bytes).map_err(|_| "no message");
            signature(&sampling.map(|s| SamplingParams::try_from(s).map(|p| valid(&p))))
        }
        _ => {
            let request = v1::DecodeRequest::decode(bytes).map_err(|_| "no message");
            signature(&request.map(|request| (request.compute_here, sampled(request.sequence))))
        }
    }
}

fn sampled(sequence: Option<v1::Sequence>) -> Option<Result<bool, ConvertError>> {
    sequence.map(|sequence| sequence.checked_sampling().map(|params| valid(&params)))
}

/// Accepted parameters must survive conversion to protobuf and back. Returns whether they have a constraint.
fn valid(params: &SamplingParams) -> bool {
    let again = SamplingParams::try_from(v1::WorkerSampling::from(params.clone()));
    assert_eq!(again.as_ref(), Ok(params));
    params.constraint.is_some()
}

fn token(token: Option<v1::Token>) -> bool {
    token.map(TokenOut::from).is_some_and(|token| token.logprob.is_some())
}

fn finish(reason: Option<i32>) -> Option<bool> {
    let reason = v1::FinishReason::try_from(reason?).ok()?;
    Some(FinishReason::try_from(reason).is_ok())
}

fn request_seeds() -> Vec<Vec<u8>> {
    let sampling: v1::WorkerSampling =
        SamplingParams { logit_bias: vec![(3, 1.5)], stop_token_ids: vec![2], ..SamplingParams::default() }.into();
    let sequence = v1::Sequence {
        tokens: vec![1, 2, 3],
        prompt_tokens: 3,
        sampling: Some(sampling.clone()),
        ..Default::default()
    };
    let target = target([2, 1]).encode();
    let out: v1::Token = TokenOut { index: 3, id: 9, logprob: Some(-1.5), ..TokenOut::default() }.into();
    let decode = v1::DecodeRequest { sequence: Some(sequence.clone()), compute_here: false, takes_more: true };
    let prefill = v1::PrefillRequest { sequence: Some(sequence), target, target_follows: false };
    let first = v1::FirstToken { token: Some(out.clone()), finish: Some(1), cached_tokens: 4 };
    let first = v1::PrefillEvent { event: Some(v1::prefill_event::Event::FirstToken(first)) };
    let next = v1::DecodeEvent { event: Some(v1::decode_event::Event::Token(out)), more: vec![7, 300] };
    let tagged = |tag: u8, bytes: Vec<u8>| [vec![tag], bytes].concat();
    vec![
        tagged(0, prefill.encode_to_vec()),
        tagged(1, first.encode_to_vec()),
        tagged(2, next.encode_to_vec()),
        tagged(3, sampling.encode_to_vec()),
        tagged(4, decode.encode_to_vec()),
    ]
}

/// Blocks of both groups.
pub(crate) fn blocks(range: std::ops::Range<u32>) -> Vec<Vec<BlockId>> {
    vec![range.clone().map(BlockId).collect(), range.take(1).map(BlockId).collect()]
}
