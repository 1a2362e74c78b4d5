//! Dirty bitmaps: the granules of a disk that changed since each bitmap was added or cleared.
//!
//! A change is recorded when it is answered. A failed change is recorded too, because it may have
//! been done in part. So each acknowledged change is in every bitmap that was recording at that
//! time. A change in flight while bitmaps are [rotated](BitmapChange::Rotate) is recorded in the
//! new bitmap. The reader of the old bitmap may see all, part or nothing of that change. The whole
//! disk counts as changed if its content changes in another way: acknowledged writes were discarded
//! (`structure.rs`), another host had the disk (`ownership.rs`), or the daemon reports a change
//! ([`BitmapChange::InsertAll`]).
//!
//! When a disk is removed, [`Event::Bitmaps`] has the content of its bitmaps, and the daemon stores
//! this content. If the process is killed before that, each bitmap starts again with the whole disk
//! marked as changed.

use super::Engine;
use super::disk::Disk;
use crate::command::{Bitmap, BitmapChange, CommandError, Event, Role};
use crate::granules::Granules;
use crate::io::Request;
use crate::units::DiskId;

impl Engine {
    /// Returns a disk's bitmaps, in the order in which they were made.
    pub fn bitmaps(&self, disk: DiskId) -> &[Bitmap] {
        let disk = self.disks.get(disk.0 as usize).and_then(Option::as_ref);
        disk.and_then(|disk| disk.bitmaps.as_deref()).map_or(&[], Vec::as_slice)
    }

    /// Reports the content of the bitmaps of a disk that is being removed.
    pub(super) fn hand_out_bitmaps(&mut self, id: DiskId) {
        let disk = self.disk_mut(id);
        if disk.ownership.role != Role::Here {
            // Another host owns the disk, or will own it, and may change any data.
            disk.note_everything();
        }
        if let Some(bitmaps) = disk.bitmaps.take() {
            self.event_out.push_back(Event::Bitmaps { disk: id, bitmaps: *bitmaps });
        }
    }
}

impl Disk {
    /// Records a change in the bitmaps when the change is answered.
    #[inline]
    pub(super) fn note_change(&mut self, request: &Request) {
        if let Some(bitmaps) = &mut self.bitmaps
            && request.op.modifies()
        {
            let recording = bitmaps.iter_mut().filter(|bitmap| bitmap.is_recording);
            recording.for_each(|bitmap| bitmap.granules.insert(request.offset, request.len));
        }
    }

    /// Marks the whole disk as changed in all bitmaps.
    pub(super) fn note_everything(&mut self) {
        let bitmaps = self.bitmaps.iter_mut().flat_map(|bitmaps| bitmaps.iter_mut());
        bitmaps.filter(|bitmap| bitmap.is_recording).for_each(|bitmap| bitmap.granules.insert_all());
    }

    /// Carries out a command that changes the disk's bitmaps.
    pub(super) fn change_bitmaps(&mut self, change: BitmapChange) -> Result<(), CommandError> {
        let size = self.config.size_bytes;
        let bitmaps = self.bitmaps.get_or_insert_default();
        let result = change_list(bitmaps, change, size);
        if bitmaps.is_empty() {
            self.bitmaps = None;
        }
        result
    }
}

fn change_list(bitmaps: &mut Vec<Bitmap>, change: BitmapChange, size: u64) -> Result<(), CommandError> {
    let find = |bitmaps: &[Bitmap], name: &str| bitmaps.iter().position(|bitmap| bitmap.name == name);
    let there = |bitmaps: &[Bitmap], name: &str| find(bitmaps, name).ok_or(CommandError::NoSuchBitmap);
    let recording = |bitmaps: &[Bitmap], name: &str| match there(bitmaps, name)? {
        at if bitmaps[at].is_recording => Ok(at),
        _ => Err(CommandError::BitmapFrozen),
    };
    match change {
        BitmapChange::Add(bitmap) => {
            if find(bitmaps, &bitmap.name).is_some() {
                return Err(CommandError::BitmapExists);
            }
            if bitmap.granules.disk_bytes() != size {
                return Err(CommandError::Unworkable);
            }
            bitmaps.push(*bitmap);
        }
        BitmapChange::Remove(name) => {
            let at = there(bitmaps, &name)?;
            bitmaps.remove(at);
        }
        BitmapChange::Clear(name) => {
            let at = recording(bitmaps, &name)?;
            bitmaps[at].granules.clear();
        }
        BitmapChange::Rotate { name, frozen } => {
            if find(bitmaps, &frozen).is_some() {
                return Err(CommandError::BitmapExists);
            }
            let at = recording(bitmaps, &name)?;
            let granules = bitmaps[at].granules.clone();
            bitmaps[at].granules.clear();
            bitmaps.push(Bitmap { name: frozen, granules, is_recording: false });
        }
        BitmapChange::Merge { from, into } => {
            let from = there(bitmaps, &from)?;
            let into = recording(bitmaps, &into)?;
            if from == into {
                return Err(CommandError::BitmapExists);
            }
            let granules = bitmaps[from].granules.clone();
            bitmaps[into].granules.insert_those_of(&granules);
            bitmaps.remove(from);
        }
        BitmapChange::InsertAll(name) => {
            let at = recording(bitmaps, &name)?;
            bitmaps[at].granules.insert_all();
        }
    }
    Ok(())
}

impl Bitmap {
    /// Creates a bitmap that records from now on.
    pub fn recording(name: String, granules: Granules) -> Bitmap {
        Bitmap { name, granules, is_recording: true }
    }
}
