//! The spans of what a worker does for a request, for a collector: one of the call, and below it one of each phase.
//!
//! | call | phases |
//! | --- | --- |
//! | `prefill worker` | `compute`: until the first token is there, its wait included; `send`: until the KV is verified |
//! | `decode worker` | `reserve`: until blocks are lent; `receive` or `compute`: until the first token leaves; `generate`: until the last |

use std::time::{Duration, Instant, SystemTime};

use baton_runtime::traces::{self, Span, SpanKind, SpanPlace, Value};
use tonic::metadata::MetadataMap;

/// What an item of a request's stream says of its progress.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Moment {
    /// Blocks are lent to it.
    Reserved,
    /// Its prompt is computed.
    Computed,
    /// Its KV is verified at the other end.
    Sent,
    /// One more token leaves.
    Token,
    /// Something else.
    Other,
}

/// Where what a worker does for a request belongs, if a collector is to get it.
pub struct Traced {
    place: SpanPlace,
    name: &'static str,
    request: String,
    began: Instant,
}

impl Traced {
    /// Reads the caller's word in the metadata of a call; `name`: of the span.
    pub fn read(metadata: &MetadataMap, name: &'static str, request: &str) -> Option<Traced> {
        let caller = metadata.get("traceparent").and_then(|value| value.to_str().ok());
        let place = traces::continued(caller)?;
        Some(Traced { place, name, request: request.to_owned(), began: Instant::now() })
    }
}

/// The spans of a request while it runs. They are handed over when it is dropped.
pub(crate) struct Spans {
    traced: Traced,
    progress: Progress,
    error: Option<String>,
}

impl Spans {
    pub fn new(traced: Traced) -> Spans {
        Spans { traced, progress: Progress::default(), error: None }
    }

    /// Something happened now.
    pub fn happens(&mut self, moment: Moment) {
        self.progress.happens(moment, self.traced.began.elapsed());
    }

    /// The stream ends with an error.
    pub fn fails(&mut self, error: &str) {
        self.error = Some(error.to_owned());
    }
}

impl Drop for Spans {
    fn drop(&mut self) {
        let Traced { place, name, request, began } = &self.traced;
        let (lasted, wall) = (began.elapsed(), SystemTime::now());
        let start = wall.checked_sub(lasted).unwrap_or(wall);
        let span = |place, name, kind, (from, to): (Duration, Duration), about, error| {
            let (from, to, events) = (start + from, start + to, Vec::new());
            traces::end(Span { place, name, kind, from, to, about, events, error });
        };
        for (name, times) in std::mem::take(&mut self.progress).over(lasted) {
            span(place.child(), name, SpanKind::Internal, times, Vec::new(), None);
        }
        let about = vec![("baton.request_id", Value::from(request.clone()))];
        span(*place, name, SpanKind::Server, (Duration::ZERO, lasted), about, self.error.take());
    }
}

/// The phases of a request so far, with times since it began.
#[derive(Default)]
struct Progress {
    phases: Vec<(&'static str, (Duration, Duration))>,
    /// When the latest one ended.
    last: Duration,
    reserved: bool,
    token: Option<Duration>,
}

impl Progress {
    fn happens(&mut self, moment: Moment, at: Duration) {
        match moment {
            Moment::Reserved => {
                self.reserved = true;
                self.phase("reserve", at);
            }
            Moment::Computed => self.phase("compute", at),
            Moment::Sent => self.phase("send", at),
            Moment::Token if self.token.is_none() => {
                self.phase(if self.reserved { "receive" } else { "compute" }, at);
                self.token = Some(at);
            }
            Moment::Token => self.token = Some(at),
            Moment::Other => {}
        }
    }

    fn phase(&mut self, name: &'static str, at: Duration) {
        self.phases.push((name, (self.last, at)));
        self.last = at;
    }

    /// All phases of a request that has ended after `lasted`.
    fn over(mut self, lasted: Duration) -> Vec<(&'static str, (Duration, Duration))> {
        if let Some(last) = self.token {
            self.phase("generate", last);
        } else if self.reserved {
            // The KV that it waited for did not come.
            self.phase("receive", lasted);
        }
        self.phases
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn phases(moments: &[(Moment, u64)], lasted: u64) -> Vec<(&'static str, u64, u64)> {
        let mut progress = Progress::default();
        moments.iter().for_each(|(moment, at)| progress.happens(*moment, Duration::from_secs(*at)));
        let over = progress.over(Duration::from_secs(lasted));
        over.into_iter().map(|(name, (from, to))| (name, from.as_secs(), to.as_secs())).collect()
    }

    #[test]
    fn phases_follow_each_other() {
        use Moment::{Computed, Other, Reserved, Sent, Token};
        assert_eq!(phases(&[(Other, 1), (Computed, 2), (Sent, 5)], 6), [("compute", 0, 2), ("send", 2, 5)]);
        let received = [("reserve", 0, 1), ("receive", 1, 3), ("generate", 3, 8)];
        assert_eq!(phases(&[(Reserved, 1), (Token, 3), (Token, 8)], 9), received);
        assert_eq!(phases(&[(Token, 3), (Token, 4)], 9), [("compute", 0, 3), ("generate", 3, 4)]);
        assert_eq!(phases(&[(Reserved, 1)], 4), [("reserve", 0, 1), ("receive", 1, 4)], "its KV never came");
        assert_eq!(phases(&[], 4), []);
    }
}
