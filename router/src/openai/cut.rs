//! Cuts a JSON object into its fields, and reads long lists of token ids.
//!
//! A value is looked at only to find its end. Whoever reads it finds out whether it is JSON.

use std::borrow::Cow;

/// A field's name, and its value as JSON text.
pub(super) type Field<'a> = (Cow<'a, str>, &'a str);

/// The fields of an object, in their order.
pub(super) struct Cutter<'a> {
    /// What is not cut yet: the brace and all after it, then the comma and all after it, then nothing.
    rest: &'a str,
}

/// The text is no object.
#[derive(PartialEq, Debug)]
pub(super) struct NoObject;

impl<'a> Cutter<'a> {
    /// Cuts `body`.
    pub fn new(body: &'a [u8]) -> Result<Cutter<'a>, NoObject> {
        let rest = trimmed(std::str::from_utf8(body).map_err(|_| NoObject)?);
        if rest.starts_with('{') { Ok(Cutter { rest }) } else { Err(NoObject) }
    }

    /// The next field; `None` after the last one.
    pub fn next(&mut self) -> Result<Option<Field<'a>>, NoObject> {
        let Some(begins) = self.rest.chars().next() else { return Ok(None) };
        let rest = trimmed(&self.rest[1..]);
        if begins == '{' && rest.starts_with('}') {
            return self.ends(rest).map(|()| None);
        }
        let (name, rest) = rest.split_at(string_end(rest).ok_or(NoObject)?);
        let rest = trimmed(trimmed(rest).strip_prefix(':').ok_or(NoObject)?);
        let (value, rest) = rest.split_at(value_end(rest).ok_or(NoObject)?);
        let rest = trimmed(rest);
        if rest.starts_with(',') {
            self.rest = rest;
        } else {
            self.ends(rest)?;
        }
        Ok(Some((read_name(name).ok_or(NoObject)?, value)))
    }

    /// Nothing but the closing brace may be left.
    fn ends(&mut self, rest: &str) -> Result<(), NoObject> {
        self.rest = "";
        if trimmed(rest.strip_prefix('}').ok_or(NoObject)?).is_empty() { Ok(()) } else { Err(NoObject) }
    }
}

/// Without the white space at its beginning.
fn trimmed(text: &str) -> &str {
    &text[after_space(text.as_bytes(), 0)..]
}

/// Bytes of the string at the beginning, quotes included.
fn string_end(text: &str) -> Option<usize> {
    let (bytes, mut at) = (text.as_bytes(), 1);
    (bytes.first() == Some(&b'"')).then_some(())?;
    loop {
        at += bytes.get(at..)?.iter().position(|byte| matches!(byte, b'"' | b'\\'))?;
        if bytes[at] == b'"' {
            return Some(at + 1);
        }
        at += 2;
    }
}

/// Bytes of the value at the beginning.
fn value_end(text: &str) -> Option<usize> {
    match text.as_bytes().first()? {
        b'"' => string_end(text),
        b'[' | b'{' => brackets_end(text),
        _ => text.find([',', '}', ' ', '\t', '\r', '\n']).filter(|end| *end > 0),
    }
}

/// Bytes until the bracket at the beginning is closed.
fn brackets_end(text: &str) -> Option<usize> {
    let (bytes, mut at, mut open) = (text.as_bytes(), 0, 0_usize);
    loop {
        match bytes.get(at)? {
            b'"' => at += string_end(&text[at..])? - 1,
            b'[' | b'{' => open += 1,
            b']' | b'}' if open == 1 => return Some(at + 1),
            b']' | b'}' => open -= 1,
            _ => {}
        }
        at += 1;
    }
}

/// The name that a string says.
fn read_name(string: &str) -> Option<Cow<'_, str>> {
    let name = string.get(1..string.len() - 1)?;
    let plain = name.bytes().all(|byte| byte >= b' ' && byte != b'\\');
    if plain { Some(Cow::Borrowed(name)) } else { serde_json::from_str(string).ok().map(Cow::Owned) }
}

/// Reads a list of token ids, of which a body may have a hundred thousand, in about half of the instructions that `serde_json` takes. `None`:
/// the text is something else, or no JSON.
pub(super) fn token_ids(json: &str) -> Option<Vec<u32>> {
    let list = json.strip_prefix('[')?.strip_suffix(']')?.as_bytes();
    let (mut ids, mut at) = (Vec::with_capacity(list.len() / 2 + 1), 0);
    loop {
        at = after_space(list, at);
        let (begin, mut id) = (at, 0_u64);
        while let Some(digit) = list.get(at).map(|byte| byte.wrapping_sub(b'0')).filter(|digit| *digit < 10) {
            id = id.wrapping_mul(10).wrapping_add(digit.into());
            at += 1;
        }
        // Ten digits fit in 64 bits. JSON has no zeros before a number.
        if !(1..=10).contains(&(at - begin)) || (list[begin] == b'0' && at - begin > 1) {
            return None;
        }
        ids.push(u32::try_from(id).ok()?);
        at = after_space(list, at);
        match list.get(at) {
            Some(b',') => at += 1,
            Some(_) => return None,
            None => return Some(ids),
        }
    }
}

/// Where the white space that begins at `at` ends.
fn after_space(bytes: &[u8], mut at: usize) -> usize {
    while let Some(b' ' | b'\t' | b'\r' | b'\n') = bytes.get(at) {
        at += 1;
    }
    at
}

#[cfg(test)]
mod tests {
    use serde_json::{Map, Value};

    use super::*;

    fn cut(body: &str) -> Result<Vec<Field<'_>>, NoObject> {
        let (mut cutter, mut fields) = (Cutter::new(body.as_bytes())?, Vec::new());
        while let Some(field) = cutter.next()? {
            fields.push(field);
        }
        assert_eq!(cutter.next(), Ok(None), "it stays at its end");
        Ok(fields)
    }

    #[test]
    fn an_object_is_cut_as_json_has_it() {
        for body in [
            "{}",
            " {\n} ",
            r#"{"a":1}"#,
            r#"{"a":-1.5e3,"b":"x\"},{[","c":[1,{"d":["]"]}],"e":{"f":{}},"g":null,"h":true}"#,
            "\t{ \"a\" : \"\\\\\" , \"\\u0062\\n\" : [ ] }\r\n",
            r#"{"é":"ü","":""}"#,
        ] {
            let want: Map<String, Value> = serde_json::from_str(body).unwrap();
            let fields = cut(body).unwrap();
            let read = fields.iter().map(|(name, value)| (name.to_string(), serde_json::from_str(value).unwrap()));
            assert_eq!(read.collect::<Map<String, Value>>(), want, "{body}");
            assert_eq!(fields.len(), want.len(), "{body}");
        }
        assert_eq!(cut(r#"{"a":1,"a":2}"#).unwrap().len(), 2, "both are cut");
    }

    #[test]
    fn what_is_no_object_is_not_cut() {
        for body in [
            "",
            "[]",
            "{",
            "}",
            "{,}",
            "{\"a\"}",
            "{\"a\":}",
            "{\"a\":1,}",
            "{\"a\":1 \"b\":2}",
            "{\"a\":1}}",
            "{\"a\":1} x",
            "{a:1}",
            "{\"a\":\"",
            "{\"a\":\"\\",
            "{\"a\":[1",
            "{\"a\" 1}",
            "{\"\u{1}\":1}",
            "{\"\\x\":1}",
            "{\"a\":1",
            "{\"a\":,}",
        ] {
            assert_eq!(cut(body), Err(NoObject), "{body}");
        }
        assert!(Cutter::new(b"{\"a\":\"\xff\"}").is_err());
    }

    #[test]
    fn a_list_of_token_ids_is_read_as_json_has_it() {
        for json in ["[7]", "[0]", "[1,23,456]", "[ 1 ,\t2\r\n, 3 ]", "[4294967295,0]"] {
            assert_eq!(token_ids(json), serde_json::from_str(json).ok(), "{json}");
        }
        for other in [
            "[]",
            "[ ]",
            "7",
            "\"[1]\"",
            "[4294967296]",
            "[99999999999999999999]",
            "[-1]",
            "[1.0]",
            "[1e2]",
            "[[1],[2]]",
            "[true]",
        ] {
            assert_eq!(token_ids(other), None, "{other}");
        }
        for bad in ["[1 2]", "[1,]", "[,1]", "[,]", "[01]", "[00]", "[+1]", "[", "]", ""] {
            assert_eq!(token_ids(bad), None, "{bad}");
        }
    }
}
