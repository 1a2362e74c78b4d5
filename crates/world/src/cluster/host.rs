//! A host: what it keeps, what its process knows, and its clock.

use std::collections::{BTreeMap, BTreeSet};

use hob_engine::cluster::{Found, Keeper, LeaseId, Member, Seat, SecondCopy, Tenure, Title, Waiting};
use hob_engine::units::Instant;

use super::adopt::Stage;
use super::copies::{Copy, Lent};

/// Rates of clocks are parts of this.
const PPM: u64 = 1_000_000;

/// What survives its process.
#[derive(Clone, Debug, Default)]
pub(super) struct Kept {
    /// The generation in which the disk was served last.
    pub(super) known: Option<u64>,
    /// What flash has: values, and whether they are dirty.
    pub(super) cache: BTreeMap<u32, (u64, bool)>,
    /// The cache writes back.
    pub(super) writes_back: bool,
}

impl Kept {
    pub(super) fn is_dirty(&self) -> bool {
        self.cache.values().any(|(_, dirty)| *dirty)
    }
}

/// How far a disk is.
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
    /// It is given back when nothing is in flight.
    Leaving,
    /// Held for the sake of its second copy, which goes to the backing.
    Adopting,
}

/// What a question to the store is for.
#[derive(Clone, Debug)]
pub(super) enum Purpose {
    Look,
    Take { title: Title, lease: LeaseId, continued: bool, from: From },
    Mark { dirty: bool },
    SayCopy(Option<SecondCopy>),
    GiveBack,
    Adopt { title: Found<Title>, lease: LeaseId },
    BeginAdopting(Title),
    EndAdopting(Title),
    LeaveAlone,
}

/// Whom a disk is taken from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum From {
    Nobody,
    Itself,
    Vanished,
    Dirty,
}

/// What is done to a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Read,
    /// To the backing.
    Write(u64),
    /// To flash, where it is dirty.
    WriteBack(u64),
    Destage(u64),
    /// To the second copy, where it is missing.
    Double(u64),
}

/// A request in flight.
#[derive(Clone, Copy, Debug)]
pub(super) struct Op {
    pub(super) kind: Kind,
    pub(super) block: u32,
}

/// A disk, as a process knows it.
#[derive(Debug)]
pub(super) struct Local {
    pub(super) seat: Seat,
    pub(super) phase: Phase,
    pub(super) title: Option<Found<Title>>,
    /// Under which it was taken.
    pub(super) tenure: Option<Tenure>,
    pub(super) asked: Option<(u64, Purpose)>,
    pub(super) ops: BTreeMap<u64, Op>,
    pub(super) busy: BTreeSet<u32>,
    /// Changes that wait for the lease, and answers, with what they say.
    pub(super) held_changes: Vec<u64>,
    pub(super) held_answers: Vec<(u64, u64)>,
    pub(super) force: bool,
    pub(super) not_before: Instant,
    /// The mode is to change, once the title says so.
    pub(super) mode_due: bool,
    /// Nothing is written back any more.
    pub(super) draining: bool,
    /// It is not known what the title says now.
    pub(super) look_again: bool,
    /// Of the backing, as it was opened.
    pub(super) epoch: u64,
    pub(super) copy: Copy,
    /// Of adopting it.
    pub(super) stage: Stage,
    /// What was sent for that and has not arrived.
    pub(super) landing: BTreeSet<u64>,
}

impl Local {
    pub(super) fn new(seat: Seat) -> Self {
        Local {
            seat,
            phase: Phase::Closed,
            title: None,
            tenure: None,
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
    /// Counts its processes.
    pub(super) life: u32,
    pub(super) up: bool,
    /// Stopped until then.
    pub(super) paused_until: Instant,
    /// Its shard does nothing any more.
    pub(super) is_hung: bool,
    pub(super) no_store_until: Instant,
    pub(super) no_backing_until: Instant,
    /// It does not reach who lends to it.
    pub(super) no_peer_until: Instant,
    /// What its wall clock is ahead of its other one, nanoseconds.
    pub(super) wall_ahead: i64,
    slow_ppm: u64,
    pub(super) kept: Vec<Kept>,
    /// What it lends, by borrower and disk.
    pub(super) lent: BTreeMap<(usize, usize), Lent>,
    pub(super) keeper: Keeper,
    /// The newest, if there is one.
    pub(super) tenure: Option<Tenure>,
    /// When the keeper is to be looked at next.
    pub(super) keep_at: Instant,
    pub(super) local: Vec<Local>,
    /// What it has heard of disks.
    pub(super) waiting: Waiting,
}

/// What a process has heard of all disks when it begins.
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
            keeper: Keeper::new(me.clone(), lease_ns),
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
            tenure: None,
            keep_at: Instant(0),
            local: (0..disks).map(|disk| Local::new(Seat::new(disk.to_string(), settle_ns))).collect(),
        }
    }

    /// A new process.
    pub(super) fn restart(&mut self, lease_ns: u64, settle_ns: u64) {
        self.life += 1;
        (self.up, self.is_hung) = (true, false);
        self.tenure = None;
        self.keeper = Keeper::new(self.me.clone(), lease_ns);
        self.waiting = waiting(&self.me, self.local.len(), settle_ns);
        for (disk, local) in self.local.iter_mut().enumerate() {
            *local = Local::new(Seat::new(disk.to_string(), settle_ns));
        }
    }

    /// Another one of the same name and settings has nothing of what this one had.
    pub(super) fn be_new(&mut self) {
        self.me.id.push('+');
        self.lent.clear();
        for kept in &mut self.kept {
            *kept = Kept { writes_back: kept.writes_back, ..Kept::default() };
        }
    }

    /// What its clock shows. It is slow, and shows something else than everybody's.
    pub(super) fn clock(&self, now: Instant) -> Instant {
        Instant((u128::from(now.0) * u128::from(PPM - self.slow_ppm) / u128::from(PPM)) as u64)
    }

    /// When its clock shows that.
    pub(super) fn true_time(&self, clock: Instant) -> Instant {
        Instant((u128::from(clock.0) * u128::from(PPM) / u128::from(PPM - self.slow_ppm)) as u64 + 2)
    }
}
