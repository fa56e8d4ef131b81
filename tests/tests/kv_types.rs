//! What rounding K and V costs: logits over each KV type against those over an f32 pool, on every tiny model. The bounds are a
//! little above what is measured, so a type that loses more than it must is caught.

use anyhow::ensure;
use baton_model_files::Model;
use baton_tests::local::{Local, Options};
use baton_tests::tiny;
use baton_types::{KvDtype, SamplingParams};

/// Tokens of the prompt and of the answer.
const PROMPT: usize = 70;
const ANSWER: u32 = 30;

/// Root mean square of the logits' errors over all tiny models, in units of the logits' own spread, at most.
fn bound(dtype: KvDtype) -> f64 {
    match dtype {
        KvDtype::F32 => 0.0,
        KvDtype::F16 => 2.5e-3,
        KvDtype::Bf16 => 1.6e-2,
        KvDtype::Q8 => 5e-2,
        KvDtype::Fp8 => 2e-1,
        KvDtype::Int4 => 4.5e-1,
    }
}

/// Logits of every step, the same tokens being taken whatever the logits say.
fn logits(model: &Model, kv: KvDtype) -> anyhow::Result<Vec<f32>> {
    let vocab = model.config().vocab_size;
    let token = |i: u32| i.wrapping_mul(2_654_435_761) % vocab;
    let prompt: Vec<u32> = (0..PROMPT as u32).map(token).collect();
    let params = SamplingParams { temperature: 0.0, max_tokens: ANSWER, ..SamplingParams::default() };
    let mut all = Vec::new();
    let mut local = Local::new(model, Options { kv, ..Options::default() })?;
    local.run(&[(prompt, params)], &mut |_, index, logits| {
        all.extend_from_slice(logits);
        Some(token(PROMPT as u32 + index))
    })?;
    ensure!(all.len() == ANSWER as usize * vocab as usize, "{} logits", all.len());
    Ok(all)
}

#[test]
fn each_type_loses_no_more_than_it_must() -> anyhow::Result<()> {
    let directory = tempfile::tempdir()?;
    let (mut errors, mut spread) = ([0.0f64; KvDtype::ALL.len()], 0.0f64);
    for config in tiny::configs()? {
        let path = directory.path().join(&config.name);
        config.write(&path)?;
        let model = Model::open(&path)?;
        let exact = logits(&model, KvDtype::F32)?;
        let count = exact.len() as f64;
        let mean = exact.iter().map(|&x| x as f64).sum::<f64>() / count;
        spread += exact.iter().map(|&x| (x as f64 - mean).powi(2)).sum::<f64>() / count;
        for (dtype, error) in KvDtype::ALL.into_iter().zip(&mut errors) {
            let rounded = logits(&model, dtype)?;
            *error += exact.iter().zip(&rounded).map(|(&a, &b)| (a as f64 - b as f64).powi(2)).sum::<f64>() / count;
        }
    }
    let errors = errors.map(|error| (error / spread).sqrt());
    for (dtype, error) in KvDtype::ALL.into_iter().zip(errors) {
        println!("{dtype:?}: logits off by {error:.2e} of their spread, at most {:.1e}", bound(dtype));
    }
    for (dtype, error) in KvDtype::ALL.into_iter().zip(errors) {
        ensure!(error <= bound(dtype), "{dtype:?}: logits off by {error:.2e} of their spread");
        // Far below the bound, the type would not be what it says.
        ensure!(error >= bound(dtype) / 20.0, "{dtype:?}: logits off by only {error:.2e} of their spread");
    }
    Ok(())
}
