//! Identifiers. Each is a newtype so that one cannot be passed for another.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Most bytes of a cache salt. The router checks clients' salts, and workers check routers' salts.
pub const MAX_CACHE_SALT: usize = 256;

/// Longest time, in seconds, for which a request may ask for its KV to be kept: one day.
pub const MAX_CACHE_KEEP_SECONDS: u32 = 86_400;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty), $prefix:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default, Serialize, Deserialize)]
        pub struct $name(pub $inner);
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "{:x}"), self.0)
            }
        }
    };
}

id!(
    /// One process of one worker. Random per start: a worker that restarts on the same address is another worker.
    WorkerId(u64),
    "w"
);
id!(
    /// One reservation of decode blocks for one handoff. A worker never reuses an epoch, and a write under an old one is refused.
    Epoch(u64),
    "e"
);
id!(
    /// One block of a pool, in its layer group.
    BlockId(u32),
    "b"
);
id!(
    /// One sequence inside one engine.
    SeqId(u64),
    "s"
);

/// A client's request. The same in every log line and trace of the request.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default, Serialize, Deserialize)]
pub struct RequestId(pub String);

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
