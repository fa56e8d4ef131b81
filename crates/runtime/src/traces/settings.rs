//! Where spans are sent, and of which requests.

use std::fmt;
use std::str::FromStr;

use crate::config::{Plain, Value};

/// Address of a collector that takes OTLP over gRPC.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OtlpEndpoint(pub(super) String);

impl FromStr for OtlpEndpoint {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let address = text.strip_prefix("http://").map(|rest| rest.trim_end_matches('/'));
        let port = address.and_then(|address| address.rsplit_once(':'));
        match port {
            Some((host, port)) if !host.is_empty() && !host.contains('/') && port.parse::<u16>().is_ok() => {
                Ok(OtlpEndpoint(text.to_owned()))
            }
            _ => Err(format!("{text:?} is not {}", OtlpEndpoint::EXPECTS)),
        }
    }
}

impl fmt::Display for OtlpEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Value for OtlpEndpoint {
    const EXPECTS: &'static str =
        "the address of a collector on this machine or a network that is trusted, such as http://127.0.0.1:4317";
    fn from_plain(value: &Plain) -> Result<Self, String> {
        value.text(Self::EXPECTS)?.parse()
    }
    fn to_plain(&self) -> Option<Plain> {
        Some(Plain::Text(self.0.clone()))
    }
}

/// A share of requests, from 0 to 1.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Share(pub(super) f64);

impl Share {
    /// All requests.
    pub const ALL: Share = Share(1.0);
}

impl FromStr for Share {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let share = text.parse().ok().filter(|share| (0.0..=1.0).contains(share));
        share.map(Share).ok_or_else(|| format!("{text:?} is not {}", Share::EXPECTS))
    }
}

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

impl Value for Share {
    const EXPECTS: &'static str = "a share from 0 to 1, such as 0.01";
    fn from_plain(value: &Plain) -> Result<Self, String> {
        match value {
            Plain::Text(text) => text.parse(),
            Plain::Int(number) => number.to_string().parse(),
            Plain::Float(number) => number.to_string().parse(),
            _ => Err(value.refused(Self::EXPECTS)),
        }
    }
    fn to_plain(&self) -> Option<Plain> {
        Some(Plain::Float(self.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_address_or_share_is_refused_with_an_example() {
        for good in ["http://127.0.0.1:4317", "http://[::1]:4317/", "http://collector.monitoring:4317"] {
            assert_eq!(good.parse::<OtlpEndpoint>().unwrap().to_string(), good);
        }
        for bad in [
            "",
            "127.0.0.1:4317",
            "https://a:4317",
            "http://a",
            "http://:4317",
            "http://a:4317/v1/traces",
            "http://a:x",
        ] {
            let error = bad.parse::<OtlpEndpoint>().unwrap_err();
            assert!(error.contains("http://127.0.0.1:4317"), "{error}");
        }
        assert_eq!(("0".parse(), "1".parse(), "0.25".parse()), (Ok(Share(0.0)), Ok(Share::ALL), Ok(Share(0.25))));
        for bad in ["-0.1", "1.1", "NaN", "10%", ""] {
            assert!(bad.parse::<Share>().unwrap_err().contains("such as 0.01"));
        }
    }
}
