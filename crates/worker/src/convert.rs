//! KV of this worker's type written in another worker's: joins the kernels, which round, and the transfer, which moves.

use baton_kernels::{KvSlice, convert_kv};
use baton_transfer::{Conversion, Converter};

/// Rounds as a store does, so that a pool of another type holds what storing this pool's values there would give.
pub fn kv_converter() -> Converter {
    Converter::new(|conversion| {
        let Conversion { from, to, block_size, head_dim, source, target } = conversion;
        convert_kv(KvSlice { block_size, head_dim }, from, to, source, target);
    })
}
