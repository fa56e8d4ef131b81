//! Makes a test fail when an ERROR is logged that it did not expect.

use std::fmt::{Debug, Write};
use std::sync::{Mutex, Once};

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::{Context, SubscriberExt};

static ERRORS: Mutex<Vec<String>> = Mutex::new(Vec::new());
static START: Once = Once::new();

/// A request with this text in its id may log an ERROR.
pub const EXPECTED: &str = "expected-error";

struct Errors;

struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let _ = write!(self.0, "{field}={value:?} ");
    }
}

impl<S: Subscriber> Layer<S> for Errors {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        if *event.metadata().level() == Level::ERROR {
            let mut text = Text(String::new());
            event.record(&mut text);
            if !text.0.contains(EXPECTED) {
                ERRORS.lock().unwrap().push(text.0);
            }
        }
    }
}

pub fn watch() {
    START.call_once(|| {
        let lines = tracing_subscriber::fmt::layer().with_test_writer().with_filter(LevelFilter::INFO);
        let _ = tracing::subscriber::set_global_default(tracing_subscriber::registry().with(Errors).with(lines));
    });
}

pub fn no_errors() {
    let errors = ERRORS.lock().unwrap();
    assert!(errors.is_empty(), "ERROR in the log: {errors:?}");
}
