//! The types a configuration field can have, each with its conversion from and to a plain value.
//!
//! A flag or an environment variable always gives text; a file gives text, numbers, booleans and lists. Both go through
//! the same conversion, so that a field accepts and rejects the same values wherever it is set.

use std::fmt::Display;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use baton_types::Expects;
use serde::{Deserialize, Serialize};

use super::units::{BYTES_EXPECTED, Bytes, DURATION_EXPECTED, format_duration, parse_duration};

/// A configured value before it is converted to its field's type.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Plain {
    /// true or false.
    Bool(bool),
    /// A whole number.
    Int(i64),
    /// Any other number.
    Float(f64),
    /// Anything written as text.
    Text(String),
    /// A list of texts.
    List(Vec<String>),
}

impl Plain {
    /// The value's text, or an error that says what is expected instead.
    pub fn text(&self, expects: &str) -> Result<&str, String> {
        match self {
            Plain::Text(text) => Ok(text),
            _ => Err(self.refused(expects)),
        }
    }

    /// The message for a value that does not fit.
    pub fn refused(&self, expects: &str) -> String {
        match self {
            Plain::Bool(v) => format!("{v} is not {expects}"),
            Plain::Int(v) => format!("{v} is not {expects}"),
            Plain::Float(v) => format!("{v} is not {expects}"),
            Plain::Text(v) => format!("{v:?} is not {expects}"),
            Plain::List(v) => format!("{v:?} is not {expects}"),
        }
    }
}

/// A type a field can have.
pub trait Value: Sized {
    /// What a value looks like: "a port between 0 and 65535". Completes "… is not …".
    const EXPECTS: &'static str;
    /// True when the flag without a value means true.
    const SWITCH: bool = false;

    /// Converts, or says what was given and what is expected.
    fn from_plain(value: &Plain) -> Result<Self, String>;

    /// The value that converts back to this one; `None` for an unset optional field.
    fn to_plain(&self) -> Option<Plain>;
}

impl Value for String {
    const EXPECTS: &'static str = "a text";
    fn from_plain(value: &Plain) -> Result<Self, String> {
        value.text(Self::EXPECTS).map(str::to_owned)
    }
    fn to_plain(&self) -> Option<Plain> {
        Some(Plain::Text(self.clone()))
    }
}

impl Value for PathBuf {
    const EXPECTS: &'static str = "a path";
    fn from_plain(value: &Plain) -> Result<Self, String> {
        match value.text(Self::EXPECTS)? {
            "" => Err(value.refused(Self::EXPECTS)),
            path => Ok(path.into()),
        }
    }
    fn to_plain(&self) -> Option<Plain> {
        Some(Plain::Text(self.to_string_lossy().into_owned()))
    }
}

impl Value for bool {
    const EXPECTS: &'static str = "true or false";
    const SWITCH: bool = true;
    fn from_plain(value: &Plain) -> Result<Self, String> {
        match value {
            Plain::Bool(v) => Ok(*v),
            Plain::Text(text) => text.parse().map_err(|_| value.refused(Self::EXPECTS)),
            _ => Err(value.refused(Self::EXPECTS)),
        }
    }
    fn to_plain(&self) -> Option<Plain> {
        Some(Plain::Bool(*self))
    }
}

macro_rules! whole_number {
    ($($type:ty, $expects:literal;)+) => {$(
        impl Value for $type {
            const EXPECTS: &'static str = $expects;
            fn from_plain(value: &Plain) -> Result<Self, String> {
                let number = match value {
                    Plain::Int(v) => <$type>::try_from(*v).ok(),
                    Plain::Text(text) => text.trim().parse().ok(),
                    _ => None,
                };
                number.ok_or_else(|| value.refused(Self::EXPECTS))
            }
            fn to_plain(&self) -> Option<Plain> {
                // A number too large for TOML is written as text, which reads back.
                Some(i64::try_from(*self).map_or_else(|_| Plain::Text(self.to_string()), Plain::Int))
            }
        }
    )+};
}
whole_number! {
    u16, "a whole number between 0 and 65535";
    u32, "a whole number between 0 and 4294967295";
    u64, "a whole number, 0 or more";
    usize, "a whole number, 0 or more";
}

macro_rules! real_number {
    ($($type:ty),+) => {$(
        impl Value for $type {
            const EXPECTS: &'static str = "a number";
            fn from_plain(value: &Plain) -> Result<Self, String> {
                let number = match value {
                    Plain::Int(v) => Some(*v as $type),
                    Plain::Float(v) => Some(*v as $type),
                    Plain::Text(text) => text.trim().parse::<$type>().ok(),
                    _ => None,
                };
                number.filter(|v| v.is_finite()).ok_or_else(|| value.refused(Self::EXPECTS))
            }
            fn to_plain(&self) -> Option<Plain> {
                // Through text, so that an f32 prints as it was written.
                self.to_string().parse().ok().map(Plain::Float)
            }
        }
    )+};
}
real_number!(f32, f64);

impl Value for SocketAddr {
    const EXPECTS: &'static str = "an address and port, such as 127.0.0.1:8000";
    fn from_plain(value: &Plain) -> Result<Self, String> {
        value.text(Self::EXPECTS)?.trim().parse().map_err(|_| value.refused(Self::EXPECTS))
    }
    fn to_plain(&self) -> Option<Plain> {
        Some(Plain::Text(self.to_string()))
    }
}

impl Value for Duration {
    const EXPECTS: &'static str = DURATION_EXPECTED;
    fn from_plain(value: &Plain) -> Result<Self, String> {
        parse_duration(value.text(Self::EXPECTS)?)
    }
    fn to_plain(&self) -> Option<Plain> {
        Some(Plain::Text(format_duration(*self)))
    }
}

impl Value for Bytes {
    const EXPECTS: &'static str = BYTES_EXPECTED;
    fn from_plain(value: &Plain) -> Result<Self, String> {
        value.text(Self::EXPECTS)?.parse()
    }
    fn to_plain(&self) -> Option<Plain> {
        Some(Plain::Text(self.to_string()))
    }
}

impl Value for Vec<String> {
    const EXPECTS: &'static str = "a list of texts: [\"a\", \"b\"] in a file, a,b elsewhere";
    fn from_plain(value: &Plain) -> Result<Self, String> {
        match value {
            Plain::List(items) => Ok(items.clone()),
            Plain::Text(text) => {
                Ok(text.split(',').map(str::trim).filter(|item| !item.is_empty()).map(str::to_owned).collect())
            }
            _ => Err(value.refused(Self::EXPECTS)),
        }
    }
    fn to_plain(&self) -> Option<Plain> {
        Some(Plain::List(self.clone()))
    }
}

impl<T: Value> Value for Option<T> {
    const EXPECTS: &'static str = T::EXPECTS;
    const SWITCH: bool = T::SWITCH;
    fn from_plain(value: &Plain) -> Result<Self, String> {
        T::from_plain(value).map(Some)
    }
    fn to_plain(&self) -> Option<Plain> {
        self.as_ref().and_then(T::to_plain)
    }
}

/// A field whose type comes from elsewhere and parses and prints itself.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Parsed<T>(pub T);

impl<T: FromStr<Err: Display> + Display + Expects> Value for Parsed<T> {
    const EXPECTS: &'static str = T::EXPECTS;
    fn from_plain(value: &Plain) -> Result<Self, String> {
        value.text(Self::EXPECTS)?.parse().map(Parsed).map_err(|e: T::Err| e.to_string())
    }
    fn to_plain(&self) -> Option<Plain> {
        Some(Plain::Text(self.0.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Copy, PartialEq, Debug)]
    enum Direction {
        Up,
        Down,
    }
    baton_types::words!(Direction { Up = "up", Down = "down" });

    fn back<T: Value + PartialEq + std::fmt::Debug>(text: &str, want: T) {
        let value = T::from_plain(&Plain::Text(text.to_owned())).unwrap();
        assert_eq!(value, want);
        assert_eq!(T::from_plain(&value.to_plain().unwrap()).unwrap(), want, "printed value reads back");
    }

    #[test]
    fn every_type_reads_text_and_reads_back_what_it_prints() {
        back("x,y", "x,y".to_owned());
        back("/tmp/a", PathBuf::from("/tmp/a"));
        back("true", true);
        back("65535", u16::MAX);
        back("7", 7u32);
        back("18446744073709551615", u64::MAX);
        back("9", 9usize);
        back("0.1", 0.1f32);
        back("2.5", 2.5f64);
        back("[::1]:80", "[::1]:80".parse::<SocketAddr>().unwrap());
        back("90s", Duration::from_secs(90));
        back("3GiB", Bytes::gib(3));
        back("a, b,", vec!["a".to_owned(), "b".to_owned()]);
        back("5s", Some(Duration::from_secs(5)));
        back("up", Parsed(Direction::Up));
        assert_eq!(None::<u32>.to_plain(), None);
    }

    #[test]
    fn a_refusal_says_what_was_given_and_what_is_expected() {
        let refused = |r: Result<u16, String>| r.unwrap_err();
        assert_eq!(refused(Value::from_plain(&Plain::Int(70_000))), "70000 is not a whole number between 0 and 65535");
        assert_eq!(
            refused(Value::from_plain(&Plain::Text("x".into()))),
            "\"x\" is not a whole number between 0 and 65535"
        );
        assert!(Duration::from_plain(&Plain::Int(30)).unwrap_err().starts_with("30 is not a duration with its unit"));
        let direction = |plain| Parsed::<Direction>::from_plain(&plain).unwrap_err();
        assert_eq!(direction(Plain::Text("left".into())), "\"left\" is not one of: up, down");
        assert_eq!(direction(Plain::Int(1)), "1 is not one of: up, down");
        assert!(String::from_plain(&Plain::Bool(true)).is_err());
        assert!(f32::from_plain(&Plain::Text("NaN".into())).is_err());
        assert!(bool::from_plain(&Plain::Int(1)).is_err());
        assert!(PathBuf::from_plain(&Plain::Text(String::new())).is_err());
        assert!(Vec::<String>::from_plain(&Plain::Int(1)).is_err());
    }
}
