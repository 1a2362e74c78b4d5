//! Asks a filesystem or a device that may hang, with a time limit.
//!
//! A separate thread asks, and stays until it has an answer. Each path has at most one such thread.
//! Once a caller has stopped waiting for a path, later callers are refused without a wait until
//! that thread ends. So one limit covers all questions of an operation about the same path.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

/// Longest wait for a thread that is runnable and does not wait for a filesystem.
const BUSY_MAX: Duration = Duration::from_secs(10);

/// Interval at which the state of a checking thread is read.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// State of a thread that asks a filesystem.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asking {
    /// The caller of the thread waits for the answer.
    Awaited,
    /// The caller of the thread does not wait any more, because the filesystem hangs.
    GivenUp,
}

/// Absolute paths that threads ask about.
static ASKING: Mutex<BTreeMap<PathBuf, Asking>> = Mutex::new(BTreeMap::new());

/// Returns the result of `ask`. Fails if `ask` takes longer than `limit`, or if an earlier call for
/// this path still waits.
pub(crate) fn within<T: Send + 'static>(
    path: &Path,
    limit: Duration,
    ask: impl FnOnce(&Path) -> io::Result<T> + Send + 'static,
) -> Option<io::Result<T>> {
    let key = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    if !enter(&key, limit) {
        return None;
    }
    let (report, answer) = mpsc::channel();
    let (begin, begun) = mpsc::channel();
    let (of, entered) = (path.to_owned(), key.clone());
    let started = std::thread::Builder::new().name("hob-path".into()).spawn(move || {
        let _ = begin.send(std::fs::read_link("/proc/thread-self").unwrap_or_default());
        let found = ask(&of);
        // Both steps happen under one lock, so that the caller does not give up between them.
        let mut threads = asking();
        threads.remove(&entered);
        let _ = report.send(found);
    });
    if let Err(error) = started {
        asking().remove(&key);
        return Some(Err(error));
    }
    let thread = begun.recv_timeout(BUSY_MAX).ok()?;
    let deadline = Instant::now() + BUSY_MAX;
    let mut found = answer.recv_timeout(limit);
    while found.is_err() && is_runnable(&thread) && Instant::now() < deadline {
        found = answer.recv_timeout(LOOK_EVERY);
    }
    found.ok().or_else(|| {
        let mut threads = asking();
        let late = answer.try_recv().ok();
        if late.is_none() {
            threads.insert(key, Asking::GivenUp);
        }
        late
    })
}

/// Registers a thread that is about to ask about a path. Returns false if the caller of an earlier
/// thread for the path has stopped waiting for it, or if that thread does not end within `limit`.
fn enter(path: &Path, limit: Duration) -> bool {
    let until = Instant::now() + limit;
    loop {
        match asking().entry(path.to_owned()) {
            Entry::Vacant(place) => {
                place.insert(Asking::Awaited);
                return true;
            }
            Entry::Occupied(thread) if *thread.get() == Asking::GivenUp => return false,
            // There is a second caller at the same time.
            Entry::Occupied(_) => {}
        }
        if Instant::now() > until {
            return false;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Returns true if a thread is runnable. `thread` is the thread's directory below `/proc`.
fn is_runnable(thread: &Path) -> bool {
    let status = std::fs::read_to_string(Path::new("/proc").join(thread).join("stat"));
    // The state follows the name of the process, which is in parentheses.
    status.is_ok_and(|status| status.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('R')))
}

fn asking() -> MutexGuard<'static, BTreeMap<PathBuf, Asking>> {
    ASKING.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Longest wait for a thread to end.
    const END_MAX: Duration = Duration::from_secs(60);

    /// Asks about a path until an earlier thread has ended.
    fn answer_of(path: &Path) -> Option<io::Result<i32>> {
        let until = Instant::now() + END_MAX;
        loop {
            let answer = within(path, END_MAX, |_| Ok(2));
            if answer.is_some() || Instant::now() > until {
                return answer;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn a_path_that_does_not_answer_is_given_up_and_costs_one_thread() {
        let path = Path::new("/nowhere/of/this/test");
        let (let_go, held) = mpsc::channel::<()>();
        let limit = Duration::from_millis(50);
        let hangs = move |_: &Path| {
            let _ = held.recv();
            Ok(1)
        };
        assert!(within(path, limit, hangs).is_none());
        assert!(within(path, limit, |_| -> io::Result<i32> { panic!("a second thread") }).is_none());
        drop(let_go);
        assert!(matches!(answer_of(path), Some(Ok(2))));
    }

    /// A path that did not answer once is refused at once: opening a disk examines its path several
    /// times.
    #[test]
    fn a_path_that_was_given_up_is_refused_without_another_wait() {
        let relative = Path::new("nowhere/of/a/hung/disk");
        let absolute = std::env::current_dir().unwrap().join(relative);
        let (let_go, held) = mpsc::channel::<()>();
        let hangs = move |_: &Path| {
            let _ = held.recv();
            Ok(1)
        };
        assert!(within(&absolute, Duration::from_millis(50), hangs).is_none());
        let begun = Instant::now();
        for path in [absolute.as_path(), relative, &absolute] {
            assert!(within(path, 2 * END_MAX, |_| Ok(2)).is_none());
        }
        assert!(begun.elapsed() < END_MAX, "{:?}", begun.elapsed());
        drop(let_go);
        assert!(matches!(answer_of(relative), Some(Ok(2))));
    }
}
