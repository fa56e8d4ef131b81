//! Log probabilities of prompts, cut into messages.

use baton_types::TokenOut;

/// Most scored tokens in one message: with 20 likely ones each, such a message stays below half a megabyte.
pub const MOST_SCORED: usize = 1024;

/// The tokens in pieces of at most [`MOST_SCORED`], in order.
pub(crate) fn in_messages(tokens: Vec<TokenOut>) -> impl Iterator<Item = Vec<TokenOut>> {
    let mut tokens = tokens.into_iter();
    std::iter::from_fn(move || {
        let next: Vec<_> = tokens.by_ref().take(MOST_SCORED).collect();
        (!next.is_empty()).then_some(next)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_lost_and_no_message_is_too_large() {
        for count in [0, 1, MOST_SCORED, MOST_SCORED + 1, 3 * MOST_SCORED] {
            let tokens = (0..count as u32).map(|index| TokenOut { index, ..TokenOut::default() });
            let messages: Vec<_> = in_messages(tokens.clone().collect()).collect();
            assert!(messages.iter().all(|message| (1..=MOST_SCORED).contains(&message.len())));
            assert!(messages.concat().into_iter().eq(tokens), "{count}");
        }
    }
}
