//! Faults of a backing: errors by range and operation, pauses, and flushes that fail and lose data.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::medium::Medium;

/// Kinds of requests that a fault can affect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Operation {
    /// Reads.
    Read,
    /// Writes and writes of zeroes.
    Write,
    /// Flushes.
    Flush,
    /// Discards.
    Trim,
}

/// Requests that are answered with an error.
#[derive(Debug, Clone)]
pub struct Failing {
    /// The operation.
    pub operation: Operation,
    /// The range of bytes; ignored for flushes.
    pub range: Range<u64>,
    /// The error number.
    pub error: u32,
    /// End of the fault.
    pub until: Instant,
}

/// Called when a medium has lost data during a failed flush.
pub type LossHook = Box<dyn Fn() + Send + Sync>;

/// The present faults of a backing; see the module documentation.
#[derive(Default)]
pub struct Behaviour {
    failing: Mutex<Vec<Failing>>,
    /// No request is answered before this time.
    hang_until: Mutex<Option<Instant>>,
    /// Delay of each request, and its end.
    slow: Mutex<Option<(Duration, Instant)>>,
    lose_at_flush: AtomicBool,
    on_loss: Mutex<Option<LossHook>>,
}

impl std::fmt::Debug for Behaviour {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Behaviour").field("failing", &self.failing).finish_non_exhaustive()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Behaviour {
    /// Makes requests fail for a while, in addition to present faults.
    pub fn fail(&self, failing: Failing) {
        lock(&self.failing).push(failing);
    }

    /// Answers nothing for `time`.
    pub fn hang(&self, time: Duration) {
        *lock(&self.hang_until) = Some(Instant::now() + time);
    }

    /// Delays every request by `delay`, for `time`.
    pub fn slow(&self, delay: Duration, time: Duration) {
        *lock(&self.slow) = Some((delay, Instant::now() + time));
    }

    /// Makes the next flush fail and lose some or all data that is not durable.
    pub fn lose_at_flush(&self) {
        self.lose_at_flush.store(true, Ordering::Relaxed);
    }

    /// Calls `hook` whenever a failed flush has lost data.
    pub fn on_loss(&self, hook: LossHook) {
        *lock(&self.on_loss) = Some(hook);
    }

    /// Ends all faults.
    pub fn heal(&self) {
        lock(&self.failing).clear();
        *lock(&self.hang_until) = None;
        *lock(&self.slow) = None;
        self.lose_at_flush.store(false, Ordering::Relaxed);
    }

    /// Waits as the faults require; returns false if `ended` says that the request has been abandoned.
    pub fn wait(&self, ended: impl Fn() -> bool) -> bool {
        let start = Instant::now();
        loop {
            if ended() {
                return false;
            }
            let now = Instant::now();
            let hangs = lock(&self.hang_until).is_some_and(|until| until > now);
            let slow = lock(&self.slow).filter(|(_, until)| *until > now).map(|(delay, _)| delay);
            if !hangs && start.elapsed() >= slow.unwrap_or_default() {
                return true;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Returns the error of a request, if it fails. A failing flush may lose data of `medium`.
    pub fn error(&self, operation: Operation, range: &Range<u64>, medium: &mut Medium) -> Option<u32> {
        if operation == Operation::Flush && self.lose_at_flush.swap(false, Ordering::Relaxed) {
            medium.lose();
            if let Some(hook) = &*lock(&self.on_loss) {
                hook();
            }
            return Some(conformance::nbd_client::EIO);
        }
        let now = Instant::now();
        let meets = |other: &Range<u64>| range.start < other.end && other.start < range.end;
        let concerned = |it: &&Failing| {
            it.until > now && it.operation == operation && (operation == Operation::Flush || meets(&it.range))
        };
        lock(&self.failing).iter().find(concerned).map(|failing| failing.error)
    }
}
