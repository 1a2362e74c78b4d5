//! A host: its durable state, its process, and its clock.

use std::collections::{BTreeMap, BTreeSet};

use hob_engine::cluster::{
    Found, LeaseId, LeaseManager, LeaseTerm, Member, OwnershipRecord, OwnershipState, SecondCopy, Waiting,
};
use hob_engine::units::Instant;

use super::adopt::Stage;
use super::copies::{Copy, Lent};

/// Unit of clock rates: parts per million.
const PPM: u64 = 1_000_000;

/// State that survives the process.
#[derive(Clone, Debug, Default)]
pub(super) struct Kept {
    /// The generation in which the disk was served last.
    pub(super) known: Option<u64>,
    /// Flash content: values, and whether they are dirty.
    pub(super) cache: BTreeMap<u32, (u64, bool)>,
    /// The cache writes back.
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
    /// Not this host's.
    Closed,
    /// Taken, and being opened.
    Opening,
    /// Served, as far as the lease goes.
    Serving,
    /// The lease under which it was taken has ended: it is taken again, or lost.
    Doubted,
    /// Given back when nothing is in flight.
    Leaving,
    /// Held for a failover: its replica goes to the backing.
    Adopting,
}

/// Purpose of a request to the store.
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

/// From which host a disk is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum From {
    Nobody,
    Itself,
    Vanished,
    Dirty,
}

/// Operation on a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Read,
    /// Write to the backing.
    Write(u64),
    /// Write to flash as dirty data.
    WriteBack(u64),
    Destage(u64),
    /// Write to the replica, where it is missing.
    Double(u64),
}

/// A request in flight.
#[derive(Clone, Copy, Debug)]
pub(super) struct Op {
    pub(super) kind: Kind,
    pub(super) block: u32,
}

/// State of a disk in a process.
#[derive(Debug)]
pub(super) struct Local {
    pub(super) seat: OwnershipState,
    pub(super) phase: Phase,
    pub(super) title: Option<Found<OwnershipRecord>>,
    /// The lease under which it was taken.
    pub(super) term: Option<LeaseTerm>,
    pub(super) asked: Option<(u64, Purpose)>,
    pub(super) ops: BTreeMap<u64, Op>,
    pub(super) busy: BTreeSet<u32>,
    /// Changes, and replies with their values, that wait for the lease.
    pub(super) held_changes: Vec<u64>,
    pub(super) held_answers: Vec<(u64, u64)>,
    pub(super) force: bool,
    pub(super) not_before: Instant,
    /// The mode changes once the record says so.
    pub(super) mode_due: bool,
    /// No data becomes dirty any more.
    pub(super) draining: bool,
    /// The present record is unknown.
    pub(super) look_again: bool,
    /// Number of the backing's open.
    pub(super) epoch: u64,
    pub(super) copy: Copy,
    /// Phase of a failover.
    pub(super) stage: Stage,
    /// Writes of the failover that were sent and have not arrived.
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

/// One host.
#[derive(Debug)]
pub(super) struct Host {
    pub(super) me: Member,
    /// Number of its processes.
    pub(super) life: u32,
    pub(super) up: bool,
    /// Stopped until then.
    pub(super) paused_until: Instant,
    /// Its shard hangs.
    pub(super) is_hung: bool,
    pub(super) no_store_until: Instant,
    pub(super) no_backing_until: Instant,
    /// It does not reach the lending host.
    pub(super) no_peer_until: Instant,
    /// Wall clock minus the lease clock, nanoseconds.
    pub(super) wall_ahead: i64,
    slow_ppm: u64,
    pub(super) kept: Vec<Kept>,
    /// Replicas that it keeps, by owner and disk.
    pub(super) lent: BTreeMap<(usize, usize), Lent>,
    pub(super) keeper: LeaseManager,
    /// The newest lease term, if there is one.
    pub(super) term: Option<LeaseTerm>,
    /// When the lease manager must be called next.
    pub(super) keep_at: Instant,
    pub(super) local: Vec<Local>,
    /// Scheduled attempts to take disks.
    pub(super) waiting: Waiting,
}

/// Creates the schedule of a new process, for all disks.
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

    /// A new process.
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

    /// Replaces the host by another one with the same name and settings, without its data.
    pub(super) fn be_new(&mut self) {
        self.me.id.push('+');
        self.lent.clear();
        for kept in &mut self.kept {
            *kept = Kept { writes_back: kept.writes_back, ..Kept::default() };
        }
    }

    /// Returns the host's clock, which is slow and has its own origin.
    pub(super) fn clock(&self, now: Instant) -> Instant {
        Instant((u128::from(now.0) * u128::from(PPM - self.slow_ppm) / u128::from(PPM)) as u64)
    }

    /// Returns the true time at which the host's clock shows `clock`.
    pub(super) fn true_time(&self, clock: Instant) -> Instant {
        Instant((u128::from(clock.0) * u128::from(PPM) / u128::from(PPM - self.slow_ppm)) as u64 + 2)
    }
}
