//! Devices without bytes: what is on flash and on the backings, and what I/O in flight may do to it.
//!
//! A write takes effect unit by unit, some units when it is submitted and some when it completes; a
//! read looks at each unit at one of these two moments. So whatever overlaps in flight mixes, as on
//! a real device, and what fails leaves a part behind. What an engine must never let overlap is
//! refused at submission.

mod backing;
mod flash;
mod medium;

use hob_engine::io::Io;

use crate::content::{Tag, UNIT_BYTES};
use crate::dice::{Dice, scatter};
pub use backing::{Backing, BackingFaults, HOST_SHIFT};
pub use flash::{Ailment, Flash, FlashFaults};
use medium::Medium;

/// Lies that a device can be made to tell, to see whether the checkers notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lie {
    /// Flash loses writes, and delivers what is there with the checksums of what should be.
    ForgedChecksums,
    /// Flushes are acknowledged and make nothing durable.
    EmptyFlush,
    /// FUA writes are acknowledged before they are durable.
    IgnoredFua,
    /// Writes are acknowledged and take effect at the next one.
    EarlyAcknowledgement,
    /// Of long writes only the first half takes effect.
    HalfWrite,
    /// Flushes of flash are acknowledged and make nothing durable.
    EmptyFlashFlush,
    /// Now and then a page of the journal is reported written and was not.
    LostJournalPage,
}

/// How a life of the engine ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Crash {
    /// Devices keep what is durable, and any part of the rest.
    PowerCut,
    /// The process is killed: devices keep everything that completed, and any part of what was in flight.
    Kill,
}

/// An I/O that a device has ended.
#[derive(Debug)]
pub struct Done {
    /// The I/O.
    pub io: Io,
    /// How it ended.
    pub result: Result<(), hob_engine::io::IoError>,
    /// What a read delivered.
    pub tags: Vec<Tag>,
    /// The checksums storage computes.
    pub sums: Vec<u32>,
}

/// A change that was in flight when nobody could be told any more: each part of it may happen.
fn abandon(change: &Transfer, medium: &mut Medium, dice: &mut Dice) {
    let share = dice.pick(&[0, 500, 1000]);
    for unit in change.moving(Moment::Completion) {
        if dice.chance(share) {
            medium.put(unit, change.tags[unit - change.first], dice);
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
    /// What a write writes; what a read has seen.
    tags: Vec<Tag>,
    /// Decides which units move at submission.
    mix: u64,
}

impl Transfer {
    fn new(io: Io, tags: Vec<Tag>, dice: &mut Dice) -> Self {
        let (first, count) = ((io.offset / UNIT_BYTES) as usize, (io.len / UNIT_BYTES) as usize);
        Transfer { io, first, count, tags, mix: dice.roll() }
    }

    /// The units that move at this moment.
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
