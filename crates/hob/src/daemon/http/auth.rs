//! The token that clients over TCP must show.

use std::hint::black_box;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::http::header::AUTHORIZATION;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::extract::Answer;

/// Shortest token that is accepted, bytes: 128 bits in hexadecimal are 32.
const TOKEN_BYTES_MIN: usize = 16;

/// A secret. Does not print itself.
#[derive(Clone)]
pub(crate) struct Token(Arc<[u8]>);

/// Why there is no token.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TokenError {
    /// The file cannot be read.
    #[error("cannot read the token file {}: {source}", path.display())]
    Unreadable {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It is too easy to guess.
    #[error("the token in {} is shorter than {TOKEN_BYTES_MIN} characters; make one with 'openssl rand -hex 32'", .0.display())]
    Short(PathBuf),
}

impl Token {
    /// Reads a file that holds a token and nothing else but white space around it.
    pub(crate) fn load(path: &Path) -> Result<Token, TokenError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| TokenError::Unreadable { path: path.to_owned(), source })?;
        let token = text.trim().as_bytes();
        if token.len() < TOKEN_BYTES_MIN {
            return Err(TokenError::Short(path.to_owned()));
        }
        Ok(Token(token.into()))
    }

    /// Compares in a time that depends on the length of `shown` only.
    fn matches(&self, shown: &[u8]) -> bool {
        let mut difference = self.0.len() ^ shown.len();
        for (index, byte) in shown.iter().enumerate() {
            difference |= usize::from(byte ^ black_box(self.0[index % self.0.len()]));
        }
        black_box(difference) == 0
    }
}

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token")
    }
}

/// Lets only those pass who show the token.
pub(super) async fn check(State(token): State<Token>, request: Request, next: Next) -> Response {
    let header = request.headers().get(AUTHORIZATION).map(|value| value.as_bytes()).unwrap_or_default();
    let shown = match header.split_at_checked(7) {
        Some((scheme, rest)) if scheme.eq_ignore_ascii_case(b"bearer ") => rest,
        _ => b"",
    };
    if token.matches(shown) {
        next.run(request).await
    } else {
        Answer::no(StatusCode::UNAUTHORIZED, "this socket wants a token").into_response()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_whole_token_matches() {
        let token = Token(b"0123456789abcdef".as_slice().into());
        assert!(token.matches(b"0123456789abcdef"));
        for wrong in ["", "0", "0123456789abcde", "0123456789abcdeg", "0123456789abcdef0123456789abcdef"] {
            assert!(!token.matches(wrong.as_bytes()), "{wrong}");
        }
    }

    #[test]
    fn short_tokens_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("token");
        std::fs::write(&file, " 0123456789abcdef\n").unwrap();
        assert!(Token::load(&file).unwrap().matches(b"0123456789abcdef"));
        std::fs::write(&file, "      short       \n").unwrap();
        assert!(matches!(Token::load(&file), Err(TokenError::Short(_))));
        assert!(matches!(Token::load(&dir.path().join("none")), Err(TokenError::Unreadable { .. })));
    }
}
