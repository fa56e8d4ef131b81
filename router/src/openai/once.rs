//! Reads a request's body in one pass.
//!
//! The endpoint's own fields, the long ones among them, are read straight into their type. The other fields are cut out as text and then
//! read from there. A body that cannot be read this way is read again field by field, for an error that names the field.

use std::fmt;
use std::marker::PhantomData;

use serde::Deserialize;
use serde::de::value::{MapAccessDeserializer, StrDeserializer};
use serde::de::{DeserializeOwned, DeserializeSeed, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::fields::{OtherFields, is_refused, names};
use super::parse::parse;
use super::types::CommonFields;
use crate::error::RequestError;

/// Fields beyond this many are kept only if they have a meaning.
const MAX_KEPT: usize = 256;

/// A field's name and its value as JSON text.
type Field<'de> = (String, &'de RawValue);

/// All fields of a request. `A` has those that only its endpoint knows.
#[derive(Debug)]
pub(crate) struct Fields<A> {
    pub own: A,
    pub common: CommonFields,
}

/// Reads the fields of a request. Fails if one that is neither in `A` nor common would change the answer.
pub(crate) fn fields<A: DeserializeOwned>(body: &[u8]) -> Result<Fields<A>, RequestError> {
    let (own, common, other) = match once::<A>(body) {
        Ok(read) => read,
        Err(_) => (parse(body)?, parse(body)?, parse(body)?),
    };
    other.check(&[names::<A>(), names::<CommonFields>()])?;
    Ok(Fields { own, common })
}

fn once<A: DeserializeOwned>(body: &[u8]) -> serde_json::Result<(A, CommonFields, OtherFields)> {
    let mut json = serde_json::Deserializer::from_slice(body);
    let (own, rest) = serde::Deserializer::deserialize_map(&mut json, Split::<A>(PhantomData))?;
    json.end()?;
    let common = names::<CommonFields>();
    let (common, other): (Vec<_>, Vec<_>) = rest.into_iter().partition(|(name, _)| common.contains(&name.as_str()));
    let common = CommonFields::deserialize(MapAccessDeserializer::new(Cut::new(common)))?;
    let other = OtherFields::deserialize(MapAccessDeserializer::new(Cut::new(other)))?;
    Ok((own, common, other))
}

/// Splits an object into an `A` and the fields that `A` does not have.
struct Split<A>(PhantomData<A>);

impl<'de, A: DeserializeOwned> Visitor<'de> for Split<A> {
    type Value = (A, Vec<Field<'de>>);

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<M: MapAccess<'de>>(self, map: M) -> Result<Self::Value, M::Error> {
        let mut rest = Vec::new();
        let own = A::deserialize(MapAccessDeserializer::new(Known { map, names: names::<A>(), rest: &mut rest }))?;
        Ok((own, rest))
    }
}

/// The fields of an object that have one of these names. The others go to `rest`.
struct Known<'a, 'de, M> {
    map: M,
    names: &'static [&'static str],
    rest: &'a mut Vec<Field<'de>>,
}

impl<'de, M: MapAccess<'de>> MapAccess<'de> for Known<'_, 'de, M> {
    type Error = M::Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, M::Error> {
        while let Some(name) = self.map.next_key::<String>()? {
            if self.names.contains(&name.as_str()) {
                return seed.deserialize(StrDeserializer::new(&name)).map(Some);
            }
            // A body may have a million fields that nobody knows (I5).
            let matters = names::<CommonFields>().contains(&name.as_str()) || is_refused(&name);
            match matters || self.rest.len() < MAX_KEPT {
                true => self.rest.push((name, self.map.next_value()?)),
                false => drop(self.map.next_value::<IgnoredAny>()?),
            }
        }
        Ok(None)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, M::Error> {
        self.map.next_value_seed(seed)
    }
}

/// Fields that were cut out of an object.
struct Cut<'de> {
    fields: std::vec::IntoIter<Field<'de>>,
    value: Option<&'de RawValue>,
}

impl<'de> Cut<'de> {
    fn new(fields: Vec<Field<'de>>) -> Cut<'de> {
        Cut { fields: fields.into_iter(), value: None }
    }
}

impl<'de> MapAccess<'de> for Cut<'de> {
    type Error = serde_json::Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> serde_json::Result<Option<K::Value>> {
        let Some((name, value)) = self.fields.next() else { return Ok(None) };
        self.value = Some(value);
        seed.deserialize(StrDeserializer::new(&name)).map(Some)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> serde_json::Result<V::Value> {
        let value = self.value.take().map_or("null", RawValue::get);
        seed.deserialize(&mut serde_json::Deserializer::from_str(value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::openai::types::{ChatFields, CompletionFields};

    const CHATS: [&str; 6] = [
        r#"{"model":"m","messages":[{"role":"user","content":"hi"}],"temperature":0.5,"user":"u","seed":-1,"stream":true}"#,
        r#"{"messages":[],"tools":[{"a":[1,{"b":null}]}],"logit_bias":{"5":-1e2},"stop":["a","b"],"echo":false,"new":{"x":[]}}"#,
        r#" { "top_logprobs" : 3 , "messages" : [ ] , "logprobs" : true , "n" : 2 , "cache_salt" : "\u00e9\n" } "#,
        r#"{"messages":[{"role":"user","content":[{"type":"text","text":"a"}]}],"response_format":{"type":"text"},"n":null}"#,
        r#"{"t\u006fols":[],"messages":[],"\u006e":3,"stream_options":{"include_usage":true}}"#,
        r#"{"messages":[],"best_of":2,"max_tokns":1}"#,
    ];
    const COMPLETIONS: [&str; 4] = [
        r#"{"prompt":"once","max_tokens":5,"logprobs":2}"#,
        r#"{"prompt":[1,2,3],"stop":"x","guided_regex":"a+","top_k":-1}"#,
        r#"{"prompt":[[1],[2]],"tools":[],"priority":-3,"suffix":"s"}"#,
        r#"{"n":1,"prompt":["a","b"],"guided_json":{"type":"object"},"min_p":0.25}"#,
    ];
    const BAD: [&str; 12] = [
        "",
        "[]",
        "{",
        r#"{"messages":[]} x"#,
        r#"{"messages":[],"n":"two"}"#,
        r#"{"messages":[{"role":5}]}"#,
        r#"{"messages":[],"messages":[]}"#,
        r#"{"messages":[],"n":1,"n":2}"#,
        r#"{"n":1}"#,
        r#"{"messages":[],"stop":[1]}"#,
        r#"{"messages":[],"echo":tru}"#,
        "{\"messages\":[],\"n\":\u{1}}",
    ];

    /// What both ways of reading make of a body.
    fn both<A: DeserializeOwned + fmt::Debug>(body: &str) -> [Result<String, RequestError>; 2] {
        let body = body.as_bytes();
        let text = |read: &(A, CommonFields, OtherFields)| {
            let names = [names::<A>(), names::<CommonFields>()];
            format!("{:?} {:?} {:?}", read.0, read.1, read.2.check(&names))
        };
        let passes = || Ok((parse(body)?, parse(body)?, parse(body)?));
        let explained = passes().map(|read| text(&read));
        let once = once(body).map(|read| text(&read)).or_else(|_| passes().map(|read| text(&read)));
        [once, explained]
    }

    #[test]
    fn one_pass_reads_what_three_read() {
        for body in CHATS {
            assert!(once::<ChatFields>(body.as_bytes()).is_ok(), "{body}");
            let [one, three] = both::<ChatFields>(body);
            assert_eq!(one, three, "{body}");
        }
        for body in COMPLETIONS {
            assert!(once::<CompletionFields>(body.as_bytes()).is_ok(), "{body}");
            let [one, three] = both::<CompletionFields>(body);
            assert_eq!(one, three, "{body}");
        }
    }

    #[test]
    fn fields_that_nobody_knows_are_not_kept() {
        // I5
        let body = format!(r#"{{"messages":[],{}"n":2,"best_of":3}}"#, r#""unknown":0,"#.repeat(100_000));
        let mut json = serde_json::Deserializer::from_str(&body);
        let split = Split::<ChatFields>(PhantomData);
        let (_, rest) = serde::Deserializer::deserialize_map(&mut json, split).unwrap();
        assert!(rest.len() <= MAX_KEPT + 2, "{}", rest.len());
        let (_, common, other) = once::<ChatFields>(body.as_bytes()).unwrap();
        assert_eq!((common.n, other.check(&[]).unwrap_err().param.as_deref()), (Some(2), Some("best_of")));
    }

    #[test]
    fn what_one_pass_refuses_three_refuse() {
        for body in BAD {
            assert!(once::<ChatFields>(body.as_bytes()).is_err(), "{body}");
            assert!(fields::<ChatFields>(body.as_bytes()).is_err(), "{body}");
        }
    }
}
