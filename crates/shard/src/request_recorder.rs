//! The ring through which a shard passes the record of each request of a disk to a recorder.
//!
//! One thread writes ([`Recorder`]), and one thread reads ([`Reader`]). Writer and reader share a
//! ring with a fixed number of records. Recording costs three stores per request, and one clock
//! reading for all requests that arrived together. The writer never waits, wakes no thread and
//! allocates nothing. If the reader is a whole ring behind, records are dropped and counted.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

use hob_control::{TraceOp, TraceRecord};

/// Capacity of a recording's ring buffer in records: a quarter of a second at half a million
/// requests per second, 3 MiB.
const RECORDS_MAX: usize = 1 << 17;

/// Number of words per record: time, offset, and length with the operation in the upper half.
const WORDS: usize = 3;

#[derive(Debug)]
struct RecordRing {
    /// Words of the records in the ring buffer. The recorder writes the words of a record before it
    /// advances `written`. It writes these words again only after `read` has advanced past the
    /// record.
    words: Box<[AtomicU64]>,
    written: AtomicU64,
    read: AtomicU64,
    dropped: AtomicU64,
    /// True after the recorder has ended.
    ended: AtomicBool,
    /// True after the reader has ended.
    abandoned: AtomicBool,
    origin: Instant,
}

/// Creates a ring buffer for a recording whose time starts now.
pub fn new() -> (Recorder, Reader) {
    with_room(RECORDS_MAX)
}

fn with_room(records: usize) -> (Recorder, Reader) {
    assert!(records.is_power_of_two(), "rings are powers of two");
    let ring = Arc::new(RecordRing {
        words: (0..records * WORDS).map(|_| AtomicU64::new(0)).collect(),
        written: AtomicU64::new(0),
        read: AtomicU64::new(0),
        dropped: AtomicU64::new(0),
        ended: AtomicBool::new(false),
        abandoned: AtomicBool::new(false),
        origin: Instant::now(),
    });
    let recorder = Recorder { ring: ring.clone(), written: 0, read: 0, dropped: 0 };
    (recorder, Reader { ring })
}

impl RecordRing {
    fn elapsed_ns(&self) -> u64 {
        self.origin.elapsed().as_nanos() as u64
    }

    /// Returns the words of the record with this number.
    fn record(&self, number: u64) -> &[AtomicU64] {
        let records = self.words.len() / WORDS;
        let at = (number as usize & (records - 1)) * WORDS;
        &self.words[at..at + WORDS]
    }
}

/// The shard's end of a recording's ring. Dropping this value ends the recording.
#[derive(Debug)]
pub struct Recorder {
    ring: Arc<RecordRing>,
    /// Local copy of the number of written records.
    written: u64,
    /// Number of records that the reader had read when the recorder last checked.
    read: u64,
    dropped: u64,
}

impl Recorder {
    /// Returns the time since the start of the recording, nanoseconds, to be recorded for requests
    /// that arrive now.
    pub fn now_ns(&self) -> u64 {
        self.ring.elapsed_ns()
    }

    /// Records a request, or counts it as dropped.
    #[inline]
    pub fn push(&mut self, record: &TraceRecord) {
        let ring = &*self.ring;
        let room = (ring.words.len() / WORDS) as u64;
        if self.written - self.read == room {
            self.read = ring.read.load(Ordering::Acquire);
            if self.written - self.read == room {
                self.dropped += 1;
                ring.dropped.store(self.dropped, Ordering::Relaxed);
                return;
            }
        }
        let words = ring.record(self.written);
        words[0].store(record.at_ns, Ordering::Relaxed);
        words[1].store(record.offset, Ordering::Relaxed);
        let op = u64::from(record.op.to_wire()) << 32;
        words[2].store(op | u64::from(record.len), Ordering::Relaxed);
        self.written += 1;
        ring.written.store(self.written, Ordering::Release);
    }

    /// Returns true if the reader has ended.
    pub fn is_abandoned(&self) -> bool {
        self.ring.abandoned.load(Ordering::Relaxed)
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.ring.ended.store(true, Ordering::Release);
    }
}

/// The reading end of a recording's ring buffer.
#[derive(Debug)]
pub struct Reader {
    ring: Arc<RecordRing>,
}

impl Reader {
    /// Returns the duration of the recording in nanoseconds.
    pub fn elapsed_ns(&self) -> u64 {
        self.ring.elapsed_ns()
    }

    /// Returns true if the recorder has ended. Records written before can still be read.
    pub fn has_ended(&self) -> bool {
        self.ring.ended.load(Ordering::Acquire)
    }

    /// Returns the number of dropped requests.
    pub fn dropped(&self) -> u64 {
        self.ring.dropped.load(Ordering::Relaxed)
    }

    /// Removes and returns the next records, at most `max`.
    pub fn take(&mut self, max: usize) -> Vec<TraceRecord> {
        let ring = &*self.ring;
        let from = ring.read.load(Ordering::Relaxed);
        let to = ring.written.load(Ordering::Acquire).min(from + max as u64);
        let records = (from..to).map(|number| {
            let words = ring.record(number);
            let last = words[2].load(Ordering::Relaxed);
            TraceRecord {
                at_ns: words[0].load(Ordering::Relaxed),
                offset: words[1].load(Ordering::Relaxed),
                len: last as u32,
                op: TraceOp::from_wire((last >> 32) as u8).expect("it was written by a recorder"),
            }
        });
        let records = records.collect();
        ring.read.store(to, Ordering::Release);
        records
    }

    /// Ends the reader. The shard then drops the recorder.
    pub fn abandon(&self) {
        self.ring.abandoned.store(true, Ordering::Relaxed);
    }

    /// Returns a counter of the recording for other threads.
    pub fn counter(&self) -> Counter {
        Counter(Arc::downgrade(&self.ring))
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.abandon();
    }
}

/// Handle that reads the numbers of recorded and dropped requests. The buffer of the recording is
/// freed even while a handle exists.
#[derive(Debug, Default)]
pub struct Counter(Weak<RecordRing>);

impl Counter {
    /// Returns the numbers of recorded and dropped requests; `None` if the recording has ended.
    pub fn read(&self) -> Option<hob_control::Recording> {
        let ring = self.0.upgrade().filter(|ring| !ring.abandoned.load(Ordering::Relaxed))?;
        Some(hob_control::Recording {
            requests: ring.written.load(Ordering::Relaxed),
            dropped: ring.dropped.load(Ordering::Relaxed),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(number: u64) -> TraceRecord {
        let ops = [TraceOp::Read, TraceOp::Write, TraceOp::Discard, TraceOp::Flush];
        TraceRecord {
            at_ns: number,
            offset: number << 20,
            len: u32::MAX - number as u32,
            op: ops[number as usize % 4],
        }
    }

    #[test]
    fn records_are_read_in_order() {
        let (mut recorder, mut reader) = with_room(8);
        let mut read = Vec::new();
        for number in 0..1000 {
            recorder.push(&record(number));
            if number % 7 == 0 {
                read.extend(reader.take(usize::MAX >> 1));
            }
        }
        read.extend(reader.take(3));
        read.extend(reader.take(100));
        assert_eq!(read, (0..1000).map(record).collect::<Vec<_>>());
        assert_eq!((reader.dropped(), reader.take(1)), (0, vec![]));
    }

    #[test]
    fn a_reader_that_falls_behind_costs_records_which_are_counted() {
        let (mut recorder, mut reader) = with_room(8);
        (0..20).for_each(|number| recorder.push(&record(number)));
        assert_eq!(reader.counter().read().unwrap().dropped, 12);
        assert_eq!(reader.take(5), (0..5).map(record).collect::<Vec<_>>());
        (20..30).for_each(|number| recorder.push(&record(number)));
        let next: Vec<_> = (5..8).chain(20..25).map(record).collect();
        assert_eq!((reader.take(100), reader.dropped()), (next, 17));
        assert_eq!(reader.counter().read().unwrap(), hob_control::Recording { requests: 13, dropped: 17 });
    }

    #[test]
    fn each_end_learns_that_the_other_is_gone() {
        let (mut recorder, mut reader) = with_room(8);
        recorder.push(&record(1));
        assert!(!reader.has_ended());
        drop(recorder);
        assert!(reader.has_ended());
        assert_eq!(reader.take(9), [record(1)]);
        let (recorder, reader) = with_room(8);
        let counter = reader.counter();
        assert!(!recorder.is_abandoned() && counter.read().is_some());
        drop(reader);
        assert!(recorder.is_abandoned() && counter.read().is_none());
    }

    /// Each record that was not dropped arrives complete and in order, in any interleaving of the
    /// threads.
    #[test]
    fn two_threads_lose_only_counted_records() {
        const COUNT: u64 = 200_000;
        let (mut recorder, mut reader) = with_room(64);
        let writer = std::thread::spawn(move || {
            for number in 0..COUNT {
                recorder.push(&record(number));
                if number % 50 == 0 {
                    std::thread::yield_now();
                }
            }
        });
        let (mut seen, mut last) = (0, None);
        loop {
            let ended = reader.has_ended();
            let records = reader.take(1000);
            for found in &records {
                assert_eq!(*found, record(found.at_ns));
                assert!(last < Some(found.at_ns));
                last = Some(found.at_ns);
            }
            seen += records.len() as u64;
            if ended && records.is_empty() {
                break;
            }
        }
        writer.join().unwrap();
        assert_eq!(seen + reader.dropped(), COUNT);
    }
}
