//! Checks dirty bitmaps. For each bitmap of the engine, the simulation records the acknowledged
//! changes since the bitmap began and the disk's content at the beginning.
//!
//! An acknowledged change must be in every bitmap that was recording at the time of the reply. If
//! the content of a 512-byte unit differs from its content when the bitmap began, the bitmap must
//! mark the unit. A frozen bitmap does not change. The rules for bitmaps also hold across restarts
//! of the engine. Like the daemon, the simulation keeps the bitmaps of a cleanly removed disk.
//! After a crash or a foreign write to the backing, a bitmap restarts with all granules marked.
//!
//! A separate random number generator chooses the histories with bitmaps, so that bitmaps do not
//! change the random choices of other histories.

use hob_engine::command::{Bitmap, BitmapChange, Command};
use hob_engine::granules::Granules;
use hob_engine::units::DiskId;

use super::{Sabotage, Simulation};
use crate::content::{Tag, UNIT_BYTES};
use crate::rng::SimRng;
use crate::{Violation, ensure};

/// Number that is combined with the seed of a history, to seed separate random numbers for
/// histories with bitmaps.
const SALT: u64 = 0x6469_7274_7921;

/// Maximum number of dirty bitmaps per disk.
const TRACKS_MAX: usize = 3;

#[derive(Debug)]
pub(super) struct Tracks {
    rng: SimRng,
    made: u64,
}

/// A dirty bitmap of a disk. While the disk is removed, the simulation keeps the bitmap and gives
/// it back when the disk is added again.
#[derive(Debug)]
pub(super) struct Track {
    name: String,
    granule_bytes: u64,
    /// For each 512-byte unit of the disk, true if an acknowledged change touched it since the
    /// bitmap began.
    changed: Vec<bool>,
    /// Content of each 512-byte unit when the bitmap began; `None` if this content is unknown.
    before: Vec<Option<Tag>>,
    /// Content of the bitmap if it is frozen. This content must not change.
    frozen: Option<Granules>,
    /// Content of the bitmap when its disk was removed cleanly; `None` while the disk is present.
    kept: Option<Granules>,
}

impl Tracks {
    pub(super) fn draw(seed: u64, permille: u32) -> Option<Tracks> {
        let mut rng = SimRng::new(seed ^ SALT);
        rng.chance(permille).then_some(Tracks { rng, made: 0 })
    }

    fn name(&mut self) -> String {
        self.made += 1;
        format!("b{}", self.made)
    }
}

impl Simulation<'_> {
    /// Creates the first bitmap of each disk.
    pub(super) fn begin_with_bitmaps(&mut self) -> Result<(), Violation> {
        (0..self.disks.len()).try_for_each(|disk| self.add_bitmap(disk))
    }

    /// Sometimes changes a disk's bitmaps.
    pub(super) fn maybe_change_bitmaps(&mut self) -> Result<(), Violation> {
        let disks = self.disks.len() as u64;
        let Some(Tracks { rng, .. }) = &mut self.tracks else { return Ok(()) };
        if !rng.chance(400) {
            return Ok(());
        }
        let (disk, what, which) = (rng.below(disks) as usize, rng.below(12), rng.below(64) as usize);
        let state = &self.disks[disk];
        if !state.present || state.leaving {
            return Ok(());
        }
        let is_frozen = |track: &&Track| track.frozen.is_some();
        let (frozen, recording): (Vec<&Track>, Vec<&Track>) = state.tracks.iter().partition(is_frozen);
        let pick = |tracks: &[&Track]| tracks.get(which % tracks.len().max(1)).map(|t| t.name.clone());
        let full = state.tracks.len() >= TRACKS_MAX;
        let change = match (what, pick(&recording), pick(&frozen)) {
            (0..2, ..) | (_, None, None) => return if full { Ok(()) } else { self.add_bitmap(disk) },
            (2, Some(name), _) | (2 | 3, None, Some(name)) | (3, _, Some(name)) => BitmapChange::Remove(name),
            (3 | 4, Some(name), _) => BitmapChange::Clear(name),
            (5..9, Some(name), _) if !full => {
                let frozen = self.tracks.as_mut().expect("looked at").name();
                self.report.rotations += 1;
                BitmapChange::Rotate { name, frozen }
            }
            (_, Some(into), Some(from)) => BitmapChange::Merge { from, into },
            _ => return Ok(()),
        };
        self.change_bitmaps(disk, change)
    }

    fn add_bitmap(&mut self, disk: usize) -> Result<(), Violation> {
        let Some(tracks) = &mut self.tracks else { return Ok(()) };
        let (name, granule) = (tracks.name(), tracks.rng.pick(&[4096, 8192, 64 << 10, 1 << 20]));
        let size = self.disks[disk].size * UNIT_BYTES;
        let granules = Granules::new(size, granule).expect("the granularity is valid");
        self.change_bitmaps(disk, BitmapChange::Add(Box::new(Bitmap::recording(name, granules))))
    }

    fn change_bitmaps(&mut self, disk: usize, change: BitmapChange) -> Result<(), Violation> {
        // Changes that were acknowledged earlier do not belong to the new bitmap.
        self.drain()?;
        self.command(disk, Command::Bitmap(change));
        self.drain()
    }

    /// Gives an added disk its earlier bitmaps.
    pub(super) fn give_bitmaps(&mut self, disk: usize) {
        for at in 0..self.disks[disk].tracks.len() {
            let fresh = self.strikes(Sabotage::FreshBitmap, 500);
            let size = self.disks[disk].size * UNIT_BYTES;
            let track = &mut self.disks[disk].tracks[at];
            // The disk may have grown since its removal.
            track.frozen.iter_mut().chain(&mut track.kept).for_each(|granules| granules.grow(size));
            let kept = track.kept.take();
            let granules = track.frozen.clone().or(kept).unwrap_or_else(|| {
                let mut all = Granules::new(size, track.granule_bytes).expect("the granularity is unchanged");
                if !fresh {
                    all.insert_all();
                }
                all
            });
            let is_recording = track.frozen.is_none();
            let bitmap = Bitmap { name: track.name.clone(), granules, is_recording };
            self.command(disk, Command::Bitmap(BitmapChange::Add(Box::new(bitmap))));
        }
    }

    /// Keeps the bitmaps of a disk that was removed cleanly.
    pub(super) fn bitmaps_are_left(&mut self, disk: usize, bitmaps: Vec<Bitmap>) -> Result<(), Violation> {
        for Bitmap { name, granules, is_recording } in bitmaps {
            let track = self.disks[disk].tracks.iter_mut().find(|track| track.name == name);
            let track = track.ok_or_else(|| {
                Violation(format!("the engine returns an unknown bitmap {name} of disk {disk}"))
            })?;
            ensure!(
                is_recording == track.frozen.is_none(),
                "disk {disk}: engine and simulation differ about whether bitmap {name} is frozen"
            );
            track.kept = Some(granules);
        }
        self.check_bitmaps(disk)
    }

    /// Discards the bitmaps of a crashed engine.
    pub(super) fn bitmaps_are_lost(&mut self, disk: usize) {
        let state = &mut self.disks[disk];
        if state.present || state.leaving {
            state.tracks.iter_mut().for_each(|track| track.kept = None);
        }
    }

    /// Records the whole disk as changed in the disk's recording bitmaps, because the content may
    /// change for reasons that the engine cannot know.
    pub(super) fn distrust_bitmaps(&mut self, disk: usize) {
        let state = &mut self.disks[disk];
        let recording = state.tracks.iter_mut().filter(|track| track.frozen.is_none());
        let names: Vec<String> = recording
            .map(|track| {
                track.kept = None;
                track.name.clone()
            })
            .collect();
        if state.present && !state.leaving {
            for name in names {
                self.command(disk, Command::Bitmap(BitmapChange::InsertAll(name)));
            }
        }
    }

    /// Handles the successful end of a command that changes bitmaps.
    pub(super) fn bitmaps_changed(&mut self, disk: usize, change: &BitmapChange) -> Result<(), Violation> {
        let state = &self.disks[disk];
        let before: Vec<Option<Tag>> =
            (0..state.units()).map(|unit| state.model.pinned(unit as u32)).collect();
        let units = before.len();
        let frozen = |name: &str| {
            let found = self.engine.bitmaps(DiskId(disk as u32)).iter().find(|bitmap| bitmap.name == name);
            found.map(|bitmap| bitmap.granules.clone())
        };
        self.report.bitmaps += 1;
        match change {
            BitmapChange::Add(bitmap) => {
                if state.tracks.iter().any(|track| track.name == bitmap.name) {
                    return Ok(());
                }
                let track = Track {
                    name: bitmap.name.clone(),
                    granule_bytes: bitmap.granules.granule_bytes(),
                    changed: vec![false; units],
                    before,
                    frozen: None,
                    kept: None,
                };
                self.disks[disk].tracks.push(track);
            }
            BitmapChange::Remove(name) => self.disks[disk].tracks.retain(|track| track.name != *name),
            BitmapChange::Clear(name) => {
                let track = self.track_mut(disk, name);
                (track.changed, track.before) = (vec![false; units], before);
            }
            BitmapChange::Rotate { name, frozen: other } => {
                let frozen = frozen(other);
                ensure!(frozen.is_some(), "disk {disk} has no bitmap {other} after a rotation");
                let track = self.track_mut(disk, name);
                let granule_bytes = track.granule_bytes;
                let changed = std::mem::replace(&mut track.changed, vec![false; units]);
                let was = std::mem::replace(&mut track.before, before);
                let name = other.clone();
                let track = Track { name, granule_bytes, changed, before: was, frozen, kept: None };
                self.disks[disk].tracks.push(track);
            }
            BitmapChange::Merge { from, into } => {
                let changed = std::mem::take(&mut self.track_mut(disk, from).changed);
                let track = self.track_mut(disk, into);
                track.changed.iter_mut().zip(changed).for_each(|(mine, theirs)| *mine |= theirs);
                self.disks[disk].tracks.retain(|track| track.name != *from);
            }
            BitmapChange::InsertAll(_) => {}
        }
        self.check_bitmaps(disk)
    }

    /// Extends the expected bitmaps when the backing grows.
    pub(super) fn grow_tracks(&mut self, disk: usize) {
        let units = self.disks[disk].units() as usize;
        for track in &mut self.disks[disk].tracks {
            track.changed.resize(units, false);
            track.before.resize(units, None);
        }
    }

    /// Extends the expected bitmaps when the engine's disk grows. The new part counts as changed,
    /// also in frozen bitmaps.
    pub(super) fn tracked_disk_has_grown(&mut self, disk: usize) -> Result<(), Violation> {
        let size = self.disks[disk].size * UNIT_BYTES;
        for track in &mut self.disks[disk].tracks {
            track.frozen.iter_mut().for_each(|frozen| frozen.grow(size));
        }
        self.check_bitmaps(disk)
    }

    fn track_mut(&mut self, disk: usize, name: &str) -> &mut Track {
        let tracks = &mut self.disks[disk].tracks;
        tracks.iter_mut().find(|track| track.name == name).expect("the simulation sent the command")
    }

    /// Returns the content of a bitmap, from the engine or from the kept bitmaps of a removed disk.
    fn noted<'a>(&'a self, disk: usize, track: &'a Track) -> Option<&'a Granules> {
        let bitmaps = self.engine.bitmaps(DiskId(disk as u32));
        let there = bitmaps.iter().find(|bitmap| bitmap.name == track.name).map(|bitmap| &bitmap.granules);
        there.or(track.kept.as_ref())
    }

    /// Records an acknowledged change of these 512-byte units in the expected bitmaps.
    pub(super) fn track_change(&mut self, disk: usize, first: u32, count: u32) -> Result<(), Violation> {
        for track in self.disks[disk].tracks.iter_mut().filter(|track| track.frozen.is_none()) {
            track.changed[first as usize..(first + count) as usize].fill(true);
        }
        for track in self.disks[disk].tracks.iter().filter(|track| track.frozen.is_none()) {
            let Some(noted) = self.noted(disk, track) else { continue };
            let has = |unit: u32| noted.contains(u64::from(unit) * UNIT_BYTES);
            let name = &track.name;
            ensure!((first..first + count).all(has), "disk {disk}: a change is not in bitmap {name}");
        }
        Ok(())
    }

    /// Checks a read against the bitmaps: a bitmap must mark each changed 512-byte unit whose
    /// content is certain.
    pub(super) fn track_read(&self, disk: usize, first: u32, count: u32) -> Result<(), Violation> {
        let state = &self.disks[disk];
        for track in state.tracks.iter().filter(|track| track.frozen.is_none()) {
            let Some(noted) = self.noted(disk, track) else { continue };
            for unit in first..first + count {
                let (before, now) = (track.before[unit as usize], state.model.pinned(unit));
                let same = before.is_none() || now.is_none() || before == now;
                let is_noted = same || noted.contains(u64::from(unit) * UNIT_BYTES);
                let name = &track.name;
                ensure!(is_noted, "disk {disk} unit {unit}: other data than when bitmap {name} began");
            }
        }
        Ok(())
    }

    /// Checks every bitmap of a disk.
    pub(super) fn check_bitmaps(&self, disk: usize) -> Result<(), Violation> {
        for track in &self.disks[disk].tracks {
            let Some(noted) = self.noted(disk, track) else { continue };
            let name = &track.name;
            if let Some(frozen) = &track.frozen {
                // If several growths end at once, the simulation may not know the last one yet.
                let mut frozen = frozen.clone();
                frozen.grow(noted.disk_bytes().max(frozen.disk_bytes()));
                ensure!(frozen == *noted, "disk {disk}: the frozen bitmap {name} changed");
            }
            let missing = (0..)
                .zip(&track.changed)
                .find(|(unit, changed)| **changed && !noted.contains(*unit as u64 * UNIT_BYTES));
            ensure!(missing.is_none(), "disk {disk}: {missing:?} is not in bitmap {name}");
        }
        Ok(())
    }

    pub(super) fn check_all_bitmaps(&self) -> Result<(), Violation> {
        (0..self.disks.len()).try_for_each(|disk| self.check_bitmaps(disk))
    }
}
