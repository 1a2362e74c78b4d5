//! Simulated flash devices and backings that store tags instead of bytes, and the effects of I/O in
//! flight.
//!
//! A write takes effect unit by unit, some units at submission and some at completion. A read also
//! transfers some units at its submission and the others at its completion. Overlapping I/Os thus
//! mix as on a real device, and a failed write may take effect in part. A write that overlaps
//! another I/O in flight is a [`Violation`](crate::Violation), because the engine must send
//! overlapping I/Os one after the other. Two exceptions are a write of equal content to flash, and
//! a read by another host.

mod backing;
mod flash;
mod medium;

use hob_engine::io::Io;

use crate::content::{Tag, UNIT_BYTES};
use crate::rng::{SimRng, scatter};
pub use backing::{Backing, BackingFaults, HOST_SHIFT};
pub use flash::{DeviceFailure, Flash, FlashFaults};
use medium::Medium;

/// Defects of a simulated device. Each defect tests whether the checkers notice a violation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceDefect {
    /// The flash device loses writes, and returns old data with the checksums of the new data.
    ForgedChecksums,
    /// The backing acknowledges flushes without effect.
    EmptyFlush,
    /// After a kill, the first flush of the backing does not make data durable that the killed process
    /// wrote.
    EmptyFirstFlush,
    /// The backing acknowledges FUA writes before they are durable.
    IgnoredFua,
    /// The backing acknowledges a write that takes effect only at the next write.
    EarlyAcknowledgement,
    /// The backing writes only the first half of each write that is longer than 512 bytes.
    HalfWrite,
    /// The flash device acknowledges flushes without effect.
    EmptyFlashFlush,
    /// The flash device reports some journal pages as written and does not write them.
    LostJournalPage,
}

/// The way in which an engine process ends without a clean shutdown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Crash {
    /// The power fails. Devices keep durable data, and a random part (none, some or all) of the
    /// other data.
    PowerCut,
    /// The process is killed. Devices keep all completed I/O, and a random part (none, some or all)
    /// of the I/O in flight.
    Kill,
}

/// An I/O that a device has completed.
#[derive(Debug)]
pub struct Done {
    /// The completed I/O.
    pub io: Io,
    /// Result of the I/O.
    pub result: Result<(), hob_engine::io::IoError>,
    /// Data that a read returned.
    pub tags: Vec<Tag>,
    /// Checksums of the data, as the storage crate computes them.
    pub sums: Vec<u32>,
}

/// Applies a random part (none, some or all) of a write in flight, as if the submitting process had
/// ended before the completion.
fn abandon(change: &Transfer, medium: &mut Medium, rng: &mut SimRng) {
    let share = rng.pick(&[0, 500, 1000]);
    for unit in change.moving(Moment::Completion) {
        if rng.chance(share) {
            medium.put(unit, change.tags[unit - change.first], rng);
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Moment {
    Submission,
    Completion,
}

/// An I/O in flight.
#[derive(Debug)]
struct Transfer {
    io: Io,
    first: usize,
    count: usize,
    /// Data of a write, or the data that a read has seen so far.
    tags: Vec<Tag>,
    /// Random bits, which decide which 512-byte units of the I/O take effect when it is submitted.
    /// The other units take effect when the I/O completes.
    mix: u64,
}

impl Transfer {
    fn new(io: Io, tags: Vec<Tag>, rng: &mut SimRng) -> Self {
        let (first, count) = ((io.offset / UNIT_BYTES) as usize, (io.len / UNIT_BYTES) as usize);
        Transfer { io, first, count, tags, mix: rng.roll() }
    }

    /// Returns the 512-byte units that the I/O reads or writes at this time: at its submission or
    /// at its completion.
    fn moving(&self, when: Moment) -> impl Iterator<Item = usize> + use<> {
        let mix = self.mix;
        self.units().filter(move |unit| {
            let early = match mix & 3 {
                0 => true,
                1 => false,
                _ => scatter(mix ^ *unit as u64) & 1 == 0,
            };
            early == (when == Moment::Submission)
        })
    }

    fn overlaps(&self, other: &Transfer) -> bool {
        self.first < other.first + other.count && other.first < self.first + self.count
    }

    fn units(&self) -> std::ops::Range<usize> {
        self.first..self.first + self.count
    }
}
