//! Replays requests on files and block devices, with pread and pwrite and one thread per request in
//! flight.
//!
//! The threads share the list of requests behind a lock. The thread with the lock takes the next
//! request and sleeps until just before its time. The thread then releases the lock, waits for the
//! exact time and performs the request. While this thread waits, the next thread can wake up and
//! take the next request. A request cannot be cancelled: the run ends only when the kernel has
//! completed all requests. Discards are not sent, because the standard library has no function for
//! them. Write requests write noise.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError, mpsc};
use std::thread;

use anyhow::Result;

use super::FileAccess;
use crate::clock::{AWAKE_NS, Clock, RealClock, wait_until};
use crate::driver::{Done, Fault, Timed};
use crate::prng::noise;
use crate::workload::{Access, Op};

/// Maximum number of requests in flight, and of threads.
pub(super) const DEPTH_MAX: usize = 256;
/// Maximum length of a read or write, bytes. A thread's buffer grows to the longest request.
pub(super) const PAYLOAD_BYTES_MAX: u32 = 32 << 20;
/// Alignment of buffers, bytes. Direct I/O needs the alignment of the device's blocks, which are
/// rarely larger.
const ALIGNMENT: usize = 4096;
/// Maximum number of completed requests whose results are not counted yet.
const DONE_MAX: usize = 4096;

#[cfg(target_arch = "x86_64")]
const O_DIRECT: Option<i32> = Some(0o40_000);
#[cfg(target_arch = "aarch64")]
const O_DIRECT: Option<i32> = Some(0o200_000);
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
const O_DIRECT: Option<i32> = None;

/// An open file or block device.
pub(super) struct FileTarget {
    file: File,
    access: FileAccess,
}

impl FileTarget {
    pub(super) fn open(path: &Path, access: FileAccess, writes: bool) -> io::Result<FileTarget> {
        let mut options = OpenOptions::new();
        options.read(true).write(writes);
        if access == FileAccess::Direct {
            let flag = O_DIRECT.ok_or(io::Error::from(io::ErrorKind::Unsupported))?;
            options.custom_flags(flag);
        }
        Ok(FileTarget { file: options.open(path)?, access })
    }

    pub(super) fn file(&mut self) -> &mut File {
        &mut self.file
    }

    pub(super) fn unit_bytes(&self) -> u32 {
        match self.access {
            FileAccess::Buffered => 1,
            FileAccess::Direct => 512,
        }
    }

    /// Sends all requests; see [`Connection::run`](crate::driver::Connection::run).
    pub(super) fn run(
        &self,
        source: impl Iterator<Item = Result<Timed>> + Send,
        depth: usize,
        stop: &AtomicBool,
        mut done: impl FnMut(&Done),
    ) -> Result<()> {
        let start: OnceLock<RealClock> = OnceLock::new();
        let list = Mutex::new(List { source, next: 0, failure: None, over: false });
        let (answers, answered) = mpsc::sync_channel(DONE_MAX);
        thread::scope(|scope| {
            // The clock starts when all threads are ready.
            let held = list.lock();
            for _ in 0..depth {
                let answers = answers.clone();
                let (list, start) = (&list, &start);
                scope.spawn(move || {
                    let mut buffers = Buffers::default();
                    while let Some((number, timed, clock)) = take(list, start, stop)
                        && wait_until(&clock, timed.due_ns, &|| stop.load(Ordering::Relaxed))
                    {
                        let sent_ns = clock.now_ns();
                        let result = self.perform(&timed.access, &mut buffers);
                        let latency_ns = clock.now_ns() - sent_ns;
                        let fault = result.err().map(Fault::System);
                        // The receiver exists until all threads have ended.
                        let _ = answers.send(Done { number, timed, sent_ns, latency_ns, fault });
                    }
                });
            }
            start.get_or_init(RealClock::start);
            drop((held, answers));
            answered.iter().for_each(|answer| done(&answer));
        });
        list.into_inner().unwrap_or_else(PoisonError::into_inner).failure.map_or(Ok(()), Err)
    }

    fn perform(&self, access: &Access, buffers: &mut Buffers) -> io::Result<()> {
        let (offset, len) = (access.offset, access.len as usize);
        match access.op {
            Op::Read => self.file.read_exact_at(buffers.read.get(len, |len| vec![0; len]), offset),
            Op::Write => self.file.write_all_at(buffers.write.get(len, noise), offset),
            Op::Flush => self.file.sync_data(),
            Op::Discard => Err(io::ErrorKind::Unsupported.into()),
        }
    }
}

/// The remaining requests.
struct List<S> {
    source: S,
    next: u64,
    failure: Option<anyhow::Error>,
    over: bool,
}

/// Returns the next request shortly before its time. Returns `None` at the end and after a stop.
fn take<S: Iterator<Item = Result<Timed>>>(
    list: &Mutex<List<S>>,
    start: &OnceLock<RealClock>,
    stop: &AtomicBool,
) -> Option<(u64, Timed, RealClock)> {
    let mut list = list.lock().unwrap_or_else(PoisonError::into_inner);
    let clock = *start.get().expect("the clock is set before the lock is released");
    if list.over || stop.load(Ordering::Relaxed) {
        return None;
    }
    let halted = || stop.load(Ordering::Relaxed);
    match list.source.next() {
        Some(Ok(timed)) if wait_until(&clock, timed.due_ns.saturating_sub(AWAKE_NS), &halted) => {
            list.next += 1;
            return Some((list.next - 1, timed, clock));
        }
        Some(Err(error)) => list.failure = Some(error),
        Some(Ok(_)) | None => {}
    }
    list.over = true;
    None
}

/// Buffers of one thread.
#[derive(Default)]
struct Buffers {
    read: Aligned,
    write: Aligned,
}

/// A buffer whose start is a multiple of [`ALIGNMENT`] in memory.
#[derive(Default)]
struct Aligned {
    bytes: Vec<u8>,
    start: usize,
}

impl Aligned {
    /// Returns `len` bytes of the buffer. `make` allocates a larger buffer if needed.
    fn get(&mut self, len: usize, make: impl Fn(usize) -> Vec<u8>) -> &mut [u8] {
        if self.bytes.len() < self.start + len {
            self.bytes = make(len.next_power_of_two() + ALIGNMENT);
            let past = self.bytes.as_ptr().addr() % ALIGNMENT;
            self.start = (ALIGNMENT - past) % ALIGNMENT;
        }
        &mut self.bytes[self.start..self.start + len]
    }
}
