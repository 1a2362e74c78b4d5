//! Which NBD clients may see which exports.
//!
//! A disk without an `[[allow]]` entry is visible to every client that can connect. A disk with
//! entries is visible only to the clients of those entries. For all other clients the disk does not
//! exist: lists of exports omit the disk, and a request for its name gets the same reply as a
//! request for an unknown name. The rules of a disk apply to its additional exports unless entries
//! name the export. The rules are fixed when the program starts. Established connections are
//! checked again only after an upgrade, by the new program.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;
use std::sync::Arc;

use hob_nbd::{ExportDirectory, ExportInfo};
use serde::Deserialize;

use super::exports::{Export, Exports};
use super::tls::{CertificateMatch, PeerCertificate};

/// The identity of a client, as far as it is known.
#[derive(Clone, Debug, Default)]
pub(crate) struct Peer {
    /// Address of the client; `None` on a Unix socket.
    pub(crate) address: Option<IpAddr>,
    /// TLS certificate of the client.
    pub(crate) certificate: Option<PeerCertificate>,
    /// Name of the pre-shared key that the client has.
    pub(crate) key: Option<String>,
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.certificate, &self.key) {
            (Some(certificate), _) => write!(f, "{certificate} ")?,
            (None, Some(key)) => write!(f, "psk:{} ", key.escape_debug())?,
            (None, None) => f.write_str("a client ")?,
        }
        match &self.address {
            Some(address) => write!(f, "at {address}"),
            None => f.write_str("on a Unix socket"),
        }
    }
}

/// A criterion that selects clients.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub enum ClientMatch {
    /// `unix`: all clients on Unix sockets.
    Unix,
    /// A network such as `10.1.0.0/16`, or a single address.
    Network {
        /// Network address with zero bits after the prefix.
        base: IpAddr,
        /// Length of the prefix in bits.
        prefix_bits: u32,
    },
    /// `sha256:HEX`, `cn:NAME` or `san:NAME`: clients whose TLS certificate has this hash or name.
    Certificate(CertificateMatch),
    /// `psk:NAME`: clients with this pre-shared key.
    Key(String),
}

impl ClientMatch {
    fn matches(&self, peer: &Peer) -> bool {
        match self {
            ClientMatch::Unix => peer.address.is_none(),
            ClientMatch::Network { base, prefix_bits } => peer
                .address
                .is_some_and(|address| network(address.to_canonical(), *prefix_bits) == Some(*base)),
            ClientMatch::Key(name) => peer.key.as_ref() == Some(name),
            ClientMatch::Certificate(named) => peer.certificate.as_ref().is_some_and(|c| named.matches(c)),
        }
    }
}

/// Returns the address with zero bits after the prefix; `None` if the prefix is longer than the
/// address.
fn network(address: IpAddr, prefix_bits: u32) -> Option<IpAddr> {
    match address {
        IpAddr::V4(address) => {
            let mask = u32::MAX.checked_shl(32u32.checked_sub(prefix_bits)?).unwrap_or(0);
            Some(IpAddr::V4((address.to_bits() & mask).into()))
        }
        IpAddr::V6(address) => {
            let mask = u128::MAX.checked_shl(128u32.checked_sub(prefix_bits)?).unwrap_or(0);
            Some(IpAddr::V6((address.to_bits() & mask).into()))
        }
    }
}

/// Why a text is not a valid criterion for clients.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClientMatchError {
    #[error(
        "'{0}' names no clients; write an address, a network like 10.1.0.0/16, unix, sha256:FINGERPRINT, \
         cn:COMMON-NAME, san:DNS-NAME or psk:NAME"
    )]
    Unknown(String),
    /// The text has set bits after the prefix of the network.
    #[error("'{text}' has bits set after its prefix; did you mean {base}/{prefix_bits}?")]
    HostBits {
        /// The text in the configuration.
        text: String,
        /// Address of the network: the given address without the bits after its prefix.
        base: IpAddr,
        /// Length of the network's prefix in bits.
        prefix_bits: u32,
    },
}

impl FromStr for ClientMatch {
    type Err = ClientMatchError;

    fn from_str(text: &str) -> Result<ClientMatch, ClientMatchError> {
        let unknown = || ClientMatchError::Unknown(text.to_owned());
        if text == "unix" {
            return Ok(ClientMatch::Unix);
        }
        if let Some(name) = text.strip_prefix("psk:").filter(|name| !name.is_empty()) {
            return Ok(ClientMatch::Key(name.to_owned()));
        }
        if let Ok(named) = text.parse() {
            return Ok(ClientMatch::Certificate(named));
        }
        let (address, prefix) = text.split_once('/').map_or((text, None), |(a, p)| (a, Some(p)));
        let address: IpAddr = address.parse().map_err(|_| unknown())?;
        let most = if address.is_ipv4() { 32 } else { 128 };
        let prefix_bits = prefix.map_or(Ok(most), |prefix| prefix.parse().map_err(|_| unknown()))?;
        let base = network(address, prefix_bits).ok_or_else(unknown)?;
        if base != address {
            return Err(ClientMatchError::HostBits { text: text.to_owned(), base, prefix_bits });
        }
        Ok(ClientMatch::Network { base, prefix_bits })
    }
}

impl TryFrom<String> for ClientMatch {
    type Error = ClientMatchError;

    fn try_from(text: String) -> Result<ClientMatch, ClientMatchError> {
        text.parse()
    }
}

/// Restricts disks to clients. A disk without an entry is visible to all clients.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AllowEntry {
    /// Names of disks; `*` is every disk.
    pub disks: Vec<String>,
    /// The clients that may see the disks.
    pub clients: Vec<ClientMatch>,
}

/// All `[[allow]]` entries.
#[derive(Clone, Debug, Default)]
pub(crate) struct AllowList(Arc<[AllowEntry]>);

impl AllowList {
    pub(crate) fn new(entries: Vec<AllowEntry>) -> AllowList {
        AllowList(entries.into())
    }

    /// Returns true if a client may see this export of this disk. Entries that name the export
    /// decide. If no entry names the export, the entries that name the disk decide.
    fn permits(&self, export: &str, disk: &str, peer: &Peer) -> bool {
        let is_named = |what: &str| self.0.iter().any(|entry| entry.disks.iter().any(|name| name == what));
        let named = if is_named(export) { export } else { disk };
        let counts = |entry: &&AllowEntry| entry.disks.iter().any(|name| name == named || name == "*");
        let mut entries = self.0.iter().filter(counts).peekable();
        entries.peek().is_none() || entries.any(|entry| entry.clients.iter().any(|c| c.matches(peer)))
    }
}

/// The exports that one client may see.
#[derive(Clone, Debug)]
pub(crate) struct Visible {
    pub(crate) exports: Exports,
    /// The rules that decide which clients may see which exports.
    pub(crate) allow: AllowList,
    /// The client for which the exports are filtered.
    pub(crate) peer: Peer,
}

impl Visible {
    /// Returns the export with this name. The empty name means the only disk that the client can
    /// see; `None` if the client can see several disks or none.
    pub(crate) fn get(&self, name: &str) -> Option<Export> {
        if !name.is_empty() {
            let export = self.exports.get(name)?;
            return self.allow.permits(name, &export.of, &self.peer).then_some(export);
        }
        let mut disks = self.visible().into_iter().filter(|(name, export)| *name == export.of);
        match (disks.next(), disks.next()) {
            (Some((_, only)), None) => Some(only),
            _ => None,
        }
    }

    /// Returns true if the disk of this export is being opened and this client may see the export.
    pub(crate) fn is_opening(&self, name: &str) -> bool {
        self.exports.is_opening(name, |export, disk| self.allow.permits(export, disk, &self.peer))
    }

    fn visible(&self) -> Vec<(String, Export)> {
        self.exports.visible(|export, disk| self.allow.permits(export, disk, &self.peer))
    }
}

impl ExportDirectory for Visible {
    fn find(&self, name: &str) -> Option<ExportInfo> {
        self.get(name).map(|export| export.info)
    }

    fn list(&self) -> Vec<(String, String)> {
        self.visible().into_iter().map(|(name, export)| (name, export.info.description)).collect()
    }
}

#[cfg(test)]
mod tests {
    use hob_engine::io::Promote;
    use hob_engine::units::DiskId;

    use super::*;
    use crate::shard_api::ShardHandle;

    fn at(address: &str) -> Peer {
        Peer { address: Some(address.parse().unwrap()), ..Peer::default() }
    }

    #[test]
    fn clients_are_named_by_where_they_come_from() {
        for (text, peer, matches) in [
            ("10.1.0.0/16", at("10.1.2.3"), true),
            ("10.1.0.0/16", at("10.2.0.0"), false),
            ("10.1.0.0/16", at("::ffff:10.1.2.3"), true),
            ("10.1.2.3", at("10.1.2.3"), true),
            ("10.1.2.3", at("10.1.2.4"), false),
            ("0.0.0.0/0", at("1.2.3.4"), true),
            ("0.0.0.0/0", at("::1"), false),
            ("::/0", at("::1"), true),
            ("fd00::/8", at("fd12::1"), true),
            ("fd00::/8", at("fe00::1"), false),
            ("::1", at("::1"), true),
            ("unix", Peer::default(), true),
            ("unix", at("127.0.0.1"), false),
            ("0.0.0.0/0", Peer::default(), false),
            ("cn:host7", at("10.1.2.3"), false),
            ("psk:a", at("10.1.2.3"), false),
            ("psk:a", Peer { key: Some("a".into()), ..Peer::default() }, true),
            ("psk:a", Peer { key: Some("b".into()), ..Peer::default() }, false),
        ] {
            assert_eq!(text.parse::<ClientMatch>().unwrap().matches(&peer), matches, "{text} {peer}");
        }
    }

    #[test]
    fn invalid_input_is_refused() {
        for text in
            ["", "unix:", "10.1", "10.1.0.0/33", "::/129", "10.1.0.0/", "10.1.0.0/-1", "host7", "cn:", "psk:"]
        {
            let error = text.parse::<ClientMatch>().unwrap_err();
            assert!(matches!(error, ClientMatchError::Unknown(_)), "{text}: {error}");
        }
        let error = "10.1.2.3/16".parse::<ClientMatch>().unwrap_err().to_string();
        assert!(error.contains("10.1.0.0/16?"), "{error}");
    }

    #[test]
    fn disks_without_permission_are_invisible() {
        let (shard, _calls) = ShardHandle::new(|| {});
        let exports = Exports::default();
        for (number, (of, name)) in
            [("free", "free"), ("one", "one"), ("two", "two"), ("two", "two-backup"), ("two", "own")]
                .into_iter()
                .enumerate()
        {
            let (disk, info, promote) = (DiskId(number as u32), ExportInfo::new(512), Promote::Usual);
            exports.insert(name, Export { of: of.to_owned(), disk, shard: shard.clone(), info, promote });
        }
        let entry = |disks: &[&str], clients: &[&str]| AllowEntry {
            disks: disks.iter().map(|&disk| disk.to_owned()).collect(),
            clients: clients.iter().map(|client| client.parse().unwrap()).collect(),
        };
        let allow = AllowList::new(vec![
            entry(&["one", "two"], &["10.0.0.1"]),
            entry(&["two"], &["10.0.0.2"]),
            entry(&["own"], &["10.0.0.4"]),
            entry(&["absent"], &["10.0.0.3"]),
        ]);
        let seen_by = |allow: &AllowList, peer: Peer| {
            let visible = Visible { exports: exports.clone(), allow: allow.clone(), peer };
            let names: Vec<String> = visible.list().into_iter().map(|(name, _)| name).collect();
            for name in ["free", "one", "two", "two-backup", "own", "absent"] {
                assert_eq!(visible.find(name).is_some(), names.iter().any(|n| n == name), "{name}");
            }
            let disks =
                names.iter().filter(|name| exports.get(name).is_some_and(|export| export.of == **name));
            assert_eq!(visible.find("").is_some(), disks.count() == 1);
            names.join(" ")
        };
        assert_eq!(seen_by(&allow, at("10.0.0.1")), "free one two two-backup");
        assert_eq!(seen_by(&allow, at("10.0.0.2")), "free two two-backup");
        assert_eq!(seen_by(&allow, at("10.0.0.3")), "free");
        assert_eq!(seen_by(&allow, at("10.0.0.4")), "free own");
        assert_eq!(seen_by(&allow, Peer::default()), "free");
        let all = AllowList::new(vec![entry(&["*"], &["unix"]), entry(&["one"], &["10.0.0.1"])]);
        assert_eq!(seen_by(&all, at("10.0.0.1")), "one");
        assert_eq!(seen_by(&all, at("10.0.0.2")), "");
        assert_eq!(seen_by(&all, Peer::default()), "free one own two two-backup");
    }
}
