//! How a request stands among others: what it shares, when it is served, and when its tokens have to come.

use std::time::Duration;

use baton_policy::Slo;
use baton_types::{Class, MAX_CACHE_KEEP_SECONDS, MAX_CACHE_SALT};

use crate::error::RequestError;

/// The field with the limit of the first token, in milliseconds.
pub(crate) const REJECT_TTFT: &str = "reject_ttft_ms";
/// The field with the limit of further tokens, in milliseconds.
pub(crate) const REJECT_ITL: &str = "reject_itl_ms";

/// How a request is cached, ranked among others, and when its tokens have to come. Its answer does not depend on this (I1).
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Standing {
    /// Only requests with the same salt share cached prefixes.
    pub cache_salt: String,
    /// Whether somebody waits for the answer.
    pub class: Class,
    /// Requests of the class with a lower value are served first.
    pub priority: i32,
    /// Seconds for which its KV is kept in preference to KV of requests that do not ask for this; 0 does not ask.
    pub cache_keep_seconds: u32,
    /// When its tokens have to come; what it leaves out is as its key says, else as the router's settings say. Batch requests have no other SLO than
    /// their own.
    pub slo: Slo,
    /// Whose it is, hashed, and that tenant's weight; 0: of nobody in particular.
    pub tenant: u64,
    pub weight: u32,
    /// A prefill worker is to compute the prompt, where there is one, however short it is.
    pub handed_over: bool,
}

impl Standing {
    /// Ok when its fields have values that they may have.
    pub fn check(&self) -> Result<(), RequestError> {
        let salt = self.cache_salt.len();
        if salt > MAX_CACHE_SALT {
            let wrong = format!("cache_salt has {salt} bytes; at most {MAX_CACHE_SALT} are allowed");
            return Err(RequestError::invalid("cache_salt", wrong));
        }
        let keep = self.cache_keep_seconds;
        if keep > MAX_CACHE_KEEP_SECONDS {
            let wrong = format!("cache_keep_seconds is {keep}; at most {MAX_CACHE_KEEP_SECONDS} are allowed");
            return Err(RequestError::invalid("cache_keep_seconds", wrong));
        }
        let (lowest, highest) = Class::PRIORITIES;
        let priority = self.priority;
        if !(lowest..=highest).contains(&priority) {
            let wrong = format!("priority is {priority}; it must be {lowest} to {highest}");
            return Err(RequestError::invalid("priority", wrong));
        }
        let zero = |limit: Option<Duration>| limit.is_some_and(|limit| limit.is_zero());
        match self.limits().into_iter().find(|(_, limit)| zero(*limit)) {
            Some((field, _)) => {
                Err(RequestError::invalid(field, format!("{field} is 0; it must be at least 1, or be left out")))
            }
            None => Ok(()),
        }
    }

    /// Its SLO, field by field.
    pub fn limits(&self) -> [(&'static str, Option<Duration>); 2] {
        [(REJECT_TTFT, self.slo.first_token), (REJECT_ITL, self.slo.token)]
    }

    /// The SLO that holds for it at a router with these settings. `predicts`: the router can say whether it will be met.
    ///
    /// # Errors
    /// It has one, and nothing is predicted here.
    pub fn promised(&self, settings: Slo, predicts: bool) -> Result<Slo, RequestError> {
        match self.limits().into_iter().find(|(_, limit)| limit.is_some()) {
            Some((field, _)) if !predicts => {
                let wrong =
                    format!("{field} needs a router with placement = predicted; leave it out, or ask another one");
                Err(RequestError::invalid(field, wrong).code("unsupported_parameter"))
            }
            _ if self.class.is_batch() => Ok(self.slo),
            _ => Ok(self.slo.or(settings)),
        }
    }
}

/// An SLO from its fields in a request, in milliseconds.
pub(crate) fn slo(reject_ttft_ms: Option<u32>, reject_itl_ms: Option<u32>) -> Slo {
    let time = |ms: Option<u32>| ms.map(|ms| Duration::from_millis(ms.into()));
    Slo { first_token: time(reject_ttft_ms), token: time(reject_itl_ms), ..Slo::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_request_asks_goes_before_the_routers_settings() {
        let settings = slo(Some(5000), Some(50));
        let promised = |ttft, itl| Standing { slo: slo(ttft, itl), ..Standing::default() }.promised(settings, true);
        assert_eq!(promised(None, None), Ok(settings));
        assert_eq!(promised(Some(100), None), Ok(slo(Some(100), Some(50))), "stricter");
        assert_eq!(promised(None, Some(900)), Ok(slo(Some(5000), Some(900))), "or less strict");
        let batch = |ttft| Standing { slo: slo(ttft, None), class: Class::Batch, ..Standing::default() };
        assert_eq!(batch(None).promised(settings, true), Ok(Slo::default()), "batch has none");
        assert_eq!(batch(Some(9000)).promised(settings, true), Ok(slo(Some(9000), None)), "unless it asks for one");
    }

    #[test]
    fn an_slo_that_means_nothing_is_refused_by_name() {
        let standing = |ttft, itl| Standing { slo: slo(ttft, itl), ..Standing::default() };
        for (asked, field) in [(standing(Some(0), None), REJECT_TTFT), (standing(Some(1), Some(0)), REJECT_ITL)] {
            let error = asked.check().unwrap_err();
            assert_eq!((error.param.as_deref(), error.message.contains("at least 1")), (Some(field), true));
        }
        assert_eq!(standing(Some(1), None).check(), Ok(()));
        let of = |priority| Standing { priority, ..Standing::default() }.check().map_err(|error| error.param.unwrap());
        assert_eq!((of(Class::PRIORITIES.0), of(Class::PRIORITIES.1)), (Ok(()), Ok(())));
        assert_eq!(of(Class::PRIORITIES.1 + 1), Err("priority".to_owned()), "it would be batch work");
        let error = standing(None, Some(1)).promised(Slo::default(), false).unwrap_err();
        assert_eq!((error.param.as_deref(), error.code), (Some(REJECT_ITL), Some("unsupported_parameter")));
        assert_eq!(Standing::default().promised(Slo::default(), false), Ok(Slo::default()));
    }
}
