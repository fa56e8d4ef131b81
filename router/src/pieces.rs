//! A body that is there as a whole and goes out in pieces, so that what it holds stays until its client has read almost all of it.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes, HttpBody};
use hyper::body::{Frame, SizeHint};

/// Most bytes that go out at once. A connection holds a few pieces.
const PIECE: usize = 16 << 10;

struct Pieces<T> {
    left: Bytes,
    _what: T,
}

/// A body that holds something until the last piece goes out.
pub(crate) fn in_pieces(bytes: Vec<u8>, what: impl Send + Unpin + 'static) -> Body {
    Body::new(Pieces { left: bytes.into(), _what: what })
}

impl<T: Unpin> HttpBody for Pieces<T> {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let next = self.left.len().min(PIECE);
        Poll::Ready((next > 0).then(|| Ok(Frame::data(self.left.split_to(next)))))
    }

    fn is_end_stream(&self) -> bool {
        self.left.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.left.len() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::StreamExt;
    use std::sync::Arc;

    #[tokio::test]
    async fn what_a_body_holds_stays_until_its_last_piece() {
        let held = Arc::new(());
        let bytes: Vec<u8> = (0..=u8::MAX).cycle().take(3 * PIECE + 5).collect();
        let body = in_pieces(bytes.clone(), Arc::clone(&held));
        assert_eq!(body.size_hint().exact(), Some(bytes.len() as u64));
        let mut pieces = body.into_data_stream();
        let mut got = Vec::new();
        while got.len() < bytes.len() {
            assert_eq!(Arc::strong_count(&held), 2);
            got.extend(pieces.next().await.unwrap().unwrap());
        }
        assert!(pieces.next().await.is_none());
        drop(pieces);
        assert_eq!((got == bytes, Arc::strong_count(&held)), (true, 1));
        assert!(in_pieces(Vec::new(), ()).is_end_stream());
    }
}
