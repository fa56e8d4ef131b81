//! Parses the name of a hub's model, as given on the command line. Pure.

/// `org/name`, optionally with `:` and a file or quantisation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct RepositorySpec {
    pub id: String,
    /// A file's name or a quantisation.
    pub wanted: Option<String>,
}

impl RepositorySpec {
    pub fn parse(spec: &str) -> Option<RepositorySpec> {
        let (id, wanted) = match spec.split_once(':') {
            Some((id, wanted)) => (id, Some(wanted)),
            None => (spec, None),
        };
        let (org, name) = id.split_once('/')?;
        let word = |text: &str| {
            !text.is_empty()
                && !text.starts_with('.')
                && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
        };
        let valid = word(org) && word(name) && wanted.is_none_or(is_file_name);
        valid.then(|| RepositorySpec { id: id.to_owned(), wanted: wanted.map(str::to_owned) })
    }

    /// As the user wrote it.
    pub fn text(&self) -> String {
        match &self.wanted {
            Some(wanted) => format!("{}:{wanted}", self.id),
            None => self.id.clone(),
        }
    }
}

/// Whether a name is a relative path that stays below its start. The hub is not trusted to send only such names.
pub(super) fn is_file_name(name: &str) -> bool {
    let part = |part: &str| !part.is_empty() && part != "." && part != "..";
    name.split('/').all(part) && !name.contains(['\\', '\0'])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn specs_are_repositories_with_an_optional_file() {
        let parse = |spec: &str| RepositorySpec::parse(spec).map(|s| s.text());
        for good in ["org/name", "Org-1/na.me_2", "org/name:Q4_K_M", "org/name:sub/file.gguf"] {
            assert_eq!(parse(good).as_deref(), Some(good));
        }
        for bad in ["name", "a/b/c", "../x", "a/..", "a/b:", "a/b:../c", "a b/c", "a/b:/etc", "/b", "a/"] {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }
}
