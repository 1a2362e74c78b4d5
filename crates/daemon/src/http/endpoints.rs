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
//!
//! The OpenAPI document gets from a row: its comment, the name (operation id), the descriptions of
//! path parameters, the type of the body, and the statuses of failures. `; ?query: Form` before the
//! body takes query parameters. The block may use `?`. Handlers that use streams or peer
//! certificates are ordinary functions outside this table.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;

use crate::background::Boxed;
use crate::services::Services;

/// The handler of a row. All handlers have this one function-pointer type, so the compiler
/// generates the code of axum's routes only once.
pub(super) type Endpoint = fn(State<Arc<Services>>, Request) -> Boxed<Response>;

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
            axum::Router::new()
                $(.route($path, axum::routing::$method($name as $crate::http::endpoints::Endpoint)))+
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
            fn $name(
                axum::extract::State($services): axum::extract::State<
                    std::sync::Arc<crate::services::Services>,
                >,
                mut request: axum::extract::Request,
            ) -> $crate::background::Boxed<axum::response::Response> {
                let answer = async move {
                    let ($($part,)*): ($($crate::http::endpoints::string_for!($part),)*) =
                        $crate::http::extract::path(&mut request).await?;
                    $(let $query: $Form = $crate::http::extract::parameters(&request)?;)?
                    $(let $body: $Body = $crate::http::extract::body(request).await?;)?
                    let answer: Result<$Answer, crate::api_error::ApiError> = async move { $block }.await;
                    Ok::<_, $crate::http::extract::Answer<()>>(answer)
                };
                Box::pin(async move { $crate::http::extract::respond(answer.await) })
            }
        )+
    };
}

/// Expands to `String`, the type of every path parameter.
macro_rules! string_for {
    ($part:ident) => {
        String
    };
}

pub(super) use {endpoints, string_for};
