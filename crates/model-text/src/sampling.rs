//! How a model's makers advise to sample from it, where a request does not say: `generation_config.json` of a directory, `general.sampling.*`
//! of a GGUF file, or the catalogue.

use std::path::Path;

use baton_types::SamplingParams;

use crate::ModelFileError;
use crate::keys::Keys;

/// Values for fields that a request leaves out; None: the API's own default.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct SamplingDefaults {
    /// See [`SamplingParams::temperature`].
    pub temperature: Option<f32>,
    /// See [`SamplingParams::top_p`].
    pub top_p: Option<f32>,
    /// See [`SamplingParams::top_k`].
    pub top_k: Option<u32>,
    /// See [`SamplingParams::min_p`].
    pub min_p: Option<f32>,
    /// See [`SamplingParams::repetition_penalty`].
    pub repetition_penalty: Option<f32>,
}

impl SamplingDefaults {
    /// Those in a directory's `generation_config.json`, if it has one.
    pub(crate) fn of_directory(dir: &Path) -> Result<SamplingDefaults, ModelFileError> {
        let path = dir.join("generation_config.json");
        match path.exists() {
            true => SamplingDefaults::read(&Keys::read_json(&path)?, "", ["temperature", "repetition_penalty"]),
            false => Ok(SamplingDefaults::default()),
        }
    }

    /// Those in a GGUF file's header.
    pub(crate) fn of_gguf(keys: &Keys) -> Result<SamplingDefaults, ModelFileError> {
        SamplingDefaults::read(keys, "general.sampling.", ["temp", "penalty_repeat"])
    }

    fn read(keys: &Keys, prefix: &str, [temperature, penalty]: [&str; 2]) -> Result<SamplingDefaults, ModelFileError> {
        let number = |name: &str| keys.opt::<f32>(&format!("{prefix}{name}"));
        let top_k = keys.opt::<i64>(&format!("{prefix}top_k"))?;
        let found = SamplingDefaults {
            temperature: number(temperature)?,
            top_p: number("top_p")?,
            // Negative: off.
            top_k: top_k.map(|k| u32::try_from(k.max(0)).unwrap_or(u32::MAX)),
            min_p: number("min_p")?,
            repetition_penalty: number(penalty)?,
        };
        let checked = found.over(SamplingParams::default()).validate();
        checked.map(|()| found).map_err(|e| keys.error(&format!("{prefix}{}", e.field), e.to_string()))
    }

    /// `params` with these values where there are any.
    pub fn over(self, params: SamplingParams) -> SamplingParams {
        SamplingParams {
            temperature: self.temperature.unwrap_or(params.temperature),
            top_p: self.top_p.unwrap_or(params.top_p),
            top_k: self.top_k.unwrap_or(params.top_k),
            min_p: self.min_p.unwrap_or(params.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(params.repetition_penalty),
            ..params
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_says_what_it_says_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(SamplingDefaults::of_directory(dir.path()).unwrap(), SamplingDefaults::default());
        let write = |text: &str| {
            std::fs::write(dir.path().join("generation_config.json"), text).unwrap();
            SamplingDefaults::of_directory(dir.path())
        };
        let found =
            write(r#"{"temperature": 0.7, "top_k": 20, "do_sample": true, "eos_token_id": [1, 2], "top_p": null}"#);
        let want = SamplingDefaults { temperature: Some(0.7), top_k: Some(20), ..SamplingDefaults::default() };
        assert_eq!(found.unwrap(), want);
        let params = want.over(SamplingParams { top_k: 5, top_p: 0.5, ..SamplingParams::default() });
        assert_eq!((params.temperature, params.top_k, params.top_p), (0.7, 20, 0.5));
        assert_eq!(write(r#"{"top_k": -1}"#).unwrap().top_k, Some(0));
        // I8
        for (text, field) in [(r#"{"top_p": 1.5}"#, "top_p"), (r#"{"temperature": "hot"}"#, "temperature")] {
            let error = write(text).unwrap_err().to_string();
            assert!(error.contains("generation_config.json") && error.contains(field), "{error}");
        }
    }
}
