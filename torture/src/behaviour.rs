//! Faults of a test backing: errors by range and operation, delays, hangs, and flushes that fail
//! and lose data.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::lateness::Lateness;
use crate::medium::Medium;

/// Kinds of requests that a fault can affect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Operation {
    /// Read requests.
    Read,
    /// Write and write-zeroes requests.
    Write,
    /// Flush requests.
    Flush,
    /// Discard requests.
    Trim,
}

/// A fault that makes the requests of one operation fail in a range.
#[derive(Debug, Clone)]
pub struct Failing {
    /// Operation of the failing requests.
    pub operation: Operation,
    /// Failing range in bytes; ignored for flushes.
    pub range: Range<u64>,
    /// Error number of the reply.
    pub error: u32,
    /// Time at which the fault ends.
    pub until: Instant,
}

/// Function that is called when a failed flush has lost data of a medium.
pub type LossHook = Box<dyn Fn() + Send + Sync>;

/// Current faults of a backing; see the module documentation.
#[derive(Default)]
pub struct Behaviour {
    failing: Mutex<Vec<Failing>>,
    /// Time before which no request is answered.
    hang_until: Mutex<Option<Instant>>,
    /// Delay of each request, and the time at which the fault ends.
    slow: Mutex<Option<(Duration, Instant)>>,
    lose_at_flush: AtomicBool,
    on_loss: Mutex<Option<LossHook>>,
    lateness: Arc<Lateness>,
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
    /// Returns the record of requests that the backing answered later than its faults require.
    #[must_use]
    pub fn lateness(&self) -> &Arc<Lateness> {
        &self.lateness
    }

    /// Adds a fault that makes some requests fail.
    pub fn fail(&self, failing: Failing) {
        lock(&self.failing).push(failing);
    }

    /// Makes all requests hang for `time`.
    pub fn hang(&self, time: Duration) {
        *lock(&self.hang_until) = Some(Instant::now() + time);
    }

    /// Delays every request by `delay`. The fault lasts for `time`.
    pub fn slow(&self, delay: Duration, time: Duration) {
        *lock(&self.slow) = Some((delay, Instant::now() + time));
    }

    /// Makes the next flush fail and lose some or all data that is not durable.
    pub fn lose_at_flush(&self) {
        self.lose_at_flush.store(true, Ordering::Relaxed);
    }

    /// Sets a function that is called whenever a failed flush has lost data.
    pub fn on_loss(&self, hook: LossHook) {
        *lock(&self.on_loss) = Some(hook);
    }

    /// Ends all faults.
    pub fn heal(&self) {
        lock(&self.failing).clear();
        *lock(&self.hang_until) = None;
        *lock(&self.slow) = None;
        self.lose_at_flush.store(false, Ordering::Relaxed);
        self.lateness.release();
    }

    /// Waits until no fault delays the request any more. Returns false as soon as `ended` returns
    /// true, which means that the request was abandoned.
    pub fn wait(&self, ended: impl Fn() -> bool) -> bool {
        let start = Instant::now();
        loop {
            if ended() {
                return false;
            }
            let Some(until) = self.delayed_until(start) else { return true };
            self.lateness.postpone(until);
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Returns the time until which faults delay a request whose execution began at `start`; `None`
    /// if no fault delays the request.
    fn delayed_until(&self, start: Instant) -> Option<Instant> {
        let now = Instant::now();
        let (hang, slow) = (*lock(&self.hang_until), *lock(&self.slow));
        let slow = slow.map(|(delay, until)| until.min(start + delay));
        hang.into_iter().chain(slow).filter(|until| *until > now).max()
    }

    /// Returns the error number of a request if a fault makes the request fail. A failing flush may
    /// lose data of `medium`.
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
