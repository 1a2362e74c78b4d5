//! The backing of a disk that comes from another host: first that host, then the disk's own backing, and for a while both.
//!
//! | | reads | everything else |
//! |---|---|---|
//! | in standby | of the peer; of the own backing what the peer says it has not cached, for it is not the peer's disk any more then | refused |
//! | taken over, while the peer serves what it has in flash | of the peer where it is said to have all, and nobody wrote since; else, or if the peer fails, of the own backing | of the own backing |
//! | alone | of the own backing | of the own backing |
//!
//! The peer's flash is as good as the backing for what was not written since it gave the disk away: everything it had changed
//! was written through, and flushed. What is written here leaves the map of the peer's places before it is issued; the
//! engine has no read and write of one sector in flight at once.
//!
//! A peer that fails once after the disk was taken over is left. The own backing is opened without its [lock](super::Lock).

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use hob_engine::io::{Io, IoError, IoOp};
use hob_engine::units::{Instant, IoId, SECTOR_BYTES};

use super::{BackingInfo, ChangeMark, Driver, Lock, Reader, Status, StatusExtent};
use crate::ring::{Completion, Ring};
use crate::token::{Token, TokenSpace};

/// A guest that could have its data from the own backing waits no longer for the peer.
const PEER_WAIT_MAX: Duration = Duration::from_secs(3);

/// Places on the disk that are told apart, at most.
const PLACES_MAX: u64 = 1 << 22;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Standby,
    Taken,
}

pub(super) struct Handover {
    own: Box<dyn Driver>,
    /// Until it is closed.
    peer: Option<Box<dyn Driver>>,
    /// It takes no more.
    peer_left: bool,
    phase: Phase,
    places: Places,
    /// Reads that the peer was asked for.
    asked: HashMap<IoId, Io>,
    done: VecDeque<(IoId, Result<(), IoError>)>,
    statuses: VecDeque<(u64, Status)>,
    closing: bool,
}

impl Handover {
    pub(super) fn new(peer: Box<dyn Driver>, own: Box<dyn Driver>) -> Handover {
        let places = Places::new(own.info().size_bytes);
        Handover {
            own,
            peer: Some(peer),
            peer_left: false,
            phase: Phase::Standby,
            places,
            asked: HashMap::new(),
            done: VecDeque::new(),
            statuses: VecDeque::new(),
            closing: false,
        }
    }

    /// Is that for the peer?
    fn is_for_peer(&self, io: &Io) -> bool {
        let first = io.offset / SECTOR_BYTES;
        let end = (io.offset + io.len).div_ceil(SECTOR_BYTES);
        let has_all = || !self.peer_left && self.places.has_all(first, end);
        io.op == IoOp::Read && (self.phase == Phase::Standby || has_all())
    }

    /// Takes what the peer has finished, and asks the own backing for what it could not give.
    fn collect(&mut self, ring: &mut Ring, now: Instant) {
        while let Some((io, result)) = self.peer.as_mut().and_then(|peer| peer.poll_done()) {
            let read = self.asked.remove(&io).expect("what ends was asked for");
            let is_uncached = result == Err(IoError::Unsupported);
            match result {
                Err(_) if self.closing => self.done.push_back((io, result)),
                Err(error) if is_uncached || self.phase == Phase::Taken => {
                    if !is_uncached && !self.peer_left {
                        tracing::warn!("the host that had the disk does not deliver any more ({error:?})");
                        self.leave_peer(ring);
                    }
                    self.own.submit(ring, now, &read);
                }
                result => self.done.push_back((io, result)),
            }
        }
        if self.peer_left && self.peer.as_ref().is_some_and(|peer| peer.is_closed()) && self.asked.is_empty() {
            self.peer = None;
        }
    }

    fn leave_peer(&mut self, ring: &mut Ring) {
        self.peer_left = true;
        self.places = Places::default();
        if let Some(peer) = &mut self.peer {
            peer.close(ring);
        }
    }
}

impl Driver for Handover {
    fn info(&self) -> &BackingInfo {
        self.own.info()
    }

    fn attach(&mut self, ring: &mut Ring, now: Instant, tokens: TokenSpace) {
        self.own.attach(ring, now, tokens);
        if let Some(peer) = &mut self.peer {
            peer.attach(ring, now, tokens.of_kind(Token::PEER));
        }
    }

    fn submit(&mut self, ring: &mut Ring, now: Instant, io: &Io) {
        if self.is_for_peer(io)
            && let Some(peer) = &mut self.peer
        {
            self.asked.insert(io.id, *io);
            peer.submit(ring, now, io);
            return self.collect(ring, now);
        }
        if self.phase == Phase::Standby {
            return self.done.push_back((io.id, Err(IoError::ShuttingDown)));
        }
        if !matches!(io.op, IoOp::Read | IoOp::Flush) {
            self.places.remove(io.offset / SECTOR_BYTES, (io.offset + io.len).div_ceil(SECTOR_BYTES));
        }
        self.own.submit(ring, now, io);
    }

    fn handle_completion(&mut self, ring: &mut Ring, now: Instant, completion: Completion) {
        if completion.token.kind() != Token::PEER {
            return self.own.handle_completion(ring, now, completion);
        }
        if let Some(peer) = &mut self.peer {
            peer.handle_completion(ring, now, completion);
        }
        self.collect(ring, now);
    }

    fn poll_done(&mut self) -> Option<(IoId, Result<(), IoError>)> {
        self.done.pop_front().or_else(|| self.own.poll_done())
    }

    fn poll_timeout(&self) -> Option<Instant> {
        let peer = self.peer.as_ref().and_then(|peer| peer.poll_timeout());
        self.own.poll_timeout().into_iter().chain(peer).min()
    }

    fn handle_timeout(&mut self, ring: &mut Ring, now: Instant) {
        if self.own.poll_timeout().is_some_and(|at| at <= now) {
            self.own.handle_timeout(ring, now);
        }
        if let Some(peer) = &mut self.peer
            && peer.poll_timeout().is_some_and(|at| at <= now)
        {
            peer.handle_timeout(ring, now);
        }
        self.collect(ring, now);
    }

    fn submit_status(&mut self, ring: &mut Ring, now: Instant, id: u64, offset: u64, len: u64) {
        match self.phase {
            Phase::Standby => {
                let all = StatusExtent { len, hole: false, zero: false };
                self.statuses.push_back((id, Ok(vec![all])));
            }
            Phase::Taken => self.own.submit_status(ring, now, id, offset, len),
        }
    }

    fn poll_status(&mut self) -> Option<(u64, Status)> {
        self.statuses.pop_front().or_else(|| self.own.poll_status())
    }

    fn close(&mut self, ring: &mut Ring) {
        self.closing = true;
        self.leave_peer(ring);
        self.collect(ring, Instant::default());
        self.own.close(ring);
    }

    fn is_closed(&self) -> bool {
        self.peer.as_ref().is_none_or(|peer| peer.is_closed()) && self.own.is_closed()
    }

    fn read_before_attach(&mut self, offset: u64, bytes: &mut [u8]) -> Result<(), IoError> {
        self.own.read_before_attach(offset, bytes)
    }

    fn reader(&self) -> Option<Box<dyn Reader>> {
        self.own.reader()
    }

    fn change_mark(&self) -> Option<ChangeMark> {
        self.own.change_mark()
    }

    fn lock(&self) -> Option<Lock> {
        self.own.lock()
    }

    fn peer_has(&mut self, first: u64, end: u64) {
        if !self.peer_left {
            self.places.insert(first, end);
        }
    }

    fn take_over(&mut self, ring: &mut Ring, now: Instant) {
        self.phase = Phase::Taken;
        if let Some(peer) = &mut self.peer {
            peer.be_hasty(PEER_WAIT_MAX);
        }
        self.collect(ring, now);
    }

    fn leave_peer(&mut self, ring: &mut Ring, now: Instant) {
        if !self.peer_left {
            Handover::leave_peer(self, ring);
        }
        self.collect(ring, now);
    }

    fn has_peer(&self) -> bool {
        !self.peer_left
    }
}

/// A set of sectors, in regions on a large disk: what is put in may bring neighbours with it, and so may what is taken out.
#[derive(Default)]
struct Places {
    /// log2 of the sectors in a region.
    shift: u32,
    words: Vec<u64>,
}

impl Places {
    fn new(disk_bytes: u64) -> Places {
        let sectors = disk_bytes.div_ceil(SECTOR_BYTES).max(1);
        let shift = sectors.div_ceil(PLACES_MAX).next_power_of_two().ilog2();
        Places { shift, words: vec![0; (sectors >> shift) as usize / 64 + 1] }
    }

    fn regions(&self, first: u64, end: u64) -> std::ops::Range<u64> {
        let all = self.words.len() as u64 * 64;
        (first >> self.shift).min(all)..end.div_ceil(1 << self.shift).min(all)
    }

    fn insert(&mut self, first: u64, end: u64) {
        for region in self.regions(first, end) {
            self.words[(region / 64) as usize] |= 1 << (region % 64);
        }
    }

    fn remove(&mut self, first: u64, end: u64) {
        for region in self.regions(first, end) {
            self.words[(region / 64) as usize] &= !(1 << (region % 64));
        }
    }

    fn has_all(&self, first: u64, end: u64) -> bool {
        let mut regions = self.regions(first, end);
        !self.words.is_empty()
            && regions.all(|region| self.words[(region / 64) as usize] >> (region % 64) & 1 == 1)
    }
}

#[cfg(test)]
mod tests;
