//! The faults of a plan: their kinds and names, and how a round chooses them.

use std::time::Duration;

use conformance::data::Noise;

use super::{BackingKind, DiskPlan, ms, pick};
use crate::behaviour::Operation;

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

impl Fault {
    pub(super) fn draw(noise: &mut Noise, disks: &[DiskPlan], volatile_pool: bool) -> Self {
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
    pub(super) fn draw_later(noise: &mut Noise, disks: &[DiskPlan], volatile_pool: bool) -> Option<Self> {
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
