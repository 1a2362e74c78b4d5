//! Devices without bytes: contents of flash and backings, and the effects of I/O in flight.
//!
//! A write takes effect unit by unit, some units when it is submitted and some when it completes; a read
//! sees each unit at one of these two moments. So overlapping I/Os mix, as on a real device, and a failed
//! I/O leaves partial effects. Overlaps that an engine must never cause are refused at submission.

mod backing;
mod flash;
mod medium;

use hob_engine::io::Io;

use crate::content::{Tag, UNIT_BYTES};
use crate::rng::{SimRng, scatter};
pub use backing::{Backing, BackingFaults, HOST_SHIFT};
pub use flash::{DeviceFailure, Flash, FlashFaults};
use medium::Medium;

/// Defects of a device, to test whether the checkers notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceDefect {
    /// Flash loses writes, and returns old data with the checksums of the new data.
    ForgedChecksums,
    /// Flushes are acknowledged and have no effect.
    EmptyFlush,
    /// FUA writes are acknowledged before they are durable.
    IgnoredFua,
    /// Writes are acknowledged and take effect at the next one.
    EarlyAcknowledgement,
    /// Only the first half of long writes takes effect.
    HalfWrite,
    /// Flushes of flash are acknowledged and have no effect.
    EmptyFlashFlush,
    /// Some journal pages are reported as written and are not.
    LostJournalPage,
}

/// How a process of the engine ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Crash {
    /// Devices keep durable data, and any part of the rest.
    PowerCut,
    /// The process is killed: devices keep everything that completed, and any part of the I/O in flight.
    Kill,
}

/// An I/O that a device has ended.
#[derive(Debug)]
pub struct Done {
    /// The I/O.
    pub io: Io,
    /// How it ended.
    pub result: Result<(), hob_engine::io::IoError>,
    /// Data of a read.
    pub tags: Vec<Tag>,
    /// The checksums that storage computes.
    pub sums: Vec<u32>,
}

/// Handles a change in flight without a recipient of its result: each part of it may happen.
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
    /// Data of a write; data that a read has seen.
    tags: Vec<Tag>,
    /// Decides which units take effect at submission.
    mix: u64,
}

impl Transfer {
    fn new(io: Io, tags: Vec<Tag>, rng: &mut SimRng) -> Self {
        let (first, count) = ((io.offset / UNIT_BYTES) as usize, (io.len / UNIT_BYTES) as usize);
        Transfer { io, first, count, tags, mix: rng.roll() }
    }

    /// Returns the units that take effect at this moment.
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
