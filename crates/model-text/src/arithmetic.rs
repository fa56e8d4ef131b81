//! What a model's tokens cost in arithmetic, whatever computes them.

use crate::ModelConfig;
use crate::estimate::layer;

/// Floating-point operations, a multiplication and an addition as two. Vectors (norms, biases, activations, softmax) are left out: they are far less.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Arithmetic {
    /// Of a token in all layers, attention to others aside: two for each weight of a matrix.
    pub token: f64,
    /// Of a pair of a token and one that it attends to: q·k and p·v, in all layers and heads. Windows are not taken off.
    pub pair: f64,
    /// Of a token's logits.
    pub logits: f64,
}

impl Arithmetic {
    /// Of a model.
    pub fn of(config: &ModelConfig) -> Arithmetic {
        let (matrices, _) = layer(config);
        let weights: u64 = matrices.iter().map(|[rows, cols]| rows * cols).sum();
        let layers = f64::from(config.layers);
        Arithmetic {
            token: 2.0 * layers * weights as f64,
            pair: 4.0 * layers * f64::from(config.heads) * f64::from(config.head_dim),
            logits: 2.0 * f64::from(config.vocab_size) * f64::from(config.hidden_size),
        }
    }

    /// Of so many tokens, pairs, and tokens whose logits are wanted.
    pub fn flops(&self, tokens: u64, pairs: u64, sampled: u64) -> f64 {
        self.token * tokens as f64 + self.pair * pairs as f64 + self.logits * sampled as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RandomShape;

    /// Llama 3.1 8B: 32 layers of 4096 x 4096 twice, 4096 x 1024 twice, 4096 x 14336 three times; 32 heads of 128; 128,256 ids.
    #[test]
    fn llama_3_1_8b_takes_what_is_said_of_it() {
        let shape = RandomShape::parse("random:llama-3.1-8b").unwrap().unwrap();
        let of = Arithmetic::of(&ModelConfig::of_family(shape.family()).unwrap());
        let weights = 32.0 * (2.0 * 4096.0 * 4096.0 + 2.0 * 4096.0 * 1024.0 + 3.0 * 4096.0 * 14336.0);
        assert_eq!((of.token, of.pair, of.logits), (2.0 * weights, 32.0 * 4.0 * 4096.0, 2.0 * 128_256.0 * 4096.0));
        assert_eq!(of.flops(3, 6, 1), 3.0 * of.token + 6.0 * of.pair + of.logits);
    }
}
