//! Reads the bodies of requests: each bounded in size and time, all together bounded in memory (I5), together with the answers that are put
//! together before they are sent, and with the prompts that streams repeat.

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, HttpBody};
use baton_runtime::Bytes;
use baton_types::ErrorKind;
use futures::StreamExt;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout_at};

use crate::error::RequestError;
use crate::http::LARGE;

/// A body may pause this long: it has to bring [`PACE`] bytes a second, counted over this time at most. What came fast before buys no more.
const PATIENCE: Duration = Duration::from_secs(10);
const PACE: u32 = 16 << 10;
/// What a value of a large body may cost once it is read: a text or the name of a field, an array or an object.
const VALUE: usize = 128;
/// What any other element of an array or an object may cost.
const ELEMENT: usize = size_of::<serde_json::Value>();
/// Most texts, names, arrays and objects of a body. Conversations of thousands of messages have fewer.
const MAX_VALUES: usize = 256 << 10;
/// What a field of a gRPC message may cost once it is decoded.
const FIELD: usize = 256;
/// Where a call's message begins: after a byte of flags and four of its length.
const MESSAGE: usize = 5;
/// How deep messages of the gRPC API lie in each other.
const DEPTH: usize = 6;
/// Bytes that a permit of the memory stands for.
const UNIT: usize = 1 << 10;

/// Memory for the bodies that are being read and parsed, for answers that are sent whole, and for prompts that streams repeat.
pub(crate) struct Bodies {
    limit: usize,
    memory: Bytes,
    units: Arc<Semaphore>,
}

/// A body in memory.
pub(crate) struct Held {
    pub bytes: Vec<u8>,
    pub share: Share,
}

/// A body's share of the memory. It is free when this is dropped.
#[derive(Default)]
pub(crate) struct Share {
    units: usize,
    permit: Option<OwnedSemaphorePermit>,
}

impl Bodies {
    /// Each body may have `limit` bytes, and all that are held at a time `memory` bytes.
    pub fn new(limit: usize, memory: Bytes) -> Bodies {
        let units = usize::try_from(memory.0).unwrap_or(usize::MAX).div_ceil(UNIT);
        Bodies { limit, memory, units: Arc::new(Semaphore::new(units.min(Semaphore::MAX_PERMITS))) }
    }

    /// Reads the whole body. Fails if it is too large or too slow, or if too many bytes of others are held.
    ///
    /// The share grows with what has arrived: a client that says a length and sends nothing holds nothing. It is never waited for, so no two
    /// bodies wait for each other's end.
    pub async fn read(&self, body: Body) -> Result<Held, RequestError> {
        let mut pace = Pace::begin();
        let said = body.size_hint().exact().map(|length| usize::try_from(length).unwrap_or(usize::MAX));
        if said.is_some_and(|length| length > self.limit) {
            return Err(self.too_large());
        }
        let mut held = Held { bytes: Vec::new(), share: Share::default() };
        // Costs no memory until it is written to.
        held.bytes.reserve_exact(said.unwrap_or(0));
        let mut chunks = body.into_data_stream();
        loop {
            match timeout_at(pace.until, chunks.next()).await.map_err(|_| slow())? {
                None => return Ok(held),
                Some(Ok(chunk)) if held.bytes.len() + chunk.len() <= self.limit => {
                    let length = held.bytes.len() + chunk.len();
                    self.grow(&mut held.share, length)?;
                    pace.came(chunk.len());
                    held.bytes.extend_from_slice(&chunk);
                }
                Some(Ok(_)) => return Err(self.too_large()),
                Some(Err(error)) => {
                    return Err(RequestError::new(ErrorKind::InvalidArgument, format!("the body broke off: {error}")));
                }
            }
        }
    }

    /// Takes memory for what reading a body makes of it, before it is read. Fails if that is too much, or if there is not enough left.
    pub fn weigh(&self, held: &mut Held) -> Result<(), RequestError> {
        let (values, elements) = if held.bytes.len() < LARGE { at_most(&held.bytes) } else { count(&held.bytes) };
        if values > MAX_VALUES {
            let wrong = format!("the body has {values} texts, arrays and objects; at most {MAX_VALUES} are allowed");
            return Err(RequestError::new(ErrorKind::TooLarge, wrong).code("request_too_large"));
        }
        self.grow(&mut held.share, held.bytes.len() + values * VALUE + elements * ELEMENT)
    }

    /// The same for a message of a gRPC call. Decoding copies it.
    pub fn weigh_message(&self, held: &mut Held) -> Result<(), RequestError> {
        let message = held.bytes.get(MESSAGE..).unwrap_or_default();
        self.grow(&mut held.share, 2 * held.bytes.len() + fields(message, DEPTH) * FIELD)
    }

    /// Takes memory for so many bytes, less what the share has already.
    pub fn grow(&self, share: &mut Share, bytes: usize) -> Result<(), RequestError> {
        let more = bytes.div_ceil(UNIT).saturating_sub(share.units);
        let taken = u32::try_from(more).ok().and_then(|more| Arc::clone(&self.units).try_acquire_many_owned(more).ok());
        let Some(taken) = taken else {
            let memory = self.memory;
            let full = format!(
                "requests being read, and answers being put together, fill the {memory} there are for them (--body-memory); retry later"
            );
            return Err(RequestError::new(ErrorKind::ResourceExhausted, full).code("too_many_requests"));
        };
        share.units += more;
        match &mut share.permit {
            Some(permit) => permit.merge(taken),
            none => *none = Some(taken),
        }
        Ok(())
    }

    /// Takes memory for so many bytes more than the share has.
    pub fn add(&self, share: &mut Share, bytes: usize) -> Result<(), RequestError> {
        self.grow(share, share.units * UNIT + bytes)
    }

    fn too_large(&self) -> RequestError {
        let limit = self.limit;
        let wrong = format!("the body is larger than {limit} bytes, the most this router takes (--body-limit)");
        RequestError::new(ErrorKind::TooLarge, wrong).code("request_too_large")
    }
}

/// How much of a body must have come by when.
struct Pace {
    until: Instant,
}

impl Pace {
    fn begin() -> Pace {
        Pace { until: Instant::now() + PATIENCE }
    }

    fn came(&mut self, bytes: usize) {
        let earned = Duration::from_secs(1).mul_f64(bytes as f64 / f64::from(PACE));
        self.until = (self.until + earned).min(Instant::now() + PATIENCE);
    }
}

fn slow() -> RequestError {
    RequestError::new(ErrorKind::DeadlineExceeded, "the body did not arrive in time")
}

/// How many fields a protobuf message has, with those of the messages in it. A text that looks like a message is counted as if it were one.
fn fields(mut message: &[u8], depth: usize) -> usize {
    let mut count = 0;
    while let Some(tag) = varint(&mut message) {
        let length = match tag & 7 {
            0 => varint(&mut message).map(|_| 0),
            1 => Some(8),
            2 => varint(&mut message).and_then(|length| usize::try_from(length).ok()),
            5 => Some(4),
            _ => None,
        };
        let Some((value, rest)) = length.and_then(|length| message.split_at_checked(length)) else { return count };
        if tag & 7 == 2 && depth > 1 {
            count += fields(value, depth - 1);
        }
        count += 1;
        message = rest;
    }
    count
}

/// Takes a varint off the beginning.
fn varint(bytes: &mut &[u8]) -> Option<u64> {
    let length = bytes.iter().take(10).position(|byte| byte & 0x80 == 0)? + 1;
    let (varint, rest) = bytes.split_at(length);
    *bytes = rest;
    Some(varint.iter().rev().fold(0, |value, byte| value << 7 | u64::from(byte & 0x7f)))
}

/// How many texts, arrays and objects JSON has at most, and how many commas. Several times as fast as [`count`], since it does not look what is text.
fn at_most(json: &[u8]) -> (usize, usize) {
    let of = |wanted: u8| json.iter().filter(|byte| **byte == wanted).count();
    (of(b'"') / 2 + of(b'{') + of(b'['), of(b','))
}

/// How many texts, arrays and objects JSON has, and how many commas.
pub(crate) fn count(json: &[u8]) -> (usize, usize) {
    let (mut values, mut elements, mut in_text) = (0, 0, false);
    let mut bytes = json.iter();
    while let Some(byte) = bytes.next() {
        match byte {
            b'"' => {
                values += usize::from(!in_text);
                in_text = !in_text;
            }
            b'\\' if in_text => drop(bytes.next()),
            b'{' | b'[' if !in_text => values += 1,
            b',' if !in_text => elements += 1,
            _ => {}
        }
    }
    (values, elements)
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::stream;

    #[test]
    fn values_are_counted_outside_texts() {
        assert_eq!(count(br#"{"a": [1, 2, "b,{[\\"], "c\"]": null}"#), (5, 3));
        assert_eq!(count(br#""\\\" , [""#), (1, 0));
        assert_eq!(count(b""), (0, 0));
        assert_eq!(at_most(br#"{"a": [1, 2, "b,{[\\"], "c\"]": null}"#), (7, 4), "what is in texts counts, too");
    }

    /// I5: what is small as text and large once it is read counts as what it will be.
    #[tokio::test]
    async fn a_body_weighs_what_reading_it_costs() {
        let bodies = Bodies::new(64 << 10, Bytes(1 << 20));
        let body = |text: String| async { bodies.read(Body::from(text)).await.unwrap() };
        let (mut long, mut deep) = (body("x".repeat(60 << 10)).await, body("[".repeat(7 << 10)).await);
        bodies.weigh(&mut long).unwrap();
        bodies.weigh(&mut deep).unwrap();
        let mut another = body("{".repeat(60 << 10)).await;
        assert_eq!(bodies.weigh(&mut another).unwrap_err().kind, ErrorKind::ResourceExhausted);
        drop((long, deep, another));
        let mut numbers = body("1,".repeat((1 << 20) / (ELEMENT + 3))).await;
        bodies.weigh(&mut numbers).unwrap();
        assert!(bodies.read(Body::from(vec![1; 40 << 10])).await.is_err());
        drop(numbers);
        assert!(bodies.read(Body::from(vec![1; 40 << 10])).await.is_ok());
        let bodies = Bodies::new(8 << 20, Bytes(1 << 30));
        let mut huge = bodies.read(Body::from("{".repeat(MAX_VALUES + 1))).await.unwrap();
        assert_eq!(bodies.weigh(&mut huge).unwrap_err().kind, ErrorKind::TooLarge);
    }

    /// I5: a client that sends a little now and then holds its connection no longer than one that sends nothing.
    #[tokio::test(start_paused = true)]
    async fn a_body_must_arrive_at_a_pace() {
        let bodies = Bodies::new(8 << 20, Bytes(64 << 20));
        let drops = |bytes: usize, count: usize| {
            let pieces = stream::repeat_with(move || Ok::<_, std::io::Error>(vec![b'x'; bytes])).take(count);
            Body::from_stream(pieces.then(|piece| async {
                tokio::time::sleep(Duration::from_secs(1)).await;
                piece
            }))
        };
        let begun = Instant::now();
        let late = bodies.read(drops(100, 1000)).await.err().unwrap();
        assert_eq!((late.kind, begun.elapsed().as_secs()), (ErrorKind::DeadlineExceeded, 10));
        assert_eq!(bodies.read(drops(PACE as usize, 300)).await.unwrap().bytes.len(), 300 * PACE as usize);
        // However much came at once at first.
        let rest = Body::from_stream(
            stream::iter([Ok(vec![b'x'; 4 << 20].into())]).chain(drops(100, 1000).into_data_stream()),
        );
        let begun = Instant::now();
        assert_eq!(bodies.read(rest).await.err().unwrap().kind, ErrorKind::DeadlineExceeded);
        assert_eq!(begun.elapsed().as_secs(), 10);
    }

    #[test]
    fn fields_of_messages_are_counted_also_those_of_broken_ones() {
        // Field 1 is a text that looks like no message, field 2 a message with two fields, field 3 a number.
        let message = [10, 2, b'~', b'~', 18, 4, 8, 1, 16, 2, 24, 200, 1];
        assert_eq!((fields(&message, 2), fields(&message, 1)), (5, 3));
        assert_eq!(fields(&[&[10, 0].repeat(1000)[..], &[0xff; 11]].concat(), 1), 1000);
        assert_eq!((fields(&[], 3), fields(&[10, 5, 1], 3), fields(&[0x80], 3)), (0, 0, 0));
    }

    /// I5: many empty messages in one are small as bytes and large once they are decoded.
    #[tokio::test]
    async fn a_message_weighs_what_decoding_it_costs() {
        let bodies = Bodies::new(64 << 10, Bytes(1 << 20));
        let mut few = bodies.read(Body::from([&[0; 5][..], &[10, 100], &[0xff; 100]].concat())).await.unwrap();
        bodies.weigh_message(&mut few).unwrap();
        let mut many = bodies.read(Body::from([&[0; 5][..], &[10, 0].repeat(8 << 10)].concat())).await.unwrap();
        assert_eq!(bodies.weigh_message(&mut many).unwrap_err().kind, ErrorKind::ResourceExhausted);
    }

    fn bodies() -> Bodies {
        Bodies::new(4 << 10, Bytes(6 << 10))
    }

    /// A body that does not say its length, in pieces of a KiB. Only `last` tells its end.
    fn pieces(count: usize, last: bool) -> Body {
        let pieces = stream::repeat_with(|| Ok::<_, std::io::Error>(vec![b'x'; 1 << 10])).take(count);
        match last {
            true => Body::from_stream(pieces),
            false => Body::from_stream(pieces.chain(stream::pending())),
        }
    }

    #[tokio::test]
    async fn a_body_is_whole_and_not_too_large() {
        let bodies = bodies();
        assert_eq!(bodies.read(Body::from(vec![1; 4 << 10])).await.unwrap().bytes.len(), 4 << 10);
        assert_eq!(bodies.read(pieces(4, true)).await.unwrap().bytes.len(), 4 << 10);
        for large in [Body::from(vec![1; (4 << 10) + 1]), pieces(5, true)] {
            assert_eq!(bodies.read(large).await.err().unwrap().kind, ErrorKind::TooLarge);
        }
    }

    #[tokio::test]
    async fn all_bodies_together_fit_the_memory() {
        let bodies = bodies();
        let held = bodies.read(Body::from(vec![1; 3 << 10])).await.unwrap();
        // It waits for its end and holds what has come.
        let mut slow = Box::pin(bodies.read(pieces(2, false)));
        assert!(futures::poll!(slow.as_mut()).is_pending());
        let code = |error: RequestError| (error.kind, error.code);
        let full = (ErrorKind::ResourceExhausted, Some("too_many_requests"));
        for more in [Body::from(vec![1; 2 << 10]), pieces(2, true)] {
            assert_eq!(bodies.read(more).await.map(drop).map_err(code), Err(full));
        }
        assert!(bodies.read(Body::from(vec![1; 1 << 10])).await.is_ok());
        drop(slow);
        assert!(bodies.read(pieces(3, true)).await.is_ok());
        drop(held);
        assert!(bodies.read(Body::from(vec![1; 4 << 10])).await.is_ok());
    }

    /// I5: a length that is said and never sent keeps nobody out.
    #[tokio::test]
    async fn a_length_alone_takes_no_memory() {
        struct Silent;
        impl HttpBody for Silent {
            type Data = axum::body::Bytes;
            type Error = std::io::Error;
            fn poll_frame(
                self: std::pin::Pin<&mut Self>,
                _: &mut std::task::Context<'_>,
            ) -> std::task::Poll<Option<Result<hyper::body::Frame<Self::Data>, Self::Error>>> {
                std::task::Poll::Pending
            }
            fn size_hint(&self) -> hyper::body::SizeHint {
                hyper::body::SizeHint::with_exact(4 << 10)
            }
        }
        let bodies = bodies();
        let mut silent: Vec<_> = (0..9).map(|_| Box::pin(bodies.read(Body::new(Silent)))).collect();
        for body in &mut silent {
            assert!(futures::poll!(body.as_mut()).is_pending());
        }
        assert!(bodies.read(Body::from(vec![1; 4 << 10])).await.is_ok());
    }
}
