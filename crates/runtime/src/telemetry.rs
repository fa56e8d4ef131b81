//! Logs: one line an event on stderr, for a person or as JSON.
//!
//! `2026-11-21T01:15:00.123456Z  INFO prefill ready blocks=512`

use std::fmt;
use std::io::IsTerminal;

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use crate::error::{Origin, RuntimeError};

crate::config_enum! {
    /// How log lines look.
    pub enum LogFormat {
        /// For a person.
        Text = "text",
        /// One JSON object a line.
        Json = "json",
    }
}

/// Starts logging as `role` to stderr. `filter` is a level or a list of `target=level`. When this process logs already
/// (several components in one test), nothing changes.
///
/// # Errors
/// A filter that cannot be read.
pub fn init(role: &'static str, filter: &str, format: LogFormat) -> Result<(), RuntimeError> {
    let filter = EnvFilter::builder().parse(filter).map_err(|e| RuntimeError::Value {
        field: "log".to_owned(),
        problem: format!("{filter:?} is not a log filter such as info or warn,baton_router=debug: {e}"),
        origin: Origin::Default,
    })?;
    let started = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .event_format(Lines { role, format })
        .finish();
    if tracing::subscriber::set_global_default(started).is_ok() {
        std::panic::set_hook(Box::new(|panic| {
            let payload = panic.payload();
            let text = payload.downcast_ref::<&str>().copied();
            let message = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message");
            let at = panic.location().map(ToString::to_string).unwrap_or_default();
            let thread = std::thread::current().name().unwrap_or_default().to_owned();
            tracing::error!(at, thread, "panic: {message}");
        }));
    }
    Ok(())
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
