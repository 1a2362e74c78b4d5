//! `[[nbd]]` in hob.toml: addresses for NBD clients with further settings.

use std::path::PathBuf;

use hob_control::Endpoint;
use serde::Deserialize;

use crate::allow::{AllowEntry, ClientMatch};
use crate::tls::TlsFiles;

/// `[[nbd]]`: a listener for NBD clients.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NbdEntry {
    /// Address for clients.
    pub listen: Endpoint,
    /// TLS; without it, connections are unencrypted.
    pub tls: Option<NbdTlsFiles>,
}

/// `tls = { cert, key, client_ca, required }`, or `tls = { psk, required }`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NbdTlsFiles {
    /// This host's certificate with its chain, PEM.
    cert: Option<PathBuf>,
    /// Private key of this certificate, PEM.
    key: Option<PathBuf>,
    /// CA certificates, PEM. Clients must have a certificate of these CAs.
    client_ca: Option<PathBuf>,
    /// File with pre-shared keys, instead of certificates.
    psk: Option<PathBuf>,
    /// Refuse clients that do not start TLS. Default: true.
    #[serde(default = "yes")]
    pub required: bool,
}

/// How NBD server and client authenticate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NbdSecrets {
    /// Certificates.
    Certificates(TlsFiles),
    /// Pre-shared keys in this file.
    Keys(PathBuf),
}

fn yes() -> bool {
    true
}

impl NbdTlsFiles {
    /// Creates settings that require TLS.
    pub fn required(secrets: NbdSecrets) -> NbdTlsFiles {
        let none = NbdTlsFiles { cert: None, key: None, client_ca: None, psk: None, required: true };
        match secrets {
            NbdSecrets::Keys(file) => NbdTlsFiles { psk: Some(file), ..none },
            NbdSecrets::Certificates(TlsFiles { cert, key, client_ca }) => {
                NbdTlsFiles { cert: Some(cert), key: Some(key), client_ca, ..none }
            }
        }
    }

    /// Returns the configured files: those of a certificate, or the file of pre-shared keys.
    ///
    /// # Errors
    /// Returns an error if neither kind of secrets is configured, or if both are.
    pub(crate) fn secrets(&self) -> Result<NbdSecrets, String> {
        match (&self.cert, &self.key, &self.client_ca, &self.psk) {
            (Some(cert), Some(key), client_ca, None) => {
                let (cert, key, client_ca) = (cert.clone(), key.clone(), client_ca.clone());
                Ok(NbdSecrets::Certificates(TlsFiles { cert, key, client_ca }))
            }
            (None, None, None, Some(file)) => Ok(NbdSecrets::Keys(file.clone())),
            _ => Err("tls of an [[nbd]] needs either cert and key, or psk".to_owned()),
        }
    }
}

/// Reports the errors that can be found without reading files. `report` gets the key and the
/// message of each error.
pub(crate) fn check_nbd(nbd: &[NbdEntry], allow: &[AllowEntry], report: &mut dyn FnMut(&str, String)) {
    let (mut certificates, mut keys, mut broken) = (false, false, false);
    for (number, entry) in nbd.iter().enumerate() {
        match entry.tls.as_ref().map(NbdTlsFiles::secrets) {
            None => {}
            Some(Ok(NbdSecrets::Certificates(files))) => certificates |= files.client_ca.is_some(),
            Some(Ok(NbdSecrets::Keys(_))) => keys = true,
            Some(Err(what)) => {
                broken = true;
                report(&format!("nbd.{number}.tls"), what);
            }
        }
    }
    if broken {
        return;
    }
    for (number, entry) in allow.iter().enumerate() {
        let at = format!("allow.{number}.clients");
        for client in &entry.clients {
            match client {
                ClientMatch::Certificate(named) if !certificates => report(
                    &at,
                    format!(
                        "[[allow]] names {named}, but no NBD listener requires certificates; set \
                        tls with the clients' CA (client_ca) for a listener"
                    ),
                ),
                ClientMatch::Key(name) if !keys => {
                    report(&at, format!("[[allow]] names psk:{name}, but no NBD listener has TLS with psk"))
                }
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Config;

    #[test]
    fn errors_are_reported() {
        let nbd = "[[nbd]]\nlisten = \"tcp:h:1\"\n";
        for (text, part) in [
            ("[[nbd]]\n".to_owned(), "listen"),
            (format!("{nbd}tls = {{ cert = \"/c\" }}"), "cert and key, or psk"),
            (format!("{nbd}tls = {{ }}"), "cert and key, or psk"),
            (format!("{nbd}tls = {{ cert = \"/c\", key = \"/k\", psk = \"/p\" }}"), "cert and key, or psk"),
            ("[[allow]]\ndisks = [\"a\"]\nclients = [\"psk:a\"]".to_owned(), "names psk:a"),
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
