//! A backing with modelled latency: a slow disk for demonstrations and experiments.
//!
//! The data of a modelled backing is real. Only the completion times come from the model. An I/O
//! completes when both the real backing and the model have completed it.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use hob_engine::io::{Io, IoError, IoOp};
use hob_engine::units::{Instant, IoId};

use super::driver::delegate;
use super::{BackingInfo, ChangeDetector, ChangeMark, Driver, Lock, Reader, SizeProbe, Status, WaitMax};
use crate::ring::{Completion, Ring};
use crate::token::TokenSpace;

/// An operation for a modelled device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelledOp {
    /// A read of data from the device.
    Read,
    /// A write of data to the device.
    Write,
    /// A flush.
    Flush,
    /// A discard or a zeroing.
    Other,
}

/// A model of a device's latency.
pub trait ServiceTime {
    /// Submits an I/O at `now_ns` and returns the time of its end on the same clock. Calls are in
    /// order of time.
    fn submit(&mut self, now_ns: u64, op: ModelledOp, offset: u64, len: u64) -> u64;
}

pub(super) struct Modelled {
    inner: Box<dyn Driver>,
    model: Box<dyn ServiceTime + Send>,
    info: BackingInfo,
    /// Time at which the model completes each I/O.
    due: HashMap<IoId, Instant>,
    /// I/Os that the real backing has completed and the model has not, by the time at which the
    /// model completes them. The number orders I/Os with equal times.
    waiting: BinaryHeap<Reverse<(Instant, u64, IoId)>>,
    /// Errors of failed I/Os that still wait for the model.
    errors: HashMap<IoId, IoError>,
    sequence: u64,
    now: Instant,
    closing: bool,
}

impl Modelled {
    pub(super) fn new(inner: Box<dyn Driver>, model: Box<dyn ServiceTime + Send>) -> Modelled {
        let mut info = inner.info().clone();
        info.description.push_str(", with modelled service times");
        Modelled {
            inner,
            model,
            info,
            due: HashMap::new(),
            waiting: BinaryHeap::new(),
            errors: HashMap::new(),
            sequence: 0,
            now: Instant::default(),
            closing: false,
        }
    }

    fn take_finished(&mut self) {
        while let Some((io, result)) = self.inner.poll_done() {
            let due = self.due.remove(&io).expect("what ends was submitted");
            if let Err(error) = result {
                self.errors.insert(io, error);
            }
            self.waiting.push(Reverse((due, self.sequence, io)));
            self.sequence += 1;
        }
    }
}

impl Driver for Modelled {
    delegate! {
        inner:
        take_loss poll_exposure submit_status poll_status size_probe set_wait_max read_before_attach reader
        witness change_mark lock is_lost is_repeating loss_reason has_lost memory_id
    }

    fn info(&self) -> &BackingInfo {
        &self.info
    }

    fn attach(&mut self, ring: &mut Ring, now: Instant, tokens: TokenSpace) {
        self.now = now;
        self.inner.attach(ring, now, tokens);
    }

    fn submit(&mut self, ring: &mut Ring, now: Instant, io: &Io) {
        self.now = now;
        let op = match io.op {
            IoOp::Read => ModelledOp::Read,
            IoOp::Write(_) => ModelledOp::Write,
            IoOp::Flush => ModelledOp::Flush,
            IoOp::Discard | IoOp::WriteZeroes(_) | IoOp::WriteJournal => ModelledOp::Other,
        };
        let done = self.model.submit(now.0, op, io.offset, io.len);
        self.due.insert(io.id, Instant(done.max(now.0)));
        self.inner.submit(ring, now, io);
        self.take_finished();
    }

    fn handle_completion(&mut self, ring: &mut Ring, now: Instant, completion: Completion) {
        self.now = now;
        self.inner.handle_completion(ring, now, completion);
        self.take_finished();
    }

    fn poll_done(&mut self) -> Option<(IoId, Result<(), IoError>)> {
        let &Reverse((due, _, io)) = self.waiting.peek()?;
        // When a backing is closed, the modelled latency is not waited for.
        if due > self.now && !self.closing {
            return None;
        }
        self.waiting.pop();
        Some((io, self.errors.remove(&io).map_or(Ok(()), Err)))
    }

    fn poll_timeout(&self) -> Option<Instant> {
        let next = self.waiting.peek().map(|Reverse((due, ..))| *due);
        next.into_iter().chain(self.inner.poll_timeout()).min()
    }

    fn handle_timeout(&mut self, ring: &mut Ring, now: Instant) {
        self.now = now;
        self.inner.handle_timeout(ring, now);
        self.take_finished();
    }

    fn close(&mut self, ring: &mut Ring) {
        self.inner.close(ring);
        self.take_finished();
        self.closing = true;
    }

    fn is_closed(&self) -> bool {
        self.inner.is_closed() && self.waiting.is_empty() && self.due.is_empty()
    }

    fn grow(&mut self, size_bytes: u64) {
        self.inner.grow(size_bytes);
        self.info.grow(size_bytes);
    }
}
