//! `strftime` for chat templates, in UTC. Only what a date in a prompt needs.

use std::time::{SystemTime, UNIX_EPOCH};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];

/// `now` in a `strftime` format; directives it does not know stay as they are. Times before 1970 count as 1970.
pub(super) fn format(now: SystemTime, format: &str) -> String {
    let seconds = now.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let days = seconds / 86_400;
    let (year, month, day) = civil(days);
    let (weekday, month_name) = (DAYS[(days % 7) as usize], MONTHS[month as usize - 1]);
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        match chars.next() {
            Some('Y') => out.push_str(&year.to_string()),
            Some('y') => out.push_str(&format!("{:02}", year % 100)),
            Some('m') => out.push_str(&format!("{month:02}")),
            Some('d') => out.push_str(&format!("{day:02}")),
            Some('e') => out.push_str(&format!("{day:2}")),
            Some('B') => out.push_str(month_name),
            Some('b') => out.push_str(&month_name[..3]),
            Some('A') => out.push_str(weekday),
            Some('a') => out.push_str(&weekday[..3]),
            Some('H') => out.push_str(&format!("{:02}", seconds / 3600 % 24)),
            Some('M') => out.push_str(&format!("{:02}", seconds / 60 % 60)),
            Some('S') => out.push_str(&format!("{:02}", seconds % 60)),
            Some('%') => out.push('%'),
            Some(other) => out.extend(['%', other]),
            None => out.push('%'),
        }
    }
    out
}

/// Year, month and day of the `days`-th day after 1970-01-01. Counts in eras of 400 years that begin in March, so that the
/// leap day is the last of its year (H. Hinnant's civil-from-days).
fn civil(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    (era * 400 + year_of_era + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn known_days() {
        let at = |days: u64, text: &str| format(UNIX_EPOCH + Duration::from_secs(days * 86_400 + 3_723), text);
        assert_eq!(at(0, "%A %Y-%m-%d %H:%M:%S"), "Thursday 1970-01-01 01:02:03");
        assert_eq!(at(11_016, "%a %d %B %y"), "Tue 29 February 00");
        assert_eq!(at(19_782, "%e|%b|%q|%%|%"), "29|Feb|%q|%|%");
        assert_eq!(at(47_540, "%Y-%m-%d"), "2100-02-28");
        assert_eq!(at(47_541, "%Y-%m-%d"), "2100-03-01");
    }
}
