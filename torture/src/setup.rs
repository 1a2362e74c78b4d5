//! The plan of a round, generated from the seed: disks, backings, caches and faults.

use std::time::Duration;

use conformance::MIB;
use conformance::data::Noise;
use serde_json::{Value, json};

use crate::behaviour::Operation;

/// Size of a disk, bytes.
pub const DISK_BYTES: u64 = 16 * MIB;

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
    fn can_share(&self) -> bool {
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

/// A fault that the test injects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// Kills the daemon with SIGKILL and starts it after a pause.
    Kill {
        /// Duration of the pause.
        down: Duration,
    },
    /// Kills the daemon with SIGKILL, starts it, and kills it again while it starts.
    KillTwice {
        /// Time between the start and the second SIGKILL.
        after: Duration,
    },
    /// Stops the daemon with SIGTERM and starts it again.
    Restart,
    /// Pauses the daemon with SIGSTOP, and later continues it with SIGCONT.
    Stop {
        /// Duration of the pause.
        time: Duration,
    },
    /// Upgrades the daemon with SIGHUP.
    Upgrade,
    /// A backing loses unflushed data and closes its connections.
    Crash {
        /// Number of the disk with the fault.
        disk: usize,
        /// Time during which no client can connect.
        away: Duration,
    },
    /// A backing closes its connections and loses no data.
    Cut {
        /// Number of the disk with the fault.
        disk: usize,
        /// Time during which no client can connect.
        away: Duration,
    },
    /// A backing shuts down cleanly: it replies ESHUTDOWN and is then absent for a while.
    ShutDown {
        /// Number of the disk with the fault.
        disk: usize,
        /// Time during which the backing replies ESHUTDOWN.
        refuses: Duration,
        /// Time during which no client can connect.
        away: Duration,
    },
    /// A backing does not reply for a while.
    Hang {
        /// Number of the disk with the fault.
        disk: usize,
        /// Duration of the fault.
        time: Duration,
    },
    /// A backing does not reply, and many clients of its disk send many requests. Other disks must
    /// continue.
    Flood {
        /// Number of the disk with the fault.
        disk: usize,
    },
    /// A backing is slow for a while.
    Slow {
        /// Number of the disk with the fault.
        disk: usize,
        /// Delay of each request.
        delay: Duration,
        /// Duration of the fault.
        time: Duration,
    },
    /// A backing fails one kind of requests in a range for a while.
    Errors {
        /// Number of the disk with the fault.
        disk: usize,
        /// Operation of the failing requests.
        operation: Operation,
        /// Start of the range, in sixteenths of the disk.
        from: u64,
        /// Length of the range, in sixteenths of the disk.
        sixteenths: u64,
        /// NBD error number of the reply.
        error: u32,
        /// Duration of the fault.
        time: Duration,
    },
    /// The next flush of a backing fails and loses data that was not durable.
    LosingFlush {
        /// Number of the disk with the fault.
        disk: usize,
    },
    /// The daemon is killed with SIGKILL, and a backing loses unflushed data while the daemon is
    /// down.
    KillAndCrash {
        /// Number of the disk with the fault.
        disk: usize,
    },
    /// The daemon is killed, and flash and backings on the test file system lose unflushed data.
    PowerCut,
    /// The daemon's address space is limited for a while. The daemon may abort.
    MemoryLimit {
        /// Memory above the daemon's current size, KiB.
        headroom_kib: u64,
        /// Duration of the memory limit.
        time: Duration,
    },
    /// Many SIGSTOP and SIGCONT in a row interrupt the daemon's system calls.
    Interruptions,
    /// A flash device is slow for a while.
    FlashSlow {
        /// Number of the flash device.
        device: usize,
        /// Delay of each request.
        delay: Duration,
        /// Duration of the fault.
        time: Duration,
    },
    /// A flash device does not reply for a while.
    FlashHang {
        /// Number of the flash device.
        device: usize,
        /// Duration of the fault.
        time: Duration,
    },
    /// A flash device fails writes or flushes for a while, and loses no data.
    FlashErrors {
        /// Number of the flash device.
        device: usize,
        /// Operation of the failing requests.
        operation: Operation,
        /// NBD error number of the reply.
        error: u32,
        /// Duration of the fault.
        time: Duration,
    },
    /// The file system of `state_dir` is full for a while.
    StateFull {
        /// Duration of the fault.
        time: Duration,
        /// True if the daemon is killed and started during this fault.
        kill: bool,
    },
    /// The loop device of a backing is detached. The device disappears when the daemon is killed,
    /// and the test attaches the file again later.
    LoopDetached {
        /// Number of the disk.
        disk: usize,
        /// Time during which the device is missing while the daemon runs.
        away: Duration,
    },
    /// A flash device is removed from the pool and added again.
    FlashRemoved {
        /// Number of the flash device.
        device: usize,
    },
    /// The `qemu-nbd` of an image is killed with SIGKILL while the daemon runs.
    KillImageServer {
        /// Number of the disk.
        disk: usize,
    },
    /// A command changes a cache while its disk is used.
    Change {
        /// Number of the disk.
        disk: usize,
        /// Change of the cache.
        change: Change,
    },
    /// The daemon stops, a part of a backing is changed, and the daemon starts.
    ChangeOffline {
        /// Number of the disk, which has no dirty data.
        disk: usize,
        /// True to stop the daemon with SIGKILL instead of SIGTERM.
        kill: bool,
    },
}

/// A change of a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// Changes the size, in MiB.
    Resize(u64),
    /// Clears the cache.
    Clear,
    /// Drains the cache.
    Drain,
    /// Changes the cache to write-through and back.
    WriteThrough,
    /// Disables the cache and enables it again.
    Disable,
    /// Changes the replacement policy.
    Policy(&'static str),
    /// Changes the block size.
    BlockSize(&'static str),
}

/// Plan of a round.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Seed of the round.
    pub seed: u64,
    /// Disks of the round.
    pub disks: Vec<DiskPlan>,
    /// True if the pool devices are files of the test file system, which lose unflushed data.
    pub volatile_pool: bool,
    /// Number of the daemon's shard threads.
    pub shards: u64,
    /// Interface of the daemon for I/O, as in hob.toml: `io_uring` or `threads`.
    pub ring: &'static str,
    /// True if the pool is much smaller than the data that the guests use. All caches that can
    /// share the pool do so.
    pub small_pool: bool,
    /// Timeout of requests to an unavailable backing, milliseconds.
    pub backing_wait_ms: u64,
    /// Duration of the guests' load.
    pub load: Duration,
    /// True if guests of raw files write image headers.
    pub headers: bool,
    /// Faults, each with the time since the start of the previous fault.
    pub faults: Vec<(Duration, Fault)>,
}

/// Minimum and maximum duration of the load in a round, milliseconds.
const LOAD_MS: (u64, u64) = (20_000, 40_000);
/// Number of disks in a round.
const DISKS: usize = 4;

fn pick<T: Copy>(noise: &mut Noise, of: &[T]) -> T {
    of[noise.below(of.len() as u64) as usize]
}

fn ms(noise: &mut Noise, from: u64, to: u64) -> Duration {
    Duration::from_millis(from + noise.below(to - from + 1))
}

/// Selects faults and guest habits by words in their names.
#[derive(Debug, Clone, Default)]
pub struct Filter {
    /// A fault or guest habit is used only if its name contains one of these words. An empty list
    /// selects all faults and guest habits.
    pub only: Vec<String>,
    /// A fault or guest habit is not used if its name contains one of these words.
    pub without: Vec<String>,
}

impl Filter {
    fn takes(&self, name: &str) -> bool {
        let has = |words: &[String]| words.iter().any(|word| name.contains(word.as_str()));
        !has(&self.without) && (self.only.is_empty() || has(&self.only))
    }
}

/// Seed of the separate random numbers of [`Fault::draw_later`].
const LATER_SALT: u64 = 0x6c61_7465;

/// Seed of the separate random numbers of [`Plan::draw_settings`].
const SETTINGS_SALT: u64 = 0x7365_7474;

/// Mean number of cache changes per later fault: one of this many changes is replaced by another
/// fault ([`Fault::draw_later`]).
const LATER_ONE_IN: u64 = 3;

/// Mean number of cache changes per killed `qemu-nbd` in a round with an image.
const IMAGE_SERVER_ONE_IN: u64 = 3;

/// Maximum number of random draws until a selected fault is found.
const DRAWS: usize = 1000;

impl Plan {
    /// Generates the plan of round `round` of the run with `seed`.
    #[must_use]
    pub fn draw(seed: u64, round: u64, filter: &Filter) -> Self {
        let seed = seed ^ (round + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut noise = Noise::new(seed);
        let mut disks: Vec<DiskPlan> = (0..DISKS).map(|at| DiskPlan::draw(&mut noise, at)).collect();
        // These random numbers are separate, so that the other choices of a seed do not depend on
        // this choice.
        let mut sharing = Noise::new(!seed);
        for disk in &mut disks {
            disk.shared = sharing.below(2) == 0 && disk.cache.can_share();
        }
        let load = ms(&mut noise, LOAD_MS.0, LOAD_MS.1);
        let volatile_pool = noise.below(2) == 0;
        let mut faults = Vec::new();
        let mut at = Duration::ZERO;
        loop {
            let pause = ms(&mut noise, 200, 3000);
            at += pause;
            if at > load {
                break;
            }
            let mut drawn = (0..DRAWS).map(|_| Fault::draw(&mut noise, &disks, volatile_pool));
            faults.extend(drawn.find(|fault| filter.takes(fault.name())).map(|fault| (pause, fault)));
        }
        // These random numbers are separate, so that the other choices of a seed do not depend on
        // these faults.
        let mut later = Noise::new(seed ^ LATER_SALT);
        for (_, fault) in &mut faults {
            if matches!(fault, Fault::Change { .. }) && later.below(LATER_ONE_IN) == 0 {
                let drawn = Fault::draw_later(&mut later, &disks, volatile_pool);
                if let Some(drawn) = drawn.filter(|drawn| filter.takes(drawn.name())) {
                    *fault = drawn;
                }
            }
        }
        let shards = 1 + noise.below(2);
        let backing_wait_ms = pick(&mut noise, &[2_000, 30_000, 30_000]);
        let mut plan = Plan {
            seed,
            disks,
            volatile_pool,
            shards,
            ring: "io_uring",
            small_pool: false,
            backing_wait_ms,
            load,
            headers: filter.takes("headers"),
            faults,
        };
        plan.draw_settings(filter);
        plan
    }

    /// Draws the settings that were added last. These random numbers are separate, so that the other
    /// choices of a seed do not depend on these settings.
    fn draw_settings(&mut self, filter: &Filter) {
        let mut noise = Noise::new(self.seed ^ SETTINGS_SALT);
        self.ring = pick(&mut noise, &["io_uring", "io_uring", "io_uring", "threads"]);
        self.small_pool = noise.below(4) == 0;
        if self.small_pool {
            self.disks.iter_mut().for_each(|disk| disk.shared = disk.cache.can_share());
        }
        let file = self.disks.iter().position(|disk| disk.backing == BackingKind::File);
        let kill = file.map(|disk| Fault::KillImageServer { disk });
        if let Some(kill) = kill.filter(|kill| noise.below(2) == 0 && filter.takes(kill.name())) {
            self.use_image(&kill, &mut noise);
        }
    }

    /// Replaces the file of a disk by an image. `kill` is the fault that kills the image's server.
    /// This fault replaces some changes of caches, and all changes of the file while the daemon is
    /// down: the test cannot change the image.
    fn use_image(&mut self, kill: &Fault, noise: &mut Noise) {
        let Fault::KillImageServer { disk: image } = *kill else { unreachable!("not a fault of an image") };
        self.disks[image].backing = BackingKind::Image;
        for (_, fault) in &mut self.faults {
            let is_replaced = match fault {
                Fault::ChangeOffline { disk, .. } => *disk == image,
                Fault::Change { .. } => noise.below(IMAGE_SERVER_ONE_IN) == 0,
                _ => false,
            };
            if is_replaced {
                *fault = kill.clone();
            }
        }
    }

    /// Returns the size of each of the two devices of the pool, as in hob.toml. If caches share the
    /// pool, the size is small, so that the caches compete for space. The data of all disks fills a
    /// small pool twice.
    #[must_use]
    pub fn pool_device(&self) -> &'static str {
        match (self.small_pool, self.disks.iter().any(|disk| disk.shared)) {
            (true, _) => "16M",
            (false, true) => "32M",
            (false, false) => "96M",
        }
    }

    /// Returns the plan as JSON for the log.
    #[must_use]
    pub fn describe(&self) -> Value {
        let disks: Vec<Value> = self
            .disks
            .iter()
            .map(|disk| {
                json!({
                    "backing": format!("{:?}", disk.backing), "cache": disk.cache.name, "guests": disk.guests,
                    "vhost_user": disk.vhost_user, "shared": disk.shared,
                })
            })
            .collect();
        let faults: Vec<String> =
            self.faults.iter().map(|(pause, fault)| format!("+{} ms {fault:?}", pause.as_millis())).collect();
        json!({
            "seed": self.seed, "disks": disks, "volatile_pool": self.volatile_pool, "shards": self.shards, "ring": self.ring,
            "small_pool": self.small_pool, "pool_device": self.pool_device(), "backing_wait_ms": self.backing_wait_ms,
            "load_ms": self.load.as_millis() as u64, "faults": faults,
        })
    }
}

impl DiskPlan {
    /// Returns a random plan for disk number `at` of a round. Two disks of each round are on
    /// volatile servers. At least one disk uses write-back and one write-through.
    fn draw(noise: &mut Noise, at: usize) -> Self {
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

impl Fault {
    fn draw(noise: &mut Noise, disks: &[DiskPlan], volatile_pool: bool) -> Self {
        let with = |fits: &dyn Fn(&DiskPlan) -> bool| -> Vec<usize> {
            (0..disks.len()).filter(|at| fits(&disks[*at])).collect()
        };
        let servers = with(&|disk| matches!(disk.backing, BackingKind::VolatileNbd { .. }));
        let misbehaving = with(&|disk| disk.backing.misbehaves());
        let clean = with(&|disk| !disk.cache.writes_back && disk.backing != BackingKind::Loop);
        let cached = with(&|disk| disk.cache.settings.is_some());
        let (server, disk) = (pick(noise, &servers), pick(noise, &misbehaving));
        let away = ms(noise, 0, 1500);
        let time = ms(noise, 300, 3000);
        match noise.below(40) {
            0 | 1 => Fault::Kill { down: ms(noise, 0, 800) },
            2 => Fault::KillTwice { after: ms(noise, 0, 500) },
            3 | 4 => Fault::Stop { time: ms(noise, 100, 2500) },
            5..=7 => Fault::Upgrade,
            8 => Fault::Restart,
            9..=11 => Fault::Crash { disk: server, away },
            12 => Fault::Cut { disk: server, away },
            13 => Fault::ShutDown { disk: server, refuses: ms(noise, 50, 500), away },
            14 => Fault::Hang { disk, time },
            15 => Fault::Flood { disk },
            16 => Fault::Slow { disk, delay: ms(noise, 10, 300), time },
            17..=20 => Fault::Errors {
                disk,
                operation: pick(
                    noise,
                    &[Operation::Read, Operation::Write, Operation::Flush, Operation::Trim],
                ),
                from: noise.below(16),
                sixteenths: 1 + noise.below(16),
                error: pick(noise, &[5, 28, 12]),
                time,
            },
            21 | 22 => Fault::LosingFlush { disk },
            23 => Fault::KillAndCrash { disk: server },
            24 | 25 => Fault::ChangeOffline { disk: pick(noise, &clean), kill: noise.below(2) == 0 },
            26 => Fault::Interruptions,
            27 | 28 => Fault::PowerCut,
            29 => Fault::MemoryLimit { headroom_kib: 64 << noise.below(8), time },
            30 if volatile_pool => {
                Fault::FlashSlow { device: noise.below(2) as usize, delay: ms(noise, 5, 100), time }
            }
            31 if volatile_pool => Fault::FlashHang { device: noise.below(2) as usize, time },
            32 => Fault::FlashRemoved { device: noise.below(2) as usize },
            _ => Fault::Change { disk: pick(noise, &cached), change: Change::draw(noise) },
        }
    }

    /// Draws one of the faults that replace some changes of caches. Returns `None` if the drawn
    /// fault is impossible in this round.
    fn draw_later(noise: &mut Noise, disks: &[DiskPlan], volatile_pool: bool) -> Option<Self> {
        let time = ms(noise, 300, 3000);
        match noise.below(3) {
            0 if volatile_pool => Some(Fault::FlashErrors {
                device: noise.below(2) as usize,
                operation: pick(noise, &[Operation::Write, Operation::Flush]),
                error: pick(noise, &[5, 28]),
                time,
            }),
            1 => Some(Fault::StateFull { time, kill: noise.below(2) == 0 }),
            _ => {
                let disk = disks.iter().position(|disk| disk.backing == BackingKind::Loop)?;
                Some(Fault::LoopDetached { disk, away: time })
            }
        }
    }

    /// Returns the name of the fault in the report.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Fault::Kill { .. } => "daemon SIGKILL",
            Fault::KillTwice { .. } => "daemon SIGKILL while it starts",
            Fault::Restart => "daemon SIGTERM and start",
            Fault::Stop { .. } => "daemon SIGSTOP",
            Fault::Upgrade => "daemon upgrade (SIGHUP)",
            Fault::Crash { .. } => "backing loses its cache",
            Fault::Cut { .. } => "backing connection cut",
            Fault::ShutDown { .. } => "backing shuts down",
            Fault::Hang { .. } => "backing hangs",
            Fault::Flood { .. } => "backing hangs under a flood of requests",
            Fault::Slow { .. } => "backing is slow",
            Fault::Errors { .. } => "backing errors",
            Fault::LosingFlush { .. } => "backing flush fails and loses data",
            Fault::KillAndCrash { .. } => "SIGKILL, backing loses its cache",
            Fault::PowerCut => "power cut",
            Fault::MemoryLimit { .. } => "daemon out of memory",
            Fault::Interruptions => "daemon interrupted",
            Fault::FlashSlow { .. } => "flash is slow",
            Fault::FlashHang { .. } => "flash hangs",
            Fault::FlashErrors { .. } => "flash errors",
            Fault::StateFull { .. } => "state directory is full",
            Fault::LoopDetached { .. } => "loop device detached",
            Fault::FlashRemoved { .. } => "flash device removed and returned",
            Fault::KillImageServer { .. } => "qemu-nbd SIGKILL",
            Fault::Change { change, .. } => change.name(),
            Fault::ChangeOffline { .. } => "backing changed while hob is down",
        }
    }
}

impl Change {
    fn draw(noise: &mut Noise) -> Self {
        match noise.below(12) {
            0..=2 => Change::Resize(pick(noise, &[4, 6, 8, 12])),
            3 => Change::Clear,
            4..=6 => Change::Drain,
            7 | 8 => Change::WriteThrough,
            9 => Change::Disable,
            10 => Change::Policy(pick(noise, &["lru", "s3-fifo", "clock", "2q"])),
            _ => Change::BlockSize(pick(noise, &["4K", "16K", "64K"])),
        }
    }

    fn name(self) -> &'static str {
        match self {
            Change::Resize(_) => "cache resized",
            Change::Clear => "cache cleared",
            Change::Drain => "cache drained",
            Change::WriteThrough => "cache mode changed",
            Change::Disable => "cache disabled and enabled",
            Change::Policy(_) => "cache policy changed",
            Change::BlockSize(_) => "cache block size changed",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draw(seed: u64, round: u64) -> Plan {
        Plan::draw(seed, round, &Filter::default())
    }

    #[test]
    fn a_filter_keeps_the_matching_rounds() {
        let filter = Filter { only: vec!["SIGKILL".to_owned()], without: vec!["starts".to_owned()] };
        let plan = Plan::draw(1, 1, &filter);
        assert!(plan.faults.len() > 5 && !plan.headers);
        assert!(
            plan.faults.iter().all(|(_, it)| it.name().contains("SIGKILL") && !it.name().contains("starts"))
        );
    }

    #[test]
    fn a_seed_determines_the_plan() {
        let (one, two) = (draw(5, 1).describe(), draw(5, 1).describe());
        assert_eq!(one, two);
        assert_ne!(one, draw(5, 2).describe());
        assert_ne!(one, draw(6, 1).describe());
    }

    #[test]
    fn each_ring_and_each_size_of_the_pool_comes() {
        let plans: Vec<Plan> = (0..300).map(|round| draw(1, round)).collect();
        let count = |fits: &dyn Fn(&Plan) -> bool| plans.iter().filter(|plan| fits(plan)).count();
        for ring in ["io_uring", "threads"] {
            assert!(count(&|plan| plan.ring == ring) > 40, "{ring}");
        }
        for size in ["16M", "32M", "96M"] {
            assert!(count(&|plan| plan.pool_device() == size) > 5, "{size}");
        }
        let alone = |disk: &DiskPlan| disk.cache.can_share() && !disk.shared;
        assert_eq!(count(&|plan| plan.small_pool && plan.disks.iter().any(alone)), 0);
    }

    #[test]
    fn an_image_is_used_unless_a_filter_leaves_out_its_fault() {
        let image = |plan: &Plan| plan.disks.iter().position(|disk| disk.backing == BackingKind::Image);
        let plans: Vec<Plan> = (0..300).map(|round| draw(1, round)).collect();
        assert!(plans.iter().filter(|plan| image(plan).is_some()).count() > 40);
        for plan in &plans {
            let image = image(plan);
            for (_, fault) in &plan.faults {
                match fault {
                    Fault::KillImageServer { disk } => assert_eq!(Some(*disk), image),
                    Fault::ChangeOffline { disk, .. } => assert_ne!(Some(*disk), image),
                    _ => {}
                }
            }
        }
        let without = Filter { only: Vec::new(), without: vec!["qemu-nbd".to_owned()] };
        assert!((0..300).all(|round| image(&Plan::draw(1, round, &without)).is_none()));
    }

    #[test]
    fn every_round_writes_back_and_through_and_every_fault_comes() {
        let mut names = std::collections::BTreeSet::new();
        let mut caches = std::collections::BTreeSet::new();
        for round in 0..300 {
            let plan = draw(1, round);
            assert!(plan.disks[0].cache.writes_back && !plan.disks[1].cache.writes_back);
            names.extend(plan.faults.iter().map(|(_, fault)| fault.name()));
            caches.extend(plan.disks.iter().map(|disk| disk.cache.name));
        }
        assert_eq!(names.len(), 32, "{names:?}");
        assert_eq!(caches.len(), CACHES.len());
    }
}
