//! Logs: one line per event on stderr, as text for people or as JSON.
//!
//! `2026-11-21T01:15:00.123456Z  INFO prefill ready blocks=512`

use std::fmt;
use std::io::IsTerminal;
use std::panic::PanicHookInfo;
use std::str::FromStr;

use tracing::field::{Field, Visit};
use tracing::subscriber::set_global_default;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, MakeWriter};
use tracing_subscriber::registry::LookupSpan;

use crate::config::{Plain, Value};
use crate::log_writer::{self, LogWriter};

crate::config_enum! {
    /// How log lines look.
    pub enum LogFormat {
        /// Text for people.
        Text = "text",
        /// One JSON object per line.
        Json = "json",
    }
}

/// What is logged: a level, or a list of `target=level`. Checked when it is parsed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LogFilter(String);

impl Default for LogFilter {
    fn default() -> Self {
        LogFilter("info".to_owned())
    }
}

impl FromStr for LogFilter {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match EnvFilter::builder().parse(text) {
            Ok(_) => Ok(LogFilter(text.to_owned())),
            Err(error) => Err(format!("{text:?} is not {}: {error}", LogFilter::EXPECTS)),
        }
    }
}

impl std::fmt::Display for LogFilter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl Value for LogFilter {
    const EXPECTS: &'static str = "a log filter, such as info or warn,baton_router=debug";
    fn from_plain(value: &Plain) -> Result<Self, String> {
        value.text(Self::EXPECTS)?.parse()
    }
    fn to_plain(&self) -> Option<Plain> {
        Some(Plain::Text(self.0.clone()))
    }
}

/// Starts logging as `role` to stderr, panics included. Changes nothing when this process logs already (several components
/// in one test).
pub fn init(role: &'static str, filter: &LogFilter, format: LogFormat) {
    let ansi = std::io::stderr().is_terminal();
    // Without a thread for it, the log is written by whoever logs.
    let set = match LogWriter::start(std::io::stderr()) {
        Ok(writer) => {
            let set = set_global_default(subscriber(role, filter, format, ansi, writer.clone()));
            set.map(|()| writer.flush_at_end())
        }
        Err(_) => set_global_default(subscriber(role, filter, format, ansi, std::io::stderr)),
    };
    if set.is_ok() {
        std::panic::set_hook(Box::new(log_panic));
    }
}

fn log_panic(panic: &PanicHookInfo<'_>) {
    let payload = panic.payload();
    let text = payload.downcast_ref::<&str>().copied();
    let message = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message");
    let at = panic.location().map(ToString::to_string).unwrap_or_default();
    let thread = std::thread::current().name().unwrap_or_default().to_owned();
    tracing::error!(at, thread, "panic: {message}");
    log_writer::flush();
}

fn subscriber<W>(role: &'static str, filter: &LogFilter, format: LogFormat, ansi: bool, to: W) -> impl Subscriber
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    tracing_subscriber::fmt()
        // The text was checked when the filter was made.
        .with_env_filter(EnvFilter::builder().parse_lossy(&filter.0))
        .with_writer(to)
        .with_ansi(ansi)
        .event_format(Lines { role, format })
        .finish()
}

struct Lines {
    role: &'static str,
    format: LogFormat,
}

impl<S, N> FormatEvent<S, N> for Lines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, ctx: &FmtContext<'_, S, N>, mut to: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        match self.format {
            LogFormat::Text => self.text(ctx, &mut to, event)?,
            LogFormat::Json => self.json(&mut to, event)?,
        }
        writeln!(to)
    }
}

impl Lines {
    fn text<S, N>(&self, ctx: &FmtContext<'_, S, N>, to: &mut Writer<'_>, event: &Event<'_>) -> fmt::Result
    where
        S: Subscriber + for<'a> LookupSpan<'a>,
        N: for<'a> FormatFields<'a> + 'static,
    {
        SystemTime.format_time(to)?;
        let level = *event.metadata().level();
        let (on, off) = if to.has_ansi_escapes() { (colour(level), "\x1b[0m") } else { ("", "") };
        write!(to, " {on}{:>5}{off} {} ", level.as_str(), self.role)?;
        for span in ctx.event_scope().into_iter().flat_map(|scope| scope.from_root()) {
            write!(to, "{}: ", span.name())?;
        }
        ctx.format_fields(to.by_ref(), event)
    }

    fn json(&self, to: &mut Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let mut time = String::new();
        SystemTime.format_time(&mut Writer::new(&mut time))?;
        let mut object = serde_json::Map::new();
        object.insert("time".to_owned(), time.into());
        object.insert("level".to_owned(), event.metadata().level().as_str().into());
        object.insert("role".to_owned(), self.role.into());
        object.insert("target".to_owned(), event.metadata().target().into());
        event.record(&mut Fields(&mut object));
        write!(to, "{}", serde_json::Value::Object(object))
    }
}

struct Fields<'a>(&'a mut serde_json::Map<String, serde_json::Value>);

impl Visit for Fields<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.0.insert(field.name().to_owned(), format!("{value:?}").into());
    }
    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name().to_owned(), value.into());
    }
    fn record_u64(&mut self, field: &Field, value: u64) {
        self.0.insert(field.name().to_owned(), value.into());
    }
    fn record_i64(&mut self, field: &Field, value: i64) {
        self.0.insert(field.name().to_owned(), value.into());
    }
    fn record_f64(&mut self, field: &Field, value: f64) {
        self.0.insert(field.name().to_owned(), value.into());
    }
    fn record_bool(&mut self, field: &Field, value: bool) {
        self.0.insert(field.name().to_owned(), value.into());
    }
}

fn colour(level: Level) -> &'static str {
    match level {
        Level::ERROR => "\x1b[31m",
        Level::WARN => "\x1b[33m",
        Level::INFO => "\x1b[32m",
        _ => "\x1b[2m",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    #[derive(Clone, Default)]
    struct Sink(Arc<Mutex<Vec<u8>>>);

    impl std::io::Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    fn logged(filter: &str, format: LogFormat) -> String {
        let sink = Sink::default();
        let to = sink.clone();
        let subscriber = subscriber("decode", &filter.parse().unwrap(), format, false, move || to.clone());
        tracing::subscriber::with_default(subscriber, || {
            tracing::info!(blocks = 512, name = "a \"b\"", "ready");
            tracing::debug!("hidden by info");
        });
        String::from_utf8(sink.0.lock().unwrap().clone()).unwrap()
    }

    #[test]
    fn a_text_line_has_time_level_role_message_and_fields() {
        let text = logged("info", LogFormat::Text);
        assert!(text.contains("Z  INFO decode ready blocks=512 name=\"a \\\"b\\\"\"\n"), "{text}");
        assert_eq!(text.lines().count(), 1, "debug is below info");
        assert_eq!(logged("debug", LogFormat::Text).lines().count(), 2);
    }

    #[test]
    fn a_json_line_is_an_object() {
        let line: serde_json::Value = serde_json::from_str(&logged("info", LogFormat::Json)).unwrap();
        assert_eq!(line["role"], "decode");
        assert_eq!(line["message"], "ready");
        assert_eq!(line["blocks"], 512);
        assert_eq!(line["name"], "a \"b\"");
    }

    #[test]
    fn a_bad_filter_is_refused_with_an_example() {
        let error = "info,,=x=y".parse::<LogFilter>().unwrap_err();
        assert!(error.contains("baton_router=debug"), "{error}");
    }
}
