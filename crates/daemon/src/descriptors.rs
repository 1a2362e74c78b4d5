//! The limit of open file descriptors, and whether it suffices for another disk.

use std::sync::atomic::{AtomicU64, Ordering};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::sync::Notify;

/// Number of descriptors that a disk may need: its files, its sockets, its shard's eventfds, and
/// its first clients.
const PER_DISK: u64 = 16;

/// Number of descriptors reserved for clients, the control API and state files.
const RESERVED: u64 = 64;

/// Number of disks whose backings are being opened. Their descriptors may not be open yet.
static OPENING: AtomicU64 = AtomicU64::new(0);

/// Notifies that [`OPENING`] became smaller.
static OPENED: Notify = Notify::const_new();

/// Raises the limit of open files to the system's maximum, because each disk and client needs
/// several descriptors, and the usual soft limit is 1024.
pub(crate) fn raise_limit() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current == maximum {
        return;
    }
    match setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        Ok(()) => tracing::debug!("limit of open files raised from {current:?} to {maximum:?}"),
        Err(errno) => {
            tracing::warn!("cannot raise the limit of open files from {current:?} to {maximum:?}: {errno}")
        }
    }
}

/// Descriptors for a disk whose backing is being opened, until dropped.
#[derive(Debug)]
pub(crate) struct Room(());

/// Reserves descriptors for another disk. Waits for other disks that are being opened, if there may
/// be too few for all of them. The error gives the numbers and a suggestion.
pub(crate) async fn room() -> Result<Room, String> {
    loop {
        let opened = OPENED.notified();
        let opening = OPENING.load(Ordering::SeqCst);
        match check_room(opening) {
            Ok(()) => {
                OPENING.fetch_add(1, Ordering::SeqCst);
                return Ok(Room(()));
            }
            Err(refused) if opening == 0 => return Err(refused),
            Err(_) => opened.await,
        }
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        OPENING.fetch_sub(1, Ordering::SeqCst);
        OPENED.notify_waiters();
    }
}

/// Checks whether there are enough descriptors for another disk, beside `opening` others.
fn check_room(opening: u64) -> Result<(), String> {
    let Some(limit) = getrlimit(Resource::Nofile).current else { return Ok(()) };
    // The count includes the descriptor that reads the directory.
    let open = std::fs::read_dir("/proc/self/fd").map_or(limit, |entries| entries.count() as u64);
    check(open + opening * PER_DISK, limit)
}

fn check(open: u64, limit: u64) -> Result<(), String> {
    let needed = PER_DISK + RESERVED;
    if open + needed <= limit {
        return Ok(());
    }
    Err(format!(
        "no descriptors for another disk: {open} of {limit} files are open, and {needed} must be free; raise LimitNOFILE in hob.service \
         (ulimit -Hn)"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_disk_is_refused_with_a_number() {
        assert_eq!(check(944, 1024), Ok(()));
        let refused = check(945, 1024).unwrap_err();
        assert!(refused.contains("945 of 1024 files are open"), "{refused}");
        assert!(check(5, u64::MAX).is_ok());
        check_room(0).expect("tests have few files open");
    }
}
