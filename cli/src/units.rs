//! Numbers for people, in ASCII, as the live page writes them. `-`: not known.

/// A time in seconds. At most 8 characters, up to days.
pub fn seconds(value: Option<f64>) -> String {
    match value.filter(|value| value.is_finite()) {
        None => "-".to_owned(),
        Some(s) if s >= 99.995 => format!("{s:.0} s"),
        Some(s) if s >= 0.9995 => format!("{s:.2} s"),
        Some(s) if s >= 0.09995 => format!("{:.0} ms", s * 1e3),
        Some(s) if s >= 0.0009995 => format!("{:.1} ms", s * 1e3),
        Some(s) => format!("{:.0} us", s * 1e6),
    }
}

/// Bytes, in units of 1024.
pub fn bytes(value: u64) -> String {
    let (mut scaled, mut units) = (value as f64, ["KiB", "MiB", "GiB", "TiB"].into_iter());
    let mut unit = "B";
    while scaled >= 1024.0 {
        let Some(next) = units.next() else { break };
        (scaled, unit) = (scaled / 1024.0, next);
    }
    let digits = if unit == "B" || scaled >= 99.95 { 0 } else { 1 };
    format!("{scaled:.digits$} {unit}")
}

/// A rate in bytes a second, in units of 1000, as links are sold.
pub fn rate(value: Option<f64>) -> String {
    match value.filter(|value| value.is_finite()) {
        None => "-".to_owned(),
        Some(rate) if rate >= 1e9 => format!("{:.1} GB/s", rate / 1e9),
        Some(rate) => format!("{:.1} MB/s", rate / 1e6),
    }
}

/// A count, in few characters.
pub fn count(value: Option<u64>) -> String {
    match value {
        None => "-".to_owned(),
        Some(n) if n >= 9_999_500 => format!("{:.0}M", n as f64 / 1e6),
        Some(n) if n >= 99_950 => format!("{:.0}k", n as f64 / 1e3),
        Some(n) if n >= 10_000 => format!("{:.1}k", n as f64 / 1e3),
        Some(n) => n.to_string(),
    }
}

/// A number with few digits.
pub fn few(value: Option<f64>) -> String {
    match value.filter(|value| value.is_finite()) {
        None => "-".to_owned(),
        Some(n) if n >= 99.95 => format!("{n:.0}"),
        Some(n) if n >= 9.995 => format!("{n:.1}"),
        Some(n) => format!("{n:.2}"),
    }
}

/// A long time, in seconds.
pub fn duration(seconds: u64) -> String {
    match seconds {
        0..90 => format!("{seconds} s"),
        90..5400 => format!("{} min", seconds / 60),
        5400..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} d", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_few_characters_at_each_size() {
        let times = [4e-6, 0.00045, 0.0123, 0.25, 1.5, 99.99, 1234.0].map(|s| seconds(Some(s)));
        assert_eq!(times, ["4 us", "450 us", "12.3 ms", "250 ms", "1.50 s", "99.99 s", "1234 s"]);
        assert_eq!([Some(f64::NAN), Some(f64::INFINITY), None].map(seconds), ["-", "-", "-"]);
        assert_eq!(
            [7, 1536, 1_572_864, 200 << 20, 5 << 40].map(bytes),
            ["7 B", "1.5 KiB", "1.5 MiB", "200 MiB", "5.0 TiB"]
        );
        assert_eq!([5e6, 2.5e9].map(|r| rate(Some(r))), ["5.0 MB/s", "2.5 GB/s"]);
        assert_eq!(
            [0, 9999, 12_345, 123_456, 99_000_000].map(|n| count(Some(n))),
            ["0", "9999", "12.3k", "123k", "99M"]
        );
        assert_eq!([0.0, 1.234, 12.34, 123.4].map(|n| few(Some(n))), ["0.00", "1.23", "12.3", "123"]);
        assert_eq!([5, 125, 7200, 400_000].map(duration), ["5 s", "2 min", "2 h", "4 d"]);
    }

    #[test]
    fn no_time_is_wider_than_its_column() {
        for exponent in -80..=60 {
            let told = seconds(Some(10f64.powf(f64::from(exponent) / 10.0)));
            assert!(told.len() <= 9, "{told}");
        }
    }
}
