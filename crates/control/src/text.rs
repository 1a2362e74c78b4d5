//! Types that are one text in JSON, in the form of their `Display` and `FromStr`.

/// Implements serialization and the API's schema of a type: its description, and examples.
macro_rules! text_type {
    ($Type:ident, $description:literal $(, [$($example:literal),+])?) => {
        impl serde::Serialize for $Type {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> serde::Deserialize<'de> for $Type {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<$Type, D::Error> {
                let text: String = serde::Deserialize::deserialize(deserializer)?;
                text.parse().map_err(serde::de::Error::custom)
            }
        }

        impl utoipa::PartialSchema for $Type {
            fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::schema::Schema> {
                utoipa::openapi::schema::ObjectBuilder::new()
                    .schema_type(utoipa::openapi::schema::Type::String)
                    .description(Some($description))
                    $(.examples([$($example),+].map(|text| serde_json::json!(text))))?
                    .into()
            }
        }

        impl utoipa::ToSchema for $Type {}
    };
}

pub(crate) use text_type;
