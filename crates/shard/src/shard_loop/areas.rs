//! The memory of the RAM tiers of a shard's disks, and the copies to and from it. A RAM tier is a
//! cache in memory above a disk's flash cache. The engine decides what to copy, and this module
//! copies the bytes.

use hob_engine::io::{BufferCopy, BufferSlice, CopyEnd};
use hob_engine::units::DiskId;
use hob_storage::area::Area;
use hob_storage::buffers::Arena;

/// The RAM tier of each disk, indexed by disk id.
#[derive(Default)]
pub(super) struct Areas(Vec<Option<Area>>);

impl Areas {
    /// Replaces the memory of a disk's RAM tier. Returns the previous memory.
    pub(super) fn replace(&mut self, disk: DiskId, area: Option<Area>) -> Option<Area> {
        let index = disk.0 as usize;
        if area.is_some() && self.0.len() <= index {
            self.0.resize_with(index + 1, || None);
        }
        match self.0.get_mut(index) {
            Some(place) => std::mem::replace(place, area),
            None => None,
        }
    }

    /// Executes one copy that the engine ordered.
    pub(super) fn copy(&mut self, arena: &mut Arena, copy: &BufferCopy) {
        let disk = match (copy.from, copy.to) {
            (CopyEnd::Memory { disk, .. }, _) | (_, CopyEnd::Memory { disk, .. }) => disk,
            (CopyEnd::Buffer { id: from, offset }, CopyEnd::Buffer { id: to, offset: at }) => {
                let slice = |id, offset| BufferSlice { id, offset, len: copy.len };
                return arena.copy(slice(from, offset), slice(to, at));
            }
            (CopyEnd::Zeroes, CopyEnd::Buffer { id, offset }) => {
                return arena.slice_mut(BufferSlice { id, offset, len: copy.len }).fill(0);
            }
            ends => panic!("a copy between {ends:?}"),
        };
        let area = self.0[disk.0 as usize].as_mut().expect("the engine copies to memory that it was given");
        area.copy(arena, copy);
    }
}
