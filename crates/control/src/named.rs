//! Enums whose variants have names.

/// Defines an enum whose variants have the same names in JSON, metrics and the command line.
macro_rules! named {
    (
        $(#[$($attribute:tt)*])*
        pub enum $Enum:ident {
            $($(#[$($variant_attribute:tt)*])* $Variant:ident = $name:literal,)+
        }
    ) => {
        $(#[$($attribute)*])*
        pub enum $Enum {
            $($(#[$($variant_attribute)*])* $Variant,)+
        }

        impl $Enum {
            /// All variants, in order.
            pub const ALL: [$Enum; [$($name),+].len()] = [$($Enum::$Variant),+];

            /// Returns the name of the variant.
            pub fn name(self) -> &'static str {
                match self {
                    $($Enum::$Variant => $name,)+
                }
            }
        }
    };
}

pub(crate) use named;
