//! `[migrate]` in hob.toml: credentials of this host for connections to other hosts.

use std::path::PathBuf;

use hob_control::ClientTls;
use serde::Deserialize;

use super::ControlConfig;
use super::check::Findings;
use crate::tls::{TlsError, client_tls, secret};

/// Credentials of this host as a client of other daemons. Defaults are those of `[control.tls]`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct MigrateConfig {
    /// This host's certificate with its chain, PEM.
    pub(crate) cert: Option<PathBuf>,
    /// Private key of this certificate, PEM.
    pub(crate) key: Option<PathBuf>,
    /// CA certificates of other daemons, PEM.
    pub(crate) ca: Option<PathBuf>,
}

/// Files with certificates for migrations.
#[derive(Clone, Debug)]
pub(crate) struct MigrationTls {
    pub(crate) cert: PathBuf,
    pub(crate) key: PathBuf,
    /// Trusted certificate authorities.
    pub(crate) ca: PathBuf,
}

impl MigrationTls {
    /// Reads the files.
    pub(crate) fn load(&self) -> Result<ClientTls, TlsError> {
        secret(&self.key)?;
        client_tls(&self.ca, Some((&self.cert, &self.key)))
    }
}

impl MigrateConfig {
    /// Returns the certificates to use, if all parts are configured.
    pub(crate) fn tls(&self, control: &ControlConfig) -> Option<MigrationTls> {
        let files = control.tls.as_ref();
        let (cert, key) = match (&self.cert, &self.key) {
            (Some(cert), Some(key)) => (cert.clone(), key.clone()),
            _ => files.map(|files| (files.cert.clone(), files.key.clone()))?,
        };
        let ca = self.ca.clone().or_else(|| files.and_then(|files| files.client_ca.clone()))?;
        Some(MigrationTls { cert, key, ca })
    }

    /// Returns true if the table sets a file.
    pub(crate) fn names_files(&self) -> bool {
        self.cert.is_some() || self.key.is_some() || self.ca.is_some()
    }

    /// Checks the settings without reading files.
    pub(super) fn check(&self, found: &mut Findings<'_>) {
        if self.cert.is_some() != self.key.is_some() {
            found.add("migrate", "migrate.cert and migrate.key must be set together");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Config;

    #[test]
    fn absent_settings_are_those_of_the_control_api() {
        let control = "[control]\ntls = { cert = \"/c\", key = \"/k\", client_ca = \"/a\" }\n";
        let tls = |text: &str| {
            let config = Config::parse(text).unwrap();
            config
                .migrate
                .tls(&config.control)
                .map(|tls| [tls.cert, tls.key, tls.ca].map(|path| path.display().to_string()))
        };
        assert_eq!(tls(""), None);
        assert_eq!(tls(control), Some(["/c", "/k", "/a"].map(str::to_owned)));
        let own = format!("{control}[migrate]\ncert = \"/mc\"\nkey = \"/mk\"\n");
        assert_eq!(tls(&own), Some(["/mc", "/mk", "/a"].map(str::to_owned)));
        assert_eq!(tls("[migrate]\ncert = \"/mc\"\nkey = \"/mk\"\n"), None, "whom to trust is not said");
        let half = Config::parse("[migrate]\ncert = \"/mc\"\n").unwrap_err().to_string();
        assert!(half.contains("migrate.key"), "{half}");
    }
}
