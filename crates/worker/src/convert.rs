//! Converts KV from this worker's element type to another worker's. Joins the kernels, which round, and the transfer, which moves.

use baton_kernels::{KvSlice, convert_kv};
use baton_transfer::{Conversion, Converter};

/// A converter that rounds as a store does: the target pool holds the same bytes as if this pool's values had been stored there.
pub fn kv_converter() -> Converter {
    Converter::new(|conversion| {
        let Conversion { from, to, block_size, head_dim, source, target } = conversion;
        convert_kv(KvSlice { block_size, head_dim }, from, to, source, target);
    })
}
