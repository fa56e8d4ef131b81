//! Rejects what would come too late, before any work is spent on it (early rejection: Qin et al., "Mooncake", FAST 2025, by predicted load).

use std::time::Duration;

use super::Terms;
use super::predicted::FULL;

/// The longest advice to wait.
const LONGEST: Duration = Duration::from_secs(600);

/// When the tokens of a request have to come. `None`: whenever they do.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Slo {
    /// The first token.
    pub first_token: Option<Duration>,
    /// Each further token after the one before it, in the mean.
    pub token: Option<Duration>,
    /// The whole answer: what is left until its deadline. How long the answer will be nobody knows, so it is missed only where the first token
    /// would come later. And only where the wait for blocks is known, which one of 600 s is not.
    pub deadline: Option<Duration>,
    /// How long it has waited already, of the time until the first token.
    pub waited: Duration,
}

/// An SLO that no placement meets.
#[derive(Clone, Copy, PartialEq, Debug, thiserror::Error)]
#[error("{}", self.text())]
pub struct Missed {
    /// What is predicted where it is predicted to be best.
    pub terms: Terms,
    /// The limit of the first token that is missed.
    pub first_token: Option<Duration>,
    /// The limit of further tokens that is missed.
    pub token: Option<Duration>,
    /// The time until the deadline, if the first token would come after it.
    pub deadline: Option<Duration>,
    /// How long it had waited before this was predicted; the deadline's time begins after that.
    pub waited: Duration,
}

impl Slo {
    /// What is not set of it is as in `other`.
    pub fn or(self, other: Slo) -> Slo {
        let (first_token, token) = (self.first_token.or(other.first_token), self.token.or(other.token));
        Slo { first_token, token, deadline: self.deadline.or(other.deadline), waited: self.waited.max(other.waited) }
    }

    /// What of it is missed where this is predicted.
    pub(super) fn missed(&self, terms: &Terms) -> Option<Missed> {
        let over = |limit: Option<Duration>, seconds: f64| limit.filter(|limit| seconds > limit.as_secs_f64());
        let first_token = over(self.first_token, self.waited.as_secs_f64() + terms.first_token);
        let token = over(self.token, terms.token);
        let deadline = over(self.deadline, if terms.room < FULL { terms.first_token } else { 0.0 });
        let missed = first_token.or(token).or(deadline).is_some();
        missed.then_some(Missed { terms: *terms, first_token, token, deadline, waited: self.waited })
    }
}

impl Missed {
    /// By how much the limits are missed, the worse of the two, as a ratio. 1 is not missed.
    pub(super) fn by(&self) -> f64 {
        let ratio =
            |limit: Option<Duration>, seconds: f64| limit.map_or(1.0, |limit| seconds / limit.as_secs_f64().max(1e-9));
        let first = ratio(self.first_token, self.after()).max(ratio(self.deadline, self.terms.first_token));
        first.max(ratio(self.token, self.terms.token))
    }

    /// When the same request would be taken, if nothing else comes: queues are worked on, and answers end. `None`: never; it takes too long by
    /// itself.
    pub fn retry_after(&self) -> Option<Duration> {
        let Terms { room, queue, first_token, token, answer, .. } = self.terms;
        let first = match self.first().map(|limit| limit.as_secs_f64()) {
            Some(limit) if first_token - room - queue > limit => return None,
            Some(limit) => self.after() - limit,
            None => 0.0,
        };
        // All answers that are here end within the time that one takes, one after the other.
        let tokens = self.token.map_or(0.0, |limit| answer * (1.0 - limit.as_secs_f64() / token));
        let wait = Duration::try_from_secs_f64(first.max(tokens).max(0.0)).unwrap_or(LONGEST);
        Some(wait.clamp(Duration::from_secs(1), LONGEST))
    }

    /// The stricter of the limits of the first token that are missed.
    fn first(&self) -> Option<Duration> {
        self.first_token.into_iter().chain(self.deadline).min()
    }

    /// When the first token is predicted, from the request's arrival on; the deadline's time begins after the wait.
    fn after(&self) -> f64 {
        let waited = if self.first_token.is_some() { self.waited.as_secs_f64() } else { 0.0 };
        waited + self.terms.first_token
    }

    fn text(&self) -> String {
        let Terms { compute, queue, room, token, .. } = self.terms;
        let mut text = String::new();
        if let Some(limit) = self.first() {
            let why = if self.first_token == Some(limit) { "reject_ttft" } else { "the request's deadline" };
            text = format!(
                "the first token is predicted after {} and must come within {} ({why}): {} until the prompts before it are computed, {} for \
                 its own, {} until there are KV blocks",
                say(self.after()),
                say(limit.as_secs_f64()),
                say(queue),
                say(compute),
                say(room)
            );
            if self.after() > self.terms.first_token {
                text += &format!(", after {} of waiting for its turn", say(self.waited.as_secs_f64()));
            }
        }
        if let Some(limit) = self.token {
            let and = if text.is_empty() { "" } else { "; " };
            text += &format!(
                "{and}tokens are predicted {} apart and must be {} apart at most (reject_itl), with the answers beside it",
                say(token),
                say(limit.as_secs_f64())
            );
        }
        let help = if self.token.is_some() || room > queue { "decode" } else { "prefill" };
        match self.retry_after() {
            Some(after) => text + &format!("; retry in {} s, or add {help} workers", after.as_secs_f64().ceil()),
            None => text + "; its own prompt takes longer than that: shorten it, or allow more time",
        }
    }
}

fn say(seconds: f64) -> String {
    match seconds {
        _ if seconds < 0.0995 => format!("{:.0} ms", seconds * 1e3),
        _ if seconds < 9.95 => format!("{seconds:.1} s"),
        _ => format!("{seconds:.0} s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TERMS: Terms = Terms {
        room: 0.0,
        queue: 6.1,
        compute: 1.2,
        handoff: 0.0,
        first_token: 7.3,
        step: 0.05,
        token: 0.05,
        later: 0.0,
        expected: 0.0,
        answer: 10.0,
        others: 3.0,
    };

    fn missed(first_token: Option<u64>, token: Option<u64>, terms: Terms) -> Option<Missed> {
        let ms = |limit: Option<u64>| limit.map(Duration::from_millis);
        Slo { first_token: ms(first_token), token: ms(token), ..Slo::default() }.missed(&terms)
    }

    #[test]
    fn a_rejection_names_the_slo_what_is_predicted_and_what_would_help() {
        assert_eq!(missed(None, None, TERMS), None);
        assert_eq!(missed(Some(7300), Some(50), TERMS), None, "just met");
        let late = missed(Some(5000), Some(50), TERMS).unwrap();
        assert_eq!(
            late.to_string(),
            "the first token is predicted after 7.3 s and must come within 5.0 s (reject_ttft): 6.1 s until the prompts before it are \
             computed, 1.2 s for its own, 0 ms until there are KV blocks; retry in 3 s, or add prefill workers"
        );
        assert!((late.by() - 1.46).abs() < 1e-9);
        let slow = missed(Some(8000), Some(40), TERMS).unwrap();
        assert_eq!(
            slow.to_string(),
            "tokens are predicted 50 ms apart and must be 40 ms apart at most (reject_itl), with the answers beside it; retry in 2 s, or \
             add decode workers"
        );
        let full = missed(Some(5000), None, Terms { room: 20.0, first_token: 27.3, ..TERMS }).unwrap();
        assert!(full.to_string().ends_with("; retry in 23 s, or add decode workers"), "{full}");
        let long = missed(Some(1000), None, TERMS).unwrap();
        assert!(long.retry_after().is_none() && long.to_string().ends_with("shorten it, or allow more time"), "{long}");
    }

    #[test]
    fn what_waited_before_counts() {
        let of = |ms, waited| {
            let (first_token, waited) = (Some(Duration::from_millis(ms)), Duration::from_millis(waited));
            Slo { first_token, waited, ..Slo::default() }.missed(&TERMS)
        };
        assert_eq!(of(9000, 1700), None);
        let late = of(9000, 2700).unwrap();
        assert!(
            late.to_string()
                .starts_with("the first token is predicted after 10 s and must come within 9.0 s (reject_ttft)")
        );
        assert!(
            late.to_string().ends_with(", after 2.7 s of waiting for its turn; retry in 1 s, or add prefill workers"),
            "{late}"
        );
        // By itself its prompt takes 1.2 s: another time it would be in time.
        assert!(of(1300, 1250).unwrap().retry_after().is_some());
        let slo = Slo { deadline: Some(Duration::from_millis(7300)), waited: Duration::from_secs(9), ..Slo::default() };
        assert_eq!(slo.missed(&TERMS), None, "the deadline's time begins after the wait");
    }

    #[test]
    fn what_would_begin_after_its_deadline_is_missed() {
        let of = |ms, room| {
            let slo = Slo { deadline: Some(Duration::from_millis(ms)), ..Slo::default() };
            slo.missed(&Terms { room, first_token: 7.3 + room, ..TERMS })
        };
        assert_eq!(of(7300, 0.0), None, "the answer may be short");
        let late = of(5000, 0.0).unwrap();
        assert_eq!(
            late.to_string(),
            "the first token is predicted after 7.3 s and must come within 5.0 s (the request's deadline): 6.1 s until the prompts before it \
             are computed, 1.2 s for its own, 0 ms until there are KV blocks; retry in 3 s, or add prefill workers"
        );
        assert!((late.by() - 1.46).abs() < 1e-9);
        assert!(of(1000, 0.0).unwrap().to_string().ends_with("shorten it, or allow more time"));
        assert!(of(20_000, 20.0).is_some());
        assert_eq!(of(20_000, FULL), None, "nobody knows when there will be blocks");
        let both =
            Slo { deadline: Some(Duration::from_secs(5)), first_token: Some(Duration::from_secs(6)), ..Slo::default() };
        assert!(both.missed(&TERMS).unwrap().to_string().contains("within 5.0 s (the request's deadline)"));
    }

    #[test]
    fn no_advice_is_absurd() {
        let endless =
            missed(Some(5000), None, Terms { queue: f64::INFINITY, first_token: f64::INFINITY, ..TERMS }).unwrap();
        assert_eq!(endless.retry_after(), Some(LONGEST));
        let just = missed(Some(7299), None, TERMS).unwrap();
        assert_eq!(just.retry_after(), Some(Duration::from_secs(1)));
    }
}
