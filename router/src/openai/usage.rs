//! What an answer used.

use std::collections::BTreeMap;

use baton_types::Usage;

/// Adds up the tokens used by an answer's choices. A prompt counts once, however many answers it has.
#[derive(Clone, Debug, Default)]
pub(crate) struct UsageSum {
    sum: Usage,
    /// Tokens of the answers' thoughts.
    pub thought: u32,
    /// Per prompt: the fewest cached tokens of any of its choices. The others may have reused what that choice computed.
    cached: BTreeMap<u32, u32>,
}

impl UsageSum {
    /// Adds a choice that has ended. `n` is the number of choices per prompt.
    pub fn add(&mut self, choice: u32, n: u32, usage: Usage) {
        self.sum.completion_tokens += usage.completion_tokens;
        if choice.is_multiple_of(n) {
            self.sum.prompt_tokens += usage.prompt_tokens;
        }
        let cached = self.cached.entry(choice / n).or_insert(usage.cached_tokens);
        *cached = usage.cached_tokens.min(*cached);
    }

    /// The sum.
    pub fn usage(&self) -> Usage {
        Usage { cached_tokens: self.cached.values().sum(), ..self.sum }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_counts_once_and_what_its_own_choices_computed_is_not_reuse() {
        let mut sum = UsageSum::default();
        let usage = |prompt_tokens, cached_tokens| Usage { prompt_tokens, completion_tokens: 5, cached_tokens };
        // Two prompts with two answers each. Choice 1 computed the first prompt; choice 0 reused its KV.
        for (choice, usage) in [(0, usage(10, 9)), (3, usage(20, 16)), (1, usage(10, 0)), (2, usage(20, 19))] {
            sum.add(choice, 2, usage);
        }
        assert_eq!(sum.usage(), Usage { prompt_tokens: 30, completion_tokens: 20, cached_tokens: 16 });
    }
}
