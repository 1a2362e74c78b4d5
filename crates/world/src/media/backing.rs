//! A disk's backing: what it holds, and which part of that survives a power cut.

use std::collections::BTreeMap;

use hob_engine::io::{Durability, Io, IoError, IoOp, Zeroing};
use hob_engine::units::IoId;

use super::medium::{Flushing, Medium};
use super::{Crash, Done, Lie, Moment, Transfer};
use crate::content::{self, Tag, ZERO};
use crate::dice::Dice;
use crate::{Violation, ensure};

/// How often something goes wrong, per mille of the I/Os.
#[derive(Clone, Copy, Debug, Default)]
pub struct BackingFaults {
    /// A read fails.
    pub read_error: u32,
    /// A change fails, after it took effect in part.
    pub write_error: u32,
    /// A flush fails.
    pub flush_error: u32,
}

/// One backing and the I/O it has in flight.
#[derive(Debug)]
pub struct Backing {
    medium: Medium,
    power_cuts: u32,
    in_flight: BTreeMap<IoId, (Transfer, Vec<Flushing>)>,
    faults: BackingFaults,
    lie: Option<Lie>,
    late: Vec<(usize, Tag)>,
    /// Several hosts use it.
    shared: bool,
    /// A flush that fails loses any part of what is not durable.
    loses: bool,
}

/// Which host's an I/O of a shared backing is: the highest bits of its name.
fn host(id: IoId) -> u32 {
    id.0 >> HOST_SHIFT
}

/// Names of I/O of different hosts differ above this bit, where a backing is [shared](Backing::share).
pub const HOST_SHIFT: u32 = 28;

impl Backing {
    /// A backing that holds these units, durably.
    pub fn new(content: Vec<Tag>, faults: BackingFaults, lie: Option<Lie>) -> Self {
        let medium = Medium::new(content);
        Backing {
            medium,
            power_cuts: 0,
            in_flight: BTreeMap::new(),
            faults,
            lie,
            late: vec![],
            shared: false,
            loses: false,
        }
    }

    /// Several hosts use it from now on; the names of their I/O tell them apart. What one reads another may change: only the
    /// engine of one host orders these.
    pub fn share(&mut self) {
        self.shared = true;
    }

    /// From now on a flush that fails loses any part of what is not durable.
    pub fn lose_at_failed_flushes(&mut self) {
        self.loses = true;
    }

    /// Does a flush that fails lose something?
    pub fn loses(&self) -> bool {
        self.loses
    }

    /// It restarts: any part of what is not durable is lost.
    pub fn lose(&mut self, dice: &mut Dice) {
        self.medium.lose(dice);
    }

    /// It shuts down cleanly: what it holds is durable.
    pub fn shut_down(&mut self) {
        let everything = 0..self.now().len();
        self.medium.secure(everything);
    }

    /// What it holds.
    pub fn now(&self) -> &[Tag] {
        self.medium.now()
    }

    /// Counts its changes, by anybody; a power cut counts as one.
    pub fn version(&self) -> u64 {
        u64::from(self.power_cuts) << 32 | u64::from(self.medium.stamp())
    }

    /// What it would hold after a power cut, at least.
    pub fn durable(&self) -> &[Tag] {
        self.medium.durable()
    }

    /// Takes an I/O in. Refuses changes that overlap anything: the engine orders these.
    pub fn submit(&mut self, io: Io, payload: Vec<Tag>, dice: &mut Dice) -> Result<(), Violation> {
        let mut transfer = Transfer::new(io, payload, dice);
        ensure!(transfer.units().end <= self.now().len(), "{io:?} is past the disk's end");
        let clash = self.in_flight.values().find(|(other, _)| {
            let reads = io.op == IoOp::Read || other.io.op == IoOp::Read;
            let harmless = reads && (io.op == other.io.op || self.shared && host(io.id) != host(other.io.id));
            transfer.overlaps(other) && !harmless
        });
        ensure!(clash.is_none(), "{io:?} overlaps {clash:?} in flight on the backing");
        let mut flushing = vec![];
        match io.op {
            IoOp::Read => transfer.tags = self.now()[transfer.units()].to_vec(),
            IoOp::Flush => flushing = self.medium.snapshot(),
            IoOp::Discard | IoOp::WriteZeroes(_) => transfer.tags = vec![ZERO; transfer.count],
            IoOp::Write(_) => {}
            IoOp::WriteJournal => return Err(Violation(format!("{io:?} on a backing"))),
        }
        if io.op != IoOp::Read && self.lie != Some(Lie::EarlyAcknowledgement) {
            self.apply(&transfer, Moment::Submission, dice);
        }
        self.in_flight.insert(io.id, (transfer, flushing));
        Ok(())
    }

    fn apply(&mut self, change: &Transfer, when: Moment, dice: &mut Dice) {
        let mut end = change.units().end;
        if self.lie == Some(Lie::HalfWrite) && change.count > 1 {
            end -= change.count / 2;
        }
        // A discard spares what the backing cannot deallocate.
        let spared = |unit: &usize| change.io.op == IoOp::Discard && change.mix >> 8 & 3 < (*unit as u64 & 3);
        for unit in change.moving(when).filter(|unit| *unit < end && !spared(unit)) {
            self.medium.put(unit, change.tags[unit - change.first], dice);
        }
    }

    /// Ends an I/O.
    pub fn complete(&mut self, id: IoId, dice: &mut Dice) -> Done {
        let (mut transfer, flushing) = self.in_flight.remove(&id).expect("in flight");
        let io = transfer.io;
        let result = self.result(io.op, dice);
        match (io.op, result) {
            (IoOp::Read, Ok(())) => {
                for unit in transfer.moving(Moment::Completion) {
                    transfer.tags[unit - transfer.first] = self.now()[unit];
                }
            }
            (IoOp::Read, Err(_)) => transfer.tags.fill_with(|| content::garbage(dice.roll())),
            (IoOp::Flush, Ok(())) if self.lie == Some(Lie::EmptyFlush) => {}
            (IoOp::Flush, Ok(())) => self.medium.settle(&flushing),
            (_, Ok(())) if self.lie == Some(Lie::EarlyAcknowledgement) => {
                for (unit, tag) in std::mem::take(&mut self.late) {
                    self.medium.put(unit, tag, dice);
                }
                self.late = transfer.units().zip(transfer.tags.iter().copied()).collect();
            }
            (_, Ok(())) => self.apply(&transfer, Moment::Completion, dice),
            (IoOp::Flush, Err(_)) if self.loses => self.medium.lose(dice),
            (_, Err(_)) => {}
        }
        if (io.op, result) == (IoOp::Write(Durability::Durable), Ok(())) && self.lie != Some(Lie::IgnoredFua)
        {
            self.medium.secure(transfer.units());
        }
        Done { io, result, tags: transfer.tags, sums: vec![] }
    }

    fn result(&self, op: IoOp, dice: &mut Dice) -> Result<(), IoError> {
        let fast = matches!(op, IoOp::WriteZeroes(Zeroing::FastMayUnmap | Zeroing::FastKeepAllocated));
        let error = match op {
            IoOp::Read => self.faults.read_error,
            IoOp::Flush => self.faults.flush_error,
            _ => self.faults.write_error,
        };
        if fast && dice.chance(300) {
            Err(IoError::Unsupported)
        } else if dice.chance(error) {
            Err(dice.pick(&[IoError::Failed, IoError::Failed, IoError::NoSpace]))
        } else {
            Ok(())
        }
    }

    /// Somebody else writes a unit, past every cache.
    pub fn write_behind(&mut self, unit: usize, tag: Tag, dice: &mut Dice) {
        self.medium.put(unit, tag, dice);
    }

    /// One of the contents that a power cut at this moment may leave.
    pub fn power_cut(&self, dice: &mut Dice) -> Vec<Tag> {
        self.medium.after_power_cut(dice)
    }

    /// Nobody waits for this I/O any more: its host crashed. Some of it took effect.
    pub fn abandon(&mut self, id: IoId, dice: &mut Dice) {
        let (transfer, _) = self.in_flight.remove(&id).expect("in flight");
        if transfer.io.op != IoOp::Read && transfer.io.op != IoOp::Flush {
            super::abandon(&transfer, &mut self.medium, dice);
        }
    }

    /// Nobody waits for the I/O in flight any more: its process was killed, or the power failed. Some of it took effect.
    pub fn crash(&mut self, crash: Crash, dice: &mut Dice) {
        for (transfer, _) in std::mem::take(&mut self.in_flight).into_values() {
            if transfer.io.op != IoOp::Read && transfer.io.op != IoOp::Flush {
                super::abandon(&transfer, &mut self.medium, dice);
            }
        }
        self.late.clear();
        if crash == Crash::PowerCut {
            self.medium.cut_power(dice);
            self.power_cuts += 1;
        }
    }

    /// Somebody makes it larger: behind its end there are these units now.
    pub fn grow(&mut self, tags: &[Tag]) {
        self.medium.grow(tags);
    }

    /// Somebody else writes units, durably, while no engine looks after the disk.
    pub fn replace(&mut self, first: usize, tags: &[Tag]) {
        assert!(self.in_flight.is_empty(), "written behind a running engine's back");
        self.medium.replace(first, tags);
    }

    /// From now on so much fails.
    pub fn set_faults(&mut self, faults: BackingFaults) {
        self.faults = faults;
    }

    /// May a flush fail?
    pub fn may_refuse_flushes(&self) -> bool {
        self.faults.flush_error > 0
    }

    /// Nothing fails from now on, and nothing is lost.
    pub fn soothe(&mut self) {
        self.set_faults(BackingFaults::default());
    }
}
