//! Asks a filesystem or a device that may hang, with a time limit.
//!
//! The thread that asks stays until it has an answer. Each path has at most one such thread.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

/// Longest wait for a thread that is runnable and does not wait for a filesystem.
const BUSY_MAX: Duration = Duration::from_secs(10);

/// Interval at which the state of a checking thread is read.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Paths whose checking threads still wait for a filesystem.
static WAITING: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

/// Returns the result of `ask`. Fails if `ask` takes longer than `limit`, or if an earlier call for
/// this path still waits.
pub(crate) fn answer<T: Send + 'static>(
    path: &Path,
    limit: Duration,
    ask: impl FnOnce(&Path) -> io::Result<T> + Send + 'static,
) -> Option<io::Result<T>> {
    if !waiting().insert(path.to_owned()) {
        // There is a second caller at the same time: the first caller's thread either ends in a
        // moment, or hangs.
        let until = Instant::now() + limit;
        while !waiting().insert(path.to_owned()) {
            if Instant::now() > until {
                return None;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    let (report, answer) = mpsc::channel();
    let (begin, begun) = mpsc::channel();
    let of = path.to_owned();
    let started = std::thread::Builder::new().name("hob-path".into()).spawn(move || {
        let _ = begin.send(std::fs::read_link("/proc/thread-self").unwrap_or_default());
        let found = ask(&of);
        waiting().remove(&of);
        let _ = report.send(found);
    });
    if let Err(error) = started {
        waiting().remove(path);
        return Some(Err(error));
    }
    let thread = begun.recv_timeout(BUSY_MAX).ok()?;
    let deadline = Instant::now() + BUSY_MAX;
    let mut found = answer.recv_timeout(limit);
    while found.is_err() && is_runnable(&thread) && Instant::now() < deadline {
        found = answer.recv_timeout(LOOK_EVERY);
    }
    found.ok()
}

/// Returns true if a thread is runnable. `thread` is the thread's directory below `/proc`.
fn is_runnable(thread: &Path) -> bool {
    let status = std::fs::read_to_string(Path::new("/proc").join(thread).join("stat"));
    // The state follows the name of the process, which is in parentheses.
    status.is_ok_and(|status| status.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('R')))
}

fn waiting() -> MutexGuard<'static, BTreeSet<PathBuf>> {
    WAITING.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_that_does_not_answer_is_given_up_and_costs_one_thread() {
        let path = Path::new("/nowhere/of/this/test");
        let (let_go, held) = mpsc::channel::<()>();
        let limit = Duration::from_millis(50);
        let hangs = move |_: &Path| {
            let _ = held.recv();
            Ok(1)
        };
        assert!(answer(path, limit, hangs).is_none());
        assert!(answer(path, limit, |_| -> io::Result<i32> { panic!("a second thread") }).is_none());
        drop(let_go);
        assert!(matches!(answer(path, Duration::from_secs(5), |_| Ok(2)), Some(Ok(2))));
    }
}
