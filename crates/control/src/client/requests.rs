//! A table of API requests: [`requests`] turns each row into a method of [`Client`](super::Client).
//!
//! ```text
//! requests! {
//!     /// Renames a bitmap.
//!     bitmap_rename[disk, bitmap](to: &Rename) -> Bitmaps: POST "/v1/disks/{disk}/bitmaps/{bitmap}", to;
//! }
//! ```
//! Parameters in square brackets are names, which are percent-encoded for the path. The last
//! expression of a row is the body of the request. A path can end with `{}`, which stands for the
//! value in parentheses after the path.

macro_rules! requests {
    (@body) => { None::<&()> };
    (@body $body:expr) => { Some($body) };
    ($(
        $(#[$doc:meta])*
        $name:ident $([$($part:ident),+])? ($($argument:ident: $Argument:ty),*) -> $Answer:ty:
            $method:ident $path:literal $(($end:expr))? $(, $body:expr)?;
    )+) => {
        impl $crate::client::Client {
            $(
                $(#[$doc])*
                pub async fn $name(
                    &self,
                    $($($part: &str,)+)?
                    $($argument: $Argument),*
                ) -> Result<$Answer, $crate::client::ClientError> {
                    $($(let $part = $crate::client::percent_encode($part);)+)?
                    let path = format!($path $(, $end)?);
                    let method = hyper::Method::$method;
                    self.send(method, &path, $crate::client::requests::requests!(@body $($body)?)).await
                }
            )+
        }
    };
}

pub(super) use requests;
