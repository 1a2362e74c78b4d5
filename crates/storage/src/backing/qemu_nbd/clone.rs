//! Finds the parent of an image that is a clone: its backing file, and the blocks that the image has
//! itself (docs/decisions/0071).
//!
//! The blocks are asked for when the image is opened and locked, so that no other program changes
//! them. From then on only this process writes the image, and
//! [`overlay`](crate::backing::overlay) tracks the changes.

use std::time::Duration;

use super::super::nbd::depth::for_each_own_range;
use super::super::{Driver, NotShared, OwnMap, Parent, image_state};
use super::node::Image;
use super::{QemuNbd, uri_of};

/// Longest time to ask for the image's own blocks.
const ASK_MAX: Duration = Duration::from_secs(20);

/// Smallest unit of the map of own blocks, bytes. It is the usual cluster of qcow2 and the grain of
/// VMDK.
const OBJECT_BYTES_MIN: u64 = 64 << 10;

/// Maximum number of units in the map of own blocks, which has one bit for each.
const OBJECTS_MAX: u64 = 1 << 24;

impl Image {
    /// Returns the name of the image's present content; `None` if it is unknown.
    pub(super) fn state(&self) -> Option<String> {
        image_state(&self.path, self.format, &self.files).ok()
    }

    /// Returns the name of the parent's present content; `None` if it is unknown, or if the image has
    /// no parent.
    pub(super) fn parent_state(&self) -> Option<String> {
        let (parent, below) = self.parent()?;
        image_state(&parent.path, parent.format, below).ok()
    }
}

impl QemuNbd {
    /// Returns the image's backing file as the parent of a clone; `None` if it has none. Waits for
    /// the child process. The error says why blocks cannot be shared with the parent.
    pub(super) fn find_parent(&self) -> Result<Option<Parent>, NotShared> {
        let Some((parent, below)) = self.server.image().parent() else { return Ok(None) };
        if !self.options.locked {
            let why = "it is not locked, so other programs may change it";
            return Err(NotShared::Unsuitable(why.to_owned()));
        }
        let path = parent.path.display();
        let spec = parent
            .path
            .to_str()
            .ok_or_else(|| NotShared::Unsuitable(format!("the path of its parent {path} is not UTF-8")))?;
        let constant = image_state(&parent.path, parent.format, below)
            .map_err(|error| NotShared::Unknown(format!("the state of its parent is unknown: {error}")))?;
        match &self.parent_state {
            Some(before) if *before == constant => {}
            Some(_) => {
                let what = "was changed or replaced while the image was opened";
                return Err(NotShared::Unsuitable(format!("its parent {path} {what}")));
            }
            None => {
                let what = "was unknown when the image was opened";
                return Err(NotShared::Unknown(format!("the state of its parent {path} {what}")));
            }
        }
        let size_bytes = self.info().size_bytes;
        let mut own = OwnMap::new(object_bytes(size_bytes), size_bytes);
        for_each_own_range(&uri_of(&self.server), size_bytes, ASK_MAX, &mut |offset, len| {
            own.take(offset, len);
        })?;
        if own.parent_bytes() == 0 {
            let why = "it has all blocks itself, or QEMU does not know which ones its parent has";
            return Err(NotShared::Unsuitable(why.to_owned()));
        }
        Ok(Some(Parent {
            spec: spec.to_owned(),
            format: Some(parent.format),
            files: below.to_vec(),
            constant,
            own,
        }))
    }
}

/// Returns the unit of the map of own blocks for an image of this size, bytes.
fn object_bytes(size_bytes: u64) -> u64 {
    size_bytes.div_ceil(OBJECTS_MAX).next_power_of_two().max(OBJECT_BYTES_MIN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_map_of_own_blocks_is_limited() {
        for (size_bytes, object) in [
            (512, OBJECT_BYTES_MIN),
            (1 << 40, OBJECT_BYTES_MIN),
            ((1 << 40) + 512, 2 * OBJECT_BYTES_MIN),
            (64 << 40, 64 * OBJECT_BYTES_MIN),
        ] {
            assert_eq!(object_bytes(size_bytes), object, "{size_bytes}");
            assert!(size_bytes.div_ceil(object_bytes(size_bytes)) <= OBJECTS_MAX);
        }
    }
}
