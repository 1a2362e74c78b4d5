//! Addresses of sockets, written `unix:/path` or `tcp:host:port`.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Where a daemon listens.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Endpoint {
    /// A Unix socket.
    Unix(PathBuf),
    /// TCP.
    Tcp {
        /// A name or an address, without brackets.
        host: String,
        /// Port.
        port: u16,
    },
}

/// Why a text is not an [`Endpoint`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is not an address; write unix:/path/to.sock or tcp:host:port")]
pub struct EndpointParseError(String);

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
        let (host, port) =
            text.strip_prefix("tcp:").and_then(|rest| rest.rsplit_once(':')).ok_or_else(wrong)?;
        let host = match host.strip_prefix('[') {
            Some(inner) => inner.strip_suffix(']').ok_or_else(wrong)?,
            None if host.contains(':') => return Err(wrong()),
            None => host,
        };
        if host.is_empty() || host.contains(['/', '[', ']', ' ']) {
            return Err(wrong());
        }
        Ok(Endpoint::Tcp { host: host.to_owned(), port: port.parse().map_err(|_| wrong())? })
    }
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

impl TryFrom<String> for Endpoint {
    type Error = EndpointParseError;
    fn try_from(text: String) -> Result<Endpoint, EndpointParseError> {
        text.parse()
    }
}

impl From<Endpoint> for String {
    fn from(endpoint: Endpoint) -> String {
        endpoint.to_string()
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
