//! `baton explain`: why a router placed a request where it did, and what came of that.

use std::fmt::Write;
use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::{Context, bail};
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use serde_json::Value;

use crate::status;

/// What the times mean, in the order in which they are printed.
const TERMS: [(&str, &str); 6] = [
    ("room_s", "until the decode worker has KV blocks"),
    ("queue_s", "until the prompts before it are computed"),
    ("compute_s", "computing what is not cached of its prompt"),
    ("handoff_s", "handing its KV over"),
    ("answer_s", "the expected tokens of its answer"),
    ("others_s", "what others wait longer for it, all together"),
];

/// The subcommand.
pub fn command() -> Command {
    let admin = Arg::new("admin").long("admin").value_name("ADDR").default_value("127.0.0.1:9000");
    let token = Arg::new("admin-token-file").long("admin-token-file").value_name("FILE");
    Command::new("explain")
        .about("Says why a router placed a request where it did, and what came of that; a router knows its latest 4096 placements")
        .after_help("The id is in the answer's header x-request-id. With the request's header x-baton-trace: 1, the answer has the same in its header x-baton-placement.")
        .arg(Arg::new("request").value_name("REQUEST-ID").required(true).help("The request's id"))
        .arg(admin.value_parser(value_parser!(SocketAddr)).help("Address of the router's admin endpoint; `baton up` prints it"))
        .arg(token.value_parser(value_parser!(PathBuf)).help("File with the admin endpoint's token, where it needs one"))
        .arg(Arg::new("json").long("json").action(ArgAction::SetTrue).help("Prints JSON"))
}

/// Asks the router and prints what it says.
pub async fn run(matches: &ArgMatches) -> anyhow::Result<()> {
    let request = matches.get_one::<String>("request").context("a request id is needed")?;
    let admin = *matches.get_one::<SocketAddr>("admin").context("an address is needed")?;
    if !request.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.~".contains(&b)) {
        bail!(
            "{request:?} has characters that no request id made by a router has; only letters, digits and -_.~ can be asked for here"
        );
    }
    let token = matches.get_one::<PathBuf>("admin-token-file").map(std::fs::read_to_string).transpose()?;
    let asked = status::get(admin, &format!("/placements/{request}"), token.as_deref().map(str::trim)).await;
    let (code, body) =
        asked.with_context(|| format!("no router's admin endpoint answers at {admin}; name another with --admin"))?;
    if code != 200 {
        bail!("{admin} answers {code}: {}", body.trim());
    }
    let placements: Vec<Value> =
        serde_json::from_str(&body).context("the answer is not from a router of this version")?;
    match matches.get_flag("json") {
        true => println!("{:#}", Value::from(placements)),
        false => print!("{}", text(&placements)),
    }
    Ok(())
}

/// The placements for people.
fn text(placements: &[Value]) -> String {
    let mut text = String::new();
    for (at, placement) in placements.iter().enumerate() {
        if at > 0 {
            text.push('\n');
        }
        if let Some(why) = placement["rejected"].as_str() {
            let _ = writeln!(text, "rejected: {why}");
            continue;
        }
        let _ = writeln!(text, "{}", workers(placement));
        let predicted = &placement["predicted"];
        if predicted.is_null() {
            let _ = writeln!(text, "  nothing was predicted; the router's placement is not `predicted`");
            continue;
        }
        let _ = writeln!(text, "  {:<46}{:>11}{:>14}", "", "here", "next best");
        let next = &placement["next_best"]["predicted"];
        for (field, meaning) in TERMS.into_iter().chain([("sum_s", "sum, the least of all options")]) {
            let _ = writeln!(text, "  {meaning:<46}{:>11}{:>14}", ms(&predicted[field]), ms(&next[field]));
        }
        if !next.is_null() {
            let _ =
                writeln!(text, "  next best of {} options: {}", placement["options"], workers(&placement["next_best"]));
        }
        for (way, from) in [("loads", "its own store"), ("fetches", "another worker")] {
            let moved = &placement[way];
            if let Some(tokens) = moved["tokens"].as_u64() {
                let _ = writeln!(text, "  to take from {from}: {tokens} tokens in {}", ms(&moved["seconds"]));
            }
        }
        if let Some(tokens) = placement["measured"]["cached_tokens"].as_u64() {
            let _ = writeln!(text, "  not computed: {tokens} tokens that were cached, fetched or loaded");
        }
        let _ = writeln!(text, "  {:<46}{:>11}{:>14}", "", "predicted", "measured");
        for (field, meaning) in [("first_token_s", "time to the first token"), ("token_s", "from token to token")] {
            let _ =
                writeln!(text, "  {meaning:<46}{:>11}{:>14}", ms(&predicted[field]), ms(&placement["measured"][field]));
        }
    }
    text
}

fn workers(placement: &Value) -> String {
    let decode = placement["decode"].as_str().unwrap_or("?");
    match placement["prefill"].as_str() {
        Some(prefill) => format!("prefill {prefill}, decode {decode}"),
        None => format!("decode {decode}, which computes the prompt itself"),
    }
}

fn ms(seconds: &Value) -> String {
    seconds.as_f64().map_or("-".to_owned(), |seconds| format!("{:.1} ms", seconds * 1e3))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn terms_stand_beside_those_of_the_next_best_and_predictions_beside_what_came() {
        let of = |queue: f64| json!({"queue_s": queue, "sum_s": 2.0, "first_token_s": 0.25, "token_s": 0.01});
        let told = text(&[
            json!({"decode": "d1", "prefill": "p1", "predicted": of(0.1), "options": 4,
                   "next_best": {"decode": "d2", "prefill": null, "predicted": of(0.2)},
                   "loads": {"tokens": 320, "seconds": 0.0125},
                   "measured": {"first_token_s": 0.3, "token_s": null, "cached_tokens": 304}}),
            json!({"rejected": "too late"}),
        ]);
        assert!(told.starts_with("prefill p1, decode d1\n"), "{told}");
        let line = |begins: &str| told.lines().find(|line| line.trim().starts_with(begins)).unwrap().to_owned();
        assert!(line("until the prompts").ends_with("100.0 ms      200.0 ms"), "{told}");
        assert!(line("next best of").ends_with("4 options: decode d2, which computes the prompt itself"));
        assert!(line("time to the first").ends_with("250.0 ms      300.0 ms") && line("from token").ends_with('-'));
        assert!(
            told.contains("to take from its own store: 320 tokens in 12.5 ms\n  not computed: 304 tokens that"),
            "{told}"
        );
        assert!(told.ends_with("rejected: too late\n"));
        assert!(text(&[json!({"decode": "d1"})]).contains("nothing was predicted"));
    }
}
