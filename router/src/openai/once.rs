//! Reads a request's body in one pass.
//!
//! The body is cut into its fields, and each is read from its text. A body that cannot be read this way is read again field by field, for an
//! error that names the field.

use serde::Deserialize;
use serde::de::value::{MapAccessDeserializer, SeqDeserializer, StrDeserializer};
use serde::de::{DeserializeOwned, DeserializeSeed, Error, IgnoredAny, MapAccess};

use super::cut::{Cutter, Field, NoObject, token_ids};
use super::fields::{OtherFields, is_refused, names};
use super::parse::parse;
use super::types::CommonFields;
use crate::error::RequestError;

/// The field that can be a long list of token ids.
const LONG: &str = "prompt";
/// Fields beyond this many are kept only if they have a meaning.
const MAX_KEPT: usize = 256;

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
    let [own, common, mut other, unknown] = split(body, names::<A>())?;
    other.extend(unknown);
    let own = A::deserialize(MapAccessDeserializer::new(Cut::new(own)))?;
    let common = CommonFields::deserialize(MapAccessDeserializer::new(Cut::new(common)))?;
    let other = OtherFields::deserialize(MapAccessDeserializer::new(Cut::new(other)))?;
    Ok((own, common, other))
}

/// The fields with these names, the common ones, those that are refused, and others.
fn split<'de>(body: &'de [u8], own: &[&str]) -> serde_json::Result<[Vec<Field<'de>>; 4]> {
    let no_object = |NoObject| serde_json::Error::custom("no object");
    let (common, mut fields) = (names::<CommonFields>(), [const { Vec::new() }; 4]);
    let mut cutter = Cutter::new(body).map_err(no_object)?;
    while let Some((name, value)) = cutter.next().map_err(no_object)? {
        let kind = match name.as_ref() {
            name if own.contains(&name) => 0,
            name if common.contains(&name) => 1,
            name if is_refused(name) => 2,
            _ => 3,
        };
        // A body may have a million fields (I5).
        match fields[kind].len() < MAX_KEPT {
            true => fields[kind].push((name, value)),
            false if kind == 3 => drop(serde_json::from_str::<IgnoredAny>(value)?),
            false => return Err(Error::custom("there are not so many fields that mean something: one comes twice")),
        }
    }
    Ok(fields)
}

/// Fields that were cut out of an object.
struct Cut<'de> {
    fields: std::vec::IntoIter<Field<'de>>,
    /// Of the field whose name was asked for.
    value: Option<&'de str>,
    /// Whether it is [`LONG`].
    long: bool,
}

impl<'de> Cut<'de> {
    fn new(fields: Vec<Field<'de>>) -> Cut<'de> {
        Cut { fields: fields.into_iter(), value: None, long: false }
    }
}

impl<'de> MapAccess<'de> for Cut<'de> {
    type Error = serde_json::Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> serde_json::Result<Option<K::Value>> {
        let Some((name, value)) = self.fields.next() else { return Ok(None) };
        (self.value, self.long) = (Some(value), name == LONG);
        seed.deserialize(StrDeserializer::new(&name)).map(Some)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> serde_json::Result<V::Value> {
        let value = self.value.take().unwrap_or("null");
        if let Some(ids) = self.long.then(|| token_ids(value)).flatten() {
            return seed.deserialize(SeqDeserializer::new(ids.into_iter()));
        }
        let mut json = serde_json::Deserializer::from_str(value);
        let read = seed.deserialize(&mut json)?;
        json.end()?;
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use std::fmt;

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
    const COMPLETIONS: [&str; 6] = [
        r#"{"prompt": [ 4294967295 , 0,12 ] ,"max_tokens":5}"#,
        r#"{"prompt":[],"max_tokens":5}"#,
        r#"{"prompt":"once","max_tokens":5,"logprobs":2}"#,
        r#"{"prompt":[1,2,3],"stop":"x","guided_regex":"a+","top_k":-1}"#,
        r#"{"prompt":[[1],[2]],"tools":[],"priority":-3,"suffix":"s"}"#,
        r#"{"n":1,"prompt":["a","b"],"guided_json":{"type":"object"},"min_p":0.25}"#,
    ];
    const BAD: [&str; 16] = [
        r#"{"messages":[],"n":1 2}"#,
        r#"{"messages":[],"n":1x}"#,
        r#"{"messages":[]],"n":1}"#,
        r#"{"messages":[],"new":[1}}"#,
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
        let [_, _, _, rest] = split(body.as_bytes(), names::<ChatFields>()).unwrap();
        assert_eq!(rest.len(), MAX_KEPT);
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
