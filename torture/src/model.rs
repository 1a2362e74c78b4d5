//! Model of the allowed contents of a region of a disk, per *unit* of 512 bytes.
//!
//! A *version* is the content that one write leaves in a unit. The versions of a unit are numbered
//! from 1, in the order in which the writes began. Version 0 is the content at the start. The
//! *durable version* of a unit is the newest one that a flush or a FUA write has made durable.
//!
//! The model assumes that only one guest writes to the region, and uses these rules:
//!
//! * A read must return the last acknowledged version, unless the content of the unit is
//!   *uncertain*.
//! * A successful FLUSH makes every version durable that was acknowledged before the flush was
//!   sent. A FUA write makes its own version durable.
//! * A failed or interrupted write may or may not have taken effect, so the content of its units is
//!   uncertain.
//! * After [`Model::loss`] and [`Model::interrupt`], a fault may have undone changes that are not
//!   durable. A unit that was written after its durable version then has uncertain content. A read
//!   may return the durable version or any later version of the unit. The next successful FLUSH
//!   must still make the acknowledged versions durable, because the guest got no error.
//! * After [`Model::withdraw`] (a *withdrawal*), the next FLUSH guarantees nothing about earlier
//!   versions. The model is withdrawn after a failed FLUSH reported the fault to the guest, and
//!   when two faults coincided and hob cannot report the combination.
//! * A read makes the content of a unit certain again. Later reads must return the same version, and
//!   the next successful FLUSH makes this version durable. A version that a read has shown as lost
//!   must not reappear. The exception is a read between a loss of the backing and the time at which
//!   hob has noticed the loss, because hob's cache may still return the lost data.
//! * A discarded unit may have zeroes or any of its earlier versions, and its content may change.
//!
//! Requests of a guest that are in flight at the same time do not overlap, unless both are reads.

use std::collections::VecDeque;
use std::fmt;
use std::time::Instant;

use crate::stamp::{Found, Origin, UNIT, identify, image_header, stamp};

/// Content that a write leaves in a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Data that identifies disk, unit and version.
    Data,
    /// Zeroes.
    Zeroes,
    /// Undefined content after a discard.
    Discard,
    /// Header of an image format.
    Header,
}

/// The guest's knowledge about whether a version was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// The guest has received no reply, or a fault has made the reply invalid.
    Open,
    /// The version is acknowledged: the next successful flush makes it durable.
    Acknowledged,
    /// The write failed. The version may appear after any fault until the unit is overwritten
    /// durably.
    Failed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Version {
    number: u32,
    kind: Kind,
    fate: Fate,
}

#[derive(Debug, Clone)]
struct Unit {
    durable: Version,
    /// Versions after the durable version, oldest first.
    recent: Vec<Version>,
    /// Version that reads must return; `None` while the content of the unit is uncertain.
    current: Option<u32>,
    asked: u32,
}

/// A write in flight.
#[derive(Debug, Clone)]
pub struct Write {
    /// First 512-byte unit of the write on the disk.
    pub first: u64,
    /// Versions of consecutive 512-byte units, from `first`.
    versions: Vec<u32>,
    /// Kind of content that the write leaves.
    pub kind: Kind,
    faults: u64,
}

impl Write {
    /// Returns the versions of consecutive 512-byte units, from `first`.
    #[must_use]
    pub fn versions(&self) -> &[u32] {
        &self.versions
    }
}

/// A read in flight.
#[derive(Debug, Clone, Copy)]
pub struct Read {
    /// First 512-byte unit of the read on the disk.
    pub first: u64,
    /// Number of 512-byte units to read.
    pub units: u64,
    faults: u64,
    /// False if the daemon may not have noticed the last loss when the read began.
    is_stable: bool,
}

/// A unit with content that is not allowed.
#[derive(Debug, Clone)]
pub struct Wrong {
    /// Number of the unit on the disk.
    pub unit: u64,
    /// Content that the guest read.
    pub found: Found,
    /// Description of the allowed contents.
    pub allowed: String,
}

/// Result of comparing a read with the model.
#[derive(Debug)]
pub struct Checked {
    /// 512-byte units with content that is not allowed.
    pub wrong: Vec<Wrong>,
    /// Number of 512-byte units whose content was uncertain before the read.
    pub settled: u64,
}

/// Model of a region; see the module documentation.
#[derive(Debug)]
pub struct Model {
    origin: Origin,
    first: u64,
    units: Vec<Unit>,
    /// Acknowledged writes, and versions that a read made certain, that no flush has made durable,
    /// in order.
    unflushed: VecDeque<(u64, u64, Vec<u32>)>,
    acknowledged: u64,
    /// Number of faults so far: losses of data by the backing, kills of the daemon, and
    /// withdrawals. The reply to a request that was in flight during a fault does not decide which
    /// version a unit has.
    faults: u64,
    /// Value of `faults` at the last withdrawal ([`Model::withdraw`]). A flush after the withdrawal
    /// need not make a write durable that was in flight at the withdrawal.
    withdrawn: u64,
    /// True while a failed flush may still report a loss of data by the backing. The flag is
    /// cleared by the first successful flush that was sent after the last fault, or by the second
    /// failed flush that was sent after the last fault.
    loss_unreported: bool,
    /// True if one failed flush has reported a loss of data by the backing since that loss. The
    /// next flush may then fail too, because a flush does not report the loss of changes that ended
    /// while the flush was in flight.
    was_told: bool,
    /// Time by which the daemon has noticed the backing's last loss of data; `None` if there was no
    /// loss. Until then the daemon's cache may return the lost data.
    noticed_by: Option<Instant>,
}

impl Model {
    /// Creates a region of zeroes: `units` units of 512 bytes from unit `first` of the disk.
    #[must_use]
    pub fn new(origin: Origin, first: u64, units: u64) -> Self {
        let durable = Version { number: 0, kind: Kind::Zeroes, fate: Fate::Acknowledged };
        let unit = Unit { durable, recent: Vec::new(), current: Some(0), asked: 0 };
        Self {
            origin,
            first,
            units: vec![unit; units as usize],
            unflushed: VecDeque::new(),
            acknowledged: 0,
            faults: 0,
            withdrawn: 0,
            loss_unreported: false,
            was_told: false,
            noticed_by: None,
        }
    }

    /// Returns the number of the region's first 512-byte unit on the disk.
    #[must_use]
    pub fn first(&self) -> u64 {
        self.first
    }

    /// Returns the number of 512-byte units in the region.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.units.len() as u64
    }

    /// Returns true if the region is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.units.is_empty()
    }

    fn unit(&mut self, unit: u64) -> &mut Unit {
        &mut self.units[(unit - self.first) as usize]
    }

    /// Records the start of a write of `count` units of 512 bytes.
    pub fn begin_write(&mut self, first: u64, count: u64, kind: Kind) -> Write {
        let mut versions = Vec::with_capacity(count as usize);
        for at in first..first + count {
            let unit = self.unit(at);
            unit.asked += 1;
            unit.recent.push(Version { number: unit.asked, kind, fate: Fate::Open });
            unit.current = None;
            versions.push(unit.asked);
        }
        Write { first, versions, kind, faults: self.faults }
    }

    /// Returns the bytes of a data or header write.
    #[must_use]
    pub fn bytes(&self, write: &Write) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(write.versions.len() * UNIT);
        for (unit, version) in (write.first..).zip(&write.versions) {
            match write.kind {
                Kind::Header => bytes.extend(image_header()),
                _ => bytes.extend(stamp(self.origin, unit, *version)),
            }
        }
        bytes
    }

    /// Records that a write was acknowledged. `durable` is true for FUA.
    pub fn acknowledge(&mut self, write: Write, durable: bool) {
        let certain = write.faults == self.faults;
        if write.faults < self.withdrawn && !durable {
            return;
        }
        for (at, version) in (write.first..).zip(&write.versions) {
            let unit = self.unit(at);
            unit.set_fate(*version, Fate::Acknowledged);
            unit.current = (certain || durable).then_some(*version);
        }
        self.acknowledged += 1;
        if durable {
            self.promise(write.first, &write.versions);
        } else {
            self.unflushed.push_back((self.acknowledged, write.first, write.versions));
        }
    }

    /// Records that a write failed.
    pub fn fail(&mut self, write: &Write) {
        for (at, version) in (write.first..).zip(&write.versions) {
            self.unit(at).set_fate(*version, Fate::Failed);
        }
    }

    /// Records the start of a read of `units` units of 512 bytes.
    #[must_use]
    pub fn begin_read(&self, first: u64, units: u64) -> Read {
        let is_stable = self.noticed_by.is_none_or(|by| by <= Instant::now());
        Read { first, units, faults: self.faults, is_stable }
    }

    /// Checks the result of a read. If a unit has wrong content, the model allows this content from
    /// then on, so that the error is reported only once.
    pub fn check(&mut self, read: Read, bytes: &[u8]) -> Checked {
        let certain = read.is_stable && read.faults == self.faults;
        let (mut wrong, mut settled) = (Vec::new(), 0);
        let mut seen = vec![0; read.units as usize];
        let origin = self.origin;
        for (at, bytes) in (0..read.units).zip(bytes.chunks_exact(UNIT)) {
            let number = read.first + at;
            let unit = self.unit(number);
            let found = identify(origin.run, bytes);
            match unit.match_found(origin, number, found) {
                Match::Version(version) if certain => {
                    settled += u64::from(unit.current.is_none());
                    if unit.settle(version) {
                        seen[at as usize] = version;
                    }
                }
                Match::Version(_) | Match::Discarded => {}
                Match::Wrong => {
                    wrong.push(Wrong { unit: number, found, allowed: unit.allowed() });
                    unit.accept(found);
                }
            }
        }
        if seen.iter().any(|version| *version != 0) {
            self.acknowledged += 1;
            self.unflushed.push_back((self.acknowledged, read.first, seen));
        }
        Checked { wrong, settled }
    }

    /// Records the start of a flush. Returns the token for [`Model::flushed`] and
    /// [`Model::flush_failed`].
    #[must_use]
    pub fn begin_flush(&self) -> Flush {
        Flush { acknowledged: self.acknowledged, faults: self.faults }
    }

    /// Records that a flush succeeded.
    pub fn flushed(&mut self, flush: Flush) {
        while self.unflushed.front().is_some_and(|(order, ..)| *order <= flush.acknowledged) {
            let (_, first, versions) = self.unflushed.pop_front().expect("there is a first one");
            self.promise(first, &versions);
        }
        if flush.faults == self.faults {
            (self.loss_unreported, self.was_told) = (false, false);
        }
    }

    /// Records that a flush failed: writes acknowledged since the last successful flush need not
    /// become durable any more. The next flush that is sent after this failure may also fail,
    /// because a flush does not report the loss of changes that ended while the flush was in
    /// flight.
    pub fn flush_failed(&mut self, flush: Flush) {
        if self.was_told && flush.faults == self.faults {
            (self.loss_unreported, self.was_told) = (false, false);
        } else {
            self.was_told |= self.loss_unreported;
        }
        self.withdraw();
    }

    /// Records that the backing may have lost data that is not durable. The guest does not know
    /// about the loss, and the daemon may notice it only at `noticed_by`.
    pub fn loss(&mut self, noticed_by: Instant) {
        (self.loss_unreported, self.was_told) = (true, false);
        self.noticed_by = Some(noticed_by);
        self.interrupt();
    }

    /// Records a fault, such as a kill of the daemon: acknowledged writes that were not flushed may
    /// be undone.
    pub fn interrupt(&mut self) {
        self.faults += 1;
        for unit in self.units.iter_mut().filter(|unit| !unit.recent.is_empty()) {
            unit.current = None;
        }
    }

    /// Records a fault after which the next flush guarantees nothing about earlier writes.
    pub fn withdraw(&mut self) {
        self.interrupt();
        self.withdrawn = self.faults;
        for (_, first, versions) in std::mem::take(&mut self.unflushed) {
            for (at, version) in (first..).zip(versions) {
                self.unit(at).set_fate(version, Fate::Open);
            }
        }
    }

    /// Returns true while a failed flush may still report a loss of data by the backing.
    #[must_use]
    pub fn loss_unreported(&self) -> bool {
        self.loss_unreported
    }

    /// Returns true if all writes to these units have been answered. The daemon repeats unanswered
    /// writes of a vhost-user guest when the guest reconnects.
    #[must_use]
    pub fn is_answered(&self, first: u64, count: u64) -> bool {
        let units = &self.units[(first - self.first) as usize..][..count as usize];
        units.iter().all(|unit| unit.recent.iter().all(|version| version.fate != Fate::Open))
    }

    /// Records a durable write that the test itself makes while the daemon is down. Returns the
    /// bytes that the test must write to the backing.
    pub fn replace(&mut self, first: u64, count: u64) -> Vec<u8> {
        let write = self.begin_write(first, count, Kind::Data);
        let bytes = self.bytes(&write);
        self.acknowledge(write, true);
        bytes
    }

    fn promise(&mut self, first: u64, versions: &[u32]) {
        for (at, version) in (first..).zip(versions) {
            self.unit(at).promise(*version);
        }
    }
}

/// A flush in flight.
#[derive(Debug, Clone, Copy)]
pub struct Flush {
    acknowledged: u64,
    faults: u64,
}

enum Match {
    Version(u32),
    Discarded,
    Wrong,
}

impl Unit {
    fn set_fate(&mut self, number: u32, fate: Fate) {
        if let Some(version) = self.recent.iter_mut().find(|it| it.number == number) {
            version.fate = fate;
        }
    }

    fn promise(&mut self, number: u32) {
        if let Some(version) = self.recent.iter().find(|it| it.number == number) {
            self.durable = *version;
            self.recent.retain(|it| it.number > number);
        }
    }

    /// Returns the versions that a read may return, newest first.
    fn possible(&self) -> impl Iterator<Item = &Version> {
        let all = self.recent.iter().rev().chain([&self.durable]);
        all.filter(|it| self.current.is_none_or(|current| current == it.number))
    }

    fn match_found(&self, origin: Origin, number: u64, found: Found) -> Match {
        let matching = |kind| self.possible().find(|it| it.kind == kind);
        let exact = match found {
            Found::Zeroes => matching(Kind::Zeroes),
            Found::Header => matching(Kind::Header),
            Found::Stamp { disk, unit, version } if disk == origin.disk && unit == number => {
                self.possible().find(|it| it.kind == Kind::Data && it.number == version)
            }
            Found::Stamp { .. } | Found::Garbage(_) => return Match::Wrong,
        };
        // If a newer discard may have left this content, the read does not show whether the newer
        // version was lost.
        let discard = matching(Kind::Discard);
        if let Some(version) = exact
            && discard.is_none_or(|discard| discard.number < version.number)
        {
            return Match::Version(version.number);
        }
        let own = |limit: u32| match found {
            Found::Stamp { version, .. } => version <= limit,
            _ => true,
        };
        match discard {
            Some(discard) if own(discard.number) => Match::Discarded,
            _ => Match::Wrong,
        }
    }

    /// Records that a read returned the version `number` of the unit. Returns true if the next
    /// flush makes this version durable only because a read returned it.
    fn settle(&mut self, number: u32) -> bool {
        self.current = Some(number);
        self.recent.retain(|it| it.number <= number || it.fate == Fate::Failed);
        let seen = self.recent.iter_mut().find(|it| it.number == number);
        let Some(version) = seen.filter(|it| it.fate != Fate::Acknowledged) else { return false };
        version.fate = Fate::Acknowledged;
        true
    }

    /// Adds the unit's wrong content to the allowed contents, so that a violation is reported only
    /// once.
    fn accept(&mut self, found: Found) {
        let kind = match found {
            Found::Zeroes => Kind::Zeroes,
            Found::Header => Kind::Header,
            Found::Stamp { .. } | Found::Garbage(_) => Kind::Data,
        };
        let number = match found {
            Found::Stamp { version, .. } => version,
            _ => self.asked,
        };
        self.durable = Version { number, kind, fate: Fate::Acknowledged };
        self.recent.clear();
        self.current = Some(number);
    }

    fn allowed(&self) -> String {
        let words: Vec<String> = self.possible().map(Version::to_string).collect();
        let doubt = if self.current.is_none() { "in doubt" } else { "known" };
        format!(
            "{} ({doubt}; durable: {}; newest requested: version {})",
            words.join(" or "),
            self.durable,
            self.asked
        )
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            Kind::Data => "",
            Kind::Zeroes => " zeroes",
            Kind::Discard => " discard",
            Kind::Header => " header",
        };
        let fate = match self.fate {
            Fate::Open => " unanswered",
            Fate::Acknowledged => "",
            Fate::Failed => " failed",
        };
        write!(f, "version {}{kind}{fate}", self.number)
    }
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Found::Zeroes => f.write_str("zeroes"),
            Found::Header => f.write_str("an image header"),
            Found::Stamp { disk, unit, version } => {
                write!(f, "version {version} of unit {unit} of disk {disk}")
            }
            Found::Garbage(bytes) => write!(f, "bytes that no guest wrote, beginning {bytes:02x?}"),
        }
    }
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let at = self.unit * UNIT as u64;
        write!(f, "byte {at} (unit {}) holds {}; allowed: {}", self.unit, self.found, self.allowed)
    }
}

#[cfg(test)]
mod tests;
