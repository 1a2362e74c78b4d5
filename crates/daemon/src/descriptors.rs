//! Checks the limit of open files before the daemon opens a disk, accepts a client of a disk, or is
//! upgraded with its clients connected.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::sync::Notify;

/// Number of descriptors that a disk may need: its files, its sockets, its shard's eventfds, and
/// its first clients.
const PER_DISK: u64 = 16;

/// Number of descriptors reserved for a disk whose backing is still not open after
/// [`OPENING_TIME_MAX`].
const PER_HUNG_DISK: u64 = 2;

/// While a disk is being opened, [`PER_DISK`] descriptors are reserved for the disk for at most
/// this time.
const OPENING_TIME_MAX: Duration = Duration::from_secs(5);

/// Number of descriptors reserved for clients, the control API and state files.
const RESERVED: u64 = 64;

/// Number of the reserved descriptors that clients of disks cannot use.
const NOT_FOR_CLIENTS: u64 = 32;

/// Number of descriptors that are reserved for disks whose backings are being opened. These
/// descriptors may not be in use yet.
static OPENING: AtomicU64 = AtomicU64::new(0);

/// Notifies waiting tasks that [`OPENING`] became smaller.
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

/// Reservation of descriptors for a disk whose backing is being opened. Dropping this value ends
/// the reservation.
#[derive(Debug)]
pub(crate) struct Room(Arc<AtomicU64>);

/// Reserves descriptors for another disk. Waits for other disks that are being opened, if there may
/// be too few descriptors for all of these disks. The reservation of a disk that takes longer than
/// [`OPENING_TIME_MAX`] is reduced to [`PER_HUNG_DISK`]. The error gives the numbers and a
/// suggestion.
pub(crate) async fn room() -> Result<Room, String> {
    loop {
        let opened = OPENED.notified();
        let opening = OPENING.load(Ordering::SeqCst);
        match check_room(opening) {
            Ok(()) => return Ok(Room::take()),
            Err(refused) if check_room(0).is_err() => return Err(refused),
            Err(_) => {
                // `opened` was created before the load, so a notification after the load is not
                // missed.
                let _ = tokio::time::timeout(OPENING_TIME_MAX, opened).await;
            }
        }
    }
}

impl Room {
    fn take() -> Room {
        let reserved = Arc::new(AtomicU64::new(PER_DISK));
        OPENING.fetch_add(PER_DISK, Ordering::SeqCst);
        let weak = Arc::downgrade(&reserved);
        tokio::spawn(async move {
            tokio::time::sleep(OPENING_TIME_MAX).await;
            if let Some(reserved) = weak.upgrade() {
                reduce(&reserved, PER_HUNG_DISK);
            }
        });
        Room(reserved)
    }
}

/// Reduces the reservation of a disk to `to` descriptors.
fn reduce(reserved: &AtomicU64, to: u64) {
    let before = reserved.fetch_min(to, Ordering::SeqCst);
    OPENING.fetch_sub(before.saturating_sub(to), Ordering::SeqCst);
    OPENED.notify_waiters();
}

impl Drop for Room {
    fn drop(&mut self) {
        reduce(&self.0, 0);
    }
}

/// Returns the number of open descriptors and their limit; `None` without a limit.
fn usage() -> Option<(u64, u64)> {
    let limit = getrlimit(Resource::Nofile).current?;
    // The count includes the descriptor that reads the directory.
    let open = std::fs::read_dir("/proc/self/fd").map_or(limit, |entries| entries.count() as u64);
    Some((open, limit))
}

/// Returns an error if there are too few descriptors for another disk in addition to `reserved`
/// descriptors.
fn check_room(reserved: u64) -> Result<(), String> {
    usage().map_or(Ok(()), |(open, limit)| check(open + reserved, limit, "another disk"))
}

/// Checks that another program can open all disks again in this process while the clients' sockets
/// stay open. The new program opens the last disk when everything else is open.
pub(crate) fn check_hand_over() -> Result<(), String> {
    usage().map_or(Ok(()), |(open, limit)| check(open, limit, "an upgrade with all clients"))
}

/// Refuses a client's descriptor if descriptors are so scarce that the daemon itself needs the
/// rest: for the control API, state files and upgrades. The kernel gives the lowest free number, so
/// clients never get the highest numbers.
pub(crate) fn check_client(descriptor: &impl AsFd) -> io::Result<()> {
    let Some(limit) = getrlimit(Resource::Nofile).current else { return Ok(()) };
    let number = u64::try_from(descriptor.as_fd().as_raw_fd()).unwrap_or(0);
    if is_for_clients(number, limit) {
        return Ok(());
    }
    Err(io::Error::other(format!(
        "no descriptors for another client: nearly all of {limit} files are open; disconnect clients, or raise \
         LimitNOFILE in hob.service (ulimit -Hn)"
    )))
}

fn is_for_clients(number: u64, limit: u64) -> bool {
    number + NOT_FOR_CLIENTS < limit
}

fn check(open: u64, limit: u64, what: &str) -> Result<(), String> {
    let needed = PER_DISK + RESERVED;
    if open + needed <= limit {
        return Ok(());
    }
    Err(format!(
        "no descriptors for {what}: {open} of {limit} files are open, and {needed} must be free; raise LimitNOFILE in hob.service \
         (ulimit -Hn)"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_disk_is_refused_with_a_number() {
        assert_eq!(check(944, 1024, "another disk"), Ok(()));
        let refused = check(945, 1024, "another disk").unwrap_err();
        assert!(refused.contains("another disk: 945 of 1024 files are open"), "{refused}");
        assert!(check(5, u64::MAX, "another disk").is_ok());
        check_room(0).expect("tests have few files open");
    }

    #[test]
    fn clients_leave_the_last_descriptors() {
        assert!(is_for_clients(991, 1024) && !is_for_clients(992, 1024));
        check_client(&std::fs::File::open("/dev/null").unwrap()).unwrap();
    }

    #[test]
    fn a_disk_that_is_not_opened_in_time_keeps_few_descriptors() {
        crate::background::run_in_virtual_time(async {
            let reserved = |room: &Room| room.0.load(Ordering::SeqCst);
            let hung = room().await.unwrap();
            assert_eq!(reserved(&hung), PER_DISK);
            tokio::time::sleep(OPENING_TIME_MAX + Duration::from_millis(1)).await;
            assert_eq!(reserved(&hung), PER_HUNG_DISK);
            let reserved = Arc::clone(&hung.0);
            drop(hung);
            assert_eq!(reserved.load(Ordering::SeqCst), 0);
        });
    }
}
