//! Opens a file of a network filesystem again after ESTALE.
//!
//! ESTALE means that the server does not know the handle of the open file any more, for example
//! after a failover or after its filesystem was exported again. The descriptor never recovers. So
//! requests wait, and hob opens the path again every [`RETRY_NS`] until the path leads to the same
//! file: same inode and creation time, and not shorter. hob then makes the old descriptor numbers
//! refer to the newly opened file.
//!
//! If the filesystem has no creation times, another file may have got the inode's number. In this
//! case hob does not use the file until an operator restarts hob. If hob locked the old file when
//! it opened the disk, hob first locks the newly opened file. While another process has the new
//! file locked, hob does not use the file.
//!
//! A request that began before the outage fails after the disk's `backing_timeout`. For a request
//! that begins during the outage, the timeout counts from the start of the outage. Such a request
//! waits at least [`WAIT_NS_MIN`], or for the timeout if that is shorter. The server may have lost
//! unflushed writes together with the handle, so the driver reports a loss.
#![allow(unsafe_code)]

use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hob_engine::command::Access;
use hob_engine::units::Instant;

use super::super::helper::Job;
use super::super::{BackingOptions, Monitor, identity};
use super::{Attached, FileBacking, Life};
use crate::lock::{LockError, lock_image, unlock_image};
use crate::ring::Ring;

/// Pause before the file is opened again, nanoseconds.
const RETRY_NS: u64 = 1_000_000_000;

/// Minimum wait of a request that begins during an outage, nanoseconds.
const WAIT_NS_MIN: u64 = 1_000_000_000;

/// State of the file's handle.
pub(super) struct Stale {
    path: PathBuf,
    pub(super) monitor: Arc<Monitor>,
    /// Whether the file was locked when it was opened.
    is_locked: bool,
    /// Start of the outage; `None` while the handle is valid.
    since: Option<Instant>,
    /// Whether the helper thread is opening the file.
    is_opening: bool,
    /// Time of the next attempt to open the file again; `None` if none is planned.
    next: Option<Instant>,
}

impl Stale {
    pub(super) fn new(path: &Path, options: &BackingOptions) -> Stale {
        Stale {
            path: path.to_owned(),
            monitor: options.monitor.clone(),
            is_locked: options.locked,
            since: None,
            is_opening: false,
            next: None,
        }
    }

    pub(super) fn is_stale(&self) -> bool {
        self.since.is_some()
    }

    pub(super) fn is_opening(&self) -> bool {
        self.is_opening
    }

    /// Returns the time at which a request that begins now fails, if the lease gate or a stale
    /// handle still stops it then.
    pub(super) fn deadline(&self, now: Instant, wait_ns: u64) -> Instant {
        match self.since {
            Some(since) => (since + wait_ns).max(now + WAIT_NS_MIN.min(wait_ns)),
            None => now + wait_ns,
        }
    }

    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        self.next
    }
}

impl FileBacking {
    /// Starts to open the file again after ESTALE, unless that is in progress.
    pub(super) fn reopen(&mut self, ring: &mut Ring, now: Instant) {
        if self.stale.is_opening || self.life != Life::Open || self.stale.next.is_some_and(|at| at > now) {
            return;
        }
        if self.stale.since.is_none() {
            let why = "the file handle is stale (ESTALE)";
            tracing::warn!(path = %self.stale.path.display(), "{why}; hob opens the file again every second");
            self.stale.since = Some(now);
            self.stale.monitor.note_outage(Duration::ZERO, why);
        }
        self.stale.next = None;
        self.stale.is_opening = true;
        let again = Again {
            path: self.stale.path.clone(),
            access: self.access,
            is_locked: self.stale.is_locked,
            direct: self.direct.clone(),
            buffered: self.buffered().clone(),
            identity_text: self.info.identity_text.clone(),
            size_bytes: self.info.size_bytes,
        };
        self.ask_helper(ring, Job::Reopen(Box::new(move || again.open())));
    }

    /// Handles the result of an attempt to open the file again.
    pub(super) fn reopened(&mut self, ring: &mut Ring, now: Instant, result: io::Result<()>) {
        self.stale.is_opening = false;
        if self.life != Life::Open {
            return;
        }
        if let Err(error) = result {
            self.stale.next = Some(now + RETRY_NS);
            return self
                .stale
                .monitor
                .note_outage(Duration::ZERO, &format!("cannot open the file again: {error}"));
        }
        tracing::info!(path = %self.stale.path.display(), "the file is open again");
        let Attached { direct, buffered, tokens } = self.attached();
        direct.into_iter().chain([buffered]).for_each(|fd| ring.detach(fd));
        let direct = self.direct.clone().map(|file| ring.attach(file, self.class));
        let buffered = ring.attach(self.buffered().clone(), self.class);
        self.attached = Some(Attached { direct, buffered, tokens });
        self.gate_descriptors(ring);
        self.stale.since = None;
        self.has_lost |= self.access == Access::ReadWrite;
        self.stale.monitor.note_connected();
        self.retry_stopped(ring, now);
    }
}

/// An attempt to open the file again.
struct Again {
    path: PathBuf,
    access: Access,
    is_locked: bool,
    direct: Option<Arc<OwnedFd>>,
    buffered: Arc<OwnedFd>,
    identity_text: String,
    size_bytes: u64,
}

impl Again {
    /// Opens the file, and makes the numbers of the old descriptors refer to the newly opened file.
    /// May block while the file's filesystem hangs.
    fn open(self) -> io::Result<()> {
        let open = |flags| {
            let write = self.access == Access::ReadWrite;
            OpenOptions::new().read(true).write(write).custom_flags(flags).open(&self.path)
        };
        let buffered = open(0)?;
        let metadata = buffered.metadata()?;
        if metadata.created().is_err() {
            return Err(io::Error::other(
                "the filesystem has no creation times, so hob cannot tell whether the path leads to the same file; \
                 if it does, restart hob",
            ));
        }
        let found = identity::of_file("file", &metadata, self.size_bytes);
        if found != self.identity_text || metadata.size() < self.size_bytes {
            let size_bytes = metadata.size();
            return Err(io::Error::other(format!(
                "the path leads to another file now: {found}, with {size_bytes} bytes"
            )));
        }
        let direct = self.direct.is_some().then(|| open(libc::O_DIRECT)).transpose()?;
        if self.is_locked {
            // The old handle may still have the lock on this host.
            let _ = unlock_image(&*self.buffered);
            match lock_image(&buffered, self.access) {
                Ok(()) => {}
                Err(LockError::System(errno)) => return Err(errno.into()),
                Err(error) => return Err(io::Error::other(error)),
            }
        }
        if let (Some(old), Some(new)) = (&self.direct, direct) {
            replace(&new, old)?;
        }
        replace(&buffered, &self.buffered)
    }
}

/// Makes the number of an open descriptor refer to another open file.
fn replace(new: impl AsFd, old: &OwnedFd) -> io::Result<()> {
    let (new, old) = (new.as_fd().as_raw_fd(), old.as_raw_fd());
    // SAFETY: both descriptors are open during the call. The old number stays open, and its owner
    // keeps it: the system replaces only what it refers to, atomically.
    match unsafe { libc::dup3(new, old, libc::O_CLOEXEC) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}
