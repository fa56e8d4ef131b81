//! Enums whose values are words, with one spelling in configuration, metrics and messages.

/// A type that can be read from text and describes the texts it accepts.
pub trait Expects {
    /// Describes the accepted values. Completes "… is not …".
    const EXPECTS: &'static str;
}

/// Gives each variant of an enum its word: `ALL`, `as_str`, [`std::fmt::Display`], [`std::str::FromStr`] and [`Expects`].
///
/// ```
/// #[derive(Clone, Copy, PartialEq, Debug)]
/// pub enum Way {
///     Foot,
///     Rail,
/// }
/// baton_types::words!(Way { Foot = "foot", Rail = "rail" });
/// assert_eq!("rail".parse(), Ok(Way::Rail));
/// assert_eq!(Way::Foot.to_string(), "foot");
/// assert_eq!("sea".parse::<Way>().unwrap_err(), "\"sea\" is not one of: foot, rail");
/// ```
#[macro_export]
macro_rules! words {
    ($name:ident { $($variant:ident = $word:literal),+ $(,)? }) => {
        impl $name {
            /// All variants.
            pub const ALL: [$name; [$($word),+].len()] = [$($name::$variant),+];

            /// The variant's word.
            pub fn as_str(self) -> &'static str {
                match self {
                    $($name::$variant => $word,)+
                }
            }
        }

        impl ::core::fmt::Display for $name {
            fn fmt(&self, f: &mut ::core::fmt::Formatter<'_>) -> ::core::fmt::Result {
                f.write_str(self.as_str())
            }
        }

        impl ::core::str::FromStr for $name {
            type Err = String;
            fn from_str(word: &str) -> Result<Self, String> {
                match word {
                    $($word => Ok($name::$variant),)+
                    _ => Err(format!("{word:?} is not {}", <$name as $crate::Expects>::EXPECTS)),
                }
            }
        }

        impl $crate::Expects for $name {
            const EXPECTS: &'static str = {
                let all = concat!("one of:" $(, " ", $word, ",")+);
                all.split_at(all.len() - 1).0
            };
        }
    };
}
