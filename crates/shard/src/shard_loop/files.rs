//! The FUSE connections of a shard's disks that are mounted as files.
//!
//! Each read of /dev/fuse returns one request and each write sends one reply. Reads and writes of
//! /dev/fuse are non-blocking. The shard therefore uses plain system calls, and the I/O ring only
//! polls for new requests.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::io::IoSlice;
use std::os::fd::OwnedFd;
use std::time::SystemTime;

use hob_engine::Engine;
use hob_engine::io::Reply;
use hob_engine::units::{DiskId, Instant, SessionId};
use hob_frontends::fuse::{Attributes, MESSAGE_BYTES_MAX, NUMBER_BIT, Session, Taken};
use hob_storage::ring::{Completion, Fd, FdClass, Ring};
use hob_storage::token::Token;
use rustix::io::Errno;

use super::gate::{Gate, may_have_room, ungated};
use super::recorders::Recorders;
use crate::api::{FileAtRest, FileRights};

/// Kind of the I/O ring's tokens that identify polls of FUSE connections.
pub(super) const MESSAGE: u16 = Token::CALLER + 0x100;

/// Maximum number of messages one FUSE connection handles before other connections are served.
const BATCH_MAX: u32 = 64;

struct File {
    session: Session,
    rights: FileRights,
    fd: Fd,
    /// True while the I/O ring polls for a message.
    awaited: bool,
    /// True if a message may be available.
    ready: bool,
    /// A message that could not be handled because no buffer was free.
    stuck: Option<Vec<u8>>,
    /// Size of the buffer that the disk's share had no room for.
    lacking: Option<usize>,
    listed: bool,
}

/// All FUSE connections of a shard, by number.
pub(super) struct Files {
    files: Vec<Option<File>>,
    /// Ended sessions with their disks, to be reported to the engine.
    pub(super) ended: Vec<(DiskId, SessionId)>,
    active: VecDeque<u16>,
    /// Buffer for messages read from /dev/fuse.
    input: Vec<u8>,
    /// Connections with requests that wait because the engine or the buffer arena was full.
    refused: Vec<u16>,
    /// True if buffers or requests were released since the refused connections were last checked.
    room: bool,
    /// True while no new message is read.
    resting: bool,
    /// Moving average of the number of unanswered requests of a connection when a new one arrives,
    /// in 256ths, including the new one.
    overlap: u32,
}

impl Default for Files {
    fn default() -> Files {
        Files {
            files: Vec::new(),
            ended: Vec::new(),
            active: VecDeque::new(),
            // Allocated with the first file, because most shards have none.
            input: Vec::new(),
            refused: Vec::new(),
            room: false,
            resting: false,
            overlap: 256,
        }
    }
}

impl Files {
    /// Serves a disk through the file that the kernel mounted for `device`. Returns the session.
    pub(super) fn attach(
        &mut self,
        ring: &mut Ring,
        disk: DiskId,
        device: OwnedFd,
        file: Attributes,
        rights: FileRights,
    ) -> SessionId {
        if self.input.is_empty() {
            self.input = vec![0; MESSAGE_BYTES_MAX];
        }
        let number = self.files.iter().position(Option::is_none).unwrap_or_else(|| {
            self.files.push(None);
            self.files.len() - 1
        }) as u16;
        self.files[usize::from(number)] = Some(File {
            session: Session::new(disk, u32::from(number), file, rights.read_only).promoting(rights.promote),
            rights,
            fd: ring.attach(device, FdClass::Device),
            awaited: false,
            ready: true,
            stuck: None,
            lacking: None,
            listed: false,
        });
        self.list(number);
        SessionId(u32::from(number) | NUMBER_BIT)
    }

    /// Closes the FUSE connections of a disk. Programs that have the file open receive errors from
    /// now on.
    pub(super) fn close(&mut self, ring: &mut Ring, disk: DiskId) {
        for number in 0..self.files.len() {
            if self.files[number].as_ref().is_some_and(|file| file.session.disk() == disk) {
                self.end(number as u16, ring);
            }
        }
    }

    /// Changes the size of a disk's file.
    pub(super) fn grow(&mut self, disk: DiskId, size_bytes: u64) {
        for number in 0..self.files.len() {
            if let Some(file) = self.files[number].as_mut().filter(|file| file.session.disk() == disk) {
                file.session.grow(size_bytes);
                self.list(number as u16);
            }
        }
    }

    /// Stops or resumes reading new messages.
    pub(super) fn set_resting(&mut self, resting: bool, ring: &mut Ring) {
        self.resting = resting;
        for number in 0..self.files.len() {
            let Some(file) = &mut self.files[number] else { continue };
            if resting && file.awaited {
                ring.shutdown(file.fd);
            }
            file.ready = true;
            self.list(number as u16);
        }
    }

    /// Returns true if reading new requests is stopped and all earlier ones are answered.
    pub(super) fn are_at_rest(&self) -> bool {
        self.files.iter().flatten().all(|file| self.resting && file.is_at_rest())
    }

    /// Hands over the quiesced FUSE connections.
    pub(super) fn hand_over(&mut self, ring: &mut Ring) -> Vec<FileAtRest> {
        let mut all = Vec::new();
        for number in 0..self.files.len() {
            let Some(file) = self.files[number].as_ref().filter(|file| file.is_at_rest()) else { continue };
            let device = match ring.borrow(file.fd).try_clone_to_owned() {
                Ok(device) => device,
                Err(error) => {
                    tracing::warn!("cannot hand over a mounted file: {error}");
                    continue;
                }
            };
            all.push(FileAtRest { device, file: *file.session.file(), rights: file.rights.clone() });
            ring.detach(file.fd);
            self.refused.retain(|refused| usize::from(*refused) != number);
            self.active.retain(|active| usize::from(*active) != number);
            let disk = file.session.disk();
            self.ended.push((disk, SessionId(number as u32 | NUMBER_BIT)));
            self.files[number] = None;
        }
        all
    }

    /// Handles a poll that reports a message.
    pub(super) fn handle_completion(&mut self, completion: &Completion) {
        let number = completion.token.owner();
        let file = self.files[usize::from(number)].as_mut().expect("files outlive their I/O");
        file.awaited = false;
        file.ready = true;
        self.list(number);
    }

    /// Handles the engine's reply to a request.
    #[inline]
    pub(super) fn handle_reply(&mut self, number: u32, reply: &Reply, ring: &mut Ring) {
        let file = self.files[number as usize].as_mut().expect("files outlive their requests");
        file.session.handle_reply(reply, &mut ungated(ring));
        self.list(number as u16);
        self.room = true;
    }

    /// Records that the engine may accept requests again, or that a buffer may be free.
    pub(super) fn retry_refused(&mut self) {
        self.room = true;
    }

    /// Puts the connections of disks whose share has room again on the list of connections with
    /// work.
    fn retry_held_up(&mut self, ring: &Ring, engine: &Engine) {
        if !std::mem::take(&mut self.room) {
            return;
        }
        for number in std::mem::take(&mut self.refused) {
            let Some(file) = &self.files[usize::from(number)] else { continue };
            let disk = file.session.disk();
            let has_buffer = file.lacking.is_none_or(|len| may_have_room(ring.arena(), disk, len));
            match has_buffer && engine.has_room(disk) {
                true => self.list(number),
                false => self.refused.push(number),
            }
        }
    }

    /// Returns true if requests arrive before earlier ones are answered.
    pub(super) fn requests_overlap(&self) -> bool {
        self.overlap > 256 + 8
    }

    /// Runs every FUSE connection that has work. Returns false if no connection has work.
    pub(super) fn pump(
        &mut self,
        now: Instant,
        ring: &mut Ring,
        engine: &mut Engine,
        recorders: &mut Recorders,
    ) -> bool {
        let mut progress = false;
        self.retry_held_up(ring, engine);
        // Connections with more than one batch wait for the next turn.
        for _ in 0..self.active.len() {
            let Some(number) = self.active.pop_front() else { break };
            progress = true;
            self.pump_one(now, number, ring, engine, recorders);
        }
        progress
    }

    fn pump_one(
        &mut self,
        now: Instant,
        number: u16,
        ring: &mut Ring,
        engine: &mut Engine,
        recorders: &mut Recorders,
    ) {
        let one_by_one = !self.requests_overlap();
        let Some(file) = self.files[usize::from(number)].as_mut() else { return };
        file.listed = false;
        file.write_answers(ring);
        let mut messages = 0;
        let mut progress = Progress::More;
        while progress == Progress::More && messages < BATCH_MAX {
            messages += 1;
            progress = file.take_message(&mut self.input, self.resting, ring, engine);
            if progress == Progress::More && one_by_one {
                // Another request is unlikely. A poll by the I/O ring is cheaper than a read that
                // finds nothing.
                file.ready = false;
            }
            while let Some(request) = file.session.poll_request() {
                let unanswered = file.session.in_flight().min(64) as u32;
                self.overlap = (self.overlap * 15 + unanswered * 256) / 16;
                let command = file.session.command_begun_by(&request);
                if let Err(request) = engine.handle_request(now, request) {
                    file.session.unpoll_request(request);
                    progress = Progress::Refused;
                    break;
                }
                if let (Some(command), Some(mut recording)) = (command, recorders.of(file.session.disk())) {
                    recording.note_file(&command);
                }
            }
        }
        file.write_answers(ring);
        match progress {
            Progress::More => self.list(number),
            Progress::Refused if self.refused.contains(&number) => {}
            Progress::Refused => self.refused.push(number),
            Progress::Wait => {
                if !file.awaited {
                    file.awaited = true;
                    ring.readable(Token::new(MESSAGE, number, 0), file.fd);
                }
            }
            // The reply to an earlier request puts this connection on the list again.
            Progress::Full => {}
            Progress::Gone => self.end(number, ring),
        }
        self.forget_ended(number, ring);
    }

    /// Ends a FUSE connection. The kernel is notified when the engine has no request of the
    /// connection any more.
    fn end(&mut self, number: u16, ring: &mut Ring) {
        let Some(file) = self.files[usize::from(number)].as_mut() else { return };
        if !file.session.is_dead() {
            file.write_answers(ring);
            file.session.end(&mut ungated(ring));
            file.stuck = None;
            ring.shutdown(file.fd);
        }
        self.list(number);
    }

    /// Removes an ended connection when none of its I/O is in flight.
    fn forget_ended(&mut self, number: u16, ring: &mut Ring) {
        let slot = &mut self.files[usize::from(number)];
        let Some(file) = slot else { return };
        if !file.session.is_dead() {
            return;
        }
        if !file.awaited && file.session.in_flight() == 0 {
            ring.detach(file.fd);
            self.ended.push((file.session.disk(), SessionId(u32::from(number) | NUMBER_BIT)));
            self.refused.retain(|refused| *refused != number);
            self.active.retain(|active| *active != number);
            *slot = None;
        }
    }

    fn list(&mut self, number: u16) {
        if let Some(file) = &mut self.files[usize::from(number)]
            && !file.listed
        {
            file.listed = true;
            self.active.push_back(number);
        }
    }
}

/// Result of looking for the next FUSE message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    /// Another message may be available.
    More,
    /// The kernel has no message.
    Wait,
    /// The session is full until a reply is sent.
    Full,
    /// The message waits for a free buffer.
    Refused,
    /// The file was unmounted.
    Gone,
}

impl File {
    /// Returns true if another process can continue the FUSE connection.
    fn is_at_rest(&self) -> bool {
        let session = &self.session;
        !self.awaited && self.stuck.is_none() && session.is_at_rest() && !session.is_dead()
    }

    /// Reads and handles the next message, if there is one.
    fn take_message(
        &mut self,
        input: &mut [u8],
        resting: bool,
        ring: &mut Ring,
        engine: &Engine,
    ) -> Progress {
        if self.session.is_dead() || self.session.is_full() {
            return Progress::Full;
        }
        if let Some(message) = self.stuck.take() {
            return self.handle(Cow::Owned(message), ring, engine);
        }
        if resting {
            return Progress::Full;
        }
        if !self.ready {
            return if self.awaited { Progress::Full } else { Progress::Wait };
        }
        match rustix::io::read(ring.borrow(self.fd), &mut *input) {
            Ok(count) => self.handle(Cow::Borrowed(&input[..count]), ring, engine),
            Err(Errno::AGAIN) => {
                self.ready = false;
                Progress::Wait
            }
            // The kernel interrupted or withdrew a request.
            Err(Errno::INTR | Errno::NOENT) => Progress::More,
            Err(Errno::NODEV) => Progress::Gone,
            Err(errno) => {
                tracing::error!("cannot read from /dev/fuse: {errno}; the file is no longer served");
                Progress::Gone
            }
        }
    }

    fn handle(&mut self, message: Cow<'_, [u8]>, ring: &mut Ring, engine: &Engine) -> Progress {
        if Session::asks_for_times(&message)
            && let Some(changes) = engine.changes(self.session.disk())
        {
            self.session.note_changes(changes, unix_ns());
        }
        let mut gate = Gate::new(ring, self.session.disk(), self.session.held_bytes(), true);
        match self.session.handle_message(&message, &mut gate) {
            Taken::Done => Progress::More,
            Taken::NoBuffer => {
                self.lacking = gate.lacking();
                self.stuck = Some(message.into_owned());
                Progress::Refused
            }
        }
    }

    fn write_answers(&mut self, ring: &mut Ring) {
        while let Some((answer, payload)) = self.session.poll_answer() {
            let device = ring.borrow(self.fd);
            let result = match payload {
                None => rustix::io::write(device, answer.bytes()),
                Some(slice) => {
                    let parts = [IoSlice::new(answer.bytes()), IoSlice::new(ring.arena().slice(slice))];
                    rustix::io::writev(device, &parts)
                }
            };
            match result {
                // The kernel returns these errors if the requesting program has ended or the file
                // was unmounted.
                Ok(_) | Err(Errno::NOENT | Errno::NODEV | Errno::PERM) => {}
                Err(errno) => tracing::error!(?answer, "cannot write a reply to /dev/fuse: {errno}"),
            }
            self.session.handle_written(payload, &mut ungated(ring));
        }
    }
}

/// Returns the time of the host's clock, nanoseconds since 1970.
fn unix_ns() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
}
