//! Selects the ranges that the destination reads from the source next: first a list of ranges,
//! hottest first, then ranges that changed since they were read.
//!
//! The puller moves no data. The caller asks for the [`next`](Puller::next) range whenever another
//! read may be in flight, and reports the end of each read with [`ended`](Puller::ended).

use std::collections::{BTreeMap, VecDeque};

use crate::units::SECTOR_BYTES;

/// A range of sectors to pull, `first..end`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Pull {
    /// First sector of the range.
    pub first: u64,
    /// One past the last sector of the range.
    pub end: u64,
}

impl Pull {
    fn sectors(&self) -> u64 {
        self.end - self.first
    }
}

/// How an attempt of the destination to read a range from the source ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pulled {
    /// The data is in flash, or the destination will not read this range again unless it changes.
    Done,
    /// Flash is busy, or the source did not answer. The range must be read again later.
    Again,
}

/// Progress of pulling one disk's cached data.
#[derive(Debug, Default)]
pub struct Puller {
    /// Maximum number of sectors per pull.
    sectors_max: u64,
    /// Ranges to read, in order.
    list: VecDeque<Pull>,
    /// Ranges that changed after they were pulled or requested, which are read after the list. The
    /// ranges are disjoint and keyed by their first sector.
    again: BTreeMap<u64, u64>,
    /// Requested ranges, and for each, true if it has changed since the request.
    in_flight: BTreeMap<Pull, bool>,
    /// Ranges that were pulled and have not changed since. The ranges are disjoint and keyed by
    /// their first sector.
    pulled: BTreeMap<u64, u64>,
    pulled_sectors: u64,
}

impl Puller {
    /// Creates a puller without ranges. Each pull will have at most `bytes_max` bytes.
    pub fn new(bytes_max: u64) -> Puller {
        Puller { sectors_max: (bytes_max / SECTOR_BYTES).max(1), ..Puller::default() }
    }

    /// Appends ranges of sectors (`first..end`) to the list, to be read in this order.
    pub fn add(&mut self, ranges: impl IntoIterator<Item = (u64, u64)>) {
        self.list.extend(
            ranges.into_iter().filter(|(first, end)| first < end).map(|(first, end)| Pull { first, end }),
        );
    }

    /// Handles a change of the range at the source. The caller has invalidated the data of the
    /// range that was pulled before the change.
    pub fn changed(&mut self, first: u64, end: u64) {
        for gone in take_out(&mut self.pulled, first, end) {
            put_in(&mut self.again, gone.0, gone.1);
        }
        for (pull, changed) in self.in_flight.iter_mut() {
            *changed |= pull.first < end && first < pull.end;
        }
    }

    /// Returns the next range to pull.
    #[expect(
        clippy::should_implement_trait,
        reason = "not an iterator, because more ranges may follow a `None`"
    )]
    pub fn next(&mut self) -> Option<Pull> {
        let pull = match self.list.pop_front() {
            Some(pull) => self.cut(pull, |this, rest| this.list.push_front(rest)),
            None => {
                let (first, end) = self.again.pop_first()?;
                self.cut(Pull { first, end }, |this, rest| put_in(&mut this.again, rest.first, rest.end))
            }
        };
        self.in_flight.insert(pull, false);
        Some(pull)
    }

    fn cut(&mut self, pull: Pull, keep: impl FnOnce(&mut Puller, Pull)) -> Pull {
        let end = pull.end.min(pull.first + self.sectors_max);
        if end < pull.end {
            keep(self, Pull { first: end, end: pull.end });
        }
        Pull { end, ..pull }
    }

    /// Handles the end of a pull. A range that changed during the pull will be read again.
    pub fn ended(&mut self, pull: Pull, how: Pulled) {
        let Some(changed) = self.in_flight.remove(&pull) else { return };
        if changed || how == Pulled::Again {
            return put_in(&mut self.again, pull.first, pull.end);
        }
        self.pulled_sectors += pull.sectors();
        put_in(&mut self.pulled, pull.first, pull.end);
    }

    /// Returns the number of bytes that were pulled so far. Bytes that were pulled twice count
    /// twice.
    pub fn pulled_bytes(&self) -> u64 {
        self.pulled_sectors * SECTOR_BYTES
    }

    /// Returns the number of bytes that were pulled and have not changed since.
    pub fn valid_bytes(&self) -> u64 {
        self.pulled.iter().map(|(first, end)| end - first).sum::<u64>() * SECTOR_BYTES
    }

    /// Returns the number of ranges that were not requested yet.
    pub fn ranges(&self) -> usize {
        self.list.len() + self.again.len()
    }

    /// Returns the number of bytes in all ranges that are to be pulled, including the pulls in
    /// flight.
    pub fn left_bytes(&self) -> u64 {
        let listed: u64 = self.list.iter().map(Pull::sectors).sum();
        let again: u64 = self.again.iter().map(|(first, end)| end - first).sum();
        let in_flight: u64 = self.in_flight.keys().map(Pull::sectors).sum();
        (listed + again + in_flight) * SECTOR_BYTES
    }

    /// Returns true if no range is left to pull, and no pull is in flight.
    pub fn is_done(&self) -> bool {
        self.list.is_empty() && self.again.is_empty() && self.in_flight.is_empty()
    }
}

/// Removes `first..end` from disjoint ranges. Returns the removed ranges.
fn take_out(ranges: &mut BTreeMap<u64, u64>, first: u64, end: u64) -> Vec<(u64, u64)> {
    let before = ranges.range(..first).next_back().filter(|(_, until)| **until > first);
    let start = before.map_or(first, |(at, _)| *at);
    let meets: Vec<(u64, u64)> =
        ranges.range(start..end.max(start)).map(|(at, until)| (*at, *until)).collect();
    let mut taken = Vec::new();
    for (at, until) in meets {
        ranges.remove(&at);
        if at < first {
            ranges.insert(at, first);
        }
        if until > end {
            ranges.insert(end, until);
        }
        taken.push((at.max(first), until.min(end)));
    }
    taken
}

/// Adds `first..end` to disjoint ranges, and joins it with overlapping and adjacent ones.
fn put_in(ranges: &mut BTreeMap<u64, u64>, mut first: u64, mut end: u64) {
    if let Some((at, until)) = ranges.range(..=first).next_back().map(|(at, until)| (*at, *until))
        && until >= first
    {
        (first, end) = (at, end.max(until));
    }
    let inside: Vec<(u64, u64)> = ranges.range(first..=end).map(|(at, until)| (*at, *until)).collect();
    for (at, until) in inside {
        ranges.remove(&at);
        end = end.max(until);
    }
    ranges.insert(first, end);
}
