//! Backings: where a disk's data lives.
//!
//! # What a backing is
//! Something of a fixed size that can be read, written and flushed. Each kind is one file of this
//! directory and one row of [`BACKINGS`]; the rest of hob knows only [`Backing`].
//!
//! # Call order
//! [`Backing::open`] on any thread (it may take seconds), then on the shard's thread
//! [`Backing::attach`], and from then on `submit`, `handle_completion` for every completion of the
//! backing's tokens and `handle_timeout` when `poll_timeout` has passed. After each of them take what
//! `poll_done` and `poll_status` have. In the end [`Backing::close`], until [`Backing::is_closed`].
//!
//! # What it refuses
//! I/O is checked against the disk by the engine, not again here. Every I/O ends exactly once, with
//! success or an [`IoError`]; nothing is retried except what a lost NBD connection left unanswered.
//!
//! # Failed flushes
//! A flush that fails tells that any subset of the writes since the last successful flush may be lost. It may be told once
//! only: a later flush that succeeds says nothing about those writes. A backing that lost them in another way, because
//! its server restarted, says so with [`Backing::take_loss`]. docs/decisions/0032 has the rules for what follows.

mod abandon;
mod evidence;
mod file;
mod format;
mod handover;
mod helper;
mod identity;
mod lock;
mod modelled;
mod monitor;
pub(crate) mod nbd;
pub mod objects;
pub mod offline_writer;
mod overlay;
mod parent;
mod path;
mod qemu_nbd;
#[cfg(any(test, feature = "rbd"))]
mod rbd;
mod size_probe;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hob_engine::command::Access;
use hob_engine::io::{Io, IoError};
use hob_engine::units::{Instant, IoId};

use crate::ring::{Completion, Gate, Ring};
use crate::token::{Token, TokenSpace};
use abandon::Abandonment;
pub use evidence::{ChangeDetector, ChangeToken};
pub use format::{Format, ImageFile, Role};
pub use identity::ChangeMark;
pub use lock::Lock;
pub use modelled::{ModelledOp, ServiceTime};
use monitor::InFlight;
pub use monitor::{Condition, Monitor, SLOW_AFTER};
pub use overlay::{BlockOrigin, OwnMap, Part};
pub use parent::{Parent, ParentRead};
pub use qemu_nbd::confine;
pub use size_probe::SizeProbe;

/// One kind of backing.
pub struct BackingKind {
    /// Its name, in messages and documentation.
    pub name: &'static str,
    /// How its specifications look, for people.
    pub syntax: &'static str,
    recognise: fn(&str, Format) -> bool,
    open: OpenFn,
}

type OpenFn = fn(&str, Access, &BackingOptions) -> Result<Box<dyn Driver>, OpenError>;

/// Every kind. The first row that recognises a specification opens it. What is not a URI is a path, and the format says how that is read.
pub const BACKINGS: &[BackingKind] = &[
    BackingKind {
        name: "nbd",
        syntax: "nbd://HOST[:PORT]/EXPORT or nbd+unix:///EXPORT?socket=PATH",
        recognise: |spec, _| nbd::recognise(spec),
        open: nbd::open,
    },
    #[cfg(any(test, feature = "rbd"))]
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

/// A `wait_max` without an end: a hundred years, which every clock here can add to its own time.
pub const WAIT_FOREVER: Duration = Duration::from_secs(100 * 365 * 86_400);

/// A change of how long requests wait for a backing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitMax {
    /// That long.
    Set(Duration),
    /// As before, but no longer than that.
    AtMost(Duration),
    /// As before, but requests that wait at this moment fail.
    Expired,
}

impl WaitMax {
    /// The limit from now on.
    fn after(self, before: Duration) -> Duration {
        match self {
            WaitMax::Set(limit) => limit,
            WaitMax::AtMost(limit) => before.min(limit),
            WaitMax::Expired => before,
        }
    }
}

/// How to open a backing and how patient to be with it.
#[derive(Clone, Debug)]
pub struct BackingOptions {
    /// How the file or block device at a path is read; [`Format::assumed`] if absent. Nothing else has one.
    pub format: Option<Format>,
    /// The other files of an image, as they were recorded: no others are opened. The data file of a layer follows that layer.
    pub files: Vec<ImageFile>,
    /// Bypass the host's page cache where the filesystem allows it.
    pub direct: bool,
    /// Lock it against others who would write it; [`Backing::lock`] does so later otherwise.
    pub locked: bool,
    /// A request to a backing that is gone fails after waiting this long.
    pub wait_max: Duration,
    /// Connecting and negotiating take at most this long.
    pub connect_max: Duration,
    /// First pause before connecting again.
    pub reconnect_min: Duration,
    /// Longest pause before connecting again.
    pub reconnect_max: Duration,
    /// A server that is connected to again has lost nothing that it acknowledged: whoever connects sees to it that it is the same
    /// one, and has run ever since.
    pub keeps_writes: bool,
    /// Where the driver notes that its connection is lost, and that there is one again. Each backing that is opened gets its own.
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
            monitor: Arc::default(),
        }
    }
}

/// Why a backing could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The specification is no good; nothing was tried.
    #[error("{spec}: {reason}")]
    Spec {
        /// What was given.
        spec: String,
        /// What is wrong, and what to write instead.
        reason: String,
    },
    /// The system refuses.
    #[error("cannot open {path}: {source}", path = path.display())]
    System {
        /// What was being opened.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// Somebody else has it open.
    #[error(
        "{path} is in use: another process holds its lock. One disk has one writer; stop the other one first",
        path = path.display()
    )]
    InUse {
        /// What is locked.
        path: PathBuf,
    },
    /// QEMU has it open.
    #[error(
        "{path} is in use: QEMU or one of its tools has it open (image lock \"{permission}\"). One disk has one writer; stop the other one first",
        path = path.display()
    )]
    InUseByQemu {
        /// What is locked.
        path: PathBuf,
        /// The permission that QEMU does not share.
        permission: &'static str,
    },
    /// Its filesystem hangs.
    #[error("{path} does not respond: its filesystem gave no answer within {seconds} s", path = path.display())]
    Unresponsive {
        /// What was asked for.
        path: PathBuf,
        /// How long was waited.
        seconds: u64,
    },
    /// It is there, but it cannot be a disk.
    #[error("{what}: {reason}")]
    Unfit {
        /// What was opened.
        what: String,
        /// Why it is no disk, and what to do.
        reason: String,
    },
    /// The other side does not answer, or not as it should.
    #[error("cannot connect to {peer}: {reason}")]
    Connect {
        /// Whom.
        peer: String,
        /// Why not.
        reason: String,
    },
    /// A program is missing.
    #[error(
        "{format} images are read through {program}, which is not installed (Debian: apt install {package})"
    )]
    MissingProgram {
        /// What the file is.
        format: &'static str,
        /// What is needed.
        program: &'static str,
        /// Where it is found.
        package: &'static str,
    },
}

/// What a backing is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackingInfo {
    /// Bytes; a multiple of 512.
    pub size_bytes: u64,
    /// I/O whose offset and length are multiples of this takes no detour; a power of two up to 4096, bytes.
    pub block_bytes: u32,
    /// I/O whose offset or length is no multiple of this is refused as `Invalid`; front ends should announce it.
    /// A power of two up to 4096, bytes.
    pub block_bytes_min: u32,
    /// `Flush` makes writes durable; where it does not, it succeeds and does nothing.
    pub can_flush: bool,
    /// `Discard` frees something.
    pub can_discard: bool,
    /// Zeroes are written faster than data.
    pub can_fast_zero: bool,
    /// Writes fail.
    pub read_only: bool,
    /// For people: kind, place, how it is accessed.
    pub description: String,
    /// Differs when it is another backing: a persistent cache is bound to it.
    pub identity: [u8; 32],
    /// For people: what `identity` was made of.
    pub identity_text: String,
    /// When it was last changed, as it was opened; `None` where nobody can tell.
    pub changed: Option<ChangeMark>,
    /// Equal to what its [`ChangeDetector`] said earlier if nobody has changed it since. `None` where there is no evidence.
    pub evidence: Option<ChangeToken>,
}

impl BackingInfo {
    /// What it was known by when it had so many bytes; `None` where its name does not say how large it is.
    pub fn identity_at(&self, size_bytes: u64) -> Option<[u8; 32]> {
        identity::resized(&self.identity_text, self.size_bytes, size_bytes).map(|text| identity::hash(&text))
    }

    /// It has so many bytes now.
    pub fn grow(&mut self, size_bytes: u64) {
        if let Some(text) = identity::resized(&self.identity_text, self.size_bytes, size_bytes) {
            (self.identity, self.identity_text) = (identity::hash(&text), text);
        }
        self.size_bytes = size_bytes;
    }
}

/// State of a range of a backing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatusExtent {
    /// Bytes.
    pub len: u64,
    /// Nothing is allocated for it.
    pub hole: bool,
    /// It reads as zeroes.
    pub zero: bool,
}

/// The answer to [`Backing::submit_status`]: extents from the asked offset on, without gaps; the
/// last may end before the asked length, never past it.
pub type Status = Result<Vec<StatusExtent>, IoError>;

/// What each kind of backing implements. The doc of [`Backing`]'s methods is its contract.
pub trait Driver: Send {
    /// See [`Backing::info`].
    fn info(&self) -> &BackingInfo;
    /// See [`Backing::attach`].
    fn attach(&mut self, ring: &mut Ring, now: Instant, tokens: TokenSpace);
    /// See [`Backing::submit`].
    fn submit(&mut self, ring: &mut Ring, now: Instant, io: &Io);
    /// See [`Backing::handle_completion`].
    fn handle_completion(&mut self, ring: &mut Ring, now: Instant, completion: Completion);
    /// See [`Backing::poll_done`].
    fn poll_done(&mut self) -> Option<(IoId, Result<(), IoError>)>;
    /// See [`Backing::take_loss`].
    fn take_loss(&mut self) -> bool {
        false
    }
    /// See [`Backing::poll_timeout`].
    fn poll_timeout(&self) -> Option<Instant>;
    /// See [`Backing::handle_timeout`].
    fn handle_timeout(&mut self, ring: &mut Ring, now: Instant);
    /// See [`Backing::submit_status`].
    fn submit_status(&mut self, ring: &mut Ring, now: Instant, id: u64, offset: u64, len: u64);
    /// See [`Backing::poll_status`].
    fn poll_status(&mut self) -> Option<(u64, Status)>;
    /// See [`Backing::close`].
    fn close(&mut self, ring: &mut Ring);
    /// See [`Backing::is_closed`].
    fn is_closed(&self) -> bool;
    /// See [`Backing::read_before_attach`].
    fn read_before_attach(&mut self, _offset: u64, _bytes: &mut [u8]) -> Result<(), IoError> {
        Err(IoError::Unsupported)
    }
    /// See [`Backing::reader`].
    fn reader(&self) -> Option<Box<dyn Reader>> {
        None
    }
    /// See [`Backing::change_mark`].
    fn change_mark(&self) -> Option<ChangeMark> {
        None
    }
    /// See [`Backing::witness`].
    fn witness(&self) -> Option<ChangeDetector> {
        None
    }
    /// See [`Backing::lock`].
    fn lock(&self) -> Option<Lock> {
        None
    }
    /// See [`Backing::size_probe`].
    fn size_probe(&self) -> Option<SizeProbe> {
        None
    }
    /// See [`Backing::grow`].
    fn grow(&mut self, _size_bytes: u64) {}
    /// See [`Backing::peer_has`].
    fn peer_has(&mut self, _first: u64, _end: u64) {}
    /// See [`Backing::set_peer`].
    fn set_peer(&mut self, _ring: &mut Ring, _now: Instant, _peer: Box<dyn Driver>) {}
    /// See [`Backing::take_over`].
    fn take_over(&mut self, _ring: &mut Ring, _now: Instant) {}
    /// See [`Backing::leave_peer`].
    fn leave_peer(&mut self, _ring: &mut Ring, _now: Instant) {}
    /// See [`Backing::has_peer`].
    fn has_peer(&self) -> bool {
        false
    }
    /// See [`Backing::share_parent`].
    fn parent(&self) -> Result<Option<Parent>, String> {
        Ok(None)
    }
    /// See [`Backing::constant`].
    fn constant(&self) -> Option<&str> {
        None
    }
    /// So much of its beginning it has in common with its parent, as far as is known now, bytes. It becomes no more.
    fn common_bytes(&self) -> u64 {
        0
    }
    /// See [`Backing::poll_parent_read`].
    fn poll_parent_read(&mut self) -> Option<ParentRead> {
        None
    }
    /// See [`Backing::handle_parent_read`].
    fn handle_parent_read(&mut self, _: &mut Ring, _: Instant, _number: u32, _: Result<(), IoError>) {}
    /// See [`Backing::take_shared`].
    fn take_shared(&mut self, _io: IoId) -> Vec<(u64, u64)> {
        Vec::new()
    }
    /// See [`Backing::link_parent`].
    fn link_parent(&mut self, _linked: bool) {}
    /// See [`Backing::set_gate`].
    fn set_gate(&mut self, _ring: &mut Ring, _gate: Arc<dyn Gate>) {}
    /// See [`Backing::suspend`].
    fn suspend(&mut self, _ring: &mut Ring, _now: Instant) {}
    /// See [`Backing::resume`].
    fn resume(&mut self) {}
    /// See [`Backing::lose`].
    fn revoke(&mut self, _ring: &mut Ring, _now: Instant) {}
    /// See [`Backing::set_wait_max`].
    fn set_wait_max(&mut self, _now: Instant, _wait_max: WaitMax) {}
    /// See [`Backing::is_lost`].
    fn is_lost(&self) -> bool {
        false
    }
}

/// Reads a backing besides the ring that serves it, and waits for it.
pub trait Reader: Send {
    /// As [`Backing::read_before_attach`].
    ///
    /// # Errors
    /// As an I/O's.
    fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), IoError>;
}

/// An open backing.
pub struct Backing {
    driver: Box<dyn Driver>,
    tokens: Option<TokenSpace>,
    monitor: Arc<Monitor>,
    in_flight: InFlight,
    abandonment: Option<Box<Abandonment>>,
}

impl std::fmt::Debug for Backing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Backing").field("info", self.info()).finish_non_exhaustive()
    }
}

impl Backing {
    /// Opens what `spec` names; see [`BACKINGS`]. Takes its time; not for the shard's thread.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn open(spec: &str, access: Access, options: &BackingOptions) -> Result<Backing, OpenError> {
        let format = options.format.unwrap_or_else(|| Format::assumed(Path::new(spec)));
        let options = BackingOptions { monitor: Arc::default(), ..options.clone() };
        let driver = (Backing::kind(spec, format).open)(spec, access, &options)?;
        Ok(Backing::monitored(driver, options.monitor))
    }

    /// Opens a raw file, whatever its name.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn open_file(path: &str, access: Access, options: &BackingOptions) -> Result<Backing, OpenError> {
        Ok(Backing::of(file::open(path, access, options)?))
    }

    /// Of which kind a backing is that is read so.
    pub fn kind(spec: &str, format: Format) -> &'static BackingKind {
        BACKINGS.iter().find(|kind| (kind.recognise)(spec, format)).expect("the last kind takes all")
    }

    /// Is it a path? Then it has a format.
    pub fn is_path(spec: &str) -> bool {
        Backing::kind(spec, Format::Raw).name == "file"
    }

    /// A backing of a kind that is not in the table.
    pub fn of(driver: Box<dyn Driver>) -> Backing {
        Backing::monitored(driver, Arc::default())
    }

    fn monitored(driver: Box<dyn Driver>, monitor: Arc<Monitor>) -> Backing {
        Backing { driver, tokens: None, monitor, in_flight: InFlight::default(), abandonment: None }
    }

    /// Lets every I/O of this backing take as long as `model` says, or longer when the backing itself does.
    pub fn modelled(self, model: Box<dyn ServiceTime + Send>) -> Backing {
        assert!(self.tokens.is_none(), "a backing is modelled before it is attached");
        Backing::monitored(Box::new(modelled::Modelled::new(self.driver, model)), self.monitor)
    }

    /// The backing of a disk that comes from another host, so far in standby: `own` is the disk's backing, opened without
    /// its lock. The module's text of `handover` tells the rest.
    pub fn handover(own: Backing) -> Backing {
        assert!(own.tokens.is_none(), "it is not attached yet");
        Backing::monitored(Box::new(handover::Handover::new(own.driver)), own.monitor)
    }

    /// What it is.
    pub fn info(&self) -> &BackingInfo {
        self.driver.info()
    }

    /// Tells any thread whether the backing is connected and answers.
    pub fn monitor(&self) -> Arc<Monitor> {
        self.monitor.clone()
    }

    /// Reads where the caller stands, and waits: to compare the backing with what a cache remembers of it before
    /// the cache is trusted. Not for the shard's thread.
    ///
    /// # Errors
    /// As an I/O's; `Invalid` for what is not all inside the disk or not aligned to its `block_bytes_min`,
    /// `Unsupported` where there is no way to do it.
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

    /// Something to read it with while it is attached, where there is such: what a cache remembers is compared while the disk is
    /// served. None for what has one connection only.
    pub fn reader(&self) -> Option<Box<dyn Reader>> {
        self.driver.reader()
    }

    /// When it was last changed, by hob or by others; `None` where nobody can tell. To be taken after the
    /// last I/O, and compared with [`BackingInfo::changed`] when it is opened again.
    pub fn change_mark(&self) -> Option<ChangeMark> {
        self.driver.change_mark()
    }

    /// What tells whether it has been changed, where something does.
    pub fn witness(&self) -> Option<ChangeDetector> {
        self.driver.witness()
    }

    /// Its lock, where it has one.
    pub fn lock(&self) -> Option<Lock> {
        self.driver.lock()
    }

    /// What tells how large it is now, where somebody can tell while it is served.
    pub fn size_probe(&self) -> Option<SizeProbe> {
        self.driver.size_probe()
    }

    /// The disk is so large from now on, no less than before, as its [gauge](Self::size_probe) said that the backing is.
    pub fn grow(&mut self, size_bytes: u64) {
        assert!(size_bytes >= self.info().size_bytes, "disks do not shrink");
        self.driver.grow(size_bytes);
    }

    /// Of a [handover](Self::handover): the peer is said to have these sectors, `first..end`, in flash.
    pub fn peer_has(&mut self, first: u64, end: u64) {
        self.driver.peer_has(first, end);
    }

    /// Of a handover, attached: reads the disk at another host, which owns it, or had it until it was taken over; until
    /// [`leave_peer`](Self::leave_peer).
    pub fn set_peer(&mut self, ring: &mut Ring, now: Instant, peer: Backing) {
        assert!(peer.tokens.is_none(), "it is not attached yet");
        self.driver.set_peer(ring, now, peer.driver);
    }

    /// Of a handover: the disk is this host's. The peer is left; another may come.
    pub fn take_over(&mut self, ring: &mut Ring, now: Instant) {
        self.driver.take_over(ring, now);
    }

    /// Of a handover: the peer is asked no more.
    pub fn leave_peer(&mut self, ring: &mut Ring, now: Instant) {
        self.driver.leave_peer(ring, now);
    }

    /// Of a handover: is the peer still asked?
    pub fn has_peer(&self) -> bool {
        self.driver.has_peer()
    }

    /// Has somebody else taken it over, so that nothing that flash holds of it counts any more? For good.
    pub fn is_lost(&self) -> bool {
        self.driver.is_lost()
    }

    /// Brings the backing to its shard. Its completions will carry tokens of kind
    /// [`Token::BACKING`], or [`Token::PEER`], and this `owner`, which the caller chooses, one per backing of the ring.
    pub fn attach(&mut self, ring: &mut Ring, now: Instant, owner: u16) {
        assert!(self.tokens.is_none(), "a backing is attached once");
        let tokens = TokenSpace::new(Token::BACKING, owner);
        self.tokens = Some(tokens);
        self.monitor.set_time(now);
        self.driver.attach(ring, now, tokens);
    }

    /// Starts an I/O whose target is this backing.
    pub fn submit(&mut self, ring: &mut Ring, now: Instant, io: &Io) {
        if let Some(abandonment) = &mut self.abandonment {
            return abandonment.refuse(io.id);
        }
        self.in_flight.begin(&self.monitor, io.id, io.slice, now);
        self.driver.submit(ring, now, io);
    }

    /// Takes a completion whose token is the backing's.
    pub fn handle_completion(&mut self, ring: &mut Ring, now: Instant, completion: Completion) {
        debug_assert!(self.tokens.is_some_and(|tokens| {
            tokens.contains(completion.token)
                || tokens.of_kind(completion.token.kind()).contains(completion.token)
        }));
        self.driver.handle_completion(ring, now, completion);
    }

    /// An I/O that ended.
    pub fn poll_done(&mut self) -> Option<(IoId, Result<(), IoError>)> {
        if let Some(refused) = self.abandonment.as_mut().and_then(|it| it.poll_refused()) {
            return Some(refused);
        }
        loop {
            let done = self.driver.poll_done()?;
            if !self.abandonment.as_mut().is_some_and(|it| it.ended(done.0)) {
                self.in_flight.end(&self.monitor, done.0);
                return Some(done);
            }
        }
    }

    /// May acknowledged writes that no successful flush covers have been lost since this was asked last, because a server
    /// restarted? To be asked before [`poll_done`](Self::poll_done): what ends from then on may have been sent before the loss.
    pub fn take_loss(&mut self) -> bool {
        self.driver.take_loss()
    }

    /// When to call `handle_timeout`.
    pub fn poll_timeout(&self) -> Option<Instant> {
        let gives_up = self.abandonment.as_ref().and_then(|it| it.poll_timeout());
        self.driver.poll_timeout().into_iter().chain(gives_up).min()
    }

    /// The moment that `poll_timeout` named has come.
    pub fn handle_timeout(&mut self, ring: &mut Ring, now: Instant) {
        if let Some(abandonment) = &mut self.abandonment {
            abandonment.handle_timeout(ring, now, &mut self.in_flight, &self.monitor);
        }
        self.driver.handle_timeout(ring, now);
    }

    /// Lets changes of an attached backing begin only while `gate` is open, as far as the backing can ask it just before it makes them. Others
    /// wait, and fail in time. A backing that fences its writers has no need of it.
    pub fn set_gate(&mut self, ring: &mut Ring, gate: Arc<dyn Gate>) {
        self.driver.set_gate(ring, gate);
    }

    /// Somebody else may be about to write the disk. Changes that have no answer do not get to the backing any more, as far as they can be called
    /// back: they are kept, until [`go_on`](Self::resume). Submit no others meanwhile. Where something else fences the backing, and where nothing
    /// can be called back, this does nothing.
    pub fn suspend(&mut self, ring: &mut Ring, now: Instant) {
        self.driver.suspend(ring, now);
    }

    /// Nobody else has written the disk: what was kept is sent.
    pub fn resume(&mut self) {
        self.driver.resume();
    }

    /// Like [`suspend`](Self::suspend), for good: what was kept fails.
    pub fn revoke(&mut self, ring: &mut Ring, now: Instant) {
        self.driver.revoke(ring, now);
    }

    /// Changes how long requests wait for the backing while it is away, also for those that wait already. Kinds that do not
    /// connect again by themselves ignore it.
    pub fn set_wait_max(&mut self, now: Instant, wait_max: WaitMax) {
        self.driver.set_wait_max(now, wait_max);
    }

    /// Asks what is allocated in a range of at least one byte.
    pub fn submit_status(&mut self, ring: &mut Ring, now: Instant, id: u64, offset: u64, len: u64) {
        self.driver.submit_status(ring, now, id, offset, len);
    }

    /// The answer to a `submit_status`.
    pub fn poll_status(&mut self) -> Option<(u64, Status)> {
        self.driver.poll_status()
    }

    /// Ends the backing: I/O that is waiting fails with `ShuttingDown`, I/O in the kernel is
    /// waited for. Submit nothing afterwards. Flush before, where that matters.
    pub fn close(&mut self, ring: &mut Ring) {
        self.driver.close(ring);
    }

    /// Nothing of it is in the ring any more; it may be dropped.
    pub fn is_closed(&self) -> bool {
        self.driver.is_closed() && self.abandonment.as_ref().is_none_or(|it| it.is_over())
    }
}

/// What the engine is told about a result of the ring.
fn io_result(result: i32) -> Result<(), IoError> {
    match -result {
        ..=0 => Ok(()),
        libc::ENOSPC | libc::EDQUOT => Err(IoError::NoSpace),
        libc::EOPNOTSUPP | libc::ENOSYS | libc::ENOTTY => Err(IoError::Unsupported),
        libc::EROFS | libc::EPERM => Err(IoError::ReadOnly),
        _ => Err(IoError::Failed),
    }
}
