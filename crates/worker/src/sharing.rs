//! Gives files of the hub's model that this worker serves to processes that start later, by their digests: `/blobs/SHA256` of the admin
//! endpoint. They check what they get against what the hub tells them (`--model-peers`).

use std::io::SeekFrom;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Path as Segment, State};
use axum::http::header::{ACCEPT_RANGES, CONTENT_LENGTH, CONTENT_RANGE, RANGE};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use baton_model_files::fetch;
use tokio::fs::File;
use tokio::io::{AsyncReadExt, AsyncSeekExt};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_stream::wrappers::ReceiverStream;

use crate::{WorkerConfig, WorkerError};

/// Files that are given at a time (I5). Who comes later asks another worker, or the hub.
const AT_ONCE: usize = 4;
/// Who reads nothing for this long is let go.
const STALLED: Duration = Duration::from_secs(60);
/// Bytes of one read.
const CHUNK: u64 = 1 << 20;

#[derive(Clone)]
struct Shares {
    cache: Arc<Path>,
    model: Arc<str>,
    places: Arc<Semaphore>,
}

/// The route, where the settings ask for it.
pub(crate) fn routes(config: &WorkerConfig) -> Result<Router, WorkerError> {
    if !config.share_models {
        return Ok(Router::new());
    }
    let cache = config.fetch.model_cache.clone().map_or_else(fetch::default_cache, Ok)?;
    Ok(of(&cache, &config.model))
}

fn of(cache: &Path, model: &str) -> Router {
    let shares = Shares { cache: cache.into(), model: model.into(), places: Arc::new(Semaphore::new(AT_ONCE)) };
    Router::new().route("/blobs/{sha256}", get(blob)).with_state(shares)
}

async fn blob(State(shares): State<Shares>, Segment(sha256): Segment<String>, headers: HeaderMap) -> Response {
    let Some(path) = fetch::shared(&shares.cache, &shares.model, &sha256) else {
        return (StatusCode::NOT_FOUND, "no such file of the model\n").into_response();
    };
    let Ok(place) = Arc::clone(&shares.places).try_acquire_owned() else {
        return (StatusCode::SERVICE_UNAVAILABLE, "busy with others\n").into_response();
    };
    given(path, &headers, place).await.unwrap_or_else(|error| {
        tracing::warn!(sha256, %error, "a file of the model cannot be given");
        StatusCode::INTERNAL_SERVER_ERROR.into_response()
    })
}

async fn given(path: PathBuf, headers: &HeaderMap, place: OwnedSemaphorePermit) -> std::io::Result<Response> {
    let mut file = File::open(path).await?;
    let size = file.metadata().await?.len();
    let range = headers.get(RANGE).map(|range| range.to_str().ok().and_then(beginning));
    let from = match range {
        None => 0,
        Some(Some(from)) if from < size => from,
        Some(_) => return Ok((StatusCode::RANGE_NOT_SATISFIABLE, "Range must be bytes=FIRST-\n").into_response()),
    };
    file.seek(SeekFrom::Start(from)).await?;
    let (pieces, body) = mpsc::channel(1);
    tokio::spawn(read(file, size - from, pieces, place));
    let status = if range.is_some() { StatusCode::PARTIAL_CONTENT } else { StatusCode::OK };
    let head = [
        (ACCEPT_RANGES, "bytes".to_owned()),
        (CONTENT_LENGTH, (size - from).to_string()),
        (CONTENT_RANGE, format!("bytes {from}-{}/{size}", size.saturating_sub(1))),
    ];
    let head = head.into_iter().filter(|(name, _)| range.is_some() || *name != CONTENT_RANGE);
    let head: HeaderMap = head.filter_map(|(name, value)| Some((name, value.parse().ok()?))).collect();
    Ok((status, head, Body::from_stream(ReceiverStream::new(body))).into_response())
}

/// The first byte of what `bytes=FIRST-` asks for.
fn beginning(range: &str) -> Option<u64> {
    range.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok()
}

/// Reads ahead by one piece. The place is free when the client has all, or has gone.
async fn read(
    mut file: File,
    mut left: u64,
    pieces: mpsc::Sender<std::io::Result<Bytes>>,
    _place: OwnedSemaphorePermit,
) {
    while left > 0 {
        let mut piece = vec![0; left.min(CHUNK) as usize];
        let came = file.read_exact(&mut piece).await.map(|_| Bytes::from(piece));
        left -= left.min(CHUNK);
        let broken = came.is_err();
        let sent = tokio::time::timeout(STALLED, pieces.send(came)).await;
        if broken || !matches!(sent, Ok(Ok(()))) {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt;
    use tokio::net::{TcpListener, TcpStream};

    use super::*;

    const SHA: &str = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";

    /// A cache with one file of a model, and its server.
    async fn served(bytes: &[u8]) -> (tempfile::TempDir, std::net::SocketAddr) {
        let cache = tempfile::tempdir().unwrap();
        let blobs = cache.path().join("hub/models--org--name/blobs");
        std::fs::create_dir_all(&blobs).unwrap();
        std::fs::write(blobs.join(SHA), bytes).unwrap();
        std::fs::write(cache.path().join("secret"), b"secret").unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let app = of(cache.path(), "org/name:m.gguf");
        tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        (cache, address)
    }

    async fn asked(to: std::net::SocketAddr, path: &str, range: &str) -> TcpStream {
        let mut stream = TcpStream::connect(to).await.unwrap();
        let head = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{range}\r\n");
        stream.write_all(head.as_bytes()).await.unwrap();
        stream
    }

    async fn said(to: std::net::SocketAddr, path: &str, range: &str) -> (String, Vec<u8>) {
        let mut all = Vec::new();
        asked(to, path, range).await.read_to_end(&mut all).await.unwrap();
        let end = all.windows(4).position(|four| four == b"\r\n\r\n").unwrap();
        (String::from_utf8_lossy(&all[..end]).to_lowercase(), all[end + 4..].to_vec())
    }

    #[tokio::test]
    async fn a_file_is_given_by_its_digest_from_any_byte_on() {
        let bytes: Vec<u8> = (0..3_000_000u32).map(|i| (i % 251) as u8).collect();
        let (_cache, at) = served(&bytes).await;
        let path = format!("/blobs/{SHA}");
        let (head, body) = said(at, &path, "").await;
        assert!(head.starts_with("http/1.1 200") && !head.contains("content-range"), "{head}");
        assert!(body == bytes);
        let (head, body) = said(at, &path, "Range: bytes=2999998-\r\n").await;
        assert!(head.starts_with("http/1.1 206") && head.contains("bytes 2999998-2999999/3000000"), "{head}");
        assert_eq!(body, bytes[2_999_998..]);
        for wrong in ["bytes=3000000-", "bytes=1-2", "lines=1-"] {
            assert!(said(at, &path, &format!("Range: {wrong}\r\n")).await.0.starts_with("http/1.1 416"), "{wrong}");
        }
        let other = format!("/blobs/{}", SHA.replace('0', "1"));
        for path in [&other, "/blobs/..%2F..%2Fsecret", "/blobs/secret", "/blobs/"] {
            assert!(said(at, path, "").await.0.starts_with("http/1.1 404"), "{path}");
        }
    }

    /// I5.
    #[tokio::test]
    async fn a_few_are_served_at_a_time_and_those_that_go_leave_their_place() {
        let (_cache, at) = served(&vec![7; 64 << 20]).await;
        let path = format!("/blobs/{SHA}");
        let mut first = Vec::new();
        for _ in 0..AT_ONCE {
            let mut stream = asked(at, &path, "").await;
            stream.read_exact(&mut [0; 100]).await.unwrap();
            first.push(stream);
        }
        assert!(said(at, &path, "").await.0.starts_with("http/1.1 503"));
        first.pop();
        let again = async {
            while !said(at, &path, "Range: bytes=67108863-\r\n").await.0.starts_with("http/1.1 206") {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(30), again).await.expect("a place is free again");
    }
}
