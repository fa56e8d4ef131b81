//! The block tables of a request's prompt, as its workers know them now.

use baton_proto::v1::{ColumnsRequest, ColumnsResponse, Prefix};
use baton_types::WorkerId;
use serde_json::{Value, json};

use crate::models::Models;
use crate::trace::{Kv, Trace};
use crate::worker::Workers;

/// What is asked of a worker to find these tokens. One more is needed than is found.
pub(super) fn prefix(tokens: &[u32], salt: &str) -> Prefix {
    let tokens = tokens.iter().copied().chain([0]).collect();
    Prefix { request_id: "page".to_owned(), tokens, cache_salt: salt.to_owned(), ..Prefix::default() }
}

/// The choices of a request, with the blocks that hold their prompts.
pub(super) async fn choices(models: &Models, request: &str) -> Vec<Value> {
    let mut told = Vec::new();
    for served in models.all() {
        for trace in served.workers.traces().choices(request) {
            let mut choice = trace.whole();
            choice["blocks"] = blocks(&served.workers, &trace).await;
            told.push(choice);
        }
    }
    told
}

/// Of each of its workers: the prompt's blocks that are in the prefix cache, in order. A prompt's last block is there if it is full.
async fn blocks(workers: &Workers, trace: &Trace) -> Value {
    let Some(Kv { tokens, salt }) = trace.kv() else { return Value::Null };
    let shares = trace.shares();
    let at = |worker: Option<WorkerId>| async move {
        let asked = ColumnsRequest { prefix: Some(prefix(tokens, salt)), only_blocks: true, ..Default::default() };
        let told = workers.columns(worker?, asked).await;
        let told = told.map(|ColumnsResponse { blocks, .. }| blocks);
        Some(
            json!({"worker": worker?.to_string(), "blocks": told.as_ref().ok(), "error": told.as_ref().err().map(|status| status.message())}),
        )
    };
    let (prefill, decode) = futures::join!(at(shares.prefill), at(shares.decode));
    json!({"block_size": workers.block_size(), "prefill": prefill, "decode": decode})
}
