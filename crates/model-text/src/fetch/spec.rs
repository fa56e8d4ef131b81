//! Parses the name of a hub's model, as given on the command line. Pure.

/// `org/name`, optionally with `@` and a revision, and with `:` and a file or quantisation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct RepositorySpec {
    pub id: String,
    /// A branch, tag or commit; None: the newest commit of the main branch, when it was first fetched.
    pub revision: Option<String>,
    /// A file's name or a quantisation.
    pub wanted: Option<String>,
}

impl RepositorySpec {
    pub fn parse(spec: &str) -> Option<RepositorySpec> {
        let split = |text, at| match str::split_once(text, at) {
            Some((before, after)) => (before, Some(after)),
            None => (text, None),
        };
        let (repository, wanted) = split(spec, ':');
        let (id, revision) = split(repository, '@');
        let (org, name) = id.split_once('/')?;
        let word = |text: &str| {
            !text.is_empty()
                && !text.starts_with('.')
                && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
        };
        let valid = word(org)
            && word(name)
            && revision.is_none_or(|revision| revision.split('/').all(word))
            && wanted.is_none_or(is_file_name);
        let owned = |text: Option<&str>| text.map(str::to_owned);
        valid.then(|| RepositorySpec { id: id.to_owned(), revision: owned(revision), wanted: owned(wanted) })
    }

    /// As the user wrote it.
    pub fn text(&self) -> String {
        let part =
            |mark: char, text: &Option<String>| text.as_ref().map(|text| format!("{mark}{text}")).unwrap_or_default();
        format!("{}{}{}", self.id, part('@', &self.revision), part(':', &self.wanted))
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
    fn specs_are_repositories_with_an_optional_revision_and_file() {
        let parse = |spec: &str| RepositorySpec::parse(spec).map(|s| s.text());
        for good in [
            "org/name",
            "Org-1/na.me_2",
            "org/name:Q4_K_M",
            "org/name:sub/file.gguf",
            "org/name@v1.2",
            "org/name@refs/pr/1:Q8_0",
        ] {
            assert_eq!(parse(good).as_deref(), Some(good));
        }
        for bad in [
            "name", "a/b/c", "../x", "a/..", "a/b:", "a/b:../c", "a b/c", "a/b:/etc", "/b", "a/", "a/b@", "a/b@../c",
            "a/b@c d", "a@c/b", "a/b@c:",
        ] {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }
}
