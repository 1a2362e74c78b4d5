//! The disks of a plan: kinds of caches and backings, and how a round chooses them.

use conformance::data::Noise;

use super::pick;

/// A cache configuration of the test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheKind {
    /// Name of the cache configuration in the log.
    pub name: &'static str,
    /// Cache settings in hob.toml, without pool and size; `None` for a disk without a cache.
    pub settings: Option<&'static str>,
    /// True if flash may have dirty data.
    pub writes_back: bool,
}

/// Cache configurations of the test: every mode, volatile and persistent write-through, one and two
/// copies, and each preset.
pub const CACHES: &[CacheKind] = &[
    CacheKind { name: "none", settings: None, writes_back: false },
    CacheKind { name: "write-through", settings: Some("mode = \"write-through\""), writes_back: false },
    CacheKind {
        name: "write-through-persistent",
        settings: Some("mode = \"write-through\", persistent = true, block_size = \"16K\""),
        writes_back: false,
    },
    CacheKind {
        name: "write-back",
        settings: Some("mode = \"write-back\", block_size = \"4K\", dirty_age_max = 1"),
        writes_back: true,
    },
    CacheKind {
        name: "write-back-filling",
        settings: Some("mode = \"write-back\", block_size = \"64K\", dirty_start = 50, dirty_stop = 20"),
        writes_back: true,
    },
    CacheKind {
        name: "write-back-2-dirty",
        settings: Some("mode = \"write-back\", block_size = \"8K\", copies = \"2-dirty\", dirty_age_max = 2"),
        writes_back: true,
    },
    CacheKind {
        name: "write-back-2",
        settings: Some("mode = \"write-back\", copies = \"2\", dirty_age_max = 3"),
        writes_back: true,
    },
    CacheKind {
        name: "write-back-memory",
        settings: Some("mode = \"write-back\", ram = \"4M\", dirty_age_max = 1"),
        writes_back: true,
    },
    CacheKind {
        name: "ordered",
        settings: Some("mode = \"write-back\", ordered = true, dirty_age_max = 1"),
        writes_back: true,
    },
    CacheKind { name: "write-around", settings: Some("mode = \"write-around\""), writes_back: false },
    CacheKind { name: "vfrc", settings: Some("preset = \"vfrc\""), writes_back: false },
    CacheKind { name: "fast-cache", settings: Some("preset = \"fast-cache\""), writes_back: true },
    CacheKind { name: "vsan", settings: Some("preset = \"vsan\""), writes_back: true },
    CacheKind { name: "zbs", settings: Some("preset = \"zbs\""), writes_back: true },
    CacheKind { name: "auto", settings: Some("preset = \"auto\""), writes_back: true },
];

impl CacheKind {
    /// Returns true if a cache of this kind may have no size of its own and share the pool's space.
    pub(super) fn can_share(&self) -> bool {
        self.settings.is_some() && self.name != "vfrc"
    }
}

/// Kind of a disk's backing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BackingKind {
    /// Test NBD server with a volatile write cache.
    VolatileNbd {
        /// True if the server offers FUA.
        fua: bool,
    },
    /// Raw file.
    File,
    /// Raw file on the test file system, which has a volatile write cache.
    VolatileFile,
    /// Loop device on a file of the test file system.
    Loop,
    /// qcow2 image, which the daemon reads and writes through a `qemu-nbd` of its own.
    Image,
}

impl BackingKind {
    /// Returns true if the test can inject faults into a backing of this kind.
    #[must_use]
    pub fn misbehaves(self) -> bool {
        !matches!(self, BackingKind::File | BackingKind::Image)
    }

    /// Returns true if a power cut of the host loses unflushed data of a backing of this kind.
    #[must_use]
    pub fn loses_power(self) -> bool {
        matches!(self, BackingKind::VolatileFile | BackingKind::Loop | BackingKind::Image)
    }

    /// Returns true if a process that ends with the daemon has unflushed data of the backing.
    #[must_use]
    pub fn ends_with_daemon(self) -> bool {
        self == BackingKind::Image
    }
}

/// The backing, cache and guests that a round gives to one disk.
#[derive(Debug, Clone, Copy)]
pub struct DiskPlan {
    /// Kind of the disk's backing.
    pub backing: BackingKind,
    /// Cache configuration of the disk.
    pub cache: CacheKind,
    /// Number of guests that share the disk. Each guest has its own region.
    pub guests: u64,
    /// True if the disk's first guest uses vhost-user and not NBD.
    pub vhost_user: bool,
    /// True if the cache has no size of its own and shares the pool with others.
    pub shared: bool,
}

impl DiskPlan {
    /// Returns a random plan for disk number `at` of a round. Two disks of each round are on
    /// volatile servers. At least one disk uses write-back and one write-through.
    pub(super) fn draw(noise: &mut Noise, at: usize) -> Self {
        let backing = match at {
            0 | 1 => BackingKind::VolatileNbd { fua: noise.below(4) > 0 },
            2 => pick(noise, &[BackingKind::VolatileNbd { fua: true }, BackingKind::File]),
            _ => pick(noise, &[BackingKind::VolatileFile, BackingKind::VolatileFile, BackingKind::Loop]),
        };
        let cache = loop {
            let cache = pick(noise, CACHES);
            let fits = match at {
                0 => cache.writes_back,
                1 => !cache.writes_back,
                _ => true,
            };
            if fits {
                break cache;
            }
        };
        let (guests, vhost_user) = (1 + noise.below(2), noise.below(2) == 0);
        DiskPlan { backing, cache, guests, vhost_user, shared: false }
    }
}
