//! The content of a simulated device, and the content that remains after a power cut.
//!
//! Units written since the last flush survive a power cut or not, independently of each other. If
//! several values were written to a unit, any of them may survive.

use crate::content::Tag;
use crate::rng::SimRng;

/// Value of a unit at the start of a flush: the unit's number, the tag of its content, and the
/// stamp of its last change.
pub(super) type Flushing = (u32, Tag, u32);

/// All 512-byte units of one simulated device.
#[derive(Debug)]
pub(super) struct Medium {
    now: Vec<Tag>,
    /// Content that certainly survives a power cut.
    durable: Vec<Tag>,
    /// Stamp of the last change of each unit. A stamp is the value of a counter of changes: a
    /// larger stamp means a later change.
    now_stamp: Vec<u32>,
    durable_stamp: Vec<u32>,
    stamp: u32,
    /// Units that may not be durable.
    dirty: Vec<u32>,
}

impl Medium {
    /// Creates a medium with this durable content.
    pub(super) fn new(content: Vec<Tag>) -> Self {
        let units = content.len();
        Medium {
            durable: content.clone(),
            now: content,
            now_stamp: vec![0; units],
            durable_stamp: vec![0; units],
            stamp: 0,
            dirty: vec![],
        }
    }

    pub(super) fn now(&self) -> &[Tag] {
        &self.now
    }

    pub(super) fn durable(&self) -> &[Tag] {
        &self.durable
    }

    /// Returns the number of changes of the medium since the last power cut.
    pub(super) fn stamp(&self) -> u32 {
        self.stamp
    }

    /// Returns the stamp of the unit's last change.
    pub(super) fn changed_at(&self, unit: usize) -> u32 {
        self.now_stamp[unit]
    }

    /// Writes a unit. Sometimes the unit is durable immediately.
    pub(super) fn put(&mut self, unit: usize, tag: Tag, rng: &mut SimRng) {
        self.stamp += 1;
        (self.now[unit], self.now_stamp[unit]) = (tag, self.stamp);
        if rng.chance(200) {
            (self.durable[unit], self.durable_stamp[unit]) = (tag, self.stamp);
        } else {
            self.dirty.push(unit as u32);
        }
    }

    /// Writes units of 512 bytes durably.
    pub(super) fn replace(&mut self, first: usize, tags: &[Tag]) {
        for (unit, tag) in (first..).zip(tags) {
            self.stamp += 1;
            (self.now[unit], self.now_stamp[unit]) = (*tag, self.stamp);
        }
        self.secure(first..first + tags.len());
    }

    /// Appends durable units of 512 bytes at the end of the device.
    pub(super) fn grow(&mut self, tags: &[Tag]) {
        self.stamp += 1;
        self.now.extend(tags);
        self.durable.extend(tags);
        self.now_stamp.resize(self.now.len(), self.stamp);
        self.durable_stamp.resize(self.now.len(), self.stamp);
    }

    /// Returns the 512-byte units that a flush that starts now must make durable.
    pub(super) fn snapshot(&mut self) -> Vec<Flushing> {
        self.dirty.sort_unstable();
        self.dirty.dedup();
        let state = |unit: &u32| (*unit, self.now[*unit as usize], self.now_stamp[*unit as usize]);
        self.dirty.iter().map(state).collect()
    }

    /// Completes a flush: the units in the flush's [`snapshot`](Self::snapshot) become durable.
    pub(super) fn settle(&mut self, flushing: &[Flushing]) {
        for (unit, tag, stamp) in flushing {
            let unit = *unit as usize;
            if self.durable_stamp[unit] < *stamp {
                (self.durable[unit], self.durable_stamp[unit]) = (*tag, *stamp);
            }
        }
        let (now, durable) = (&self.now_stamp, &self.durable_stamp);
        self.dirty.retain(|unit| durable[*unit as usize] < now[*unit as usize]);
    }

    /// Loses a random part (none, some or all) of the data that is not durable. A flush in progress
    /// does not restore the lost data.
    pub(super) fn lose(&mut self, rng: &mut SimRng) {
        let share = rng.pick(&[0, 500, 500, 1000]);
        for unit in std::mem::take(&mut self.dirty) {
            if !rng.chance(share) {
                self.dirty.push(unit);
                continue;
            }
            let unit = unit as usize;
            self.stamp += 1;
            self.now[unit] = self.durable[unit];
            (self.now_stamp[unit], self.durable_stamp[unit]) = (self.stamp, self.stamp);
        }
    }

    /// Makes flushes skip a random part (none, some or all) of the volatile data. The skipped part
    /// stays volatile until the next power cut.
    pub(super) fn forget_dirty(&mut self, rng: &mut SimRng) {
        let share = rng.pick(&[0, 500, 500, 1000]);
        for unit in std::mem::take(&mut self.dirty) {
            if !rng.chance(share) {
                self.dirty.push(unit);
                continue;
            }
            self.stamp += 1;
            self.durable_stamp[unit as usize] = self.stamp;
            self.now_stamp[unit as usize] = self.stamp;
        }
    }

    /// Makes the content of these 512-byte units durable.
    pub(super) fn secure(&mut self, units: std::ops::Range<usize>) {
        for unit in units {
            (self.durable[unit], self.durable_stamp[unit]) = (self.now[unit], self.now_stamp[unit]);
        }
    }

    /// Returns a random content that may remain after a power cut.
    pub(super) fn after_power_cut(&self, rng: &mut SimRng) -> Vec<Tag> {
        let mut media = self.durable.clone();
        // The device may have written none, all, or any part of the volatile data.
        let share = rng.pick(&[0, 500, 500, 1000]);
        for unit in &self.dirty {
            if rng.chance(share) {
                media[*unit as usize] = self.now[*unit as usize];
            }
        }
        media
    }

    /// Cuts the power: the medium keeps one of the possible contents.
    pub(super) fn cut_power(&mut self, rng: &mut SimRng) {
        *self = Medium::new(self.after_power_cut(rng));
    }

    /// Replaces the whole content, durably.
    pub(super) fn scramble(&mut self, mut with: impl FnMut() -> Tag) {
        *self = Medium::new(self.now.iter().map(|_| with()).collect());
    }
}
