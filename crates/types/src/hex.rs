//! Bytes as text, for lines between a parent and its child.

/// Two lower-case digits a byte.
pub(crate) fn encode(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The bytes, or None when the text is not hexadecimal, with two digits a byte.
pub(crate) fn decode(text: &str) -> Option<Vec<u8>> {
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    let digit = |d: u8| (d as char).to_digit(16).map(|d| d as u8);
    let byte = |pair: &[u8; 2]| Some(digit(pair[0])? << 4 | digit(pair[1])?);
    if rest.is_empty() { pairs.iter().map(byte).collect() } else { None }
}
