//! The opaque target that travels from the decode worker through the router to the prefill worker. It says where to connect and which
//! reservation to write to. It holds no block numbers: the session hands those out when it grants access.
//!
//! Its first fields are magic and layout fingerprint. If the fingerprint differs, the layout is compared before anything else is read, so
//! that an error can name the difference.

use baton_types::{Epoch, KvDtype, KvGroup, KvLayout, LayoutMismatch, WorkerId};

use crate::codec::{Fields, Malformed, Put};
use crate::error::TransferError;
use crate::host::Host;

const MAGIC: [u8; 4] = *b"bkt4";
/// Magic for a pool in device memory. A reader that only knows pools that can be mapped stops here.
const DEVICE_MAGIC: [u8; 4] = *b"bkd4";
/// Most bytes of a descriptor.
const MAX_BYTES: usize = 64 << 10;

/// What the prefill side needs to know of a reservation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Descriptor {
    /// The decode worker.
    pub worker: WorkerId,
    /// The reservation.
    pub epoch: Epoch,
    /// Random per reservation. Whoever knows it may write.
    pub key: u64,
    /// Tokens of the sequence.
    pub tokens: u32,
    /// Per group: index, in the sequence, of the reservation's first block. Earlier blocks are not sent.
    pub first: Vec<u32>,
    /// Blocks per group.
    pub counts: Vec<u32>,
    /// Layout of the decode pool. Differs from the prefill side's at most in its KV type.
    pub layout: KvLayout,
    /// Whether the decode pool is in device memory, which nobody can map.
    pub device: bool,
    /// Where the decode worker runs.
    pub host: Host,
    /// Name of the abstract unix socket.
    pub unix: Vec<u8>,
    /// TCP host name or address.
    pub address: String,
    /// TCP port.
    pub port: u16,
}

impl Descriptor {
    /// Encodes the descriptor.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = if self.device { DEVICE_MAGIC } else { MAGIC }.to_vec();
        out.put_u64(self.layout.fingerprint());
        out.put_blob(&encode_layout(&self.layout));
        out.put_u64(self.worker.0);
        out.put_u64(self.epoch.0);
        out.put_u64(self.key);
        out.put_u32(self.tokens);
        out.put_u32s(self.first.iter().copied());
        out.put_u32s(self.counts.iter().copied());
        out.put(&self.host.boot);
        out.put_u64(self.host.place);
        out.put_blob(&self.unix);
        out.put_blob(self.address.as_bytes());
        out.put_u16(self.port);
        out
    }

    /// These bytes with the fingerprint set to that of the layout they hold, for tests of layout parsing. None if they hold no valid
    /// layout.
    #[cfg(feature = "testing")]
    pub fn matching(bytes: &[u8]) -> Option<Vec<u8>> {
        let mut fields = Fields::new(bytes.get(MAGIC.len() + size_of::<u64>()..)?);
        let layout = fields.blob("layout").ok().and_then(|blob| parse_layout(blob).ok())?;
        let mut matching = bytes.to_vec();
        matching[MAGIC.len()..][..size_of::<u64>()].copy_from_slice(&layout.fingerprint().to_le_bytes());
        Some(matching)
    }

    /// Block layers in the reservation: blocks times layers, summed over groups.
    pub(crate) fn layers(&self) -> u64 {
        let groups = self.layout.groups.iter().zip(&self.counts);
        groups.map(|(group, count)| group.layers.len() as u64 * u64::from(*count)).sum()
    }

    /// Reads a descriptor for a worker whose pool has the layout `ours`. `converts`: whether that worker can write another KV type than its
    /// own.
    pub fn parse(bytes: &[u8], ours: &KvLayout, converts: bool) -> Result<Descriptor, TransferError> {
        let bad = |m: Malformed| TransferError::Descriptor { field: m.field, problem: m.problem };
        if bytes.len() > MAX_BYTES {
            return Err(bad(Malformed::new("length", format!("{} bytes, at most {MAX_BYTES}", bytes.len()))));
        }
        let mut fields = Fields::new(bytes);
        let device = match fields.array::<4>("magic").map_err(bad)? {
            MAGIC => false,
            DEVICE_MAGIC => true,
            _ => return Err(bad(Malformed::new("magic", "not a target descriptor of this version"))),
        };
        let fingerprint = fields.u64("fingerprint").map_err(bad)?;
        let theirs = match fingerprint == ours.fingerprint() {
            true => fields.blob("layout").map(|_| ours.clone()).map_err(bad)?,
            false => other_layout(ours, fingerprint, fields.blob("layout").ok(), converts)?,
        };
        parse_reservation(fields, theirs, device).map_err(bad)
    }
}

/// The peer's layout, if it differs from `ours` in the KV type only and this worker `converts`. Otherwise the error names the first field
/// that differs, or the fingerprints if the peer's layout cannot be read.
fn other_layout(
    ours: &KvLayout,
    fingerprint: u64,
    bytes: Option<&[u8]>,
    converts: bool,
) -> Result<KvLayout, LayoutMismatch> {
    let theirs = bytes.and_then(|bytes| parse_layout(bytes).ok()).filter(|l| l.fingerprint() == fingerprint);
    let Some(theirs) = theirs else { return Err(fingerprint_mismatch(ours.fingerprint(), fingerprint)) };
    let mut adapted = theirs.clone();
    if converts {
        adapted.dtype = ours.dtype;
    }
    ours.compatible(&adapted).map(|()| theirs)
}

fn parse_reservation(mut f: Fields, layout: KvLayout, device: bool) -> Result<Descriptor, Malformed> {
    let descriptor = Descriptor {
        worker: WorkerId(f.u64("worker")?),
        epoch: Epoch(f.u64("epoch")?),
        key: f.u64("key")?,
        tokens: f.u32("tokens")?,
        first: f.u32s("first")?,
        counts: f.u32s("counts")?,
        layout,
        device,
        host: Host { boot: f.array("host")?, place: f.u64("host")? },
        unix: f.blob("unix")?.to_vec(),
        address: f.text("address")?,
        port: f.u16("port")?,
    };
    f.end()?;
    let groups = descriptor.layout.groups.len();
    for (field, found) in [("first", descriptor.first.len()), ("counts", descriptor.counts.len())] {
        if found != groups {
            return Err(Malformed::new(field, format!("{found} groups, the layout has {groups}")));
        }
    }
    Ok(descriptor)
}

/// The error for two fingerprints that differ.
pub fn fingerprint_mismatch(ours: u64, theirs: u64) -> LayoutMismatch {
    LayoutMismatch { field: "layout fingerprint", ours: format!("{ours:016x}"), theirs: format!("{theirs:016x}") }
}

/// Encodes a layout's fields, for the descriptor and for handing a layout to another process.
pub fn encode_layout(layout: &KvLayout) -> Vec<u8> {
    let mut out = Vec::new();
    out.put_u32(layout.version);
    out.put_u64(layout.model);
    out.put_u8(dtype_code(layout.dtype));
    out.put_u32(layout.block_size);
    out.put_u16(layout.groups.len() as u16);
    for group in &layout.groups {
        out.put_u32s(group.layers.iter().copied());
        out.put_u32(group.planes);
        out.put_u32(group.kv_heads);
        out.put_u32(group.head_dim);
        out.put_u8(u8::from(group.window.is_some()));
        out.put_u32(group.window.unwrap_or(0));
        out.put_u32(group.sinks);
    }
    out
}

/// The KV type's code on the wire.
fn dtype_code(dtype: KvDtype) -> u8 {
    match dtype {
        KvDtype::F32 => 0,
        KvDtype::F16 => 1,
        KvDtype::Bf16 => 2,
        KvDtype::Q8 => 3,
        KvDtype::Fp8 => 4,
        KvDtype::Int4 => 5,
    }
}

/// Reads a layout from the bytes of [`encode_layout`].
pub fn parse_layout(bytes: &[u8]) -> Result<KvLayout, Malformed> {
    let mut f = Fields::new(bytes);
    let version = f.u32("version")?;
    let model = f.u64("model")?;
    let code = f.u8("dtype")?;
    let dtype = KvDtype::ALL.into_iter().find(|&dtype| dtype_code(dtype) == code);
    let dtype = dtype.ok_or_else(|| Malformed::new("dtype", format!("{code} is no dtype")))?;
    let block_size = f.u32("block_size")?;
    let groups = f.u16("groups")?;
    let groups = (0..groups).map(|_| parse_group(&mut f)).collect::<Result<_, _>>()?;
    f.end()?;
    Ok(KvLayout { version, model, dtype, block_size, groups })
}

fn parse_group(f: &mut Fields) -> Result<KvGroup, Malformed> {
    let layers = f.u32s("layers")?;
    let planes = f.u32("planes")?;
    let kv_heads = f.u32("kv_heads")?;
    let head_dim = f.u32("head_dim")?;
    let windowed = f.u8("window")?;
    let window = f.u32("window")?;
    let window = match windowed {
        0 if window == 0 => None,
        1 => Some(window),
        other => return Err(Malformed::new("window", format!("flag {other} with {window}"))),
    };
    let sinks = f.u32("sinks")?;
    Ok(KvGroup { layers, planes, kv_heads, head_dim, window, sinks })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout() -> KvLayout {
        let group =
            |layers: Vec<u32>, window| KvGroup { layers, planes: 2, kv_heads: 3, head_dim: 8, window, sinks: 0 };
        let groups = vec![group(vec![0, 2], None), group(vec![1, 3], Some(32))];
        KvLayout { version: 1, model: 7, dtype: KvDtype::F16, block_size: 16, groups }
    }

    fn descriptor() -> Descriptor {
        Descriptor {
            worker: WorkerId(1),
            epoch: Epoch(2),
            key: 3,
            tokens: 100,
            first: vec![0, 5],
            counts: vec![7, 2],
            layout: layout(),
            device: true,
            host: Host { boot: [9; 16], place: 4 },
            unix: b"baton-x".to_vec(),
            address: "example".into(),
            port: 4000,
        }
    }

    fn parse(bytes: &[u8]) -> Result<Descriptor, TransferError> {
        Descriptor::parse(bytes, &layout(), false)
    }

    #[test]
    fn other_types_need_somebody_who_converts_and_other_heads_are_no_match() {
        let quantised = Descriptor { layout: KvLayout { dtype: KvDtype::Q8, ..layout() }, ..descriptor() };
        let error = parse(&quantised.encode()).unwrap_err().to_string();
        assert!(error.contains("KV dtype: F16 here, Q8 at the peer"), "{error}");
        assert_eq!(Descriptor::parse(&quantised.encode(), &layout(), true), Ok(quantised));
        for heads in [1, u32::MAX] {
            let mut theirs = layout();
            theirs.groups[0].kv_heads = heads;
            let other = Descriptor { layout: theirs, ..descriptor() };
            let error = Descriptor::parse(&other.encode(), &layout(), true).unwrap_err().to_string();
            assert!(error.contains("layer groups"), "{error}");
        }
    }

    #[test]
    fn descriptors_survive_and_mutations_are_errors_not_panics() {
        let bytes = descriptor().encode();
        assert_eq!(parse(&bytes), Ok(descriptor()));
        for end in 0..bytes.len() {
            assert!(parse(&bytes[..end]).is_err(), "cut to {end}");
        }
        let mut longer = bytes.clone();
        longer.push(0);
        assert!(parse(&longer).is_err());
        assert!(parse(&vec![0; MAX_BYTES + 1]).is_err());
        for at in 0..bytes.len() {
            for value in [0, 1, 0x7f, 0xff] {
                let mut mutated = bytes.clone();
                mutated[at] = value;
                let _ = parse(&mutated);
            }
        }
    }

    #[test]
    fn another_layout_is_named_before_anything_else_is_read() {
        let theirs = KvLayout { block_size: 32, ..layout() };
        let mut bytes = Descriptor { layout: theirs.clone(), ..descriptor() }.encode();
        let error = parse(&bytes).unwrap_err().to_string();
        assert!(error.contains("block size: 16 here, 32 at the peer"), "{error}");
        // No readable layout follows the fingerprint, so the error names the fingerprints.
        bytes.truncate(12);
        let error = parse(&bytes).unwrap_err().to_string();
        assert!(error.contains(&format!("{:016x}", theirs.fingerprint())), "{error}");
        assert!(error.contains(&format!("{:016x}", layout().fingerprint())), "{error}");
    }

    #[test]
    fn group_counts_must_be_the_layouts() {
        let cases = [
            ("first", Descriptor { first: vec![1], ..descriptor() }),
            ("counts", Descriptor { counts: vec![1], ..descriptor() }),
        ];
        for (name, lopsided) in cases {
            let error = parse(&lopsided.encode()).unwrap_err();
            assert!(matches!(error, TransferError::Descriptor { field, .. } if field == name), "{error}");
        }
        for dtype in KvDtype::ALL {
            let layout = KvLayout { dtype, ..layout() };
            assert_eq!(parse_layout(&encode_layout(&layout)), Ok(layout));
        }
    }
}
