//! What a KV store loads: a pool in host memory for the KV of a model, and no model.

use std::sync::Arc;

use baton_engine::{Batch, ModelRunner, RunError};
use baton_grammar::Grammars;
use baton_types::TokenOut;

use crate::achieved::Costs;
use crate::load::{Ready, open_model};
use crate::plan::{Place, Plan, plan};
use crate::{WorkerConfig, WorkerError, pool};

/// Computes nothing. A worker without prompts plans no steps.
struct NoModel;

impl ModelRunner for NoModel {
    fn launch(&mut self, _: &Batch<'_>, _: &mut dyn FnMut(u32)) -> Result<(), RunError> {
        Err(RunError("this process has no model".to_owned()))
    }

    fn collect(&mut self, _: &Batch<'_>, _: &mut Vec<TokenOut>) -> Result<(), RunError> {
        Err(RunError("this process has no model".to_owned()))
    }
}

/// A pool for KV of the model, which is opened and not loaded. `computed_by`: the backend of the workers that compute this KV.
///
/// # Errors
/// The model cannot be found or read, a setting does not fit it, or there is no memory for the pool.
pub fn load_pool(config: &WorkerConfig, computed_by: String) -> Result<Ready, WorkerError> {
    let model = open_model(config)?;
    let Plan { geometry, engine, .. } = plan(config, &model, Place::Host)?;
    let (pool, _) = pool::on_host(&geometry)?;
    let token = geometry.layout.block_bytes_all_groups() / u64::from(geometry.layout.block_size);
    let vocab = model.config().vocab_size;
    Ok(Ready {
        runner: Box::new(NoModel),
        backend: computed_by,
        vocab,
        grammars: Arc::new(Grammars::new(model.tokenizer(), vocab)),
        geometry,
        pool,
        engine,
        name: model.name().to_owned(),
        costs: Costs::of(&model, config, token, false),
        gpus: Vec::new(),
    })
}
