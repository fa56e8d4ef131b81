//! Softmax weights of a vocabulary, e^(x / temperature - largest), and their sums. This is the part of sampling that touches every logit.
//!
//! It reads 4 bytes per logit and does about 25 f64 operations for it, which limit its speed. It uses multiplications, additions and one
//! division, each rounded by itself and in a fixed order, so that every host gets the same bits whatever the width of its registers (I1).

/// Logits per partial sum.
pub(crate) const CHUNK: usize = 256;

/// Sums computed side by side within a chunk.
const LANES: usize = 8;

/// A row's logits with a temperature.
#[derive(Clone, Copy)]
pub(crate) struct SoftmaxWeights<'a> {
    pub logits: &'a [f32],
    pub temperature: f32,
    /// The largest of the logits, divided by the temperature.
    pub largest: f32,
}

impl SoftmaxWeights<'_> {
    /// The weight of a logit that is already divided by the temperature.
    #[inline(always)]
    pub fn of(&self, x: f32) -> f64 {
        exp((x - self.largest) as f64)
    }

    /// The weight of a token.
    #[inline(always)]
    pub fn at(&self, id: usize) -> f64 {
        self.of(self.logits[id] / self.temperature)
    }

    /// Writes the sum of each [`CHUNK`] logits' weights to `sums`, in place of its contents. Returns the sum of all.
    pub fn sum(&self, sums: &mut Vec<f64>) -> f64 {
        sums.clear();
        self.chunks_as_wide_as_can_be(sums);
        sums.iter().sum()
    }

    #[cfg(target_arch = "x86_64")]
    fn chunks_as_wide_as_can_be(&self, sums: &mut Vec<f64>) {
        if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512dq") {
            // SAFETY: the CPU has these features, as just checked.
            unsafe { self.chunks_avx512(sums) }
        } else if is_x86_feature_detected!("avx2") {
            // SAFETY: the CPU has this feature, as just checked.
            unsafe { self.chunks_avx2(sums) }
        } else {
            self.chunks(sums);
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn chunks_as_wide_as_can_be(&self, sums: &mut Vec<f64>) {
        self.chunks(sums);
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512dq")]
    fn chunks_avx512(&self, sums: &mut Vec<f64>) {
        self.chunks(sums);
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    fn chunks_avx2(&self, sums: &mut Vec<f64>) {
        self.chunks(sums);
    }

    #[inline(always)]
    fn chunks(&self, sums: &mut Vec<f64>) {
        let mut weights = [0.0; CHUNK];
        for chunk in self.logits.chunks(CHUNK) {
            // Two plain loops, one over elements and one over lanes, so that both become vector instructions.
            for (weight, x) in weights.iter_mut().zip(chunk) {
                *weight = self.of(x / self.temperature);
            }
            let mut lanes = [0.0; LANES];
            for group in weights[..chunk.len()].chunks(LANES) {
                lanes.iter_mut().zip(group).for_each(|(lane, weight)| *lane += weight);
            }
            sums.push(lanes.iter().sum());
        }
    }
}

/// e^x for x ≤ 0; 0 for x below -700 and for NaN. Relative error below 1e-9.
#[inline(always)]
fn exp(x: f64) -> f64 {
    /// Adding this to a number of at most 51 bits leaves its nearest integer in the low bits.
    const ROUND: f64 = 6_755_399_441_055_744.0;
    /// ln 2 in two parts; the product of the first part and an exponent is exact.
    const LN_2: (f64, f64) = (0.693_147_180_369_123_8, 1.908_214_929_270_587_7e-10);
    /// Coefficients of the Taylor series after 1 / 8!, from the highest degree down.
    const SERIES: [f64; 8] = [1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0];
    let counts = x >= -700.0;
    let x = if counts { x } else { 0.0 };
    let shifted = x * std::f64::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (x - n * LN_2.0) - n * LN_2.1;
    let mut sum = 1.0 / 40320.0;
    for coefficient in SERIES {
        sum = sum * r + coefficient;
    }
    let power = f64::from_bits((shifted.to_bits() << 52).wrapping_add(1023 << 52));
    if counts { sum * power } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_exp() {
        for i in 0..70_000 {
            let x = -(i as f64) / 100.0;
            assert!((exp(x) - x.exp()).abs() <= 1e-9 * x.exp(), "{x}");
        }
        assert_eq!(exp(0.0), 1.0);
        assert_eq!([f64::NAN, f64::NEG_INFINITY, -701.0].map(exp), [0.0; 3]);
    }

    #[test]
    fn sums_are_those_of_the_plain_loop_on_every_host() {
        let logits: Vec<f32> = (0..2 * CHUNK + 13).map(|i| ((i * 37 % 101) as f32 - 100.0) / 7.0).collect();
        let weights = SoftmaxWeights { logits: &logits, temperature: 0.7, largest: 0.0 };
        let (mut sums, mut plain) = (vec![1.0], Vec::new());
        let total = weights.sum(&mut sums);
        weights.chunks(&mut plain);
        assert_eq!(sums, plain, "bit by bit");
        for (i, sum) in sums.iter().enumerate() {
            let ids = i * CHUNK..logits.len().min((i + 1) * CHUNK);
            let want: f64 = ids.map(|id| (f64::from(logits[id]) / f64::from(0.7f32)).exp()).sum();
            assert!((sum - want).abs() < 1e-5 * want, "{sum} {want}");
        }
        assert_eq!(total, sums.iter().sum::<f64>());
    }
}
