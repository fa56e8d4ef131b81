//! Request fields that the API types do not read:
//! - Fields that would change the answer are refused by name instead of ignored.
//! - Fields that look like a misspelt field are refused too.
//! - All others are new or have no effect here, and are skipped.

use baton_runtime::config::nearest_within;
use serde::de::value::Error as NamesError;
use serde::de::{Error as _, Visitor};
use serde::{Deserialize, Deserializer, forward_to_deserialize_any};
use serde_json::{Map, Value, json};

use crate::error::RequestError;

/// A field that is refused unless its value is harmless. `null` and an absent field are always harmless.
struct Refused {
    name: &'static str,
    harmless: fn(&Value) -> bool,
}

fn never(_: &Value) -> bool {
    false
}

fn empty(value: &Value) -> bool {
    matches!(value, Value::Array(list) if list.is_empty()) || matches!(value, Value::Object(map) if map.is_empty())
}

fn off(value: &Value) -> bool {
    *value == json!(false)
}

fn on(value: &Value) -> bool {
    *value == json!(true)
}

fn one(value: &Value) -> bool {
    value.as_f64() == Some(1.0)
}

const REFUSED: [Refused; 28] = {
    const fn field(name: &'static str, harmless: fn(&Value) -> bool) -> Refused {
        Refused { name, harmless }
    }
    [
        field("tools", empty),
        field("tool_choice", |v| *v == json!("none") || *v == json!("auto")),
        field("functions", empty),
        field("function_call", |v| *v == json!("none") || *v == json!("auto")),
        field("modalities", |v| *v == json!(["text"])),
        field("audio", never),
        field("web_search_options", never),
        field("echo", off),
        field("suffix", |v| *v == json!("")),
        field("best_of", one),
        field("use_beam_search", off),
        field("length_penalty", one),
        field("early_stopping", off),
        field("prompt_logprobs", never),
        field("bad_words", empty),
        field("allowed_token_ids", empty),
        field("logits_processors", empty),
        field("include_stop_str_in_output", off),
        field("skip_special_tokens", on),
        field("spaces_between_special_tokens", on),
        field("truncate_prompt_tokens", never),
        field("add_generation_prompt", on),
        field("continue_final_message", off),
        field("add_special_tokens", on),
        field("documents", empty),
        field("chat_template", never),
        field("chat_template_kwargs", empty),
        field("grammar", never),
    ]
};

/// Fields that clients send and that have no effect here: they concern billing, speed, or features this model lacks.
const HARMLESS: [&str; 13] = [
    "guided_decoding_backend",
    "kv_transfer_params",
    "metadata",
    "parallel_tool_calls",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_retention",
    "reasoning_effort",
    "request_id",
    "safety_identifier",
    "store",
    "user",
    "verbosity",
];

/// A name within this many edits of a known field counts as misspelt.
const MISSPELT: usize = 2;
/// Maximum unlisted names that are compared with known ones; comparing costs time (I5).
const MAX_UNKNOWN: usize = 64;
const MAX_NAME: usize = 64;

/// The refused fields of a request with their values, and the names of fields that are in no list here. Other values are
/// not kept.
#[derive(Debug, Default)]
pub(crate) struct OtherFields {
    refused: Map<String, Value>,
    unlisted: Vec<String>,
}

impl<'de> Deserialize<'de> for OtherFields {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Fields;
        impl<'de> Visitor<'de> for Fields {
            type Value = OtherFields;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<OtherFields, A::Error> {
                let mut found = OtherFields::default();
                while let Some(key) = map.next_key::<String>()? {
                    if is_refused(&key) {
                        found.refused.insert(key, map.next_value()?);
                        continue;
                    }
                    map.next_value::<serde::de::IgnoredAny>()?;
                    if found.unlisted.len() < MAX_UNKNOWN && key.len() <= MAX_NAME && !HARMLESS.contains(&key.as_str())
                    {
                        found.unlisted.push(key);
                    }
                }
                Ok(found)
            }
        }
        from.deserialize_map(Fields)
    }
}

/// Whether a field is one that may be refused for its value.
pub(crate) fn is_refused(name: &str) -> bool {
    REFUSED.iter().any(|field| field.name == name)
}

impl OtherFields {
    /// Ok when none of these fields asks for anything; otherwise an error for the first that does. `read` lists the fields that
    /// the API types read.
    pub fn check(&self, read: &[&'static [&'static str]]) -> Result<(), RequestError> {
        let is_read = |name: &str| read.iter().any(|fields| fields.contains(&name));
        for field in REFUSED.iter().filter(|f| !is_read(f.name)) {
            let asks = self.refused.get(field.name).filter(|v| !v.is_null() && !(field.harmless)(v));
            if asks.is_some() {
                let wrong = format!("{} is not supported; leave it out", field.name);
                return Err(RequestError::invalid(field.name, wrong).code("unsupported_parameter"));
            }
        }
        let known = || {
            let read = read.iter().copied().flatten().copied();
            read.chain(REFUSED.iter().map(|f| f.name)).chain(HARMLESS)
        };
        for name in self.unlisted.iter().filter(|name| !known().any(|k| k == *name)) {
            if let Some(meant) = nearest_within(name, known(), MISSPELT) {
                let wrong = format!("{name} is not a field of this request; did you mean {meant}?");
                return Err(RequestError::invalid(name.as_str(), wrong).code("unknown_parameter"));
            }
            tracing::debug!(field = name, "a field nobody here knows is skipped");
        }
        Ok(())
    }
}

/// The JSON names of the fields of a struct that derives `Deserialize`; empty for any other type.
pub(crate) fn names<T: for<'de> Deserialize<'de>>() -> &'static [&'static str] {
    let mut names: &'static [&'static str] = &[];
    // Always fails: there is no value, the call only reveals the fields.
    let _ = T::deserialize(Asked(&mut names));
    names
}

/// A deserializer that only notes which fields a struct asks for.
struct Asked<'a>(&'a mut &'static [&'static str]);

impl<'de> Deserializer<'de> for Asked<'_> {
    type Error = NamesError;

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, NamesError> {
        Err(NamesError::custom("no value"))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, NamesError> {
        *self.0 = fields;
        self.deserialize_any(visitor)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit unit_struct
        newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_would_change_the_answer_is_refused_by_name() {
        let check = |body: Value| serde_json::from_value::<OtherFields>(body).unwrap().check(&[]);
        let harmless = json!({"tools": [], "echo": false, "best_of": 1,
            "tool_choice": "auto", "suffix": null, "user": "me", "store": true, "metadata": {"a": 1}});
        assert_eq!(check(harmless), Ok(()));
        for (name, value) in [
            ("tools", json!([{"type": "function"}])),
            ("chat_template_kwargs", json!({"enable_thinking": false})),
            ("echo", json!(true)),
            ("best_of", json!(2)),
            ("audio", json!({})),
            ("logits_processors", json!(["x"])),
        ] {
            let error = check(json!({ name: value })).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(name));
            assert!(error.message.contains(name));
        }
    }

    #[test]
    fn misspelt_fields_are_refused_and_new_ones_skipped() {
        #[derive(Deserialize)]
        #[allow(dead_code)]
        struct Some {
            max_tokens: Option<u32>,
            #[serde(rename = "n")]
            count: Option<u32>,
        }
        let read = names::<Some>();
        assert_eq!(read, ["max_tokens", "n"]);
        assert!(names::<u32>().is_empty());
        let check = |name: &str| serde_json::from_value::<OtherFields>(json!({ name: 1 })).unwrap().check(&[read]);
        for name in ["max_tokens", "n", "user", "reasoning_effort", "some_new_field", "id"] {
            assert_eq!(check(name), Ok(()), "{name}");
        }
        for (name, meant) in [("max_tokns", "max_tokens"), ("Max_tokens", "max_tokens"), ("tool", "tools")] {
            let error = check(name).unwrap_err();
            assert_eq!((error.param.as_deref(), error.code), (Some(name), Some("unknown_parameter")));
            assert!(error.message.ends_with(&format!("did you mean {meant}?")), "{error}");
        }
    }
}
