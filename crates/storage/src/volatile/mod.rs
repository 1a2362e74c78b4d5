//! The power-cut layer: files that lose unflushed data, for the power cuts of `hob selftest`.
//!
//! # Purpose
//! A kill -9 does not lose data that a process has written: the kernel has it. A power cut does: it
//! discards any part of the device's cache, in units of 512 bytes. Here that cache is memory of the process
//! ([`VolatileFile`]), so that kill -9 acts as a power cut, with the real process, its sockets and its
//! files.
//!
//! # Operation
//! [`switch_on`] is called once, before any file is opened. It makes every pool device, and every raw
//! backing that is opened for writing, a volatile file. The ring then performs their I/O itself, some time
//! later and in any order, and the pool does that of its tables in place. Disks behind NBD are other
//! processes and lose nothing. A process that ends cleanly calls [`settle`]: then the power stayed on.
//!
//! # Limits
//! It cannot be switched on twice, or by anything but the caller. It is for tests only: if it is switched
//! on by mistake, data is lost that a healthy disk would keep. So it logs a warning. Performance is not a
//! goal.
//!
//! # Cutting by itself
//! A kill from outside rarely happens during a flush. With [`VolatileOptions::cut_after`] the process kills
//! itself after that many steps; each piece that a flush writes is a step.

mod control;
mod file;
mod rng;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use rustix::io::Errno;

pub(crate) use control::ControlFile;
pub(crate) use file::VolatileFile;
pub(crate) use rng::SimRng;

/// Effect of a flush.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Flushes {
    /// It makes written data durable.
    #[default]
    Honest,
    /// It has no effect and reports success, like a defective device. hob cannot keep its promises on one,
    /// so this shows whether a test would notice.
    Ignored,
}

/// Behaviour of the layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VolatileOptions {
    /// Seed of the random choices: which units are written early, and in which order operations happen.
    pub seed: u64,
    /// Effect of flushes and durable writes.
    pub flushes: Flushes,
    /// The process kills itself after this many steps: I/Os, and pieces that are written to a file.
    pub cut_after: Option<u64>,
}

/// Set once the layer is switched on.
static LAYER: OnceLock<VolatileOptions> = OnceLock::new();

/// By device and inode: all descriptors of a file share one. Kept until the process ends, with their
/// descriptors, so that no number is reused for another file.
static FILES: Mutex<BTreeMap<(u64, u64), Arc<VolatileFile>>> = Mutex::new(BTreeMap::new());

/// Steps until the process kills itself; 0: never.
static STEPS_LEFT: AtomicU64 = AtomicU64::new(0);

/// Makes all files that are opened from now on lose unflushed data at a kill.
///
/// # Errors
/// The layer is on already.
pub fn switch_on(options: VolatileOptions) -> Result<(), AlreadyOn> {
    LAYER.set(options).map_err(|_| AlreadyOn)?;
    STEPS_LEFT.store(options.cut_after.unwrap_or(0), Ordering::Relaxed);
    tracing::warn!(
        "POWER-CUT TEST: what is not flushed stays in memory and is LOST when this process dies; \
         never use a disk that matters in this mode"
    );
    Ok(())
}

/// The layer was switched on before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the power-cut layer is on already")]
pub struct AlreadyOn;

/// Writes all held data to the files, for a process that ends while the power stays on. Without the layer,
/// it has no effect.
///
/// # Errors
/// The first error of a file.
pub fn settle() -> io::Result<()> {
    let files: Vec<_> = lock(&FILES).values().cloned().collect();
    // All files are tried; the first error is returned.
    files.iter().map(|file| file.settle()).fold(Ok(()), Result::and)
}

/// Returns the volatile file for a file that was opened for writing; `None` if the layer is off.
///
/// # Errors
/// The file cannot be opened again.
pub(crate) fn volatile(file: &File) -> io::Result<Option<Arc<VolatileFile>>> {
    LAYER.get().map(|options| adopt(file, *options)).transpose()
}

/// As `volatile`, whether or not the layer is on.
fn adopt(file: &File, options: VolatileOptions) -> io::Result<Arc<VolatileFile>> {
    let key = key(file)?;
    let mut files = lock(&FILES);
    if let Some(known) = files.get(&key) {
        return Ok(known.clone());
    }
    let seed = options.seed ^ (files.len() as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let new = Arc::new(VolatileFile::new(reopen(file)?, seed, options.flushes));
    files.insert(key, new.clone());
    Ok(new)
}

/// Returns the volatile file of a descriptor, if [`volatile`] was called for it.
pub(crate) fn known(file: impl AsFd) -> Option<Arc<VolatileFile>> {
    let key = key(file).ok()?;
    lock(&FILES).get(&key).cloned()
}

/// Returns a system call's errno for a volatile file's error: there is no data beyond the end.
pub(crate) fn errno(error: io::Error) -> Errno {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => Errno::NODATA,
        _ => Errno::from_io_error(&error).unwrap_or(Errno::IO),
    }
}

fn key(file: impl AsFd) -> io::Result<(u64, u64)> {
    let stat = rustix::fs::fstat(file)?;
    Ok((stat.st_dev, stat.st_ino))
}

/// Opens the file again, without O_DIRECT and its alignment, and without the lock.
fn reopen(file: &File) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// Counts a step; the last one does not return.
fn step() {
    let left = STEPS_LEFT.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
    if left == Ok(1) {
        let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
        loop {
            std::thread::park();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
