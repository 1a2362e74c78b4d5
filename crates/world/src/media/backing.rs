//! A simulated backing: its content, and the part of the content that survives a power cut.

use std::collections::BTreeMap;

use hob_engine::io::{Durability, Io, IoError, IoOp, Zeroing};
use hob_engine::units::IoId;

use super::medium::{Flushing, Medium};
use super::{Crash, DeviceDefect, Done, Moment, Transfer};
use crate::content::{self, Tag, ZERO};
use crate::rng::SimRng;
use crate::{Violation, ensure};

/// Fault rates of a backing, per mille of its I/Os.
#[derive(Clone, Copy, Debug, Default)]
pub struct BackingFaults {
    /// Share of reads that fail, per mille.
    pub read_error: u32,
    /// Share of writes that fail after they took effect in part, per mille.
    pub write_error: u32,
    /// Share of flushes that fail, per mille.
    pub flush_error: u32,
}

/// One simulated backing and its I/O in flight.
#[derive(Debug)]
pub struct Backing {
    medium: Medium,
    power_cuts: u32,
    in_flight: BTreeMap<IoId, (Transfer, Vec<Flushing>)>,
    faults: BackingFaults,
    defect: Option<DeviceDefect>,
    late: Vec<(usize, Tag)>,
    /// The medium's stamp when a process was killed. `None` after the next successful flush.
    killed_at: Option<u32>,
    /// True if several hosts use the backing.
    shared: bool,
    /// True if a failed flush loses a random part (none, some or all) of the data that is not
    /// durable.
    loses: bool,
}

/// Returns the host that submitted an I/O to a shared backing. The host is in the highest bits of
/// the I/O's id.
fn host(id: IoId) -> u32 {
    id.0 >> HOST_SHIFT
}

/// Position of the lowest bit of the host number in the I/O ids of a [shared](Backing::share)
/// backing.
pub const HOST_SHIFT: u32 = 28;

impl Backing {
    /// Creates a backing with this durable content.
    pub fn new(content: Vec<Tag>, faults: BackingFaults, defect: Option<DeviceDefect>) -> Self {
        let medium = Medium::new(content);
        Backing {
            medium,
            power_cuts: 0,
            in_flight: BTreeMap::new(),
            faults,
            defect,
            late: vec![],
            killed_at: None,
            shared: false,
            loses: false,
        }
    }

    /// Lets several hosts use the backing. The I/O ids distinguish the hosts. Overlapping I/Os of
    /// different hosts are permitted if one of them is a read, because an engine orders only its
    /// own I/Os.
    pub fn share(&mut self) {
        self.shared = true;
    }

    /// Makes each failed flush lose a random part (none, some or all) of the data that is not
    /// durable.
    pub fn lose_at_failed_flushes(&mut self) {
        self.loses = true;
    }

    /// Returns true if a failed flush of the backing loses data.
    pub fn loses(&self) -> bool {
        self.loses
    }

    /// Restarts the backing, which loses a random part (none, some or all) of the data that is not
    /// durable.
    pub fn lose(&mut self, rng: &mut SimRng) {
        self.medium.lose(rng);
    }

    /// Shuts the backing down cleanly: all its data becomes durable.
    pub fn shut_down(&mut self) {
        let everything = 0..self.now().len();
        self.medium.secure(everything);
    }

    /// Returns the content that reads of the backing return.
    pub fn now(&self) -> &[Tag] {
        self.medium.now()
    }

    /// Returns the version number of the backing's content. Each change by any writer and each
    /// power cut increases this number.
    pub fn version(&self) -> u64 {
        u64::from(self.power_cuts) << 32 | u64::from(self.medium.stamp())
    }

    /// Returns a number that is larger for units of 512 bytes that were changed later. A power cut
    /// resets all of these numbers.
    pub fn changed_at(&self, unit: usize) -> u32 {
        self.medium.changed_at(unit)
    }

    /// Returns the content that the backing certainly keeps in a power cut.
    pub fn durable(&self) -> &[Tag] {
        self.medium.durable()
    }

    /// Submits an I/O to the backing. Returns a [`Violation`] if a write overlaps another I/O in
    /// flight: the engine must send such I/Os one after the other.
    pub fn submit(&mut self, io: Io, payload: Vec<Tag>, rng: &mut SimRng) -> Result<(), Violation> {
        let mut transfer = Transfer::new(io, payload, rng);
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
        if io.op != IoOp::Read && self.defect != Some(DeviceDefect::EarlyAcknowledgement) {
            self.apply(&transfer, Moment::Submission, rng);
        }
        self.in_flight.insert(io.id, (transfer, flushing));
        Ok(())
    }

    fn apply(&mut self, change: &Transfer, when: Moment, rng: &mut SimRng) {
        let mut end = change.units().end;
        if self.defect == Some(DeviceDefect::HalfWrite) && change.count > 1 {
            end -= change.count / 2;
        }
        // A discard leaves some units unchanged, as if the backing could not deallocate them.
        let spared = |unit: &usize| change.io.op == IoOp::Discard && change.mix >> 8 & 3 < (*unit as u64 & 3);
        for unit in change.moving(when).filter(|unit| *unit < end && !spared(unit)) {
            self.medium.put(unit, change.tags[unit - change.first], rng);
        }
    }

    /// Completes an I/O of the backing.
    pub fn complete(&mut self, id: IoId, rng: &mut SimRng) -> Done {
        let (mut transfer, mut flushing) = self.in_flight.remove(&id).expect("in flight");
        let io = transfer.io;
        let result = self.result(io.op, rng);
        match (io.op, result) {
            (IoOp::Read, Ok(())) => {
                for unit in transfer.moving(Moment::Completion) {
                    transfer.tags[unit - transfer.first] = self.now()[unit];
                }
            }
            (IoOp::Read, Err(_)) => transfer.tags.fill_with(|| content::garbage(rng.roll())),
            (IoOp::Flush, Ok(())) if self.defect == Some(DeviceDefect::EmptyFlush) => {}
            (IoOp::Flush, Ok(())) => {
                let killed_at = self.killed_at.take();
                if self.defect == Some(DeviceDefect::EmptyFirstFlush) {
                    flushing.retain(|(_, _, stamp)| killed_at.is_none_or(|killed_at| *stamp > killed_at));
                }
                self.medium.settle(&flushing);
            }
            (_, Ok(())) if self.defect == Some(DeviceDefect::EarlyAcknowledgement) => {
                for (unit, tag) in std::mem::take(&mut self.late) {
                    self.medium.put(unit, tag, rng);
                }
                self.late = transfer.units().zip(transfer.tags.iter().copied()).collect();
            }
            (_, Ok(())) => self.apply(&transfer, Moment::Completion, rng),
            (IoOp::Flush, Err(_)) if self.loses => self.medium.lose(rng),
            (_, Err(_)) => {}
        }
        if (io.op, result) == (IoOp::Write(Durability::Durable), Ok(()))
            && self.defect != Some(DeviceDefect::IgnoredFua)
        {
            self.medium.secure(transfer.units());
        }
        Done { io, result, tags: transfer.tags, sums: vec![] }
    }

    fn result(&self, op: IoOp, rng: &mut SimRng) -> Result<(), IoError> {
        let fast = matches!(op, IoOp::WriteZeroes(Zeroing::FastMayUnmap | Zeroing::FastKeepAllocated));
        let error = match op {
            IoOp::Read => self.faults.read_error,
            IoOp::Flush => self.faults.flush_error,
            _ => self.faults.write_error,
        };
        if fast && rng.chance(300) {
            Err(IoError::Unsupported)
        } else if rng.chance(error) {
            Err(rng.pick(&[IoError::Failed, IoError::Failed, IoError::NoSpace]))
        } else {
            Ok(())
        }
    }

    /// Simulates a program other than hob that writes a unit. No engine sees the write.
    pub fn write_behind(&mut self, unit: usize, tag: Tag, rng: &mut SimRng) {
        self.medium.put(unit, tag, rng);
    }

    /// Returns a random content that the backing may have after a power cut.
    pub fn power_cut(&self, rng: &mut SimRng) -> Vec<Tag> {
        self.medium.after_power_cut(rng)
    }

    /// Ends an I/O of a crashed host. A random part of a write (none, some or all of it) reaches
    /// the backing.
    pub fn abandon(&mut self, id: IoId, rng: &mut SimRng) {
        let (transfer, _) = self.in_flight.remove(&id).expect("in flight");
        if transfer.io.op != IoOp::Read && transfer.io.op != IoOp::Flush {
            super::abandon(&transfer, &mut self.medium, rng);
        }
    }

    /// Ends all I/O in flight after a kill or a power cut. A random part of each write (none, some
    /// or all of it) reaches the backing.
    pub fn crash(&mut self, crash: Crash, rng: &mut SimRng) {
        for (transfer, _) in std::mem::take(&mut self.in_flight).into_values() {
            if transfer.io.op != IoOp::Read && transfer.io.op != IoOp::Flush {
                super::abandon(&transfer, &mut self.medium, rng);
            }
        }
        self.late.clear();
        self.killed_at = (crash == Crash::Kill).then(|| self.medium.stamp());
        if crash == Crash::PowerCut {
            self.medium.cut_power(rng);
            self.power_cuts += 1;
        }
    }

    /// Appends units of 512 bytes with these tags at the end of the backing.
    pub fn grow(&mut self, tags: &[Tag]) {
        self.medium.grow(tags);
    }

    /// Writes units of 512 bytes durably, as a foreign writer does, while no engine serves the
    /// disk.
    pub fn replace(&mut self, first: usize, tags: &[Tag]) {
        assert!(self.in_flight.is_empty(), "a foreign writer must not write while I/O is in flight");
        self.medium.replace(first, tags);
    }

    /// Sets the fault rates of the backing.
    pub fn set_faults(&mut self, faults: BackingFaults) {
        self.faults = faults;
    }

    /// Returns true if a flush of the backing may fail.
    pub fn may_refuse_flushes(&self) -> bool {
        self.faults.flush_error > 0
    }

    /// Sets all fault rates of the backing to 0.
    pub fn soothe(&mut self) {
        self.set_faults(BackingFaults::default());
    }
}
