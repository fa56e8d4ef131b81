//! Structured output through the engine, the decoder and the sampler, with a model that knows nothing: random weights, one
//! token a byte. What it says under a constraint must be right all the same, and the same on every route (I1).

#![allow(clippy::unwrap_used)]

use std::cell::{Cell, RefCell};
use std::path::Path;
use std::sync::{Arc, OnceLock};

use baton_grammar::{Grammars, Matchers, choice, json_schema};
use baton_model_files::{Model, fetch};
use baton_tests::local::{Local, Options};
use baton_tests::tiny;
use baton_types::{BatonError, Constraint, ErrorKind, SamplingParams, TokenOut};
use proptest::prelude::*;
use serde_json::{Value, json};

struct Tiny {
    _dir: tempfile::TempDir,
    model: Model,
}

fn tiny() -> &'static Tiny {
    static TINY: OnceLock<Tiny> = OnceLock::new();
    TINY.get_or_init(|| {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model");
        tiny::config("llama-mha").unwrap().write(&path).unwrap();
        Tiny { model: Model::open(&path).unwrap(), _dir: dir }
    })
}

fn params(constraint: Constraint, seed: u64, max_tokens: u32) -> SamplingParams {
    let stop_token_ids = tiny().model.tokenizer().eos_ids().to_vec();
    SamplingParams {
        max_tokens,
        seed,
        stop_token_ids,
        constraint: Some(constraint.into()),
        ..SamplingParams::default()
    }
}

/// The text, and whether it ended by itself.
fn text(model: &Model, answer: &[TokenOut]) -> (String, bool) {
    let ids: Vec<u32> = answer.iter().map(|t| t.id).collect();
    let ended = ids.last().is_some_and(|id| model.tokenizer().eos_ids().contains(id));
    (model.tokenizer().decode(&ids, true).unwrap(), ended)
}

fn ask(local: &mut Local, constraint: &Constraint, seed: u64) -> (String, bool) {
    let answer = local.one(&[1, 2, 3], &params(constraint.clone(), seed, 200)).unwrap();
    text(&tiny().model, &answer)
}

fn refusal(constraint: &Constraint) -> String {
    let error = Grammars::new(tiny().model.tokenizer(), 512).prepare(&constraint.clone().into()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    error.to_string()
}

#[test]
fn each_kind_holds() {
    let mut local = Local::new(&tiny().model, Options::default()).unwrap();
    for seed in 0..8 {
        let (word, ended) = ask(&mut local, &Constraint::Regex("[a-c]{3}(-[0-9]{2}){1,2}/".into()), seed);
        assert!(ended && word.len() <= 10 && word.ends_with('/') && word.as_bytes()[3] == b'-', "{word}");
        let (word, ended) = ask(&mut local, &choice(&["yes".into(), "no \"way\"\n".into()]), seed);
        assert!(ended && ["yes", "no \"way\"\n"].contains(&word.as_str()), "{word}");
        let nested = "start: pair\npair: \"(\" (pair | /[xy]/) \")\"";
        let (word, ended) = ask(&mut local, &Constraint::Lark(nested.into()), seed);
        let inside = word.trim_start_matches('(').trim_end_matches(')');
        assert!(!ended || (inside.len() == 1 && word.matches('(').count() == word.matches(')').count()), "{word}");
        // One value only, whatever the model would like to say.
        let (word, ended) = ask(&mut local, &json_schema(&json!({"const": {"a": [1, null]}})), seed);
        let compact: String = word.split_whitespace().collect();
        assert!(ended && compact == "{\"a\":[1,null]}", "{word}");
    }
}

/// A special token matches no text, but a grammar can ask for one, by id or by name.
#[test]
fn a_grammar_may_name_special_tokens() {
    let mut local = Local::new(&tiny().model, Options::default()).unwrap();
    let bos = tiny().model.tokenizer().bos_id().unwrap();
    let grammar = Constraint::Lark(format!("start: <[{bos}]> \" [\" <s> \"]\""));
    let answer = local.one(&[1], &params(grammar, 1, 20)).unwrap();
    let ids: Vec<u32> = answer.iter().map(|t| t.id).collect();
    assert_eq!(ids[..5], [bos, u32::from(b' '), u32::from(b'['), bos, u32::from(b']')]);
    assert_eq!(ids.len(), 6, "and an end");
}

#[test]
fn a_bad_constraint_is_refused_with_its_reason() {
    for (constraint, says) in [
        (Constraint::JsonSchema("{".into()), "JSON schema cannot be used: EOF"),
        (Constraint::JsonSchema("[]".into()), "a schema is an object"),
        (Constraint::JsonSchema("{\"type\": \"strin\"}".into()), "strin"),
        (
            Constraint::JsonSchema("{\"type\": \"object\", \"unevaluatedProperties\": false}".into()),
            "unevaluatedProperties",
        ),
        (Constraint::JsonSchema("{\"$ref\": \"http://example.com/x\"}".into()), "ref"),
        (Constraint::Regex("a(b".into()), "regular expression cannot be used"),
        (Constraint::Lark("start: missing".into()), "missing"),
        (Constraint::Lark("begin: \"a\"".into()), "start"),
    ] {
        let said = refusal(&constraint);
        assert!(said.contains(says) && said.len() < 600, "{constraint:?}: {said}");
    }
}

#[test]
fn options_that_exclude_each_other_are_taken_others_refused() {
    let one_of = |first: Value, second: Value| json_schema(&json!({ "oneOf": [first, second] }));
    let grammars = Grammars::new(tiny().model.tokenizer(), 512);
    let kind = |kind: &str| json!({"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]});
    grammars.prepare(&one_of(json!({"type": "integer"}), json!({"type": "null"})).into()).unwrap();
    grammars.prepare(&one_of(kind("cat"), kind("dog")).into()).unwrap();
    let said = refusal(&one_of(json!({"type": "string"}), json!({"type": "string", "maxLength": 3})));
    assert!(said.contains("oneOf"), "{said}");
}

/// However many others come, the engine thread finds the constraint of a request under way compiled; of the rest a bounded
/// number is kept (I5).
#[test]
fn what_a_request_holds_stays_compiled() {
    let grammars = Grammars::new(tiny().model.tokenizer(), 512);
    let prepare = |i: usize| grammars.prepare(&Constraint::Regex(format!("a{{{}}}", i + 1)).into()).unwrap();
    let held: Vec<_> = (0..50).map(prepare).collect();
    let passing: Vec<_> = (50..150).map(|i| Arc::downgrade(&prepare(i))).collect();
    assert!(held.iter().enumerate().all(|(i, constraint)| Arc::ptr_eq(constraint, &prepare(i))));
    let left = passing.iter().filter(|constraint| constraint.strong_count() > 0).count();
    assert!((32..=33).contains(&left), "{left}, the last among them");
}

/// I5: what a client sends cannot hold a thread for long, blow the stack or fill the memory.
#[test]
fn a_constraint_made_to_hurt_is_bounded() {
    let deep =
        |levels: usize| (0..levels).fold(json!({"type": "null"}), |inner, _| json!({"type": "array", "items": inner}));
    let wide = |options: usize, times: usize| {
        let any =
            json!({"anyOf": (0..options).map(|i| json!({"properties": {format!("p{i}"): {}}})).collect::<Vec<_>>()});
        json!({"allOf": vec![any; times]})
    };
    let huge = json!({"type": "array", "items": {"type": "string", "maxLength": 100_000}, "maxItems": 100_000});
    let cycle = json!({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}});
    let nested = format!("start: {}\"a\"{}", "(".repeat(20_000), ")".repeat(20_000));
    let constraints = [
        json_schema(&deep(60)),
        json_schema(&wide(6, 8)),
        json_schema(&huge),
        json_schema(&cycle),
        Constraint::Regex("(a{1,1000}){1,1000}".into()),
        Constraint::Regex("(".repeat(10_000) + &")".repeat(10_000)),
        Constraint::Regex("(a|b)*a(a|b){24}".into()),
        Constraint::Lark(nested),
        Constraint::Lark("start: start start | \"\" | \"a\"".into()),
    ];
    let grammars = Arc::new(Grammars::new(tiny().model.tokenizer(), 512));
    for constraint in constraints {
        let grammars = Arc::clone(&grammars);
        // A thread as small as those that compile; a stack overflow would end the process.
        let tried = std::thread::Builder::new().stack_size(2 << 20).spawn(move || {
            let mut matchers = Matchers::new(Arc::clone(&grammars));
            let held = grammars.prepare(&constraint.into())?;
            matchers.mask(&held, &[], &[257], 512, &mut Vec::new())
        });
        if let Err(error) = tried.unwrap().join().unwrap() {
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            assert!(error.to_string().len() < 600, "{error}");
        }
    }
    assert!(refusal(&json_schema(&wide(6, 8))).contains("schema too large"));
}

#[test]
fn the_vocabulary_of_a_real_model() {
    let path = fetch::resolve("smollm2", &fetch::default_cache().unwrap(), &fetch::NoProgress).unwrap();
    real(&path);
}

/// Whether a mask allows a token.
fn allows(mask: &[u32], id: u32) -> bool {
    mask[id as usize / 32] >> (id % 32) & 1 == 1
}

fn real(path: &Path) {
    let model = Model::open(path).unwrap();
    let (tokenizer, rows) = (model.tokenizer(), model.config().vocab_size);
    let mut matchers = Matchers::new(Arc::new(Grammars::new(tokenizer, rows)));
    let eos = tokenizer.eos_ids().to_vec();
    let constraint =
        Arc::new(json_schema(&json!({"type": "object", "properties": {"a": {"enum": ["<|im_end|>", "é"]}},
        "required": ["a"], "additionalProperties": false})));
    // Special tokens in a text are text: only other tokens spell them.
    let (mut generated, mut mask, vocab) = (Vec::new(), Vec::new(), rows as usize);
    let mut spell = |matchers: &mut Matchers, text: &str| {
        for byte in text.chars() {
            matchers.mask(&constraint, &generated, &eos, vocab, &mut mask).unwrap();
            assert!(!eos.iter().any(|&id| allows(&mask, id)), "{generated:?}");
            let wanted = byte.to_string();
            let of = |id: &u32| !tokenizer.is_special(*id) && tokenizer.token_bytes(*id).unwrap() == wanted.as_bytes();
            let id = (0..tokenizer.vocab_size() as u32).find(of).unwrap();
            assert!(allows(&mask, id), "{wanted:?} after {generated:?}");
            generated.push(id);
        }
    };
    spell(&mut matchers, "{\"a\":\"<|im_end|>\"}");
    matchers.mask(&constraint, &generated, &eos, vocab, &mut mask).unwrap();
    assert_eq!(mask.len(), vocab.div_ceil(32));
    let open: Vec<u32> = (0..rows).filter(|&id| allows(&mask, id)).collect();
    let mut ends = eos.clone();
    ends.sort_unstable();
    assert_eq!(open, ends, "nothing but an end");
    // The same from scratch, and after an answer that is none.
    let (mut fresh, mut again) = (Matchers::new(Arc::new(Grammars::new(tokenizer, rows))), vec![1; 3]);
    fresh.mask(&constraint, &generated, &eos, vocab, &mut again).unwrap();
    assert_eq!(again, mask);
    let wrong = matchers.mask(&constraint, &[generated[1]], &eos, vocab, &mut again).unwrap_err();
    assert!(wrong.to_string().contains("token"), "{wrong}");
}

/// I1: alone, together, in chunks of one token, and preempted because the pool is small.
#[test]
fn the_route_does_not_matter() {
    let schema = json_schema(&json!({"type": "object", "properties": {"name": {"type": "string", "maxLength": 20},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 4}}, "required": ["name", "tags"]}));
    let constraints = [schema, Constraint::Regex("([a-z]{1,4} ){3,9}end".into()), choice(&["a".into(), "ab".into()])];
    let request = |seed: u64| {
        let prompt = (0..20 + seed as u32 % 30).map(|i| (i * 7 + seed as u32) % 256).collect();
        let constraint = constraints[seed as usize % constraints.len()].clone();
        let extra = SamplingParams {
            frequency_penalty: 0.3,
            top_p: 0.95,
            temperature: if seed.is_multiple_of(4) { 0.0 } else { 1.0 },
            logit_bias: vec![(u32::from(b'"'), 2.0)],
            top_logprobs: Some(3),
            ..params(constraint, seed, 60)
        };
        (prompt, extra)
    };
    let requests: Vec<(Vec<u32>, SamplingParams)> = (0..12).map(request).collect();
    let model = &tiny().model;
    let mut alone = Local::new(model, Options::default()).unwrap();
    let want: Vec<_> = requests.iter().map(|(prompt, params)| alone.one(prompt, params).unwrap()).collect();
    assert!(want.iter().filter(|answer| text(model, answer).1).count() > 6, "most ended by themselves");
    for options in [
        Options::default(),
        Options { chunk: 1, ..Options::default() },
        Options { chunk: 16, budget: 40, max_running: 5, ..Options::default() },
        Options { blocks: 16, ..Options::default() },
    ] {
        let mut local = Local::new(model, options).unwrap();
        assert_eq!(local.run(&requests, &mut |_, _, _| None).unwrap(), want, "{options:?}");
    }
}

/// One sequence that cannot go on fails; those beside it do not notice.
#[test]
fn an_answer_that_cannot_go_on_fails_alone() {
    let grammars = Arc::new(Grammars::new(tiny().model.tokenizer(), 512));
    let mut matchers = Matchers::new(grammars);
    let constraint = Arc::new(Constraint::Regex("ab".into()));
    // A vocabulary that ends inside a word.
    let mut mask = Vec::new();
    let error = matchers.mask(&constraint, &[u32::from(b'x')], &[257], 300, &mut mask).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    // Complete, but nothing may end it.
    let done = [u32::from(b'a'), u32::from(b'b')];
    assert!(matchers.mask(&constraint, &done, &[], 300, &mut mask).is_err());
    assert!(matchers.mask(&constraint, &done, &[400], 300, &mut mask).is_err(), "beyond the vocabulary");
    matchers.mask(&constraint, &done, &[257], 300, &mut mask).unwrap();
    assert_eq!(mask.iter().map(|word| word.count_ones()).sum::<u32>(), 1);
    assert!(mask.len() == 10 && allows(&mask, 257));
}

/// Whether a value is one of the schema's, for the keywords that `schema` makes.
fn valid(value: &Value, schema: &Value) -> bool {
    if let Some(any) = schema["anyOf"].as_array() {
        return any.iter().any(|s| valid(value, s));
    }
    if let Some(values) = schema["enum"].as_array() {
        return values.contains(value);
    }
    let size = |key: &str, default: u64| schema[key].as_u64().unwrap_or(default) as usize;
    match schema["type"].as_str().unwrap() {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        // JSON has a -0, which is the integer 0 and which serde_json reads as a float.
        "integer" => {
            let number =
                value.as_i64().or_else(|| value.as_f64().filter(|v| *v == 0.0 && v.is_sign_negative()).map(|_| 0));
            let bounds = schema["minimum"].as_i64().unwrap()..=schema["maximum"].as_i64().unwrap();
            number.is_some_and(|v| bounds.contains(&v))
        }
        "string" => value.as_str().is_some_and(|s| s.chars().count() <= size("maxLength", 0)),
        "array" => value.as_array().is_some_and(|items| {
            (size("minItems", 0)..=size("maxItems", 0)).contains(&items.len())
                && items.iter().all(|item| valid(item, &schema["items"]))
        }),
        "object" => value.as_object().is_some_and(|object| {
            let required = schema["required"].as_array().unwrap();
            required.iter().all(|name| object.contains_key(name.as_str().unwrap()))
                && object.iter().all(|(key, value)| schema["properties"].get(key).is_some_and(|s| valid(value, s)))
        }),
        other => panic!("{other}"),
    }
}

/// Random schemas whose answers have a bounded length.
fn schema() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(json!({"type": "null"})),
        Just(json!({"type": "boolean"})),
        (-300..300i64, 0..5000i64)
            .prop_map(|(low, more)| json!({"type": "integer", "minimum": low, "maximum": low + more})),
        (0..6u64).prop_map(|longest| json!({"type": "string", "maxLength": longest})),
        proptest::collection::vec("[a-z\"\\\\é ]{0,5}", 1..4).prop_map(|words| json!({ "enum": words })),
    ];
    leaf.prop_recursive(3, 12, 3, |inner| {
        prop_oneof![
            (inner.clone(), 0..2u64, 0..2u64).prop_map(|(items, low, more)| {
                json!({"type": "array", "items": items, "minItems": low, "maxItems": low + more})
            }),
            proptest::collection::vec(inner.clone(), 1..3).prop_map(|options| json!({ "anyOf": options })),
            (proptest::collection::btree_map("[a-z$ ]{1,3}", inner, 0..3), any::<bool>()).prop_map(|(properties, all)| {
                let required: Vec<&String> = properties.keys().filter(|_| all).collect();
                json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false})
            }),
        ]
    })
}

#[test]
fn the_check_of_integers_takes_those_of_json() {
    let schema = json!({"type": "integer", "minimum": -1, "maximum": 2});
    let of = |text: &str| valid(&serde_json::from_str(text).unwrap(), &schema);
    assert!(["-1", "-0", "0", "2"].into_iter().all(of) && !["-2", "3", "0.0", "-0.5", "\"0\""].into_iter().any(of));
    assert!(!valid(&json!(-0.0), &json!({"type": "integer", "minimum": 1, "maximum": 2})));
}

#[test]
fn answers_under_random_schemas_parse_and_are_valid() {
    let local = RefCell::new(Local::new(&tiny().model, Options::default()).unwrap());
    let (ended, all) = (Cell::new(0), Cell::new(0));
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(60));
    let outcome = runner.run(&(schema(), any::<u64>()), |(schema, seed)| {
        let answer = local.borrow_mut().one(&[9, 8], &params(json_schema(&schema), seed, 400)).unwrap();
        let (text, complete) = text(&tiny().model, &answer);
        all.set(all.get() + 1);
        if complete {
            ended.set(ended.get() + 1);
            let value: Value = serde_json::from_str(&text).map_err(|e| TestCaseError::fail(format!("{e}: {text}")))?;
            prop_assert!(valid(&value, &schema), "{} is not of {}", text, schema);
        }
        Ok(())
    });
    outcome.unwrap();
    let (ended, all) = (ended.get(), all.get());
    assert!(ended * 10 >= all * 9, "only {ended} of {all} answers ended");
}
