//! Writes log lines from a thread of its own. Whoever reads them may stop reading (a full disk, a stuck collector); lines are then dropped and
//! counted, and nothing else waits.

use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use tracing_subscriber::fmt::MakeWriter;

/// Most lines that wait to be written.
const LINES: usize = 8192;
/// Longest line kept, bytes. With [`LINES`] it bounds the memory (I5); nearly all lines are much shorter.
const LONGEST: usize = 16 << 10;

enum Item {
    Line(Vec<u8>),
    /// Answered once all lines before it are written.
    Flush(SyncSender<()>),
}

/// Hands lines to the thread that writes them. Clones share the thread.
#[derive(Clone)]
pub(crate) struct LogWriter {
    items: SyncSender<Item>,
    /// Lines that found no room, and that nobody has been told of.
    dropped: Arc<AtomicU64>,
}

static WRITER: OnceLock<LogWriter> = OnceLock::new();

impl LogWriter {
    /// Starts the thread, which writes to `to`.
    pub fn start(to: impl Write + Send + 'static) -> io::Result<LogWriter> {
        let (items, received) = sync_channel(LINES);
        let dropped = Arc::<AtomicU64>::default();
        let theirs = Arc::clone(&dropped);
        std::thread::Builder::new().name("log".to_owned()).spawn(move || write_all(to, received, &theirs))?;
        Ok(LogWriter { items, dropped })
    }

    /// Lets [`flush`] wait for this writer.
    pub fn flush_at_end(&self) {
        let _ = WRITER.set(self.clone());
    }

    fn line(&self, line: Vec<u8>) {
        if self.items.try_send(Item::Line(line)).is_err() {
            self.dropped.fetch_add(1, Ordering::Relaxed);
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

fn write_all(mut to: impl Write, items: Receiver<Item>, dropped: &AtomicU64) {
    for item in items {
        match item {
            // Nobody could be told of an error.
            Item::Line(line) => drop(to.write_all(&line)),
            Item::Flush(done) => drop(done.send(())),
        }
        let lost = dropped.swap(0, Ordering::Relaxed);
        if lost > 0 {
            tracing::warn!(lines = lost, "log lines were dropped: they came faster than they were read");
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
        let room = LONGEST.saturating_sub(self.text.len());
        self.text.extend_from_slice(&bytes[..bytes.len().min(room)]);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Line<'_> {
    fn drop(&mut self) {
        if self.text.len() == LONGEST && self.text.last() != Some(&b'\n') {
            self.text.extend_from_slice("…\n".as_bytes());
        }
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
    fn a_line_is_bounded() {
        let (_, held) = channel();
        let (written, lines) = channel();
        let writer = LogWriter::start(Stuck(held, written)).unwrap();
        writeln!(writer.make_writer(), "{}", "x".repeat(2 * LONGEST)).unwrap();
        writer.flush(Duration::from_secs(30));
        let line: Vec<u8> = lines.try_iter().flatten().collect();
        assert!(line.len() < LONGEST + 8 && line.ends_with("…\n".as_bytes()));
    }
}
