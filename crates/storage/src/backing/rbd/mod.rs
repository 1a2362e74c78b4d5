//! A Ceph RBD image as backing, through librbd's asynchronous calls.
//!
//! # Who writes it
//! An image that is written is locked (librbd's exclusive lock), and the lock is not handed on when somebody else asks. Whoever breaks it
//! blocklists this client: from then on every I/O fails, and [`Driver::is_lost`] says that the disk is another's. A thread asks
//! for that once a second too, for what is served from flash needs no I/O here.
//! The host to which a disk moves opens the image without the lock, writes nothing, and takes the lock when the other has let it go ([`lock`]).
//!
//! # Durability
//! librbd's own cache is off: what is written is durable when it is acknowledged, and a flush has nothing to do but to say so.
//!
//! # Completions
//! librbd's threads count in an eventfd, which the shard's ring awaits; then all that ended is fetched in one call. What waits for the cluster
//! instead of starting something has threads of its own: [`Keeper`], and `map.rs` for holes.
//!
//! librbd watches the image: one that somebody resized is logged, and its disk grows when it is told to ([`Driver::gauge`]).
#![allow(unsafe_code)]

mod clone;
mod library;
mod lock;
mod map;
mod spec;

use std::collections::VecDeque;
use std::ffi::{CString, c_char, c_int, c_void};
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use hob_engine::command::Access;
use hob_engine::io::{Io, IoError, IoOp, Zeroing};
use hob_engine::units::{Instant, IoId};

use super::gauge::Measured;
use super::{
    BackingInfo, BackingOptions, Driver, Gauge, Lock, OpenError, Parent, Reader, Status, identity, io_result,
};
use crate::ring::{Completion, Fd, FdClass, Ring};
use crate::token::TokenSpace;
use library::{
    EVENT_TYPE_EVENTFD, FEATURE_EXCLUSIVE_LOCK, Handle, LOCK_MODE_EXCLUSIVE, Library, ZEROES_THICK,
};
pub(super) use lock::ImageLock;
use map::Maps;
use spec::Spec;

/// How often it is looked whether the lock is still ours.
const LOCK_CHECK: Duration = Duration::from_secs(1);

/// How librados says that it knows no monitor, among other things.
const NOT_FOUND: c_int = -libc::ENOENT;

/// Completions fetched in one call.
const COMPLETIONS_MAX: usize = 64;

pub(super) fn recognise(spec: &str) -> bool {
    spec.starts_with("rbd:")
}

/// An open image and its way to the cluster. Its methods may be called on any thread.
struct Image {
    library: &'static Library,
    cluster: Handle,
    context: Handle,
    image: Handle,
    locked: AtomicBool,
    /// Somebody else has broken the lock.
    lost: AtomicBool,
    /// So much of it it has in common with its parent, once that was asked for, bytes.
    common_bytes: AtomicU64,
}

// SAFETY: librados and librbd allow calls on one handle from any number of threads.
unsafe impl Send for Image {}
// SAFETY: as above.
unsafe impl Sync for Image {}

impl Drop for Image {
    fn drop(&mut self) {
        // SAFETY: each handle is null or was made by the call that its release belongs to, and nobody uses it any more. No I/O is in
        // flight: the driver that started it has seen it end.
        unsafe {
            if !self.image.is_null() {
                if self.locked.load(Ordering::Relaxed) {
                    (self.library.rbd_lock_release)(self.image);
                }
                (self.library.rbd_close)(self.image);
            }
            if !self.context.is_null() {
                (self.library.rados_ioctx_destroy)(self.context);
            }
            if !self.cluster.is_null() {
                (self.library.rados_shutdown)(self.cluster);
            }
        }
    }
}

fn string(text: &str) -> CString {
    CString::new(text).expect("specifications have no NUL")
}

/// How the libraries report.
fn check(what: &str, result: c_int) -> Result<(), String> {
    match result {
        0.. => Ok(()),
        errno => Err(format!("{what}: {}", std::io::Error::from_raw_os_error(-errno))),
    }
}

impl Image {
    /// Connects to the cluster, and opens the image there. Takes up to `patience`, and some.
    fn open(
        library: &'static Library,
        spec: &Spec,
        write: bool,
        patience: Duration,
    ) -> Result<Image, String> {
        let (locked, lost) = (AtomicBool::new(false), AtomicBool::new(false));
        let null = ptr::null_mut();
        let common_bytes = AtomicU64::new(0);
        let mut image =
            Image { library, cluster: null, context: null, image: null, locked, lost, common_bytes };
        image.connect(spec, patience)?;
        let (pool, name) = (string(&spec.pool), string(&spec.image));
        let snapshot = spec.snapshot.as_deref().map(string);
        let snapshot = snapshot.as_ref().map_or(ptr::null(), |name| name.as_ptr());
        // SAFETY: the cluster is connected, all strings outlive the calls, and the handles are written before they are read.
        unsafe {
            let result = (library.rados_ioctx_create)(image.cluster, pool.as_ptr(), &mut image.context);
            check(&format!("pool {}", spec.pool), result)?;
            if !spec.namespace.is_empty() {
                (library.rados_ioctx_set_namespace)(image.context, string(&spec.namespace).as_ptr());
            }
            let open = if write { library.rbd_open } else { library.rbd_open_read_only };
            let result = open(image.context, name.as_ptr(), &mut image.image, snapshot);
            check(&format!("image {}", spec.name()), result)?;
        }
        Ok(image)
    }

    fn connect(&mut self, spec: &Spec, patience: Duration) -> Result<(), String> {
        let library = self.library;
        let user = string(&format!("client.{}", spec.user.as_deref().unwrap_or("admin")));
        let mut is_configured = true;
        // SAFETY: the strings outlive the calls; the handle is written before it is read.
        unsafe {
            let result = (library.rados_create2)(&mut self.cluster, c"ceph".as_ptr(), user.as_ptr(), 0);
            check("librados", result)?;
            let conf = spec.conf.as_deref().map(string);
            let result = (library.rados_conf_read_file)(
                self.cluster,
                conf.as_ref().map_or(ptr::null(), |path| path.as_ptr()),
            );
            if conf.is_some() || result != -libc::ENOENT {
                check(spec.conf.as_deref().unwrap_or("ceph.conf"), result)?;
            } else {
                // Options may say all that is needed.
                is_configured = false;
            }
            (library.rados_conf_parse_env)(self.cluster, ptr::null());
        }
        let seconds = patience.as_secs().max(1).to_string();
        let ours = [("client_mount_timeout", seconds.as_str()), ("rbd_cache", "false")];
        let given = spec.options.iter().map(|(option, value)| (option.as_str(), value.as_str()));
        for (option, value) in ours.into_iter().chain(given) {
            // SAFETY: as above.
            let result = unsafe {
                (library.rados_conf_set)(self.cluster, string(option).as_ptr(), string(value).as_ptr())
            };
            check(&format!("option {option}={value}"), result)?;
        }
        // SAFETY: the cluster's handle is configured.
        match unsafe { (library.rados_connect)(self.cluster) } {
            NOT_FOUND if !is_configured => {
                Err("there is no /etc/ceph/ceph.conf; :conf=PATH says where the cluster's configuration is"
                    .into())
            }
            result => check("the cluster", result),
        }
    }

    fn size_bytes(&self) -> Result<u64, String> {
        let mut bytes = 0;
        // SAFETY: the image is open.
        check("its size", unsafe { (self.library.rbd_get_size)(self.image, &mut bytes) })?;
        Ok(bytes)
    }

    /// The ids of the cluster and of the image.
    fn ids(&self) -> Result<(String, String), String> {
        let (mut cluster, mut id) = ([0u8; 64], [0u8; 256]);
        // SAFETY: the handles are open, and the lengths are those of the arrays, which are zeroed.
        unsafe {
            let text = cluster.as_mut_ptr().cast::<c_char>();
            check(
                "the cluster's id",
                (self.library.rados_cluster_fsid)(self.cluster, text, cluster.len() - 1),
            )?;
            let text = id.as_mut_ptr().cast::<c_char>();
            check("the image's id", (self.library.rbd_get_id)(self.image, text, id.len() - 1))?;
        }
        let text = |bytes: &[u8]| {
            String::from_utf8_lossy(bytes.split(|byte| *byte == 0).next().unwrap_or_default()).into_owned()
        };
        Ok((text(&cluster), text(&id)))
    }

    /// What it is, for ever; and of a snapshot what [`Driver::constant`] says.
    fn identity(&self, spec: &Spec, size_bytes: u64) -> Result<(String, Option<String>), String> {
        let (cluster, id) = self.ids()?;
        let Some(name) = &spec.snapshot else {
            let text =
                format!("rbd image {id} of pool {} in cluster {cluster}, {size_bytes} bytes", spec.pool);
            return Ok((text, None));
        };
        let mut number = 0;
        // SAFETY: the image is open; the name outlives the call.
        let result =
            unsafe { (self.library.rbd_snap_get_id)(self.image, string(name).as_ptr(), &mut number) };
        check("the snapshot's id", result)?;
        // A snapshot of the same name may be another one tomorrow.
        let constant = clone::constant(&cluster, &spec.pool, &spec.namespace, &id, number);
        Ok((format!("{constant}, {size_bytes} bytes"), Some(constant)))
    }

    /// Locks it against other writers. False: images without that feature cannot be.
    fn lock(&self) -> Result<bool, c_int> {
        let mut features = 0;
        // SAFETY: the image is open.
        let result = unsafe { (self.library.rbd_get_features)(self.image, &mut features) };
        if result < 0 {
            return Err(result);
        }
        if features & FEATURE_EXCLUSIVE_LOCK == 0 {
            return Ok(false);
        }
        // SAFETY: as above.
        match unsafe { (self.library.rbd_lock_acquire)(self.image, LOCK_MODE_EXCLUSIVE) } {
            0.. => {
                self.locked.store(true, Ordering::Relaxed);
                Ok(true)
            }
            error => Err(error),
        }
    }

    /// Lets the lock go.
    fn unlock(&self) -> c_int {
        // SAFETY: the image is open.
        unsafe { (self.library.rbd_lock_release)(self.image) }
    }

    /// Is the lock ours, as far as the cluster can be asked? Waits for it.
    fn holds_lock(&self) -> bool {
        let mut is_owner = 0;
        // SAFETY: the image is open.
        let result = unsafe { (self.library.rbd_is_exclusive_lock_owner)(self.image, &mut is_owner) };
        is_owner != 0 || result < 0 && result != -libc::ESHUTDOWN
    }

    fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), IoError> {
        // SAFETY: the image is open; the bytes are ours for the call.
        let read =
            unsafe { (self.library.rbd_read)(self.image, offset, bytes.len(), bytes.as_mut_ptr().cast()) };
        if read == bytes.len() as isize { Ok(()) } else { Err(IoError::Failed) }
    }
}

impl Measured for Image {
    fn size_bytes(&self) -> std::io::Result<u64> {
        Image::size_bytes(self).map_err(std::io::Error::other)
    }
}

impl Reader for Arc<Image> {
    fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), IoError> {
        Image::read(self, offset, bytes)
    }
}

struct Attached {
    event: Fd,
    tokens: TokenSpace,
}

struct Rbd {
    info: BackingInfo,
    spec: Spec,
    /// Of a snapshot.
    constant: Option<String>,
    /// Until it is closed.
    image: Option<Arc<Image>>,
    /// librbd's threads count there.
    event: Arc<OwnedFd>,
    attached: Option<Attached>,
    /// The lock was not to be taken at once.
    comes_later: bool,
    /// The wait for `event` is in the ring.
    awaits: bool,
    /// No more I/O comes; the ring is left when the last has ended.
    closing: bool,
    in_flight: usize,
    done: VecDeque<(IoId, Result<(), IoError>)>,
    statuses: VecDeque<(u64, Status)>,
    maps: Maps,
    keeper: Keeper,
}

/// A thread that does what waits for the cluster: it looks whether the lock is still ours, and closes the image in the end.
struct Keeper {
    closing: mpsc::Sender<Arc<Image>>,
    /// The image is closed.
    closed: Arc<AtomicBool>,
}

impl Keeper {
    /// Whoever awaits `event` hears of the lock's loss, and of the end. That the image has another size than these bytes is logged.
    fn start(image: Arc<Image>, event: Arc<OwnedFd>, name: String, size_bytes: u64) -> Keeper {
        let (closing, wishes) = mpsc::channel::<Arc<Image>>();
        let closed = Arc::new(AtomicBool::new(false));
        let ended = closed.clone();
        let tell = move || _ = rustix::io::write(&event, &1u64.to_ne_bytes());
        let mut size_bytes = size_bytes;
        let keep = move || loop {
            match wishes.recv_timeout(LOCK_CHECK) {
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    // librbd watches the image, and knows without asking the cluster unless something has changed.
                    if let Ok(now) = image.size_bytes()
                        && std::mem::replace(&mut size_bytes, now) != now
                    {
                        tracing::info!(
                            image = name,
                            bytes = now,
                            "the image has another size now; 'hob disk resize' lets its disk have what is new"
                        );
                    }
                    let looks = image.locked.load(Ordering::Relaxed) && !image.lost.load(Ordering::Acquire);
                    // One that was let go meanwhile is not lost.
                    if looks && !image.holds_lock() && image.locked.load(Ordering::SeqCst) {
                        image.lost.store(true, Ordering::Release);
                        tell();
                    } else if looks {
                        image.look_at_parent();
                    }
                }
                last => {
                    drop((last, image));
                    ended.store(true, Ordering::Release);
                    return tell();
                }
            }
        };
        std::thread::Builder::new().name("hob-rbd".into()).spawn(keep).expect("threads can be started");
        Keeper { closing, closed }
    }
}

/// Connects, opens and locks.
pub(super) fn open(
    spec: &str,
    access: Access,
    options: &BackingOptions,
) -> Result<Box<dyn Driver>, OpenError> {
    let parsed = Spec::parse(spec.strip_prefix("rbd:").unwrap_or(spec))
        .map_err(|reason| OpenError::Spec { spec: spec.to_owned(), reason })?;
    let write = access == Access::ReadWrite;
    if write && parsed.snapshot.is_some() {
        let reason = "snapshots are read-only: add the disk read-only, or clone the snapshot".into();
        return Err(OpenError::Spec { spec: spec.to_owned(), reason });
    }
    let library = Library::get().map_err(|reason| OpenError::Connect {
        peer: format!("rbd image {}", parsed.name()),
        reason: format!("librbd cannot be loaded (Debian: apt install librbd1): {reason}"),
    })?;
    let connect = |reason| OpenError::Connect { peer: format!("rbd image {}", parsed.name()), reason };
    let image = Image::open(library, &parsed, write, options.connect_max).map_err(connect)?;
    let size_bytes = image.size_bytes().map_err(connect)?;
    if size_bytes == 0 || !size_bytes.is_multiple_of(512) {
        let reason = format!("{size_bytes} bytes are not a whole, positive number of 512-byte sectors");
        return Err(OpenError::Unfit { what: format!("rbd image {}", parsed.name()), reason });
    }
    let (identity_text, constant) = image.identity(&parsed, size_bytes).map_err(connect)?;
    if write && options.locked {
        match image.lock() {
            Ok(true) => {}
            Ok(false) => tracing::warn!(
                image = parsed.name(),
                "the image has no exclusive lock (rbd feature enable … exclusive-lock): nothing keeps a second writer away"
            ),
            Err(error) if [-libc::EROFS, -libc::EBUSY, -libc::EAGAIN].contains(&error) => {
                return Err(OpenError::InUse { path: format!("rbd image {}", parsed.name()).into() });
            }
            Err(error) => return Err(connect(check("its lock", error).expect_err("it is an error"))),
        }
    }
    let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC)
        .map_err(|errno| OpenError::System { path: "eventfd".into(), source: errno.into() })?;
    // SAFETY: the image is open; the eventfd lives as long as the image is used, in the same `Rbd`.
    let result =
        unsafe { (library.rbd_set_image_notification)(image.image, event.as_raw_fd(), EVENT_TYPE_EVENTFD) };
    check("its notifications", result).map_err(connect)?;
    let info = BackingInfo {
        size_bytes,
        block_bytes: 512,
        block_bytes_min: 1,
        can_discard: write,
        can_fast_zero: write,
        read_only: !write,
        description: format!("rbd image {}", parsed.name()),
        identity: identity::hash(&identity_text),
        identity_text,
        changed: None,
    };
    let (image, event, parsed_name) = (Arc::new(image), Arc::new(event), parsed.name());
    Ok(Box::new(Rbd {
        info,
        spec: parsed,
        constant,
        keeper: Keeper::start(image.clone(), event.clone(), parsed_name, size_bytes),
        maps: Maps::new(event.clone()),
        event,
        attached: None,
        comes_later: write && !options.locked,
        awaits: false,
        closing: false,
        in_flight: 0,
        done: VecDeque::new(),
        statuses: VecDeque::new(),
        image: Some(image),
    }))
}

impl Rbd {
    /// It was opened without the lock, which it has not been given yet: nothing was written.
    fn is_in_standby(&self) -> bool {
        self.comes_later && self.image.as_ref().is_some_and(|image| !image.locked.load(Ordering::Relaxed))
    }

    fn start(&mut self, ring: &mut Ring, io: &Io) -> Result<(), IoError> {
        let Some(open) = self.image.as_deref().filter(|image| !image.lost.load(Ordering::Acquire)) else {
            return Err(IoError::Failed);
        };
        let (library, image) = (open.library, open.image);
        let mut completion = ptr::null_mut();
        let argument = ptr::without_provenance_mut::<c_void>(io.id.0 as usize);
        // SAFETY: no callback is given; the argument is a number that is handed back and not looked behind.
        let made = unsafe { (library.rbd_aio_create_completion)(argument, ptr::null_mut(), &mut completion) };
        if made < 0 {
            return Err(IoError::Failed);
        }
        let bytes = io.slice.map(|slice| ring.arena_mut().slice_mut(slice));
        let (at, len) = bytes.map_or((ptr::null_mut(), 0), |bytes| (bytes.as_mut_ptr(), bytes.len()));
        // SAFETY: the image is open until everything in flight has ended. The slice belongs to a buffer that the engine keeps until the
        // I/O is done, in an arena whose memory never moves; a read's is written by nobody else meanwhile, a write's by nobody.
        let result = unsafe {
            match io.op {
                IoOp::Read => (library.rbd_aio_read)(image, io.offset, len, at.cast(), completion),
                IoOp::Write(_) => (library.rbd_aio_write)(image, io.offset, len, at.cast(), completion),
                IoOp::Flush => (library.rbd_aio_flush)(image, completion),
                IoOp::Discard => (library.rbd_aio_discard)(image, io.offset, io.len, completion),
                IoOp::WriteZeroes(zeroing) => {
                    let keeps = matches!(zeroing, Zeroing::KeepAllocated | Zeroing::FastKeepAllocated);
                    let flags = if keeps { ZEROES_THICK } else { 0 };
                    (library.rbd_aio_write_zeroes)(image, io.offset, io.len as usize, completion, flags, 0)
                }
                IoOp::WriteJournal => unreachable!("journals are on flash"),
            }
        };
        if result < 0 {
            // SAFETY: nothing was started with it.
            unsafe { (library.rbd_aio_release)(completion) };
            return Err(io_result(result).err().unwrap_or(IoError::Failed));
        }
        self.in_flight += 1;
        Ok(())
    }

    /// Fetches what has ended.
    fn fetch(&mut self) {
        let Some(image) = &self.image else { return };
        let library = image.library;
        let mut ended = [ptr::null_mut(); COMPLETIONS_MAX];
        loop {
            // SAFETY: the image is open, and there is room for as many completions as said.
            let count = unsafe {
                (library.rbd_poll_io_events)(image.image, ended.as_mut_ptr(), ended.len() as c_int)
            };
            for completion in ended.iter().take(count.max(0) as usize) {
                // SAFETY: librbd has just handed it out as ended; it is released once.
                let (argument, result) = unsafe {
                    let argument = (library.rbd_aio_get_arg)(*completion);
                    let result = (library.rbd_aio_get_return_value)(*completion);
                    (library.rbd_aio_release)(*completion);
                    (argument, result)
                };
                if result == -(libc::ESHUTDOWN as isize) {
                    image.lost.store(true, Ordering::Release);
                }
                self.in_flight -= 1;
                self.done.push_back((IoId(argument.addr() as u32), io_result(result.min(0) as i32)));
            }
            if count < COMPLETIONS_MAX as c_int {
                return;
            }
        }
    }

    /// When nothing is in flight any more, the keeper closes the image, and says so.
    fn end_if_closing(&mut self, ring: &mut Ring) {
        if self.closing
            && self.in_flight == 0
            && self.maps.is_idle()
            && let Some(image) = self.image.take()
        {
            let _ = self.keeper.closing.send(image);
        }
        if self.keeper.closed.load(Ordering::Acquire)
            && let Some(Attached { event, .. }) = self.attached.take()
        {
            ring.detach_event(event);
        }
    }

    fn await_event(&mut self, ring: &mut Ring) {
        if let Some(Attached { event, tokens }) = &self.attached {
            ring.await_event(tokens.token(0), *event);
            self.awaits = true;
        }
    }
}

impl Driver for Rbd {
    fn info(&self) -> &BackingInfo {
        &self.info
    }

    fn attach(&mut self, ring: &mut Ring, _now: Instant, tokens: TokenSpace) {
        let event = ring.attach(self.event.clone(), FdClass::Event);
        self.attached = Some(Attached { event, tokens });
        self.await_event(ring);
    }

    fn submit(&mut self, ring: &mut Ring, _now: Instant, io: &Io) {
        let result = match io.op {
            // librbd would want the lock for it.
            IoOp::Flush if self.is_in_standby() => return self.done.push_back((io.id, Ok(()))),
            IoOp::Read | IoOp::Flush => self.start(ring, io),
            _ if self.info.read_only => Err(IoError::ReadOnly),
            _ => self.start(ring, io),
        };
        if result.is_err() {
            self.done.push_back((io.id, result));
        }
    }

    fn handle_completion(&mut self, ring: &mut Ring, _now: Instant, _completion: Completion) {
        self.awaits = false;
        self.fetch();
        self.statuses.extend(std::iter::from_fn(|| self.maps.poll()));
        self.end_if_closing(ring);
        self.await_event(ring);
    }

    fn poll_done(&mut self) -> Option<(IoId, Result<(), IoError>)> {
        self.done.pop_front()
    }

    fn poll_timeout(&self) -> Option<Instant> {
        None
    }

    fn handle_timeout(&mut self, _ring: &mut Ring, _now: Instant) {}

    fn submit_status(&mut self, _ring: &mut Ring, _now: Instant, id: u64, offset: u64, len: u64) {
        match &self.image {
            Some(image) => self.maps.ask(image.clone(), id, offset, len),
            None => self.statuses.push_back((id, Err(IoError::ShuttingDown))),
        }
    }

    fn poll_status(&mut self) -> Option<(u64, Status)> {
        self.statuses.pop_front()
    }

    fn close(&mut self, ring: &mut Ring) {
        self.closing = true;
        self.end_if_closing(ring);
    }

    fn is_closed(&self) -> bool {
        self.attached.is_none() && !self.awaits && self.in_flight == 0
    }

    fn read_before_attach(&mut self, offset: u64, bytes: &mut [u8]) -> Result<(), IoError> {
        self.image.as_ref().ok_or(IoError::ShuttingDown)?.read(offset, bytes)
    }

    fn reader(&self) -> Option<Box<dyn Reader>> {
        let image = self.image.clone()?;
        Some(Box::new(image))
    }

    fn parent(&self) -> Result<Option<Parent>, String> {
        self.image.as_ref().ok_or("it is being closed")?.parent(&self.spec)
    }

    fn constant(&self) -> Option<&str> {
        self.constant.as_deref()
    }

    fn common_bytes(&self) -> u64 {
        self.image.as_ref().map_or(0, |image| image.common_bytes.load(Ordering::Acquire))
    }

    fn gauge(&self) -> Option<Gauge> {
        self.image.as_ref().map(Gauge::asked)
    }

    fn grow(&mut self, size_bytes: u64) {
        self.info.grow(size_bytes);
    }

    fn lock(&self) -> Option<Lock> {
        self.image.as_ref().filter(|_| !self.info.read_only).map(|image| Lock::of_image(ImageLock::of(image)))
    }

    fn is_lost(&self) -> bool {
        self.image.as_ref().is_some_and(|image| image.lost.load(Ordering::Acquire))
    }
}
