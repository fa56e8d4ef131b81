//! Guesses which known name an unknown one was meant to be. For error messages.

/// The name in `names` most similar to `word`, if one is close enough.
pub fn nearest<'a>(word: &str, names: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    nearest_within(word, names, usize::MAX)
}

/// The same as [`nearest`], with at most `most` edits.
pub fn nearest_within<'a>(word: &str, names: impl IntoIterator<Item = &'a str>, most: usize) -> Option<&'a str> {
    let limit = (word.chars().count() / 3 + 1).min(most);
    names.into_iter().map(|name| (distance(word, name), name)).filter(|(d, _)| *d <= limit).min().map(|(_, name)| name)
}

/// Number of edits (insert, delete, replace) between two words.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.iter().enumerate() {
            let replace = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = replace.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_name_is_near_or_absent() {
        let names = ["http", "grpc", "drain_timeout"];
        assert_eq!(nearest("htpp", names), Some("http"));
        assert_eq!(nearest("drain_timout", names), Some("drain_timeout"));
        assert_eq!(nearest("drain-timeout", names), Some("drain_timeout"));
        assert_eq!(nearest("colour", names), None);
        assert_eq!(nearest_within("drain_time", names, 2), None);
        assert_eq!(nearest_within("drain_timeo", names, 2), Some("drain_timeout"));
        assert_eq!(distance("kitten", "sitting"), 3);
        assert_eq!(distance("", "abc"), 3);
    }
}
