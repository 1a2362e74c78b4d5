//! Measures how late the host runs the threads of the test. On an overloaded host, a timing check
//! can fail because a test server answered late, and not because of a defect of the daemon.
//!
//! Each test server, each test file and the [`Watchdog`] have a [`Lateness`], which records how
//! long after its due time each task ended. A request is due when the server has received it. An
//! injected delay of the server postpones the due time, and so does a client that does not read
//! the server's replies. So only the host itself can make a task late.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Length of the watchdog's sleeps.
const WATCHDOG_SLEEP: Duration = Duration::from_millis(10);
/// Minimum length of a delay that is kept for later checks. All tolerated delays are longer.
const KEPT_MIN: Duration = Duration::from_millis(100);
/// Maximum number of delays that are kept. The oldest delays are dropped first.
const KEPT_MAX: usize = 4096;
/// Minimum time of a reply after which the client counts as slow.
const SLOW_REPLY_MIN: Duration = Duration::from_millis(10);
/// A host that is late by more than this part of a time limit makes the check invalid.
const TOLERATED_PART: u32 = 4;

/// The time limit of a timing check.
#[derive(Debug, Clone, Copy)]
pub struct TimeLimit {
    /// Time from which delays of the host can affect the check.
    pub since: Instant,
    /// Duration that the check permits.
    pub limit: Duration,
}

impl TimeLimit {
    /// Returns the maximum delay of the host with which the check is valid.
    #[must_use]
    pub fn tolerated(&self) -> Duration {
        self.limit / TOLERATED_PART
    }
}

/// Record of late tasks; see the module documentation.
#[derive(Debug, Default)]
pub struct Lateness {
    inner: Mutex<Inner>,
}

/// Time between the due time of a task and its end.
#[derive(Debug, Clone, Copy)]
struct Delay {
    due: Instant,
    done: Instant,
}

impl Delay {
    /// Returns the length of the part of the delay that is between two times.
    fn overlap(self, from: Instant, to: Instant) -> Duration {
        self.done.min(to).saturating_duration_since(self.due.max(from))
    }
}

#[derive(Debug, Default)]
struct Inner {
    /// Delays of at least [`KEPT_MIN`], in the order in which they ended.
    past: VecDeque<Delay>,
    largest: Duration,
    /// Due times of the tasks that have not ended, by number.
    tasks: BTreeMap<u64, Instant>,
    tasks_begun: u64,
    /// Time before which no task is due, because of an injected delay or a slow client.
    postponed_until: Option<Instant>,
    /// Number of replies that are being written to a client.
    replies: usize,
    /// Time since which at least one reply is being written.
    replying_since: Option<Instant>,
}

impl Inner {
    fn begin(&mut self, due: Instant) -> u64 {
        self.tasks_begun += 1;
        self.tasks.insert(self.tasks_begun, due);
        self.tasks_begun
    }

    fn end(&mut self, task: u64, now: Instant) {
        let Some(delay) = self.tasks.remove(&task).and_then(|due| self.delay(due, now)) else { return };
        let length = delay.overlap(delay.due, delay.done);
        self.largest = self.largest.max(length);
        if length < KEPT_MIN {
            return;
        }
        if self.past.len() == KEPT_MAX {
            self.past.pop_front();
        }
        self.past.push_back(delay);
    }

    /// Returns the delay of a task that ends now; `None` if the task is not late. While a reply is
    /// being written, the task may have waited for a client that does not read.
    fn delay(&self, due: Instant, now: Instant) -> Option<Delay> {
        let due = self.postponed_until.map_or(due, |until| until.max(due));
        let done = self.replying_since.map_or(now, |since| since.min(now));
        (due < done).then_some(Delay { due, done })
    }

    fn begin_reply(&mut self, now: Instant) {
        self.replies += 1;
        self.replying_since.get_or_insert(now);
    }

    fn end_reply(&mut self, begun: Instant, now: Instant) {
        self.replies -= 1;
        if self.replies == 0 {
            self.replying_since = None;
        }
        if now.saturating_duration_since(begun) >= SLOW_REPLY_MIN {
            self.postpone(now);
        }
    }

    fn postpone(&mut self, until: Instant) {
        self.postponed_until = self.postponed_until.max(Some(until));
    }

    fn within(&self, from: Instant, to: Instant) -> Duration {
        let unfinished = self.tasks.values().filter_map(|due| self.delay(*due, to));
        let delays = self.past.iter().copied().chain(unfinished);
        delays.map(|delay| delay.overlap(from, to)).max().unwrap_or_default()
    }
}

impl Lateness {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records a task that should end at `due`. The task ends when the returned value is dropped.
    #[must_use]
    pub fn task(self: &Arc<Self>, due: Instant) -> Task {
        Task { number: self.lock().begin(due), lateness: Arc::clone(self) }
    }

    /// Sleeps, and records how late the sleep ended.
    pub fn sleep(self: &Arc<Self>, time: Duration) {
        let _task = self.task(Instant::now() + time);
        std::thread::sleep(time);
    }

    /// Records an injected delay: no present task is due before `until`.
    pub fn postpone(&self, until: Instant) {
        self.lock().postpone(until);
    }

    /// Records the end of all injected delays.
    pub fn release(&self) {
        let now = Instant::now();
        let mut inner = self.lock();
        inner.postponed_until = inner.postponed_until.map(|until| until.min(now));
    }

    /// Writes a reply to a client by calling `send`. If the client does not read, `send` blocks, and
    /// other tasks may wait for it. So tasks are not due before `send` returns.
    pub fn reply<T>(&self, send: impl FnOnce() -> T) -> T {
        let begun = Instant::now();
        self.lock().begin_reply(begun);
        let result = send();
        self.lock().end_reply(begun, Instant::now());
        result
    }

    /// Returns the largest delay of a task between two times, including tasks that have not ended.
    /// `to` must not be in the future.
    #[must_use]
    pub fn within(&self, from: Instant, to: Instant) -> Duration {
        self.lock().within(from, to)
    }

    /// Returns the largest delay of the tasks that have ended.
    #[must_use]
    pub fn largest(&self) -> Duration {
        self.lock().largest
    }
}

/// A task that has not ended. Dropping this value ends the task.
#[derive(Debug)]
pub struct Task {
    number: u64,
    lateness: Arc<Lateness>,
}

impl Drop for Task {
    fn drop(&mut self) {
        self.lateness.lock().end(self.number, Instant::now());
    }
}

/// A thread that records how late its own short sleeps end. Dropping this value ends the thread.
#[derive(Debug)]
pub struct Watchdog {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    /// Starts the thread, which records its delays in `lateness`.
    ///
    /// # Errors
    /// Returns errors of the operating system.
    pub fn start(lateness: &Arc<Lateness>) -> io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, lateness) = (Arc::clone(&stop), Arc::clone(lateness));
        let watch = move || {
            while !stopped.load(Ordering::Relaxed) {
                lateness.sleep(WATCHDOG_SLEEP);
            }
        };
        let thread = std::thread::Builder::new().name("watchdog".to_owned()).spawn(watch)?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn a_task_is_late_from_its_due_time_to_its_end() {
        let (mut inner, start) = (Inner::default(), Instant::now());
        let [late, in_time, open] = [300, 900, 1000].map(|due| inner.begin(start + ms(due)));
        inner.end(late, start + ms(800));
        inner.end(in_time, start + ms(900));
        assert_eq!(inner.largest, ms(500));
        assert_eq!(inner.within(start, start + ms(950)), ms(500));
        // The window has only a part of the delay.
        assert_eq!(inner.within(start + ms(600), start + ms(950)), ms(200));
        assert_eq!(inner.within(start, start + ms(400)), ms(100));
        assert_eq!(inner.within(start + ms(800), start + ms(950)), ms(0));
        // A task that has not ended is late too.
        assert_eq!(inner.within(start, start + ms(3000)), ms(2000));
        inner.end(open, start + ms(1000));
        assert_eq!(inner.within(start, start + ms(3000)), ms(500));
    }

    #[test]
    fn an_injected_delay_is_no_delay_of_the_host() {
        let (mut inner, start) = (Inner::default(), Instant::now());
        let task = inner.begin(start);
        inner.postpone(start + ms(2000));
        assert_eq!(inner.within(start, start + ms(1900)), ms(0));
        inner.end(task, start + ms(2300));
        assert_eq!(inner.within(start, start + ms(2300)), ms(300));
    }

    #[test]
    fn a_client_that_does_not_read_is_no_delay_of_the_host() {
        let (mut inner, start) = (Inner::default(), Instant::now());
        let [waiting, ended] = [100, 200].map(|due| inner.begin(start + ms(due)));
        inner.begin_reply(start + ms(300));
        assert_eq!(inner.within(start, start + ms(2000)), ms(200));
        inner.end(ended, start + ms(2000));
        assert_eq!(inner.largest, ms(100));
        inner.end_reply(start + ms(300), start + ms(2500));
        inner.end(waiting, start + ms(2700));
        assert_eq!(inner.largest, ms(200));
    }

    #[test]
    fn the_end_of_the_injected_delays_makes_tasks_due() {
        let lateness = Arc::new(Lateness::default());
        let task = lateness.task(Instant::now());
        lateness.postpone(Instant::now() + Duration::from_secs(3600));
        lateness.release();
        std::thread::sleep(ms(20));
        drop(task);
        assert!(lateness.largest() >= ms(15), "{lateness:?}");
    }

    #[test]
    fn the_watchdog_records_that_it_was_not_run() {
        let lateness = Arc::new(Lateness::default());
        let watchdog = Watchdog::start(&lateness).unwrap();
        // The watchdog cannot record the end of its sleep.
        let start = Instant::now();
        while lateness.largest().is_zero() {
            assert!(start.elapsed() < Duration::from_secs(60), "the watchdog does not run");
            std::thread::sleep(ms(1));
        }
        let blocked = lateness.lock();
        std::thread::sleep(ms(200));
        drop(blocked);
        drop(watchdog);
        assert!(lateness.largest() >= ms(100), "{lateness:?}");
    }
}
