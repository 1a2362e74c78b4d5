//! Changes of pool tables, superblocks and the like that fail on purpose: error injection.
//!
//! # For what
//! Every operation on a pool writes and syncs a few times; tests fail the first of these, the second, the third … until
//! none is left, and look at what is there afterwards. Real devices do not fail on demand.
//!
//! # How
//! [`fail`] names a directory and which change of a file under it is to fail: a write leaves the first 512 bytes of what it was
//! to write, a sync does nothing, and both say EIO. Whoever changes such files in place asks [`before_change`] each time.
//!
//! # What it refuses
//! To touch the caches' own I/O: that is the ring's, and the simulation fails it. It is a test's tool; without [`fail`] nothing fails.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// How long it goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failing {
    /// One change fails.
    Once,
    /// So do all after it.
    FromThenOn,
}

#[derive(Debug)]
struct Plan {
    directory: PathBuf,
    how: Failing,
    /// Changes until the first that fails; 0 when it has.
    left: Mutex<u32>,
}

/// A failure to come. Dropping it ends it.
#[derive(Debug)]
pub struct Failure(Arc<Plan>);

static PLANS: Mutex<Vec<Arc<Plan>>> = Mutex::new(Vec::new());

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Fails the `nth` change, counted from 1, of files under a directory.
///
/// # Panics
/// If `nth` is 0.
pub fn fail(directory: &Path, nth: u32, how: Failing) -> Failure {
    assert!(nth > 0, "changes are counted from 1");
    let plan = Arc::new(Plan { directory: directory.to_owned(), how, left: Mutex::new(nth) });
    lock(&PLANS).push(plan.clone());
    Failure(plan)
}

impl Failure {
    /// Has something failed?
    pub fn has_struck(&self) -> bool {
        *lock(&self.0.left) == 0
    }
}

impl Drop for Failure {
    fn drop(&mut self) {
        lock(&PLANS).retain(|plan| !Arc::ptr_eq(plan, &self.0));
    }
}

/// A file is about to be changed.
///
/// # Errors
/// This change is to fail.
pub fn before_change(file: &Path) -> io::Result<()> {
    let plans = lock(&PLANS);
    for plan in plans.iter().filter(|plan| file.starts_with(&plan.directory)) {
        let mut left = lock(&plan.left);
        let fails = match *left {
            0 => plan.how == Failing::FromThenOn,
            _ => {
                *left -= 1;
                *left == 0
            }
        };
        if fails {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
    }
    Ok(())
}
