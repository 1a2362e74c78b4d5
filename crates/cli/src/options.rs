//! Options of commands that are fields of a request of the control API.

/// Defines options of a command, and their conversion into a request: `struct Options for Request`.
/// The request has a field with the name and type of each option; its other fields keep their
/// defaults.
macro_rules! options {
    (
        $(#[$($attribute:tt)*])*
        $visibility:vis struct $Options:ident for $Request:ident {
            $($(#[$($field_attribute:tt)*])* $field:ident: $Field:ty,)+
        }
    ) => {
        $(#[$($attribute)*])*
        $visibility struct $Options {
            $($(#[$($field_attribute)*])* $field: $Field,)+
        }

        impl From<$Options> for $Request {
            fn from(options: $Options) -> $Request {
                $Request { $($field: options.$field,)+ ..$Request::default() }
            }
        }
    };
}

pub(super) use options;
