//! A reference model of a disk's content, with which the checker compares reads. The model
//! determines which data a read may return, and which data must survive a power cut.
//!
//! Changes are numbered in the order in which they began and are kept for the whole history. For
//! each unit the model keeps a `floor`: a value is stale if its change ended before the floor.
//! Times in the model are values of a counter of events.
//!
//! The backing of a disk with a write-back cache *lags*: acknowledged changes may be missing on the
//! backing. Until the cache is drained, the model does not compare the backing with acknowledged
//! changes. A crash ends all changes in progress and lowers the floors to the durable state. After
//! a read returned a unit's value, later reads must return the same value until the next change or
//! crash. If a flush followed the read, a crash does not change the value either. After a discard,
//! a unit may have its old content or zeroes. The first read of the unit decides which of the two.
//!
//! The model allows overlapping changes to take effect in any order.

use std::collections::{BTreeMap, BTreeSet};

use crate::content::{self, Tag, ZERO};
use crate::{Violation, ensure};

/// End time of a change that is still in progress.
const PENDING: u32 = u32::MAX;

/// Effect of a change on the 512-byte units that it covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The change writes a tag (simulated content) that no other change writes.
    Data,
    /// The change writes zeroes.
    Zero,
    /// The change leaves the old content, zeroes, or a mixture. If the backing lags, the change may
    /// also leave the backing's content.
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
    /// True if an I/O of the change has failed on the backing. The backing may then have any part
    /// of the change.
    is_partial: bool,
    /// True if the change is durable, because it was a FUA write or a flush followed it.
    durable: bool,
    /// True if the change is a discard on a disk whose backing lags, so older data of the backing
    /// may return.
    reverts: bool,
}

#[derive(Clone, Copy, Debug)]
struct Unit {
    /// Later changes have certainly overwritten this unit's data of all changes that ended before
    /// this time.
    floor: u32,
    last_began: u32,
    last_ended: u32,
    /// End of the last change that may have zeroed the unit.
    zeroed: u32,
    /// End of the last discard that may have restored older data of the unit.
    reverted: u32,
    active: u32,
    zeroing: u32,
    /// Value that was read while no change of the unit was in progress. Later reads must return
    /// this value until the next change or crash.
    pinned: Option<Tag>,
    /// Time of the first read of the pinned value.
    pinned_at: u32,
    /// True if a flush was acknowledged after the read that returned the pinned value, so a crash
    /// does not lose that value.
    kept: bool,
}

impl Unit {
    /// State of a unit with initial content.
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

/// A read in progress.
#[derive(Clone, Debug)]
pub struct Reading {
    began: u32,
    first: u32,
    floors: Vec<u32>,
    /// Changes with a lower index had ended before the read began.
    ended_before: usize,
}

/// Expected content of a disk as its guests may see it.
#[derive(Clone, Debug)]
pub struct Model {
    disk: u8,
    clock: u32,
    /// All changes, indexed by serial − 1. The first entry is the initial content.
    changes: Vec<Change>,
    /// All changes with a lower index have ended.
    ended_before: usize,
    units: Vec<Unit>,
    /// Changes that are acknowledged and not durable.
    unflushed: Vec<u32>,
    /// Changes that were acknowledged and not durable when hob discarded dirty data. The backing
    /// may have the data of some of these changes. Until the next flush, it may lose this data.
    given_up: Vec<u32>,
    /// Changes that hob wrote to flash and not to the backing, so a loss of the backing does not
    /// affect them. A flush does not remove changes from this set.
    in_flash: BTreeSet<u32>,
    /// Changes that the backing may have lost, each with the number of the loss. The changes were
    /// acknowledged and are not durable.
    doubtful: Vec<(u32, u32)>,
    /// Number of times that the backing has lost data so far.
    losses: u32,
    /// Failed flushes of each session: the number of losses when the flush failed, and the time at
    /// which the flush began.
    told: BTreeMap<u32, Vec<(u32, u32)>>,
    /// Time of the last loss of the backing.
    lost: u32,
    /// Number of losses of the backing that the engine does not know yet.
    unreported: u32,
    lags: bool,
    /// Time of the last crash.
    crashed: u32,
    /// True if the content after the last crash is durable: the crash was a power cut, or a flush
    /// was acknowledged after the crash. Hob has not discarded data since then.
    settled: bool,
    /// Time at which hob last discarded data.
    forgot: u32,
    /// Changes with a lower index may be lost although they were durable, because hob discarded the
    /// cache that had them.
    forgotten: usize,
}

/// Data that a crash loses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// The crash loses no acknowledged change, but devices still have some data only in volatile
    /// memory.
    Nothing,
    /// The process crashed: acknowledged changes may be lost if they are not durable and flash had
    /// them without a journal record.
    Unrecorded,
    /// The crash loses everything that was not durable.
    Unflushed,
}

impl Model {
    /// Creates a disk in which each unit has the tag `tag(1, disk, unit)`.
    pub fn new(disk: u8, units: u32) -> Self {
        let initial = Change {
            first: 0,
            end: units,
            kind: Kind::Data,
            began: 1,
            ended: 1,
            ok: true,
            is_partial: false,
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
            unreported: 0,
            lags: false,
            crashed: 0,
            settled: true,
            forgot: 0,
            forgotten: 0,
        }
    }

    /// Sets the number of the disk's 512-byte units. New units have the tag `tag(1, disk, unit)`,
    /// like the initial units.
    pub fn grow(&mut self, units: u32) {
        self.changes[0].end = units;
        self.units.resize(units as usize, Unit::NEW);
    }

    /// Sets whether the backing lags. The model does not compare a lagging backing with
    /// acknowledged changes. A discard in progress may affect dirty data from now on, even if the
    /// disk had no dirty data when the discard began.
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

    /// Returns true if the backing may lack acknowledged changes.
    pub fn lags(&self) -> bool {
        self.lags
    }

    fn tick(&mut self) -> u32 {
        self.clock += 1;
        self.clock
    }

    /// Records the start of a change. Returns the serial number of the change, for
    /// [`content::tag`].
    pub fn begin_change(&mut self, kind: Kind, first: u32, count: u32) -> u32 {
        let began = self.tick();
        let end = first + count;
        let reverts = kind == Kind::Discard && self.lags;
        let change = Change {
            first,
            end,
            kind,
            began,
            ended: PENDING,
            ok: false,
            is_partial: false,
            durable: false,
            reverts,
        };
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

    /// Records that an I/O of changes in these units has failed on the backing. A read may see a
    /// part of a change before the guest is told that the change has failed.
    pub fn note_failed_io(&mut self, first: u32, count: u32) {
        for change in self.changes.iter_mut().filter(|change| change.ended == PENDING) {
            change.is_partial |= change.first < first + count && first < change.end;
        }
    }

    /// Records the end of a change. `now` is the backing's content, and `durable` is the content
    /// that survives a power cut. A backing that does not lag must have every acknowledged write,
    /// unless another change overlapped the write or data was lost meanwhile.
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
        let in_doubt = ok && !fua && self.unreported > 0 && change.began < self.lost;
        let in_flash = self.in_flash.contains(&serial);
        let in_doubt = in_doubt && !in_flash;
        // The engine may have acknowledged the change just before hob discarded the dirty data.
        let given_up = ok && in_flash && change.began < self.forgot;
        let is_unsure = in_doubt || given_up;
        let others = &self.changes[self.ended_before..];
        let others = others.iter().filter(|other| change.reverts && other.reverts && other.ended == PENDING);
        let others: Vec<_> = others.map(|other| other.first..other.end).collect();
        for at in change.first..change.end {
            let unit = &mut self.units[at as usize];
            let alone = unit.active == 1 && unit.last_began == change.began && unit.last_ended < change.began;
            if ok && alone && !is_unsure && !self.lags && change.kind != Kind::Discard {
                let expected = if change.kind == Kind::Zero { ZERO } else { content::tag(serial, disk, at) };
                let (now, durable) = (now[at as usize], durable[at as usize]);
                ensure!(
                    now == expected,
                    "disk {disk} unit {at}: change {serial} acknowledged, backing holds {now:x}"
                );
                ensure!(
                    !fua || durable == expected,
                    "disk {disk} unit {at}: FUA write {serial} is not durable"
                );
            }
            unit.active -= 1;
            unit.last_ended = ended;
            if change.kind != Kind::Data {
                unit.zeroing -= 1;
                unit.zeroed = ended;
            }
            if ok && !is_unsure && change.kind != Kind::Discard {
                unit.floor = unit.floor.max(change.began);
            }
            if change.reverts {
                let is_last = !others.iter().any(|other| other.contains(&at));
                (unit.floor, unit.reverted) = (0, if is_last { ended } else { PENDING });
            }
        }
        if in_doubt {
            self.doubtful.push((self.losses, serial));
        } else if given_up {
            self.given_up.push(serial);
        } else if ok && !fua {
            self.unflushed.push(serial);
        }
        while self.changes.get(self.ended_before).is_some_and(|change| change.ended != PENDING) {
            self.ended_before += 1;
        }
        Ok(())
    }

    /// Returns the content of a unit that was read and has not been changed since. Returns `None`
    /// if the content is not certain.
    pub fn pinned(&self, unit: u32) -> Option<Tag> {
        self.units[unit as usize].pinned
    }

    /// Records the start of a flush. Returns a token for [`end_flush`](Self::end_flush).
    pub fn begin_flush(&mut self) -> u32 {
        self.tick()
    }

    /// Returns the serials of the changes that were acknowledged before a flush began and are not
    /// covered by another flush.
    pub fn unflushed(&self, began: u32) -> impl Iterator<Item = u32> {
        let ended = |serial: u32| self.changes[serial as usize - 1].ended;
        self.unflushed.iter().copied().filter(move |serial| ended(*serial) < began)
    }

    /// Records that a change is only on flash, and not on the backing.
    pub fn note_in_flash(&mut self, serial: u32) {
        self.in_flash.insert(serial);
    }

    /// Records that the backing lost a random part (none, some or all) of the data that no flush
    /// covers.
    pub fn lose(&mut self) {
        let floors = self.durable_floors();
        self.losses += 1;
        self.lost = self.tick();
        let (stays, lost): (Vec<u32>, Vec<u32>) =
            self.unflushed.iter().partition(|serial| self.in_flash.contains(serial));
        self.unflushed = stays;
        for unit in &mut self.units {
            // Effects of failed or crashed changes are not durable either.
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

    /// Records that the backing lost data, and that the engine does not know about this loss yet.
    /// Until [`report_loss`](Self::report_loss), the engine may acknowledge changes that were in
    /// flight at the loss.
    pub fn hide_loss(&mut self) {
        self.unreported += 1;
    }

    /// Records that the engine has learned of one loss that [`hide_loss`](Self::hide_loss)
    /// recorded.
    pub fn report_loss(&mut self) {
        self.unreported -= 1;
        self.lost = self.tick();
    }

    /// Ends all sessions of guests. Sessions that start later receive no report of changes that may
    /// have been lost before.
    pub fn end_sessions(&mut self) {
        self.doubtful.clear();
    }

    /// Records that a flush of this session failed. The error reports all losses so far of changes
    /// that were acknowledged before the flush began. Returns false if the flush began before the
    /// last loss or discard of data, so that another flush may have to report later changes.
    pub fn flush_failed(&mut self, session: u32, began: u32) -> bool {
        self.told.entry(session).or_default().push((self.losses, began));
        began > self.lost.max(self.forgot)
    }

    /// Returns true if a failed flush reported the possible loss of this change to the session.
    fn is_told(&self, session: u32, loss: u32, serial: u32) -> bool {
        let ended = self.changes[serial as usize - 1].ended;
        let told = self.told.get(&session).into_iter().flatten();
        told.copied().any(|(losses, began)| loss <= losses && ended < began)
    }

    /// Handles an acknowledged flush of a session. Changes that may be lost, and whose loss was not
    /// reported to the session, must be present.
    fn end_doubts(&mut self, session: u32, began: u32, now: &[Tag]) -> Result<(), Violation> {
        let disk = self.disk;
        let untold = |(loss, serial): &&(u32, u32)| !self.is_told(session, *loss, *serial);
        let untold: Vec<(u32, u32)> = self.doubtful.iter().filter(untold).copied().collect();
        for (_, serial) in &untold {
            let change = self.changes[*serial as usize - 1].clone();
            if change.ended >= began {
                continue;
            }
            self.changes[*serial as usize - 1].durable = true;
            // Overlapping changes take effect in any order, so a change that began earlier may have
            // overwritten this one.
            let overlapping = |other: &&Change| other.began < change.began && other.ended > change.began;
            let others: Vec<_> = self.changes.iter().filter(overlapping).collect();
            for at in change.first..change.end {
                let unit = &mut self.units[at as usize];
                if change.kind != Kind::Discard {
                    unit.floor = unit.floor.max(change.began);
                }
                let newest = unit.active == 0
                    && unit.last_began == change.began
                    && !others.iter().any(|other| (other.first..other.end).contains(&at));
                let is_there = now[at as usize] == content::tag(*serial, disk, at);
                ensure!(
                    !newest || self.lags || change.kind != Kind::Data || is_there,
                    "disk {disk} unit {at}: change {serial} was lost, and a flush says it is there"
                );
            }
        }
        Ok(())
    }

    /// Records an acknowledged flush: changes that were acknowledged before the flush began are
    /// durable.
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
        self.settled |= self.crashed.max(self.forgot) < began;
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
                    "disk {} unit {at}: flushed change {serial} is not durable",
                    self.disk
                );
            }
        }
        Ok(())
    }

    /// Records the start of a read of these 512-byte units.
    pub fn begin_read(&mut self, first: u32, count: u32) -> Reading {
        let units = &self.units[first as usize..(first + count) as usize];
        let floors = units.iter().map(|unit| unit.floor).collect();
        Reading { began: self.tick(), first, floors, ended_before: self.ended_before }
    }

    /// Checks the data `seen` that a read returned. `now` is the backing's content.
    pub fn end_read(&mut self, reading: &Reading, seen: &[Tag], now: &[Tag]) -> Result<(), Violation> {
        self.tick();
        let disk = self.disk;
        assert_eq!(seen.len(), reading.floors.len());
        // A read that began before data was discarded or lost may have returned that data.
        let is_old = self.unreported > 0 || reading.began < self.forgot.max(self.lost);
        for (i, (value, floor)) in seen.iter().zip(&reading.floors).enumerate() {
            let at = reading.first + i as u32;
            let ended = self.ended(*value, at)?;
            let given_up = reading.began < self.forgot.max(self.lost).max(self.units[at as usize].reverted);
            ensure!(
                given_up || ended >= *floor,
                "disk {disk} unit {at}: a read returned stale {value:x}, overwritten by {}",
                self.begun_at(*floor)
            );
            let unit = &mut self.units[at as usize];
            if unit.active > 0 || unit.last_ended > reading.began || is_old {
                continue;
            }
            let held = now[at as usize];
            let same = *value == held || self.lags;
            ensure!(same, "disk {disk} unit {at}: a read returned {value:x}, but the backing holds {held:x}");
            if unit.pinned.is_none() {
                unit.pinned_at = self.clock;
            }
            let pinned = *unit.pinned.get_or_insert(*value);
            ensure!(
                *value == pinned,
                "disk {disk} unit {at}: a read returned {value:x}, and {pinned:x} before"
            );
        }
        if is_old { Ok(()) } else { self.check_torn(reading, seen) }
    }

    /// Checks that a read saw all or nothing of a concurrent write: the read must not return the
    /// write's data in one unit and older data in another. Units with data of other changes are not
    /// checked.
    fn check_torn(&self, reading: &Reading, seen: &[Tag]) -> Result<(), Violation> {
        let end = reading.first + seen.len() as u32;
        // Changes before a discard of data are skipped, because any part of their data may be left.
        for (index, change) in self.changes.iter().enumerate().skip(reading.ended_before.max(self.forgotten))
        {
            let may_fail = change.is_partial || change.ended != PENDING && !change.ok;
            let overlaps = change.first < end && reading.first < change.end;
            // A loss of the backing may have removed any part of a change that was in progress.
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

    /// Describes the change that began at this time.
    fn begun_at(&self, moment: u32) -> String {
        let found = self.changes.iter().position(|change| change.began == moment);
        found.map_or("nothing".into(), |at| format!("change {:#x}, {:?}", at + 1, self.changes[at].kind))
    }

    /// Returns the end time of the change that wrote this value. Returns an error if no change
    /// wrote this value.
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

    /// Checks the content `media` after a power cut: no unit may be older than a durable change.
    pub fn check_power_cut(&self, media: &[Tag]) -> Result<(), Violation> {
        for (at, (value, floor)) in media.iter().zip(self.durable_floors()).enumerate() {
            let lost = self.ended(*value, at as u32)? < floor;
            ensure!(!lost, "disk {} unit {at}: {value:x} after a power cut, durable change lost", self.disk);
        }
        Ok(())
    }

    /// Returns the `floor` of each unit after a power cut: the start time of the last durable
    /// change that no discard request can have undone. A discard may take effect at any time until
    /// it ends.
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

    /// Returns the number of 512-byte units of the disk.
    pub fn units(&self) -> usize {
        self.units.len()
    }

    /// Returns true if the unit ever had this value.
    pub fn may_hold(&self, value: Tag, unit: u32) -> bool {
        self.ended(value, unit).is_ok()
    }

    /// Returns true if no flush or FUA write has made the newest change of the unit durable.
    pub fn is_loose(&self, unit: u32) -> bool {
        let newest = self.changes.iter().rev().find(|change| (change.first..change.end).contains(&unit));
        newest.is_some_and(|change| !change.durable)
    }

    /// Records a crash of the engine. Changes in progress may have taken effect completely, in part
    /// or not at all. Acknowledged changes may be lost unit by unit according to `loss`.
    pub fn crash(&mut self, loss: Loss) {
        let moment = self.tick();
        let floors = if loss == Loss::Nothing { vec![] } else { self.durable_floors() };
        for change in &mut self.changes[self.ended_before..] {
            if change.ended == PENDING {
                change.ended = moment;
                if change.reverts {
                    // The discard may also undo a write that ended while the discard was in
                    // progress.
                    let units = &mut self.units[change.first as usize..change.end as usize];
                    units.iter_mut().for_each(|unit| unit.floor = 0);
                }
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
        self.unreported = 0;
    }

    /// Records that hob discarded all data that is not on the backing. `backing` is the backing's
    /// content. Each unit may read as the backing's value or a newer value.
    pub fn forget(&mut self, backing: &[Tag]) -> Result<(), Violation> {
        for (at, value) in backing.iter().enumerate() {
            let ended = self.ended(*value, at as u32)?;
            let unit = &mut self.units[at];
            unit.floor = unit.floor.min(ended);
            (unit.pinned, unit.kept) = (None, false);
        }
        self.note_forgotten();
        Ok(())
    }

    /// Records that hob discarded data. The remaining content is on the backing, and no flush has
    /// made it durable.
    fn note_forgotten(&mut self) {
        self.forgot = self.tick();
        self.forgotten = self.changes.len();
        self.given_up.append(&mut self.unflushed);
        self.settled = false;
    }

    /// Records that no content of the disk is certain any more. From now on a read of a unit may
    /// return any value that the unit ever had.
    pub fn forget_all(&mut self) {
        for unit in &mut self.units {
            (unit.floor, unit.pinned, unit.kept) = (0, None, false);
        }
        self.note_forgotten();
    }

    /// Sets the disk's expected content to the backing's content `now`. No change may be in
    /// progress. The backing may still lose the part of the content that differs from `durable`.
    pub fn adopt(&mut self, now: &[Tag], durable: &[Tag]) -> Result<(), Violation> {
        self.forget(durable)?;
        self.forget(now)?;
        self.pin(now);
        Ok(())
    }

    /// Records that hob discarded data, so that reads must return the backing's data from now on.
    /// The 512-byte units that no later change covers have the backing's content.
    pub fn pin(&mut self, backing: &[Tag]) {
        let pinned_at = self.tick();
        for (unit, value) in self.units.iter_mut().zip(backing) {
            if unit.active == 0 && unit.last_began < self.forgot {
                (unit.pinned, unit.pinned_at) = (Some(*value), pinned_at);
            }
        }
    }

    /// Records a durable change of these 512-byte units by a foreign writer while the disk was not
    /// served.
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
