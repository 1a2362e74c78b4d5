//! `[peers]` in hob.toml: flash that this host lends to other hosts, and the time limit for hosts
//! that lend to it.

use std::path::PathBuf;
use std::time::Duration;

use hob_control::Size;
use serde::Deserialize;

use super::check::Findings;

/// Lending of flash to other hosts. Without `lend`, this host lends no flash.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct PeersConfig {
    /// Directory on flash for the data of other hosts, with one file for each host.
    pub(crate) lend: Option<PathBuf>,
    /// Maximum total size of the lent flash. Default: 0.
    pub(crate) lend_max: Size,
    /// Name by which hosts that lend flash to this host know it. Default: the name in the cluster,
    /// or the host name.
    pub(crate) name: Option<String>,
    /// Time after which a peer that does not answer is abandoned, seconds. Default: 5.
    pub(crate) wait_seconds: u64,
}

impl Default for PeersConfig {
    fn default() -> PeersConfig {
        PeersConfig { lend: None, lend_max: Size(0), name: None, wait_seconds: 5 }
    }
}

impl PeersConfig {
    /// Checks the settings without reading files.
    pub(super) fn check(&self, found: &mut Findings<'_>) {
        match &self.lend {
            Some(path) if !path.is_absolute() => {
                let what = format!("peers.lend = {}: the path must be absolute", path.display());
                found.add("peers.lend", what);
            }
            Some(_) if self.lend_max == Size(0) => {
                found.add(
                    "peers.lend",
                    "peers.lend needs peers.lend_max, the maximum total size of the lent flash",
                );
            }
            _ => {}
        }
        if !(1..=600).contains(&self.wait_seconds) {
            let what = format!("peers.wait_seconds = {}: the value must be 1 to 600", self.wait_seconds);
            found.add("peers.wait_seconds", what);
        }
    }

    /// Returns the time after which a peer that does not answer is abandoned.
    pub(crate) fn wait(&self) -> Duration {
        Duration::from_secs(self.wait_seconds)
    }
}

#[cfg(test)]
mod tests {
    use super::super::Config;

    #[test]
    fn lending_needs_a_size() {
        let peers =
            |text: &str| Config::parse(text).map(|config| config.peers).map_err(|error| error.to_string());
        assert_eq!(peers("").unwrap().wait_seconds, 5);
        let lent = peers("[peers]\nlend = \"/nvme/lent\"\nlend_max = \"10G\"").unwrap();
        assert_eq!(lent.lend_max.bytes(), 10 << 30);
        for (text, part) in [
            ("[peers]\nlend = \"/nvme/lent\"", "lend_max"),
            ("[peers]\nlend = \"lent\"\nlend_max = \"1G\"", "absolute"),
            ("[peers]\nwait_seconds = 0", "1 to 600"),
            ("[peers]\nborrow = 1", "borrow"),
        ] {
            assert!(peers(text).unwrap_err().contains(part), "{text}");
        }
    }
}
