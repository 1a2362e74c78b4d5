//! The *crash log* of a journal: the newest records, in memory that outlives the process.
//!
//! A write is acknowledged when flash has its data and the journal has its record, but the record
//! may not be in a written page yet. If the process is killed before the page is written, the guest
//! reconnects and continues. The guest expects that reads return the write, and that a flush on the
//! new connection makes the write durable. So the engine also copies each record to a
//! [`SurvivingMemory`] before it acknowledges the write. Recovery appends these records to the
//! journal tail. If the data on flash has a different checksum than the *set* record of a dirty
//! sector, the sector is damaged, because its data was written before the record was made.
//!
//! The crash log need not survive a power failure, because a power failure may lose unflushed
//! writes.
//!
//! # Layout
//! The log has 256 KiB of entries for records, then 16 KiB of entries for pages. Each entry takes
//! 32 bytes. Entry *n* is at position *n* modulo the number of entries. Integers are little-endian.
//!
//! | bytes | record | page |
//! |---|---|---|
//! | 0–7 | number of the change | sequence number |
//! | 8–23 | record as in a page | number of the last change in pages up to this one |
//! | 24–27 | CRC-32C of cache, ring, kind, and bytes 0–23 | the same |
//!
//! The checksum includes the cache and the number of the ring, so entries of an earlier ring are
//! ignored.

use std::collections::VecDeque;

use super::crc::Crc;
use super::format::{RECORD_BYTES, Record};

/// Number of records in the log.
const RECORDS: u64 = 8192;

/// Number of pages in the log. At any time, fewer pages than this are sealed and not committed.
const PAGES: u64 = 512;

const ENTRY_BYTES: usize = 32;
const CRC_AT: usize = 24;
const PAGES_AT: usize = RECORDS as usize * ENTRY_BYTES;

/// Size of a crash log, bytes.
pub const CRASH_LOG_BYTES: usize = PAGES_AT + PAGES as usize * ENTRY_BYTES;

/// Memory of [`CRASH_LOG_BYTES`] bytes that other processes can read after this one was killed.
pub trait SurvivingMemory: std::fmt::Debug + Send {
    /// Copies bytes to this offset. After this call, the bytes survive if the process is killed.
    fn write(&mut self, offset: usize, bytes: &[u8]);

    /// Hides the memory from later processes. No `write` follows.
    fn remove(&mut self) {}
}

/// Kind of an entry in the crash log.
#[derive(Clone, Copy)]
enum Entry {
    Record = 1,
    Page = 2,
}

/// Writer of a crash log. The journal's writer moves the entries to the [`SurvivingMemory`].
#[derive(Debug)]
pub(super) struct CrashLog {
    /// Checksum of the cache's id and the ring's number, with which the checksum of each entry
    /// begins.
    seed: Crc,
    /// Number of the last change that was added, whether the log had room for it or not.
    handled: u64,
    /// Number of the last change that is in no entry, because the log had no room or no memory.
    missing: u64,
    /// Number of the last change in written pages.
    written: u64,
    /// Sealed pages that are not known to be written: sequence number, and number of the last
    /// change.
    unwritten: VecDeque<(u64, u64)>,
    /// Entries that are not in the memory yet, with their offsets.
    out: Vec<(usize, [u8; ENTRY_BYTES])>,
}

fn seed(cache: &[u8; 16], ring: u32) -> Crc {
    Crc::new().add(cache).add(&ring.to_le_bytes())
}

fn checksum(seed: Crc, kind: Entry, bytes: &[u8]) -> u32 {
    seed.add(&[kind as u8]).add(bytes).finish()
}

impl CrashLog {
    /// Creates the log of a ring that has just become valid. All changes up to `recorded` are in
    /// pages up to `sequence`, and these are durable.
    pub(super) fn new(cache: &[u8; 16], ring: u32, sequence: u64, recorded: u64) -> CrashLog {
        let mut log = CrashLog {
            seed: seed(cache, ring),
            handled: recorded,
            missing: 0,
            written: recorded,
            unwritten: VecDeque::new(),
            out: Vec::new(),
        };
        log.page(sequence, recorded);
        log.unwritten.clear();
        log
    }

    /// Adds the changes up to number `pushed` that were not added yet. `record_of` returns the
    /// record of a change.
    #[inline]
    pub(super) fn add(&mut self, pushed: u64, record_of: impl Fn(u64) -> Record) {
        for number in self.handled + 1..=pushed {
            // A new entry must not replace an entry that is still needed. After a missing entry,
            // the log gets no more entries, so recovery can tell that the log is damaged.
            if number - self.written > RECORDS || self.missing > self.written {
                self.missing = self.missing.max(number);
                continue;
            }
            let at = (number % RECORDS) as usize * ENTRY_BYTES;
            self.entry(Entry::Record, at, number, &record_of(number).bytes());
        }
        self.handled = pushed;
    }

    /// Adds a sealed page. All changes in the page were added to the log before.
    pub(super) fn page(&mut self, sequence: u64, recorded: u64) {
        self.unwritten.push_back((sequence, recorded));
        let mut rest = [0; RECORD_BYTES];
        rest[..8].copy_from_slice(&recorded.to_le_bytes());
        let at = PAGES_AT + (sequence % PAGES) as usize * ENTRY_BYTES;
        self.entry(Entry::Page, at, sequence, &rest);
    }

    fn entry(&mut self, kind: Entry, at: usize, number: u64, rest: &[u8; RECORD_BYTES]) {
        let mut bytes = [0; ENTRY_BYTES];
        bytes[..8].copy_from_slice(&number.to_le_bytes());
        bytes[8..CRC_AT].copy_from_slice(rest);
        let crc = checksum(self.seed, kind, &bytes[..CRC_AT]);
        bytes[CRC_AT..][..4].copy_from_slice(&crc.to_le_bytes());
        self.out.push((at, bytes));
    }

    /// Records that all pages up to this one are written.
    pub(super) fn pages_written(&mut self, sequence: u64) {
        while self.unwritten.front().is_some_and(|(page, _)| *page <= sequence) {
            (_, self.written) = self.unwritten.pop_front().expect("there is one");
        }
    }

    /// Returns true if pages and log together have all changes that were added.
    pub(super) fn has_all(&self) -> bool {
        self.missing <= self.written
    }

    /// Moves the new entries to the memory.
    pub(super) fn save(&mut self, memory: &mut dyn SurvivingMemory) {
        for (at, bytes) in self.out.drain(..) {
            memory.write(at, &bytes);
        }
    }

    /// Drops the new entries. From now on the log is incomplete until the next ring begins.
    pub(super) fn forget(&mut self) {
        self.out.clear();
        self.missing = u64::MAX;
    }

    /// Returns the memory used, bytes.
    pub(super) fn bytes(&self) -> usize {
        self.unwritten.capacity() * 16 + self.out.capacity() * (ENTRY_BYTES + 8)
    }
}

/// The part of a crash log that follows a page of the ring.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Continuation {
    /// The records after those of the page.
    pub(super) records: Vec<Record>,
    /// True if entries between `records` and a later entry are missing, so the log is damaged.
    pub(super) has_gap: bool,
}

/// Returns the part of a crash log that follows the page `last` of this ring; `None` if the log
/// does not know the page.
pub(super) fn records_after(log: &[u8], cache: &[u8; 16], ring: u32, last: u64) -> Option<Continuation> {
    let seed = seed(cache, ring);
    let entry = |kind, at: usize, number: u64| -> Option<&[u8; RECORD_BYTES]> {
        let bytes = log.get(at..at + ENTRY_BYTES)?;
        let is_it = bytes[..8] == number.to_le_bytes()
            && bytes[CRC_AT..][..4] == checksum(seed, kind, &bytes[..CRC_AT]).to_le_bytes();
        bytes[8..].first_chunk().filter(|_| is_it)
    };
    let page = entry(Entry::Page, PAGES_AT + (last % PAGES) as usize * ENTRY_BYTES, last)?;
    let recorded = u64::from_le_bytes(*page.first_chunk().expect("entries are longer"));
    let numbers = (1..=RECORDS).map(|i| recorded.saturating_add(i));
    let records: Vec<Record> = numbers
        .map_while(|number| entry(Entry::Record, (number % RECORDS) as usize * ENTRY_BYTES, number))
        .map_while(Record::read)
        .collect();
    let end = recorded.saturating_add(records.len() as u64);
    let has_gap = (0..RECORDS as usize).any(|position| {
        let at = position * ENTRY_BYTES;
        let number = log.get(at..).and_then(|bytes| bytes.first_chunk()).map(|n| u64::from_le_bytes(*n));
        number.is_some_and(|number| {
            let is_in_place = number % RECORDS == position as u64;
            number > end && is_in_place && entry(Entry::Record, at, number).is_some()
        })
    });
    Some(Continuation { records, has_gap })
}

#[cfg(test)]
mod tests {
    use super::super::format::Kind;
    use super::*;

    const CACHE: [u8; 16] = [9; 16];

    #[derive(Debug)]
    struct Memory(Vec<u8>);

    impl SurvivingMemory for Memory {
        fn write(&mut self, offset: usize, bytes: &[u8]) {
            self.0[offset..][..bytes.len()].copy_from_slice(bytes);
        }
    }

    fn record(number: u64) -> Record {
        Record { kind: Kind::Drop, first: 0, count: 1, frame: number as u32, block: 7 }
    }

    fn records(numbers: std::ops::RangeInclusive<u64>) -> Option<Continuation> {
        Some(Continuation { records: numbers.map(record).collect(), has_gap: false })
    }

    /// A log of ring 4 whose page 3 ends with change 10, with the changes up to 20, and page 4 up
    /// to change 15.
    fn example() -> (CrashLog, Memory) {
        let mut log = CrashLog::new(&CACHE, 4, 3, 10);
        let mut memory = Memory(vec![0; CRASH_LOG_BYTES]);
        log.add(15, record);
        log.page(4, 15);
        log.add(20, record);
        log.save(&mut memory);
        (log, memory)
    }

    #[test]
    fn records_follow_those_of_the_last_page() {
        let (log, mut memory) = example();
        assert!(log.has_all());
        assert_eq!(records_after(&memory.0, &CACHE, 4, 3), records(11..=20));
        assert_eq!(records_after(&memory.0, &CACHE, 4, 4), records(16..=20));
        for (cache, ring, last) in [(CACHE, 4, 5), (CACHE, 5, 4), ([8; 16], 4, 4)] {
            assert_eq!(records_after(&memory.0, &cache, ring, last), None);
        }
        memory.0[18 * ENTRY_BYTES + 12] ^= 1;
        let damaged = Continuation { records: vec![record(16), record(17)], has_gap: true };
        assert_eq!(records_after(&memory.0, &CACHE, 4, 4), Some(damaged));
        assert_eq!(records_after(&memory.0[..17 * ENTRY_BYTES], &CACHE, 4, 4), None);
    }

    /// Entries that are still needed are not replaced.
    #[test]
    fn a_full_log_waits_for_pages() {
        let (mut log, mut memory) = example();
        log.add(10 + RECORDS, record);
        assert!(log.has_all());
        log.add(12 + RECORDS, record);
        assert!(!log.has_all());
        log.save(&mut memory);
        assert_eq!(records_after(&memory.0, &CACHE, 4, 3), records(11..=10 + RECORDS));
        log.page(5, 12 + RECORDS);
        log.pages_written(4);
        assert!(!log.has_all(), "the change is in page 5, which is not written");
        log.pages_written(5);
        log.add(13 + RECORDS, record);
        log.save(&mut memory);
        assert!(log.has_all());
        assert_eq!(records_after(&memory.0, &CACHE, 4, 5), records(13 + RECORDS..=13 + RECORDS));
        log.forget();
        log.pages_written(u64::MAX);
        assert!(!log.has_all(), "entries without memory are lost");
    }
}
