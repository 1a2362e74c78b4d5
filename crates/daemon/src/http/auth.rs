//! Authentication and authorization of clients over TCP.
//!
//! A client sends a token with each request, or a certificate with the connection. If a client
//! sends both, only the token is used. Each token and certificate has a role: `read-only` permits
//! GET and HEAD, and `admin` permits everything. A client on the Unix socket is an admin.

use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::header::{AUTHORIZATION, WWW_AUTHENTICATE};
use axum::http::{HeaderName, HeaderValue, Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use hob_control::Problem;

use super::extract::Answer;
use super::page;
use crate::config::{ControlConfig, Role};
use crate::half_open::Establish;
use crate::tls::{self, CertificateMatch, PeerCertificate, TlsError};

/// Minimum length of a token in bytes. A token of 128 random bits in hexadecimal has 32 bytes.
const TOKEN_BYTES_MIN: usize = 16;

/// The response header that tells a client its role.
const ROLE: HeaderName = HeaderName::from_static("x-hob-role");

/// Returns true if a role permits this method.
fn may(role: Role, method: &Method) -> bool {
    role == Role::Admin || matches!(*method, Method::GET | Method::HEAD)
}

/// A secret token, which is never printed.
#[derive(Clone)]
pub(crate) struct Token(Arc<[u8]>);

/// Why a token cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TokenError {
    /// The file is unreadable or gives permissions to too many users.
    #[error("the token file: {0}")]
    File(#[from] TlsError),
    /// The token is shorter than `TOKEN_BYTES_MIN`.
    #[error("the token in {} is shorter than {TOKEN_BYTES_MIN} characters; make one with 'openssl rand -hex 32'", .0.display())]
    Short(PathBuf),
}

impl Token {
    /// Reads a file with a token, optionally surrounded by white space. Refuses a file that every
    /// user can read.
    pub(crate) fn load(path: &Path) -> Result<Token, TokenError> {
        let bytes = tls::secret(path)?;
        let token = bytes.trim_ascii();
        if token.len() < TOKEN_BYTES_MIN {
            return Err(TokenError::Short(path.to_owned()));
        }
        Ok(Token(token.into()))
    }

    /// Returns true if `shown` is the token. The comparison takes a time that depends only on the
    /// length of `shown`.
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

/// Tokens and certificates with their roles.
#[derive(Debug, Default)]
pub(crate) struct Access {
    /// Tokens with a name for logs and a role.
    tokens: Vec<(String, Token, Role)>,
    certificates: Vec<(CertificateMatch, Role)>,
}

/// The client of a request, and its role.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Caller {
    name: String,
    role: Role,
}

impl Access {
    /// Loads the access rules of the configuration. `token_file` contains an admin's token.
    pub(crate) fn of_config(config: &ControlConfig) -> Result<Access, TokenError> {
        let of_admin = config.token_file.iter().map(|file| (file, Role::Admin));
        let others = config.tokens.iter().map(|entry| (&entry.file, entry.role));
        let tokens = of_admin
            .chain(others)
            .map(|(file, role)| Ok((format!("token of {}", file.display()), Token::load(file)?, role)))
            .collect::<Result<_, TokenError>>()?;
        let certificates =
            config.clients.iter().map(|entry| (entry.certificate.clone(), entry.role)).collect();
        Ok(Access { tokens, certificates })
    }

    /// Creates rules with one token, its name for logs and its role.
    pub(super) fn of_token(name: &str, token: &str, role: Role) -> Access {
        let tokens = vec![(name.to_owned(), Token(token.as_bytes().into()), role)];
        Access { tokens, certificates: Vec::new() }
    }

    /// Returns true if the rules permit no client.
    pub(crate) fn is_empty(&self) -> bool {
        self.tokens.is_empty() && self.certificates.is_empty()
    }

    fn by_token(&self, shown: &[u8]) -> Option<Caller> {
        // All tokens are compared, so that the time does not reveal which one was close.
        let found = self.tokens.iter().filter(|(_, token, _)| token.matches(shown)).collect::<Vec<_>>();
        let (name, _, role) = found.into_iter().max_by_key(|(_, _, role)| *role)?;
        Some(Caller { name: name.clone(), role: *role })
    }

    fn by_certificate(&self, shown: &PeerCertificate) -> Option<Caller> {
        let roles = self.certificates.iter().filter(|(named, _)| named.matches(shown)).map(|(_, role)| *role);
        Some(Caller { name: shown.to_string(), role: roles.max()? })
    }

    fn caller(&self, request: &Request) -> Result<Caller, &'static str> {
        if let Some(header) = request.headers().get(AUTHORIZATION) {
            let shown = match header.as_bytes().split_at_checked(7) {
                Some((scheme, rest)) if scheme.eq_ignore_ascii_case(b"bearer ") => rest,
                _ => return Err("this socket takes bearer tokens only"),
            };
            return self.by_token(shown).ok_or("the daemon does not know this token");
        }
        match request.extensions().get::<PeerCertificate>() {
            Some(shown) => {
                self.by_certificate(shown).ok_or("the client certificate has no role in this daemon")
            }
            None => Err("this socket requires a token or a client certificate"),
        }
    }
}

/// Accepts every request.
pub(super) async fn accept(request: Request, next: Next) -> Response {
    establish(&request);
    next.run(request).await
}

/// Marks the connection of an authorized request as established, so that it is not closed as
/// half-open.
fn establish(request: &Request) {
    if let Some(establish) = request.extensions().get::<Establish>() {
        establish.now();
    }
}

/// Refuses requests of unknown clients, and requests that their client's role does not permit. Log
/// lines of the request name the client. A header of each response names the client's role, so that
/// the dashboard can hide forbidden actions. The files of the dashboard are public.
pub(super) async fn check(State(access): State<Arc<Access>>, request: Request, next: Next) -> Response {
    if page::is_public(request.method(), request.uri().path()) {
        return next.run(request).await;
    }
    let caller = match access.caller(&request) {
        Ok(caller) => caller,
        Err(why) => {
            tracing::info!("request refused: {why}");
            let mut response = Answer::no(StatusCode::UNAUTHORIZED, why).into_response();
            response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            return response;
        }
    };
    establish(&request);
    tracing::Span::current().record("caller", caller.name.as_str());
    if !may(caller.role, request.method()) {
        tracing::info!("request refused: the client's role permits reading only");
        let problem = Problem::new(format!("{} has the role read-only", caller.name))
            .with_hint("use the token or certificate of an admin");
        return Answer::<()>::No(StatusCode::FORBIDDEN, problem).into_response();
    }
    let mut response = next.run(request).await;
    // The daemon that forwarded the request may itself be read-only.
    let is_less = caller.role == Role::ReadOnly || !response.headers().contains_key(ROLE);
    if is_less {
        response.headers_mut().insert(ROLE, HeaderValue::from_static(caller.role.name()));
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tls::tests::write_secret;

    #[test]
    fn only_the_whole_token_matches() {
        let token = Token(b"0123456789abcdef".as_slice().into());
        assert!(token.matches(b"0123456789abcdef"));
        for wrong in ["", "0", "0123456789abcde", "0123456789abcdeg", "0123456789abcdef0123456789abcdef"] {
            assert!(!token.matches(wrong.as_bytes()), "{wrong}");
        }
    }

    #[test]
    fn short_and_open_tokens_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("token");
        write_secret(&file, " 0123456789abcdef\n");
        assert!(Token::load(&file).unwrap().matches(b"0123456789abcdef"));
        write_secret(&file, "      short       \n");
        assert!(matches!(Token::load(&file), Err(TokenError::Short(_))));
        let none = Token::load(&dir.path().join("none")).unwrap_err().to_string();
        assert!(none.contains("none: No such file"), "{none}");
        let open = std::os::unix::fs::PermissionsExt::from_mode(0o644);
        std::fs::set_permissions(&file, open).unwrap();
        assert!(Token::load(&file).unwrap_err().to_string().contains("every user can read"));
    }

    #[test]
    fn the_higher_of_two_roles_counts() {
        let token = || Token(b"0123456789abcdef".as_slice().into());
        let tokens = vec![("a".to_owned(), token(), Role::Admin), ("b".to_owned(), token(), Role::ReadOnly)];
        let access = Access { tokens, certificates: Vec::new() };
        let caller = access.by_token(b"0123456789abcdef").unwrap();
        assert_eq!((caller.name.as_str(), caller.role), ("a", Role::Admin));
        assert_eq!(access.by_token(b"0123456789abcdeg"), None);
    }
}
