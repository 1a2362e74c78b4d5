//! Addresses of sockets, written `unix:/path` or `tcp:host:port`.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use crate::text::text_type;

/// Address on which a daemon listens.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Endpoint {
    /// A Unix socket.
    Unix(PathBuf),
    /// A TCP port.
    Tcp {
        /// Host name or IP address, without brackets.
        host: String,
        /// Port.
        port: u16,
    },
}

text_type!(Endpoint, "unix:/path or tcp:host:port");

/// A text is not a valid [`Endpoint`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is not an address; write unix:/path/to.sock or tcp:host:port")]
pub struct EndpointParseError(String);

/// Port of an `https://` URL that names no port.
const HTTPS_PORT: u16 = 443;

impl Endpoint {
    /// Parses the address of a control socket, which may be a URL: `https://host:port` means
    /// `tcp:host:port`.
    ///
    /// # Errors
    /// Returns an error if the text is neither an address nor a URL.
    pub fn parse_control(text: &str) -> Result<Endpoint, EndpointParseError> {
        let Some(authority) = text.strip_prefix("https://") else { return text.parse() };
        let wrong = || EndpointParseError(text.to_owned());
        let authority = authority.strip_suffix('/').unwrap_or(authority);
        // The port follows the brackets of an IPv6 address, or the only colon.
        let has_port = authority.rsplit(']').next().is_some_and(|rest| rest.contains(':'));
        let port = if has_port { String::new() } else { format!(":{HTTPS_PORT}") };
        format!("tcp:{authority}{port}").parse().map_err(|_| wrong())
    }
}

impl FromStr for Endpoint {
    type Err = EndpointParseError;

    fn from_str(text: &str) -> Result<Endpoint, EndpointParseError> {
        let wrong = || EndpointParseError(text.to_owned());
        if let Some(path) = text.strip_prefix("unix:") {
            if path.is_empty() || path.contains('\0') {
                return Err(wrong());
            }
            return Ok(Endpoint::Unix(PathBuf::from(path)));
        }
        let (host, port) = text.strip_prefix("tcp:").and_then(host_and_port).ok_or_else(wrong)?;
        Ok(Endpoint::Tcp { host, port })
    }
}

/// Parses `host:port`. An IPv6 address is in brackets, which the result does not have.
pub(crate) fn host_and_port(text: &str) -> Option<(String, u16)> {
    let (host, port) = text.rsplit_once(':')?;
    let host = match host.strip_prefix('[') {
        Some(inner) => inner.strip_suffix(']')?,
        None if host.contains(':') => return None,
        None => host,
    };
    let is_host = !host.is_empty() && !host.contains(['/', '[', ']', ' ']);
    Some((is_host.then(|| host.to_owned())?, port.parse().ok()?))
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Endpoint::Unix(path) => write!(f, "unix:{}", path.display()),
            Endpoint::Tcp { host, port } if host.contains(':') => write!(f, "tcp:[{host}]:{port}"),
            Endpoint::Tcp { host, port } => write!(f, "tcp:{host}:{port}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_printed() {
        for text in
            ["unix:/run/hob/a.sock", "unix:rel.sock", "tcp:127.0.0.1:10809", "tcp:host:1", "tcp:[::1]:0"]
        {
            assert_eq!(text.parse::<Endpoint>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn control_sockets_have_urls() {
        for (text, is) in [
            ("https://h:9443", "tcp:h:9443"),
            ("https://h", "tcp:h:443"),
            ("https://[::1]:1/", "tcp:[::1]:1"),
            ("https://[::1]", "tcp:[::1]:443"),
            ("unix:/s", "unix:/s"),
            ("tcp:h:1", "tcp:h:1"),
        ] {
            assert_eq!(Endpoint::parse_control(text).unwrap().to_string(), is);
        }
        for text in ["https://", "https://h/v1", "https://h:x", "https://a@b/c", "http://h:1", "h:1"] {
            assert!(Endpoint::parse_control(text).is_err(), "{text}");
        }
    }

    #[test]
    fn anything_else_is_refused() {
        for text in [
            "",
            "unix:",
            "/run/x.sock",
            "tcp:",
            "tcp::1",
            "tcp:h",
            "tcp:h:70000",
            "tcp:::1:1",
            "tcp:[::1:1",
            "http://x",
        ] {
            assert!(text.parse::<Endpoint>().is_err(), "{text}");
        }
    }
}
