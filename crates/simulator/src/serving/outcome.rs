//! What became of the requests.

/// What one request saw.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Served {
    /// Seconds from when it came to its first token.
    pub ttft: f64,
    /// Mean seconds from one token to the next; 0 with one token.
    pub itl: f64,
    /// Longest time from one token to the next, in seconds.
    pub longest: f64,
    /// Tokens of its prompt that were not computed.
    pub cached: u32,
    /// What was predicted when it was placed: the time to the first token, and from one token to the next, in seconds.
    pub predicted: Option<(f64, f64)>,
    /// Tokens of its prompt.
    pub input: u32,
}

/// The outcome of a run.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Outcome {
    /// Each request that was answered.
    pub served: Vec<Served>,
    /// Requests that were rejected.
    pub rejected: usize,
    /// Virtual seconds from the first request to the last.
    pub seconds: f64,
    /// Share of each second in which the prefill workers computed, in the mean.
    pub prefill_load: Vec<f64>,
    /// Tokens of the answers in progress and their prompts, all decode workers together, once a second.
    pub decode_load: Vec<f64>,
}

/// Mean, median and 99th percentile.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Spread {
    /// Mean.
    pub mean: f64,
    /// Median.
    pub p50: f64,
    /// 99th percentile.
    pub p99: f64,
}

impl Spread {
    /// Of these values; all 0 where there are none.
    pub fn of(mut values: Vec<f64>) -> Spread {
        values.sort_by(f64::total_cmp);
        let at = |share: f64| values.get((values.len() as f64 * share) as usize).copied().unwrap_or_default();
        let mean = values.iter().sum::<f64>() / values.len().max(1) as f64;
        Spread { mean, p50: at(0.5), p99: at(0.99) }
    }
}

impl Outcome {
    /// Times to the first token, in seconds.
    pub fn ttft(&self) -> Spread {
        Spread::of(self.served.iter().map(|served| served.ttft).collect())
    }

    /// Mean times from one token of an answer to the next, in seconds.
    pub fn itl(&self) -> Spread {
        Spread::of(self.served.iter().map(|served| served.itl).collect())
    }

    /// Share of the prompts' tokens that were not computed.
    pub fn hits(&self) -> f64 {
        let sum = |of: fn(&Served) -> u32| self.served.iter().map(|served| f64::from(of(served))).sum::<f64>();
        sum(|served| served.cached) / sum(|served| served.input).max(1.0)
    }

    /// Share of all requests whose first token came within `ttft` and whose others came within `itl`, in the mean, in seconds.
    pub fn attainment(&self, ttft: f64, itl: f64) -> f64 {
        let met = self.served.iter().filter(|served| served.ttft <= ttft && served.itl <= itl).count();
        met as f64 / (self.served.len() + self.rejected).max(1) as f64
    }

    /// Requests a second that met both.
    pub fn goodput(&self, ttft: f64, itl: f64) -> f64 {
        self.attainment(ttft, itl) * (self.served.len() + self.rejected) as f64 / self.seconds.max(1e-9)
    }

    /// Median relative error of the predicted times to the first token and from token to token.
    pub fn errors(&self) -> (f64, f64) {
        let of = |real: fn(&Served) -> f64, predicted: fn((f64, f64)) -> f64| {
            let errors = self.served.iter().filter(|served| real(served) > 0.0).filter_map(|served| {
                let error = (predicted(served.predicted?) - real(served)).abs();
                Some(error / real(served))
            });
            Spread::of(errors.collect()).p50
        };
        (of(|served| served.ttft, |(ttft, _)| ttft), of(|served| served.itl, |(_, itl)| itl))
    }

    /// How much the load of the prefill and of the decode workers goes up and down: the standard deviation over the mean. Of the means of
    /// `seconds` each, since requests come unevenly within seconds, and without the first quarter, in which the load grows.
    pub fn fluctuation(&self, seconds: usize) -> (f64, f64) {
        let of = |load: &[f64]| {
            let means = load[load.len() / 4..].chunks_exact(seconds).map(|load| load.iter().sum::<f64>());
            let (count, sum, squares) =
                means.fold((0.0, 0.0, 0.0), |(n, sum, squares), at| (n + 1.0, sum + at, squares + at * at));
            let mean = sum / f64::max(count, 1.0);
            (squares / f64::max(count, 1.0) - mean * mean).max(0.0).sqrt() / mean.max(1e-9)
        };
        (of(&self.prefill_load), of(&self.decode_load))
    }
}
