//! A table of API endpoints: [`endpoints`] turns each row into a handler, a route and an entry of
//! the OpenAPI document.
//!
//! ```text
//! endpoints! { services;
//!     /// Renames a bitmap.
//!     post "/v1/disks/{disk}/bitmaps/{bitmap}"
//!     bitmap_rename(disk = "disk": "The disk", bitmap = "bitmap": "Its name"; to: Rename)
//!         -> Bitmaps, "4XX", "5XX" {
//!         services.exports.bitmap_rename(disk, bitmap, to).await
//!     }
//! }
//! ```
//! The comment, the name (operation id), the descriptions of path parameters, the type of the body
//! and the statuses of failures are those of the OpenAPI document. `; ?query: Form` before the body
//! takes query parameters. The block may use `?`. Handlers with streams or peer certificates are
//! written out.

/// Defines `table()`, the router of the endpoints, and `Paths`, their OpenAPI document.
macro_rules! endpoints {
    ($services:ident; $(
        $(#[$($attribute:tt)*])*
        $method:ident $path:tt
        $name:ident(
            $($part:ident = $key:tt: $about:tt),* $(; ?$query:ident: $Form:ident)? $(; $body:ident: $Body:ty)?
        )
            -> $Answer:ty $(, $failure:tt)* $block:block
    )+) => {
        /// Returns the routes of the table.
        pub(super) fn table() -> axum::Router<std::sync::Arc<crate::services::Services>> {
            axum::Router::new()$(.route($path, axum::routing::$method($name)))+
        }

        /// The OpenAPI document of the table.
        #[derive(utoipa::OpenApi)]
        #[openapi(paths($($name),+))]
        pub(super) struct Paths;

        $(
            $(#[$($attribute)*])*
            #[utoipa::path(
                $method,
                path = $path,
                params($(($key = String, Path, description = $about),)* $($Form)?),
                $(request_body = $Body,)?
                responses(
                    (status = 200, body = $Answer)
                    $(, (status = $failure, body = hob_control::Problem))*
                )
            )]
            async fn $name(
                axum::extract::State($services): axum::extract::State<
                    std::sync::Arc<crate::services::Services>,
                >,
                axum::extract::Path(($($part,)*)): axum::extract::Path<
                    ($($crate::http::endpoints::string_for!($part),)*)
                >,
                $($crate::http::extract::Parameters($query): $crate::http::extract::Parameters<$Form>,)?
                $($crate::http::extract::Body($body): $crate::http::extract::Body<$Body>,)?
            ) -> $crate::http::extract::Answer<$Answer> {
                let answer: Result<$Answer, crate::api_error::ApiError> = async move { $block }.await;
                answer.into()
            }
        )+
    };
}

/// The type of a path parameter, whatever its name is.
macro_rules! string_for {
    ($part:ident) => {
        String
    };
}

pub(super) use {endpoints, string_for};
