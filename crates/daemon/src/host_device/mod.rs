//! A disk as a block device of this host: /dev/nbdN of the kernel's NBD driver, and the link
//! /dev/hob/NAME to it.
//!
//! The kernel is an NBD client. hob creates a pair of connected sockets, passes one to the kernel
//! and serves the other. When hob ends, the kernel keeps the device, and requests wait for at most
//! [`DEAD_SECONDS`]. The next daemon finds the device by its identifier in sysfs, and passes a new
//! socket.
//!
//! Functions of this module may block, and must not run on the control thread.

mod netlink;
mod users;

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use netlink::{Driver, NewDevice};

/// Time that requests wait for a daemon, in seconds. After this time they fail.
const DEAD_SECONDS: u64 = 3600;

/// Time after which the kernel checks whether it must send a request again on a new connection, in
/// milliseconds. So requests that were in flight when a daemon was killed pause for this time.
const RETRY_MS: u32 = 5000;

/// Directory of the links to the devices.
const LINKS: &str = "/dev/hob";

/// Directory of the kernel's block devices.
const BLOCK_DEVICES: &str = "/sys/block";

/// Largest block size of a device: a page.
const BLOCK_BYTES_MAX: u32 = 4096;

/// Why a device cannot be created, changed or removed. Each variant requires a different reaction
/// of the caller.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DeviceError {
    /// The kernel has no NBD driver.
    #[error(
        "the kernel has no NBD driver; run 'modprobe nbd', and list nbd in /etc/modules-load.d for the next start"
    )]
    NoDriver,
    /// hob lacks a capability that the operation needs.
    #[error("hob needs the capability CAP_SYS_ADMIN for block devices: run hob as root")]
    NotPermitted,
    /// Programs use the device, or another daemon serves it.
    #[error("{path} is in use: {what}")]
    InUse {
        /// The device or link.
        path: PathBuf,
        /// The program or daemon that uses the device.
        what: String,
    },
    /// A system call failed.
    #[error("cannot {doing}: {what}")]
    System {
        /// The failed action.
        doing: String,
        /// Error text of the system.
        what: String,
    },
}

/// The required properties of a disk's device.
#[derive(Clone, Debug)]
pub(crate) struct HostDevice {
    pub(crate) name: String,
    /// Identifier of the device, which is unique among the disks of all daemons of this host.
    pub(crate) identifier: String,
    pub(crate) size_bytes: u64,
    /// Smallest unit of reads and writes in bytes, a power of two.
    pub(crate) block_bytes: u32,
    /// Transmission flags of the NBD protocol.
    pub(crate) flags: u16,
}

/// Returns the path at which users find the device of a disk.
pub(crate) fn path_of(name: &str) -> PathBuf {
    Path::new(LINKS).join(name)
}

/// Returns the identifier of a disk's device. `state` is the daemon's state directory.
pub(crate) fn identifier_of(state: &Path, name: &str) -> String {
    format!("hob:{name}:{}", state.display())
}

/// Creates the device, or connects an existing one of the same identifier again. Returns the socket
/// to serve; `None` if the kernel still has its earlier connection to hob.
pub(crate) fn connect(device: &HostDevice) -> Result<Option<OwnedFd>, DeviceError> {
    let mut driver = open_driver()?;
    let (near, far) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
        .map_err(system("create a pair of sockets"))?;
    let block_bytes = device.block_bytes.max(512);
    if block_bytes > BLOCK_BYTES_MAX {
        return Err(DeviceError::System {
            doing: format!("create a block device for {}", device.name),
            what: format!(
                "its backing has blocks of {block_bytes} bytes, and Linux supports at most {BLOCK_BYTES_MAX}"
            ),
        });
    }
    let index = match find(Path::new(BLOCK_DEVICES), &device.identifier) {
        Some(index) => {
            let again = driver.reconnect(index, &device.identifier, far.as_fd());
            again.map_err(refused(&format!("connect /dev/nbd{index} again")))?;
            index
        }
        None => {
            check_link(device)?;
            let new = NewDevice {
                size_bytes: device.size_bytes,
                block_bytes,
                flags: device.flags,
                dead_seconds: DEAD_SECONDS,
                identifier: &device.identifier,
            };
            driver.connect(&new, far.as_fd()).map_err(refused("create a block device"))?
        }
    };
    if find(Path::new(BLOCK_DEVICES), &device.identifier) != Some(index) {
        let _ = driver.disconnect(index);
        return Err(DeviceError::System {
            doing: format!("find /dev/nbd{index} again"),
            what: "this kernel does not keep the identifier of NBD devices; Linux 5.14 does".to_owned(),
        });
    }
    retry_soon(index);
    make_link(&device.name, index)?;
    drop(far);
    Ok(if is_closed(&near) { None } else { Some(near) })
}

/// Changes the size of the device. The shard must serve the device meanwhile, because the kernel
/// may wait for requests in flight.
pub(crate) fn resize(device: &HostDevice) -> Result<(), DeviceError> {
    let Some(index) = find(Path::new(BLOCK_DEVICES), &device.identifier) else { return Ok(()) };
    let resized = open_driver()?.resize(index, &device.identifier, device.size_bytes);
    resized.map_err(refused(&format!("resize /dev/nbd{index}")))
}

/// Removes the device of a disk, if it exists, unless it is in use.
pub(crate) fn remove_unused(name: &str, identifier: &str) -> Result<(), DeviceError> {
    let Some(index) = find(Path::new(BLOCK_DEVICES), identifier) else { return Ok(()) };
    let path = PathBuf::from(format!("/dev/nbd{index}"));
    // While this file is open, no program can mount the device.
    let exclusive = users::claim(Path::new(BLOCK_DEVICES), index).map_err(|what| DeviceError::InUse {
        path: path_of(name),
        what: format!("{what} ({})", path.display()),
    })?;
    let removed = remove(name, index);
    drop(exclusive);
    removed
}

/// Removes the device of a disk, if it exists. Programs that use the device receive errors.
pub(crate) fn remove_used(name: &str, identifier: &str) -> Result<(), DeviceError> {
    match find(Path::new(BLOCK_DEVICES), identifier) {
        Some(index) => remove(name, index),
        None => Ok(()),
    }
}

fn remove(name: &str, index: u32) -> Result<(), DeviceError> {
    open_driver()?.disconnect(index).map_err(refused(&format!("disconnect /dev/nbd{index}")))?;
    let link = path_of(name);
    if fs::read_link(&link).is_ok_and(|target| index_of(&target) == Some(index)) {
        let _ = fs::remove_file(&link);
        // If this was the last link, its directory is also removed.
        let _ = fs::remove_dir(LINKS);
    }
    Ok(())
}

fn find(devices: &Path, identifier: &str) -> Option<u32> {
    let named = |index: &u32| backend_of(devices, *index).as_deref() == Some(identifier);
    fs::read_dir(devices).ok()?.filter_map(|entry| index_of(Path::new(&entry.ok()?.file_name()))).find(named)
}

/// Returns the identifier of a connected device.
fn backend_of(devices: &Path, index: u32) -> Option<String> {
    let text = fs::read_to_string(devices.join(format!("nbd{index}/backend"))).ok()?;
    Some(text.trim_end_matches('\n').to_owned())
}

/// Returns N of the path `…/nbdN`.
fn index_of(path: &Path) -> Option<u32> {
    path.file_name()?.to_str()?.strip_prefix("nbd")?.parse().ok()
}

fn is_closed(socket: &OwnedFd) -> bool {
    let mut polled = [PollFd::new(socket, PollFlags::RDHUP)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let gone = PollFlags::HUP | PollFlags::RDHUP | PollFlags::ERR;
    poll(&mut polled, Some(&now)).is_ok_and(|count| count > 0) && polled[0].revents().intersects(gone)
}

/// Shortens the kernel's pause before it sends requests of a lost connection again.
fn retry_soon(index: u32) {
    let path = format!("{BLOCK_DEVICES}/nbd{index}/queue/io_timeout");
    // The write may wait for requests in flight. So it is skipped if the device has this value
    // already, as after a reconnection.
    if fs::read_to_string(&path).is_ok_and(|now| now.trim() == RETRY_MS.to_string()) {
        return;
    }
    if let Err(error) = fs::write(&path, RETRY_MS.to_string()) {
        tracing::warn!("cannot write {path}: {error}; after a crash of hob, requests may wait for 30 s");
    }
}

/// Refuses a link that belongs to another daemon.
fn check_link(device: &HostDevice) -> Result<(), DeviceError> {
    let link = path_of(&device.name);
    let Ok(target) = fs::read_link(&link) else { return Ok(()) };
    let backend = index_of(&target).and_then(|index| backend_of(Path::new(BLOCK_DEVICES), index));
    match backend.filter(|backend| *backend != device.identifier) {
        Some(backend) => Err(DeviceError::InUse {
            path: link,
            what: format!("it is the device of another daemon ({backend})"),
        }),
        None => Ok(()),
    }
}

/// Creates or replaces the link to a device.
fn make_link(name: &str, index: u32) -> Result<(), DeviceError> {
    let (link, target) = (path_of(name), PathBuf::from(format!("../nbd{index}")));
    if fs::read_link(&link).is_ok_and(|existing| existing == target) {
        return Ok(());
    }
    let failed = |error: io::Error| DeviceError::System {
        doing: format!("create the link {}", link.display()),
        what: error.to_string(),
    };
    fs::create_dir_all(LINKS).map_err(failed)?;
    // Disk names do not begin with a dot.
    let new = Path::new(LINKS).join(format!(".{name}"));
    let _ = fs::remove_file(&new);
    symlink(&target, &new).and_then(|()| fs::rename(&new, &link)).map_err(failed)
}

fn open_driver() -> Result<Driver, DeviceError> {
    Driver::open().map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => DeviceError::NoDriver,
        _ => refused("ask the kernel for its NBD driver")(error),
    })
}

fn refused(doing: &str) -> impl FnOnce(io::Error) -> DeviceError + use<'_> {
    move |error| match error.kind() {
        io::ErrorKind::PermissionDenied => DeviceError::NotPermitted,
        _ => DeviceError::System { doing: doing.to_owned(), what: error.to_string() },
    }
}

fn system(doing: &str) -> impl FnOnce(rustix::io::Errno) -> DeviceError + use<'_> {
    move |errno| DeviceError::System { doing: doing.to_owned(), what: errno.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_found_by_its_identifier() {
        let dir = tempfile::tempdir().unwrap();
        let add = |name: &str, backend: Option<&str>| {
            fs::create_dir(dir.path().join(name)).unwrap();
            if let Some(backend) = backend {
                fs::write(dir.path().join(name).join("backend"), format!("{backend}\n")).unwrap();
            }
        };
        add("sda", Some("hob:web:/var/lib/hob"));
        add("nbd0", None);
        add("nbd1", Some("hob:web:/var/lib/other"));
        add("nbd12", Some("hob:web:/var/lib/hob"));
        add("nbd3", Some("(null)"));
        let state = Path::new("/var/lib/hob");
        assert_eq!(find(dir.path(), &identifier_of(state, "web")), Some(12));
        assert_eq!(find(dir.path(), &identifier_of(state, "we")), None);
        assert_eq!(find(&dir.path().join("none"), "x"), None);
    }

    #[test]
    fn only_names_of_whole_devices_have_a_number() {
        for (path, index) in
            [("../nbd7", Some(7)), ("/dev/nbd0", Some(0)), ("nbd0p1", None), ("nbd", None), ("sda", None)]
        {
            assert_eq!(index_of(Path::new(path)), index, "{path}");
        }
    }

    #[test]
    fn a_socket_that_the_kernel_does_not_keep_is_noticed() {
        let (near, far) =
            socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        assert!(!is_closed(&near));
        drop(far);
        assert!(is_closed(&near));
    }
}
