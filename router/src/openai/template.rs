//! Chunks that only go on with the text: all but the text is the same in each of a choice.

/// A chunk of one choice that only says text, cut where the text goes. All but the text is the same in each, so it is written once.
pub(crate) struct Template {
    before: Vec<u8>,
    after: Vec<u8>,
}

impl Template {
    /// A text that is not in any other field of a chunk, and how JSON has it.
    pub const TEXT: &str = "\0";
    const ESCAPED: &[u8] = br#""\u0000""#;

    /// Cuts a chunk that says [`Template::TEXT`]. None if it does not.
    pub fn cut(mut chunk: Vec<u8>) -> Option<Template> {
        // From the end: names come first, and have what they like in them.
        let at = chunk.windows(Self::ESCAPED.len()).rposition(|part| part == Self::ESCAPED)?;
        let after = chunk.split_off(at + Self::ESCAPED.len());
        chunk.truncate(at);
        Some(Template { before: chunk, after })
    }

    /// Appends the chunk that says this.
    pub fn chunk(&self, text: &str, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.before);
        // Cannot fail: it is a string.
        let _ = serde_json::to_writer(&mut *out, text);
        out.extend_from_slice(&self.after);
    }
}
