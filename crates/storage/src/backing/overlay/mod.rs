//! The backing of a clone whose parent is another disk of this host. Blocks that were never written
//! in the clone are read from the parent's disk (docs/decisions/0020).
//!
//! | | goes to |
//! |---|---|
//! | read of the clone's own data | the own backing |
//! | read of the parent's data | the parent's disk; if that is unavailable, the own backing, which can read the same data |
//! | read of both | each part as in the two rows above |
//! | change | the own backing; the range is marked as the clone's own *before* the change is sent |
//! | flush | the own backing |
//!
//! [`OwnMap`] records which objects are the clone's own. The engine never has a read and a change
//! of one sector in flight at once. The parent's data never changes. So the parent's disk may be
//! serving a read of some sectors while the guest writes other sectors of the same object.
//!
//! A backing can be a clone if it can [tell](Driver::parent) which of its data is its own. The code
//! that uses this backing sends the reads of parent data to the parent's disk.

mod map;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use hob_engine::io::{BufferSlice, Io, IoError, IoOp};
use hob_engine::units::{Instant, IoId, SECTOR_BYTES};

use super::driver::delegate;
use super::{
    BackingInfo, ChangeDetector, ChangeMark, Driver, Lock, ParentRead, Reader, SizeProbe, Status, WaitMax,
};
use crate::ring::{Completion, Gate, Ring};
use crate::token::TokenSpace;
pub use map::{BlockOrigin, OwnMap, Part};

/// Bit that is set in the ids of partial reads from the own backing. The engine's own ids are
/// smaller.
const PART: u32 = 1 << 31;

/// A read in progress of which the parent has some data.
struct Split {
    io: Io,
    /// Number of parts of the read (ranges in clone or parent) that have not been read yet.
    pending: u32,
    result: Result<(), IoError>,
    /// Sectors that the parent's disk served: `first..end`.
    shared: Vec<(u64, u64)>,
}

/// A part of a split read.
struct Piece {
    of: IoId,
    part: Part,
}

pub(super) struct Overlay {
    own: Box<dyn Driver>,
    map: OwnMap,
    /// Whether the parent's disk is available.
    linked: bool,
    splits: HashMap<IoId, Split>,
    pieces: HashMap<u32, Piece>,
    last_piece: u32,
    /// Reads that the caller has to send to the parent's disk.
    out: VecDeque<ParentRead>,
    done: VecDeque<(IoId, Result<(), IoError>)>,
    /// Sectors that the parent served, for each successful read that was not queried yet.
    shared: HashMap<IoId, Vec<(u64, u64)>>,
    closing: bool,
}

impl Overlay {
    pub(super) fn new(own: Box<dyn Driver>, map: OwnMap) -> Overlay {
        Overlay {
            own,
            map,
            linked: false,
            splits: HashMap::new(),
            pieces: HashMap::new(),
            last_piece: 0,
            out: VecDeque::new(),
            done: VecDeque::new(),
            shared: HashMap::new(),
            closing: false,
        }
    }

    fn read(&mut self, ring: &mut Ring, now: Instant, io: &Io) {
        self.map.cut(self.own.common_bytes());
        let parts: Vec<Part> = match self.linked && !self.map.is_empty() {
            true => self.map.split(io.offset, io.len).collect(),
            false => Vec::new(),
        };
        if parts.iter().all(|part| part.whose == BlockOrigin::Own) {
            return self.own.submit(ring, now, io);
        }
        assert!(io.id.0 & PART == 0, "{:?} is a name of ours", io.id);
        let pending = parts.len() as u32;
        self.splits.insert(io.id, Split { io: *io, pending, result: Ok(()), shared: Vec::new() });
        for part in parts {
            self.last_piece = (self.last_piece + 1) & !PART;
            let number = self.last_piece;
            self.pieces.insert(number, Piece { of: io.id, part });
            match part.whose {
                BlockOrigin::Own => self.read_own(ring, now, number),
                BlockOrigin::Parent => {
                    let slice = slice_of(io, part);
                    self.out.push_back(ParentRead {
                        number,
                        io: io.id,
                        offset: part.offset,
                        len: part.len,
                        slice,
                    });
                }
            }
        }
    }

    /// Reads a part from the own backing, even if it is the parent's data.
    fn read_own(&mut self, ring: &mut Ring, now: Instant, number: u32) {
        let Piece { of, part } = &self.pieces[&number];
        let io = &self.splits[of].io;
        let slice = Some(slice_of(io, *part));
        let io = Io { id: IoId(number | PART), offset: part.offset, len: part.len, slice, ..*io };
        self.own.submit(ring, now, &io);
    }

    /// Handles the end of a part of a read.
    fn piece_ended(&mut self, number: u32, result: Result<(), IoError>, was_shared: bool) {
        let Piece { of, part } = self.pieces.remove(&number).expect("a part ends once");
        let split = self.splits.get_mut(&of).expect("its parts have not all ended");
        split.pending -= 1;
        split.result = split.result.and(result);
        if was_shared {
            split.shared.push((part.offset / SECTOR_BYTES, (part.offset + part.len) / SECTOR_BYTES));
        }
        if split.pending == 0 {
            let Split { result, shared, .. } = self.splits.remove(&of).expect("just looked at");
            if result.is_ok() && !shared.is_empty() {
                self.shared.insert(of, shared);
            }
            self.done.push_back((of, result));
        }
    }
}

/// Returns the part of the I/O's buffer for a part of the read.
fn slice_of(io: &Io, part: Part) -> BufferSlice {
    let whole = io.slice.expect("reads have a buffer");
    BufferSlice {
        id: whole.id,
        offset: whole.offset + (part.offset - io.offset) as u32,
        len: part.len as u32,
    }
}

impl Driver for Overlay {
    delegate! {
        own:
        info attach handle_completion take_loss poll_exposure poll_timeout handle_timeout submit_status
        poll_status set_gate suspend resume is_repeating revoke read_before_attach reader witness change_mark
        lock size_probe grow set_wait_max wait_max constant common_bytes is_lost loss_reason has_lost memory_id
    }

    fn submit(&mut self, ring: &mut Ring, now: Instant, io: &Io) {
        match io.op {
            IoOp::Read => self.read(ring, now, io),
            IoOp::Flush => self.own.submit(ring, now, io),
            _ => {
                self.map.take(io.offset, io.len);
                let is_own = |part: Part| part.whose == BlockOrigin::Own;
                assert!(self.map.split(io.offset, io.len).all(is_own), "what is written is noted before");
                self.own.submit(ring, now, io);
            }
        }
    }

    fn poll_done(&mut self) -> Option<(IoId, Result<(), IoError>)> {
        loop {
            if let Some(done) = self.done.pop_front() {
                return Some(done);
            }
            match self.own.poll_done()? {
                (id, result) if id.0 & PART != 0 => self.piece_ended(id.0 & !PART, result, false),
                done => return Some(done),
            }
        }
    }

    fn take_shared(&mut self, io: IoId) -> Vec<(u64, u64)> {
        if self.shared.is_empty() { Vec::new() } else { self.shared.remove(&io).unwrap_or_default() }
    }

    fn poll_parent_read(&mut self) -> Option<ParentRead> {
        self.out.pop_front()
    }

    fn handle_parent_read(
        &mut self,
        ring: &mut Ring,
        now: Instant,
        number: u32,
        result: Result<(), IoError>,
    ) {
        match result {
            Ok(()) => self.piece_ended(number, Ok(()), true),
            Err(_) if self.closing => self.piece_ended(number, Err(IoError::ShuttingDown), false),
            // The clone's own backing reaches the same bytes in another way.
            Err(_) => self.read_own(ring, now, number),
        }
    }

    fn link_parent(&mut self, parent_bytes: Option<u64>) {
        if let Some(bytes) = parent_bytes {
            // Past the end of its parent, a larger clone reads as zeroes.
            self.map.cut(bytes);
        }
        self.linked = parent_bytes.is_some();
    }

    fn close(&mut self, ring: &mut Ring) {
        self.closing = true;
        for read in std::mem::take(&mut self.out) {
            self.piece_ended(read.number, Err(IoError::ShuttingDown), false);
        }
        self.own.close(ring);
    }

    /// Closing waits for reads at the parent's disk, because they use the clone's buffers.
    fn is_closed(&self) -> bool {
        self.pieces.is_empty() && self.own.is_closed()
    }
}

#[cfg(test)]
mod tests;
