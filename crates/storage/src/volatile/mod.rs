//! Files that lose what was not flushed: the ground on which `hob selftest` cuts the power.
//!
//! # For what
//! A kill -9 does not lose what a process has written: the kernel has it. A power cut does: the device's cache
//! goes, any part of it, in units of 512 bytes. Here that cache is memory of the process ([`VolatileFile`]), so
//! kill -9 is a power cut, with the real process, its sockets and its files.
//!
//! # How
//! [`switch_on`], once and before anything is opened, makes every pool device and every raw backing that is
//! opened for writing a volatile file. The ring then carries out their I/O itself, some time later and in an
//! order of its own, and the pool its tables' in place. Disks behind NBD are other processes and lose nothing.
//! Who ends in peace calls [`settle`]: then the power stayed on.
//!
//! # What it refuses
//! To be switched on twice, or by anything but the caller. It is a test's tool: whoever switches it on by mistake
//! loses data that a healthy disk would keep, which is why it warns loudly. Performance is no aim.
//!
//! # Cutting by itself
//! A kill from outside seldom comes while a flush is half done. With [`VolatileOptions::cut_after`] the process
//! kills itself after so many steps, of which a flush has as many as it writes pieces.

mod control;
mod dice;
mod file;
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
pub(crate) use dice::Dice;
pub(crate) use file::VolatileFile;

/// What becomes of a flush.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Flushes {
    /// It makes durable what was written.
    #[default]
    Honest,
    /// It does nothing and says that it did: a device that lies. hob cannot keep its promises on one, so this
    /// shows whether a test would notice.
    Ignored,
}

/// How the layer behaves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VolatileOptions {
    /// Of the dice that decide what gets through unasked, and in which order things happen.
    pub seed: u64,
    /// What becomes of flushes and durable writes.
    pub flushes: Flushes,
    /// The process kills itself after so many steps: I/Os, and pieces that reach a file.
    pub cut_after: Option<u64>,
}

/// Set once the layer is switched on.
static LAYER: OnceLock<VolatileOptions> = OnceLock::new();

/// By device and inode: all descriptors of a file see the same. Kept until the end, and with them their
/// descriptors, so that no number comes up again for another file.
static FILES: Mutex<BTreeMap<(u64, u64), Arc<VolatileFile>>> = Mutex::new(BTreeMap::new());

/// Steps until the process kills itself; 0: never.
static STEPS_LEFT: AtomicU64 = AtomicU64::new(0);

/// Makes all files that are opened from now on forget, at a kill, what was not flushed.
///
/// # Errors
/// It is on already.
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

/// Puts everything into the files: the process ends, and the power stays on. Without the layer, nothing happens.
///
/// # Errors
/// The first one of a file's.
pub fn settle() -> io::Result<()> {
    let files: Vec<_> = lock(&FILES).values().cloned().collect();
    // Every file is tried, the first error is told.
    files.iter().map(|file| file.settle()).fold(Ok(()), Result::and)
}

/// The volatile file for a file that has been opened for writing; `None` when the layer is off.
///
/// # Errors
/// The file cannot be opened once more.
pub(crate) fn volatile(file: &File) -> io::Result<Option<Arc<VolatileFile>>> {
    LAYER.get().map(|options| adopt(file, *options)).transpose()
}

/// The same, whether or not the layer is on.
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

/// The volatile file behind a descriptor, if it has gone through [`volatile`].
pub(crate) fn known(file: impl AsFd) -> Option<Arc<VolatileFile>> {
    let key = key(file).ok()?;
    lock(&FILES).get(&key).cloned()
}

/// What a system call would say in place of a volatile file's error: behind the end there is no data.
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

/// A descriptor of its own, without O_DIRECT and its alignments, and without the lock.
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
