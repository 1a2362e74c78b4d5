//! Injects errors into changes of pool tables, superblocks and similar files, for tests.
//!
//! # Purpose
//! Every operation on a pool writes and syncs a few times. Tests fail the first of these changes,
//! then the second, and so on, and check the result. Real devices do not fail on demand.
//!
//! # Operation
//! [`fail`] chooses a directory, and which change of a file in the directory fails. A failing write
//! writes only its first 512 bytes, a failing sync does nothing, and both return EIO. Code that
//! changes such files in place calls [`before_change`] each time.
//!
//! # Limits
//! The I/O of caches is not affected. The simulation injects failures into that I/O itself. Without
//! [`fail`] nothing fails.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// Whether only the chosen change fails, or also all later changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failing {
    /// Only the `nth` change fails.
    Once,
    /// The `nth` change and all later ones fail.
    FromThenOn,
}

#[derive(Debug)]
struct Plan {
    directory: PathBuf,
    how: Failing,
    /// Number of changes up to the first change that fails, including it; 0 after it. `how` tells
    /// whether later changes fail too.
    left: Mutex<u32>,
}

/// A planned failure. Dropping this value cancels it.
#[derive(Debug)]
pub struct Failure(Arc<Plan>);

static PLANS: Mutex<Vec<Arc<Plan>>> = Mutex::new(Vec::new());

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Fails the `nth` change, counted from 1, of files in a directory.
///
/// # Panics
/// Panics if `nth` is 0.
pub fn fail(directory: &Path, nth: u32, how: Failing) -> Failure {
    assert!(nth > 0, "changes are counted from 1");
    let plan = Arc::new(Plan { directory: directory.to_owned(), how, left: Mutex::new(nth) });
    lock(&PLANS).push(plan.clone());
    Failure(plan)
}

impl Failure {
    /// Returns true if the planned failure has occurred.
    pub fn has_struck(&self) -> bool {
        *lock(&self.0.left) == 0
    }
}

impl Drop for Failure {
    fn drop(&mut self) {
        lock(&PLANS).retain(|plan| !Arc::ptr_eq(plan, &self.0));
    }
}

/// Must be called before each change of a file.
///
/// # Errors
/// Returns an error if a test planned that this change fails.
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
