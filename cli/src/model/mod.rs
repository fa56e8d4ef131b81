//! `baton model pull | list | inspect | estimate`.

mod estimate;

use baton_model_files::{RandomModel, fetch, inspect};
use baton_runtime::FetchConfig;
use clap::{Arg, ArgAction, ArgMatches, Command};

/// `baton model`.
pub fn command() -> Command {
    let spec = || {
        Arg::new("model").required(true).value_name("MODEL").help("A name, a path, org/name on the hub, or random:NAME")
    };
    Command::new("model")
        .about("Fetches, lists and describes models")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .args(crate::fetch::args().map(|arg| arg.global(true)))
        .subcommand(Command::new("pull").about("Fetches a model into the cache and prints its path").arg(spec()))
        .subcommand(Command::new("list").about("Lists the models that can be had by name, and those in the cache"))
        .subcommand(
            Command::new("inspect")
                .about("Shows what a model is made of")
                .arg(spec())
                .arg(Arg::new("json").long("json").action(ArgAction::SetTrue).help("As JSON")),
        )
        .subcommand(estimate::command())
}

/// Runs the subcommand.
pub fn run(matches: &ArgMatches) -> anyhow::Result<()> {
    let Some((name, matches)) = matches.subcommand() else { return Ok(()) };
    let FetchConfig { model_cache, hub_endpoint, hub_token_file, model_peers } = crate::fetch::settings(matches)?;
    let source =
        fetch::Source::new(model_cache, hub_endpoint, hub_token_file.as_deref())?.with_peers(model_peers.as_deref())?;
    let spec = || matches.get_one::<String>("model").map_or("", String::as_str);
    let find = || fetch::find(&source, spec(), &fetch::ProgressBar::new());
    match name {
        "pull" => match find()? {
            fetch::ModelSource::Files(path) => println!("{}", path.display()),
            fetch::ModelSource::Random(_) => {
                anyhow::bail!("{} is made when it is opened; there is nothing to fetch", spec())
            }
        },
        "list" => list(source.cache())?,
        "estimate" => estimate::run(matches, &source)?,
        _ => {
            let facts = inspect(&find()?.open()?);
            if matches.get_flag("json") {
                println!("{}", serde_json::to_string_pretty(&facts)?);
            } else {
                print_facts(&serde_json::to_value(&facts)?);
            }
        }
    }
    Ok(())
}

fn list(cache: &std::path::Path) -> anyhow::Result<()> {
    let cached = fetch::list(cache)?;
    println!("{:<40} {:>10}  WHERE", "MODEL", "MB");
    for recipe in fetch::catalogue() {
        if !cached.iter().any(|model| model.spec == recipe.name) {
            println!("{:<40} {:>10}  not fetched yet", recipe.name, recipe.bytes / 1_000_000);
        }
    }
    for shape in RandomModel::shapes() {
        println!("{:<40} {:>10}  made, not fetched", format!("random:{shape}"), 0);
    }
    for model in cached {
        println!("{:<40} {:>10}  {}", model.spec, model.bytes / 1_000_000, model.path.display());
    }
    Ok(())
}

/// Prints one line per field; nested values as compact JSON.
fn print_facts(facts: &serde_json::Value) {
    for (key, value) in facts.as_object().into_iter().flatten() {
        match value {
            serde_json::Value::String(text) => println!("{key:<20} {text}"),
            other => println!("{key:<20} {other}"),
        }
    }
}
