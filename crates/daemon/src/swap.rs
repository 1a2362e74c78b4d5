//! The kernel's swap interface: the trait that the services use, and its implementation.
//!
//! All calls may block and run on blocking threads. A child process turns swap off, for two
//! reasons. Killing the child cancels the operation. If memory runs out while swap is turned off,
//! the kernel first kills the process that turns it off, so that process must not be the daemon.

use std::fmt;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hob_storage::pool::Uuid;
use hob_storage::swap;
pub(crate) use hob_storage::swap::{
    Active, BYTES_MAX, BYTES_MIN, FileId, Memory, PRIORITY_MAX, Range, SwapError, loops_over,
};

/// The command that the child runs; see `crates/cli/src/swap.rs`.
pub(crate) const OFF_COMMAND: &str = "swap-off";

/// Interval between two checks whether the child has ended or must be stopped.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Location of a swap area: a device and a range of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Spot {
    pub(crate) file: FileId,
    /// The area's part of the device.
    pub(crate) range: Range,
}

/// The kernel's operations on swap areas.
pub(crate) trait SwapKernel: Send + Sync + fmt::Debug {
    /// Returns an error if this process may not turn swap on and off.
    fn check_able(&self) -> Result<(), SwapError>;

    /// Returns an error if the kernel cannot safely swap to `device`, which is a file or block
    /// device of a pool. Also checks the devices below it.
    fn check_ground(&self, device: &OwnedFd) -> Result<(), SwapError>;

    /// Returns the kernel's state of the area at `spot`; `None` if the area is off.
    fn look(&self, spot: Spot) -> Result<Option<Active>, SwapError>;

    /// Makes an area ready for use as swap space, unless it is ready. Calls `goes_on` with the
    /// number of bytes done; `goes_on` returns whether to continue.
    fn prepare(
        &self,
        device: &OwnedFd,
        area: &Area<'_>,
        goes_on: &mut dyn FnMut(u64) -> bool,
    ) -> Result<(), SwapError>;

    /// Turns the area on. Returns the path that the kernel shows.
    fn turn_on(&self, device: &OwnedFd, range: Range, priority: Option<u16>) -> Result<PathBuf, SwapError>;

    /// Turns the area off. Returns when this is complete, or after `stop` is set.
    fn turn_off(&self, path: &Path, stop: &AtomicBool) -> Result<(), SwapError>;

    /// Returns the size of the host's memory, and how much of its memory and swap is free.
    fn memory(&self) -> std::io::Result<Memory>;
}

/// A swap area to be prepared.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Area<'a> {
    pub(crate) range: Range,
    pub(crate) uuid: Uuid,
    pub(crate) label: &'a str,
}

/// The swap interface of this host's kernel.
#[derive(Debug)]
pub(crate) struct HostKernel;

impl SwapKernel for HostKernel {
    fn check_able(&self) -> Result<(), SwapError> {
        swap::check_able()
    }

    fn check_ground(&self, device: &OwnedFd) -> Result<(), SwapError> {
        swap::check_ground(device)
    }

    fn look(&self, spot: Spot) -> Result<Option<Active>, SwapError> {
        swap::look(spot.file, spot.range)
    }

    fn prepare(
        &self,
        device: &OwnedFd,
        area: &Area<'_>,
        goes_on: &mut dyn FnMut(u64) -> bool,
    ) -> Result<(), SwapError> {
        match swap::is_prepared(device, area.range, area.uuid)? {
            true => Ok(()),
            false => swap::prepare(device, area.range, area.uuid, area.label, goes_on),
        }
    }

    fn turn_on(&self, device: &OwnedFd, range: Range, priority: Option<u16>) -> Result<PathBuf, SwapError> {
        swap::turn_on(device, range, priority)
    }

    fn turn_off(&self, path: &Path, stop: &AtomicBool) -> Result<(), SwapError> {
        let child = |source| SwapError::System { action: "start a process that turns swap off", source };
        // This path is the running program, even if its file was replaced.
        let mut process = Command::new("/proc/self/exe")
            .arg(OFF_COMMAND)
            .arg(path)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(child)?;
        loop {
            if let Some(status) = process.try_wait().map_err(child)? {
                return match status.code() {
                    Some(0) => Ok(()),
                    Some(errno) => Err(SwapError::of_kernel("turn swap off", errno)),
                    None if stop.load(Ordering::Relaxed) => Err(SwapError::Stopped),
                    None => Err(SwapError::Killed),
                };
            }
            if stop.load(Ordering::Relaxed) {
                // The child may have ended at this moment.
                let _ = process.kill();
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    fn memory(&self) -> std::io::Result<Memory> {
        swap::memory()
    }
}

/// Runs in the child process; returns its exit code, 0 or the errno.
pub fn turn_off_as_child(path: &Path) -> i32 {
    // If the daemon ends, the child ends too and swap stays on. The next daemon finds the area
    // unchanged.
    let with_parent = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
    match with_parent.map_err(std::io::Error::from).and_then(|()| swap::turn_off(path)) {
        Ok(()) => 0,
        Err(error) => error.raw_os_error().unwrap_or(rustix::io::Errno::IO.raw_os_error()),
    }
}
