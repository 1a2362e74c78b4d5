//! `[cluster]` in hob.toml: the etcd cluster through which hosts agree which host serves which
//! disk.

use std::path::PathBuf;

use hob_control::etcd::EtcdEndpoint;
use hob_control::{ClientTls, check_name};
use serde::Deserialize;

use super::check::Findings;
use crate::tls::{TlsError, client_tls};

/// Without this table, this host is not in a cluster.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ClusterConfig {
    /// Client URLs of the etcd members.
    pub(crate) etcd: Vec<String>,
    /// CA certificates to trust, for `https://`.
    pub(crate) ca: Option<PathBuf>,
    /// This host's certificate, if etcd requires one.
    pub(crate) cert: Option<PathBuf>,
    /// Private key of this certificate.
    pub(crate) key: Option<PathBuf>,
    /// Name of this host in the cluster. Default: the host name.
    pub(crate) host: Option<String>,
    /// Address of this host's control API, for other hosts and for operators.
    pub(crate) address: Option<String>,
    /// Time that a host serves its disks without an answer from etcd, seconds. Default: 10.
    #[serde(default = "default_lease")]
    pub(crate) lease_seconds: u64,
    /// Additional time before other hosts take the disks of a vanished host, seconds. Default: 5.
    #[serde(default = "default_settle")]
    pub(crate) settle_seconds: u64,
    /// Prefix of all etcd keys. Clusters that share an etcd need different prefixes. Default:
    /// `/hob`.
    #[serde(default = "default_prefix")]
    pub(crate) prefix: String,
}

fn default_lease() -> u64 {
    10
}

fn default_settle() -> u64 {
    5
}

fn default_prefix() -> String {
    "/hob".to_owned()
}

/// Maximum length of a prefix in characters.
const PREFIX_CHARS_MAX: usize = 200;

impl ClusterConfig {
    pub(crate) fn endpoints(&self) -> Result<Vec<EtcdEndpoint>, String> {
        self.etcd.iter().map(|text| text.parse().map_err(|why| format!("cluster.etcd: {why}"))).collect()
    }

    /// Reads the TLS files for etcd; `None` without `ca`.
    pub(crate) fn tls(&self) -> Result<Option<ClientTls>, TlsError> {
        let own = self.cert.as_deref().zip(self.key.as_deref());
        self.ca.as_deref().map(|ca| client_tls(ca, own)).transpose()
    }

    /// Checks the settings without reading files.
    pub(super) fn check(&self, found: &mut Findings<'_>) {
        let endpoints = self.endpoints().unwrap_or_else(|what| {
            found.add("cluster.etcd", what);
            Vec::new()
        });
        if self.etcd.is_empty() {
            found.add("cluster.etcd", "cluster.etcd has no endpoint; write etcd = [\"http://host:2379\"]");
        }
        if endpoints.iter().any(EtcdEndpoint::is_tls) && self.ca.is_none() {
            found.add("cluster.etcd", "cluster.ca is missing: the CA certificates to trust for etcd");
        }
        if self.cert.is_some() != self.key.is_some() {
            found.add("cluster", "cluster.cert and cluster.key must be set together");
        }
        if let Some(host) = &self.host
            && let Err(error) = check_name(host)
        {
            found.add("cluster.host", format!("cluster.host '{host}': {error}"));
        }
        for (name, value, least, most) in
            [("lease_seconds", self.lease_seconds, 3, 600), ("settle_seconds", self.settle_seconds, 0, 3600)]
        {
            if !(least..=most).contains(&value) {
                found.add(
                    &format!("cluster.{name}"),
                    format!("cluster.{name} = {value}: the value must be {least} to {most}"),
                );
            }
        }
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "/._-".contains(c);
        let is_path = self.prefix.starts_with('/') && self.prefix.trim_end_matches('/').len() > 1;
        if !is_path || !self.prefix.chars().all(is_plain) || self.prefix.len() > PREFIX_CHARS_MAX {
            let what = format!("cluster.prefix = '{}': the prefix must be a path such as /hob", self.prefix);
            found.add("cluster.prefix", what);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Config;

    #[test]
    fn a_cluster_needs_an_etcd_and_little_else() {
        let config = Config::parse("[cluster]\netcd = [\"http://10.0.0.1:2379\"]\n").unwrap();
        let cluster = config.cluster.unwrap();
        assert_eq!((cluster.lease_seconds, cluster.settle_seconds), (10, 5));
        assert_eq!((cluster.prefix.as_str(), cluster.host), ("/hob", None));
        assert!(Config::parse("").unwrap().cluster.is_none());
        for (text, part) in [
            ("etcd = []", "has no endpoint"),
            ("etcd = [\"10.0.0.1:2379\"]", "http://host:port"),
            ("etcd = [\"https://e:2379\"]", "cluster.ca"),
            ("etcd = [\"http://e:1\"]\ncert = \"/c\"", "cluster.key"),
            ("etcd = [\"http://e:1\"]\nhost = \"a/b\"", "cluster.host"),
            ("etcd = [\"http://e:1\"]\nlease_seconds = 2", "lease_seconds = 2"),
            ("etcd = [\"http://e:1\"]\nprefix = \"hob\"", "cluster.prefix"),
            ("etcd = [\"http://e:1\"]\nprefix = \"/\"", "cluster.prefix"),
            ("etcd = [\"http://e:1\"]\nttl = 3", "ttl"),
        ] {
            let error = Config::parse(&format!("[cluster]\n{text}\n")).unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
