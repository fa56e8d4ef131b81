//! `baton model estimate`: how much memory a model needs for weights and KV, how many sequences fit, and how long KV travels.

use std::path::Path;

use anyhow::{Context, bail};
use baton_model_files::{
    Device, Estimate, EstimateOptions, ModelConfig, RandomModel, WeightKind, estimate, fetch, inspect,
};
use baton_runtime::Bytes;
use baton_types::KvDtype;
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};

/// `baton model estimate`.
pub fn command() -> Command {
    let number = |name: &'static str, value: &'static str| {
        Arg::new(name).long(name).value_name(value).value_parser(value_parser!(u32))
    };
    let word = |name: &'static str, value: &'static str| Arg::new(name).long(name).value_name(value);
    let usual = EstimateOptions::default();
    Command::new("estimate")
        .about("Says how much memory a model needs for weights and KV, how many sequences fit, and how long KV travels")
        .after_help("Only a configuration is read for a shape of `baton model list` (with or without random:) and for a config.json. Other models are fetched.")
        .arg(Arg::new("model").required(true).value_name("MODEL").help("A shape, a config.json, a name, a path, or org/name on the hub"))
        .arg(word("kv-type", "TYPE").default_value("f16").value_parser(value_parser!(KvDtype)).help("Element type of KV: f32, f16, bf16, q8, fp8 or int4"))
        .arg(number("block-size", "TOKENS").default_value("16").help("Tokens of a KV block"))
        .arg(number("context", "TOKENS").help("Tokens of each sequence; default: the model's context"))
        .arg(number("prompt", "TOKENS").default_value(usual.prompt.to_string()).help("Tokens of the prompt whose KV travels"))
        .arg(number("tp", "N").default_value("1").help("Number of tensor-parallel ranks"))
        .arg(word("kv-memory", "BYTES").value_parser(value_parser!(Bytes)).conflicts_with("gpu-memory").help("Memory of the KV pool; default: 512MiB"))
        .arg(word("gpu-memory", "BYTES").value_parser(value_parser!(Bytes)).help("Memory of each rank's GPU: the pool takes what the model leaves"))
        .arg(
            word("gpu-memory-fraction", "SHARE")
                .value_parser(value_parser!(f64))
                .default_value("0.9")
                .help("Share of the GPU's memory that a worker may use"),
        )
        .arg(word("weights", "TYPE").default_value("bf16").value_parser(value_parser!(WeightKind)).help("Type of the weights on a GPU: bf16 or fp8"))
        .arg(word("link", "BYTES").value_parser(value_parser!(Bytes)).help("Bytes a second of one more link, such as 2GiB"))
        .arg(Arg::new("json").long("json").action(ArgAction::SetTrue).help("As JSON"))
}

/// Estimates and prints.
pub fn run(matches: &ArgMatches, source: &fetch::Source) -> anyhow::Result<()> {
    let spec = matches.get_one::<String>("model").context("a model is needed")?;
    let (config, stored) = configuration(spec, source)?;
    let told = estimate(&config, &options(matches)?)?;
    if matches.get_flag("json") {
        let mut json = serde_json::to_value(&told)?;
        json["stored_weight_bytes"] = stored.into();
        println!("{json:#}");
    } else {
        print!("{}", text(&told, stored));
    }
    Ok(())
}

/// A model's configuration, and the bytes of its weights where there are files with them.
fn configuration(spec: &str, source: &fetch::Source) -> anyhow::Result<(ModelConfig, Option<u64>)> {
    let path = Path::new(spec);
    if RandomModel::shapes().any(|shape| shape == spec)
        || (path.is_file() && path.extension().is_some_and(|end| end == "json"))
    {
        let random = RandomModel::parse(&format!("random:{spec}"))?.context("a shape")?;
        return Ok((random.config().clone(), None));
    }
    match fetch::find(source, spec, &fetch::ProgressBar::new())? {
        fetch::ModelSource::Random(random) => Ok((random.config().clone(), None)),
        files @ fetch::ModelSource::Files(_) => {
            let model = files.open()?;
            Ok((model.config().clone(), Some(inspect(&model).bytes)))
        }
    }
}

fn options(matches: &ArgMatches) -> anyhow::Result<EstimateOptions> {
    let number = |name: &str| matches.get_one::<u32>(name).copied();
    let bytes = |name: &str| matches.get_one::<Bytes>(name).map(|bytes| bytes.0);
    let usual = EstimateOptions::default();
    let fraction = matches.get_one("gpu-memory-fraction").copied().unwrap_or(0.9);
    let device = match (bytes("gpu-memory"), bytes("kv-memory")) {
        (Some(memory), _) => Device::Gpu { memory, fraction },
        (None, Some(memory)) => Device::Pool(memory),
        (None, None) => usual.device,
    };
    let link = bytes("link");
    if link == Some(0) {
        bail!("--link is 0 bytes a second; it must be more");
    }
    Ok(EstimateOptions {
        kv_type: matches.get_one("kv-type").copied().unwrap_or(usual.kv_type),
        block_size: number("block-size").unwrap_or(usual.block_size),
        ranks: number("tp").unwrap_or(usual.ranks),
        weights: matches.get_one("weights").copied().unwrap_or_default(),
        device,
        context: number("context"),
        prompt: number("prompt").unwrap_or(usual.prompt),
        link: link.map(|rate| rate as f64),
        ..usual
    })
}

/// The estimate for people.
fn text(told: &Estimate, stored: Option<u64>) -> String {
    let Estimate { layers, heads, kv_heads, head_dim, ranks, .. } = *told;
    let windowed = match told.windowed_layers {
        0 => String::new(),
        layers => format!(", {layers} of them with a window"),
    };
    let each = if ranks > 1 { ", each rank" } else { "" };
    let mut lines = vec![
        (
            "shape",
            format!(
                "{layers} layers{windowed}; {heads} heads, {kv_heads} KV heads of {head_dim}; {} tokens of context",
                told.context_length
            ),
        ),
        ("parameters", millions(told.parameters)),
        (
            "weights on a GPU",
            format!("{}{each}; {} more to work with", size(told.weight_bytes), size(told.working_bytes)),
        ),
    ];
    lines.extend(stored.map(|bytes| ("weights in the file", size(bytes))));
    lines.extend([
        ("KV of a token", format!("{} bytes", told.token_bytes)),
        ("KV of a block", format!("{} bytes, {} tokens", told.block_bytes, told.block_size)),
        ("KV pool", format!("{} blocks, {}", told.blocks, size(told.pool_bytes))),
        ("a sequence", format!("{} tokens, {} of KV", told.sequence_tokens, size(told.sequence_bytes))),
        ("sequences that fit", told.sequences.to_string()),
        ("a prompt's KV", format!("{} tokens, {}", told.prompt_tokens, size(told.prompt_bytes))),
    ]);
    let mut text: String = lines.into_iter().map(|(name, value)| format!("{name:<20} {value}\n")).collect();
    text += "\nIt travels in, at a link's nominal rate\n";
    for travel in &told.transfers {
        let rate = format!("{:.2} GB/s", travel.bytes_per_second / 1e9);
        text += &format!("  {:<18} {rate:>12} {:>12}\n", travel.link, format!("{:.2} ms", travel.seconds * 1e3));
    }
    text
}

fn millions(parameters: u64) -> String {
    match parameters as f64 {
        many if many >= 1e8 => format!("{:.2} billion", many / 1e9),
        few => format!("{:.2} million", few / 1e6),
    }
}

fn size(bytes: u64) -> String {
    match bytes as f64 {
        bytes if bytes >= GIB => format!("{:.2} GiB", bytes / GIB),
        bytes => format!("{:.2} MiB", bytes / (1u64 << 20) as f64),
    }
}

const GIB: f64 = (1u64 << 30) as f64;

#[cfg(test)]
mod tests {
    use super::*;

    fn told(words: &[&str]) -> anyhow::Result<String> {
        let matches = command().try_get_matches_from([&["estimate"], words].concat())?;
        let (config, stored) =
            configuration(matches.get_one::<String>("model").unwrap(), &fetch::Source::new(None, None, None)?)?;
        Ok(text(&estimate(&config, &options(&matches)?)?, stored))
    }

    #[test]
    fn a_shape_by_name_and_a_config_json_say_the_same() {
        let by_name = told(&["llama-3.1-8b", "--context", "8192", "--kv-memory", "80GiB", "--link", "1GiB"]).unwrap();
        for line in [
            "KV of a token        131072 bytes",
            "sequences that fit   80",
            "given                 1.07 GB/s    500.00 ms",
        ] {
            assert!(by_name.contains(line), "{line} is missing in\n{by_name}");
        }
        let file = tempfile::Builder::new().suffix(".json").tempfile().unwrap();
        std::fs::write(file.path(), include_str!("../../../crates/model-text/src/shapes/llama-3.1-8b.json")).unwrap();
        let path = file.path().to_str().unwrap();
        assert_eq!(told(&[path, "--context", "8192", "--kv-memory", "80GiB", "--link", "1GiB"]).unwrap(), by_name);
    }

    #[test]
    fn what_cannot_be_is_refused() {
        assert!(told(&["tiny", "--tp", "3"]).unwrap_err().to_string().contains("tp: is 3"));
        assert!(told(&["tiny", "--kv-type", "f15"]).is_err());
        assert!(told(&["tiny", "--kv-memory", "1GiB", "--gpu-memory", "1GiB"]).is_err());
        assert!(told(&["tiny", "--link", "0B"]).unwrap_err().to_string().contains("--link is 0"));
    }
}
