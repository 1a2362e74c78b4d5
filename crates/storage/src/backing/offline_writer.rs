//! Writes synchronously to a backing that no shard serves. The offline writer writes dirty data to
//! the backing before the disk is served: the dirty data of a failed host (docs/decisions/0023), or
//! of a cache without space for a journal (docs/decisions/0051).
//!
//! The writer has its own I/O ring, so it supports all kinds of backings that a shard supports.
//! Several writes are in flight. Between two flushes, writes must not overlap. A write that fails
//! is repeated a few times. If it still fails, the writer writes nothing more. While the writer
//! waits, it calls a function that tells whether this host may still write the disk. Units: bytes.

use std::sync::Arc;
use std::time::{Duration, Instant as Clock};

use hob_engine::io::{BufferSlice, Durability, Io, IoError, IoOp, Target};
use hob_engine::units::{DiskId, Instant, IoId};

use super::Backing;
use crate::ring::{Gate, Ring, RingConfig, RingError};

/// Largest length of one write, bytes.
pub const WRITE_BYTES_MAX: usize = 1 << 20;

/// Maximum number of writes in flight.
const WRITES_MAX: usize = 8;

/// Maximum number of attempts of one write.
const ATTEMPTS_MAX: u32 = 5;

/// Longest sleep, in case a wake-up is lost.
const NAP: Duration = Duration::from_millis(100);

/// Synchronous writer of a backing that no shard serves.
pub struct OfflineWriter<'a> {
    ring: Ring,
    backing: Backing,
    began: Clock,
    last: u32,
    in_flight: Vec<InFlight>,
    failed: Option<IoError>,
    is_closing: bool,
    may_go_on: &'a dyn Fn() -> bool,
}

/// A write or flush in flight.
struct InFlight {
    id: IoId,
    op: IoOp,
    offset: u64,
    /// Data of a write; `None` for a flush.
    slice: Option<BufferSlice>,
    attempts: u32,
}

impl<'a> OfflineWriter<'a> {
    /// Creates the writer of a backing that was just opened. Changes are sent while `gate` is open,
    /// and writes continue while `may_go_on` returns true. When `may_go_on` returns false,
    /// unanswered requests fail. Use the writer on the calling thread only.
    ///
    /// # Errors
    /// Returns [`RingError::Resources`] if memory, file descriptors or threads are lacking.
    pub fn new(
        backing: Backing,
        gate: Option<Arc<dyn Gate>>,
        may_go_on: &'a dyn Fn() -> bool,
    ) -> Result<Self, RingError> {
        let arena_bytes = 2 * WRITES_MAX * WRITE_BYTES_MAX;
        let config = RingConfig { entries: 64, arena_bytes, file_threads_max: 4, ..RingConfig::default() };
        let ring = Ring::new(&config)?;
        let (began, in_flight) = (Clock::now(), Vec::new());
        let mut alone = OfflineWriter {
            ring,
            backing,
            began,
            last: 0,
            in_flight,
            failed: None,
            is_closing: false,
            may_go_on,
        };
        let now = alone.now();
        alone.backing.attach(&mut alone.ring, now, 0);
        if let Some(gate) = gate {
            alone.backing.set_gate(&mut alone.ring, gate);
        }
        Ok(alone)
    }

    /// Starts a write of at most [`WRITE_BYTES_MAX`] inside the disk, after waiting for a free
    /// buffer.
    ///
    /// # Errors
    /// Returns the error of this or an earlier write.
    pub fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), IoError> {
        assert!(!bytes.is_empty() && bytes.len() <= WRITE_BYTES_MAX, "a write of {} bytes", bytes.len());
        self.wait_until(|alone| alone.in_flight.len() < WRITES_MAX)?;
        let buffer = self.ring.arena_mut().alloc(bytes.len()).expect("there is room for more than that");
        let slice = BufferSlice { id: buffer, offset: 0, len: bytes.len() as u32 };
        self.ring.arena_mut().slice_mut(slice).copy_from_slice(bytes);
        self.submit(IoOp::Write(Durability::Volatile), offset, Some(slice), 1);
        self.failed.map_or(Ok(()), Err)
    }

    /// Waits until all writes are durable.
    ///
    /// # Errors
    /// Returns the error of this or an earlier write.
    pub fn flush(&mut self) -> Result<(), IoError> {
        self.wait_until(|alone| alone.in_flight.is_empty())?;
        // After a failed flush, a second one would prove nothing about the writes.
        self.submit(IoOp::Flush, 0, None, ATTEMPTS_MAX);
        self.wait_until(|alone| alone.in_flight.is_empty())
    }

    /// Waits for all I/O in flight, without a time limit, and closes the backing. Call it at the
    /// end, also after an error. Otherwise a late write could overwrite data of the next writer.
    pub fn close(mut self) {
        self.is_closing = true;
        self.backing.close(&mut self.ring);
        self.take_done();
        while !self.backing.is_closed() {
            if let Err(error) = self.turn() {
                tracing::error!("cannot close a backing yet: {error}");
                std::thread::sleep(NAP);
            }
        }
    }

    fn submit(&mut self, op: IoOp, offset: u64, slice: Option<BufferSlice>, attempts: u32) {
        self.submit_io(op, offset, slice, attempts);
        self.take_done();
    }

    fn submit_io(&mut self, op: IoOp, offset: u64, slice: Option<BufferSlice>, attempts: u32) {
        self.last += 1;
        let id = IoId(self.last);
        self.in_flight.push(InFlight { id, op, offset, slice, attempts });
        let len = slice.map_or(0, |slice| u64::from(slice.len));
        let io = Io { id, target: Target::Backing(DiskId(0)), op, offset, len, slice };
        let now = self.now();
        self.backing.submit(&mut self.ring, now, &io);
    }

    /// Waits until a condition holds or a write has failed.
    fn wait_until(&mut self, is_so: impl Fn(&Self) -> bool) -> Result<(), IoError> {
        loop {
            if let Some(error) = self.failed {
                return Err(error);
            }
            if !(self.may_go_on)() {
                self.failed = Some(IoError::ShuttingDown);
                continue;
            }
            if is_so(self) {
                return Ok(());
            }
            if let Err(error) = self.turn() {
                tracing::error!("an I/O ring failed during a failover: {error}");
                self.failed = Some(IoError::Failed);
            }
        }
    }

    fn turn(&mut self) -> std::io::Result<()> {
        let now = self.now();
        let due = self.backing.poll_timeout().map(|due| Duration::from_nanos(due.nanos_since(now)));
        self.ring.submit_and_wait(Duration::ZERO, Some(due.unwrap_or(NAP).min(NAP)))?;
        while let Some(completion) = self.ring.next_completion() {
            let now = self.now();
            self.backing.handle_completion(&mut self.ring, now, completion);
        }
        let now = self.now();
        if self.backing.poll_timeout().is_some_and(|due| due <= now) {
            self.backing.handle_timeout(&mut self.ring, now);
        }
        self.take_done();
        Ok(())
    }

    /// Takes the results of I/O. Starts writes again that have failed, with a limit.
    fn take_done(&mut self) {
        let mut again = Vec::new();
        if self.backing.take_loss() && self.last > 0 {
            self.failed = self.failed.or(Some(IoError::Failed));
        }
        while let Some((id, result)) = self.backing.poll_done() {
            let at = self.in_flight.iter().position(|known| known.id == id);
            let InFlight { op, offset, slice, attempts, .. } =
                self.in_flight.swap_remove(at.expect("an I/O ends once"));
            let goes_on = self.failed.is_none() && !self.is_closing && (self.may_go_on)();
            if result.is_err() && attempts < ATTEMPTS_MAX && goes_on {
                again.push((op, offset, slice, attempts + 1));
                continue;
            }
            if let Some(slice) = slice {
                self.ring.arena_mut().release(slice.id);
            }
            self.failed = self.failed.or(result.err());
        }
        for (op, offset, slice, attempts) in again {
            self.submit_io(op, offset, slice, attempts);
        }
    }

    fn now(&self) -> Instant {
        Instant(u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use hob_engine::command::Access;

    use super::*;
    use crate::backing::BackingOptions;

    fn open(path: &std::path::Path, access: Access) -> Backing {
        Backing::open(path.to_str().unwrap(), access, &BackingOptions::default()).unwrap()
    }

    #[test]
    fn written_data_is_on_the_backing_and_it_can_be_opened_again() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk");
        // The last sector is partial.
        let size = (24 << 20) + 512;
        std::fs::File::create(&path).unwrap().set_len(size).unwrap();
        let mut alone = OfflineWriter::new(open(&path, Access::ReadWrite), None, &|| true).unwrap();
        let chunk = |number: u64| vec![number as u8 + 1; WRITE_BYTES_MAX];
        for number in 0..24 {
            alone.write(number << 20, &chunk(number)).unwrap();
        }
        alone.write(size - 512, &[99; 512]).unwrap();
        alone.flush().unwrap();
        alone.close();
        let found = std::fs::read(&path).unwrap();
        for number in 0..24u64 {
            assert!(found[(number << 20) as usize..][..WRITE_BYTES_MAX] == chunk(number), "{number}");
        }
        assert_eq!(found[24 << 20..], [99; 512]);
        // The lock of the backing was released with it.
        drop(open(&path, Access::ReadWrite));
    }

    #[test]
    fn an_error_is_kept_and_all_requests_end() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk");
        std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
        let mut alone = OfflineWriter::new(open(&path, Access::ReadOnly), None, &|| true).unwrap();
        let errors: Vec<_> = (0..40).map(|_| alone.write(0, &[1; 4096])).collect();
        assert!(errors.last().unwrap().is_err(), "{errors:?}");
        assert!(alone.flush().is_err());
        alone.close();
        assert!(std::fs::read(&path).unwrap().iter().all(|byte| *byte == 0));
    }
}
