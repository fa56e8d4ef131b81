//! A store's settings.

use crate::{Identity, MIN_SEGMENTS, ObjectConfig, Policy, Shape, StoreError};

/// Bytes of a segment, if the disk has room for enough of them.
const SEGMENT_BYTES: u64 = 64 << 20;
/// Buffers that are kept for moving blocks out of segments that are reclaimed.
pub(crate) const MOVING: u32 = 2;

/// The settings of a store.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StoreConfig {
    /// Shape of the blocks.
    pub shape: Shape,
    /// Whose KV is stored. What is found of another identity is overwritten.
    pub identity: Identity,
    /// Buffers of host memory, [`Shape::stride`] bytes each; two of them move blocks between segments.
    pub buffers: u32,
    /// The disk. None: host memory only.
    pub disk: Option<DiskConfig>,
    /// The object store. None: there is none.
    pub object: Option<ObjectConfig>,
    /// Which blocks stay.
    pub policy: Policy,
    /// Blocks asked for less often than this are not written to disk, nor uploaded. 1 writes all; 2 saves three quarters of the writes of a chat service,
    /// at the price of most conversations' second turn (docs/kv-store.md).
    pub min_uses: u8,
    /// Uses after which the sketch forgets half; None: ten for each block of all tiers.
    pub sample: Option<u64>,
    /// Bounds of what is in flight.
    pub limits: StoreLimits,
}

/// The size of the disk tier.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DiskConfig {
    /// Segments, 8 or more.
    pub segments: u32,
    /// Records of a segment.
    pub records: u32,
}

/// What may be in flight at once (I5).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StoreLimits {
    /// Blocks being filled or handed out, and gets that wait.
    pub tickets: u32,
    /// Reads from disk.
    pub reads: u32,
    /// Writes to disk.
    pub writes: u32,
    /// Segments being scanned.
    pub scans: u32,
    /// Fetches from the object store.
    pub fetches: u32,
    /// Uploads to it.
    pub uploads: u32,
    /// Removals from it.
    pub removals: u32,
    /// Blocks that are pinned.
    pub pinned: u32,
}

impl Default for StoreLimits {
    fn default() -> Self {
        let (tickets, reads, writes, scans, pinned) = (4096, 64, 8, 4, 1024);
        StoreLimits { tickets, reads, writes, scans, fetches: 32, uploads: 4, removals: 4, pinned }
    }
}

impl DiskConfig {
    /// As many segments as `bytes` have room for.
    pub fn of_size(bytes: u64, shape: &Shape) -> Result<DiskConfig, StoreError> {
        let stride = shape.stride() as u64;
        let segment = SEGMENT_BYTES.min(bytes / u64::from(4 * MIN_SEGMENTS)).max(stride);
        let records = segment / stride;
        let segments = bytes / (records * stride);
        if segments < u64::from(MIN_SEGMENTS) {
            return Err(StoreError::Setting { field: "disk size", value: bytes, must: "room for 8 blocks or more" });
        }
        let most = |count: u64| u32::try_from(count).unwrap_or(u32::MAX);
        Ok(DiskConfig { segments: most(segments), records: most(records) })
    }

    /// Bytes of a segment.
    pub fn segment_bytes(&self, shape: &Shape) -> u64 {
        u64::from(self.records) * shape.stride() as u64
    }
}

impl StoreConfig {
    /// A store of these sizes with default settings otherwise.
    pub fn new(shape: Shape, identity: Identity, buffers: u32, disk: Option<DiskConfig>) -> StoreConfig {
        let (policy, limits) = (Policy::default(), StoreLimits::default());
        StoreConfig { shape, identity, buffers, disk, object: None, policy, min_uses: 1, sample: None, limits }
    }

    /// Ok when the settings can work.
    pub fn check(&self) -> Result<(), StoreError> {
        let limits = &self.limits;
        let least = if self.disk.is_some() { MOVING + 2 } else { 1 };
        let disk = self.disk.unwrap_or(DiskConfig { segments: MIN_SEGMENTS, records: 1 });
        for (field, value, least, must) in [
            ("buffers", self.buffers, least, "4 or more with a disk, else 1 or more"),
            ("disk segments", disk.segments, MIN_SEGMENTS, "8 or more"),
            ("records of a segment", disk.records, 1, "1 or more"),
            ("limit of tickets", limits.tickets, 1, "1 or more"),
            ("limit of reads", limits.reads, 1, "1 or more"),
            ("limit of writes", limits.writes, 1, "1 or more"),
            ("limit of scans", limits.scans, 1, "1 or more"),
            ("limit of fetches", limits.fetches, 1, "1 or more"),
            ("limit of uploads", limits.uploads, 1, "1 or more"),
            ("limit of removals", limits.removals, 1, "1 or more"),
        ] {
            if value < least {
                return Err(StoreError::Setting { field, value: value.into(), must });
            }
        }
        Ok(())
    }
}
