//! qcow2, VMDK, VDI, VHDX and VPC images, read through a `qemu-nbd` child process.
//!
//! hob starts `qemu-nbd` for the image on a Unix socket in a directory that only this user can
//! enter. From then on the backing is an NBD export. [`child`] reports when the process ends. The
//! child is told the format of every file ([`node`]), so that it probes none. If the kernel has
//! Landlock, a sandbox stops the child from opening other files ([`sandbox`]).
//!
//! The child locks the image as QEMU does, so that a running guest and hob cannot both write it.
//! The image stays locked as long as this child runs. hob itself locks all files of a read-only
//! image too ([`read_locks`]). For a disk that arrives from another host, a first child reports the
//! image's size and does not lock the image. When hob must lock the image, a second child locks the
//! image and replaces the first child on the same socket. The second child sees the image as the
//! other host has left it, and the NBD connection is opened again.
//!
//! The child acknowledges writes before it has stored all metadata of the image. So a writable
//! image has a [mark](crate::unflushed_mark). If hob is killed and the child ends by itself,
//! nothing is lost ([`child_dirs`]).
//!
//! An image with a backing file can be a clone that reads blocks of its backing file from another
//! disk ([`clone`]).

mod child;
mod child_dirs;
mod clone;
mod node;
mod read_locks;
mod sandbox;

use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant as Clock};

use hob_engine::command::Access;
use hob_engine::io::{Io, IoError};
use hob_engine::units::{Instant, IoId};
use hob_nbd::uri::{Address, NbdUri};
use rustix::io::Errno;

pub use self::child::end_starting;
use self::child::{CHANGED, Opens, Server};
pub use self::child_dirs::remove_leftovers;
use self::node::Image;
pub use self::sandbox::confine;
use super::driver::delegate;
use super::identity;
use super::nbd::{BeforeConnecting, NbdBacking, open_uri};
use super::{
    BackingInfo, BackingOptions, Driver, Format, Lock, NotShared, OpenError, Parent, Status, WaitMax,
};
use crate::filesystem::{FileNumber, file_number};
use crate::ring::{Completion, Gate, Ring};
use crate::token::TokenSpace;

/// Pauses between attempts to connect to a new child process, which listens within some
/// milliseconds.
const RECONNECT: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(500));

/// Maximum time for which [`ImageLock::take`] tries again to open the image, which the former host
/// may still have locked.
const LOCK_PATIENCE: Duration = Duration::from_secs(3);

/// Options for the child's access to the image, best first. Older QEMUs and some filesystems do not
/// support the first ones.
const ACCESS_MODES: &[&[&str]] = &[
    &["--cache=none", "--aio=io_uring"],
    &["--cache=none", "--aio=native"],
    &["--cache=writeback", "--aio=threads"],
];

/// Starts a `qemu-nbd` for the image and connects to it.
pub(super) fn open(
    spec: &str,
    access: Access,
    options: &BackingOptions,
) -> Result<Box<dyn Driver>, OpenError> {
    let path = std::path::absolute(spec)
        .map_err(|source| OpenError::System { path: PathBuf::from(spec), source })?;
    super::path::check(&path)?;
    let image_format = options.format.unwrap_or_else(|| Format::assumed(&path));
    let format = image_format.title();
    let image = Image { path: path.clone(), format: image_format, files: options.files.clone() };
    let metadata =
        std::fs::metadata(&path).map_err(|source| OpenError::System { path: path.clone(), source })?;
    let lower_files = numbers_below(&image);
    let mark = (access == Access::ReadWrite).then(|| mark_of(&metadata));
    let opens = match access {
        Access::ReadWrite if options.locked => Opens::ReadWrite,
        Access::ReadOnly if options.locked => Opens::ReadOnly,
        _ => {
            // An earlier process of this host may have written the image. The child opens the image
            // read-only and does not flush it, so hob flushes it here.
            flush(&path).map_err(|source| OpenError::System { path: path.clone(), source })?;
            Opens::Unlocked
        }
    };
    let first = if opens == Opens::Unlocked { Access::ReadOnly } else { access };
    let (reconnect_min, reconnect_max) = RECONNECT;
    let options = BackingOptions { reconnect_min, reconnect_max, ..options.clone() };
    let mut complaint = String::new();
    // The state is read before and after the child opens the image. If the states differ, the file
    // may have been replaced in the meantime.
    let state = if opens == Opens::ReadOnly { image.state() } else { None };
    let parent_state = if options.shares_parent { image.parent_state() } else { None };
    for modes in ACCESS_MODES {
        let server = Server::new(image.clone(), modes, options.connect_max, mark)
            .map_err(|source| OpenError::System { path: std::env::temp_dir(), source })?;
        match server.start(opens) {
            Ok(()) => {
                let description = format!("{format} image {spec} (qemu-nbd {})", modes.join(" "));
                let whose = |size_bytes| identity::of_file(&format!("{format} image"), &metadata, size_bytes);
                match open_uri(&uri_of(&server), first, &options, description, &whose) {
                    Ok(mut inner) => {
                        if first != access {
                            inner.becomes_writable();
                        }
                        server.has_image();
                        if opens == Opens::ReadOnly {
                            server.lock_files()?;
                        }
                        let constant = state.filter(|state| image.state().as_ref() == Some(state));
                        if let Some(constant) = &constant {
                            server.set_content(constant);
                        }
                        let server = Arc::new(server);
                        inner.set_files(file_number(&metadata), lower_files);
                        inner.set_before_connecting(revival(&server));
                        let backing = QemuNbd { inner, server, access, options, constant, parent_state };
                        return Ok(Box::new(backing));
                    }
                    // qemu-nbd listens before it opens the image. If opening fails, it prints the
                    // reason when it exits.
                    Err(OpenError::Connect { reason, .. }) => {
                        complaint = Some(server.stop()).filter(|words| !words.is_empty()).unwrap_or(reason);
                    }
                    Err(error) => return Err(error),
                }
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let program = "qemu-nbd";
                return Err(OpenError::MissingProgram { format, program, package: "qemu-utils" });
            }
            Err(error) => complaint = error.to_string(),
        }
    }
    Err(OpenError::Unfit { what: format!("{format} image {spec}"), reason: complaint })
}

/// Returns the id of an image's [mark](crate::unflushed_mark). The id is valid until the host
/// restarts.
fn mark_of(metadata: &Metadata) -> [u8; 16] {
    let (device, number) = (metadata.dev(), metadata.rdev());
    let text = format!("{} of {device}, {number}", identity::of_file("image", metadata, 0));
    *identity::hash(&text).first_chunk().expect("32 bytes")
}

/// Returns the paths of the regular files below an image, and the files' device and inode numbers.
/// A file that cannot be examined is left out.
fn numbers_below(image: &Image) -> Vec<(PathBuf, FileNumber)> {
    let number = |path: &Path| file_number(&std::fs::metadata(path).ok()?);
    let files = image.files.iter().map(|file| &file.path);
    files.filter_map(|path| Some((path.clone(), number(path)?))).collect()
}

fn uri_of(server: &Server) -> NbdUri {
    NbdUri::new(Address::Unix { path: server.socket() }, "")
}

/// Returns a function that starts another child if the child has ended. Call the returned function
/// before each attempt to connect again.
fn revival(server: &Arc<Server>) -> BeforeConnecting {
    let server = Arc::downgrade(server);
    Arc::new(move || server.upgrade().map_or(Ok(()), |server| server.revive()))
}

/// Makes earlier writes of this host to the image durable.
fn flush(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_data()
}

/// The lock of an image: the child process that has the image open.
#[derive(Clone)]
pub(super) struct ImageLock {
    server: Weak<Server>,
    access: Access,
    options: BackingOptions,
}

impl std::fmt::Debug for ImageLock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ImageLock").field("access", &self.access).finish_non_exhaustive()
    }
}

impl ImageLock {
    /// See [`Lock::take`].
    pub(super) fn take(&self) -> io::Result<()> {
        let server = self.server.upgrade().ok_or_else(|| io::Error::from(Errno::BADF))?;
        let opens = match self.access {
            Access::ReadWrite => Opens::ReadWrite,
            Access::ReadOnly => Opens::ReadOnly,
        };
        let begun = Clock::now();
        loop {
            server.start(opens)?;
            // qemu-nbd listens before it has opened the image.
            let uri = uri_of(&server);
            let description = "qemu-nbd".to_owned();
            let opened = open_uri(&uri, self.access, &self.options, description, &|_| String::new());
            let Err(error) = opened else {
                server.has_image();
                if opens == Opens::ReadOnly
                    && let Err(error) = server.lock_files()
                {
                    server.stop();
                    return Err(io::Error::other(error));
                }
                return Ok(());
            };
            let why = Some(server.stop()).filter(|words| !words.is_empty()).unwrap_or(error.to_string());
            if begun.elapsed() > LOCK_PATIENCE {
                return Err(io::Error::other(why));
            }
        }
    }

    /// See [`Lock::release`].
    pub(super) fn release(&self) {
        if let Some(server) = self.server.upgrade() {
            server.release();
        }
    }
}

/// An NBD backing whose server is a child process of hob.
struct QemuNbd {
    inner: NbdBacking,
    // The server is dropped after the connection to the child.
    server: Arc<Server>,
    access: Access,
    options: BackingOptions,
    /// Name of the content of an image that is locked against writers.
    constant: Option<String>,
    /// Name of the content of the image's parent before the image was opened, if the parent is to
    /// be shared.
    parent_state: Option<String>,
}

impl Driver for QemuNbd {
    delegate! {
        inner:
        info attach submit take_loss poll_exposure poll_done poll_timeout handle_timeout submit_status
        poll_status set_wait_max wait_max set_gate suspend resume is_repeating revoke close is_closed
        read_before_attach
    }

    fn handle_completion(&mut self, ring: &mut Ring, now: Instant, completion: Completion) {
        if self.server.is_over() {
            // There is no other child to wait for.
            self.inner.revoke(ring, now);
        }
        self.inner.handle_completion(ring, now, completion);
    }

    fn lock(&self) -> Option<Lock> {
        let (server, access) = (Arc::downgrade(&self.server), self.access);
        Some(Lock::of_child(ImageLock { server, access, options: self.options.clone() }))
    }

    fn memory_id(&self) -> Option<[u8; 16]> {
        self.server.mark()
    }

    fn is_lost(&self) -> bool {
        self.server.is_taken()
    }

    fn loss_reason(&self) -> Option<String> {
        let path = self.server.image().path.display();
        self.server.is_changed().then(|| format!("{path} was {CHANGED}"))
    }

    fn parent(&self) -> Result<Option<Parent>, NotShared> {
        match self.options.shares_parent {
            true => self.find_parent(),
            false => Err(NotShared::Unsuitable("it was opened without its parent".to_owned())),
        }
    }

    fn constant(&self) -> Option<&str> {
        self.constant.as_deref()
    }

    /// Returns the whole size of the image. Any part of the image can equal its parent's data:
    /// `clone` marks the blocks that differ, and locks exclude writes of other programs.
    fn common_bytes(&self) -> u64 {
        self.inner.info().size_bytes
    }
}
