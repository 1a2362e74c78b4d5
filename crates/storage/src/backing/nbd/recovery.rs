//! Recovery of a broken NBD connection: closes it, connects again, and decides what happens to its
//! jobs.

use std::time::Duration;

use hob_engine::flush_order::FlushOrder;
use hob_engine::io::IoError;
use hob_engine::units::Instant;
use hob_nbd::TransmissionFlags;
use hob_nbd::client::handshake::Negotiated;

use super::connect::{self, Attempt};
use super::jobs::{Asker, What};
use super::unflushed::Repeat;
use super::{
    CONNECT, Connection, DISCONNECT_MAX_NS, Hold, NbdBacking, PROBE_NS, Shutdown, State, silence_max,
};
use crate::ring::{Fd, FdClass, Ring, RxBuf};

/// Largest payload of a repeated change, bytes.
const REPEATED_BYTES_MAX: u64 = 1 << 20;

impl NbdBacking {
    /// Closes the present connection after a failure.
    pub(super) fn break_connection(&mut self, ring: &mut Ring, now: Instant, why: &str) {
        let State::Connected(connection) = &self.state else { return };
        if self.hold != Hold::Lost && !self.is_provisional() {
            tracing::warn!(
                backing = self.info.description,
                why,
                oldest_request = self.jobs.describe_oldest(),
                "the connection is lost; connecting again"
            );
        }
        let fd = connection.fd;
        ring.shutdown(fd);
        connect::cut(ring.borrow(fd), connection.wire.as_ref());
        self.begin_outage(ring, now, fd, why);
    }

    /// Starts an outage: once the I/O ring has returned the connection's operations, hob connects
    /// again.
    fn begin_outage(&mut self, ring: &mut Ring, now: Instant, fd: Fd, why: &str) {
        let oldest = self.waiting_since().unwrap_or(now).min(now);
        // There is no outage while a server is replaced on purpose, or while another host owns the
        // disk.
        if self.hold != Hold::Lost && !self.is_provisional() {
            self.options.monitor.note_outage(Duration::from_nanos(now - oldest), why);
        }
        if self.hold == Hold::No {
            self.down_since.get_or_insert(oldest);
        }
        self.state = State::Draining(fd);
        self.go_on_drained(ring, now);
    }

    /// Returns the latest time at which the connection to a server that shuts down is closed.
    /// Returns `None` while a change is in flight. If hob closed the connection then, hob would
    /// send the change again to the next server, and the old server could still carry out the
    /// change and overwrite newer data.
    pub(super) fn disconnect_by(&self) -> Option<Instant> {
        match &self.state {
            State::Connected(_) if self.jobs.awaits_changes() || self.awaits_repeated() => None,
            State::Connected(connection) => match connection.shutdown? {
                Shutdown::DisconnectBy(by) => Some(by),
                Shutdown::Announced => None,
            },
            _ => None,
        }
    }

    fn awaits_repeated(&self) -> bool {
        self.repeat.as_ref().is_some_and(Repeat::awaits_replies)
    }

    /// Sends NBD_CMD_DISC to a server that shuts down once all replies have arrived, and closes the
    /// connection.
    pub(super) fn disconnect_if_shut_down(&mut self, ring: &mut Ring, now: Instant) {
        let State::Connected(connection) = &mut self.state else { return };
        let Connection { fd, gather, shutdown: Some(shutdown), .. } = &mut **connection else { return };
        if matches!(shutdown, Shutdown::Announced) {
            *shutdown = Shutdown::DisconnectBy(now + DISCONNECT_MAX_NS);
        }
        let (fd, is_sending) = (*fd, gather.is_none());
        if is_sending || self.awaits_repeated() || self.jobs.awaits_replies() {
            return;
        }
        tracing::warn!(
            backing = self.info.description,
            "the server shuts down; requests wait until it is back"
        );
        connect::end_politely(ring.borrow(fd));
        ring.shutdown(fd);
        self.begin_outage(ring, now, fd, "the server shuts down");
    }

    /// Decides about the requests of a broken connection, once the I/O ring has returned all of its
    /// operations.
    pub(super) fn go_on_drained(&mut self, ring: &mut Ring, now: Instant) {
        if self.operations > 0 {
            return;
        }
        match self.state {
            State::Draining(fd) => {
                ring.detach(fd);
                self.state = State::Pausing(now + self.next_pause());
                self.jobs.send_all_again();
                self.flush_order = FlushOrder::default();
                self.repeat = None;
                let has_unflushed = self.changes > self.flushed && !self.options.keeps_writes;
                if has_unflushed && (self.hold == Hold::Lost || !self.unflushed.are_all_kept(self.flushed)) {
                    self.lose_unflushed();
                } else {
                    self.set_exposed(has_unflushed);
                }
                self.fail_expired(now);
                if self.hold == Hold::Lost {
                    self.fail_all(IoError::ShuttingDown);
                }
            }
            State::Closing(fd) => {
                fd.into_iter().for_each(|fd| ring.detach(fd));
                self.state = State::Closed;
                self.fail_all(IoError::ShuttingDown);
            }
            _ => {}
        }
    }

    /// Reports that the acknowledged changes which no flush covers may be lost. The waiting flushes
    /// fail.
    pub(super) fn lose_unflushed(&mut self) {
        self.set_exposed(false);
        self.unflushed.forget(self.changes);
        (self.flushed, self.lost) = (self.changes, true);
        let unanswered: Vec<u32> = self.jobs.live_requests().collect();
        let flushes: Vec<u32> =
            unanswered.into_iter().filter(|slot| self.jobs.request(*slot).is_flush()).collect();
        self.fail(&flushes, IoError::Failed);
    }

    /// Begins to repeat the acknowledged changes that no flush covers, on a new connection.
    pub(super) fn begin_repeat(&mut self) {
        let repeat = self.unflushed.repeat(self.payload_bytes_max().min(REPEATED_BYTES_MAX));
        if !repeat.is_done() {
            let bytes = self.unflushed.bytes();
            tracing::info!(
                backing = self.info.description,
                bytes,
                "changes that the server had not flushed are repeated"
            );
            self.repeat = Some(repeat);
        } else {
            self.set_exposed(false);
        }
    }

    /// Records whether this process's memory alone has acknowledged changes.
    pub(super) fn set_exposed(&mut self, is_exposed: bool) {
        if std::mem::replace(&mut self.is_exposed, is_exposed) != is_exposed {
            self.exposure = Some(is_exposed);
        }
    }

    /// Flushes the server without a guest's request if changes could otherwise not be repeated.
    pub(super) fn flush_for_repeat(&mut self, ring: &mut Ring, now: Instant) {
        let is_connected = matches!(self.state, State::Connected(_)) && self.hold == Hold::No;
        let is_needed = self.changes > self.flushed && self.unflushed.need_flush(self.flushed);
        if !is_connected
            || !is_needed
            || self.is_flushing
            || self.options.keeps_writes
            || !self.can(TransmissionFlags::SEND_FLUSH)
            || self.is_provisional()
        {
            return;
        }
        self.is_flushing = true;
        let job = self.jobs.add(Asker::Repeat, self.deadline(now), false, (0, 0));
        self.jobs.ask(job, What::Flush { mark: 0, of_write: true }, 0, 0);
        self.send(ring);
    }

    /// Returns the time at which hob asks an idle server whether it still answers. Without these
    /// questions, hob would not notice that an idle server hangs, and a server that shuts down
    /// would wait for hob to disconnect.
    pub(super) fn probe_at(&self) -> Option<Instant> {
        let is_idle = self.jobs.is_empty() && self.repeat.is_none() && self.hold == Hold::No;
        let can_be_asked =
            self.negotiated.meta_context_id.is_some() || self.can(TransmissionFlags::SEND_FLUSH);
        let is_probed = is_idle && can_be_asked && !self.options.keeps_writes && !self.is_provisional();
        is_probed.then_some(self.heard_at + PROBE_NS)
    }

    /// Asks an idle server for the status of its first block, or for a flush if the server does not
    /// report status.
    pub(super) fn probe(&mut self, ring: &mut Ring, now: Instant) {
        self.options.monitor.note_question(now);
        let job = self.jobs.add(Asker::Probe, self.deadline(now), false, (0, 0));
        match self.negotiated.meta_context_id {
            Some(_) => self.jobs.ask(job, What::Status, 0, self.info.block_bytes.max(512)),
            None => self.jobs.ask(job, What::Flush { mark: 0, of_write: true }, 0, 0),
        }
        self.send(ring);
    }

    /// Returns a random pause, nanoseconds: at least half of `pause` and at most all of it. Doubles
    /// `pause` for the next call, up to `reconnect_max`.
    fn next_pause(&mut self) -> u64 {
        let mut rng = [0];
        let _ = rustix::rand::getrandom(&mut rng, rustix::rand::GetRandomFlags::empty());
        let nanos = self.pause.as_nanos() as u64;
        self.pause = (self.pause * 2).min(self.options.reconnect_max);
        nanos / 2 + nanos / 2 * u64::from(rng[0]) / 255
    }

    /// Ends these requests with `error`. None of them was sent on the present connection.
    fn fail(&mut self, slots: &[u32], error: IoError) {
        self.jobs.unqueue(slots);
        for slot in slots {
            self.end_request_unsent(*slot, error);
        }
    }

    fn end_request_unsent(&mut self, slot: u32, error: IoError) {
        self.flush_order.forget(slot);
        let (job, is_last) = self.jobs.end_request(slot, Err(error));
        if is_last {
            self.end_or_flush(job);
        }
    }

    pub(super) fn fail_expired(&mut self, now: Instant) {
        let expired = self.jobs.expired(now);
        self.fail(&expired, IoError::Failed);
    }

    pub(super) fn fail_all(&mut self, error: IoError) {
        let all: Vec<u32> = self.jobs.live_requests().collect();
        self.fail(&all, error);
    }

    pub(super) fn start_attempt(&mut self, ring: &mut Ring, now: Instant) {
        let before = self.before_connecting.clone();
        match Attempt::start(before, &self.uri, self.options.connect_max, silence_max(&self.options)) {
            Ok((attempt, socket)) => {
                let fd = ring.attach(socket, FdClass::Socket);
                self.operations += 1;
                ring.recv(self.tokens().token(CONNECT), fd, RxBuf::new(1));
                self.state = State::Connecting(attempt, fd);
            }
            Err(error) => {
                tracing::warn!(%error, "cannot start a thread to connect to the backing; retrying");
                self.state = State::Pausing(now + self.next_pause());
            }
        }
    }

    pub(super) fn end_attempt(&mut self, ring: &mut Ring, now: Instant) {
        let State::Connecting(attempt, fd) = std::mem::replace(&mut self.state, State::Dead) else {
            unreachable!("only an attempt ends an attempt")
        };
        ring.detach(fd);
        match attempt.result() {
            // The outage may have begun earlier.
            Ok(_) if self.hold != Hold::No => self.state = State::Pausing(now),
            Ok(link) if !self.is_same_disk(&link.negotiated) => {
                let (was, is) = (self.info.size_bytes, link.negotiated.size_bytes);
                tracing::error!(
                    backing = self.info.description,
                    was,
                    is,
                    "the server is back, but its disk is another one or smaller; I/O fails until \
                    the disk is removed and added again"
                );
                self.options.monitor.note_failed(&format!(
                    "the server is back with another or a smaller disk ({is} bytes instead of {was})"
                ));
                self.fail_all(IoError::Failed);
            }
            Ok(link) => {
                let (was, is) = (self.info.size_bytes, link.negotiated.size_bytes);
                if !self.is_provisional() {
                    tracing::info!(backing = self.info.description, "connected again");
                }
                if is > was {
                    tracing::warn!(
                        backing = self.info.description,
                        was,
                        is,
                        "the export has grown; run 'hob disk resize' to grow the disk"
                    );
                }
                self.start_connection(ring, link);
                self.heard_at = now;
                self.flush_for_repeat(ring, now);
            }
            Err(why) => {
                tracing::debug!(backing = self.info.description, why, "connecting failed");
                self.options.monitor.note_outage(Duration::ZERO, &why);
                self.state = State::Pausing(now + self.next_pause());
            }
        }
    }

    fn is_same_disk(&self, new: &Negotiated) -> bool {
        let writable = !new.flags.contains(TransmissionFlags::READ_ONLY);
        new.size_bytes >= self.info.size_bytes
            && new.block_size_min <= self.info.block_bytes
            && new.block_size_max >= self.info.block_bytes
            && (writable || self.info.read_only)
    }
}
