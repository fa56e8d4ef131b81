//! Fetches the beginning of a GGUF file of a hub, up to its tensors: tokenizer, chat template and configuration, without the weights.
//!
//! How long a header is, only its end tells. So twice as much is requested each time, until it can be parsed.

use std::fs::File;
use std::io::{Cursor, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::SyncSender;

use hf_hub::api::sync::ApiError;

use super::hub::{Event, Failure, Fetch};
use super::store;
use crate::ModelFileError;
use crate::gguf::Header;

/// Bytes of the first request. Vocabularies of 32,000 tokens fit.
const FIRST: usize = 2 << 20;
/// A header is at most this long. The longest known, of 262,144 tokens with their merges, has 16 MiB.
const MOST: usize = 256 << 20;
/// Bytes of one read.
const CHUNK: usize = 64 << 10;

/// The beginning of a file, and the length of the whole.
struct Beginning {
    bytes: Vec<u8>,
    total: usize,
}

impl Fetch<'_> {
    /// The path of a file that begins like `file` and ends after the header, at the earliest.
    pub(super) fn header(&self, root: &Path, file: &str) -> Result<PathBuf, ModelFileError> {
        let path = store::header_path(root, &self.spec.id, &self.commit, file);
        if path.exists() {
            return Ok(path);
        }
        let what = format!("{}/{file}", self.spec.id);
        let mut beginning = Beginning { bytes: Vec::new(), total: usize::MAX };
        let mut wanted = FIRST;
        loop {
            let had = std::mem::take(&mut beginning.bytes);
            beginning = self.retrying(file, || self.more(&what, file, had.clone(), wanted.min(beginning.total)))?;
            let Beginning { bytes, total } = &beginning;
            match Header::read(Path::new(&what), &mut Cursor::new(bytes), *total as u64) {
                Ok(_) => break,
                Err(ModelFileError::Truncated { .. }) if bytes.len() < *total && wanted < MOST => wanted *= 2,
                Err(error) => return Err(error),
            }
        }
        self.progress.finish(&what);
        let temporary = path.with_extension("part");
        store::create_dir(path.parent().unwrap_or(root))?;
        let mut written = File::create(&temporary).map_err(ModelFileError::io(&temporary))?;
        written.write_all(&beginning.bytes).map_err(ModelFileError::io(&temporary))?;
        store::publish(&written, &temporary, &path)?;
        Ok(path)
    }

    /// The first `wanted` bytes, of which `had` are there.
    fn more(&self, what: &str, file: &str, had: Vec<u8>, wanted: usize) -> Result<Beginning, Failure> {
        let mut request = ureq::get(self.api.repo(self.repo()).url(file));
        request = request.header("Range", format!("bytes={}-{}", had.len(), wanted - 1));
        if let Some(token) = &self.options.token {
            // Not sent on to another host, to which large files are redirected.
            request = request.header("Authorization", format!("Bearer {token}"));
        }
        let answer = self.supervise(what, move |events| read(request, had, wanted, &events)).map_err(Failure::last)?;
        answer.map_err(|error| self.failure(what, &error))
    }
}

fn read(
    request: ureq::RequestBuilder<ureq::typestate::WithoutBody>,
    had: Vec<u8>,
    wanted: usize,
    events: &SyncSender<Event>,
) -> Result<Beginning, ApiError> {
    let response = request.call().map_err(Box::new)?;
    // The length, or what is behind the last stroke: `bytes 0-99/1000`.
    let number = |name: &str| {
        let text = response.headers().get(name)?.to_str().ok()?;
        text.rsplit('/').next()?.trim().parse::<usize>().ok()
    };
    // A server that ignores the range sends the file from its start.
    let (mut bytes, total) = match response.status().as_u16() {
        206 => (had, number("content-range")),
        _ => (Vec::new(), number("content-length")),
    };
    let total = total.ok_or_else(|| broken("the hub does not say how long the file is"))?;
    let end = wanted.min(total);
    let mut body = response.into_body().into_reader();
    while bytes.len() < end {
        let before = bytes.len();
        bytes.resize(end.min(before + CHUNK), 0);
        let came = body.read(&mut bytes[before..])?;
        bytes.truncate(before + came);
        if came == 0 {
            return Err(broken("the connection was cut"));
        }
        // The listener may have given up.
        let _ = events.send(Event { done: bytes.len() as u64, size: None });
    }
    Ok(Beginning { bytes, total })
}

fn broken(problem: &str) -> ApiError {
    ApiError::IoError(std::io::Error::other(problem))
}
