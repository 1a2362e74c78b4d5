//! Checks a path before hob uses it: it must lead to a file or a block device, and its filesystem
//! must answer.
//!
//! A path on a filesystem that hangs (NFS or FUSE without a server) is refused after a second. The
//! thread that checks it stays until the filesystem answers. Each path has at most one checking
//! thread.

use std::collections::BTreeSet;
use std::fs::{FileType, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

use super::OpenError;

/// Longest wait for a filesystem to answer.
const ANSWER_MAX: Duration = Duration::from_secs(1);

/// Longest wait for a thread that is runnable and does not wait for a filesystem.
const BUSY_MAX: Duration = Duration::from_secs(10);

/// Interval at which the state of a checking thread is read.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Paths whose checking threads still wait for a filesystem.
static WAITING: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

/// Returns whether a path leads to a regular file or a block device.
///
/// # Errors
/// [`OpenError`] for anything else, such as a FIFO or a directory, and for a path whose filesystem
/// does not answer within a second.
pub(super) fn check(path: &Path) -> Result<FileType, OpenError> {
    let found = answer(path, ANSWER_MAX, look);
    let file_type = found
        .ok_or_else(|| OpenError::Unresponsive { path: path.into(), seconds: ANSWER_MAX.as_secs() })?
        .map_err(|source| OpenError::System { path: path.into(), source })?;
    if file_type.is_file() || file_type.is_block_device() {
        return Ok(file_type);
    }
    let what = path.display().to_string();
    Err(OpenError::Unfit {
        what,
        reason: format!("the path leads to {}, not to a file or a block device", noun(file_type)),
    })
}

/// Returns the type of a file that could be opened. Only files and block devices are opened,
/// because opening a FIFO blocks.
fn look(path: &Path) -> io::Result<FileType> {
    let file_type = std::fs::metadata(path)?.file_type();
    if file_type.is_file() || file_type.is_block_device() {
        OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    }
    Ok(file_type)
}

/// Returns the result of `ask`. Fails if `ask` takes longer than `limit`, or if an earlier call for
/// this path still waits.
fn answer<T: Send + 'static>(
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

fn noun(file_type: FileType) -> &'static str {
    match file_type {
        _ if file_type.is_dir() => "a directory",
        _ if file_type.is_fifo() => "a FIFO",
        _ if file_type.is_socket() => "a socket",
        _ if file_type.is_char_device() => "a character device",
        _ => "of another type",
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn fifos_directories_and_sockets_are_refused_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let fifo = dir.path().join("fifo");
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        let socket = dir.path().join("socket");
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let begun = Instant::now();
        for (path, noun) in [
            (fifo.as_path(), "a FIFO"),
            (dir.path(), "a directory"),
            (&socket, "a socket"),
            (Path::new("/dev/null"), "a character device"),
        ] {
            let error = check(path).unwrap_err().to_string();
            assert!(error.contains(noun), "{error}");
        }
        assert!(matches!(check(&dir.path().join("none")), Err(OpenError::System { .. })));
        let file = dir.path().join("file");
        std::fs::write(&file, b"x").unwrap();
        assert!(check(&file).unwrap().is_file());
        assert!(begun.elapsed() < Duration::from_secs(1));
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
        assert!(answer(path, limit, hangs).is_none());
        assert!(answer(path, limit, |_| -> io::Result<i32> { panic!("a second thread") }).is_none());
        drop(let_go);
        assert!(matches!(answer(path, Duration::from_secs(5), |_| Ok(2)), Some(Ok(2))));
    }
}
