//! Every architecture in f32 against Hugging Face transformers: logits within 0.001, the same greedy tokens.

use anyhow::ensure;
use baton_tests::local::{Local, Options};
use baton_tests::{references, tiny};
use baton_types::{KvDtype, SamplingParams};

/// Largest logit difference allowed; a token may differ only where the reference's lead is smaller than this.
const TOLERANCE: f32 = 1e-3;

#[test]
fn tiny_models_agree_with_transformers() -> anyhow::Result<()> {
    let reference = references::tiny()?;
    let directory = tempfile::tempdir()?;
    let (mut largest, mut sum, mut count) = (0f32, 0f64, 0u64);
    for (model, wanted) in tiny::configs()?.iter().zip(&reference.models) {
        assert_eq!(model.name, wanted.name);
        let path = directory.path().join(&model.name);
        model.write(&path)?;
        let mut local = Local::open(&path, Options { kv: KvDtype::F32, chunk: 7, budget: 64, ..Options::default() })?;
        for prompt in &wanted.prompts {
            let params = SamplingParams {
                temperature: 0.0,
                max_tokens: prompt.output_ids.len() as u32,
                ..SamplingParams::default()
            };
            let mut worst = 0f32;
            let answers = local.run(&[(prompt.prompt_ids.clone(), params)], &mut |_, index, logits| {
                let position = prompt.prompt_ids.len() + index as usize - 1;
                for row in prompt.logits.iter().filter(|row| row.position == position) {
                    for (ours, theirs) in logits.iter().zip(&row.values) {
                        let difference = (ours - theirs).abs();
                        worst = worst.max(difference);
                        sum += difference as f64;
                        count += 1;
                    }
                }
                None
            })?;
            let ids: Vec<u32> = answers[0].iter().map(|t| t.id).collect();
            largest = largest.max(worst);
            ensure!(worst < TOLERANCE, "{}: logits differ by {worst}", model.name);
            let near_tie = prompt.smallest_gap < TOLERANCE;
            ensure!(ids == prompt.output_ids || near_tie, "{}: {ids:?} != {:?}", model.name, prompt.output_ids);
        }
    }
    ensure!(count > 10_000, "only {count} logits compared");
    println!("{count} logits: largest difference {largest:.2e}, mean {:.2e}", sum / count as f64);
    Ok(())
}
