//! What clients ask, and when.

use baton_types::testing::Random;

/// Tokens that share a name in a [`Prompt`].
pub const NAMED: u32 = 512;

/// One request of a workload.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Prompt {
    /// When it comes, in microseconds.
    pub at: u64,
    /// Tokens of the prompt.
    pub input: u32,
    /// Tokens of the answer.
    pub output: u32,
    /// A name for each [`NAMED`] tokens. Prompts that begin with equal names begin with equal tokens.
    pub names: Vec<u64>,
}

impl Prompt {
    /// Its tokens: what equal names stand for is equal.
    pub(super) fn tokens(&self) -> Vec<u32> {
        let token = |at: u32| {
            let name = self.names.get((at / NAMED) as usize).copied().unwrap_or(u64::MAX);
            (mix(name.wrapping_mul(u64::from(NAMED)).wrapping_add(u64::from(at % NAMED))) % 100_000) as u32 + 1
        };
        (0..self.input).map(token).collect()
    }
}

/// The same requests, `times` as fast.
pub fn faster(prompts: &[Prompt], times: f64) -> Vec<Prompt> {
    let faster = |prompt: &Prompt| Prompt { at: (prompt.at as f64 / times) as u64, ..prompt.clone() };
    prompts.iter().map(faster).collect()
}

/// Agents: each begins with the instructions of one of 20 kinds, and comes back, when it has its tool's result, with all that was said before
/// and some more, up to 30 times. Agents begin as a Poisson process of `rate` a second.
pub fn agents(count: usize, rate: f64, seed: u64) -> Vec<Prompt> {
    let (mut random, mut prompts, mut begins, mut name) = (Random(seed), Vec::new(), 0.0, 1 << 32);
    let mut uniform = move |most: u64| random.below(most);
    while prompts.len() < count {
        begins += -(((uniform(1 << 20) + 1) as f64) / f64::from(1 << 20)).ln() / rate;
        let (kind, turns) = (uniform(20), 3 + uniform(28));
        // Instructions and tools: 2,048 to 8,192 tokens that agents of a kind share.
        let mut names: Vec<u64> = (0..4 + kind * 3 / 5).map(|at| kind * 1000 + at).collect();
        let mut at = begins;
        for _ in 0..turns {
            // What was said, and what a tool answered.
            for _ in 0..1 + uniform(4) {
                name += 1;
                names.push(name);
            }
            let (input, output) = (names.len() as u32 * NAMED, 30 + uniform(300) as u32);
            prompts.push(Prompt { at: (at * 1e6) as u64, input, output, names: names.clone() });
            at += 2.0 + uniform(10_000) as f64 / 1e3;
        }
    }
    prompts.sort_by_key(|prompt| prompt.at);
    prompts.truncate(count);
    prompts
}

fn mix(mut at: u64) -> u64 {
    at = (at ^ at >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    at = (at ^ at >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    at ^ at >> 31
}
