//! Swap areas: parts of pool devices that the kernel swaps to.
//!
//! hob prepares the area, creates a loop device over it and activates swap on the loop device. Swap
//! I/O then bypasses hob, and continues even if no daemon runs. docs/decisions/0014 gives the
//! reasons; `pool` defines an area's segments.
//!
//! hob refuses device stacks that are not known to be safe ([`check_ground`]), files with holes or
//! shared extents, and devices without direct I/O.
//!
//! Why `unsafe`: `swapon` and `swapoff` have no safe wrapper. `swapon` and `swapoff` take a path
//! and keep no reference to it.
#![allow(unsafe_code)]

mod device_stack;
mod header;
mod loops;
mod mapping;

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::pool::{AlignedBuffer, Uuid};
use mapping::Lack;

/// Minimum size of a swap area in bytes. The kernel needs ten pages, and only larger areas are
/// useful.
pub const BYTES_MIN: u64 = 1 << 20;

/// Maximum size of a swap area in bytes. The limit is below the kernel's maximum of 2³² pages,
/// which is 16 TiB with pages of 4 KiB.
pub const BYTES_MAX: u64 = 1 << 43;

/// Highest swap priority that can be set.
pub const PRIORITY_MAX: u16 = 32_767;

/// Size of the writes that prepare a swap area, bytes.
const CHUNK_BYTES: usize = 4 << 20;

/// `SWAP_FLAG_PREFER`: the low 15 bits are a priority.
const PREFER: i32 = 0x8000;

/// Identity of a file or block device, independent of its path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileId {
    device: u64,
    inode: u64,
    /// Device number of a block device; 0 for a regular file.
    block_device: u64,
}

impl FileId {
    /// Returns the identity of an open file.
    pub fn of(file: impl AsFd) -> io::Result<FileId> {
        let metadata = File::from(file.as_fd().try_clone_to_owned()?).metadata()?;
        Ok(FileId { device: metadata.dev(), inode: metadata.ino(), block_device: metadata.rdev() })
    }

    /// Returns true if both identities are those of one file or block device. A block device may
    /// have several nodes with different inodes.
    fn is_same(self, other: FileId) -> bool {
        match (self.block_device, other.block_device) {
            (0, 0) => (self.device, self.inode) == (other.device, other.inode),
            (mine, others) => mine == others,
        }
    }
}

/// A range of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// First byte of the range.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
}

impl Range {
    fn overlaps(self, other: Range) -> bool {
        self.offset < other.offset.saturating_add(other.bytes)
            && other.offset < self.offset.saturating_add(self.bytes)
    }
}

/// An active swap device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Active {
    /// The loop device that the kernel swaps to.
    pub path: PathBuf,
    /// Amount of data swapped out to the device, bytes.
    pub used: u64,
    /// Swap priority. The kernel fills devices of higher priority first.
    pub priority: i32,
}

/// Memory available for pages that return from swap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Total memory of the host, bytes.
    pub total: u64,
    /// Memory available without swapping, bytes.
    pub available: u64,
    /// Free space in all swap of the host, bytes.
    pub swap_free: u64,
}

/// Bit 21 of a capability mask, CAP_SYS_ADMIN.
const CAP_SYS_ADMIN: u64 = 1 << 21;

/// Reason why an area cannot be used as swap, or cannot be deactivated.
#[derive(Debug, thiserror::Error)]
pub enum SwapError {
    /// The kernel cannot safely swap to the device stack. The text is the end of a sentence that
    /// begins with "The device".
    #[error("{0}")]
    Unsafe(String),
    /// A loop device that hob did not create uses the area.
    #[error("{0}, a loop device that hob did not create, uses the area; detach it first (losetup -d {0})")]
    Occupied(PathBuf),
    /// The process lacks CAP_SYS_ADMIN.
    #[error("hob needs the capability CAP_SYS_ADMIN for swap: run it as root")]
    NotAllowed,
    /// `/dev/loop-control` does not exist: the kernel's loop driver is missing or not loaded.
    #[error("the kernel has no loop devices (modprobe loop)")]
    NoLoopDevices,
    /// The host has too little memory for the swapped-out pages.
    #[error("there is not enough memory for the swapped-out data")]
    NoMemory,
    /// The process that worked on the area was killed.
    #[error("the process that turns swap off was killed, perhaps because memory ran out")]
    Killed,
    /// The preparation was cancelled.
    #[error("the preparation of the swap area was stopped")]
    Stopped,
    /// A system call failed.
    #[error("cannot {action}: {source}")]
    System {
        /// The attempted action.
        action: &'static str,
        /// The system's error.
        source: io::Error,
    },
}

/// Checks that the kernel can safely swap to the device stack below `file`.
///
/// # Errors
/// Returns [`SwapError::Unsafe`], or a system error.
pub fn check_ground(file: impl AsFd) -> Result<(), SwapError> {
    device_stack::check(file.as_fd())
}

/// Returns the loop devices over any part of a file or block device.
pub fn loops_over(file: FileId) -> io::Result<Vec<PathBuf>> {
    let all = loops::in_use()?;
    Ok(all.into_iter().filter(|device| device.file.is_same(file)).map(|device| device.path).collect())
}

/// Returns the active swap device of an area, if there is one.
///
/// # Errors
/// Returns `Occupied` if another loop device uses the area, or a system error.
pub fn look(file: FileId, range: Range) -> Result<Option<Active>, SwapError> {
    let look = |source| SwapError::System { action: "query the loop devices of this host", source };
    let mut over = loops::in_use().map_err(look)?;
    over.retain(|device| device.file.is_same(file) && device.range.overlaps(range));
    if over.is_empty() {
        return Ok(None);
    }
    let swaps = std::fs::read("/proc/swaps")
        .map_err(|source| SwapError::System { action: "query the swap areas of this host", source })?;
    for device in &over {
        if device.range == range
            && let Some(active) = in_table(&swaps, &device.path)
        {
            return Ok(Some(active));
        }
    }
    Err(SwapError::Occupied(over.swap_remove(0).path))
}

/// Returns the swap device at `path` according to the text of /proc/swaps; `None` if it is not
/// active.
fn in_table(table: &[u8], path: &Path) -> Option<Active> {
    let table = std::str::from_utf8(table).ok()?;
    table.lines().find_map(|line| {
        let mut fields = line.split_ascii_whitespace();
        let name = fields.next()?;
        // If the node of an active device was removed, /proc/swaps appends "(deleted)" to its path.
        if name.strip_suffix("\\040(deleted)").unwrap_or(name).as_bytes() != path.as_os_str().as_bytes() {
            return None;
        }
        let used: u64 = fields.nth(2)?.parse().ok()?;
        let priority = fields.next()?.parse().ok()?;
        Some(Active { path: path.to_owned(), used: used << 10, priority })
    })
}

/// Returns true if the swap area was prepared completely.
///
/// # Errors
/// Returns a system error if a system call fails.
pub fn is_prepared(file: impl AsFd, range: Range, uuid: Uuid) -> Result<bool, SwapError> {
    let mut buffer = AlignedBuffer::new(rustix::param::page_size());
    let file = reopened(file.as_fd(), libc::O_DIRECT)?;
    file.read_exact_at(buffer.bytes_mut(), range.offset)
        .map_err(|source| SwapError::System { action: "read the first page of the swap area", source })?;
    Ok(header::is_of(buffer.bytes(), range.bytes, uuid))
}

/// Prepares an area for swap; its content is lost. In a file, every byte is written, so that the
/// file has no holes. `goes_on` gets the number of bytes done, and returns whether to continue.
///
/// # Errors
/// Returns `Stopped`, or a system error.
pub fn prepare(
    file: impl AsFd,
    range: Range,
    uuid: Uuid,
    label: &str,
    mut goes_on: impl FnMut(u64) -> bool,
) -> Result<(), SwapError> {
    let write = |source| SwapError::System { action: "write the area", source };
    let file = reopened(file.as_fd(), libc::O_DIRECT)?;
    let is_file = file.metadata().map_err(write)?.is_file();
    let zeroes = AlignedBuffer::new(CHUNK_BYTES);
    let mut done = 0;
    while is_file && done < range.bytes {
        if !goes_on(done) {
            return Err(SwapError::Stopped);
        }
        let len = (CHUNK_BYTES as u64).min(range.bytes - done);
        file.write_all_at(&zeroes.bytes()[..len as usize], range.offset + done).map_err(write)?;
        done += len;
    }
    // The header is written last: it marks the preparation as complete.
    file.sync_data().map_err(write)?;
    let page = header::encode(range.bytes, rustix::param::page_size(), uuid, label);
    let mut buffer = AlignedBuffer::new(page.len());
    buffer.bytes_mut().copy_from_slice(&page);
    file.write_all_at(buffer.bytes(), range.offset).map_err(write)?;
    file.sync_data().map_err(write)
}

/// Activates swap on a prepared area that is not active. Returns the path of the new loop device.
///
/// # Errors
/// Returns a [`SwapError`]. After an error, swap is as it was before the call.
pub fn turn_on(file: impl AsFd, range: Range, priority: Option<u16>) -> Result<PathBuf, SwapError> {
    let file = reopened(file.as_fd(), libc::O_DIRECT)?;
    let metadata =
        file.metadata().map_err(|source| SwapError::System { action: "query the device", source })?;
    if !metadata.file_type().is_block_device() {
        match mapping::lack(file.as_fd(), range) {
            Ok(None) => {}
            Ok(Some(Lack::Hole)) => {
                return Err(SwapError::Unsafe("is a file with holes where the area is".to_owned()));
            }
            Ok(Some(Lack::Shared)) => {
                return Err(SwapError::Unsafe(
                    "is a file that shares blocks with a copy of it where the area is".to_owned(),
                ));
            }
            Err(source) => {
                return Err(SwapError::System { action: "query the positions of the file's bytes", source });
            }
        }
    }
    let device = loops::make(file.as_fd(), range)?;
    let priority = priority.map_or(0, |priority| PREFER | i32::from(priority.min(PRIORITY_MAX)));
    let path = c_path(&device.path)?;
    // SAFETY: `path` ends with a zero byte and lives until the call returns.
    match unsafe { libc::swapon(path.as_ptr(), priority) } {
        0 => Ok(device.path),
        _ => {
            let errno = io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
            Err(SwapError::of_kernel("turn swap on", errno))
        }
    }
}

/// Deactivates a swap device, which moves all swapped-out pages back to memory or to other swap.
/// Deactivation can take long. A signal that ends the process stops the deactivation. **Do not call
/// this function in a daemon**: if memory runs out, the kernel kills this process first.
///
/// # Errors
/// Returns a system error, which [`SwapError::of_kernel`] interprets. After an error, the device is
/// still active.
pub fn turn_off(path: &Path) -> io::Result<()> {
    let path = c_path(path).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?;
    // SAFETY: `path` ends with a zero byte and lives until the call returns.
    match unsafe { libc::swapoff(path.as_ptr()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

impl SwapError {
    /// Converts an error number of the kernel, with the action that failed, to a [`SwapError`].
    pub fn of_kernel(action: &'static str, errno: i32) -> SwapError {
        match errno {
            libc::EPERM => SwapError::NotAllowed,
            libc::ENOMEM => SwapError::NoMemory,
            libc::EINTR => SwapError::Stopped,
            _ => SwapError::System { action, source: io::Error::from_raw_os_error(errno) },
        }
    }
}

/// Checks that the kernel supports loop devices, and that this process may create them and activate
/// swap.
///
/// # Errors
/// Returns `NotAllowed`, `NoLoopDevices`, or a system error.
pub fn check_able() -> Result<(), SwapError> {
    loops::control()?;
    let status = std::fs::read_to_string("/proc/self/status")
        .map_err(|source| SwapError::System { action: "query the capabilities of hob", source })?;
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective = line.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    match effective {
        Some(mask) if mask & CAP_SYS_ADMIN == 0 => Err(SwapError::NotAllowed),
        _ => Ok(()),
    }
}

fn c_path(path: &Path) -> Result<CString, SwapError> {
    let no_path =
        |_| SwapError::System { action: "name the device", source: io::ErrorKind::InvalidInput.into() };
    CString::new(path.as_os_str().as_bytes()).map_err(no_path)
}

/// Returns the state of the host's memory.
pub fn memory() -> io::Result<Memory> {
    Ok(parse_memory(&std::fs::read_to_string("/proc/meminfo")?))
}

fn parse_memory(text: &str) -> Memory {
    let of = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        let kib = line.and_then(|rest| rest.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok());
        kib.unwrap_or(0) << 10
    };
    Memory { total: of("MemTotal"), available: of("MemAvailable"), swap_free: of("SwapFree") }
}

/// Opens the same file again, without the locks and the exclusive claim of the pool's descriptor.
/// The locks would otherwise last as long as the kernel swaps.
fn reopened(file: BorrowedFd<'_>, flags: i32) -> Result<File, SwapError> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let opened = File::options().read(true).write(true).custom_flags(flags).open(path);
    opened.map_err(|source| SwapError::System { action: "open the device once more", source })
}

#[cfg(test)]
mod tests;
