//! The macros that define settings: [`crate::config!`] and [`crate::config_enum!`].

/// Defines a component's configuration: a struct, its defaults, and everything [`crate::load`] needs.
///
/// ```
/// use std::{net::SocketAddr, time::Duration};
/// baton_runtime::config! {
///     /// The front door.
///     pub struct DoorConfig {
///         use process: baton_runtime::ProcessConfig = Default::default();
///         /// Address the door listens on.
///         http: SocketAddr = SocketAddr::from(([127, 0, 0, 1], 8000)),
///         /// How long a caller may stay.
///         stay: Duration = Duration::from_secs(60),
///         /// Name on the door.
///         name: Option<String> = None,
///     }
/// }
/// assert_eq!(DoorConfig::default().stay, Duration::from_secs(60));
/// ```
///
/// `use name: Struct = default;` includes another configuration struct. Its fields become fields of this one, with the
/// defaults given here. A field's type must implement [`crate::config::Value`].
#[macro_export]
macro_rules! config {
    (
        $(#[doc = $about:literal])+
        $vis:vis struct $name:ident {
            $(use $part:ident: $part_type:ty = $part_default:expr;)*
            $($(#[doc = $help:literal])+ $field:ident: $type:ty = $default:expr),* $(,)?
        }
    ) => {
        $(#[doc = $about])+
        #[derive(Clone, Debug)]
        $vis struct $name {
            $(#[doc = concat!("The fields of [`", stringify!($part_type), "`].")] pub $part: $part_type,)*
            $($(#[doc = $help])+ pub $field: $type,)*
        }

        impl ::core::default::Default for $name {
            fn default() -> Self {
                Self { $($part: $part_default,)* $($field: $default,)* }
            }
        }

        impl $crate::config::Config for $name {
            const ABOUT: &'static str = concat!($($about, "\n"),+);

            fn fields() -> Vec<$crate::config::Field> {
                let own = vec![$($crate::config::Field {
                    key: stringify!($field),
                    help: concat!($($help, "\n"),+),
                    expects: <$type as $crate::config::Value>::EXPECTS,
                    switch: <$type as $crate::config::Value>::SWITCH,
                }),*];
                let parts = vec![$(<$part_type as $crate::config::Config>::fields(),)* own];
                parts.concat()
            }

            #[allow(unused_variables)]
            fn set(&mut self, key: &str, value: &$crate::config::Plain) -> Option<Result<(), String>> {
                $(if key == stringify!($field) {
                    return Some($crate::config::Value::from_plain(value).map(|v| self.$field = v));
                })*
                $(if let Some(done) = $crate::config::Config::set(&mut self.$part, key, value) {
                    return Some(done);
                })*
                None
            }

            #[allow(unused_variables)]
            fn get(&self, key: &str) -> Option<$crate::config::Plain> {
                $(if key == stringify!($field) {
                    return $crate::config::Value::to_plain(&self.$field);
                })*
                $(if let Some(value) = $crate::config::Config::get(&self.$part, key) {
                    return Some(value);
                })*
                None
            }
        }

        impl $crate::config::serde::Serialize for $name {
            fn serialize<S: $crate::config::serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
                $crate::config::serialize(self, to)
            }
        }

        impl<'de> $crate::config::serde::Deserialize<'de> for $name {
            fn deserialize<D: $crate::config::serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
                $crate::config::deserialize(from)
            }
        }
    };
}

/// Defines an enum that can be a field of a [`crate::config!`] struct, and the word for each variant.
///
/// ```
/// baton_runtime::config_enum! {
///     /// How to travel.
///     pub enum Way {
///         /// Slow.
///         Foot = "foot",
///         /// Fast.
///         Rail = "rail",
///     }
/// }
/// assert_eq!("rail".parse(), Ok(Way::Rail));
/// ```
#[macro_export]
macro_rules! config_enum {
    (
        $(#[doc = $about:literal])+
        $vis:vis enum $name:ident {
            $($(#[doc = $help:literal])+ $variant:ident = $word:literal),+ $(,)?
        }
    ) => {
        $(#[doc = $about])+
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        $vis enum $name {
            $($(#[doc = $help])+ $variant,)+
        }

        $crate::config::words!($name { $($variant = $word),+ });

        impl $crate::config::Value for $name {
            const EXPECTS: &'static str = <$name as $crate::config::Expects>::EXPECTS;
            fn from_plain(value: &$crate::config::Plain) -> Result<Self, String> {
                value.text(<Self as $crate::config::Value>::EXPECTS)?.parse()
            }
            fn to_plain(&self) -> Option<$crate::config::Plain> {
                Some($crate::config::Plain::Text(self.as_str().to_owned()))
            }
        }
    };
}
