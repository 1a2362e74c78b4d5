//! `[control]` in hob.toml: addresses of the control API, and access rules.

use std::path::PathBuf;

use hob_control::Endpoint;
use serde::Deserialize;

use super::CONTROL_SOCKET;
use super::check::Findings;
use crate::tls::{CertificateMatch, TlsFiles};

/// Listeners of the control API, and access over TCP.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ControlConfig {
    /// Addresses of the control API: `unix:PATH` or `tcp:HOST:PORT`. Default:
    /// `unix:/run/hob/control.sock`.
    pub listen: Vec<Endpoint>,
    /// Group, by name or number, that may open the Unix sockets too.
    pub socket_group: Option<String>,
    /// TLS certificates, required for TCP.
    pub tls: Option<TlsFiles>,
    /// File with a token of the role `admin`.
    pub token_file: Option<PathBuf>,
    /// Additional tokens with their roles.
    #[serde(rename = "token")]
    pub tokens: Vec<TokenEntry>,
    /// Clients with a certificate, and their roles.
    #[serde(rename = "client")]
    pub clients: Vec<ClientEntry>,
}

/// The rights of a client of the control API.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// Read requests only.
    ReadOnly,
    /// All requests.
    Admin,
}

impl Role {
    /// Returns the name of the role in hob.toml.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Role::ReadOnly => "read-only",
            Role::Admin => "admin",
        }
    }
}

/// `[[control.token]]`: a token with its role.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TokenEntry {
    /// File with the token.
    pub(crate) file: PathBuf,
    /// Role of the token: `read-only` or `admin`.
    pub(crate) role: Role,
}

/// `[[control.client]]`: clients with a certificate, and their role.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClientEntry {
    /// The client certificates that have the role, such as `cn:NAME`.
    pub(crate) certificate: CertificateMatch,
    /// Role of these clients: `read-only` or `admin`.
    pub(crate) role: Role,
}

impl Default for ControlConfig {
    fn default() -> ControlConfig {
        ControlConfig {
            listen: vec![Endpoint::Unix(CONTROL_SOCKET.into())],
            socket_group: None,
            tls: None,
            token_file: None,
            tokens: Vec::new(),
            clients: Vec::new(),
        }
    }
}

impl ControlConfig {
    /// Checks the settings without reading files.
    pub(super) fn check(&self, found: &mut Findings<'_>) {
        let tcp = self.listen.iter().find(|endpoint| matches!(endpoint, Endpoint::Tcp { .. }));
        if let (Some(endpoint), None) = (tcp, &self.tls) {
            found.add("control.listen", format!("control.listen has {endpoint}, but TCP needs control.tls"));
        }
        let has_tokens = self.token_file.is_some() || !self.tokens.is_empty();
        if let (Some(endpoint), false, true) = (tcp, has_tokens, self.clients.is_empty()) {
            found.add(
                "control.listen",
                format!(
                    "control.listen has {endpoint}, but no client could use it without a \
                    [[control.token]] or [[control.client]]"
                ),
            );
        }
        let has_authority = self.tls.as_ref().is_some_and(|tls| tls.client_ca.is_some());
        if !self.clients.is_empty() && !has_authority {
            found.add(
                "control.client",
                "[[control.client]] needs control.tls with client_ca, the CA of the clients' certificates",
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Config;

    #[test]
    fn tcp_needs_tls_a_client_and_an_authority() {
        let tcp = "[control]\nlisten = [\"tcp:h:1\"]\n";
        let tls = "tls = { cert = \"/c\", key = \"/k\" }\n";
        let tls_ca = "tls = { cert = \"/c\", key = \"/k\", client_ca = \"/a\" }\n";
        let client = "[[control.client]]\ncertificate = \"cn:a\"\nrole = \"admin\"\n";
        let token = "[[control.token]]\nfile = \"/t\"\nrole = \"read-only\"\n";
        for (text, part) in [
            (format!("{tcp}token_file = \"/t\"\n"), "control.tls"),
            (format!("{tcp}{tls}"), "no client could use it"),
            (format!("{tcp}{tls}{client}"), "client_ca"),
            (format!("[control]\n{client}"), "client_ca"),
            (format!("{tcp}{tls}[[control.token]]\nfile = \"/t\"\nrole = \"god\""), "god"),
            (format!("{tcp}{tls}[[control.token]]\nfile = \"/t\""), "role"),
            (format!("{tcp}{tls_ca}{}", client.replace("cn:a", "dn:a")), "'dn:a'"),
        ] {
            let error = Config::parse(&text).unwrap_err().to_string();
            assert!(error.contains(part) && !error.contains('\n'), "{text}: {error}");
        }
        Config::parse(&format!("{tcp}{tls}{token}")).unwrap();
        Config::parse(&format!("{tcp}{tls_ca}{client}")).unwrap();
        Config::parse(&format!("{tcp}{tls}token_file = \"/t\"\n")).unwrap();
    }
}
