//! What one tenant may use: requests and tokens a minute, and answers at once.
//!
//! An allowance refills steadily and holds a minute's worth. Tokens are charged when they are known: a prompt when it is tokenised, an
//! answer while it is made. So an allowance may fall below zero; then requests wait until it is above again, and nobody is charged for
//! tokens that were only asked for. That is why this is no crate for rate limits: such a crate (`governor`) is asked before, for an amount that is
//! known, and has nothing to owe.

mod kept;

use std::time::{Duration, Instant};

use kept::Kept;

const MINUTE: f64 = 60.0;

/// Limits of a tenant; None: no limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TenantLimits {
    /// Requests a minute.
    pub requests_per_minute: Option<u32>,
    /// Tokens a minute, of prompts and answers together.
    pub tokens_per_minute: Option<u32>,
    /// Answers in the making at a time.
    pub streams: Option<u32>,
    /// Tokens of prompts that are kept at a time because its requests ask for that.
    pub kept_tokens: Option<u32>,
}

/// What a tenant has used.
#[derive(Clone, Debug)]
pub struct TenantMeter {
    limits: TenantLimits,
    requests: Option<Allowance>,
    tokens: Option<Allowance>,
    running: u32,
    kept: Kept,
}

/// Why a request is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OverLimit {
    /// Too many requests this minute. After this time there is room for one, if nothing else is asked meanwhile.
    Requests(Duration),
    /// Too many tokens this minute. After this time there is room again, if nothing else is asked and no answer goes on meanwhile.
    Tokens(Duration),
    /// Too many answers at once. Nobody knows when one ends.
    Streams,
    /// Too many tokens are kept. After this time there is room for the prompt, if no other is kept meanwhile.
    Kept(Duration),
    /// So long a prompt is never kept.
    KeptNever,
    /// Such a request is never let in.
    Never,
}

/// How much of an allowance is left.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Left {
    /// The allowance of a minute.
    pub limit: u32,
    /// What is left of it.
    pub remaining: u32,
    /// When all of it is there again, if nothing more is used.
    pub reset: Duration,
}

#[derive(Clone, Copy, Debug)]
struct Allowance {
    per_minute: u32,
    /// At `at`.
    left: f64,
    at: Instant,
}

impl Allowance {
    fn full(per_minute: u32, now: Instant) -> Allowance {
        Allowance { per_minute, left: per_minute.into(), at: now }
    }

    fn refill(&mut self, now: Instant) {
        let full = f64::from(self.per_minute);
        let seconds = now.saturating_duration_since(self.at).as_secs_f64();
        (self.left, self.at) = ((self.left + full * seconds / MINUTE).min(full), now.max(self.at));
    }

    /// How long until so much is left. Never longer than it takes to fill the allowance.
    fn until(&self, wanted: f64) -> Duration {
        let missing = (wanted.min(self.per_minute.into()) - self.left).max(0.0);
        match self.per_minute {
            0 => Duration::MAX,
            // Rounded up, so that it is there by then.
            per_minute => Duration::from_millis((missing * MINUTE * 1e3 / f64::from(per_minute)).ceil() as u64),
        }
    }

    fn left(&self) -> Left {
        let remaining = self.left.max(0.0) as u32;
        Left { limit: self.per_minute, remaining, reset: self.until(self.per_minute.into()) }
    }
}

impl TenantMeter {
    /// Nothing is used yet.
    pub fn new(limits: TenantLimits, now: Instant) -> TenantMeter {
        let allowance = |limit: Option<u32>| limit.map(|limit| Allowance::full(limit, now));
        let (requests, tokens) = (allowance(limits.requests_per_minute), allowance(limits.tokens_per_minute));
        TenantMeter { limits, requests, tokens, running: 0, kept: Kept::default() }
    }

    /// Has these limits from now on. What was used stays used.
    pub fn set_limits(&mut self, limits: TenantLimits, now: Instant) {
        let change = |old: Option<Allowance>, limit: Option<u32>| {
            let mut new = Allowance::full(limit?, now);
            if let Some(mut old) = old {
                old.refill(now);
                new.left -= f64::from(old.per_minute) - old.left;
            }
            Some(new)
        };
        self.requests = change(self.requests, limits.requests_per_minute);
        self.tokens = change(self.tokens, limits.tokens_per_minute);
        self.limits = limits;
    }

    /// Counts a request with this many answers until [`TenantMeter::release`].
    ///
    /// # Errors
    /// Why it is over a limit. Then nothing is counted.
    pub fn admit(&mut self, answers: u32, now: Instant) -> Result<(), OverLimit> {
        self.check(answers, now)?;
        if let Some(requests) = &mut self.requests {
            requests.left -= 1.0;
        }
        self.running += answers;
        Ok(())
    }

    /// Whether a request with this many answers would be let in.
    ///
    /// # Errors
    /// Why it would not. Of several reasons, the one that lasts longest.
    pub fn check(&mut self, answers: u32, now: Instant) -> Result<(), OverLimit> {
        self.refill(now);
        let TenantLimits { requests_per_minute, tokens_per_minute, streams, .. } = self.limits;
        if streams.is_some_and(|most| answers > most) || requests_per_minute == Some(0) || tokens_per_minute == Some(0)
        {
            return Err(OverLimit::Never);
        }
        let wait = |allowance: &Option<Allowance>| {
            allowance.filter(|a| a.left < 1.0).map_or(Duration::ZERO, |allowance| allowance.until(1.0))
        };
        let (requests, tokens) = (wait(&self.requests), wait(&self.tokens));
        if !tokens.is_zero() && tokens >= requests {
            return Err(OverLimit::Tokens(tokens));
        }
        if !requests.is_zero() {
            return Err(OverLimit::Requests(requests));
        }
        match streams.is_some_and(|most| self.running.saturating_add(answers) > most) {
            true => Err(OverLimit::Streams),
            false => Ok(()),
        }
    }

    /// So many tokens were used.
    pub fn charge(&mut self, tokens: u32, now: Instant) {
        self.refill(now);
        if let Some(allowance) = &mut self.tokens {
            allowance.left -= f64::from(tokens);
        }
    }

    /// A request asks to keep a prompt of so many tokens for this long. `prompt`: a hash of it.
    ///
    /// # Errors
    /// It is over the limit, and does not count.
    pub fn keep(&mut self, prompt: u64, tokens: u32, time: Duration, now: Instant) -> Result<(), OverLimit> {
        let Some(limit) = self.limits.kept_tokens else { return Ok(()) };
        self.kept.keep((prompt, tokens), time, limit, now)
    }

    /// True when nothing would be lost by forgetting what was used.
    pub fn is_fresh(&mut self, now: Instant) -> bool {
        self.refill(now);
        let full = |allowance: &Option<Allowance>| allowance.is_none_or(|a| a.left >= a.per_minute.into());
        self.running == 0 && self.kept.is_empty(now) && full(&self.requests) && full(&self.tokens)
    }

    /// So many answers have ended.
    pub fn release(&mut self, answers: u32) {
        self.running = self.running.saturating_sub(answers);
    }

    /// What is left of requests and of tokens; None where there is no limit.
    pub fn left(&mut self, now: Instant) -> (Option<Left>, Option<Left>) {
        self.refill(now);
        (self.requests.as_ref().map(Allowance::left), self.tokens.as_ref().map(Allowance::left))
    }

    fn refill(&mut self, now: Instant) {
        self.requests.iter_mut().chain(&mut self.tokens).for_each(|allowance| allowance.refill(now));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: TenantLimits = TenantLimits {
        requests_per_minute: Some(6),
        tokens_per_minute: Some(600),
        streams: Some(3),
        kept_tokens: None,
    };

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn requests_refill_steadily_and_the_wait_is_true() {
        let now = Instant::now();
        let limits = TenantLimits { streams: None, tokens_per_minute: None, ..LIMITS };
        let mut meter = TenantMeter::new(limits, now);
        for _ in 0..6 {
            assert_eq!(meter.admit(1, now), Ok(()));
        }
        let Err(OverLimit::Requests(wait)) = meter.admit(1, now + seconds(4)) else { panic!("admitted") };
        assert!(wait >= seconds(6) && wait < seconds(7), "{wait:?}");
        let now = now + seconds(4);
        assert!(meter.admit(1, now + wait - Duration::from_millis(2)).is_err());
        assert_eq!(meter.admit(1, now + wait), Ok(()), "after the time that was said");
        assert_eq!(meter.left(now + wait).0.map(|left| left.remaining), Some(0));
        // A minute's worth at most, however long nothing was asked.
        let later = now + seconds(3600);
        let admitted = (0..20).filter(|_| meter.admit(1, later).is_ok()).count();
        assert_eq!(admitted, 6);
    }

    #[test]
    fn tokens_are_charged_when_they_are_used_and_a_debt_is_waited_for() {
        let now = Instant::now();
        let mut meter = TenantMeter::new(LIMITS, now);
        assert_eq!(meter.admit(1, now), Ok(()));
        meter.charge(1000, now);
        assert_eq!(meter.left(now).1, Some(Left { limit: 600, remaining: 0, reset: seconds(100) }));
        let Err(OverLimit::Tokens(wait)) = meter.admit(1, now) else { panic!("admitted") };
        assert!(wait > seconds(40) && wait < seconds(41), "{wait:?}");
        assert!(meter.admit(1, now + wait - Duration::from_millis(10)).is_err());
        assert_eq!(meter.admit(1, now + wait), Ok(()));
        assert_eq!(meter.left(now + wait).0.map(|left| left.remaining), Some(5), "what was refused is not counted");
    }

    #[test]
    fn answers_at_once_are_bounded() {
        let now = Instant::now();
        let mut meter = TenantMeter::new(LIMITS, now);
        assert_eq!(meter.admit(4, now), Err(OverLimit::Never));
        assert_eq!(meter.admit(2, now), Ok(()));
        assert_eq!(meter.admit(2, now), Err(OverLimit::Streams));
        meter.release(2);
        assert_eq!(meter.admit(3, now), Ok(()));
    }

    #[test]
    fn other_limits_forget_nothing() {
        let now = Instant::now();
        let mut meter = TenantMeter::new(LIMITS, now);
        meter.charge(500, now);
        meter.set_limits(TenantLimits { tokens_per_minute: Some(550), ..LIMITS }, now);
        assert_eq!(meter.left(now).1.map(|left| left.remaining), Some(50));
        meter.set_limits(TenantLimits::default(), now);
        assert_eq!(meter.left(now), (None, None));
        assert_eq!((0..1000).filter(|_| meter.admit(9, now).is_ok()).count(), 1000, "no limits");
    }
}
