//! Loop devices: lists them, and creates one over a part of a file.
//!
//! The kernel swaps only to whole block devices. A loop device makes a part of another device or of
//! a file a whole block device. The loop device outlives its creator, and is removed when its last
//! user closes it (AUTOCLEAR). So neither deactivated swap nor a crash before the activation leaves
//! a loop device behind.
//!
//! Why `unsafe`: ioctls take addresses. Each ioctl's address is that of a local variable of the
//! type that the kernel's `linux/loop.h` defines for the request.
#![allow(unsafe_code)]

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::PathBuf;

use super::{FileId, Range, SwapError};

const LOOP_GET_STATUS64: libc::c_ulong = 0x4C05;
const LOOP_CONFIGURE: libc::c_ulong = 0x4C0A;
const LOOP_CTL_GET_FREE: libc::c_ulong = 0x4C82;

const AUTOCLEAR: u32 = 4;
const DIRECT_IO: u32 = 16;

/// Logical block size of the new loop device, bytes. Swap I/O is in pages, and flash devices need
/// no smaller blocks.
const BLOCK_BYTES: u32 = 4096;

/// Number of attempts to create a loop device, because another process may take a free number
/// first.
const TRIES: usize = 16;

/// The kernel's `struct loop_info64`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Info {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    sizelimit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    file_name: [u8; 64],
    crypt_name: [u8; 64],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

/// The kernel's `struct loop_config`.
#[repr(C)]
struct Config {
    fd: u32,
    block_size: u32,
    info: Info,
    reserved: [u64; 8],
}

const EMPTY: Info = Info {
    device: 0,
    inode: 0,
    rdevice: 0,
    offset: 0,
    sizelimit: 0,
    number: 0,
    encrypt_type: 0,
    encrypt_key_size: 0,
    flags: 0,
    file_name: [0; 64],
    crypt_name: [0; 64],
    encrypt_key: [0; 32],
    init: [0; 2],
};

/// A loop device that is in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LoopDevice {
    pub(super) path: PathBuf,
    pub(super) file: FileId,
    /// Range of the file that the loop device maps; up to the file's end if there is no limit.
    pub(super) range: Range,
}

pub(super) fn in_use() -> io::Result<Vec<LoopDevice>> {
    let mut found = Vec::new();
    let entries = match std::fs::read_dir("/sys/block") {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(found),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        if !entry.path().join("loop/backing_file").exists() {
            continue;
        }
        let path = PathBuf::from("/dev").join(entry.file_name());
        let device = match File::open(&path) {
            Ok(device) => device,
            // The loop device was removed at this moment.
            Err(error) if error.raw_os_error() == Some(libc::ENXIO) => continue,
            Err(error) => return Err(error),
        };
        match status(&device) {
            Ok(info) => found.push(LoopDevice {
                path,
                file: FileId { device: info.device, inode: info.inode, block_device: info.rdevice },
                range: Range {
                    offset: info.offset,
                    bytes: if info.sizelimit == 0 { u64::MAX - info.offset } else { info.sizelimit },
                },
            }),
            // The loop device was removed, or its file's filesystem was unmounted. In both cases it
            // is not over the file that the caller has just opened.
            Err(error)
                if matches!(error.raw_os_error(), Some(libc::ENXIO | libc::ENOTCONN | libc::ESTALE)) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(found)
}

/// Opens the control device for new loop devices.
pub(super) fn control() -> Result<File, SwapError> {
    let control = OpenOptions::new().read(true).write(true).open("/dev/loop-control");
    control.map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => SwapError::NoLoopDevices,
        io::ErrorKind::PermissionDenied => SwapError::NotAllowed,
        _ => SwapError::System { action: "open /dev/loop-control", source },
    })
}

/// A loop device over a part of a file. The loop device exists while it is open, or while the
/// kernel swaps to it.
pub(super) struct New {
    pub(super) path: PathBuf,
    /// Open descriptor that keeps the loop device.
    _device: File,
}

/// Creates a loop device. `file` is open for reading and writing, and has no other use. The loop
/// device keeps its open file description, with its locks.
pub(super) fn make(file: BorrowedFd<'_>, range: Range) -> Result<New, SwapError> {
    let control = control()?;
    for _ in 0..TRIES {
        // SAFETY: the request takes no address.
        let number = unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE as _) };
        if number < 0 {
            return Err(refused("find a free loop device"));
        }
        let path = PathBuf::from(format!("/dev/loop{number}"));
        let device = OpenOptions::new().read(true).write(true).open(&path);
        let device = device.map_err(|source| SwapError::System { action: "open a loop device", source })?;
        let info =
            Info { offset: range.offset, sizelimit: range.bytes, flags: AUTOCLEAR | DIRECT_IO, ..EMPTY };
        let config = Config { fd: file.as_raw_fd() as u32, block_size: BLOCK_BYTES, info, reserved: [0; 8] };
        // SAFETY: `config` is what the request reads, and lives until it returns.
        if unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CONFIGURE as _, &raw const config) } == 0 {
            let info = status(&device)
                .map_err(|source| SwapError::System { action: "query the loop device", source })?;
            // From here on, dropping `device` removes it.
            return match info.flags & DIRECT_IO {
                0 => Err(SwapError::Unsafe(
                    "is on a filesystem without direct I/O, so each swapped-out page would also stay in memory"
                        .to_owned(),
                )),
                _ => Ok(New { path, _device: device }),
            };
        }
        let error = refused("set the loop device up");
        match &error {
            SwapError::System { source, .. } if source.raw_os_error() == Some(libc::EBUSY) => {}
            _ => return Err(error),
        }
    }
    Err(SwapError::System { action: "get a loop device", source: io::Error::from_raw_os_error(libc::EBUSY) })
}

fn status(device: &File) -> io::Result<Info> {
    let mut info = EMPTY;
    // SAFETY: `info` is what the request fills, and lives until it returns.
    match unsafe { libc::ioctl(device.as_fd().as_raw_fd(), LOOP_GET_STATUS64 as _, &raw mut info) } {
        0 => Ok(info),
        _ => Err(io::Error::last_os_error()),
    }
}

fn refused(action: &'static str) -> SwapError {
    let source = io::Error::last_os_error();
    match source.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => SwapError::NotAllowed,
        _ => SwapError::System { action, source },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_structures_have_their_sizes() {
        assert_eq!(size_of::<Info>(), 232);
        assert_eq!(size_of::<Config>(), 304);
    }
}
