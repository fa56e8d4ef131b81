//! A body of [`super::bodies`], edited as an input says. The result is always JSON, and close to an accepted body.

use std::sync::LazyLock;

use serde_json::{Value, json};

/// Most edits of a body.
const MOST: usize = 12;

/// Most values of a body, and most bytes of its texts, before one more edit. The limit exists because an edit can double a body.
const LARGE: (usize, usize) = (2_000, 20_000);

/// The bodies to edit, and the names of all their fields.
static BODIES: LazyLock<(Vec<Value>, Vec<String>)> = LazyLock::new(|| {
    let all: Vec<Value> = super::bodies().map(|(_, body)| body).collect();
    let mut names = Vec::new();
    all.iter().for_each(|body| walk(body, "", &mut |path, _| names.extend(path.rsplit('/').next().map(str::to_owned))));
    (all, names)
});

/// The first byte picks the body. Then come edits of three bytes each: which value, what to do with it, and with what.
pub(super) fn edited(input: &[u8]) -> Value {
    let (all, names) = &*BODIES;
    let Some((which, edits)) = input.split_first() else { return Value::Null };
    let mut body = all[usize::from(*which) % all.len()].clone();
    for [place, what, with] in edits.as_chunks::<3>().0.iter().take(MOST) {
        let (mut values, mut bytes) = (Vec::new(), 0);
        walk(&body, "", &mut |path, value| {
            bytes += value.as_str().map_or(0, str::len);
            values.push((path.to_owned(), value.clone()));
        });
        if values.len() > LARGE.0 || bytes > LARGE.1 {
            break;
        }
        let (path, _) = &values[usize::from(*place) % values.len()];
        let (_, other) = &values[usize::from(*with) % values.len()];
        if let Some(value) = body.pointer_mut(path) {
            edit(value, (*what, *with), other, names);
        }
    }
    body
}

fn edit(value: &mut Value, (what, with): (u8, u8), other: &Value, names: &[String]) {
    let at = usize::from(with);
    match (what % 4, value) {
        (0, value) => *value = edge(with),
        (1, value) => *value = other.clone(),
        (2, Value::Object(fields)) => {
            fields.insert(names[at % names.len()].clone(), edge(what / 4));
        }
        (2, Value::Array(list)) => list.push(list.first().cloned().unwrap_or_else(|| edge(with))),
        (2, Value::String(text)) => *text = text.repeat(at % 9),
        (3, Value::Object(fields)) => {
            let name = fields.keys().nth(at % fields.len().max(1)).cloned();
            name.and_then(|name| fields.remove(&name));
        }
        (_, Value::String(text)) => text.insert(0, char::from(with)),
        (_, value) => *value = json!([*value]),
    }
}

/// All values of a body, with their paths as JSON pointers.
fn walk(value: &Value, path: &str, see: &mut impl FnMut(&str, &Value)) {
    see(path, value);
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                walk(value, &format!("{path}/{}", name.replace('~', "~0").replace('/', "~1")), see);
            }
        }
        Value::Array(list) => list.iter().enumerate().for_each(|(at, value)| walk(value, &format!("{path}/{at}"), see)),
        _ => {}
    }
}

/// Values at which code tends to go wrong.
fn edge(which: u8) -> Value {
    let all = json!([
        null, true, false, 0, 1, -1, 2, 128, 129, 511, 512, u32::MAX, u64::MAX, i64::MIN, 0.5, -0.0, 1e308, 1e-320, "", " ", "x", "\u{0}",
        "none", "auto", "required", "function", "json_schema", "tool", "{}", "[", [], {}, [[]], [null], [""], [0], [[0], []], ["a", "b"],
        [0, 255, 259, 260], {"type": "object"}, {"type": "function"}, {"$ref": "#"}, {"5": 100}, {"-1": 0}
    ]);
    all[usize::from(which) % all.as_array().map_or(1, Vec::len)].clone()
}
