//! Typed access to the keys of GGUF metadata or of a JSON file. Every error names the file and the key.

use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::ModelFileError;

/// The scalar keys of one file, or of one section of it.
#[derive(Clone, Debug)]
pub struct Keys {
    path: PathBuf,
    /// Prefix of a key in messages.
    prefix: String,
    values: Map<String, Value>,
}

impl Keys {
    /// The keys of a file.
    pub fn new(path: &Path, values: Map<String, Value>) -> Keys {
        Keys { path: path.to_owned(), prefix: String::new(), values }
    }

    /// Reads a JSON file whose top level is an object.
    pub fn read_json(path: &Path) -> Result<Keys, ModelFileError> {
        Keys::parse_json(path, &std::fs::read(path).map_err(ModelFileError::io(path))?)
    }

    /// The keys of a JSON text; `path` is the file that errors name.
    pub fn parse_json(path: &Path, text: &[u8]) -> Result<Keys, ModelFileError> {
        match serde_json::from_slice(text) {
            Ok(Value::Object(values)) => Ok(Keys::new(path, values)),
            Ok(_) => Err(ModelFileError::malformed(path, "JSON", "the top level is not an object")),
            Err(e) => Err(ModelFileError::malformed(path, "JSON", e)),
        }
    }

    /// The nested object under `key`. A null value counts as absent, in this and all other methods.
    pub fn section(&self, key: &str) -> Result<Option<Keys>, ModelFileError> {
        let values = self.opt::<Map<String, Value>>(key)?;
        Ok(values.map(|values| Keys { path: self.path.clone(), prefix: format!("{}{key}.", self.prefix), values }))
    }

    /// The flat keys that begin with `family.`.
    pub fn family(&self, family: &str) -> Keys {
        let prefix = format!("{}{family}.", self.prefix);
        let strip = |(key, value): (&String, &Value)| Some((key.strip_prefix(&prefix)?.to_owned(), value.clone()));
        Keys { path: self.path.clone(), values: self.values.iter().filter_map(strip).collect(), prefix }
    }

    /// The value of `key`, if it is there; an error if it has another type.
    pub fn opt<T: DeserializeOwned>(&self, key: &str) -> Result<Option<T>, ModelFileError> {
        match self.values.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => T::deserialize(value).map(Some).map_err(|e| self.error(key, e.to_string())),
        }
    }

    /// The value of `key`, or `default` where it is absent.
    pub fn or<T: DeserializeOwned>(&self, key: &str, default: T) -> Result<T, ModelFileError> {
        Ok(self.opt(key)?.unwrap_or(default))
    }

    /// The value of `key`; an error if it is absent.
    pub fn need<T: DeserializeOwned>(&self, key: &str) -> Result<T, ModelFileError> {
        self.opt(key)?.ok_or_else(|| self.error(key, "is missing"))
    }

    /// An error unless `key` is absent, or one of the values that switch the feature off.
    pub fn must_be_off(&self, key: &str, what: &str) -> Result<(), ModelFileError> {
        match self.values.get(key) {
            None | Some(Value::Null) | Some(Value::Bool(false)) => Ok(()),
            Some(Value::Number(n)) if n.as_f64() == Some(0.0) => Ok(()),
            Some(value) => Err(self.error(key, format!("is {value}, but {what} is not supported"))),
        }
    }

    /// An error about `key`.
    pub fn error(&self, key: &str, problem: impl Into<String>) -> ModelFileError {
        ModelFileError::config(&self.path, &format!("{}{key}", self.prefix), problem)
    }

    /// The file that the keys are from.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(json: Value) -> Keys {
        Keys::new(Path::new("config.json"), json.as_object().cloned().unwrap_or_default())
    }

    #[test]
    fn complaints_name_file_and_full_key() {
        let keys = keys(serde_json::json!({"a.b": -1, "s": {"x": "no"}, "n": null, "on": 3}));
        let text = |e: ModelFileError| e.to_string();
        assert!(keys.family("a").need::<u32>("b").map_err(text).unwrap_err().starts_with("config.json: a.b: "));
        let section = keys.section("s").unwrap().unwrap();
        assert!(section.opt::<f32>("x").map_err(text).unwrap_err().contains("s.x"));
        assert_eq!(keys.need::<u32>("n").map_err(text).unwrap_err(), "config.json: n: is missing");
        assert_eq!(keys.or("n", 7).unwrap(), 7);
        assert!(keys.must_be_off("on", "a mixture of experts").is_err());
        assert!(keys.must_be_off("off", "a mixture of experts").is_ok());
    }
}
