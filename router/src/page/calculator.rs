//! The page's calculator: the same function as `baton model estimate`, for a shape by name, a model served here, or a `config.json`.

use std::path::Path;

use baton_model_text::{
    Device, Estimate, EstimateOptions, Family, Keys, LINKS, ModelConfig, ModelFileError, RANDOM_PREFIX, RandomShape,
    WeightKind, estimate,
};
use baton_types::KvDtype;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::models::Models;

/// What the page asks. What is absent has a worker's default.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Asked {
    /// A shape, or a model that is served here.
    model: Option<String>,
    /// A whole `config.json`, in place of `model`.
    config: Option<Map<String, Value>>,
    kv_type: Option<String>,
    weights: Option<String>,
    block_size: Option<u32>,
    context: Option<u32>,
    prompt: Option<u32>,
    tp: Option<u32>,
    kv_memory: Option<u64>,
    gpu_memory: Option<u64>,
    gpu_memory_fraction: Option<f64>,
    link: Option<f64>,
}

/// What can be asked: the shapes and types there are, and the models served here with their configurations.
pub(super) fn known(models: &Models) -> Value {
    let words = |all: &[&str]| json!(all);
    let served = models.all().map(|served| json!({"name": served.model.id(), "config": served.model.config()}));
    json!({
        "served": served.collect::<Vec<_>>(),
        "shapes": RandomShape::names().collect::<Vec<_>>(),
        "kv_types": words(&KvDtype::ALL.map(KvDtype::as_str)),
        "weights": words(&WeightKind::ALL.map(WeightKind::as_str)),
        "links": LINKS.map(|link| json!({"name": link.name, "bytes_per_second": link.bytes_per_second})),
    })
}

/// Answers the page; the error says which field is wrong.
pub(super) fn answer(asked: Asked, models: &Models) -> Result<Estimate, String> {
    let options = options(&asked)?;
    let config = configuration(asked, models)?;
    estimate(&config, &options).map_err(|error| error.to_string())
}

fn configuration(asked: Asked, models: &Models) -> Result<ModelConfig, String> {
    if let Some(keys) = asked.config {
        let read = |keys| ModelConfig::of_family(&Family::of_config(keys)?);
        return read(Keys::new(Path::new("config.json"), keys)).map_err(|error: ModelFileError| error.to_string());
    }
    let name = asked.model.ok_or("model: name a shape or a served model, or give its config")?;
    if let Some(served) = models.all().find(|served| served.model.names().any(|own| own == name)) {
        return served
            .model
            .config()
            .cloned()
            .ok_or_else(|| format!("model: the configuration of {name:?} is not known"));
    }
    // Only names: a path would be a file of this machine.
    if !RandomShape::names().any(|shape| shape == name) {
        let known = RandomShape::names().collect::<Vec<_>>().join(", ");
        return Err(format!("model: {name:?} is not served here, and not one of {known}"));
    }
    let shape = RandomShape::parse(&format!("{RANDOM_PREFIX}{name}")).map_err(|error| error.to_string())?;
    let shape = shape.ok_or("model: no shape")?;
    ModelConfig::of_family(shape.family()).map_err(|error| error.to_string())
}

fn options(asked: &Asked) -> Result<EstimateOptions, String> {
    let usual = EstimateOptions::default();
    let device = match (asked.gpu_memory, asked.kv_memory) {
        (Some(memory), _) => Device::Gpu { memory, fraction: asked.gpu_memory_fraction.unwrap_or(0.9) },
        (None, Some(bytes)) => Device::Pool(bytes),
        (None, None) => usual.device,
    };
    let kv_type = asked.kv_type.as_deref().map(str::parse).transpose();
    let weights = asked.weights.as_deref().map(str::parse).transpose();
    Ok(EstimateOptions {
        kv_type: kv_type.map_err(|wrong| format!("kv_type: {wrong}"))?.unwrap_or(usual.kv_type),
        weights: weights.map_err(|wrong| format!("weights: {wrong}"))?.unwrap_or(usual.weights),
        block_size: asked.block_size.unwrap_or(usual.block_size),
        ranks: asked.tp.unwrap_or(usual.ranks),
        device,
        context: asked.context,
        prompt: asked.prompt.unwrap_or(usual.prompt),
        link: asked.link,
        ..usual
    })
}
