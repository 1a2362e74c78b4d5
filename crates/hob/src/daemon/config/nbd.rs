//! `[[nbd]]` in hob.toml: addresses for NBD clients that are more than an address.

use std::path::PathBuf;

use hob_control::Endpoint;
use serde::Deserialize;

use crate::daemon::allow::{AllowEntry, ClientMatch};
use crate::daemon::tls::TlsFiles;

/// `[[nbd]]`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NbdEntry {
    /// Where clients connect.
    pub(crate) listen: Endpoint,
    /// If TLS is spoken there.
    pub(crate) tls: Option<NbdTlsFiles>,
}

/// `tls = { cert, key, client_ca, required }`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NbdTlsFiles {
    cert: PathBuf,
    key: PathBuf,
    /// Clients must show a certificate of this authority.
    client_ca: Option<PathBuf>,
    /// Clients that do not start TLS are told nothing.
    #[serde(default = "yes")]
    pub(crate) required: bool,
}

fn yes() -> bool {
    true
}

impl NbdTlsFiles {
    /// TLS that is required.
    pub(crate) fn required(files: TlsFiles) -> NbdTlsFiles {
        let TlsFiles { cert, key, client_ca } = files;
        NbdTlsFiles { cert, key, client_ca, required: true }
    }

    /// The files.
    pub(crate) fn files(&self) -> TlsFiles {
        TlsFiles { cert: self.cert.clone(), key: self.key.clone(), client_ca: self.client_ca.clone() }
    }

    /// Do clients show certificates?
    pub(crate) fn asks_for_certificates(&self) -> bool {
        self.client_ca.is_some()
    }
}

/// What can be said without looking at files.
pub(crate) fn check_nbd(nbd: &[NbdEntry], allow: &[AllowEntry]) -> Result<(), String> {
    let asked = nbd.iter().filter_map(|entry| entry.tls.as_ref()).any(NbdTlsFiles::asks_for_certificates);
    for client in allow.iter().flat_map(|entry| &entry.clients) {
        if let (ClientMatch::Certificate(named), false) = (client, asked) {
            return Err(format!(
                "{named} is to be allowed, but no address for NBD asks for certificates; give it TLS and the \
                 clients' authority (client_ca)"
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::Config;

    #[test]
    fn what_is_wrong_is_said() {
        let nbd = "[[nbd]]\nlisten = \"tcp:h:1\"\n";
        for (text, part) in [
            ("[[nbd]]\n".to_owned(), "listen"),
            (format!("{nbd}tls = {{ cert = \"/c\" }}"), "key"),
            (format!("{nbd}tls = {{ cert = \"/c\", key = \"/k\", require = true }}"), "require"),
            ("[[allow]]\ndisks = [\"a\"]\nclients = [\"everybody\"]".to_owned(), "'everybody'"),
            ("[[allow]]\ndisks = [\"a\"]\nclients = [\"10.1.2.3/8\"]".to_owned(), "10.0.0.0/8"),
            (
                format!(
                    "{nbd}tls = {{ cert = \"/c\", key = \"/k\" }}\n[[allow]]\ndisks = []\nclients = [\"cn:a\"]"
                ),
                "client_ca",
            ),
        ] {
            let error = Config::parse(&text).unwrap_err().to_string();
            assert!(error.contains(part) && !error.contains('\n'), "{text}: {error}");
        }
    }
}
