//! Locks against a second hob on the same file.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

/// The files of a process that was killed stay locked until the kernel has taken its io_uring apart,
/// some time after the process is gone. Whoever restarts it must not fail for that.
const PATIENCE: Duration = Duration::from_secs(3);

/// Takes a lock, waiting a moment for a predecessor that is just ending.
///
/// # Errors
/// `WOULDBLOCK` when somebody else keeps it.
pub(crate) fn lock(file: impl AsFd, operation: FlockOperation) -> Result<(), Errno> {
    let start = Instant::now();
    loop {
        match flock(&file, operation) {
            Err(Errno::WOULDBLOCK) if start.elapsed() < PATIENCE => {
                std::thread::sleep(Duration::from_millis(10));
            }
            result => return result,
        }
    }
}
