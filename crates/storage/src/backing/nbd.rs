//! An NBD export as backing: one connection with many requests in flight, which is re-established
//! after a failure.
//!
//! # A lost connection
//! The connection is closed first, and all of its I/O in the I/O ring ends. A helper thread then
//! connects again. The pauses between its attempts double from `reconnect_min` to `reconnect_max`.
//! Unanswered requests are sent again. Repeating them is safe, because the engine has no two of
//! them in flight for one sector. A job (one I/O or one status query) older than `wait_max` fails.
//! Once an outage has lasted for `wait_max`, new jobs fail after a second. If hob has already sent
//! requests of a job that must fail, hob closes the connection first, because it does not trust
//! late replies.
//!
//! # A server that shuts down
//! A server that shuts down replies NBD_ESHUTDOWN to a request. hob keeps the request and sends
//! nothing more on this connection. hob waits for the replies to changes, and up to
//! [`DISCONNECT_MAX_NS`] for other replies. Then hob sends NBD_CMD_DISC and treats the connection
//! as lost, so that the server can exit. hob waits for the replies to changes for this reason: if
//! hob sent a change again while the old server still works on it, the old server could overwrite
//! newer data.
//!
//! # Flushes
//! A server that restarts may lose acknowledged writes that were not flushed. hob keeps these
//! changes in memory ([`unflushed`]) and repeats them on the next connection, before other
//! requests. Changes that hob does not keep may be lost. hob does not keep changes beyond the
//! memory limit, nor those of an earlier daemon, which may be lost until the first flush succeeds.
//! If a connection breaks while there are unflushed changes that hob does not keep, or if the
//! server refuses a repeated change, the waiting flushes fail, and
//! [`Driver::take_loss`](super::Driver::take_loss) reports a loss. hob flushes the server without a
//! guest's request when the backing is attached, and when the kept changes take much memory. With
//! [`BackingOptions::keeps_writes`], other code ensures that the server is the same as before, so a
//! lost connection loses nothing.
//!
//! # TLS
//! A thread encrypts the connection of an `nbds://` URI ([`relay`]). The I/O ring uses a Unix
//! socket to this thread. The backing's identity and cached data do not depend on TLS.
//!
//! # Servers with fewer features
//! Without FUA, a flush follows the write, also if the write is sent again to another server.
//! Without TRIM, discards succeed without effect. Without WRITE_ZEROES, zeroes are sent as data.
//! Without BLOCK_STATUS, hob reports the whole disk as data. A minimum block size above a sector is
//! refused. A smaller minimum becomes the disk's minimum block size
//! ([`BackingInfo::block_bytes_min`]), and unaligned requests are refused. An export that is
//! smaller after a reconnection is another disk, and all I/O fails from then on. A larger export
//! has grown, and the disk grows only by a command.

pub(crate) mod connect;
pub(crate) mod depth;
mod exchange;
mod gate;
mod jobs;
pub mod psk;
mod recovery;
mod relay;
mod requests;
pub(crate) mod sample;
mod socket;
mod tls;
mod unflushed;

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use hob_engine::command::Access;
use hob_engine::flush_order::FlushOrder;
use hob_engine::gather::Gather;
use hob_engine::io::{BufferSlice, Durability, Io, IoError, IoOp};
use hob_engine::units::{Instant, IoId, SECTOR_BYTES};
use hob_nbd::client::handshake::Negotiated;
use hob_nbd::client::reply::ReplyDecoder;
use hob_nbd::uri::NbdUri;
use hob_nbd::{CommandFlags, TransmissionFlags};

use super::{
    BackingInfo, BackingOptions, Driver, OpenError, SizeProbe, Status, StatusExtent, WaitMax, stripe,
};
use crate::filesystem::FileNumber;
use crate::ring::{Completion, Fd, Gate, Returned, Ring, RxBuf};
use crate::token::TokenSpace;
pub(crate) use connect::BeforeConnecting;
use connect::{Attempt, Link, Wire};
use gate::ReplaceableGate;
use jobs::{Asker, Jobs, What};
use unflushed::{Repeat, Unflushed};

/// Time that a server that shuts down has for replies to earlier reads and flushes, nanoseconds.
const DISCONNECT_MAX_NS: u64 = 1_000_000_000;

/// Time without a reply after which hob asks an idle server for a block's status, nanoseconds. The
/// reply shows that the server answers, or that it is about to shut down.
const PROBE_NS: u64 = 2_000_000_000;

/// Minimum time that a request waits during an outage, nanoseconds; enough for one attempt to
/// connect.
const GRACE_NS: u64 = 1_000_000_000;

/// Token indices of a connection's operations in the I/O ring: at most one send and one receive.
const SEND: u32 = 0;
const RECEIVE: u32 = 1;
const FILL: u32 = 2;
const CONNECT: u32 = 3;

/// Longest command without payload, bytes; a multiple of every block size.
const COMMAND_BYTES_MAX: u64 = 1 << 30;

/// Largest payload of a request, regardless of the server's limit, bytes.
const PAYLOAD_BYTES_MAX: u64 = 32 << 20;

/// Longest time for which the server's host may leave sent data unconfirmed. After that time the
/// connection is closed, and its requests are sent again on a new one.
const SILENCE_MAX: Duration = Duration::from_secs(30);

fn silence_max(options: &BackingOptions) -> Duration {
    options.wait_max.min(SILENCE_MAX)
}

pub(super) fn recognise(spec: &str) -> bool {
    spec.split_once("://").is_some_and(|(scheme, _)| scheme.starts_with("nbd"))
}

/// Connects to the export of an NBD URI.
pub(super) fn open(
    spec: &str,
    access: Access,
    options: &BackingOptions,
) -> Result<Box<dyn Driver>, OpenError> {
    let uri: NbdUri = spec.parse().map_err(|error: hob_nbd::uri::UriError| OpenError::Spec {
        spec: spec.to_owned(),
        reason: error.to_string(),
    })?;
    let plain = uri.without_tls();
    let whose = |size_bytes| format!("NBD export {plain}, {size_bytes} bytes");
    let driver = open_uri(&uri, access, options, format!("NBD export {spec}"), &whose)?;
    Ok(Box::new(driver))
}

/// Connects to an export. `whose` returns the backing's identity text for the disk's size in bytes.
pub(crate) fn open_uri(
    uri: &NbdUri,
    access: Access,
    options: &BackingOptions,
    description: String,
    whose: &dyn Fn(u64) -> String,
) -> Result<NbdBacking, OpenError> {
    let link = connect::connect(uri, options.connect_max, silence_max(options))
        .map_err(|reason| OpenError::Connect { peer: description.clone(), reason })?;
    let unfit = |reason: String| OpenError::Unfit { what: description.clone(), reason };
    let Negotiated { size_bytes, flags, block_size_min, block_size_preferred, .. } = link.negotiated;
    if size_bytes == 0 || !size_bytes.is_multiple_of(512) {
        return Err(unfit(format!("{size_bytes} bytes are not a positive multiple of 512")));
    }
    if u64::from(block_size_min) > SECTOR_BYTES {
        return Err(unfit(format!(
            "the export's minimum block size is {block_size_min} bytes; hob supports at most 4096"
        )));
    }
    let read_only = flags.contains(TransmissionFlags::READ_ONLY);
    if read_only && access == Access::ReadWrite {
        return Err(unfit("the server exports the disk read-only; add the disk read-only".into()));
    }
    let identity_text = whose(size_bytes);
    let info = BackingInfo {
        size_bytes,
        block_bytes: block_size_min.max(1),
        stripe_bytes: stripe::reported(block_size_preferred.into()),
        block_bytes_min: block_size_min.max(1),
        can_flush: flags.contains(TransmissionFlags::SEND_FLUSH),
        can_discard: flags.contains(TransmissionFlags::SEND_TRIM),
        can_fast_zero: flags.contains(TransmissionFlags::SEND_FAST_ZERO),
        read_only: access == Access::ReadOnly,
        description,
        ..BackingInfo::identified(identity_text)
    };
    Ok(NbdBacking {
        info,
        uri: uri.clone(),
        options: options.clone(),
        negotiated: link.negotiated,
        before_connecting: None,
        told: Arc::new(AtomicU64::new(size_bytes)),
        tokens: None,
        state: State::Detached(link),
        operations: 0,
        pause: options.reconnect_min,
        down_since: None,
        jobs: Jobs::default(),
        changes: u64::from(access == Access::ReadWrite),
        flushed: 0,
        unflushed: Unflushed::new(u64::from(access == Access::ReadWrite)),
        repeat: None,
        flush_order: FlushOrder::default(),
        is_flushing: false,
        is_exposed: false,
        exposure: None,
        heard_at: Instant::default(),
        lost: false,
        hold: Hold::No,
        gate: None,
        done: VecDeque::new(),
        statuses: VecDeque::new(),
    })
}

/// State of the disk's ownership: whether this host may write the disk, or another host may own the
/// disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hold {
    /// This host may write the disk.
    No,
    /// Another host may own the disk. hob closes a connection with unanswered changes, and does not
    /// connect again until the driver is resumed.
    Back,
    /// Another host owns the disk, so this backing must never write the disk again.
    Lost,
}

enum State {
    /// The backing is not attached to a shard yet.
    Detached(Link),
    Connected(Box<Connection>),
    /// Waiting until the I/O ring has returned all operations of a closed connection.
    Draining(Fd),
    /// Waiting until the time to connect again.
    Pausing(Instant),
    Connecting(Attempt, Fd),
    /// After a reconnection the server exports a different disk, so all I/O fails.
    Dead,
    /// Waiting for the I/O ring's last operations before the backing is closed.
    Closing(Option<Fd>),
    Closed,
}

struct Connection {
    fd: Fd,
    /// Socket to the server, if the connection is encrypted.
    wire: Option<Wire>,
    decoder: ReplyDecoder,
    /// Receive buffer; `None` while the I/O ring receives into it.
    rx: Option<RxBuf>,
    /// Requests to send; `None` while the I/O ring sends them.
    gather: Option<Gather>,
    /// The part of a buffer into which the rest of the present payload is received.
    place: BufferSlice,
    /// Progress of the server's shutdown, after its reply NBD_ESHUTDOWN. No further request is
    /// sent.
    shutdown: Option<Shutdown>,
}

/// Progress of a shutdown that the server announced.
#[derive(Clone, Copy, Debug)]
enum Shutdown {
    /// A reply announced the server's shutdown.
    Announced,
    /// The connection ends when all sent requests are answered, or at this time.
    DisconnectBy(Instant),
}

pub(crate) struct NbdBacking {
    info: BackingInfo,
    uri: NbdUri,
    options: BackingOptions,
    negotiated: Negotiated,
    /// Function that ensures that a server is running.
    before_connecting: Option<BeforeConnecting>,
    /// Size of the export that the server reported last, bytes.
    told: Arc<AtomicU64>,
    tokens: Option<TokenSpace>,
    state: State,
    /// Number of operations of the connection in the I/O ring.
    operations: u32,
    /// Pause before the next attempt to connect.
    pause: Duration,
    /// Start of the outage: the time of the last reply before the connection was lost.
    down_since: Option<Instant>,
    jobs: Jobs,
    /// Number of acknowledged changes. All changes of earlier connections together count as one.
    /// `flushed` is the number of these changes that a flush covered.
    changes: u64,
    flushed: u64,
    /// The changes that no flush covers, to repeat them on a new connection.
    unflushed: Unflushed,
    /// The changes that are being repeated on a new connection. Other requests wait until the
    /// server has answered all of them.
    repeat: Option<Repeat>,
    /// The flushes and durable writes (FUA) of the connection, by request slot. The engine orders
    /// its own flushes, but does not know the flushes that this driver sends without an I/O.
    flush_order: FlushOrder<u32, ()>,
    /// Whether a flush for [`Asker::Repeat`] is unanswered.
    is_flushing: bool,
    /// Whether changes of `unflushed` wait for a new connection.
    is_exposed: bool,
    /// Value of `is_exposed` to report; `None` if it has not changed since the last report.
    exposure: Option<bool>,
    /// Time of the last bytes from the server.
    heard_at: Instant,
    /// Whether acknowledged changes may be lost and this was not reported yet.
    lost: bool,
    /// Whether this host may write the disk.
    hold: Hold,
    /// Gate that must be open when changes are sent; `None` outside a cluster.
    gate: Option<Arc<ReplaceableGate>>,
    done: VecDeque<(IoId, Result<(), IoError>)>,
    statuses: VecDeque<(u64, Status)>,
}

impl NbdBacking {
    fn can(&self, flag: TransmissionFlags) -> bool {
        self.negotiated.flags.contains(flag)
    }

    fn tokens(&self) -> TokenSpace {
        self.tokens.expect("a backing is attached before it is used")
    }

    /// Declares the disk writable, although the connected `qemu-nbd` is read-only. A writable
    /// `qemu-nbd` replaces the connected one before the first change.
    pub(crate) fn becomes_writable(&mut self) {
        (self.info.read_only, self.info.can_discard, self.info.can_fast_zero) = (false, true, true);
    }

    /// Sets the device and inode numbers of the image file, and of the files below the image, that
    /// the server has open.
    pub(crate) fn set_files(&mut self, file: Option<FileNumber>, lower_files: Vec<(PathBuf, FileNumber)>) {
        (self.info.file, self.info.lower_files) = (file, lower_files);
    }

    /// Sets a function that is called before each attempt to connect again, in a thread that may
    /// block.
    pub(crate) fn set_before_connecting(&mut self, before: BeforeConnecting) {
        self.before_connecting = Some(before);
    }

    /// Returns true if the present server will be replaced by a writable one.
    fn is_provisional(&self) -> bool {
        !self.info.read_only && self.can(TransmissionFlags::READ_ONLY)
    }

    /// Returns the time at which the oldest unanswered I/O began to wait.
    pub(crate) fn waiting_since(&self) -> Option<Instant> {
        let wait_ns = self.options.wait_max.as_nanos() as u64;
        self.jobs.deadline().map(|deadline| Instant(deadline.0.saturating_sub(wait_ns)))
    }

    /// Returns the time at which a request that begins now fails. `wait_max` counts from the start
    /// of an outage, like iSCSI's replacement timeout. So a guest does not wait `wait_max` again
    /// for the flush after a write.
    fn deadline(&self, now: Instant) -> Instant {
        let wait_ns = self.options.wait_max.as_nanos() as u64;
        match self.down_since {
            None => now + wait_ns,
            Some(since) => (since + wait_ns).max(now + wait_ns.min(GRACE_NS)),
        }
    }

    fn payload_bytes_max(&self) -> u64 {
        let block = u64::from(self.info.block_bytes);
        u64::from(self.negotiated.block_size_max).min(PAYLOAD_BYTES_MAX) / block * block
    }
}

/// Returns the part of an I/O's buffer for `len` bytes of the disk from `offset` on.
fn part(io: &Io, offset: u64, len: u32) -> BufferSlice {
    let slice = io.slice.expect("a transfer has a slice");
    BufferSlice { offset: slice.offset + (offset - io.offset) as u32, len, ..slice }
}

impl Driver for NbdBacking {
    fn info(&self) -> &BackingInfo {
        &self.info
    }

    fn attach(&mut self, ring: &mut Ring, now: Instant, tokens: TokenSpace) {
        self.tokens = Some(tokens);
        if let State::Detached(link) = std::mem::replace(&mut self.state, State::Dead) {
            self.start_connection(ring, link);
            self.heard_at = now;
            self.flush_for_repeat(ring, now);
        }
    }

    fn submit(&mut self, ring: &mut Ring, now: Instant, io: &Io) {
        let refused = match self.state {
            State::Dead => Some(IoError::Failed),
            State::Closing(_) | State::Closed => Some(IoError::ShuttingDown),
            _ if self.hold == Hold::Lost => Some(IoError::ShuttingDown),
            _ if self.info.read_only && !matches!(io.op, IoOp::Read | IoOp::Flush) => Some(IoError::ReadOnly),
            _ if !(io.offset | io.len).is_multiple_of(u64::from(self.info.block_bytes_min)) => {
                Some(IoError::Invalid)
            }
            _ => None,
        };
        if let Some(error) = refused {
            return self.done.push_back((io.id, Err(error)));
        }
        let durable = matches!(io.op, IoOp::Write(Durability::Durable));
        let fua = durable && self.can(TransmissionFlags::SEND_FUA);
        let then_flush = durable && !fua && self.can(TransmissionFlags::SEND_FLUSH);
        let deadline = self.deadline(now);
        let job = self.jobs.add(Asker::Io(io.id), deadline, then_flush, (0, 0));
        let payload_max = self.payload_bytes_max();
        match io.op {
            IoOp::Read => self.ask_range(job, io, |io, at, len| What::Read(part(io, at, len)), payload_max),
            IoOp::Write(_) => {
                let flags = if fua { CommandFlags::FUA } else { CommandFlags::NONE };
                let what = |io: &Io, at, len| What::Write(part(io, at, len), flags);
                self.ask_range(job, io, what, payload_max);
            }
            IoOp::Flush if self.can(TransmissionFlags::SEND_FLUSH) => {
                self.jobs.ask(job, What::Flush { mark: 0, of_write: false }, 0, 0);
            }
            IoOp::Discard if self.can(TransmissionFlags::SEND_TRIM) => {
                self.ask_range(job, io, |_, _, _| What::Trim, COMMAND_BYTES_MAX);
            }
            IoOp::Flush | IoOp::Discard => self.end_or_flush(job),
            IoOp::WriteZeroes(zeroing) => self.ask_zeroes(job, io, zeroing, payload_max),
            IoOp::WriteJournal => unreachable!("journals are on flash"),
        }
        self.send(ring);
    }

    fn handle_completion(&mut self, ring: &mut Ring, now: Instant, completion: Completion) {
        self.operations -= 1;
        let Completion { token, result, returned } = completion;
        if token.index() == CONNECT && matches!(self.state, State::Connecting(..)) {
            return self.end_attempt(ring, now);
        }
        let State::Connected(connection) = &mut self.state else {
            return self.go_on_drained(ring, now);
        };
        let ended = match (token.index(), returned) {
            (SEND, Returned::Gather(gather)) => {
                connection.gather = Some(gather);
                if result >= 0 {
                    self.send(ring);
                    return self.disconnect_if_shut_down(ring, now);
                }
                result
            }
            (RECEIVE, Returned::Rx(rx)) => {
                connection.rx = Some(rx);
                result
            }
            (FILL, _) if result == connection.decoder.payload_pending() as i32 => {
                connection.decoder.payload_received(result as u32);
                result
            }
            _ => result.min(0),
        };
        let digested = match ended {
            1.. => self.digest(ring),
            0 => Err("the server closed the connection".to_owned()),
            error => Err(std::io::Error::from_raw_os_error(-error).to_string()),
        };
        match digested {
            Ok(()) => {
                self.heard_at = now;
                self.flush_for_repeat(ring, now);
                self.disconnect_if_shut_down(ring, now);
            }
            Err(why) => self.break_connection(ring, now, &why),
        }
    }

    fn take_loss(&mut self) -> bool {
        std::mem::take(&mut self.lost)
    }

    fn poll_exposure(&mut self) -> Option<bool> {
        self.exposure.take()
    }

    fn poll_done(&mut self) -> Option<(IoId, Result<(), IoError>)> {
        self.done.pop_front()
    }

    fn poll_timeout(&self) -> Option<Instant> {
        let deadline = self.jobs.deadline();
        match self.state {
            State::Pausing(_) if self.hold != Hold::No => deadline,
            State::Pausing(until) => Some(deadline.map_or(until, |deadline| deadline.min(until))),
            State::Connected(_) => {
                deadline.into_iter().chain(self.disconnect_by()).chain(self.probe_at()).min()
            }
            State::Connecting(..) => deadline,
            _ => None,
        }
    }

    fn handle_timeout(&mut self, ring: &mut Ring, now: Instant) {
        let too_late = self.jobs.deadline().is_some_and(|deadline| deadline <= now);
        match self.state {
            State::Connected(_) if too_late => {
                self.break_connection(ring, now, "requests were not answered in time");
            }
            State::Connected(_) if self.disconnect_by().is_some_and(|by| by <= now) => {
                self.break_connection(ring, now, "the server shuts down and has left requests unanswered");
            }
            State::Connected(_) if self.probe_at().is_some_and(|at| at <= now) => self.probe(ring, now),
            State::Pausing(until) => {
                self.fail_expired(now);
                if until <= now && self.hold == Hold::No {
                    self.start_attempt(ring, now);
                }
            }
            State::Connecting(..) => self.fail_expired(now),
            _ => {}
        }
    }

    fn submit_status(&mut self, ring: &mut Ring, now: Instant, id: u64, offset: u64, len: u64) {
        let gone = matches!(self.state, State::Dead | State::Closing(_) | State::Closed);
        if gone || self.negotiated.meta_context_id.is_none() {
            let data = vec![StatusExtent { len, hole: false, zero: false }];
            return self.statuses.push_back((id, if gone { Err(IoError::Failed) } else { Ok(data) }));
        }
        let block = u64::from(self.info.block_bytes);
        let from = offset / block * block;
        let to = (offset + len).next_multiple_of(block).min(from + COMMAND_BYTES_MAX);
        let deadline = self.deadline(now);
        let job = self.jobs.add(Asker::Status(id), deadline, false, (offset, offset + len));
        self.jobs.ask(job, What::Status, from, (to - from) as u32);
        self.send(ring);
    }

    fn poll_status(&mut self) -> Option<(u64, Status)> {
        self.statuses.pop_front()
    }

    fn close(&mut self, ring: &mut Ring) {
        self.state = match std::mem::replace(&mut self.state, State::Closed) {
            State::Connected(connection) => {
                let Connection { fd, wire, gather, .. } = *connection;
                let is_idle = gather.is_some() && self.jobs.is_empty() && self.repeat.is_none();
                if is_idle {
                    connect::end_politely(ring.borrow(fd));
                }
                ring.shutdown(fd);
                if !is_idle {
                    connect::cut(ring.borrow(fd), wire.as_ref());
                }
                State::Closing(Some(fd))
            }
            State::Draining(fd) => State::Closing(Some(fd)),
            State::Connecting(_, fd) => {
                ring.shutdown(fd);
                State::Closing(Some(fd))
            }
            _ => State::Closing(None),
        };
        self.go_on_drained(ring, Instant::default());
    }

    fn is_closed(&self) -> bool {
        matches!(self.state, State::Closed)
    }

    fn size_probe(&self) -> Option<SizeProbe> {
        Some(SizeProbe::told(&self.told))
    }

    fn set_wait_max(&mut self, now: Instant, change: WaitMax) {
        let before = self.options.wait_max;
        let wait_max = change.after(before);
        self.options.wait_max = wait_max;
        let (before_ns, wait_ns) = match change {
            WaitMax::Expired => (u64::MAX, 0),
            _ => (before.as_nanos() as u64, wait_max.as_nanos() as u64),
        };
        self.jobs.move_deadlines(now, before_ns, wait_ns);
    }

    fn wait_max(&self) -> Option<Duration> {
        Some(self.options.wait_max)
    }

    fn grow(&mut self, size_bytes: u64) {
        self.info.grow(size_bytes);
    }

    fn set_gate(&mut self, _ring: &mut Ring, gate: Arc<dyn Gate>) {
        let known = self.gate.get_or_insert_default();
        known.set(gate);
        if let State::Connected(connection) = &self.state
            && let Some(wire) = &connection.wire
        {
            wire.set_gate(known.clone());
        }
    }

    fn suspend(&mut self, ring: &mut Ring, now: Instant) {
        if self.hold == Hold::No {
            self.hold = Hold::Back;
        }
        // Repeated changes could overwrite newer data of the next owner like other changes.
        if self.jobs.has_changes() || self.is_repeating() {
            self.break_connection(
                ring,
                now,
                "this host may not own the disk any more, and the results of changes in flight are unknown",
            );
        }
    }

    fn is_repeating(&self) -> bool {
        self.repeat.is_some()
    }

    fn resume(&mut self) {
        if self.hold == Hold::Back {
            self.hold = Hold::No;
        }
    }

    fn revoke(&mut self, ring: &mut Ring, now: Instant) {
        self.hold = Hold::Lost;
        match self.state {
            State::Connected(_) => self.break_connection(ring, now, "another host owns the disk"),
            State::Pausing(_) | State::Connecting(..) => self.fail_all(IoError::ShuttingDown),
            _ => {}
        }
    }

    fn read_before_attach(&mut self, offset: u64, bytes: &mut [u8]) -> Result<(), IoError> {
        let limit = self.options.connect_max;
        let mut offset = offset;
        for piece in bytes.chunks_mut(self.payload_bytes_max() as usize) {
            self.read_sample(offset, piece, limit)?;
            offset += piece.len() as u64;
        }
        Ok(())
    }
}
