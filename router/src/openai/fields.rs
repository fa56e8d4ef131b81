//! Fields that would change the answer and that are not supported: refused by name instead of ignored.

use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::error::RequestError;

/// A field and the values that mean "nothing special". `null` and an absent field always do.
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

fn zero(value: &Value) -> bool {
    value.as_f64() == Some(0.0)
}

fn one(value: &Value) -> bool {
    value.as_f64() == Some(1.0)
}

const REFUSED: [Refused; 35] = {
    const fn field(name: &'static str, harmless: fn(&Value) -> bool) -> Refused {
        Refused { name, harmless }
    }
    [
        field("tools", empty),
        field("tool_choice", |v| *v == json!("none") || *v == json!("auto")),
        field("functions", empty),
        field("function_call", |v| *v == json!("none") || *v == json!("auto")),
        field("response_format", |v| v.get("type") == Some(&json!("text"))),
        field("modalities", |v| *v == json!(["text"])),
        field("audio", never),
        field("web_search_options", never),
        field("echo", off),
        field("suffix", |v| *v == json!("")),
        field("best_of", one),
        field("use_beam_search", off),
        field("length_penalty", one),
        field("early_stopping", off),
        field("min_tokens", zero),
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
        field("structured_outputs", empty),
        field("guided_json", never),
        field("guided_regex", never),
        field("guided_choice", never),
        field("guided_grammar", never),
        field("grammar", never),
    ]
};

/// Only the refused fields of a request; all others are skipped without being kept.
#[derive(Debug, Default)]
pub(crate) struct RefusedFields(Map<String, Value>);

impl<'de> Deserialize<'de> for RefusedFields {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl<'de> serde::de::Visitor<'de> for Visitor {
            type Value = RefusedFields;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<RefusedFields, A::Error> {
                let mut found = Map::new();
                while let Some(key) = map.next_key::<String>()? {
                    if REFUSED.iter().any(|f| f.name == key) {
                        found.insert(key, map.next_value()?);
                    } else {
                        map.next_value::<serde::de::IgnoredAny>()?;
                    }
                }
                Ok(RefusedFields(found))
            }
        }
        from.deserialize_map(Visitor)
    }
}

impl RefusedFields {
    /// Ok when none of them asks for anything; otherwise the first that does.
    pub fn check(&self) -> Result<(), RequestError> {
        for field in &REFUSED {
            let asks = self.0.get(field.name).filter(|v| !v.is_null() && !(field.harmless)(v));
            if asks.is_some() {
                let wrong = format!("{} is not supported; leave it out", field.name);
                return Err(RequestError::invalid(field.name, wrong).code("unsupported_parameter"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_would_change_the_answer_is_refused_by_name() {
        let check = |body: Value| serde_json::from_value::<RefusedFields>(body).unwrap().check();
        let harmless = json!({"tools": [], "echo": false, "best_of": 1, "response_format": {"type": "text"},
            "tool_choice": "auto", "suffix": null, "min_tokens": 0, "user": "me", "store": true, "metadata": {"a": 1}});
        assert_eq!(check(harmless), Ok(()));
        for (name, value) in [
            ("tools", json!([{"type": "function"}])),
            ("response_format", json!({"type": "json_object"})),
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
}
