//! Backings: the storage of disks' data.
//!
//! # Purpose
//! A backing has a fixed size and can be read, written and flushed. Each kind of backing is one
//! file of this directory and one row of [`BACKINGS`]. The rest of hob uses only [`Backing`].
//!
//! # Call order
//! Call [`Backing::open`] on any thread; it may take seconds. Call [`Backing::attach`] next, on the
//! shard's thread. From then on call `submit`, `handle_completion` for every completion with the
//! backing's tokens, and `handle_timeout` when `poll_timeout` has passed. After each of these
//! calls, take the results of `poll_done` and `poll_status`. At the end call
//! [`close`](Driver::close) and wait for [`Backing::is_closed`].
//!
//! # Errors
//! The engine has checked that I/O is inside the disk. Every I/O ends exactly once, with success or
//! an [`IoError`]. A backing repeats only NBD requests that a lost connection left unanswered,
//! requests that failed with ESTALE on a network filesystem, and calls to an object store.
//!
//! # Failed flushes
//! After a failed flush, any of the writes since the last successful flush may be lost. The failure
//! may be reported only once: a later successful flush says nothing about those writes.
//! [`Driver::take_loss`] reports other losses, for example after a restart of the server. The
//! engine orders the results of its flushes that overlap in time. A driver that also sends flushes
//! of its own must order the results itself. docs/decisions/0032 has the rules.

mod abandon;
pub mod below;
mod driver;
mod evidence;
mod file;
mod flush_state;
mod format;
mod handover;
mod helper;
mod identity;
mod image_state;
mod lock;
mod modelled;
mod monitor;
pub(crate) mod nbd;
pub mod objects;
pub mod offline_writer;
mod overlay;
mod parent;
mod path;
pub mod qemu_nbd;
mod rbd;
mod size_probe;
mod stripe;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hob_engine::command::Access;
use hob_engine::io::{Io, IoError};
use hob_engine::units::{Instant, IoId};

use crate::filesystem::FileNumber;
use crate::ring::{Completion, Ring};
use crate::token::{Token, TokenSpace};
use abandon::Abandonment;
pub use driver::{Driver, Reader};
pub use evidence::{ChangeDetector, ChangeTimes, ChangeToken};
use flush_state::FlushState;
pub use format::{Format, ImageFile, Role};
pub use identity::ChangeMark;
pub use image_state::{Nameless, image_state, permanent_name};
pub use lock::Lock;
pub use modelled::{ModelledOp, ServiceTime};
use monitor::InFlight;
pub use monitor::{Condition, FAILING_FOR, Monitor, SLOW_AFTER};
pub use nbd::psk as nbd_psk;
pub use overlay::{BlockOrigin, OwnMap, Part};
pub use parent::{NotShared, Parent, ParentRead};
pub use path::check_regular_file;
pub use size_probe::SizeProbe;
pub use stripe::{STRIPE_BYTES_MAX, STRIPE_BYTES_STEP};

/// A kind of backing.
pub struct BackingKind {
    /// Name of the kind in messages and documentation.
    pub name: &'static str,
    /// Syntax of the addresses of this kind of backing, for users.
    pub syntax: &'static str,
    recognise: fn(&str, Format) -> bool,
    open: OpenFn,
}

type OpenFn = fn(&str, Access, &BackingOptions) -> Result<Box<dyn Driver>, OpenError>;

/// All kinds of backings. The first row that recognises a backing's address opens it. An address
/// that is not a URI is a path, and the image format says how to read the file.
pub const BACKINGS: &[BackingKind] = &[
    BackingKind {
        name: "nbd",
        syntax: "nbd://HOST[:PORT]/EXPORT or nbd+unix:///EXPORT?socket=PATH",
        recognise: |spec, _| nbd::recognise(spec),
        open: nbd::open,
    },
    BackingKind {
        name: "rbd",
        syntax: "rbd:POOL/IMAGE[@SNAPSHOT][:id=USER][:conf=PATH]",
        recognise: |spec, _| rbd::recognise(spec),
        open: rbd::open,
    },
    BackingKind {
        name: "objects",
        syntax: "objects+file:///DIRECTORY, s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX",
        recognise: |spec, _| objects::recognise(spec),
        open: objects::open,
    },
    BackingKind {
        name: "qemu-nbd",
        syntax: "path of a qcow2, VMDK, VDI, VHDX or VPC image",
        recognise: |_, format| format != Format::Raw,
        open: qemu_nbd::open,
    },
    BackingKind {
        name: "file",
        syntax: "path of a raw file or a block device",
        recognise: |_, _| true,
        open: file::open,
    },
];

/// The `wait_max` that means forever: a hundred years, which can be added to every clock's time.
pub const WAIT_FOREVER: Duration = Duration::from_secs(100 * 365 * 86_400);

/// A change of the time that requests wait for a backing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitMax {
    /// Set the limit to this time.
    Set(Duration),
    /// Reduce the limit to this time if the present limit is longer.
    AtMost(Duration),
    /// Keep the present limit for later requests, but fail the requests that wait now.
    Expired,
}

impl WaitMax {
    /// Applies this change to the limit `before` and returns the new limit.
    fn after(self, before: Duration) -> Duration {
        match self {
            WaitMax::Set(limit) => limit,
            WaitMax::AtMost(limit) => before.min(limit),
            WaitMax::Expired => before,
        }
    }
}

/// Options for opening a backing, with limits on waiting.
#[derive(Clone, Debug)]
pub struct BackingOptions {
    /// Image format of the file or block device at a path; [`Format::assumed`] if absent. Other
    /// backings have no format.
    pub format: Option<Format>,
    /// The recorded files that belong to an image, besides the image file. hob opens no other file
    /// of the image. A data file follows its layer in this list.
    pub files: Vec<ImageFile>,
    /// Whether I/O bypasses the host's page cache, if the filesystem allows it.
    pub direct: bool,
    /// Whether to lock the backing against other writers at opening. [`Driver::lock`] can lock the
    /// backing later.
    pub locked: bool,
    /// Time after which a request to a disconnected backing fails.
    pub wait_max: Duration,
    /// Longest time to connect to the backing and negotiate.
    pub connect_max: Duration,
    /// First pause before reconnecting to the backing.
    pub reconnect_min: Duration,
    /// Longest pause before reconnecting to the backing.
    pub reconnect_max: Duration,
    /// Whether the server still has all acknowledged writes when hob connects to it again. If this
    /// is true, the code that connects ensures that the server process is the same as before.
    pub keeps_writes: bool,
    /// Whether [`Backing::share_parent`] is called for the opened backing. If this is true, hob
    /// reads the state of an image's parent before it opens the image. Reading the state takes up
    /// to 0.125 s.
    pub shares_parent: bool,
    /// Object to which the driver reports its connection's state. Each opened backing has its own
    /// monitor.
    pub monitor: Arc<Monitor>,
}

impl Default for BackingOptions {
    fn default() -> BackingOptions {
        BackingOptions {
            format: None,
            files: Vec::new(),
            direct: true,
            locked: true,
            wait_max: Duration::from_secs(30),
            connect_max: Duration::from_secs(10),
            reconnect_min: Duration::from_millis(100),
            reconnect_max: Duration::from_secs(10),
            keeps_writes: false,
            shares_parent: false,
            monitor: Arc::default(),
        }
    }
}

/// Reason why a backing could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The address of the backing is invalid, and nothing was opened.
    #[error("{spec}: {reason}")]
    Spec {
        /// The address as it was given.
        spec: String,
        /// The error in the address, and the form to use instead.
        reason: String,
    },
    /// The operating system failed a call on the backing's file.
    #[error("cannot open {path}: {source}")]
    System {
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// Another process has the backing open.
    #[error(
        "{path} is in use: another process holds its lock. A disk can have only one writer; stop \
        the other process first"
    )]
    InUse {
        /// Path of the locked file or device.
        path: PathBuf,
    },
    /// QEMU or one of QEMU's tools has the backing open.
    #[error(
        "{path} is in use: QEMU or one of its tools has it open (image lock \"{permission}\"). A disk can have only one writer; stop the other program first"
    )]
    InUseByQemu {
        /// Path of the locked image.
        path: PathBuf,
        /// The image permission that QEMU does not share.
        permission: &'static str,
    },
    /// The filesystem of the backing's file hangs.
    #[error("{path} does not respond: its filesystem gave no answer within {seconds} s")]
    Unresponsive {
        /// Path on the filesystem that hangs.
        path: PathBuf,
        /// Seconds that hob waited for the filesystem.
        seconds: u64,
    },
    /// The backing exists, but it cannot be a disk.
    #[error("{what}: {reason}")]
    Unfit {
        /// Path or address of the object that was opened.
        what: String,
        /// The reason why the backing cannot be a disk, and what the operator can do.
        reason: String,
    },
    /// The server does not answer, or its answer is invalid.
    #[error("cannot connect to {peer}: {reason}")]
    Connect {
        /// Address of the server.
        peer: String,
        /// Reason of the failure, for users.
        reason: String,
    },
    /// A program that reads the image format is not installed.
    #[error(
        "{format} images are read through {program}, which is not installed (Debian: apt install {package})"
    )]
    MissingProgram {
        /// Image format of the file.
        format: &'static str,
        /// Name of the missing program.
        program: &'static str,
        /// Debian package that contains the program.
        package: &'static str,
    },
}

/// Properties of a backing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BackingInfo {
    /// Size of the backing, bytes; a multiple of 512.
    pub size_bytes: u64,
    /// Alignment at which I/O to the backing is fastest; a power of two up to 4096, bytes.
    pub block_bytes: u32,
    /// Size of a full stripe of the storage below: the data of one stripe, without parity, bytes. A
    /// multiple of 4 KiB, at most [`STRIPE_BYTES_MAX`]. `None` if it is unknown.
    pub stripe_bytes: Option<u32>,
    /// Required alignment of I/O: other I/O fails as `Invalid`, so front ends should announce it. A
    /// power of two up to 4096, bytes.
    pub block_bytes_min: u32,
    /// Whether `Flush` makes writes durable. If not, `Flush` succeeds without effect.
    pub can_flush: bool,
    /// Whether `Discard` frees storage.
    pub can_discard: bool,
    /// Whether zeroes are written faster than data.
    pub can_fast_zero: bool,
    /// Whether the backing was opened read-only, so that writes fail.
    pub read_only: bool,
    /// Description for users: kind, location, access method.
    pub description: String,
    /// Identity of the backing, to which a persistent cache is bound.
    pub identity: [u8; 32],
    /// The text whose hash is `identity`, for users.
    pub identity_text: String,
    /// Time of the backing's last change when it was opened; `None` if unknown.
    pub changed: Option<ChangeMark>,
    /// Hash of the backing's state when it was opened. An earlier hash from the backing's
    /// [`ChangeDetector`] is the same if the backing did not change. `None` if the state is
    /// unknown.
    pub evidence: Option<ChangeToken>,
    /// Times of the last changes of a raw file when it was opened, if its filesystem has reliable
    /// timestamps.
    pub times: Option<ChangeTimes>,
    /// Device and inode number of the backing's regular file when it was opened; `None` for other
    /// backings.
    pub file: Option<FileNumber>,
    /// Paths of the regular files below an image, and the files' device and inode numbers when the
    /// image was opened.
    pub lower_files: Vec<(PathBuf, FileNumber)>,
}

impl BackingInfo {
    /// Returns the identity of a backing, without its other properties.
    fn identified(identity_text: String) -> BackingInfo {
        BackingInfo { identity: identity::hash(&identity_text), identity_text, ..BackingInfo::default() }
    }

    /// Returns the identity of the same backing with another size; `None` if its identity does not
    /// include the size.
    pub fn identity_at(&self, size_bytes: u64) -> Option<[u8; 32]> {
        identity::resized(&self.identity_text, self.size_bytes, size_bytes).map(|text| identity::hash(&text))
    }

    /// Returns the permanent name of a block device: its UUID in the device mapper, its WWID, its
    /// serial number, or the file of a loop device. `None` for other backings, and for a device
    /// without such a name. A device with another name is another device.
    pub fn device_name(&self) -> Option<&str> {
        identity::device_name(&self.identity_text)
    }

    /// Sets the backing's new size, and adapts its identity.
    pub fn grow(&mut self, size_bytes: u64) {
        if let Some(text) = identity::resized(&self.identity_text, self.size_bytes, size_bytes) {
            (self.identity, self.identity_text) = (identity::hash(&text), text);
        }
        self.size_bytes = size_bytes;
    }
}

#[cfg(test)]
impl BackingInfo {
    /// Returns the properties of a simulated backing that supports everything.
    fn simulated(size_bytes: u64, block_bytes: u32) -> BackingInfo {
        BackingInfo {
            size_bytes,
            block_bytes,
            block_bytes_min: 1,
            can_flush: true,
            can_discard: true,
            can_fast_zero: true,
            ..BackingInfo::default()
        }
    }
}

/// A range of a backing with one allocation state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatusExtent {
    /// Length of the range, bytes.
    pub len: u64,
    /// Whether the range is not allocated.
    pub hole: bool,
    /// Whether the range reads as zeroes.
    pub zero: bool,
}

/// The reply to [`Driver::submit_status`]: extents from the requested offset on, without gaps. The
/// last extent may end early, but not after the requested range.
pub type Status = Result<Vec<StatusExtent>, IoError>;

/// An open backing, with the methods of [`Driver`]. The methods of this type check their arguments,
/// and count requests in flight.
pub struct Backing {
    driver: Box<dyn Driver>,
    tokens: Option<TokenSpace>,
    monitor: Arc<Monitor>,
    in_flight: InFlight,
    flush_state: FlushState,
    /// True if hob may have ended changes to which the backing has not replied. A later flush says
    /// nothing about such changes, because it covers only changes to which the backing replied
    /// before the flush.
    left_requests: bool,
    is_revoked: bool,
    abandonment: Option<Box<Abandonment>>,
}

impl std::fmt::Debug for Backing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Backing").field("info", self.info()).finish_non_exhaustive()
    }
}

impl std::ops::Deref for Backing {
    type Target = dyn Driver;

    fn deref(&self) -> &Self::Target {
        &*self.driver
    }
}

impl std::ops::DerefMut for Backing {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut *self.driver
    }
}

impl Backing {
    /// Opens the backing that `spec` names; see [`BACKINGS`]. May take seconds, so do not call it
    /// on the shard's thread.
    pub fn open(spec: &str, access: Access, options: &BackingOptions) -> Result<Backing, OpenError> {
        let format = options.format.unwrap_or_else(|| Format::assumed(Path::new(spec)));
        let options = BackingOptions { monitor: Arc::default(), ..options.clone() };
        let driver = (Backing::kind(spec, format).open)(spec, access, &options)?;
        Ok(Backing::monitored(driver, options.monitor))
    }

    /// Opens a file as a raw image, regardless of its name.
    pub fn open_file(path: &str, access: Access, options: &BackingOptions) -> Result<Backing, OpenError> {
        Ok(Backing::of(file::open(path, access, options)?))
    }

    /// Returns the kind of backing for an address and an image format.
    pub fn kind(spec: &str, format: Format) -> &'static BackingKind {
        BACKINGS.iter().find(|kind| (kind.recognise)(spec, format)).expect("the last kind takes all")
    }

    /// Returns true if a backing's address is a path, so that it has an image format.
    pub fn is_path(spec: &str) -> bool {
        Backing::kind(spec, Format::Raw).name == "file"
    }

    /// Creates a backing from a driver that is not in the table of kinds.
    pub fn of(driver: Box<dyn Driver>) -> Backing {
        Backing::monitored(driver, Arc::default())
    }

    fn monitored(driver: Box<dyn Driver>, monitor: Arc<Monitor>) -> Backing {
        Backing {
            driver,
            tokens: None,
            monitor,
            in_flight: InFlight::default(),
            flush_state: FlushState::default(),
            left_requests: false,
            is_revoked: false,
            abandonment: None,
        }
    }

    /// Adds modelled latency: every I/O takes at least as long as `model` says.
    pub fn modelled(self, model: Box<dyn ServiceTime + Send>) -> Backing {
        assert!(self.tokens.is_none(), "a backing is modelled before it is attached");
        Backing::monitored(Box::new(modelled::Modelled::new(self.driver, model)), self.monitor)
    }

    /// Creates the backing of a disk in standby, which migrates from another host. `own` is the
    /// disk's backing, opened without its lock. `wait_max` is how long reads in standby wait for
    /// the other host, until [`set_wait_max`](Self::set_wait_max) changes it. The module `handover`
    /// describes the phases.
    pub fn handover(own: Backing, wait_max: Duration) -> Backing {
        assert!(own.tokens.is_none(), "it is not attached yet");
        Backing::monitored(Box::new(handover::Handover::new(own.driver, wait_max)), own.monitor)
    }

    /// Returns how often the connection was lost or restored; see
    /// [`Monitor::connection_changes`].
    pub fn connection_changes(&self) -> u64 {
        self.monitor.connection_changes()
    }

    /// Returns the monitor of the connection, which any thread can read.
    pub fn monitor(&self) -> Arc<Monitor> {
        self.monitor.clone()
    }

    /// Reads synchronously, to compare the backing with a cache before the cache is used. Do not
    /// call it on the shard's thread.
    ///
    /// # Errors
    /// Returns an [`IoError`] of the backing, `Invalid` if the range is outside the disk or not
    /// aligned to `block_bytes_min`, or `Unsupported` if a backing of this kind cannot be read
    /// before it is attached.
    pub fn read_before_attach(&mut self, offset: u64, bytes: &mut [u8]) -> Result<(), IoError> {
        assert!(self.tokens.is_none(), "an attached backing is read through its ring");
        let info = self.info();
        let inside = offset.checked_add(bytes.len() as u64).is_some_and(|end| end <= info.size_bytes);
        let aligned = (offset | bytes.len() as u64).is_multiple_of(u64::from(info.block_bytes_min));
        if !inside || !aligned {
            return Err(IoError::Invalid);
        }
        self.driver.read_before_attach(offset, bytes)
    }

    /// Grows the disk to `size_bytes`, which the [size probe](Driver::size_probe) has reported.
    pub fn grow(&mut self, size_bytes: u64) {
        assert!(size_bytes >= self.info().size_bytes, "disks do not shrink");
        self.driver.grow(size_bytes);
    }

    /// For the backing of a migrating disk, after `attach`: connects the owner or former owner of
    /// the disk as a source of reads. The peer stays connected until
    /// [`leave_peer`](Driver::leave_peer).
    pub fn set_peer(&mut self, ring: &mut Ring, now: Instant, peer: Backing) {
        assert!(peer.tokens.is_none(), "it is not attached yet");
        self.driver.set_peer(ring, now, peer.driver);
    }

    /// Attaches the backing to the I/O ring of its shard. The tokens of its completions have kind
    /// [`Token::BACKING`] or [`Token::PEER`], and this `owner`. The caller chooses a different
    /// owner for each backing of the I/O ring.
    pub fn attach(&mut self, ring: &mut Ring, now: Instant, owner: u16) {
        assert!(self.tokens.is_none(), "a backing is attached once");
        let tokens = TokenSpace::new(Token::BACKING, owner);
        self.tokens = Some(tokens);
        self.monitor.set_time(now);
        self.driver.attach(ring, now, tokens);
    }

    /// Submits an I/O to this backing.
    pub fn submit(&mut self, ring: &mut Ring, now: Instant, io: &Io) {
        if let Some(abandonment) = &mut self.abandonment {
            return abandonment.refuse(io.id);
        }
        self.in_flight.begin(&self.monitor, io, now);
        self.flush_state.begin(io);
        self.driver.submit(ring, now, io);
    }

    /// Handles a completion with one of the backing's tokens.
    pub fn handle_completion(&mut self, ring: &mut Ring, now: Instant, completion: Completion) {
        debug_assert!(self.tokens.is_some_and(|tokens| {
            tokens.contains(completion.token)
                || tokens.of_kind(completion.token.kind()).contains(completion.token)
        }));
        self.driver.handle_completion(ring, now, completion);
    }

    /// Returns the next I/O that has ended, with its result; `None` if there is none.
    pub fn poll_done(&mut self) -> Option<(IoId, Result<(), IoError>)> {
        if let Some(refused) = self.abandonment.as_mut().and_then(|it| it.poll_refused()) {
            return Some(refused);
        }
        loop {
            let (io, result) = self.driver.poll_done()?;
            if !self.abandonment.as_mut().is_some_and(|it| it.ended(io)) {
                return Some(self.finish(io, result));
            }
        }
    }

    /// Records the end of an I/O, and returns it.
    fn finish(&mut self, io: IoId, result: Result<(), IoError>) -> (IoId, Result<(), IoError>) {
        let is_change = self.in_flight.end(&self.monitor, io, result);
        self.flush_state.end(io, result);
        // A driver also reports a change in this way if the backing did not answer the change in
        // time.
        self.left_requests |= is_change && result == Err(IoError::Failed);
        (io, result)
    }

    /// Returns true unless a flush that began after the last change of the backing has succeeded.
    pub fn is_unflushed(&self) -> bool {
        self.flush_state.is_unflushed()
    }

    /// Returns the time at which to call `handle_timeout`; `None` if no time is planned.
    pub fn poll_timeout(&self) -> Option<Instant> {
        let gives_up = self.abandonment.as_ref().and_then(|it| it.poll_timeout());
        self.driver.poll_timeout().into_iter().chain(gives_up).min()
    }

    /// Handles the timeout that `poll_timeout` returned.
    pub fn handle_timeout(&mut self, ring: &mut Ring, now: Instant) {
        if let Some(abandonment) = &mut self.abandonment {
            abandonment.handle_timeout(ring, now, &mut self.in_flight, &self.monitor);
        }
        self.driver.handle_timeout(ring, now);
    }

    /// Returns true if the I/O ring has no operation of the backing, so that the backing can be
    /// dropped.
    pub fn is_closed(&self) -> bool {
        self.driver.is_closed() && self.abandonment.as_ref().is_none_or(|it| it.is_over())
    }
}

/// Converts a result of the I/O ring or of librbd (negative: an errno) into a result for the
/// engine.
fn io_result(result: i32) -> Result<(), IoError> {
    match -result {
        ..=0 => Ok(()),
        libc::ENOSPC | libc::EDQUOT => Err(IoError::NoSpace),
        libc::EOPNOTSUPP | libc::ENOSYS | libc::ENOTTY => Err(IoError::Unsupported),
        libc::EROFS | libc::EPERM => Err(IoError::ReadOnly),
        _ => Err(IoError::Failed),
    }
}
