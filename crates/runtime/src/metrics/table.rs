//! A metric's description, for Prometheus and for docs/metrics.md.

use ::metrics::Unit;

/// What kind of number it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Only grows.
    Counter,
    /// Goes up and down.
    Gauge,
    /// A distribution.
    Histogram,
}

/// One metric.
#[derive(Debug)]
pub struct Metric {
    /// The heading of docs/metrics.md that it is under.
    pub section: &'static str,
    /// Its name, with its base unit.
    pub name: &'static str,
    /// What kind of number it is.
    pub kind: Kind,
    /// Its labels with their values, as Markdown; empty: none.
    pub by: &'static str,
    /// Which processes have it.
    pub of: &'static str,
    /// What it says, as Markdown.
    pub help: &'static str,
}

/// Defines a constant for the name of each metric, and `ALL`.
macro_rules! metrics {
    ($($section:literal { $($constant:ident: $kind:ident $name:literal by $by:literal of $of:literal, $help:literal;)* })*) => {
        $($(
            #[doc = $help]
            pub const $constant: &str = $name;
        )*)*

        /// All of them.
        pub const ALL: &[super::table::Metric] = &[$($(super::table::Metric {
            section: $section,
            name: $name,
            kind: super::table::kind::$kind,
            by: $by,
            of: $of,
            help: $help,
        },)*)*];
    };
}
pub(super) use metrics;

/// Kinds by the words of the list.
#[expect(non_upper_case_globals, reason = "they are words of the list")]
pub mod kind {
    use super::Kind;

    pub const counter: Kind = Kind::Counter;
    pub const gauge: Kind = Kind::Gauge;
    pub const histogram: Kind = Kind::Histogram;
}

impl Metric {
    /// Its unit, by its name.
    pub fn unit(&self) -> Unit {
        match self.name.trim_end_matches("_total") {
            name if name.ends_with("_seconds") => Unit::Seconds,
            name if name.ends_with("_bytes") => Unit::Bytes,
            _ => Unit::Count,
        }
    }

    /// What it says, without Markdown.
    pub fn help(&self) -> String {
        let mut plain = String::with_capacity(self.help.len());
        let mut rest = self.help;
        // Of a link its text.
        while let Some((before, link)) = rest.split_once('[') {
            let (text, after) = link.split_once("](").unwrap_or((link, ")"));
            plain += before;
            plain += text;
            rest = after.split_once(')').map_or("", |(_, after)| after);
        }
        plain += rest;
        let plain = plain.replace('`', "");
        let mut letters = plain.chars();
        letters.next().map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
    }
}

#[cfg(test)]
fn row(metric: &Metric) -> String {
    let Metric { name, kind, by, of, help, .. } = metric;
    let kind = format!("{kind:?}").to_lowercase();
    let by = if by.is_empty() { String::new() } else { format!(" by {by}") };
    format!("| `{name}` | {kind}{by} | {of} | {help} |\n")
}

/// docs/metrics.md with the tables of the code in place of its own. A section's table comes where its first row was.
#[cfg(test)]
pub fn page(docs: &str) -> String {
    let (mut page, mut section) = (String::new(), "");
    for line in docs.lines() {
        if let Some(heading) = line.strip_prefix("## ") {
            section = heading;
        }
        if line.starts_with("| --- ") {
            page += line;
            page.push('\n');
            page.extend(super::list::ALL.iter().filter(|metric| metric.section == section).map(row));
        } else if !line.starts_with("| `") {
            page += line;
            page.push('\n');
        }
    }
    page
}
