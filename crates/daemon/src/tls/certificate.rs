//! Certificates of clients, and how the configuration names them.
//!
//! TLS has verified each certificate: a trusted CA issued it, and it has not expired. `sha256:`
//! names one certificate. A renewed certificate has a different hash. `cn:` and `san:` name every
//! certificate with that name, so they rely on the CA.

use std::fmt;
use std::str::FromStr;

use ring::digest;
use rustls::pki_types::CertificateDer;
use serde::Deserialize;
use tokio_rustls::server::TlsStream;

use super::{hex, names, subject};

/// A client's certificate, verified by TLS.
#[derive(Clone, Debug)]
pub(crate) struct PeerCertificate(CertificateDer<'static>);

impl PeerCertificate {
    /// Returns the client's certificate of a connection; `None` if the client sent none.
    pub(crate) fn of<S>(stream: &TlsStream<S>) -> Option<PeerCertificate> {
        let (_, session) = stream.get_ref();
        session.peer_certificates()?.first().map(|first| PeerCertificate(first.clone().into_owned()))
    }

    fn fingerprint(&self) -> Fingerprint {
        let digest = digest::digest(&digest::SHA256, &self.0);
        Fingerprint(digest.as_ref().try_into().expect("SHA-256 has 32 bytes"))
    }
}

/// Writes the common name for logs, or the fingerprint if there is none.
impl fmt::Display for PeerCertificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match subject::common_name(&self.0) {
            // The client's CA chose the name, so it must not break the log line.
            Some(name) => write!(f, "cn:{}", name.escape_debug()),
            None => write!(f, "sha256:{}", self.fingerprint()),
        }
    }
}

/// SHA-256 hash of a certificate in hexadecimal digits. The configuration may have colons between
/// the bytes, as `openssl x509 -fingerprint -sha256` prints them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fingerprint([u8; 32]);

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// A criterion that selects certificates.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub enum CertificateMatch {
    /// `sha256:HEX`: the certificate with this hash.
    Fingerprint(Fingerprint),
    /// `cn:NAME`: certificates whose only common name is NAME.
    CommonName(String),
    /// `san:NAME`: certificates with this DNS name or address among the alternative names.
    AlternativeName(String),
}

impl CertificateMatch {
    pub(crate) fn matches(&self, certificate: &PeerCertificate) -> bool {
        match self {
            CertificateMatch::Fingerprint(fingerprint) => certificate.fingerprint() == *fingerprint,
            CertificateMatch::CommonName(name) => {
                subject::common_name(&certificate.0).is_some_and(|is| is == *name)
            }
            CertificateMatch::AlternativeName(name) => names(&certificate.0, name),
        }
    }
}

/// Why a text selects no certificate.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' names no certificate; write sha256:FINGERPRINT, cn:COMMON-NAME or san:DNS-NAME")]
pub struct CertificateMatchError(String);

impl FromStr for CertificateMatch {
    type Err = CertificateMatchError;

    fn from_str(text: &str) -> Result<CertificateMatch, CertificateMatchError> {
        let wrong = || CertificateMatchError(text.to_owned());
        match text.split_once(':').ok_or_else(wrong)? {
            ("sha256", digits) => {
                let bytes = hex(digits.replace(':', "").as_bytes()).and_then(|bytes| bytes.try_into().ok());
                Ok(CertificateMatch::Fingerprint(Fingerprint(bytes.ok_or_else(wrong)?)))
            }
            ("cn", name) if !name.is_empty() => Ok(CertificateMatch::CommonName(name.to_owned())),
            ("san", name) if rustls::pki_types::ServerName::try_from(name).is_ok() => {
                Ok(CertificateMatch::AlternativeName(name.to_owned()))
            }
            _ => Err(wrong()),
        }
    }
}

impl TryFrom<String> for CertificateMatch {
    type Error = CertificateMatchError;

    fn try_from(text: String) -> Result<CertificateMatch, CertificateMatchError> {
        text.parse()
    }
}

impl fmt::Display for CertificateMatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CertificateMatch::Fingerprint(fingerprint) => write!(f, "sha256:{fingerprint}"),
            CertificateMatch::CommonName(name) => write!(f, "cn:{name}"),
            CertificateMatch::AlternativeName(name) => write!(f, "san:{name}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::Authority;
    use super::*;

    #[test]
    fn a_certificate_has_three_kinds_of_names() {
        let (certificate, _) = Authority::new().client("host7");
        let certificate = PeerCertificate(certificate);
        let fingerprint = certificate.fingerprint().to_string();
        let colons: Vec<&str> = (0..32).map(|at| &fingerprint[2 * at..2 * at + 2]).collect();
        for (text, matches) in [
            (format!("sha256:{fingerprint}"), true),
            (format!("sha256:{}", colons.join(":").to_uppercase()), true),
            (format!("sha256:{}", "0".repeat(64)), false),
            ("cn:host7".to_owned(), true),
            ("cn:host".to_owned(), false),
            ("cn:HOST7".to_owned(), false),
            ("san:host7.example".to_owned(), true),
            ("san:Host7.Example".to_owned(), true),
            ("san:host8.example".to_owned(), false),
            ("san:host7".to_owned(), false),
        ] {
            let named: CertificateMatch = text.parse().unwrap();
            assert_eq!(named.matches(&certificate), matches, "{text}");
        }
        assert_eq!(certificate.to_string(), "cn:host7");
    }

    #[test]
    fn invalid_input_is_refused() {
        for text in ["", "host7", "cn:", "san:", "san:a b", "sha256:", "sha256:00", "sha1:00", "sha256:zz"] {
            assert!(text.parse::<CertificateMatch>().is_err(), "{text}");
        }
        assert!(format!("sha256:{}", "0".repeat(63)).parse::<CertificateMatch>().is_err());
        assert!(format!("sha256:{}", "0".repeat(66)).parse::<CertificateMatch>().is_err());
        let text = format!("sha256:{}", "0a".repeat(32));
        assert_eq!(text.parse::<CertificateMatch>().unwrap().to_string(), text);
    }
}
