//! A simulated cluster host: the host's durable state, its simulated hob process and its clock.

use std::collections::{BTreeMap, BTreeSet};

use hob_engine::cluster::{
    Found, LeaseId, LeaseManager, LeaseTerm, Member, OwnershipRecord, OwnershipState, SecondCopy, Waiting,
};
use hob_engine::units::Instant;

use super::adopt::Stage;
use super::copies::{Copy, Lent};

/// Unit of clock rates: parts per million.
const PPM: u64 = 1_000_000;

/// State of a disk at a host. This state survives the end of the host's process.
#[derive(Clone, Debug, Default)]
pub(super) struct Kept {
    /// Generation in which the host last served the disk.
    pub(super) known: Option<u64>,
    /// Cached blocks in the host's flash: value, and true if the block is dirty.
    pub(super) cache: BTreeMap<u32, (u64, bool)>,
    /// True if the disk's cache is in write-back mode.
    pub(super) writes_back: bool,
}

impl Kept {
    pub(super) fn is_dirty(&self) -> bool {
        self.cache.values().any(|(_, dirty)| *dirty)
    }
}

/// Phase of a disk at a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// The host does not serve the disk.
    Closed,
    /// The host has acquired the disk and is opening it.
    Opening,
    /// The host serves the disk while its lease is valid.
    Serving,
    /// The lease under which the disk was acquired has ended. The host acquires the disk again or
    /// loses it.
    Doubted,
    /// The host gives the disk back when no request is in flight.
    Leaving,
    /// The host has locked the disk for a failover, and writes the replica's dirty data to the
    /// backing.
    Adopting,
}

/// Purpose of a request to etcd.
#[derive(Clone, Debug)]
pub(super) enum Purpose {
    OwnershipSnapshot,
    Take { title: OwnershipRecord, lease: LeaseId, continued: bool, from: From },
    Mark { dirty: bool },
    SayCopy(Option<SecondCopy>),
    GiveBack,
    Adopt { title: Found<OwnershipRecord>, lease: LeaseId },
    BeginAdopting(OwnershipRecord),
    EndAdopting(OwnershipRecord),
    LeaveAlone,
}

/// Previous owner of a disk that a host acquires. A disk has no previous owner if no host ever
/// acquired it, or if the last owner gave it back. Otherwise the previous owner is the acquiring
/// host itself, a failed host, or, in a forced takeover, a host with dirty data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum From {
    Nobody,
    Itself,
    Vanished,
    Dirty,
}

/// Operation of a request on one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Read,
    /// Writes this value to the backing.
    Write(u64),
    /// Writes this value to flash as dirty data.
    WriteBack(u64),
    Destage(u64),
    /// Writes this value of a dirty block to the replica, which does not have it yet.
    Double(u64),
}

/// A request of a guest or of hob that is in flight at a host.
#[derive(Clone, Copy, Debug)]
pub(super) struct Op {
    pub(super) kind: Kind,
    pub(super) block: u32,
}

/// State of a disk in a host's process.
#[derive(Debug)]
pub(super) struct Local {
    pub(super) seat: OwnershipState,
    pub(super) phase: Phase,
    pub(super) title: Option<Found<OwnershipRecord>>,
    /// Lease term under which the disk was acquired.
    pub(super) term: Option<LeaseTerm>,
    pub(super) asked: Option<(u64, Purpose)>,
    pub(super) ops: BTreeMap<u64, Op>,
    pub(super) busy: BTreeSet<u32>,
    /// Operations whose writes to the backing wait until the lease is known to be valid.
    /// `held_answers` has the operations whose replies wait for the same event, and the values of
    /// the replies.
    pub(super) held_changes: Vec<u64>,
    pub(super) held_answers: Vec<(u64, u64)>,
    pub(super) force: bool,
    pub(super) not_before: Instant,
    /// True if the host changes the cache's mode as soon as the ownership record permits the new
    /// mode.
    pub(super) mode_due: bool,
    /// True if the cache is draining: no data becomes dirty any more.
    pub(super) draining: bool,
    /// True if the host must read the current ownership record again.
    pub(super) look_again: bool,
    /// Value of the backing's `epoch` when this host opened the backing.
    pub(super) epoch: u64,
    pub(super) copy: Copy,
    /// Phase of the failover, if one is in progress.
    pub(super) stage: Stage,
    /// Operations that write dirty data of the replica to the backing during a failover, and have
    /// not reached the backing yet.
    pub(super) landing: BTreeSet<u64>,
}

impl Local {
    pub(super) fn new(seat: OwnershipState) -> Self {
        Local {
            seat,
            phase: Phase::Closed,
            title: None,
            term: None,
            asked: None,
            ops: BTreeMap::new(),
            busy: BTreeSet::new(),
            held_changes: Vec::new(),
            held_answers: Vec::new(),
            force: false,
            not_before: Instant(0),
            mode_due: false,
            draining: false,
            look_again: false,
            epoch: 0,
            copy: Copy::default(),
            stage: Stage::Begins,
            landing: BTreeSet::new(),
        }
    }

    pub(super) fn generation(&self) -> u64 {
        self.title.as_ref().map_or(0, |title| title.value.generation)
    }
}

/// A simulated cluster host.
#[derive(Debug)]
pub(super) struct Host {
    pub(super) me: Member,
    /// Number of times that the host's process was started again.
    pub(super) life: u32,
    pub(super) up: bool,
    /// Time until which the host's process is paused.
    pub(super) paused_until: Instant,
    /// True if a shard of the host's process hangs.
    pub(super) is_hung: bool,
    pub(super) no_store_until: Instant,
    pub(super) no_backing_until: Instant,
    /// Time until which the host cannot reach the host that lends it flash.
    pub(super) no_peer_until: Instant,
    /// Difference between wall clock and lease clock, nanoseconds.
    pub(super) wall_ahead: i64,
    slow_ppm: u64,
    pub(super) kept: Vec<Kept>,
    /// Replicas that the host stores for other hosts, by owner and disk.
    pub(super) lent: BTreeMap<(usize, usize), Lent>,
    pub(super) keeper: LeaseManager,
    /// Newest lease term of the host; `None` before the host has its first lease.
    pub(super) term: Option<LeaseTerm>,
    /// Time at which the lease manager must be called next.
    pub(super) keep_at: Instant,
    pub(super) local: Vec<Local>,
    /// Scheduled attempts to acquire disks.
    pub(super) waiting: Waiting,
}

/// Creates the acquisition schedule of a new process, for all disks.
fn waiting(me: &Member, disks: usize, settle_ns: u64) -> Waiting {
    let mut waiting = Waiting::new(me, settle_ns);
    let names: Vec<String> = (0..disks).map(|disk| disk.to_string()).collect();
    waiting.handle_waits(Instant(0), names.iter().map(String::as_str));
    waiting
}

impl Host {
    pub(super) fn new(number: usize, disks: usize, lease_ns: u64, settle_ns: u64, slow_ppm: u64) -> Self {
        let me = Member { name: format!("host-{number}"), id: format!("id-{number}") };
        Host {
            keeper: LeaseManager::new(me.clone(), lease_ns),
            waiting: waiting(&me, disks, settle_ns),
            me,
            life: 0,
            up: true,
            paused_until: Instant(0),
            is_hung: false,
            no_store_until: Instant(0),
            no_backing_until: Instant(0),
            no_peer_until: Instant(0),
            wall_ahead: 0,
            slow_ppm,
            kept: vec![Kept::default(); disks],
            lent: BTreeMap::new(),
            term: None,
            keep_at: Instant(0),
            local: (0..disks)
                .map(|disk| Local::new(OwnershipState::new(disk.to_string(), settle_ns)))
                .collect(),
        }
    }

    /// Starts a new process of the host.
    pub(super) fn restart(&mut self, lease_ns: u64, settle_ns: u64) {
        self.life += 1;
        (self.up, self.is_hung) = (true, false);
        self.term = None;
        self.keeper = LeaseManager::new(self.me.clone(), lease_ns);
        self.waiting = waiting(&self.me, self.local.len(), settle_ns);
        for (disk, local) in self.local.iter_mut().enumerate() {
            *local = Local::new(OwnershipState::new(disk.to_string(), settle_ns));
        }
    }

    /// Replaces a destroyed host by a new host with the same name and settings and no data.
    pub(super) fn be_new(&mut self) {
        self.me.id.push('+');
        self.lent.clear();
        for kept in &mut self.kept {
            *kept = Kept { writes_back: kept.writes_back, ..Kept::default() };
        }
    }

    /// Returns the host's clock. The clock runs slower than the simulation by `slow_ppm`.
    pub(super) fn clock(&self, now: Instant) -> Instant {
        Instant((u128::from(now.0) * u128::from(PPM - self.slow_ppm) / u128::from(PPM)) as u64)
    }

    /// Returns the simulated time at which the host's clock shows `clock`.
    pub(super) fn true_time(&self, clock: Instant) -> Instant {
        Instant((u128::from(clock.0) * u128::from(PPM) / u128::from(PPM - self.slow_ppm)) as u64 + 2)
    }
}
