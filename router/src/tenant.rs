//! One tenant: who it is, what it may do, and what it has used.

use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use baton_policy::{Left, OverLimit, Slo, TenantLimits, TenantMeter};
use baton_runtime::config::format_duration;
use baton_types::{Class, ErrorKind, MAX_CACHE_SALT, hash_bytes};
use tokio::time::Instant;

use crate::error::RequestError;
use crate::heavy::Line;
use crate::standing::Standing;

/// Longest name, bytes.
pub(crate) const MAX_NAME: usize = 64;
/// Between a tenant's name and its own salt; names have none.
const SEPARATOR: char = '/';

/// A tenant of the router. It stays the same one when the file of keys changes.
#[derive(Debug)]
pub(crate) struct Tenant {
    name: String,
    /// Where its large bodies and prompts wait.
    line: Line,
    /// Hashes prompts that are kept. Nobody outside knows which prompts it takes for the same.
    hasher: RandomState,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    rights: Rights,
    meter: TenantMeter,
}

/// What a tenant may do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Rights {
    pub limits: TenantLimits,
    /// How much of the workers it gets beside others.
    pub weight: u32,
    /// The lowest value of `priority` it may ask for; lower ones are served first.
    pub highest_priority: i32,
    /// Batch: all of its requests are.
    pub class: Class,
    /// It may ask to keep KV.
    pub keep_kv: bool,
    /// When its tokens have to come, unless a request asks for less time.
    pub slo: Slo,
}

/// A tenant's request that is in progress. Dropping it ends it.
#[derive(Debug)]
pub(crate) struct Pass {
    tenant: Arc<Tenant>,
    answers: u32,
}

impl Pass {
    /// Whose it is.
    pub fn tenant(&self) -> &Tenant {
        &self.tenant
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        self.tenant.state().meter.release(self.answers);
    }
}

impl Tenant {
    /// A tenant that has used nothing.
    pub fn new(name: &str, rights: Rights) -> Tenant {
        let meter = TenantMeter::new(rights.limits, now());
        let (name, state) = (name.to_owned(), Mutex::new(State { rights, meter }));
        Tenant { name, line: Line::default(), hasher: RandomState::new(), state }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where its work waits that takes long.
    pub fn line(&self) -> &Line {
        &self.line
    }

    /// Its name, for people.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The same for all routers; never 0.
    pub fn id(&self) -> u64 {
        hash_bytes(0, self.name.as_bytes()).max(1)
    }

    /// May do this from now on. What it has used stays used.
    pub fn set_rights(&self, rights: Rights) {
        let mut state = self.state();
        if state.rights.limits != rights.limits {
            state.meter.set_limits(rights.limits, now());
        }
        state.rights = rights;
    }

    /// What a request's standing is for this tenant: its salt is within the tenant, so that no other shares its KV.
    pub fn standing(&self, asked: Standing) -> Result<Standing, RequestError> {
        let rights = self.state().rights;
        if asked.cache_keep_seconds > 0 && !rights.keep_kv {
            return Err(self.not_allowed("cache_keep_seconds", "may not ask to keep KV; leave cache_keep_seconds out"));
        }
        let priority = match asked.priority {
            0 => rights.highest_priority.max(0),
            asked if asked < rights.highest_priority => {
                let lowest = rights.highest_priority;
                let wrong = format!("asks for the priority {asked}; the first one it may have is {lowest}");
                return Err(self.not_allowed("priority", &wrong));
            }
            asked => asked,
        };
        let most = MAX_CACHE_SALT - self.name.len() - SEPARATOR.len_utf8();
        if asked.cache_salt.len() > most {
            let wrong = format!("cache_salt has {} bytes; at most {most} are allowed", asked.cache_salt.len());
            return Err(RequestError::invalid("cache_salt", wrong));
        }
        let cache_salt = format!("{}{SEPARATOR}{}", self.name, asked.cache_salt);
        let class = asked.class.max(rights.class);
        let slo = if class.is_batch() { asked.slo } else { self.slo(&asked, rights)? };
        Ok(Standing { cache_salt, class, priority, slo, tenant: self.id(), weight: rights.weight, ..asked })
    }

    /// The SLO of a request: its own where that is within the tenant's, else the tenant's.
    fn slo(&self, asked: &Standing, rights: Rights) -> Result<Slo, RequestError> {
        let most = [rights.slo.first_token, rights.slo.token];
        for ((field, asked), most) in asked.limits().into_iter().zip(most) {
            if let (Some(asked), Some(most)) = (asked, most)
                && asked > most
            {
                let (asked, most) = (asked.as_millis(), most.as_millis());
                let wrong = format!(
                    "asks for {field} = {asked}; the most it may have is {most}, which it has when it leaves {field} out"
                );
                return Err(self.not_allowed(field, &wrong));
            }
        }
        Ok(asked.slo.or(rights.slo))
    }

    /// Lets a request with this many answers in, or says when there is room for it.
    pub fn admit(self: &Arc<Tenant>, answers: u32) -> Result<Pass, RequestError> {
        let mut state = self.state();
        let limits = state.rights.limits;
        match state.meter.admit(answers, now()) {
            Ok(()) => Ok(Pass { tenant: Arc::clone(self), answers }),
            Err(over) => Err(self.over(over, limits)),
        }
    }

    /// Fails while not even a request with one answer would be let in.
    pub fn has_room(&self) -> Result<(), RequestError> {
        let mut state = self.state();
        let limits = state.rights.limits;
        state.meter.check(1, now()).map_err(|over| self.over(over, limits))
    }

    /// True when it has used something that is not refilled yet.
    pub fn owes(&self) -> bool {
        !self.state().meter.is_fresh(now())
    }

    fn over(&self, over: OverLimit, limits: TenantLimits) -> RequestError {
        let (what, limit, wait) = match over {
            OverLimit::Requests(wait) => ("requests a minute", limits.requests_per_minute, wait),
            OverLimit::Tokens(wait) => ("tokens a minute", limits.tokens_per_minute, wait),
            OverLimit::Streams => ("answers at once", limits.streams, Duration::from_secs(1)),
            OverLimit::Kept(wait) => ("tokens of kept prompts", limits.kept_tokens, wait),
            OverLimit::KeptNever => {
                let limit = limits.kept_tokens.unwrap_or_default();
                let wrong =
                    format!("may keep {limit} tokens at a time, and the prompt has more; leave cache_keep_seconds out");
                return self.not_allowed("cache_keep_seconds", &wrong);
            }
            OverLimit::Never => {
                return self.not_allowed("n", "may not have so many answers at once, or may have none at all");
            }
        };
        let when = match over {
            OverLimit::Streams => "retry when one has ended".to_owned(),
            _ => format!("retry in {}", format_duration(wait)),
        };
        let limit = limit.unwrap_or_default();
        let over = format!("the API key of {} is limited to {limit} {what}; {when}", self.name);
        let error = RequestError::new(ErrorKind::ResourceExhausted, over).code("rate_limit_exceeded");
        RequestError { retry_after: Some(wait), ..error }
    }

    /// Counts a prompt that a request asks to keep, if it asks for that.
    pub fn keep(&self, prompt: &[u32], standing: &Standing) -> Result<(), RequestError> {
        if standing.cache_keep_seconds == 0 {
            return Ok(());
        }
        let mut state = self.state();
        let limits = state.rights.limits;
        let hash = self.hasher.hash_one((&standing.cache_salt, prompt));
        let time = Duration::from_secs(standing.cache_keep_seconds.into());
        let kept = state.meter.keep(hash, prompt.len() as u32, time, now());
        kept.map_err(|over| RequestError { param: Some("cache_keep_seconds".to_owned()), ..self.over(over, limits) })
    }

    /// Counts tokens of a prompt or of an answer.
    pub fn charge(&self, tokens: u32) {
        self.state().meter.charge(tokens, now());
    }

    /// What is left of requests and of tokens this minute; None where there is no limit.
    pub fn left(&self) -> (Option<Left>, Option<Left>) {
        self.state().meter.left(now())
    }

    fn not_allowed(&self, field: &str, wrong: &str) -> RequestError {
        let wrong = format!("the API key of {} {wrong}", self.name);
        let error = RequestError::new(ErrorKind::PermissionDenied, wrong).code("insufficient_permissions");
        RequestError { param: Some(field.to_owned()), ..error }
    }
}

fn now() -> std::time::Instant {
    Instant::now().into_std()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::standing::slo;

    fn tenant(highest_priority: i32, keep_kv: bool) -> Arc<Tenant> {
        let limits = TenantLimits { requests_per_minute: Some(1), ..TenantLimits::default() };
        let slo = slo(Some(5000), None);
        Arc::new(Tenant::new(
            "team",
            Rights { limits, weight: 3, highest_priority, class: Class::Interactive, keep_kv, slo },
        ))
    }

    #[test]
    fn prompts_are_kept_up_to_the_tenants_limit() {
        let limits = TenantLimits { kept_tokens: Some(10), ..TenantLimits::default() };
        let rights = Rights { limits, ..tenant(0, true).state().rights };
        let tenant = Tenant::new("team", rights);
        let keeps = |prompt: &[u32], seconds, salt: &str| {
            let (cache_keep_seconds, cache_salt) = (seconds, salt.to_owned());
            tenant.keep(prompt, &Standing { cache_keep_seconds, cache_salt, ..Standing::default() })
        };
        keeps(&[1; 6], 60, "").unwrap();
        keeps(&[1; 6], 60, "").unwrap();
        keeps(&[1; 600], 0, "").unwrap();
        let over = keeps(&[1; 6], 60, "other").unwrap_err();
        assert_eq!((over.kind, over.param.as_deref()), (ErrorKind::ResourceExhausted, Some("cache_keep_seconds")));
        assert!(over.retry_after.unwrap() > Duration::from_secs(59), "{over:?}");
        assert!(over.message.contains("limited to 10 tokens of kept prompts"), "{over:?}");
        let never = keeps(&[1; 11], 60, "").unwrap_err();
        assert_eq!(never.kind, ErrorKind::PermissionDenied);
        assert!(never.message.contains("may keep 10 tokens at a time"), "{never:?}");
    }

    #[test]
    fn a_request_stands_within_its_tenant() {
        let tenant = tenant(5, false);
        let asked = |priority| Standing { cache_salt: "own".into(), priority, ..Standing::default() };
        let standing = |priority| tenant.standing(asked(priority)).map(|s| (s.cache_salt, s.priority));
        assert_eq!(standing(0), Ok(("team/own".into(), 5)), "who does not ask gets the first it may have");
        assert_eq!(standing(7), Ok(("team/own".into(), 7)));
        assert_eq!(standing(4).unwrap_err().kind, ErrorKind::PermissionDenied);
        let keeps = tenant.standing(Standing { cache_keep_seconds: 1, ..asked(0) }).unwrap_err();
        assert_eq!((keeps.kind, keeps.param.as_deref()), (ErrorKind::PermissionDenied, Some("cache_keep_seconds")));
        let long = tenant.standing(Standing { cache_salt: "s".repeat(MAX_CACHE_SALT - 4), ..asked(0) });
        assert_eq!(long.unwrap_err().param.as_deref(), Some("cache_salt"));
        let most = tenant.standing(Standing { cache_salt: "s".repeat(MAX_CACHE_SALT - 5), ..asked(0) });
        assert_eq!(most.unwrap().cache_salt.len(), MAX_CACHE_SALT);
    }

    #[test]
    fn a_request_may_ask_for_less_time_than_its_tenant_has_and_not_for_more() {
        let tenant = tenant(0, false);
        let standing = |ttft, itl| tenant.standing(Standing { slo: slo(ttft, itl), ..Standing::default() });
        assert_eq!(standing(None, None).unwrap().slo, slo(Some(5000), None));
        assert_eq!(standing(Some(4000), None).unwrap().slo, slo(Some(4000), None));
        assert_eq!(
            standing(None, Some(90_000)).unwrap().slo,
            slo(Some(5000), Some(90_000)),
            "the tenant has no limit of these"
        );
        let refused = standing(Some(5001), None).unwrap_err();
        assert_eq!((refused.kind, refused.param.as_deref()), (ErrorKind::PermissionDenied, Some("reject_ttft_ms")));
        assert_eq!(
            refused.message,
            "the API key of team asks for reject_ttft_ms = 5001; the most it may have is 5000, which it has when it leaves reject_ttft_ms out"
        );
    }

    #[test]
    fn requests_of_a_batch_key_are_batch_and_have_no_slo_but_their_own() {
        let tenant = tenant(0, false);
        let asked = |class, ttft| Standing { class, slo: slo(ttft, None), ..Standing::default() };
        let standing = |class, ttft| tenant.standing(asked(class, ttft)).map(|s| (s.class, s.slo));
        let (interactive, batch) = (Class::Interactive, Class::Batch);
        assert_eq!(standing(interactive, None), Ok((interactive, slo(Some(5000), None))));
        assert_eq!(standing(batch, None), Ok((batch, Slo::default())));
        assert_eq!(
            standing(batch, Some(9000)),
            Ok((batch, slo(Some(9000), None))),
            "its tenant's bound is for who waits"
        );
        let rights = Rights { class: batch, ..tenant.state().rights };
        tenant.set_rights(rights);
        assert_eq!(standing(interactive, None), Ok((batch, Slo::default())));
    }

    #[tokio::test(start_paused = true)]
    async fn who_is_over_a_limit_is_told_when_to_come_back() {
        let tenant = tenant(i32::MIN, true);
        let pass = tenant.admit(3).unwrap();
        let refused = tenant.admit(1).unwrap_err();
        assert_eq!((refused.kind, refused.code), (ErrorKind::ResourceExhausted, Some("rate_limit_exceeded")));
        tokio::time::advance(refused.retry_after.unwrap()).await;
        drop(pass);
        drop(tenant.admit(1).unwrap());
    }
}
