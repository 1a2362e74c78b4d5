//! The power-cut layer: files that lose unflushed data, for the simulated power cuts of `hob
//! selftest`.
//!
//! # Purpose
//! A kill -9 does not lose data that a process has written, because the kernel has it. A power cut
//! discards a random part (none, some or all) of the device's cache, in units of 512 bytes. With
//! this layer, that cache is memory of the process ([`VolatileFile`]). So kill -9 acts like a power
//! cut, with the real process, its sockets and its files.
//!
//! # Operation
//! [`switch_on`] is called once, before any file is opened. The call makes every pool device, and
//! every raw backing that is opened for writing, a volatile file. The I/O ring then performs the
//! I/O of volatile files itself, some time later and in any order. The pool performs the I/O of its
//! tables synchronously. Disks behind NBD are in other processes and lose nothing. A process that
//! ends cleanly calls [`settle`], as if the power had stayed on.
//!
//! # Limits
//! The layer cannot be switched on twice. The layer is for tests only: if it is switched on by
//! mistake, data is lost that a healthy disk would keep. So the layer logs a warning. The layer's
//! performance does not matter.
//!
//! # Cutting by itself
//! A kill from outside rarely occurs during a flush. With [`VolatileOptions::cut_after`] the
//! process kills itself after that many steps. Each piece that a flush writes to a file counts as a
//! step.

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

/// Whether flushes of a simulated device work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Flushes {
    /// A flush makes written data durable.
    #[default]
    Honest,
    /// A flush has no effect and reports success, like a defective device. hob cannot keep its
    /// promises on such a device, so this setting shows whether a test detects lost data.
    Ignored,
}

/// Behaviour of the power-cut layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VolatileOptions {
    /// Seed of random choices: which units are written early, and the order of operations.
    pub seed: u64,
    /// Whether flushes and durable (FUA) writes make data durable, or are ignored.
    pub flushes: Flushes,
    /// The process kills itself after this many steps: I/Os, and pieces that are written to a file.
    pub cut_after: Option<u64>,
}

/// Options of the power-cut layer, set when it is switched on.
static LAYER: OnceLock<VolatileOptions> = OnceLock::new();

/// Volatile files by device and inode: all descriptors of a file share one. The volatile files are
/// kept until the process ends, so that no inode number is reused for another file.
static FILES: Mutex<BTreeMap<(u64, u64), Arc<VolatileFile>>> = Mutex::new(BTreeMap::new());

/// Number of steps ([`VolatileOptions::cut_after`]) after which the process kills itself; 0 means
/// never.
static STEPS_LEFT: AtomicU64 = AtomicU64::new(0);

/// Makes all files that are opened from now on lose unflushed data at a kill.
///
/// # Errors
/// Returns an error if the power-cut layer is on already.
pub fn switch_on(options: VolatileOptions) -> Result<(), AlreadyOn> {
    LAYER.set(options).map_err(|_| AlreadyOn)?;
    STEPS_LEFT.store(options.cut_after.unwrap_or(0), Ordering::Relaxed);
    tracing::warn!(
        "POWER-CUT TEST: unflushed data stays in memory and is LOST when this process dies; never \
        use this mode for a disk that matters"
    );
    Ok(())
}

/// The power-cut layer was switched on before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the power-cut layer is on already")]
pub struct AlreadyOn;

/// Writes all unflushed data to the files, for a process that ends cleanly. The function has no
/// effect without the power-cut layer.
///
/// # Errors
/// Returns the first error of a file.
pub fn settle() -> io::Result<()> {
    let files: Vec<_> = lock(&FILES).values().cloned().collect();
    // All files are tried; the first error is returned.
    files.iter().map(|file| file.settle()).fold(Ok(()), Result::and)
}

/// Returns the volatile file for a file that was opened for writing; `None` if the power-cut layer
/// is off.
///
/// # Errors
/// Returns an error if the file cannot be opened again.
pub(crate) fn volatile(file: &File) -> io::Result<Option<Arc<VolatileFile>>> {
    LAYER.get().map(|options| adopt(file, *options)).transpose()
}

/// Returns the volatile file for a file, whether or not the power-cut layer is on.
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

/// Converts a volatile file's error into an errno. ENODATA means beyond the end.
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

/// Opens the file again, without O_DIRECT, and without the lock.
fn reopen(file: &File) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// Counts a step. The last step kills the process.
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
