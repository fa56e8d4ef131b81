//! Writes log lines from a thread of its own. Whoever reads them may stop reading (a full disk, a stuck collector); lines are then dropped and
//! counted, and nothing else waits.

use std::cell::RefCell;
use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use tracing_subscriber::fmt::MakeWriter;

/// Most lines, and most bytes of them, that wait to be written (I5).
const LINES: usize = 8192;
const BYTES: usize = 16 << 20;
/// Least time between two reports of dropped lines.
const REPORT_EVERY: Duration = Duration::from_secs(1);

enum Item {
    Line(Vec<u8>),
    /// Answered once all lines before it are written.
    Flush(SyncSender<()>),
}

/// Hands lines to the thread that writes them. Clones share the thread.
#[derive(Clone)]
pub(crate) struct LogWriter {
    items: SyncSender<Item>,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    /// Bytes that wait.
    waiting: AtomicUsize,
    /// Lines that found no room, and that nobody has been told of.
    dropped: AtomicU64,
}

thread_local! {
    /// On the log's thread: its own lines, which it writes itself.
    static OWN: RefCell<Option<Vec<u8>>> = const { RefCell::new(None) };
}

static WRITER: OnceLock<LogWriter> = OnceLock::new();

impl LogWriter {
    /// Starts the thread, which writes to `to`.
    pub fn start(to: impl Write + Send + 'static) -> io::Result<LogWriter> {
        let (items, received) = sync_channel(LINES);
        let shared = Arc::<Shared>::default();
        let theirs = Arc::clone(&shared);
        std::thread::Builder::new().name("log".to_owned()).spawn(move || write_all(to, received, &theirs))?;
        Ok(LogWriter { items, shared })
    }

    /// Lets [`flush`] wait for this writer.
    pub fn flush_at_end(&self) {
        let _ = WRITER.set(self.clone());
    }

    fn line(&self, line: Vec<u8>) {
        let is_own = OWN.with_borrow_mut(|own| own.as_mut().map(|own| own.extend_from_slice(&line)).is_some());
        if is_own {
            return;
        }
        let (Shared { waiting, dropped }, bytes) = (&*self.shared, line.len());
        let fits = waiting.fetch_add(bytes, Ordering::Relaxed) + bytes <= BYTES;
        if !fits || self.items.try_send(Item::Line(line)).is_err() {
            waiting.fetch_sub(bytes, Ordering::Relaxed);
            dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn flush(&self, time: Duration) {
        let (until, (done, wait)) = (Instant::now() + time, sync_channel(1));
        let mut item = Item::Flush(done);
        while let Err(TrySendError::Full(back)) = self.items.try_send(item) {
            if Instant::now() >= until {
                return;
            }
            item = back;
            std::thread::sleep(Duration::from_millis(1));
        }
        let _ = wait.recv_timeout(until.saturating_duration_since(Instant::now()));
    }
}

/// Waits until all log lines so far are written, for a second at most. Call it before the process ends.
pub fn flush() {
    if let Some(writer) = WRITER.get() {
        writer.flush(Duration::from_secs(1));
    }
}

fn write_all(mut to: impl Write, items: Receiver<Item>, shared: &Shared) {
    OWN.set(Some(Vec::new()));
    let mut reported: Option<Instant> = None;
    for item in items {
        match item {
            Item::Line(line) => {
                // Nobody could be told of an error.
                let _ = to.write_all(&line);
                shared.waiting.fetch_sub(line.len(), Ordering::Relaxed);
            }
            Item::Flush(done) => drop(done.send(())),
        }
        if shared.dropped.load(Ordering::Relaxed) > 0 && reported.is_none_or(|at| at.elapsed() >= REPORT_EVERY) {
            let lines = shared.dropped.swap(0, Ordering::Relaxed);
            tracing::warn!(lines, "log lines were dropped: they came faster than they were read");
            let own = OWN.with_borrow_mut(|own| own.as_mut().map(std::mem::take)).unwrap_or_default();
            let _ = to.write_all(&own);
            reported = Some(Instant::now());
        }
    }
}

/// One line. It is handed over when it is dropped.
pub(crate) struct Line<'a> {
    to: &'a LogWriter,
    text: Vec<u8>,
}

impl Write for Line<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.text.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Line<'_> {
    fn drop(&mut self) {
        if !self.text.is_empty() {
            self.to.line(std::mem::take(&mut self.text));
        }
    }
}

impl<'a> MakeWriter<'a> for LogWriter {
    type Writer = Line<'a>;

    fn make_writer(&'a self) -> Line<'a> {
        Line { to: self, text: Vec::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Sender, channel};

    /// Takes nothing until the test lets it, then all.
    struct Stuck(Receiver<()>, Sender<Vec<u8>>);

    impl Write for Stuck {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let _ = self.0.recv();
            self.1.send(bytes.to_vec()).unwrap();
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_log_that_nobody_reads_holds_nobody_up() {
        let (read, held) = channel();
        let (written, lines) = channel();
        let writer = LogWriter::start(Stuck(held, written)).unwrap();
        for number in 0..3 * LINES {
            writeln!(writer.make_writer(), "line {number}").unwrap();
        }
        let began = Instant::now();
        writer.flush(Duration::from_millis(50));
        assert!(began.elapsed() >= Duration::from_millis(50), "nothing was flushed");
        drop(read);
        writer.flush(Duration::from_secs(30));
        let lines: Vec<Vec<u8>> = lines.try_iter().collect();
        assert!((LINES..LINES + 3).contains(&lines.len()), "{} lines", lines.len());
        let in_order = |(number, line): (usize, &Vec<u8>)| *line == format!("line {number}\n").into_bytes();
        assert!(lines[..LINES].iter().enumerate().all(in_order));
    }

    #[test]
    fn what_waits_is_bounded_in_bytes_too() {
        let (read, held) = channel();
        let (written, lines) = channel();
        let writer = LogWriter::start(Stuck(held, written)).unwrap();
        for _ in 0..5 {
            writeln!(writer.make_writer(), "{}", "x".repeat(BYTES / 4)).unwrap();
        }
        drop(read);
        writer.flush(Duration::from_secs(30));
        assert_eq!(lines.try_iter().count(), 3);
        writeln!(writer.make_writer(), "there is room again").unwrap();
        writer.flush(Duration::from_secs(30));
        assert_eq!(lines.try_iter().count(), 1);
    }
}
