//! Quantities written with their unit: durations ("250ms") and sizes ("512MiB"). Printed values read back exactly.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// An amount of memory, bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Bytes(pub u64);

impl Bytes {
    /// `n` KiB.
    pub const fn kib(n: u64) -> Bytes {
        Bytes(n << 10)
    }
    /// `n` MiB.
    pub const fn mib(n: u64) -> Bytes {
        Bytes(n << 20)
    }
    /// `n` GiB.
    pub const fn gib(n: u64) -> Bytes {
        Bytes(n << 30)
    }
}

/// Units of size and their bytes, the largest binary one first. Decimal units are read but never printed.
const BYTE_UNITS: [(&str, u128); 8] = [
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("KB", 1_000),
    ("B", 1),
];
/// Units of time and their nanoseconds, the largest first.
const TIME_UNITS: [(&str, u128); 6] = [
    ("h", 3_600_000_000_000),
    ("m", 60_000_000_000),
    ("s", 1_000_000_000),
    ("ms", 1_000_000),
    ("us", 1_000),
    ("ns", 1),
];

pub(super) const BYTES_EXPECTED: &str = "a size with its unit, such as 512MiB or 2GiB";
pub(super) const DURATION_EXPECTED: &str = "a duration with its unit, such as 250ms, 2s or 1m";

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let binary = BYTE_UNITS.iter().filter(|(unit, _)| !matches!(*unit, "GB" | "MB" | "KB"));
        f.write_str(&print(u128::from(self.0), binary, "B"))
    }
}

impl FromStr for Bytes {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        read(text, &BYTE_UNITS)
            .and_then(|n| u64::try_from(n).ok())
            .map(Bytes)
            .ok_or_else(|| format!("{text:?} is not {BYTES_EXPECTED}"))
    }
}

/// Reads "250ms", "1.5s", "2m". The error says what is expected.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    read(text, &TIME_UNITS)
        .and_then(|n| u64::try_from(n).ok())
        .map(Duration::from_nanos)
        .ok_or_else(|| format!("{text:?} is not {DURATION_EXPECTED}"))
}

/// Prints a duration in the largest unit that is exact. [`parse_duration`] reads it back.
pub fn format_duration(duration: Duration) -> String {
    print(duration.as_nanos(), TIME_UNITS.iter(), "s")
}

fn print<'a>(amount: u128, mut units: impl Iterator<Item = &'a (&'static str, u128)>, zero: &str) -> String {
    match units.find(|(_, size)| amount > 0 && amount.is_multiple_of(*size)) {
        Some((unit, size)) => format!("{}{unit}", amount / size),
        None => format!("0{zero}"),
    }
}

/// Reads a decimal number with a unit, as a whole number of the smallest unit. `None` for anything else.
fn read(text: &str, units: &[(&str, u128)]) -> Option<u128> {
    let text = text.trim();
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = (&text[..end], text[end..].trim_start());
    let size = units.iter().find(|(name, _)| *name == unit)?.1;
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() || fraction.contains('.') || fraction.len() > 9 {
        return None;
    }
    let parts = if fraction.is_empty() { 0 } else { fraction.parse::<u128>().ok()?.checked_mul(size)? };
    let scale = 10u128.pow(fraction.len() as u32);
    if !parts.is_multiple_of(scale) {
        return None;
    }
    whole.parse::<u128>().ok()?.checked_mul(size)?.checked_add(parts / scale)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_read_back_what_they_print() {
        for (text, want) in [
            ("2s", Duration::from_secs(2)),
            ("250ms", Duration::from_millis(250)),
            ("1m", Duration::from_secs(60)),
            ("1.5s", Duration::from_millis(1500)),
            ("0s", Duration::ZERO),
            ("3h", Duration::from_secs(10_800)),
            ("7ns", Duration::from_nanos(7)),
        ] {
            assert_eq!(parse_duration(text), Ok(want), "{text}");
            assert_eq!(parse_duration(&format_duration(want)), Ok(want), "{text}");
        }
        assert_eq!(format_duration(Duration::from_secs(90)), "90s");
        for bad in ["", "2", "s", "-1s", "2 weeks", "1.2.3s", ".5s", "0.1ns", "99999999999999999999h", "1e3s", "2S"] {
            assert!(parse_duration(bad).unwrap_err().contains("250ms"), "{bad}");
        }
    }

    #[test]
    fn sizes_read_back_what_they_print() {
        for (text, want) in
            [("512MiB", 512 << 20), ("1.5GiB", 3 << 29), ("10KB", 10_000), ("0B", 0), ("7B", 7), ("2 TiB", 2 << 40)]
        {
            assert_eq!(text.parse(), Ok(Bytes(want)), "{text}");
            assert_eq!(Bytes(want).to_string().parse(), Ok(Bytes(want)), "{text}");
        }
        assert_eq!(Bytes::gib(1).to_string(), "1GiB");
        for bad in ["512", "512M", "-1B", "20000000TiB", "0.5B", "MiB"] {
            assert!(bad.parse::<Bytes>().unwrap_err().contains("512MiB"), "{bad}");
        }
    }
}
