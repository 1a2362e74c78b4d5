//! Acknowledged changes that no flush covers yet, kept in memory so that they can be repeated.
//!
//! An NBD server may lose these changes when it restarts. hob then repeats them on the new
//! connection before it sends anything else (docs/decisions/0070-repeated-changes.md). If changes
//! were repeated one by one, the server could carry out two overlapping changes in the wrong order.
//! So [`Repeat`] consists of disjoint pieces, each with the newest content.
//!
//! The memory is limited, per backing and for the process. Beyond the limits hob stores no changes
//! until the next flush, and a lost connection is a possible loss.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use hob_engine::gather::Gather;
use hob_nbd::client::reply::Expected;
use hob_nbd::client::request;
use hob_nbd::{Command, CommandFlags};

use super::COMMAND_BYTES_MAX;
use crate::ring::{Ring, ZEROES_BYTES};

/// Maximum memory for the changes of one backing, bytes.
const BYTES_MAX: usize = 32 << 20;

/// Maximum memory for the changes of all backings of this process, bytes.
const TOTAL_BYTES_MAX: usize = 256 << 20;

/// Maximum memory use of one backing's changes before hob flushes the server without a guest's
/// request, bytes.
const FLUSH_BYTES: usize = 8 << 20;

/// Bytes that each change counts towards the limits, in addition to its data. This number is more
/// than a change needs in memory. The limits thus also limit the number of changes, because the
/// shard's thread sorts all of them at once.
const ENTRY_BYTES: usize = 512;

static TOTAL_BYTES: AtomicUsize = AtomicUsize::new(0);

/// Bit that distinguishes the cookies of repeated changes from those of requests.
const COOKIE_BIT: u64 = 1 << 31;

/// Content of a change.
#[derive(Clone, Debug)]
pub(super) enum Content {
    Data(Arc<[u8]>),
    /// Zeroes that are sent as data.
    ZeroData,
    Zeroes(CommandFlags),
    Trim,
}

#[derive(Debug)]
struct Entry {
    /// Number of the backing's acknowledged changes, including this one.
    number: u64,
    range: Range<u64>,
    content: Content,
}

impl Entry {
    fn bytes(&self) -> usize {
        match &self.content {
            Content::Data(data) => ENTRY_BYTES + data.len(),
            _ => ENTRY_BYTES,
        }
    }
}

/// The acknowledged changes of a backing that no flush covers, oldest first.
#[derive(Debug)]
pub(super) struct Unflushed {
    entries: VecDeque<Entry>,
    bytes: usize,
    /// Number of the last change whose content is not in memory.
    missing_upto: u64,
}

impl Unflushed {
    /// Creates an empty list. `earlier` is the number of changes of earlier connections, whose
    /// content is not known.
    pub(super) fn new(earlier: u64) -> Unflushed {
        Unflushed { entries: VecDeque::new(), bytes: 0, missing_upto: earlier }
    }

    /// Records an acknowledged change. `number` is the number of acknowledged changes, including
    /// this change.
    pub(super) fn push(&mut self, number: u64, range: Range<u64>, content: Content) {
        let entry = Entry { number, range, content };
        let bytes = entry.bytes();
        let total = TOTAL_BYTES.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.bytes += bytes;
        self.entries.push_back(entry);
        if self.bytes > BYTES_MAX || total > TOTAL_BYTES_MAX {
            self.forget(number);
        }
    }

    /// Drops all changes from memory. Changes up to `number` can no longer be repeated.
    pub(super) fn forget(&mut self, number: u64) {
        self.flushed(u64::MAX);
        self.missing_upto = number;
    }

    /// Records that a flush covers the changes up to `number`.
    pub(super) fn flushed(&mut self, number: u64) {
        while let Some(entry) = self.entries.front().filter(|entry| entry.number <= number) {
            let bytes = entry.bytes();
            self.bytes -= bytes;
            TOTAL_BYTES.fetch_sub(bytes, Ordering::Relaxed);
            self.entries.pop_front();
        }
    }

    /// Returns true if memory has all changes after number `flushed`.
    pub(super) fn are_all_kept(&self, flushed: u64) -> bool {
        self.missing_upto <= flushed
    }

    /// Returns true if hob should flush the server: the changes take much memory, or memory lacks
    /// some of those after number `flushed`.
    pub(super) fn need_flush(&self, flushed: u64) -> bool {
        self.bytes > FLUSH_BYTES || !self.are_all_kept(flushed)
    }

    /// Returns the memory use, bytes.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the changes as disjoint pieces. A piece with data has at most `payload_max` bytes,
    /// and a piece without data at most [`COMMAND_BYTES_MAX`].
    pub(super) fn repeat(&self, payload_max: u64) -> Repeat {
        let mut pieces = Vec::new();
        let mut covered = Covered::default();
        for entry in self.entries.iter().rev() {
            let bytes_max = match entry.content {
                Content::Data(_) | Content::ZeroData => payload_max,
                Content::Zeroes(_) | Content::Trim => COMMAND_BYTES_MAX,
            };
            for gap in covered.insert(&entry.range) {
                let mut from = gap.start;
                while from < gap.end {
                    let range = from..gap.end.min(from + bytes_max);
                    let skipped = (from - entry.range.start) as usize;
                    from = range.end;
                    pieces.push(Piece { range, content: entry.content.clone(), skipped, is_answered: false });
                }
            }
        }
        Repeat { pieces, sent: 0, answered: 0 }
    }
}

impl Drop for Unflushed {
    fn drop(&mut self) {
        self.flushed(u64::MAX);
    }
}

/// Disjoint ranges of a disk: the start and the end of each range, bytes.
#[derive(Default)]
struct Covered(BTreeMap<u64, u64>);

impl Covered {
    /// Adds a range. Returns the parts that were not covered.
    fn insert(&mut self, range: &Range<u64>) -> Vec<Range<u64>> {
        let (mut gaps, mut from) = (Vec::new(), range.start);
        let mut whole = range.clone();
        let touching: Vec<(u64, u64)> = {
            let before = self.0.range(..range.start).next_back().filter(|(_, end)| **end >= range.start);
            before.into_iter().chain(self.0.range(range.start..=range.end)).map(|(&a, &b)| (a, b)).collect()
        };
        for (start, end) in touching {
            if from < start {
                gaps.push(from..start);
            }
            from = from.max(end);
            whole = whole.start.min(start)..whole.end.max(end);
            self.0.remove(&start);
        }
        if from < range.end {
            gaps.push(from..range.end);
        }
        self.0.insert(whole.start, whole.end);
        gaps
    }
}

/// A part of a change.
#[derive(Debug)]
struct Piece {
    range: Range<u64>,
    content: Content,
    /// Offset of the piece in the data of the change, bytes.
    skipped: usize,
    is_answered: bool,
}

impl Piece {
    fn len(&self) -> u32 {
        (self.range.end - self.range.start) as u32
    }

    fn command(&self) -> Command {
        match self.content {
            Content::Data(_) | Content::ZeroData => Command::Write,
            Content::Zeroes(_) => Command::WriteZeroes,
            Content::Trim => Command::Trim,
        }
    }
}

/// Changes that are repeated on a new connection.
#[derive(Debug)]
pub(super) struct Repeat {
    pieces: Vec<Piece>,
    sent: usize,
    answered: usize,
}

impl Repeat {
    /// Returns true if the cookie belongs to a repeated change.
    pub(super) fn has(cookie: u64) -> bool {
        cookie & COOKIE_BIT != 0
    }

    pub(super) fn has_to_send(&self) -> bool {
        self.sent < self.pieces.len()
    }

    /// Returns true if a piece is in flight.
    pub(super) fn awaits_replies(&self) -> bool {
        self.answered < self.sent
    }

    /// Returns true if all pieces were repeated.
    pub(super) fn is_done(&self) -> bool {
        self.answered == self.pieces.len()
    }

    /// Drops the pieces that were not sent yet. The caller reports the unflushed changes as lost.
    pub(super) fn drop_unsent(&mut self) {
        self.pieces.truncate(self.sent);
    }

    /// Records the reply to the piece with this cookie, which was [expected](Self::expected).
    pub(super) fn answer(&mut self, cookie: u64) {
        self.pieces[(cookie & !COOKIE_BIT) as usize].is_answered = true;
        self.answered += 1;
    }

    /// Returns the properties of the request with this cookie that the reply decoder needs; `None`
    /// if it was not sent, or is answered already.
    pub(super) fn expected(&self, cookie: u64) -> Option<Expected> {
        let piece = self.pieces[..self.sent].get((cookie & !COOKIE_BIT) as usize)?;
        let (command, offset, length) = (piece.command(), piece.range.start, piece.len());
        (!piece.is_answered).then_some(Expected { command, offset, length })
    }

    /// Appends the next piece to the send queue. Returns its length in bytes, or `None` after the
    /// last one.
    pub(super) fn push_next(&mut self, gather: &mut Gather, ring: &Ring) -> Option<usize> {
        let piece = self.pieces.get(self.sent)?;
        let (cookie, offset, len) = (COOKIE_BIT | self.sent as u64, piece.range.start, piece.len());
        self.sent += 1;
        let header = match piece.content {
            Content::Data(_) | Content::ZeroData => {
                request::write_header(cookie, offset, len, CommandFlags::NONE)
            }
            Content::Zeroes(flags) => request::write_zeroes(cookie, offset, len, flags),
            Content::Trim => request::trim(cookie, offset, len, CommandFlags::NONE),
        };
        gather.push_head(|head| head.extend_from_slice(&header));
        match &piece.content {
            Content::Data(data) => {
                let data = &data[piece.skipped..][..len as usize];
                gather.push_head(|head| head.extend_from_slice(data));
            }
            Content::ZeroData => push_zeroes(gather, ring, len),
            Content::Zeroes(_) | Content::Trim => return Some(header.len()),
        }
        Some(header.len() + len as usize)
    }
}

/// Appends zeroes to the send queue.
pub(super) fn push_zeroes(gather: &mut Gather, ring: &Ring, len: u32) {
    let mut left = len;
    while left > 0 {
        let piece = ring.zeroes(left.min(ZEROES_BYTES));
        gather.push_payload(piece);
        left -= piece.len;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn data(byte: u8, len: usize) -> Content {
        Content::Data(vec![byte; len].into())
    }

    /// Returns the repeated bytes of a disk of 64 bytes; `None` is not repeated.
    fn repeated(unflushed: &Unflushed, bytes_max: u64) -> Vec<Option<u8>> {
        let mut disk = vec![None; 64];
        for piece in unflushed.repeat(bytes_max).pieces {
            assert!(u64::from(piece.len()) <= bytes_max);
            for at in piece.range.clone() {
                let byte = match &piece.content {
                    Content::Data(data) => data[piece.skipped + (at - piece.range.start) as usize],
                    _ => 0,
                };
                assert_eq!(disk[at as usize].replace(byte), None, "pieces are disjoint");
            }
        }
        disk
    }

    #[test]
    fn each_byte_is_repeated_once_with_its_newest_content() {
        let mut random = 1u64;
        let mut next = |below: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (random >> 33) % below
        };
        for round in 0..500 {
            let (mut unflushed, mut expected) = (Unflushed::new(0), vec![None; 64]);
            for number in 1..=1 + next(12) {
                let start = next(60);
                let range = start..start + 1 + next(64 - start);
                let byte = number as u8;
                let content = if next(4) == 0 { Content::ZeroData } else { data(byte, 64) };
                let byte = if matches!(content, Content::ZeroData) { 0 } else { byte };
                range.clone().for_each(|at| expected[at as usize] = Some(byte));
                unflushed.push(number, range, content);
            }
            assert_eq!(repeated(&unflushed, 1 + next(64)), expected, "round {round}");
        }
    }

    /// A guest may discard a whole disk.
    #[test]
    fn long_discards_and_zeroes_are_repeated_with_few_requests() {
        let (mut unflushed, end) = (Unflushed::new(0), 512 * COMMAND_BYTES_MAX);
        unflushed.push(1, 0..end, Content::Trim);
        unflushed.push(2, end..2 * end, Content::Zeroes(CommandFlags::NONE));
        unflushed.push(3, 0..2, data(3, 2));
        let pieces = unflushed.repeat(1).pieces;
        assert_eq!(pieces.len(), 512 + 512 + 2);
        let bytes: u64 = pieces.iter().map(|piece| u64::from(piece.len())).sum();
        assert_eq!(bytes, 2 * end);
    }

    /// A second reply would count for a piece whose reply is still missing.
    #[test]
    fn a_repeated_change_is_answered_once() {
        let mut unflushed = Unflushed::new(0);
        unflushed.push(1, 0..8, data(1, 8));
        unflushed.push(2, 16..24, data(2, 8));
        let mut repeat = unflushed.repeat(64);
        repeat.sent = 1;
        assert_eq!(repeat.expected(COOKIE_BIT | 1), None, "it was not sent");
        assert!(repeat.expected(COOKIE_BIT).is_some() && repeat.awaits_replies());
        repeat.answer(COOKIE_BIT);
        assert_eq!(repeat.expected(COOKIE_BIT), None, "it is answered");
        repeat.sent = 2;
        assert!(repeat.awaits_replies() && !repeat.is_done());
        assert!(repeat.expected(COOKIE_BIT | 1).is_some());
        repeat.answer(COOKIE_BIT | 1);
        assert!(!repeat.awaits_replies() && repeat.is_done());
    }

    #[test]
    fn flushed_changes_are_dropped_and_too_much_data_is_not_kept() {
        let mut unflushed = Unflushed::new(1);
        assert!(!unflushed.are_all_kept(0) && unflushed.are_all_kept(1));
        assert!(unflushed.need_flush(0) && !unflushed.need_flush(1));
        unflushed.push(2, 0..8, data(2, 8));
        unflushed.push(3, 8..16, data(3, 8));
        unflushed.flushed(2);
        assert_eq!(repeated(&unflushed, 64)[4..12], [[None; 4], [Some(3); 4]].concat());
        let much = FLUSH_BYTES as u64 + 1;
        unflushed.push(4, 0..much, data(4, much as usize));
        assert!(unflushed.need_flush(3) && unflushed.are_all_kept(3));
        unflushed.push(5, 0..1, data(5, BYTES_MAX));
        assert!(!unflushed.are_all_kept(4) && unflushed.are_all_kept(5), "too much");
        assert!(unflushed.repeat(64).is_done() && unflushed.bytes == 0);
        let many = 6..=6 + (BYTES_MAX / ENTRY_BYTES) as u64;
        many.clone().for_each(|number| unflushed.push(number, 0..1, Content::Trim));
        assert!(unflushed.are_all_kept(*many.end()) && !unflushed.are_all_kept(*many.end() - 1), "too many");
    }
}
