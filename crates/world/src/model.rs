//! A plain model of a disk: what may a read return, and what must survive a power cut?
//!
//! Changes are numbered in the order they began and never forgotten within a history. For each unit
//! the model keeps the moment before which a change must have ended to be certainly overwritten
//! (`floor`), so one comparison tells whether a value is stale. Moments are counted, not measured.
//!
//! A disk whose cache writes back *lags*: its backing need not hold what was acknowledged, and is not looked at
//! until everything has been drained. A crash ends all changes that went on, and takes the floors down to
//! what is durable; what a read has returned since the crash before stays, and so does what one has returned before a
//! flush. That makes discards sharp: after one a unit may hold whatever it held before, or zeroes, but once that was
//! seen, and flushed, it stays.
//!
//! Refused: guessing which of several overlapping changes won. Where that is open, each may have.

use std::collections::{BTreeMap, BTreeSet};

use crate::content::{self, Tag, ZERO};
use crate::{Violation, ensure};

/// Not ended yet.
const PENDING: u32 = u32::MAX;

/// What a change does to its units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Writes its own tag.
    Data,
    /// Zeroes.
    Zero,
    /// Leaves what was there, or zeroes, or some of each; of a disk that lags, also what the backing had.
    Discard,
}

#[derive(Clone, Debug)]
struct Change {
    first: u32,
    end: u32,
    kind: Kind,
    began: u32,
    ended: u32,
    ok: bool,
    /// A FUA or a flush promised that it survives.
    durable: bool,
    /// A discard of a disk that lags: older data may come back.
    reverts: bool,
}

#[derive(Clone, Copy, Debug)]
struct Unit {
    /// Values of changes that ended before this are overwritten for certain.
    floor: u32,
    last_began: u32,
    last_ended: u32,
    /// When the last change that may have zeroed it ended.
    zeroed: u32,
    /// When the last discard ended that may have brought older data back.
    reverted: u32,
    active: u32,
    zeroing: u32,
    /// Seen by a read while nothing changed it: later reads see the same.
    pinned: Option<Tag>,
    /// When it was seen first.
    pinned_at: u32,
    /// A flush has been acknowledged since that began later: a crash leaves it.
    kept: bool,
}

impl Unit {
    /// Holds what it held from the first.
    const NEW: Unit = Unit {
        floor: 1,
        last_began: 1,
        last_ended: 1,
        zeroed: 0,
        reverted: 0,
        active: 0,
        zeroing: 0,
        pinned: None,
        pinned_at: 0,
        kept: false,
    };
}

/// A read that began.
#[derive(Clone, Debug)]
pub struct Reading {
    began: u32,
    first: u32,
    floors: Vec<u32>,
    /// Changes before this one (an index) had ended.
    ended_before: usize,
}

/// What a disk holds, as far as its guests can tell.
#[derive(Clone, Debug)]
pub struct Model {
    disk: u8,
    clock: u32,
    /// Indexed by serial − 1; the first is the initial content.
    changes: Vec<Change>,
    /// Changes before this one (an index) have ended.
    ended_before: usize,
    units: Vec<Unit>,
    /// Acknowledged and not durable.
    unflushed: Vec<u32>,
    /// The same, when dirty data was given up: a loss of the backing may take them, if it has them.
    given_up: Vec<u32>,
    /// Of `unflushed`, those that flash has: a loss of the backing does not concern them.
    in_flash: BTreeSet<u32>,
    /// Acknowledged, not durable, and in doubt since a loss of the backing, with its number.
    doubtful: Vec<(u32, u32)>,
    /// Losses so far, and the last one of which each session was told.
    losses: u32,
    told: BTreeMap<u32, u32>,
    /// When the last one was.
    lost: u32,
    lags: bool,
    /// When the last crash was.
    crashed: u32,
    /// What the last crash left is durable: the power failed, or a flush has been acknowledged since.
    settled: bool,
    /// When that was last.
    forgot: u32,
    /// Changes before this one (an index) may be lost although they were durable: the owner gave them up.
    forgotten: usize,
}

/// What a crash takes from a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// Nothing that was acknowledged, but devices still hold it in volatile memory.
    Nothing,
    /// The process only: what was acknowledged and not durable, if flash had it and the journal did not.
    Unrecorded,
    /// Everything that was not durable.
    Unflushed,
}

impl Model {
    /// A disk whose units hold `tag(1, disk, unit)`.
    pub fn new(disk: u8, units: u32) -> Self {
        let initial = Change {
            first: 0,
            end: units,
            kind: Kind::Data,
            began: 1,
            ended: 1,
            ok: true,
            durable: true,
            reverts: false,
        };
        Model {
            disk,
            clock: 1,
            changes: vec![initial],
            ended_before: 1,
            units: vec![Unit::NEW; units as usize],
            unflushed: vec![],
            given_up: vec![],
            in_flash: BTreeSet::new(),
            doubtful: vec![],
            losses: 0,
            told: BTreeMap::new(),
            lost: 0,
            lags: false,
            crashed: 0,
            settled: true,
            forgot: 0,
            forgotten: 0,
        }
    }

    /// The disk has so many units now; those that are new hold `tag(1, disk, unit)`, as the others did at first.
    pub fn grow(&mut self, units: u32) {
        self.changes[0].end = units;
        self.units.resize(units as usize, Unit::NEW);
    }

    /// Does the backing lag behind? Then it is not compared. A discard that goes on may meet dirty data from now on, though
    /// there was none when it began.
    pub fn set_lags(&mut self, lags: bool) {
        if lags && !self.lags {
            for change in &mut self.changes[self.ended_before..] {
                if change.ended != PENDING || change.kind != Kind::Discard {
                    continue;
                }
                change.reverts = true;
                for unit in &mut self.units[change.first as usize..change.end as usize] {
                    (unit.floor, unit.reverted) = (0, PENDING);
                }
            }
        }
        self.lags = lags;
    }

    /// Does the backing lag behind?
    pub fn lags(&self) -> bool {
        self.lags
    }

    fn tick(&mut self) -> u32 {
        self.clock += 1;
        self.clock
    }

    /// A change is handed in. Returns its serial, for [`content::tag`].
    pub fn begin_change(&mut self, kind: Kind, first: u32, count: u32) -> u32 {
        let began = self.tick();
        let end = first + count;
        let reverts = kind == Kind::Discard && self.lags;
        let change = Change { first, end, kind, began, ended: PENDING, ok: false, durable: false, reverts };
        self.changes.push(change);
        for unit in &mut self.units[first as usize..end as usize] {
            unit.active += 1;
            unit.zeroing += u32::from(kind != Kind::Data);
            unit.last_began = began;
            (unit.pinned, unit.kept) = (None, false);
            if reverts {
                (unit.floor, unit.reverted) = (0, PENDING);
            }
        }
        self.changes.len() as u32
    }

    /// A change is answered. When it was acknowledged and nothing overlapped it, `now` and `durable`
    /// (the backing's content, and the part of it that survives a power cut) must show it.
    pub fn end_change(
        &mut self,
        serial: u32,
        ok: bool,
        fua: bool,
        now: &[Tag],
        durable: &[Tag],
    ) -> Result<(), Violation> {
        let ended = self.tick();
        let disk = self.disk;
        let change = &mut self.changes[serial as usize - 1];
        assert_eq!(change.ended, PENDING, "a change ends once");
        (change.ended, change.ok, change.durable) = (ended, ok, ok && fua);
        let change = change.clone();
        for at in change.first..change.end {
            let unit = &mut self.units[at as usize];
            let alone = unit.active == 1 && unit.last_began == change.began && unit.last_ended < change.began;
            if ok && alone && !self.lags && change.kind != Kind::Discard {
                let expected = if change.kind == Kind::Zero { ZERO } else { content::tag(serial, disk, at) };
                let (now, durable) = (now[at as usize], durable[at as usize]);
                ensure!(
                    now == expected,
                    "disk {disk} unit {at}: {serial} acknowledged, backing holds {now:x}"
                );
                ensure!(!fua || durable == expected, "disk {disk} unit {at}: FUA {serial} is not durable");
            }
            unit.active -= 1;
            unit.last_ended = ended;
            if change.kind != Kind::Data {
                unit.zeroing -= 1;
                unit.zeroed = ended;
            }
            if ok && change.kind != Kind::Discard {
                unit.floor = unit.floor.max(change.began);
            }
            if change.reverts {
                (unit.floor, unit.reverted) = (0, ended);
            }
        }
        if ok && !fua {
            self.unflushed.push(serial);
        }
        while self.changes.get(self.ended_before).is_some_and(|change| change.ended != PENDING) {
            self.ended_before += 1;
        }
        Ok(())
    }

    /// What a unit holds for certain, seen by a read and not changed since; later reads see the same.
    pub fn pinned(&self, unit: u32) -> Option<Tag> {
        self.units[unit as usize].pinned
    }

    /// A flush is handed in. Returns a token for [`end_flush`](Self::end_flush).
    pub fn begin_flush(&mut self) -> u32 {
        self.tick()
    }

    /// What was acknowledged before a flush began and no other flush covers, by serial.
    pub fn unflushed(&self, began: u32) -> impl Iterator<Item = u32> {
        let ended = |serial: u32| self.changes[serial as usize - 1].ended;
        self.unflushed.iter().copied().filter(move |serial| ended(*serial) < began)
    }

    /// An acknowledged change went to flash, not to the backing.
    pub fn note_in_flash(&mut self, serial: u32) {
        self.in_flash.insert(serial);
    }

    /// The backing lost any part of what no flush covers.
    pub fn lose(&mut self) {
        let floors = self.durable_floors();
        self.losses += 1;
        self.lost = self.tick();
        let (stays, lost): (Vec<u32>, Vec<u32>) =
            self.unflushed.iter().partition(|serial| self.in_flash.contains(serial));
        self.unflushed = stays;
        for unit in &mut self.units {
            // What a change did that failed, or that a crash ended, is not durable either.
            let stays = unit.kept || self.settled && unit.last_began < self.crashed;
            unit.pinned = unit.pinned.filter(|_| stays);
        }
        let lost = lost.into_iter().map(|serial| (serial, true));
        let given_up = std::mem::take(&mut self.given_up).into_iter().map(|serial| (serial, false));
        for (serial, is_acknowledged) in lost.chain(given_up) {
            let change = &self.changes[serial as usize - 1];
            let range = change.first as usize..change.end as usize;
            for (unit, floor) in self.units[range.clone()].iter_mut().zip(&floors[range]) {
                unit.floor = unit.floor.min(*floor);
                (unit.pinned, unit.kept) = (None, false);
            }
            if is_acknowledged {
                self.doubtful.push((self.losses, serial));
            }
        }
    }

    /// All sessions end: what is in doubt is not told to those that begin later.
    pub fn end_sessions(&mut self) {
        self.doubtful.clear();
    }

    /// A flush failed: its session was told of all losses so far.
    pub fn flush_failed(&mut self, session: u32) {
        self.told.insert(session, self.losses);
    }

    /// A flush of a session is acknowledged: what was in doubt, and of which the session was not told, is said to be there.
    fn end_doubts(&mut self, session: u32, began: u32, now: &[Tag]) -> Result<(), Violation> {
        let told = self.told.get(&session).copied().unwrap_or(0);
        let disk = self.disk;
        for (_, serial) in self.doubtful.iter().filter(|(loss, _)| *loss > told) {
            let change = &mut self.changes[*serial as usize - 1];
            if change.ended >= began {
                continue;
            }
            change.durable = true;
            for at in change.first..change.end {
                let unit = &mut self.units[at as usize];
                if change.kind != Kind::Discard {
                    unit.floor = unit.floor.max(change.began);
                }
                let newest = unit.active == 0 && unit.last_began == change.began;
                let is_there = now[at as usize] == content::tag(*serial, disk, at);
                ensure!(
                    !newest || self.lags || change.kind != Kind::Data || is_there,
                    "disk {disk} unit {at}: {serial} was lost, and a flush says it is there"
                );
            }
        }
        Ok(())
    }

    /// A flush is acknowledged: what was acknowledged before it began is durable.
    pub fn end_flush(
        &mut self,
        session: u32,
        began: u32,
        now: &[Tag],
        durable: &[Tag],
    ) -> Result<(), Violation> {
        self.tick();
        self.end_doubts(session, began, now)?;
        let (flushed, rest) =
            self.unflushed.iter().partition(|serial| self.changes[**serial as usize - 1].ended < began);
        self.unflushed = rest;
        self.given_up.retain(|serial| self.changes[*serial as usize - 1].ended >= began);
        self.settled |= self.crashed < began;
        for unit in &mut self.units {
            unit.kept |= unit.pinned.is_some() && unit.pinned_at < began;
        }
        let flushed: Vec<u32> = flushed;
        for serial in flushed {
            let change = &mut self.changes[serial as usize - 1];
            change.durable = true;
            for at in change.first as usize..change.end as usize {
                let unit = &self.units[at];
                let quiet = unit.active == 0 && unit.last_began < began && unit.last_ended < began;
                let is_durable = now[at] == durable[at];
                ensure!(
                    !quiet || is_durable || self.lags,
                    "disk {} unit {at}: flushed {serial} not durable",
                    self.disk
                );
            }
        }
        Ok(())
    }

    /// A read is handed in.
    pub fn begin_read(&mut self, first: u32, count: u32) -> Reading {
        let units = &self.units[first as usize..(first + count) as usize];
        let floors = units.iter().map(|unit| unit.floor).collect();
        Reading { began: self.tick(), first, floors, ended_before: self.ended_before }
    }

    /// A read is answered with `seen`; the backing holds `now`.
    pub fn end_read(&mut self, reading: &Reading, seen: &[Tag], now: &[Tag]) -> Result<(), Violation> {
        self.tick();
        let disk = self.disk;
        assert_eq!(seen.len(), reading.floors.len());
        for (i, (value, floor)) in seen.iter().zip(&reading.floors).enumerate() {
            let at = reading.first + i as u32;
            let ended = self.ended(*value, at)?;
            let given_up = reading.began < self.forgot.max(self.lost).max(self.units[at as usize].reverted);
            ensure!(
                given_up || ended >= *floor,
                "disk {disk} unit {at}: stale {value:x} read, overwritten by {}",
                self.begun_at(*floor)
            );
            let unit = &mut self.units[at as usize];
            // A read that began before something was given up may have seen it.
            let is_old = reading.began < self.forgot.max(self.lost);
            if unit.active > 0 || unit.last_ended > reading.began || is_old {
                continue;
            }
            let held = now[at as usize];
            let same = *value == held || self.lags;
            ensure!(same, "disk {disk} unit {at}: read {value:x}, backing holds {held:x}");
            if unit.pinned.is_none() {
                unit.pinned_at = self.clock;
            }
            let pinned = *unit.pinned.get_or_insert(*value);
            ensure!(*value == pinned, "disk {disk} unit {at}: read {value:x}, and {pinned:x} before");
        }
        if reading.began < self.forgot.max(self.lost) { Ok(()) } else { self.check_torn(reading, seen) }
    }

    /// Of one write that went on during the read, the read saw all or nothing — where it saw neither
    /// the write nor something certainly older, another change may have won.
    fn check_torn(&self, reading: &Reading, seen: &[Tag]) -> Result<(), Violation> {
        let end = reading.first + seen.len() as u32;
        // Of what was there when something was given up, any part may be left.
        for (index, change) in self.changes.iter().enumerate().skip(reading.ended_before.max(self.forgotten))
        {
            let may_fail = change.ended != PENDING && !change.ok;
            let overlaps = change.first < end && reading.first < change.end;
            // A loss may have taken any part of a change that went on.
            let is_broken = may_fail || change.began < self.lost;
            if change.kind != Kind::Data || is_broken || !overlaps || change.ended < reading.began {
                continue;
            }
            let (mut new, mut old) = (false, None);
            for at in change.first.max(reading.first)..change.end.min(end) {
                let value = seen[(at - reading.first) as usize];
                if content::serial(value, self.disk, at) == Some(index as u32 + 1) {
                    new = true;
                } else if self.ended(value, at)? < change.began
                    && self.units[at as usize].reverted < change.began
                {
                    old = Some(at);
                }
            }
            if let (true, Some(at)) = (new, old) {
                let (disk, serial) = (self.disk, index + 1);
                return Err(Violation(format!(
                    "disk {disk}: a read saw change {serial}, but not at unit {at}"
                )));
            }
        }
        Ok(())
    }

    /// What began at this moment, in words.
    fn begun_at(&self, moment: u32) -> String {
        let found = self.changes.iter().position(|change| change.began == moment);
        found.map_or("nothing".into(), |at| format!("change {:#x}, {:?}", at + 1, self.changes[at].kind))
    }

    /// When the change ended that made a unit hold this; an error when none can have.
    fn ended(&self, value: Tag, at: u32) -> Result<u32, Violation> {
        let unit = &self.units[at as usize];
        if value == ZERO {
            return Ok(if unit.zeroing > 0 { PENDING } else { unit.zeroed });
        }
        let change = content::serial(value, self.disk, at)
            .and_then(|serial| self.changes.get((serial as usize).checked_sub(1)?))
            .filter(|change| change.kind == Kind::Data && (change.first..change.end).contains(&at));
        match change {
            Some(change) => Ok(change.ended),
            None => {
                Err(Violation(format!("disk {} unit {at}: {value:x} was never written there", self.disk)))
            }
        }
    }

    /// Power failed and `media` is what was left: nothing in it may be older than a durable change.
    pub fn check_power_cut(&self, media: &[Tag]) -> Result<(), Violation> {
        for (at, (value, floor)) in media.iter().zip(self.durable_floors()).enumerate() {
            let lost = self.ended(*value, at as u32)? < floor;
            ensure!(!lost, "disk {} unit {at}: {value:x} after a power cut, durable change lost", self.disk);
        }
        Ok(())
    }

    /// For each unit, when the last durable change began that no discard can have undone: a discard may take effect at any moment
    /// until it ends.
    fn durable_floors(&self) -> Vec<u32> {
        let units = |change: &Change| change.first as usize..change.end as usize;
        let mut undone = vec![0; self.units.len()];
        for change in self.changes.iter().filter(|change| change.reverts) {
            undone[units(change)].iter_mut().for_each(|until| *until = change.ended.max(*until));
        }
        let mut floors = vec![0; self.units.len()];
        let durable = |change: &&Change| change.durable && change.kind != Kind::Discard;
        for change in self.changes.iter().skip(self.forgotten).filter(durable) {
            for (floor, undone) in floors[units(change)].iter_mut().zip(&undone[units(change)]) {
                if change.began > *undone {
                    *floor = change.began.max(*floor);
                }
            }
        }
        floors
    }

    /// Units of the disk.
    pub fn units(&self) -> usize {
        self.units.len()
    }

    /// Did a unit ever hold this?
    pub fn may_hold(&self, value: Tag, unit: u32) -> bool {
        self.ended(value, unit).is_ok()
    }

    /// Was the newest change of a unit never made durable?
    pub fn is_loose(&self, unit: u32) -> bool {
        let newest = self.changes.iter().rev().find(|change| (change.first..change.end).contains(&unit));
        newest.is_some_and(|change| !change.durable)
    }

    /// The engine is gone. Changes that went on may have happened, in part or not at all. Of those that
    /// were acknowledged, what `loss` says may be gone, unit by unit.
    pub fn crash(&mut self, loss: Loss) {
        let moment = self.tick();
        let floors = if loss == Loss::Nothing { vec![] } else { self.durable_floors() };
        for change in &mut self.changes[self.ended_before..] {
            if change.ended == PENDING {
                change.ended = moment;
            }
        }
        self.ended_before = self.changes.len();
        for (at, unit) in self.units.iter_mut().enumerate() {
            if unit.active > 0 {
                unit.last_ended = moment;
            }
            if unit.zeroing > 0 {
                unit.zeroed = moment;
            }
            unit.reverted = unit.reverted.min(moment);
            (unit.active, unit.zeroing) = (0, 0);
            let settled = self.settled && unit.last_began < self.crashed;
            let stays = settled || unit.kept || loss == Loss::Nothing;
            if !stays {
                (unit.pinned, unit.kept) = (None, false);
            }
            if let Some(floor) = floors.get(at) {
                unit.floor = *floor;
            }
        }
        if loss != Loss::Nothing {
            self.unflushed.clear();
        }
        self.settled = loss == Loss::Unflushed;
        self.crashed = moment;
        self.doubtful.clear();
        self.told.clear();
    }

    /// The owner gave up what the backing does not hold, which is `backing` at this moment: every unit may read as
    /// that, or as anything newer.
    pub fn forget(&mut self, backing: &[Tag]) -> Result<(), Violation> {
        for (at, value) in backing.iter().enumerate() {
            let ended = self.ended(*value, at as u32)?;
            let unit = &mut self.units[at];
            unit.floor = unit.floor.min(ended);
            (unit.pinned, unit.kept) = (None, false);
        }
        self.forgot = self.tick();
        self.forgotten = self.changes.len();
        self.given_up.append(&mut self.unflushed);
        Ok(())
    }

    /// Nothing is known to have been durable: every unit may read as anything that it ever held.
    pub fn forget_all(&mut self) {
        for unit in &mut self.units {
            (unit.floor, unit.pinned, unit.kept) = (0, None, false);
        }
        self.forgot = self.tick();
        self.forgotten = self.changes.len();
        self.given_up.append(&mut self.unflushed);
    }

    /// Nothing goes on, and the disk holds what the backing holds, whatever that is.
    pub fn adopt(&mut self, backing: &[Tag]) -> Result<(), Violation> {
        self.forget(backing)?;
        for (unit, value) in self.units.iter_mut().zip(backing) {
            (unit.pinned, unit.pinned_at) = (Some(*value), self.forgot);
        }
        Ok(())
    }

    /// Somebody wrote to the backing while nobody looked after the disk: units of one change, there and durable.
    pub fn changed_behind(&mut self, first: u32, count: u32) -> u32 {
        let serial = self.begin_change(Kind::Data, first, count);
        let ended = self.tick();
        let change = &mut self.changes[serial as usize - 1];
        (change.ended, change.ok, change.durable) = (ended, true, true);
        for unit in &mut self.units[first as usize..(first + count) as usize] {
            unit.active -= 1;
            unit.last_ended = ended;
            unit.floor = unit.last_began;
        }
        self.ended_before = self.changes.len();
        serial
    }
}

#[cfg(test)]
mod tests;
