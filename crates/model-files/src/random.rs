//! Models without a download: `random:NAME`, `random:NAME:SEED` or `random:PATH/config.json`, a shape with seeded weights.
//!
//! They serve to measure speed, which depends on shapes and not on the weights' values, and for tests. The same name makes the same
//! model on every host and backend. In everything else it is like a model from files: tensors by name, tokenizer, chat template,
//! fingerprint.

use baton_model_text::{RANDOM_PREFIX, RandomShape};
use baton_types::hash_bytes;

use crate::model::Model;
use crate::weights::RandomWeights;
use crate::{ModelConfig, ModelFileError};

/// Most weights of a model: more than any model here has, but few enough that their number times a few bytes fits in 64 bits.
const MAX_PARAMETERS: u64 = 1 << 42;

/// A shape with its seed, and its configuration, which together define a random model.
#[derive(Clone, Debug)]
pub struct RandomModel {
    shape: RandomShape,
    config: ModelConfig,
}

impl RandomModel {
    /// Parses `spec`; None if it does not name a random model.
    ///
    /// # Errors
    /// The shape or the seed is invalid, or the configuration does not work.
    pub fn parse(spec: &str) -> Result<Option<RandomModel>, ModelFileError> {
        RandomShape::parse(spec)?.map(RandomModel::of).transpose()
    }

    fn of(shape: RandomShape) -> Result<RandomModel, ModelFileError> {
        let config = ModelConfig::of_family(shape.family())?;
        // Sizes are bounded: a tensor has fewer than 2^48 elements and a model fewer than 2^15 tensors, so the sum fits.
        let parameters: u64 = RandomWeights::new(&config, shape.seed()).facts().map(|tensor| tensor.elements()).sum();
        if parameters > MAX_PARAMETERS {
            let problem = format!("together they have {parameters} weights, more than {MAX_PARAMETERS}");
            return Err(ModelFileError::config(shape.family().keys.path(), "sizes", problem));
        }
        Ok(RandomModel { shape, config })
    }

    /// Its configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The names of the known shapes.
    pub fn shapes() -> impl Iterator<Item = &'static str> {
        RandomShape::names()
    }

    /// The model; its weights are made when they are loaded.
    pub fn open(&self) -> Result<Model, ModelFileError> {
        let (text, seed) = (self.shape.open()?, self.shape.seed());
        let weights = RandomWeights::new(&self.config, seed);
        // Debug prints every field, and prints floats so that they read back the same.
        let facts = format!("{RANDOM_PREFIX}{seed} {:?}", self.config);
        let fingerprint = hash_bytes(0, facts.as_bytes());
        Ok(Model::random(text, self.config.clone(), fingerprint, weights))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{TensorName, inspect};
    use baton_model_text::ChatMessage;

    fn open(spec: &str) -> Model {
        RandomModel::parse(spec).unwrap().unwrap().open().unwrap()
    }

    #[test]
    fn shapes_have_the_parameters_of_the_models_they_are_named_after() {
        for (name, parameters) in [
            ("llama-3.1-8b", 8_030_261_248),
            ("llama-3.1-70b", 70_553_706_496),
            ("llama-3.2-1b", 1_235_814_400),
            ("qwen2.5-1.5b", 1_543_714_304),
            ("qwen3-8b", 8_190_735_360),
            ("mistral-7b", 7_248_023_552),
            ("gemma-3-270m", 268_098_176),
            ("smollm2-135m", 134_515_008),
        ] {
            // No weights are made: those of the larger models would not fit in memory here.
            let facts = inspect(&open(&format!("random:{name}")));
            assert_eq!(facts.parameters, parameters, "{name}");
            assert_eq!(facts.bytes, 2 * parameters, "{name}");
        }
        assert_eq!(RandomModel::shapes().count(), 9, "each but tiny is above");
        assert_eq!(inspect(&open("random:gemma-3-270m")).windowed_layers, 15);
    }

    #[test]
    fn the_fingerprint_follows_from_shape_and_seed() {
        let of = |spec: &str| open(spec).fingerprint();
        assert_eq!(of("random:tiny"), of("random:tiny:0"));
        assert_ne!(of("random:tiny"), of("random:tiny:1"));
        assert_ne!(of("random:tiny"), of("random:smollm2-135m"));
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.json");
        std::fs::write(&path, include_str!("../../model-text/src/shapes/tiny.json")).unwrap();
        let (spec, name) = (format!("random:{}:7", path.display()), "random:tiny:7");
        assert_eq!(of(&spec), of(name), "the same shape by another name");
        let (file, named) = (open(&spec), open(name));
        let embedding = |model: &Model| model.tensor(crate::TensorName::Embedding).unwrap().bytes().into_owned();
        assert_eq!(embedding(&file), embedding(&named));
    }

    /// Weights depend on the name of their tensor. Renaming one must not change them, and the fingerprint would not show it.
    #[test]
    fn weights_are_those_they_have_always_been() {
        use crate::LayerTensor::{Down, FfnNorm, QBias};
        let hash = |model: &Model, name| hash_bytes(0, &model.tensor(name).unwrap().bytes());
        let tiny = open("random:tiny:3");
        let of_layer = [Down, FfnNorm].map(|tensor| hash(&tiny, TensorName::Layer(1, tensor)));
        assert_eq!(
            (hash(&tiny, TensorName::Embedding), of_layer),
            (0x9c50_c7da_8379_2396, [0xeaea_28db_dfce_7910, 0x6c0f_87f4_80f3_97d4])
        );
        assert_eq!(hash(&open("random:qwen2.5-1.5b"), TensorName::Layer(2, QBias)), 0xe8e0_92f3_1389_768a);
    }

    #[test]
    fn a_chat_becomes_bytes_and_says_who_speaks() {
        let model = open("random:tiny");
        let messages = [ChatMessage::new("user", "Grüße")];
        let text = model.chat_template().unwrap().render(&messages, None, true).unwrap();
        assert_eq!(text, "user: Grüße\nassistant: ");
        let ids = model.tokenizer().encode_chat(&text).unwrap();
        assert_eq!(model.tokenizer().decode(&ids, true).unwrap(), text);
    }

    #[test]
    fn what_cannot_be_made_is_refused_with_what_can() {
        let error = |spec: &str| RandomModel::parse(spec).unwrap_err().to_string();
        assert!(RandomModel::parse("smollm2").unwrap().is_none());
        let said = error("random:llama-3.1-8");
        assert!(said.contains("did you mean random:llama-3.1-8b?") && said.contains("config.json"), "{said}");
        assert!(error("random:").contains("tiny"));
        assert!(error("random:tiny:-1").contains("seed \"-1\""));
        let dir = tempfile::tempdir().unwrap();
        let file = |json: serde_json::Value| {
            let path = dir.path().join("config.json");
            std::fs::write(&path, json.to_string()).unwrap();
            error(&format!("random:{}", path.display()))
        };
        let config = |vocab: u32, wide: u32| {
            file(serde_json::json!({
                "model_type": "llama", "vocab_size": vocab, "hidden_size": wide, "intermediate_size": wide,
                "num_hidden_layers": 1000, "num_attention_heads": 8, "head_dim": 64, "max_position_embeddings": 64,
            }))
        };
        assert!(config(100, 64).contains("vocab_size: is 100; a model without a tokenizer's file needs at least 258"));
        assert!(config(1000, 1 << 22).contains("weights, more than"));
        assert!(file(serde_json::json!({"model_type": "mamba"})).contains("mamba"));
    }
}
