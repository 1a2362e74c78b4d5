//! Finds the parent of an image that is a clone: its backing file, and the blocks that the image
//! has itself (docs/decisions/0071).
//!
//! hob asks `qemu-nbd` for these blocks when the image is opened and locked, so that no other
//! program changes them. From then on only this process writes the image, and
//! [`overlay`](crate::backing::overlay) tracks the changes.
//!
//! QEMU needs about a second for each TiB. So a thread asks for the rest of a large image while the
//! image is served. After each answer the thread pauses for as long as the answer took, because
//! `qemu-nbd` also serves the disk during this work.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant as Clock};

use super::super::nbd::depth::OwnRanges;
use super::super::{Driver, NotShared, OwnMap, Parent, image_state};
use super::child::Server;
use super::node::Image;
use super::{QemuNbd, uri_of};

/// Longest time to wait for one answer about the image's own blocks.
const ANSWER_MAX: Duration = Duration::from_secs(20);

/// Time after which the opening of an image waits for no further answers.
const OPENING_MAX: Duration = Duration::from_secs(1);

/// Longest range of one question while the image is opened, bytes.
const OPENING_BYTES_MAX: u64 = 1 << 30;

/// Longest range of one question while the image is served, bytes.
const SERVED_BYTES_MAX: u64 = 128 << 20;

/// Longest pause between two questions while the image is served.
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// Pause after an error while the image is served. A `qemu-nbd` that ended is started again.
const RETRY_PAUSE: Duration = Duration::from_secs(5);

/// Number of errors in a row after which the thread asks no more.
const ERRORS_MAX: u32 = 10;

/// Smallest unit of the map of own blocks, bytes. The usual clusters of qcow2 and the grains of
/// VMDK have this size.
const OBJECT_BYTES_MIN: u64 = 64 << 10;

/// Maximum number of units in the map of own blocks, which has one bit for each.
const OBJECTS_MAX: u64 = 1 << 24;

impl Image {
    /// Returns the name of the image's present content; `None` if it is unknown.
    pub(super) fn state(&self) -> Option<String> {
        image_state(&self.path, self.format, &self.files).ok()
    }

    /// Returns the name of the parent's present content; `None` if it is unknown, or if the image
    /// has no parent.
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
        let mut own = OwnMap::unknown(object_bytes(size_bytes), size_bytes);
        let mut ranges = OwnRanges::connect(&uri_of(&self.server), size_bytes, ANSWER_MAX)?;
        let opened_by = Clock::now() + OPENING_MAX;
        while !ranges.is_done() && Clock::now() < opened_by {
            ask(&mut ranges, OPENING_BYTES_MAX, &mut own).map_err(NotShared::Unknown)?;
        }
        if own.is_complete() && own.parent_bytes() == 0 {
            let why = "it has all blocks itself, or QEMU does not know which blocks its parent has";
            return Err(NotShared::Unsuitable(why.to_owned()));
        }
        if !ranges.is_done() {
            let (server, own) = (Arc::downgrade(&self.server), own.clone());
            let image = self.server.image().path.display().to_string();
            let thread = std::thread::Builder::new().name("hob-own-blocks".into());
            thread.spawn(move || ask_while_served(ranges, own, &server, &image)).map_err(|error| {
                NotShared::Unknown(format!(
                    "cannot start the thread that asks for the image's blocks: {error}"
                ))
            })?;
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

/// Asks which parts of the next range the image has itself, and records the answer.
fn ask(ranges: &mut OwnRanges, bytes_max: u64, own: &mut OwnMap) -> Result<(), String> {
    ranges.ask(bytes_max, ANSWER_MAX, &mut |offset, len| own.take(offset, len))?;
    own.note_known(if ranges.is_done() { u64::MAX } else { ranges.at() });
    Ok(())
}

/// Asks which parts of the rest of a served image the image has itself, until the image is closed.
fn ask_while_served(mut ranges: OwnRanges, mut own: OwnMap, server: &Weak<Server>, image: &str) {
    let mut errors = 0;
    while !ranges.is_done() && server.strong_count() > 0 {
        let begun = Clock::now();
        let asked = match errors {
            0 => Ok(()),
            _ => ranges.reconnect(ANSWER_MAX),
        };
        match asked.and_then(|()| ask(&mut ranges, SERVED_BYTES_MAX, &mut own)) {
            Ok(()) => {
                errors = 0;
                std::thread::sleep(begun.elapsed().min(PAUSE_MAX));
            }
            Err(_) if server.strong_count() == 0 => return,
            Err(why) => {
                errors += 1;
                if errors > ERRORS_MAX {
                    let known_bytes = ranges.at();
                    tracing::warn!(
                        image,
                        why,
                        known_bytes,
                        "qemu-nbd does not tell any more which blocks the image has itself; the clone shares \
                         blocks only of the known first part"
                    );
                    return;
                }
                std::thread::sleep(RETRY_PAUSE);
            }
        }
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
