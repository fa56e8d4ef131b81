//! Where a span belongs in its trace, and how that travels from process to process: W3C Trace Context, version 00.

use baton_types::random_u64;

/// Length of a `traceparent` of version 00.
const LENGTH: usize = 55;

/// A span's place in its trace.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SpanPlace {
    pub(super) trace: u128,
    pub(super) span: u64,
    /// 0: it is the first span of its trace.
    pub(super) parent: u64,
    /// The parent is a span of another process.
    pub(super) remote: bool,
}

impl SpanPlace {
    /// The first span of a new trace.
    pub fn first() -> SpanPlace {
        let trace = u128::from(random_u64()) << 64 | u128::from(random_u64().max(1));
        SpanPlace { trace, span: new_id(), parent: 0, remote: false }
    }

    /// A new span below this one, in the same process.
    #[must_use]
    pub fn child(&self) -> SpanPlace {
        SpanPlace { trace: self.trace, span: new_id(), parent: self.span, remote: false }
    }

    /// The header `traceparent` that makes spans of another process children of this one.
    pub fn traceparent(&self) -> String {
        format!("00-{:032x}-{:016x}-01", self.trace, self.span)
    }

    /// The trace's id, as collectors and logs show it.
    pub fn trace_id(&self) -> String {
        format!("{:032x}", self.trace)
    }
}

/// What the header `traceparent` of a caller says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Caller {
    trace: u128,
    span: u64,
    /// The caller keeps its own spans of this trace.
    pub sampled: bool,
}

impl Caller {
    /// Reads the header; `None`: it is not as the standard says, and so it counts as absent.
    pub fn read(header: &str) -> Option<Caller> {
        let hex = |text: &str| text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        let mut parts = header.split('-');
        let [version, trace, span, flags] = [parts.next()?, parts.next()?, parts.next()?, parts.next()?];
        let shaped = [version, trace, span, flags].into_iter().all(hex)
            && (version.len(), trace.len(), span.len(), flags.len()) == (2, 32, 16, 2);
        // Later versions may have more parts.
        let whole = header.len() == LENGTH || version != "00";
        if !shaped || !whole || version == "ff" {
            return None;
        }
        let (trace, span) = (u128::from_str_radix(trace, 16).ok()?, u64::from_str_radix(span, 16).ok()?);
        let sampled = u8::from_str_radix(flags, 16).ok()? & 1 == 1;
        (trace != 0 && span != 0).then_some(Caller { trace, span, sampled })
    }

    /// A new span below the caller's.
    pub fn child(&self) -> SpanPlace {
        SpanPlace { trace: self.trace, span: new_id(), parent: self.span, remote: true }
    }
}

/// The standard forbids an id of 0.
fn new_id() -> u64 {
    random_u64().max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_travels_to_another_process() {
        let first = SpanPlace::first();
        let below = Caller::read(&first.traceparent()).unwrap();
        assert!(below.sampled);
        let (there, here) = (below.child(), first.child());
        assert_eq!((there.trace, there.parent, there.remote), (first.trace, first.span, true));
        assert_eq!((here.trace, here.parent, here.remote), (first.trace, first.span, false));
        assert!(there.span != here.span && there.trace_id() == first.trace_id());
    }

    #[test]
    fn headers_that_are_not_as_the_standard_says_count_as_absent() {
        let good = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        let read = Caller::read(good).unwrap();
        assert_eq!((read.trace >> 112, read.span, read.sampled), (0x4bf9, 0x00f0_67aa_0ba9_02b7, true));
        assert!(!Caller::read(&good.replace("-01", "-00")).unwrap().sampled);
        assert!(Caller::read(&good.replacen("00", "cc", 1)).is_some(), "a later version");
        assert!(Caller::read(&(good.replacen("00", "cc", 1) + "-more")).is_some(), "with more parts");
        let zero_trace = format!("00-{:032x}-00f067aa0ba902b7-01", 0);
        for bad in [
            "",
            "00",
            &good[1..],
            &good.to_uppercase(),
            &good.replacen("00", "ff", 1),
            &(good.to_owned() + "-more"),
            &good.replace("00f067aa0ba902b7", "0000000000000000"),
            &zero_trace,
            &good.replace('4', "g"),
            &good.replace("-01", "-+1"),
        ] {
            assert_eq!(Caller::read(bad), None, "{bad}");
        }
    }
}
