//! NBD URIs, with which users name an export.
//!
//! Forms: `nbd://host[:port]/export` and `nbd+unix:///export?socket=/path`, percent-encoded, as in
//! the NBD project's `doc/uri.md`. The export is the path without its first slash. A URI without a
//! path means the server's default export.
//!
//! `nbds://` and `nbds+unix://` request TLS. Their parameters are those of libnbd:
//! `tls-certificates=DIRECTORY`, or a user before the host and `tls-psk-file=FILE`, and
//! `tls-hostname=NAME`.
//!
//! Parsing refuses vsock schemes, passwords, users without TLS, fragments, and unknown or repeated
//! parameters. Names and paths that are too long, are not UTF-8 or contain NUL are refused too. The
//! error says which form to use instead. Lengths are in bytes.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use crate::export::EXPORT_NAME_BYTES_MAX;

/// Default port of NBD.
pub const DEFAULT_PORT: u16 = 10809;
/// Maximum length of a Unix socket's path in bytes: `sockaddr_un` on Linux without the final NUL.
pub const SOCKET_PATH_BYTES_MAX: usize = 107;
const URI_BYTES_MAX: usize = 16 << 10;

/// URI of an NBD export: address of the server, and name of the export.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct NbdUri {
    /// Address of the server.
    pub address: Address,
    /// Name of the export; empty for the default export.
    pub export: String,
    /// TLS settings of the connection; `None` for a connection without TLS.
    pub tls: Option<UriTls>,
}

/// TLS settings of an NBD URI.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct UriTls {
    /// How server and client prove who they are.
    pub credentials: Credentials,
    /// Name that the server's certificate must have; `None` for the host name of the URI.
    pub hostname: Option<String>,
}

/// How the server and the client of a TLS connection prove who they are.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Credentials {
    /// Certificates in this directory. The directory has `ca-cert.pem`, and optionally
    /// `client-cert.pem` and `client-key.pem`.
    Certificates(PathBuf),
    /// A secret key that server and client share.
    PreSharedKey {
        /// File with a line `name:hexadecimal` for each key.
        file: PathBuf,
        /// Name of the key.
        user: String,
    },
}

impl NbdUri {
    /// Creates the URI of an export that is reached without TLS. An empty name is the default
    /// export.
    pub fn new(address: Address, export: impl Into<String>) -> NbdUri {
        NbdUri { address, export: export.into(), tls: None }
    }

    /// Returns the URI of the same export without TLS settings.
    #[must_use]
    pub fn without_tls(&self) -> NbdUri {
        NbdUri { tls: None, ..self.clone() }
    }
}

/// Address of a server.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Address {
    /// A server that is reached over TCP.
    Tcp {
        /// Host name or IP address. An IPv6 address has no brackets.
        host: String,
        /// TCP port.
        port: u16,
    },
    /// A server on a Unix socket.
    Unix {
        /// Path of the socket. A relative path starts at the process's working directory.
        path: PathBuf,
    },
}

/// Why a URI is refused, and the form to use instead.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UriError {
    /// The text has no scheme of an NBD URI.
    #[error("{0:?} is not an NBD URI; write nbd://host/export or nbd+unix:///export?socket=/path")]
    Scheme(String),
    /// A TLS URI does not name its certificates or key.
    #[error(
        "{0}:// needs certificates or a key; append ?tls-certificates=DIRECTORY, or write user@host and append ?tls-psk-file=FILE"
    )]
    NoCredentials(String),
    /// A TLS URI names certificates and a pre-shared key.
    #[error("use either tls-certificates, or a user and tls-psk-file")]
    TwoCredentials,
    /// The URI's scheme requests a VM socket.
    #[error("{0}:// requests a vsock connection, which hob does not support; use nbd:// or nbd+unix://")]
    Vsock(String),
    /// The URI has no host.
    #[error(
        "the URI names no host; write nbd://host/export, or nbd+unix:///export?socket=/path for a socket"
    )]
    NoHost,
    /// A Unix socket URI contains a host.
    #[error("nbd+unix:// takes no host; write three slashes: nbd+unix:///export?socket=/path")]
    UnixHost,
    /// A Unix socket URI has no parameter `socket`.
    #[error("nbd+unix:// needs the socket's path; append ?socket=/path")]
    NoSocket,
    /// The socket's path is too long or empty.
    #[error("a socket's path must have 1 to 107 bytes; use a shorter one, perhaps through a symbolic link")]
    SocketLength,
    /// The host is not a valid name or address.
    #[error("{0:?} is not a host; percent-encode special characters, and put an IPv6 address into brackets")]
    Host(String),
    /// The port is not a number from 1 to 65535.
    #[error("{0:?} is not a port; write a number from 1 to 65535, or nothing for 10809")]
    Port(String),
    /// A parameter is unknown or repeated.
    #[error(
        "the parameter {0:?} is unknown or repeated; nbd+unix:// takes `socket`, and nbds:// takes `tls-certificates`, `tls-psk-file` and `tls-hostname`"
    )]
    Parameter(String),
    /// The URI has a user, but does not request TLS.
    #[error("a user is for pre-shared keys of nbds://; NBD itself has no users")]
    User,
    /// The URI has a fragment (`#…`).
    #[error("an NBD URI cannot have a fragment; write %23 for a # in a name")]
    Fragment,
    /// A `%` is not followed by two hexadecimal digits.
    #[error("a % must be followed by two hexadecimal digits; write %25 for the % itself")]
    Percent,
    /// The decoded text is not UTF-8, or contains NUL.
    #[error("the decoded URI is not UTF-8, or contains NUL")]
    NotText,
    /// The URI or its export name is too long.
    #[error("the URI or its export name is too long; an export name may have 4096 bytes at most")]
    TooLong,
}

impl FromStr for NbdUri {
    type Err = UriError;

    fn from_str(text: &str) -> Result<Self, UriError> {
        if text.len() > URI_BYTES_MAX {
            return Err(UriError::TooLong);
        }
        let (scheme, rest) = text.split_once("://").ok_or_else(|| UriError::Scheme(text.to_owned()))?;
        if rest.contains('#') {
            return Err(UriError::Fragment);
        }
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let export = decode(path)?;
        if export.len() > EXPORT_NAME_BYTES_MAX {
            return Err(UriError::TooLong);
        }
        let (user, authority) = match authority.rsplit_once('@') {
            Some((user, host)) => (Some(user), host),
            None => (None, authority),
        };
        let scheme = scheme.to_ascii_lowercase();
        let (is_tls, plain) = match scheme.as_str() {
            "nbd" | "nbd+unix" => (false, scheme.as_str()),
            "nbds" => (true, "nbd"),
            "nbds+unix" => (true, "nbd+unix"),
            "nbd+vsock" | "nbds+vsock" => return Err(UriError::Vsock(scheme)),
            _ => return Err(UriError::Scheme(text.to_owned())),
        };
        let mut parameters = Parameters::parse(query)?;
        let tls = match is_tls {
            true => Some(tls(&scheme, user, &mut parameters)?),
            false if user.is_some() => return Err(UriError::User),
            false => None,
        };
        let address = match plain {
            "nbd" => tcp(authority)?,
            _ => unix(authority, &mut parameters)?,
        };
        parameters.finish()?;
        Ok(Self { address, export, tls })
    }
}

/// The parameters of a URI that the parser has not used yet.
struct Parameters<'a>(Vec<(&'a str, &'a str)>);

impl<'a> Parameters<'a> {
    fn parse(query: &'a str) -> Result<Self, UriError> {
        let unknown = |text: &str| UriError::Parameter(text.to_owned());
        let pairs = query.split('&').filter(|text| !text.is_empty());
        pairs
            .map(|text| text.split_once('=').ok_or_else(|| unknown(text)))
            .collect::<Result<_, _>>()
            .map(Self)
    }

    /// Returns the decoded value of a parameter, if the URI has the parameter.
    fn take(&mut self, name: &str) -> Result<Option<String>, UriError> {
        let Some(index) = self.0.iter().position(|(key, _)| *key == name) else { return Ok(None) };
        decode(self.0.remove(index).1).map(Some)
    }

    fn finish(self) -> Result<(), UriError> {
        match self.0.first() {
            None => Ok(()),
            Some((name, value)) => Err(UriError::Parameter(format!("{name}={value}"))),
        }
    }
}

fn tls(scheme: &str, user: Option<&str>, parameters: &mut Parameters<'_>) -> Result<UriTls, UriError> {
    let certificates = parameters.take("tls-certificates")?;
    let key = parameters.take("tls-psk-file")?;
    let credentials = match (certificates, key, user) {
        (Some(directory), None, None) => Credentials::Certificates(directory.into()),
        (None, Some(file), Some(user)) => {
            Credentials::PreSharedKey { file: file.into(), user: decode(user)? }
        }
        (None, _, _) => return Err(UriError::NoCredentials(scheme.to_owned())),
        _ => return Err(UriError::TwoCredentials),
    };
    Ok(UriTls { credentials, hostname: parameters.take("tls-hostname")? })
}

fn tcp(authority: &str) -> Result<Address, UriError> {
    let bad_host = || UriError::Host(authority.to_owned());
    let (host, port) = if let Some(inside) = authority.strip_prefix('[') {
        let (host, after) = inside.split_once(']').ok_or_else(bad_host)?;
        let host = decode(host)?;
        // The zone after % is not part of the IPv6 address.
        let (address, zone) = host.split_once('%').unwrap_or((&host, "zone"));
        if address.parse::<std::net::Ipv6Addr>().is_err() || !is_plain(zone) {
            return Err(bad_host());
        }
        let port = match after {
            "" => "",
            _ => after.strip_prefix(':').ok_or_else(bad_host)?,
        };
        (host, port)
    } else {
        let (host, port) = authority.split_once(':').unwrap_or((authority, ""));
        if port.contains(':') {
            return Err(bad_host());
        }
        if host.is_empty() {
            return Err(UriError::NoHost);
        }
        let host = decode(host)?;
        if !is_plain(&host) {
            return Err(bad_host());
        }
        (host, port)
    };
    let port = match port {
        "" => DEFAULT_PORT,
        digits if digits.bytes().all(|b| b.is_ascii_digit()) => {
            digits.parse().ok().filter(|&port| port != 0).ok_or_else(|| UriError::Port(digits.to_owned()))?
        }
        other => return Err(UriError::Port(other.to_owned())),
    };
    Ok(Address::Tcp { host, port })
}

/// Returns true if the host can be passed to a resolver: no users (`@`), brackets, colons, spaces
/// or control characters.
fn is_plain(host: &str) -> bool {
    let odd = |c: char| c.is_ascii() && !(c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_'));
    !host.is_empty() && !host.contains(odd) && !host.contains(|c: char| c.is_control() || c.is_whitespace())
}

fn unix(authority: &str, parameters: &mut Parameters<'_>) -> Result<Address, UriError> {
    if !authority.is_empty() {
        return Err(UriError::UnixHost);
    }
    let path = parameters.take("socket")?.ok_or(UriError::NoSocket)?;
    if path.is_empty() || path.len() > SOCKET_PATH_BYTES_MAX {
        return Err(UriError::SocketLength);
    }
    Ok(Address::Unix { path: path.into() })
}

/// Decodes percent-encoding. A `+` stays a plus sign, as in paths.
fn decode(text: &str) -> Result<String, UriError> {
    let mut out = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        if byte != b'%' {
            out.push(byte);
            continue;
        }
        let mut digit = || char::from(bytes.next()?).to_digit(16);
        let (Some(high), Some(low)) = (digit(), digit()) else { return Err(UriError::Percent) };
        out.push((high * 16 + low) as u8);
    }
    match String::from_utf8(out) {
        Ok(decoded) if !decoded.contains('\0') => Ok(decoded),
        _ => Err(UriError::NotText),
    }
}

/// Percent-encodes all characters except unreserved ones and those in `also`.
struct Encoded<'a> {
    text: &'a str,
    also: &'static [u8],
}

impl fmt::Display for Encoded<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for &byte in self.text.as_bytes() {
            if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) || self.also.contains(&byte) {
                write!(f, "{}", char::from(byte))?;
            } else {
                write!(f, "%{byte:02X}")?;
            }
        }
        Ok(())
    }
}

/// Characters of names and paths that need no percent-encoding in a URI.
const PATH: &[u8] = b"/:@+=,";

/// Writes a URI that parses to the same value, if a URI can express the value.
impl fmt::Display for NbdUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let export = Encoded { text: &self.export, also: PATH };
        f.write_str(if self.tls.is_some() { "nbds" } else { "nbd" })?;
        let user = match &self.tls {
            Some(UriTls { credentials: Credentials::PreSharedKey { user, .. }, .. }) => Some(user),
            _ => None,
        };
        let write_user = |f: &mut fmt::Formatter<'_>| match user {
            Some(user) => write!(f, "{}@", Encoded { text: user, also: b"" }),
            None => Ok(()),
        };
        let mut separator = '?';
        match &self.address {
            Address::Tcp { host, port } => {
                f.write_str("://")?;
                write_user(f)?;
                if host.contains(':') {
                    write!(f, "[{}]", Encoded { text: host, also: b":" })?;
                } else {
                    write!(f, "{}", Encoded { text: host, also: b"" })?;
                }
                if *port != DEFAULT_PORT {
                    write!(f, ":{port}")?;
                }
                if !self.export.is_empty() {
                    write!(f, "/{export}")?;
                }
            }
            Address::Unix { path } => {
                f.write_str("+unix://")?;
                write_user(f)?;
                let path = path.to_string_lossy();
                write!(f, "/{export}?socket={}", Encoded { text: &path, also: PATH })?;
                separator = '&';
            }
        }
        let Some(tls) = &self.tls else { return Ok(()) };
        let (name, path) = match &tls.credentials {
            Credentials::Certificates(directory) => ("tls-certificates", directory),
            Credentials::PreSharedKey { file, .. } => ("tls-psk-file", file),
        };
        write!(f, "{separator}{name}={}", Encoded { text: &path.to_string_lossy(), also: PATH })?;
        match &tls.hostname {
            Some(hostname) => write!(f, "&tls-hostname={}", Encoded { text: hostname, also: b"" }),
            None => Ok(()),
        }
    }
}
