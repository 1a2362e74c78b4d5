//! A Ceph RBD image as backing, through librbd's asynchronous calls.
//!
//! # Exclusive access
//! hob locks an image that it writes (librbd's exclusive lock), and keeps the lock if another
//! client requests it. A client that breaks the lock blocklists hob's client at the cluster. From
//! then on every I/O fails, and [`Driver::is_lost`] reports it. A thread also checks the lock once
//! a second, because requests that flash serves need no I/O to the image. The destination of a
//! migration opens the image without the lock and writes nothing. The destination takes the lock
//! when the source has released it ([`lock`]).
//!
//! # Durability
//! librbd's own cache is off, unless the configuration of the pool or the image overrides the
//! client. Without that cache, writes are durable when they are acknowledged, and a flush has
//! nothing to do. librbd does not report whether its cache is on, so a durable write is a write and
//! a flush.
//!
//! # Completions
//! librbd's threads signal an eventfd in the shard's I/O ring. hob then fetches all completed calls
//! at once. Calls that wait for the cluster have their own threads: [`LockMonitor`], and `map.rs`
//! for allocation queries.
//!
//! librbd watches the image. A resize is logged, and a command grows the disk
//! ([`Driver::size_probe`]). librbd skips I/O past the end of an image that was shrunk, and reports
//! success. hob fails such I/O.
#![allow(unsafe_code)]

mod clone;
mod image;
mod library;
mod lock;
mod lock_monitor;
mod map;
mod spec;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use hob_engine::command::Access;
use hob_engine::io::{Durability, Io, IoError, IoOp, Zeroing};
use hob_engine::units::{Instant, IoId};

use super::{
    BackingInfo, BackingOptions, Driver, Lock, NotShared, OpenError, Parent, Reader, SizeProbe, Status,
    io_result, stripe,
};
use crate::ring::{Completion, Fd, FdClass, Ring};
use crate::token::TokenSpace;
use image::{Image, check};
use library::{EVENT_TYPE_EVENTFD, Handle, Library, ZEROES_THICK};
pub(super) use lock::ImageLock;
use lock_monitor::LockMonitor;
use map::Maps;
use spec::Spec;

/// Maximum number of completions that one call fetches.
const COMPLETIONS_MAX: usize = 64;

pub(super) fn recognise(spec: &str) -> bool {
    spec.starts_with("rbd:")
}

struct Attached {
    event: Fd,
    tokens: TokenSpace,
}

/// How an operation of librbd completes an I/O.
#[derive(Clone, Copy, Debug)]
enum Over {
    /// The I/O completes when the operation has ended.
    Ended,
    /// The I/O completes when this number of bytes was read.
    Read(usize),
    /// The I/O completes after a flush that follows the operation.
    Flushed,
}

struct Rbd {
    info: BackingInfo,
    spec: Spec,
    /// Permanent name of the snapshot; `None` for an image.
    constant: Option<String>,
    /// The open image; `None` once it is closed.
    image: Option<Arc<Image>>,
    /// Eventfd that librbd's threads signal.
    event: Arc<OwnedFd>,
    attached: Option<Attached>,
    /// True if hob takes the image's lock later than it opens the image.
    comes_later: bool,
    /// Whether a wait for `event` is in the I/O ring.
    awaits: bool,
    /// True while the backing is closing: no I/O is submitted, and the backing detaches from the
    /// I/O ring after the last completion.
    closing: bool,
    started: HashMap<IoId, Over>,
    done: VecDeque<(IoId, Result<(), IoError>)>,
    statuses: VecDeque<(u64, Status)>,
    maps: Maps,
    lock_monitor: LockMonitor,
}

/// Connects to the cluster, and opens and locks the image.
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
                "the image has no exclusive lock (rbd feature enable … exclusive-lock), so nothing prevents a second writer"
            ),
            Err(error) if [-libc::EROFS, -libc::EBUSY, -libc::EAGAIN].contains(&error) => {
                return Err(OpenError::InUse { path: format!("rbd image {}", parsed.name()).into() });
            }
            Err(error) => {
                return Err(connect(check("cannot lock the image", error).expect_err("it is an error")));
            }
        }
    }
    let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC)
        .map_err(|errno| OpenError::System { path: "eventfd".into(), source: errno.into() })?;
    // SAFETY: the image is open. The eventfd is in the same `Rbd`, and lives as long as the image
    // is used.
    let result =
        unsafe { (library.rbd_set_image_notification)(image.image, event.as_raw_fd(), EVENT_TYPE_EVENTFD) };
    check("cannot request notifications of the image's calls", result).map_err(connect)?;
    let info = BackingInfo {
        size_bytes,
        block_bytes: 512,
        stripe_bytes: image.stripe_bytes().and_then(stripe::reported),
        block_bytes_min: 1,
        can_flush: true,
        can_discard: write,
        can_fast_zero: write,
        read_only: !write,
        description: format!("rbd image {}", parsed.name()),
        ..BackingInfo::identified(identity_text)
    };
    let (image, event, parsed_name) = (Arc::new(image), Arc::new(event), parsed.name());
    Ok(Box::new(Rbd {
        info,
        spec: parsed,
        constant,
        lock_monitor: LockMonitor::start(image.clone(), event.clone(), parsed_name, size_bytes),
        maps: Maps::new(event.clone()),
        event,
        attached: None,
        comes_later: write && !options.locked,
        awaits: false,
        closing: false,
        started: HashMap::new(),
        done: VecDeque::new(),
        statuses: VecDeque::new(),
        image: Some(image),
    }))
}

impl Rbd {
    /// Returns true if the image was opened without the lock and has not been locked yet. As long
    /// as this is so, hob has written nothing to the image.
    fn is_in_standby(&self) -> bool {
        self.comes_later && self.image.as_ref().is_some_and(|image| !image.locked.load(Ordering::Relaxed))
    }

    /// Returns true if the image was shrunk and the I/O is past its end.
    fn is_past_the_end(&self, io: &Io) -> bool {
        let of_image = self.image.as_ref().map(|image| image.size_bytes.load(Ordering::Relaxed));
        of_image.is_some_and(|bytes| io.offset + io.len > bytes)
    }

    fn start(&mut self, ring: &mut Ring, io: &Io) -> Result<(), IoError> {
        let bytes = io.slice.map(|slice| ring.arena_mut().slice_mut(slice));
        let (at, len) = bytes.map_or((ptr::null_mut(), 0), |bytes| (bytes.as_mut_ptr(), bytes.len()));
        let over = match io.op {
            IoOp::Read => Over::Read(len),
            IoOp::Write(Durability::Durable) => Over::Flushed,
            _ => Over::Ended,
        };
        // SAFETY: the image stays open until all I/O in flight has ended. The slice belongs to a
        // buffer that the engine keeps until the I/O has ended, in an arena whose memory never
        // moves. Meanwhile only librbd writes to the buffer of a read, and no code writes to the
        // buffer of a write.
        self.begin(io.id, over, |library, image, completion| unsafe {
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
        })
    }

    /// Starts an operation of librbd for the I/O `id`. librbd reports its end through a completion.
    fn begin(
        &mut self,
        id: IoId,
        over: Over,
        call: impl FnOnce(&Library, Handle, Handle) -> c_int,
    ) -> Result<(), IoError> {
        let Some(open) = self.image.as_deref().filter(|image| !image.lost.load(Ordering::Acquire)) else {
            return Err(IoError::Failed);
        };
        let library = open.library;
        let mut completion = ptr::null_mut();
        let argument = ptr::without_provenance_mut::<c_void>(id.0 as usize);
        // SAFETY: there is no callback. The argument is a number that librbd returns, and not an
        // address.
        let made = unsafe { (library.rbd_aio_create_completion)(argument, ptr::null_mut(), &mut completion) };
        if made < 0 {
            return Err(IoError::Failed);
        }
        let result = call(library, open.image, completion);
        if result < 0 {
            // SAFETY: no I/O was started with this completion.
            unsafe { (library.rbd_aio_release)(completion) };
            return Err(io_result(result).err().unwrap_or(IoError::Failed));
        }
        self.started.insert(id, over);
        Ok(())
    }

    /// Fetches the completions of librbd.
    fn fetch(&mut self) {
        let Some(image) = self.image.clone() else { return };
        let library = image.library;
        let mut ended = [ptr::null_mut(); COMPLETIONS_MAX];
        loop {
            // SAFETY: the image is open, and the array has room for the given number of
            // completions.
            let count = unsafe {
                (library.rbd_poll_io_events)(image.image, ended.as_mut_ptr(), ended.len() as c_int)
            };
            for completion in ended.iter().take(count.max(0) as usize) {
                // SAFETY: librbd has just returned this completion as ended, and it is released
                // once.
                let (argument, result) = unsafe {
                    let argument = (library.rbd_aio_get_arg)(*completion);
                    let result = (library.rbd_aio_get_return_value)(*completion);
                    (library.rbd_aio_release)(*completion);
                    (argument, result)
                };
                if result == -(libc::ESHUTDOWN as isize) {
                    image.lost.store(true, Ordering::Release);
                }
                self.end(IoId(argument.addr() as u32), result);
            }
            if count < COMPLETIONS_MAX as c_int {
                return;
            }
        }
    }

    /// Handles the completion of a librbd call.
    fn end(&mut self, id: IoId, result: isize) {
        let over = self.started.remove(&id).expect("librbd ends what was started, once");
        let result = match over {
            _ if result < 0 => io_result(result as i32),
            Over::Ended => Ok(()),
            // The rest of the buffer has its previous content.
            Over::Read(len) if result != len as isize => Err(IoError::Failed),
            Over::Read(_) => Ok(()),
            Over::Flushed => {
                // SAFETY: as when the I/O was started.
                let flush = |library: &Library, image, completion| unsafe {
                    (library.rbd_aio_flush)(image, completion)
                };
                match self.begin(id, Over::Ended, flush) {
                    Ok(()) => return,
                    failed => failed,
                }
            }
        };
        self.done.push_back((id, result));
    }

    /// When the image is being closed and nothing is in flight, lets the lock monitor close the
    /// image. The lock monitor signals `event` when the image is closed.
    fn end_if_closing(&mut self, ring: &mut Ring) {
        if self.closing
            && self.started.is_empty()
            && self.maps.is_idle()
            && let Some(image) = self.image.take()
        {
            let _ = self.lock_monitor.closing.send(image);
        }
        if self.lock_monitor.closed.load(Ordering::Acquire)
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
            // For this call, librbd would need the lock.
            IoOp::Flush if self.is_in_standby() => return self.done.push_back((io.id, Ok(()))),
            IoOp::Read | IoOp::Flush => self.start(ring, io),
            _ if self.info.read_only => Err(IoError::ReadOnly),
            _ if self.is_past_the_end(io) => Err(IoError::Failed),
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
        self.attached.is_none() && !self.awaits && self.started.is_empty()
    }

    fn read_before_attach(&mut self, offset: u64, bytes: &mut [u8]) -> Result<(), IoError> {
        self.image.as_ref().ok_or(IoError::ShuttingDown)?.read(offset, bytes)
    }

    fn reader(&self) -> Option<Box<dyn Reader>> {
        let image = self.image.clone()?;
        Some(Box::new(image))
    }

    fn parent(&self) -> Result<Option<Parent>, NotShared> {
        let is_closing = || NotShared::Unknown("the image is being closed".to_owned());
        self.image.as_ref().ok_or_else(is_closing)?.parent(&self.spec)
    }

    fn constant(&self) -> Option<&str> {
        self.constant.as_deref()
    }

    fn common_bytes(&self) -> u64 {
        self.image.as_ref().map_or(0, |image| image.common_bytes.load(Ordering::Acquire))
    }

    fn size_probe(&self) -> Option<SizeProbe> {
        self.image.as_ref().map(SizeProbe::asked)
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
