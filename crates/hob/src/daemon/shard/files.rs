//! The disks of a shard that are files: their FUSE connections.
//!
//! /dev/fuse gives one request per read and takes one answer per write, and neither ever waits here. So the shard does both
//! itself, with plain system calls; the ring only says when there is something to read.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::io::IoSlice;
use std::os::fd::OwnedFd;

use hob_engine::Engine;
use hob_engine::io::Reply;
use hob_engine::units::{DiskId, Instant, SessionId};
use hob_frontends::fuse::{Attributes, MESSAGE_BYTES_MAX, NUMBER_BIT, Session, Taken};
use hob_storage::ring::{Completion, Fd, FdClass, Ring};
use hob_storage::token::Token;
use rustix::io::Errno;

use super::clients::{Gate, may_have_room, ungated};
use super::recorders::Recorders;
use crate::daemon::shard_api::{FileAtRest, FileRights};

/// Kind of the tokens of these connections.
pub(super) const MESSAGE: u16 = Token::CALLER + 0x100;

/// Messages that one connection may bring in before others have their turn.
const BATCH_MAX: u32 = 64;

struct File {
    session: Session,
    rights: FileRights,
    fd: Fd,
    /// The ring says when there is a message.
    awaited: bool,
    /// There may be one.
    ready: bool,
    /// A message for which there was no room.
    stuck: Option<Vec<u8>>,
    /// Bytes that its disk's share had no room for.
    lacking: Option<usize>,
    listed: bool,
}

/// All of them, by number.
pub(super) struct Files {
    files: Vec<Option<File>>,
    /// Sessions that have ended, with their disks.
    pub(super) ended: Vec<(DiskId, SessionId)>,
    active: VecDeque<u16>,
    /// Where messages are read to.
    input: Vec<u8>,
    /// The engine was full, or there was no buffer: these hold requests.
    refused: Vec<u16>,
    /// Something was given back since they were looked at.
    room: bool,
    /// Nothing new is read.
    resting: bool,
    /// Requests of a connection that are unanswered when one comes, itself included: a moving average in 256ths.
    overlap: u32,
}

impl Default for Files {
    fn default() -> Files {
        Files {
            files: Vec::new(),
            ended: Vec::new(),
            active: VecDeque::new(),
            // Made with the first file: most shards have none.
            input: Vec::new(),
            refused: Vec::new(),
            room: false,
            resting: false,
            overlap: 256,
        }
    }
}

impl Files {
    /// Serves a disk to whoever opens the file that the kernel has mounted for `device`. Returns the session of its requests.
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

    /// Ends the connections of a disk: whoever has the file open gets errors from now on.
    pub(super) fn close(&mut self, ring: &mut Ring, disk: DiskId) {
        for number in 0..self.files.len() {
            if self.files[number].as_ref().is_some_and(|file| file.session.disk() == disk) {
                self.end(number as u16, ring);
            }
        }
    }

    /// A disk has that many bytes now.
    pub(super) fn grow(&mut self, disk: DiskId, size_bytes: u64) {
        for number in 0..self.files.len() {
            if let Some(file) = self.files[number].as_mut().filter(|file| file.session.disk() == disk) {
                file.session.grow(size_bytes);
                self.list(number as u16);
            }
        }
    }

    /// From now on nothing new is read, or it is again.
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

    /// Has everything been answered?
    pub(super) fn are_at_rest(&self) -> bool {
        self.files.iter().flatten().all(|file| self.resting && file.is_at_rest())
    }

    /// Lets go of those at rest.
    pub(super) fn hand_over(&mut self, ring: &mut Ring) -> Vec<FileAtRest> {
        let mut all = Vec::new();
        for number in 0..self.files.len() {
            let Some(file) = self.files[number].as_ref().filter(|file| file.is_at_rest()) else { continue };
            let device = match ring.borrow(file.fd).try_clone_to_owned() {
                Ok(device) => device,
                Err(error) => {
                    tracing::warn!("a file cannot be handed over: {error}");
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

    /// The ring has an answer.
    pub(super) fn handle_completion(&mut self, completion: &Completion) {
        let number = completion.token.owner();
        let file = self.files[usize::from(number)].as_mut().expect("files outlive their I/O");
        file.awaited = false;
        file.ready = true;
        self.list(number);
    }

    /// The engine answers.
    #[inline]
    pub(super) fn handle_reply(&mut self, number: u32, reply: &Reply, ring: &mut Ring) {
        let file = self.files[number as usize].as_mut().expect("files outlive their requests");
        file.session.handle_reply(reply, &mut ungated(ring));
        self.list(number as u16);
        self.room = true;
    }

    /// There may be room for a buffer, and in the engine.
    pub(super) fn retry_refused(&mut self) {
        self.room = true;
    }

    /// Lists those whose disks have room again.
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

    /// Do requests come before earlier ones are answered?
    pub(super) fn requests_overlap(&self) -> bool {
        self.overlap > 256 + 8
    }

    /// Lets every connection with something to do go on. False when there is none.
    pub(super) fn pump(
        &mut self,
        now: Instant,
        ring: &mut Ring,
        engine: &mut Engine,
        recorders: &mut Recorders,
    ) -> bool {
        let mut progress = false;
        self.retry_held_up(ring, engine);
        // Those that come back for another batch wait for the next round.
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
            progress = file.take_message(&mut self.input, self.resting, ring);
            if progress == Progress::More && one_by_one {
                // There is hardly another: the ring finds out for less than a read in vain.
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
            // An answer to an earlier one brings it back here.
            Progress::Full => {}
            Progress::Gone => self.end(number, ring),
        }
        self.forget_ended(number, ring);
    }

    /// Ends a connection. The kernel is told when nothing of it is with the engine any more.
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

    /// Forgets a connection of which nothing is in flight.
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

/// What can come next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    /// Perhaps another message.
    More,
    /// Nothing before the kernel has one.
    Wait,
    /// Nothing before an answer.
    Full,
    /// Nothing before there is room.
    Refused,
    /// Nothing any more: the file is unmounted.
    Gone,
}

impl File {
    /// Can somebody else go on with it?
    fn is_at_rest(&self) -> bool {
        let session = &self.session;
        !self.awaited && self.stuck.is_none() && session.is_at_rest() && !session.is_dead()
    }

    /// Takes the next message in, if there is one.
    fn take_message(&mut self, input: &mut [u8], resting: bool, ring: &mut Ring) -> Progress {
        if self.session.is_dead() || self.session.is_full() {
            return Progress::Full;
        }
        if let Some(message) = self.stuck.take() {
            return self.handle(Cow::Owned(message), ring);
        }
        if resting {
            return Progress::Full;
        }
        if !self.ready {
            return if self.awaited { Progress::Full } else { Progress::Wait };
        }
        match rustix::io::read(ring.borrow(self.fd), &mut *input) {
            Ok(count) => self.handle(Cow::Borrowed(&input[..count]), ring),
            Err(Errno::AGAIN) => {
                self.ready = false;
                Progress::Wait
            }
            // A request was taken back at that moment.
            Err(Errno::INTR | Errno::NOENT) => Progress::More,
            Err(Errno::NODEV) => Progress::Gone,
            Err(errno) => {
                tracing::error!("reading from /dev/fuse: {errno}; the file is given up");
                Progress::Gone
            }
        }
    }

    fn handle(&mut self, message: Cow<'_, [u8]>, ring: &mut Ring) -> Progress {
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
                // Whoever asked may be gone, and so may the file.
                Ok(_) | Err(Errno::NOENT | Errno::NODEV | Errno::PERM) => {}
                Err(errno) => tracing::error!(?answer, "writing an answer to /dev/fuse: {errno}"),
            }
            self.session.handle_written(payload, &mut ungated(ring));
        }
    }
}
