//! The backing of a disk that migrates from another host. At first this backing reads only from
//! that host, the *peer*. After the takeover, it reads from the peer and from the disk's own
//! backing. At last, it reads only from the own backing.
//!
//! | phase | reads | changes | flushes |
//! |---|---|---|---|
//! | in standby | from the peer, which owns the disk; reads wait for a working peer | refused | of the own backing |
//! | taken over, former owner as peer | see below | to the own backing | of the own backing |
//! | alone | from the own backing | to the own backing | of the own backing |
//!
//! Reads in standby wait for the peer as long as the disk's requests wait for a backing.
//!
//! After the takeover, sectors that the former owner has and that were not written since are read
//! from the former owner. All other sectors are read from the own backing.
//!
//! At the hand-over hob disconnects the peer, because the peer does not own the disk any more and
//! could send old data. hob then connects to the same host again, as the former owner. The former
//! owner wrote all changes through and flushed them before the hand-over. So for sectors that were
//! not written since the hand-over, the former owner's flash is as current as the backing. A write
//! on this host is recorded before it is issued. The written sectors are not read from a peer
//! again, even if the peer lists them later ([`RemainingRanges`]). The engine never has a read and
//! a write of one sector in flight at once.
//!
//! After the hand-over a peer is disconnected at its first failure. The own backing is opened
//! without its [lock](super::Lock).

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use hob_engine::io::{Io, IoError, IoOp};
use hob_engine::migration::RemainingRanges;
use hob_engine::units::{Instant, IoId, SECTOR_BYTES};

use super::driver::delegate;
use super::{
    BackingInfo, ChangeDetector, ChangeMark, Driver, Lock, Reader, SizeProbe, Status, StatusExtent, WaitMax,
};
use crate::ring::{Completion, Gate, Ring};
use crate::token::{Token, TokenSpace};

/// Longest wait for a peer if this host's own backing also has the data.
const PEER_WAIT_MAX: Duration = Duration::from_secs(3);

/// Pause before a read that failed in standby is retried, nanoseconds.
const RETRY_NS: u64 = 100_000_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Standby,
    Taken,
}

/// A read that was not answered yet.
#[derive(Clone, Copy, Debug)]
struct Read {
    io: Io,
    /// Time at which the read was submitted.
    since: Instant,
    /// Time at which the read fails if the disk is still in standby.
    deadline: Instant,
}

pub(super) struct Handover {
    own: Box<dyn Driver>,
    peer: Option<Box<dyn Driver>>,
    /// Disconnected peers that are not closed yet, each with the kind of its tokens.
    left: Vec<(u16, Box<dyn Driver>)>,
    /// Token kind of the peer's operations.
    kind: u16,
    tokens: Option<TokenSpace>,
    phase: Phase,
    /// Time for which hob retries a read in standby that the owner could not serve, nanoseconds.
    wait_ns: u64,
    /// Sectors that the former owner may have in flash, and that were not written since the
    /// hand-over.
    left_behind: RemainingRanges,
    /// Reads that were sent to the peer and have not ended.
    asked: HashMap<IoId, Read>,
    /// Reads that wait for a peer to connect.
    held: VecDeque<Read>,
    retry_at: Option<Instant>,
    done: VecDeque<(IoId, Result<(), IoError>)>,
    statuses: VecDeque<(u64, Status)>,
    closing: bool,
}

impl Handover {
    /// Creates the backing in standby. `wait_max` limits how long reads wait for the owner.
    pub(super) fn new(own: Box<dyn Driver>, wait_max: Duration) -> Handover {
        let left_behind = RemainingRanges::new(own.info().size_bytes);
        Handover {
            own,
            peer: None,
            left: Vec::new(),
            kind: Token::PEER,
            tokens: None,
            phase: Phase::Standby,
            wait_ns: wait_max.as_nanos() as u64,
            left_behind,
            asked: HashMap::new(),
            held: VecDeque::new(),
            retry_at: None,
            done: VecDeque::new(),
            statuses: VecDeque::new(),
            closing: false,
        }
    }

    /// Handles completions of the peers, and submits failed reads to another source. A disconnected
    /// peer ends its requests before it is dropped.
    fn collect(&mut self, ring: &mut Ring, now: Instant) {
        loop {
            let peers = self.left.iter_mut().map(|(_, peer)| peer).chain(&mut self.peer);
            let ended: Vec<_> = peers.flat_map(|peer| std::iter::from_fn(|| peer.poll_done())).collect();
            if ended.is_empty() {
                break;
            }
            for (io, result) in ended {
                let read = self.asked.remove(&io).expect("what ends was asked for");
                match result {
                    Err(error) if !self.closing => self.failed(ring, now, read, error),
                    result => self.done.push_back((io, result)),
                }
            }
        }
        self.left.retain(|(_, peer)| !peer.is_closed());
    }

    /// Handles a read that failed at the peer: sends it to the own backing, or in standby retries
    /// it until its deadline.
    fn failed(&mut self, ring: &mut Ring, now: Instant, read: Read, error: IoError) {
        match self.phase {
            Phase::Standby if read.deadline <= now => self.done.push_back((read.io.id, Err(error))),
            Phase::Standby => {
                self.held.push_back(read);
                self.retry_at.get_or_insert(now + RETRY_NS);
            }
            Phase::Taken => {
                let is_uncached = error == IoError::Unsupported;
                if !is_uncached && self.peer.is_some() {
                    tracing::warn!("the former owner of the disk no longer answers reads ({error:?})");
                    self.drop_peer(ring);
                }
                self.own.submit(ring, now, &read.io);
            }
        }
    }

    fn drop_peer(&mut self, ring: &mut Ring) {
        if let Some(mut peer) = self.peer.take() {
            peer.close(ring);
            self.left.push((self.kind, peer));
        }
    }

    fn ask(&mut self, ring: &mut Ring, now: Instant, read: Read) {
        match &mut self.peer {
            Some(peer) => {
                self.asked.insert(read.io.id, read);
                peer.submit(ring, now, &read.io);
            }
            None => self.held.push_back(read),
        }
    }

    /// Submits reads that wait for a peer: to the peer or to the own backing. Fails reads that
    /// waited too long.
    fn retry(&mut self, ring: &mut Ring, now: Instant) {
        self.retry_at = None;
        for read in std::mem::take(&mut self.held) {
            match self.phase {
                Phase::Taken => self.own.submit(ring, now, &read.io),
                Phase::Standby if read.deadline <= now => {
                    self.done.push_back((read.io.id, Err(IoError::Failed)));
                }
                Phase::Standby => self.ask(ring, now, read),
            }
        }
        self.collect(ring, now);
    }
}

impl Driver for Handover {
    delegate! {
        own:
        info take_loss poll_exposure set_gate suspend resume is_repeating revoke read_before_attach reader
        witness change_mark is_lost loss_reason has_lost memory_id lock size_probe grow
    }

    fn attach(&mut self, ring: &mut Ring, now: Instant, tokens: TokenSpace) {
        self.tokens = Some(tokens);
        self.own.attach(ring, now, tokens);
    }

    fn submit(&mut self, ring: &mut Ring, now: Instant, io: &Io) {
        let first = io.offset / SECTOR_BYTES;
        let end = (io.offset + io.len).div_ceil(SECTOR_BYTES);
        let has_all = || self.peer.is_some() && self.left_behind.has_all(first, end);
        if io.op == IoOp::Read && (self.phase == Phase::Standby || has_all()) {
            self.ask(ring, now, Read { io: *io, since: now, deadline: now + self.wait_ns });
            return self.collect(ring, now);
        }
        // An earlier process of this host may have written to the disk, and may have crashed before
        // it could record that this host owns the disk.
        if self.phase == Phase::Standby && io.op != IoOp::Flush {
            return self.done.push_back((io.id, Err(IoError::ShuttingDown)));
        }
        if !matches!(io.op, IoOp::Read | IoOp::Flush) {
            self.left_behind.changed(first, end);
        }
        self.own.submit(ring, now, io);
    }

    fn handle_completion(&mut self, ring: &mut Ring, now: Instant, completion: Completion) {
        let kind = completion.token.kind();
        if kind == Token::BACKING {
            return self.own.handle_completion(ring, now, completion);
        }
        let left = self.left.iter_mut().find(|(of, _)| *of == kind).map(|(_, peer)| peer);
        if let Some(peer) = left.or(self.peer.as_mut()) {
            peer.handle_completion(ring, now, completion);
        }
        self.collect(ring, now);
    }

    fn poll_done(&mut self) -> Option<(IoId, Result<(), IoError>)> {
        self.done.pop_front().or_else(|| self.own.poll_done())
    }

    fn poll_timeout(&self) -> Option<Instant> {
        let peer = self.peer.as_ref().and_then(|peer| peer.poll_timeout());
        let held = self.held.iter().map(|read| read.deadline).min();
        [self.own.poll_timeout(), peer, held, self.retry_at].into_iter().flatten().min()
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
        let is_due = self.held.iter().any(|read| read.deadline <= now);
        if is_due || self.retry_at.is_some_and(|at| at <= now) {
            self.retry(ring, now);
        }
    }

    fn set_wait_max(&mut self, now: Instant, change: WaitMax) {
        self.own.set_wait_max(now, change);
        self.wait_ns = change.after(Duration::from_nanos(self.wait_ns)).as_nanos() as u64;
        for read in self.held.iter_mut().chain(self.asked.values_mut()) {
            read.deadline = match change {
                WaitMax::Expired => now,
                _ => read.since + self.wait_ns,
            };
        }
        if change == WaitMax::Expired
            && let Some(peer) = &mut self.peer
        {
            peer.set_wait_max(now, change);
        }
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
        self.drop_peer(ring);
        self.collect(ring, Instant::default());
        let held = self.held.drain(..).map(|read| (read.io.id, Err(IoError::ShuttingDown)));
        self.done.extend(held);
        self.own.close(ring);
    }

    fn is_closed(&self) -> bool {
        self.left.iter().all(|(_, peer)| peer.is_closed()) && self.own.is_closed()
    }

    fn peer_has(&mut self, first: u64, end: u64) {
        self.left_behind.listed(first, end);
    }

    fn set_peer(&mut self, ring: &mut Ring, now: Instant, mut peer: Box<dyn Driver>) {
        self.drop_peer(ring);
        // Abandoned operations may still be in the I/O ring.
        let is_free = |kind: &u16| self.left.iter().all(|(of, _)| of != kind);
        let Some(kind) = (Token::PEER..=Token::PEER_LAST).find(is_free) else { return };
        self.kind = kind;
        if self.phase == Phase::Taken {
            peer.set_wait_max(now, WaitMax::AtMost(PEER_WAIT_MAX));
        }
        peer.attach(ring, now, self.tokens.expect("attached before").of_kind(kind));
        self.peer = Some(peer);
        self.retry(ring, now);
    }

    fn take_over(&mut self, ring: &mut Ring, now: Instant) {
        self.phase = Phase::Taken;
        self.drop_peer(ring);
        self.retry(ring, now);
    }

    fn leave_peer(&mut self, ring: &mut Ring, now: Instant) {
        self.drop_peer(ring);
        if self.phase == Phase::Taken {
            self.left_behind = RemainingRanges::default();
        }
        self.collect(ring, now);
    }

    fn has_peer(&self) -> bool {
        self.peer.is_some()
    }
}

#[cfg(test)]
mod tests;
