//! Which files of a hub repository make up the model. Pure: names in, names out.

/// What to fetch.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Choice {
    /// One GGUF file.
    Gguf(String),
    /// A directory.
    Directory {
        /// Its files except the weights.
        text: Vec<String>,
        /// The single weight file, or the index that names several ([`INDEX`]).
        weights: &'static str,
    },
}

/// The index that names the weight files, where there are several.
pub const INDEX: &str = "model.safetensors.index.json";
/// The weights, where they are in one file.
pub const SINGLE: &str = "model.safetensors";

/// Quantisations in order of preference when none is asked for: small ones with little loss first.
const PREFERRED: [&str; 8] = ["Q4_K_M", "Q4_K_S", "Q5_K_M", "Q8_0", "Q4_0", "Q6_K", "F16", "BF16"];

const NEEDED: [&str; 2] = ["config.json", "tokenizer.json"];
const USEFUL: [&str; 4] =
    ["tokenizer_config.json", "generation_config.json", "chat_template.jinja", "chat_template.json"];

/// Chooses among the files of a repository. `wanted` is a file's name or a quantisation.
pub(super) fn choose(files: &[String], wanted: Option<&str>) -> Result<Choice, String> {
    let has = |name: &str| files.iter().any(|file| file == name);
    let ggufs: Vec<&String> = files.iter().filter(|file| is_model(file)).collect();
    let listed = || ggufs.iter().map(|file| file.as_str()).collect::<Vec<_>>().join(", ");
    if let Some(wanted) = wanted {
        return match matching(&ggufs, wanted)[..] {
            [file] => Ok(Choice::Gguf(file.clone())),
            [] => Err(format!("no GGUF file matches {wanted:?}; there are: {}", listed())),
            _ => Err(format!("{wanted:?} matches several GGUF files; name one of: {}", listed())),
        };
    }
    if has(INDEX) || has(SINGLE) {
        if let Some(missing) = NEEDED.iter().find(|name| !has(name)) {
            return Err(format!("the repository has safetensors weights but no {missing}"));
        }
        let text = NEEDED.iter().chain(&USEFUL).copied().filter(|name| has(name)).map(str::to_owned).collect();
        return Ok(Choice::Directory { text, weights: if has(SINGLE) { SINGLE } else { INDEX } });
    }
    let preferred = || PREFERRED.iter().find_map(|name| matching(&ggufs, name).first().copied());
    match ggufs[..] {
        [] => Err("the repository has neither a GGUF file nor safetensors weights".to_owned()),
        [only] => Ok(Choice::Gguf(only.clone())),
        _ => preferred()
            .map(|file| Choice::Gguf(file.clone()))
            .ok_or_else(|| format!("several GGUF files; append one after a colon: {}", listed())),
    }
}

/// Whether a file is a GGUF file that holds a whole model: no image projector, no part of a split file.
fn is_model(file: &str) -> bool {
    file.ends_with(".gguf") && !file.contains("mmproj") && !file.contains("-of-")
}

/// The file with that name, else the files whose name has the quantisation as a separate word.
fn matching<'f>(ggufs: &[&'f String], wanted: &str) -> Vec<&'f String> {
    if let Some(file) = ggufs.iter().find(|file| file.as_str() == wanted) {
        return vec![file];
    }
    let wanted = wanted.to_ascii_lowercase();
    let has_word = |file: &str| {
        let stem = file.trim_end_matches(".gguf").to_ascii_lowercase();
        stem.strip_suffix(&wanted).is_some_and(|before| before.is_empty() || before.ends_with(['-', '.', '_', '/']))
    };
    ggufs.iter().copied().filter(|file| has_word(file)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(files: &[&str]) -> Vec<String> {
        files.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn quantisations_are_words_of_the_file_name() {
        let files = names(&[
            "m-Q4_0.gguf",
            "m-Q4_K_M.gguf",
            "m-IQ4_K_M.gguf",
            "mmproj-Q8_0.gguf",
            "m-Q8_0-00001-of-00002.gguf",
        ]);
        let gguf = |name: &str| Ok(Choice::Gguf(name.to_owned()));
        assert_eq!(choose(&files, None), gguf("m-Q4_K_M.gguf"));
        assert_eq!(choose(&files, Some("q4_0")), gguf("m-Q4_0.gguf"));
        assert_eq!(choose(&files, Some("m-IQ4_K_M.gguf")), gguf("m-IQ4_K_M.gguf"));
        assert!(choose(&files, Some("Q8_0")).unwrap_err().contains("m-Q4_0.gguf, m-Q4_K_M.gguf"));
        assert_eq!(choose(&names(&["odd.gguf"]), None), gguf("odd.gguf"));
        assert!(choose(&names(&["a-x.gguf", "b-x.gguf"]), Some("x")).unwrap_err().contains("several"));
        assert!(choose(&names(&["README.md"]), None).is_err());
    }

    #[test]
    fn safetensors_repositories_need_their_companions() {
        let files = names(&["config.json", "tokenizer.json", "model.safetensors", "README.md", "chat_template.jinja"]);
        let text = names(&["config.json", "tokenizer.json", "chat_template.jinja"]);
        assert_eq!(choose(&files, None), Ok(Choice::Directory { text, weights: SINGLE }));
        assert!(choose(&names(&["config.json", "model.safetensors"]), None).unwrap_err().contains("tokenizer.json"));
        let sharded = names(&[
            "config.json",
            "tokenizer.json",
            "model.safetensors.index.json",
            "model-00001-of-00002.safetensors",
        ]);
        assert!(matches!(choose(&sharded, None), Ok(Choice::Directory { weights: INDEX, .. })));
    }
}
