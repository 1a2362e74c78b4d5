//! Sends requests to a connected NBD server and receives replies.

use std::sync::atomic::Ordering;

use hob_engine::gather::Gather;
use hob_engine::io::{BufferSlice, IoError};
use hob_nbd::client::reply::{ReplyDecoder, ReplyEvent, ReplyLimits};
use hob_nbd::client::request;
use hob_nbd::{CommandFlags, ErrorCode, Extent, TransmissionFlags};

use super::connect::Link;
use super::jobs::{Job, Jobs, What};
use super::unflushed::{Content, Repeat, push_zeroes};
use super::{Connection, FILL, NbdBacking, RECEIVE, SEND, Shutdown, State};
use crate::backing::StatusExtent;
use crate::ring::{FdClass, Ring, RxBuf};

/// Size of the receive buffer, bytes. Larger payload is received directly into its destination.
const RX_BYTES: usize = 64 << 10;

/// Largest number of bytes in one send.
const BATCH_BYTES_MAX: usize = 1 << 20;

/// Maximum number of extents in one reply to a status query.
const EXTENTS_MAX: usize = 1 << 16;

impl NbdBacking {
    pub(super) fn start_connection(&mut self, ring: &mut Ring, link: Link) {
        self.options.monitor.note_connected();
        let fd = ring.attach(link.socket, FdClass::Socket);
        let limits = ReplyLimits { extents_max: EXTENTS_MAX };
        let decoder = ReplyDecoder::new(&link.negotiated, limits);
        self.negotiated = link.negotiated;
        self.told.store(self.negotiated.size_bytes, Ordering::Relaxed);
        let place = ring.zeroes(0);
        self.operations = 1;
        ring.recv(self.tokens().token(RECEIVE), fd, RxBuf::new(RX_BYTES));
        if let (Some(wire), Some(gate)) = (&link.wire, &self.gate) {
            wire.set_gate(gate.clone());
        }
        let gather = Some(Gather::default());
        let connection = Connection { fd, wire: link.wire, decoder, rx: None, gather, place, shutdown: None };
        self.state = State::Connected(Box::new(connection));
        if !self.can(TransmissionFlags::SEND_FUA) {
            self.jobs.replace_fua(self.can(TransmissionFlags::SEND_FLUSH));
        }
        self.begin_repeat();
        self.send(ring);
    }

    /// Sends the queued bytes unless a send is in progress.
    pub(super) fn send(&mut self, ring: &mut Ring) {
        let tokens = self.tokens();
        let State::Connected(connection) = &mut self.state else { return };
        // Other requests follow when the server has answered the repeated changes.
        let has_to_send = self.repeat.as_ref().map_or(self.jobs.has_to_send(), Repeat::has_to_send);
        if !has_to_send || connection.shutdown.is_some() {
            return;
        }
        let Some(mut gather) = connection.gather.take() else { return };
        gather.clear();
        let mut bytes = 0;
        let mut has_changes = self.repeat.is_some();
        while bytes < BATCH_BYTES_MAX {
            let pushed = match &mut self.repeat {
                Some(repeat) => repeat.push_next(&mut gather, ring),
                None => self.jobs.next_to_send().map(|slot| {
                    let request = self.jobs.request(slot);
                    has_changes |= request.is_change();
                    if request.is_durable() {
                        self.flush_order.begin(slot);
                    }
                    push_request(&mut gather, &mut self.jobs, slot, ring, self.changes)
                }),
            };
            let Some(pushed) = pushed else { break };
            bytes += pushed;
        }
        self.operations += 1;
        let gate = self.gate.clone().filter(|_| has_changes).map(|gate| gate as _);
        ring.send_through(tokens.token(SEND), connection.fd, gather, gate);
    }

    /// Decodes received bytes and continues to receive. An error is a text for users, and ends the
    /// connection.
    pub(super) fn digest(&mut self, ring: &mut Ring) -> Result<(), String> {
        let mut at = 0;
        loop {
            let State::Connected(connection) = &mut self.state else { return Ok(()) };
            let Connection { decoder, rx, place, .. } = &mut **connection;
            let bytes = &rx.as_ref().expect("nothing is being received").filled()[at..];
            let event = decoder.poll_event();
            let pending = decoder.payload_pending().min(bytes.len() as u32);
            if let Some(event) = event {
                self.handle_event(ring, event);
            } else if pending > 0 {
                let part = BufferSlice { len: pending, ..*place };
                ring.arena_mut().slice_mut(part).copy_from_slice(&bytes[..pending as usize]);
                decoder.payload_received(pending);
                (place.offset, place.len) = (place.offset + pending, place.len - pending);
                at += pending as usize;
            } else if bytes.is_empty() || decoder.payload_pending() > 0 {
                break;
            } else {
                let (jobs, repeat) = (&self.jobs, &self.repeat);
                let in_flight = |cookie| match repeat {
                    Some(repeat) if Repeat::has(cookie) => repeat.expected(cookie),
                    _ => jobs.expected(cookie),
                };
                at += decoder.handle_input(bytes, &in_flight).map_err(|error| error.to_string())?;
            }
        }
        let tokens = self.tokens();
        let State::Connected(connection) = &mut self.state else { return Ok(()) };
        let rx = connection.rx.as_mut().expect("nothing is being received");
        rx.consume(at);
        self.operations += 1;
        if connection.decoder.payload_pending() > 0 {
            let part = BufferSlice { len: connection.decoder.payload_pending(), ..connection.place };
            ring.recv_into(tokens.token(FILL), connection.fd, part);
        } else {
            let rx = connection.rx.take().expect("as just seen");
            ring.recv(tokens.token(RECEIVE), connection.fd, rx);
        }
        self.send(ring);
        Ok(())
    }

    fn handle_event(&mut self, ring: &mut Ring, event: ReplyEvent) {
        const KNOWN: &str = "the decoder checks cookies";
        match event {
            ReplyEvent::Data { cookie, offset, length } => {
                let request = self.jobs.find(cookie).expect(KNOWN);
                let place = read_place(&mut self.jobs, request, offset, length);
                if let State::Connected(connection) = &mut self.state {
                    connection.place = place;
                }
            }
            ReplyEvent::Hole { cookie, offset, length } => {
                let request = self.jobs.find(cookie).expect(KNOWN);
                let place = read_place(&mut self.jobs, request, offset, length);
                ring.arena_mut().slice_mut(place).fill(0);
            }
            ReplyEvent::BlockStatus { cookie, extents } => {
                let request = self.jobs.find(cookie).expect(KNOWN);
                let first = self.jobs.request(request).offset;
                let job = self.jobs.request(request).job;
                self.jobs.job(job).clip_extents(first, &extents);
            }
            ReplyEvent::Error { code, message, .. } if !message.is_empty() => {
                tracing::debug!(
                    backing = self.info.description,
                    ?code,
                    message,
                    "the server reports an error"
                );
            }
            ReplyEvent::Error { .. } => {}
            ReplyEvent::Done { cookie, error } if Repeat::has(cookie) => self.repeated(cookie, error),
            ReplyEvent::Done { cookie, error: Some(ErrorCode::Shutdown) } => {
                let request = self.jobs.find(cookie).expect(KNOWN);
                self.jobs.request(request).sent = false;
                if let State::Connected(connection) = &mut self.state {
                    connection.shutdown.get_or_insert(Shutdown::Announced);
                }
            }
            ReplyEvent::Done { cookie, error } => {
                (self.pause, self.down_since) = (self.options.reconnect_min, None);
                let request = self.jobs.find(cookie).expect(KNOWN);
                match error {
                    None => self.keep_change(ring, request),
                    Some(_) => self.note_refused(request),
                }
                let is_sync = self.jobs.request(request).is_durable();
                if is_sync && self.flush_order.end(request) && error.is_none() {
                    self.flush_order.hold(request, ());
                    self.jobs.hold(request);
                } else {
                    self.end_request(request, error.map_or(Ok(()), |code| Err(io_error(code))));
                }
                while let Some((request, ())) = self.flush_order.poll_released() {
                    self.end_request(request, Ok(()));
                }
            }
        }
    }

    /// Stores an acknowledged change in memory until a flush covers it. A durable write is stored
    /// too if earlier changes are stored, because it may overwrite one of them.
    fn keep_change(&mut self, ring: &Ring, slot: u32) {
        if self.options.keeps_writes {
            return;
        }
        let request = self.jobs.request(slot);
        let (content, is_durable) = match request.what {
            What::Write(slice, flags) => {
                (Content::Data(ring.arena().slice(slice).into()), flags.contains(CommandFlags::FUA))
            }
            What::WriteZeroData => (Content::ZeroData, false),
            What::WriteZeroes(flags) => {
                let keep = flags.contains(CommandFlags::NO_HOLE);
                (Content::Zeroes(if keep { CommandFlags::NO_HOLE } else { CommandFlags::NONE }), false)
            }
            What::Trim => (Content::Trim, false),
            What::Read(_) | What::Flush { .. } | What::Status => return,
        };
        let range = request.offset..request.offset + u64::from(request.len);
        if !is_durable {
            self.unflushed.push(self.changes + 1, range, content);
        } else if self.changes > self.flushed {
            self.unflushed.push(self.changes, range, content);
        }
    }

    /// Handles the reply to a repeated change: success, or an error of the server.
    fn repeated(&mut self, cookie: u64, error: Option<ErrorCode>) {
        let Some(repeat) = &mut self.repeat else { return };
        repeat.answer(cookie);
        // Changes that were refused because the server shuts down are repeated on the next
        // connection.
        let shuts_down = matches!(&self.state, State::Connected(connection) if connection.shutdown.is_some());
        match error {
            None if repeat.is_done() && !shuts_down => self.set_exposed(false),
            None => {}
            Some(ErrorCode::Shutdown) => {
                if let State::Connected(connection) = &mut self.state {
                    connection.shutdown.get_or_insert(Shutdown::Announced);
                }
            }
            // The loss was reported already.
            Some(_) if self.changes == self.flushed => {}
            Some(code) => {
                tracing::warn!(
                    backing = self.info.description,
                    ?code,
                    "the server refuses to repeat a change that it may have lost"
                );
                repeat.drop_unsent();
                self.lose_unflushed();
            }
        }
        self.repeat.take_if(|repeat| repeat.is_done());
    }
}

fn read_place(jobs: &mut Jobs, slot: u32, offset: u64, len: u32) -> BufferSlice {
    let request = jobs.request(slot);
    let What::Read(slice) = request.what else { unreachable!("the decoder knows which requests are reads") };
    BufferSlice { offset: slice.offset + (offset - request.offset) as u32, len, ..slice }
}

/// Appends a request to the send queue, and returns its length in bytes.
fn push_request(gather: &mut Gather, jobs: &mut Jobs, slot: u32, ring: &Ring, changes: u64) -> usize {
    let cookie = jobs.cookie(slot);
    let request = jobs.request(slot);
    let (offset, len) = (request.offset, request.len);
    let header = match &mut request.what {
        What::Read(_) => request::read(cookie, offset, len, CommandFlags::NONE),
        What::Write(_, flags) => request::write_header(cookie, offset, len, *flags),
        What::WriteZeroData => request::write_header(cookie, offset, len, CommandFlags::NONE),
        What::WriteZeroes(flags) => request::write_zeroes(cookie, offset, len, *flags),
        What::Trim => request::trim(cookie, offset, len, CommandFlags::NONE),
        What::Flush { mark, .. } => {
            *mark = changes;
            request::flush(cookie)
        }
        What::Status => request::block_status(cookie, offset, len, CommandFlags::NONE),
    };
    gather.push_head(|head| head.extend_from_slice(&header));
    match request.what {
        What::Write(slice, _) => gather.push_payload(slice),
        What::WriteZeroData => push_zeroes(gather, ring, len),
        _ => return header.len(),
    }
    header.len() + len as usize
}

pub(super) fn io_error(code: ErrorCode) -> IoError {
    match code {
        ErrorCode::Perm => IoError::ReadOnly,
        ErrorCode::NoSpc => IoError::NoSpace,
        ErrorCode::NotSup => IoError::Unsupported,
        ErrorCode::Inval => IoError::Invalid,
        ErrorCode::Io | ErrorCode::NoMem | ErrorCode::Overflow | ErrorCode::Shutdown => IoError::Failed,
    }
}

impl Job {
    /// Stores the server's extents, which start at `at`, clipped to the job's range.
    fn clip_extents(&mut self, at: u64, extents: &[Extent]) {
        let (from, to) = self.range;
        let mut at = at;
        self.extents.clear();
        for extent in extents {
            let end = at + u64::from(extent.length);
            let (first, last) = (at.max(from), end.min(to));
            if first < last {
                let is = |bit| extent.state & bit != 0;
                let (hole, zero) = (is(Extent::HOLE), is(Extent::ZERO));
                self.extents.push(StatusExtent { len: last - first, hole, zero });
            }
            at = end;
        }
    }
}
