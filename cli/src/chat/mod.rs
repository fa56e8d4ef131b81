//! `baton chat`: a question, or a conversation in a terminal, with a running cluster, streamed over gRPC.

mod client;
mod editor;
mod talk;
mod terminal;

use std::io::{self, IsTerminal, Read, Write};

use anyhow::bail;
use baton_proto::v1;
use clap::{Arg, ArgMatches, Command, value_parser};

pub use client::Client;
use client::{ENOUGH, never};
use editor::{Edited, Editor};
use talk::{HELP, Talk, Typed};

const DIM: &str = "\x1b[2m";
const PLAIN: &str = "\x1b[0m";
const PROMPT: &str = "> ";

/// The arguments that name a router.
pub fn router_args() -> [Arg; 3] {
    let router = Arg::new("router").long("router").value_name("URL").default_value("http://127.0.0.1:8001");
    let key = Arg::new("api-key-file").long("api-key-file").value_name("PATH");
    let authority = Arg::new("tls-ca").long("tls-ca").value_name("PATH");
    [
        router.help("The router's gRPC address"),
        key.help("A file with the API key, where the router needs one (--keys-file)"),
        authority
            .help("Certificates in PEM of the authorities that the router's certificate may come from, with https://"),
    ]
}

/// `baton chat`.
pub fn command() -> Command {
    Command::new("chat")
        .about("Asks a running cluster a question and streams the answer; without a question, holds a conversation")
        .arg(Arg::new("message").value_name("TEXT").help(
            "The question. Without it, in a terminal: a conversation; else the question is read from standard input",
        ))
        .args(router_args())
        .arg(Arg::new("system").long("system").value_name("TEXT").help("A system message to go first"))
        .arg(
            Arg::new("max-tokens")
                .long("max-tokens")
                .value_name("N")
                .value_parser(value_parser!(u32))
                .help(format!("Most tokens of the answer; default: {ENOUGH}, because small models can go on for ever")),
        )
        .arg(
            Arg::new("temperature")
                .long("temperature")
                .value_name("T")
                .default_value("0")
                .value_parser(value_parser!(f32))
                .help("0 always takes the most likely token"),
        )
}

/// Asks, or holds a conversation.
pub async fn run(matches: &ArgMatches) -> anyhow::Result<()> {
    let system = matches.get_one::<String>("system").cloned();
    let question = match matches.get_one::<String>("message") {
        Some(text) => text.clone(),
        None if io::stdin().is_terminal() && io::stdout().is_terminal() => {
            return converse(&mut Client::connect(matches).await?, Talk::new(system)).await;
        }
        None => piped()?,
    };
    let message = |role: &str, content| v1::ChatMessage { role: role.to_owned(), content, ..Default::default() };
    let messages = system.map(|text| message("system", text)).into_iter().chain([message("user", question)]).collect();
    let mut client = Client::connect(matches).await?;
    // What the model thinks is no part of the answer.
    let answer = client.ask(messages, &mut io::stdout(), &mut io::stderr(), never()).await?;
    if answer.stopped.is_some() {
        eprintln!("\n[cut off after {} tokens; --max-tokens allows more]", answer.tokens);
    }
    writeln!(io::stdout())?;
    Ok(())
}

/// A question from a pipe or a file.
fn piped() -> anyhow::Result<String> {
    let mut text = String::new();
    io::stdin().read_to_string(&mut text)?;
    if text.trim().is_empty() {
        bail!("there is no question: give it as TEXT, or on standard input");
    }
    Ok(text.trim_end().to_owned())
}

/// Talks until the user ends it.
async fn converse(client: &mut Client, mut talk: Talk) -> anyhow::Result<()> {
    println!("{DIM}{HELP}{PLAIN}");
    let mut editor = Editor::default();
    loop {
        let read = tokio::task::block_in_place(|| terminal::read_line(&mut editor, PROMPT))?;
        let typed = match read {
            None | Some(Edited::Ended) => return Ok(()),
            Some(Edited::Line(line)) => talk.typed(&line),
            Some(Edited::Interrupted { empty: true }) => Typed::Tell("Ctrl-D ends.".to_owned()),
            Some(Edited::Interrupted { empty: false } | Edited::Going) => Typed::Nothing,
        };
        match typed {
            Typed::Quit => return Ok(()),
            Typed::Nothing => {}
            Typed::Tell(text) => println!("{DIM}{text}{PLAIN}"),
            Typed::Ask => answer(client, &mut talk).await?,
        }
    }
}

/// Asks for the next answer of a conversation. An error ends the answer, and not the conversation.
async fn answer(client: &mut Client, talk: &mut Talk) -> anyhow::Result<()> {
    let stop = async {
        // Without the signal nobody stops it.
        if tokio::signal::ctrl_c().await.is_err() {
            never().await;
        }
    };
    let summary = match client.ask(talk.messages(), &mut io::stdout(), &mut Aside, stop).await {
        Ok(answer) => {
            talk.answered(&answer.text);
            answer.summary()
        }
        Err(error) => {
            talk.answered("");
            format!("{error:#}")
        }
    };
    println!("\n{DIM}{summary}{PLAIN}");
    Ok(())
}

/// Where thoughts go in a conversation: dim, between what is said.
struct Aside;

impl Write for Aside {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        if !text.is_empty() {
            let mut out = io::stdout();
            out.write_all(DIM.as_bytes())?;
            out.write_all(text)?;
            out.write_all(PLAIN.as_bytes())?;
        }
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stdout().flush()
    }
}
