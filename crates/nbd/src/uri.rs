//! NBD URIs, with which users name an export.
//!
//! Forms: `nbd://host[:port]/export` and `nbd+unix:///export?socket=/path`, percent-encoded, as in
//! the NBD project's `doc/uri.md`. The export is the path without its first slash. A URI without a
//! path means the server's default export. Errors name the form to use instead. Refused are TLS and
//! vsock schemes, users and passwords, fragments, and unknown or repeated parameters. Names and
//! paths that are too long, are not UTF-8 or contain NUL are refused too. Lengths are in bytes.

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
}

/// Address of a server.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Address {
    /// Over TCP.
    Tcp {
        /// Host name or IP address. An IPv6 address has no brackets.
        host: String,
        /// Port.
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
    /// The URI's scheme requests TLS.
    #[error(
        "{0}:// requests TLS, which hob does not support for backings; use nbd:// over a trusted network or a tunnel"
    )]
    Tls(String),
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
        "the parameter {0:?} is unknown or repeated; nbd+unix:// takes `socket` once, and nbd:// takes none"
    )]
    Parameter(String),
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
        let address = match scheme.to_ascii_lowercase().as_str() {
            "nbd" => tcp(authority, query)?,
            "nbd+unix" => unix(authority, query)?,
            "nbds" | "nbds+unix" => return Err(UriError::Tls(scheme.to_owned())),
            "nbd+vsock" | "nbds+vsock" => return Err(UriError::Vsock(scheme.to_owned())),
            _ => return Err(UriError::Scheme(text.to_owned())),
        };
        Ok(Self { address, export })
    }
}

fn tcp(authority: &str, query: &str) -> Result<Address, UriError> {
    if let Some(parameter) = query.split('&').find(|parameter| !parameter.is_empty()) {
        return Err(UriError::Parameter(parameter.to_owned()));
    }
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

fn unix(authority: &str, query: &str) -> Result<Address, UriError> {
    if !authority.is_empty() {
        return Err(UriError::UnixHost);
    }
    let mut path = None;
    for parameter in query.split('&').filter(|parameter| !parameter.is_empty()) {
        match parameter.split_once('=') {
            Some(("socket", value)) if path.is_none() => path = Some(decode(value)?),
            _ => return Err(UriError::Parameter(parameter.to_owned())),
        }
    }
    let path = path.ok_or(UriError::NoSocket)?;
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

/// Writes a URI that parses to the same value, if a URI can express the value.
impl fmt::Display for NbdUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let export = Encoded { text: &self.export, also: b"/:@+=," };
        match &self.address {
            Address::Tcp { host, port } => {
                if host.contains(':') {
                    write!(f, "nbd://[{}]", Encoded { text: host, also: b":" })?;
                } else {
                    write!(f, "nbd://{}", Encoded { text: host, also: b"" })?;
                }
                if *port != DEFAULT_PORT {
                    write!(f, ":{port}")?;
                }
                if self.export.is_empty() { Ok(()) } else { write!(f, "/{export}") }
            }
            Address::Unix { path } => {
                let path = path.to_string_lossy();
                write!(f, "nbd+unix:///{export}?socket={}", Encoded { text: &path, also: b"/:@+=," })
            }
        }
    }
}
