//! Simulates reads directly into guest memory. The guest may write to the memory while the engine
//! reads flash into it.
//!
//! If the guest writes before the checksums are computed, the checksums are wrong. The engine must
//! then neither use the data nor drop the cached data as damaged. Guest writes after the checksums
//! are computed have no effect on the engine. The engine must not read the guest memory after the
//! reply, so the simulation overwrites it with noise. If the engine declines a read into guest
//! memory, the simulation sends the read again with a daemon buffer. The model counts the declined
//! read and the repeated read as one read.

use std::collections::VecDeque;
use std::ops::Range;

use hob_engine::io::{IoError, Op, PayloadMemory, Request};
use hob_engine::units::{DiskId, RequestId, SECTOR_BYTES};

use super::traffic::Buffer;
use super::{Simulation, trace};
use crate::content;
use crate::media::Done;
use crate::rng::SimRng;
use crate::{Violation, ensure};

/// Number that is combined with the seed of a history, to seed separate random numbers for
/// histories with reads into guest memory.
const SALT: u64 = 0x6469_7265;

/// State of the reads into guest memory, in a history with such reads.
pub(super) struct Direct {
    rng: SimRng,
    /// Declined reads, which are sent again when the engine has room.
    declined: VecDeque<RequestId>,
}

/// Guest writes to the request's memory since the request was submitted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Scribbles {
    /// The buffer of the request is in daemon memory, so the guest cannot write to it.
    #[default]
    NotIts,
    Nothing,
    /// The guest wrote to the memory after the checksums were computed, so no checksum includes the
    /// guest's data.
    Unseen,
    /// The engine must not report success: the guest wrote to the memory before the checksums of
    /// the read were computed, or the read failed.
    Seen,
}

impl Direct {
    pub(super) fn draw(seed: u64, permille: u32) -> Option<Direct> {
        let mut rng = SimRng::new(seed ^ SALT);
        rng.chance(permille).then(|| Direct { rng, declined: VecDeque::new() })
    }

    /// Simulates guest writes to guest memory after flash has been read into a buffer. The guest
    /// writes before or after the checksums are computed, or unmaps the memory.
    pub(super) fn scribble(&mut self, buffer: &mut Buffer, units: Range<usize>, done: &mut Done) {
        let rng = &mut self.rng;
        if buffer.scribbles == Scribbles::NotIts {
            return;
        }
        let before_sums = rng.chance(150);
        if before_sums || rng.chance(150) {
            let within = if before_sums { units.clone() } else { 0..buffer.tags.len() };
            let at = within.start + rng.below(within.len() as u64) as usize;
            buffer.tags[at] = content::garbage(rng.roll());
            let seen = before_sums || buffer.scribbles == Scribbles::Seen;
            buffer.scribbles = if seen { Scribbles::Seen } else { Scribbles::Unseen };
        }
        if before_sums {
            done.sums = content::sums(&buffer.tags[units]);
        }
        if rng.chance(50) {
            done.result = Err(IoError::Failed);
        }
        if done.result.is_err() {
            buffer.scribbles = Scribbles::Seen;
        }
    }

    pub(super) fn crash(&mut self) {
        self.declined.clear();
    }
}

impl Simulation<'_> {
    /// Chooses guest memory or daemon memory for a new request. Likely hits often use guest memory,
    /// as in the front ends.
    pub(super) fn memory_for(&mut self, disk: usize, op: Op, offset: u64, len: u64) -> PayloadMemory {
        let Some(direct) = &mut self.direct else { return PayloadMemory::Daemon };
        if op != Op::Read || !(offset | len).is_multiple_of(SECTOR_BYTES) {
            return PayloadMemory::Daemon;
        }
        let is_likely = self.engine.would_read_flash(DiskId(disk as u32), offset, len);
        match direct.rng.chance(if is_likely { 700 } else { 150 }) {
            true => PayloadMemory::Guest,
            false => PayloadMemory::Daemon,
        }
    }

    /// Checks the reply to a read into guest memory. Returns false if the content must not be
    /// compared.
    pub(super) fn check_direct(&mut self, request: &Request, ok: bool) -> Result<bool, Violation> {
        if request.memory != PayloadMemory::Guest {
            return Ok(true);
        }
        let buffer = self.buffers.get_mut(&request.buffer.expect("reads have one")).expect("not released");
        ensure!(
            !ok || buffer.scribbles != Scribbles::Seen,
            "{request:?}: what the guest scribbled, or a failed read, was believed"
        );
        let scribbles = buffer.scribbles;
        self.report.direct += u64::from(ok);
        Ok(scribbles == Scribbles::Nothing)
    }

    /// Queues a declined read to be sent again with a daemon buffer.
    pub(super) fn decline(&mut self, id: RequestId) -> Result<(), Violation> {
        trace!(self, "declined {id}");
        let in_flight = self.requests.get(&id);
        let request = in_flight.map(|it| it.request).filter(|it| it.memory == PayloadMemory::Guest);
        let request = request
            .ok_or_else(|| Violation(format!("{id} is declined, but its buffer is not guest memory")))?;
        let buffer = self.buffers.get_mut(&request.buffer.expect("reads have one")).expect("not released");
        ensure!(!buffer.replied, "{request:?} is declined twice, or after an answer");
        buffer.end();
        self.report.declined += 1;
        let direct = self.direct.as_mut().expect("a history with such reads");
        direct.declined.push_back(id);
        Ok(())
    }

    /// Sends declined reads again while the engine has room.
    pub(super) fn ask_again(&mut self) -> Result<(), Violation> {
        while let Some(id) = self.direct.as_ref().and_then(|direct| direct.declined.front().copied())
            && self.engine.has_room(self.requests[&id].request.disk)
        {
            self.direct.as_mut().expect("just looked at").declined.pop_front();
            let old = self.requests[&id].request;
            let disk = old.disk.0 as usize;
            let buffer = self.make_buffer(id, disk, old.offset, old.len);
            let memory = PayloadMemory::DaemonAfterGuest;
            let request = Request { buffer: Some(buffer), memory, ..old };
            let is_away = !self.disks[disk].present || self.disks[disk].leaving;
            let in_flight = self.requests.get_mut(&id).expect("just looked at");
            in_flight.request = request;
            in_flight.refusal = is_away.then_some(IoError::ShuttingDown);
            trace!(self, "{request:?}");
            let taken = self.engine.handle_request(self.now, request);
            ensure!(taken.is_ok(), "{request:?} handed back with {} in flight", self.engine.in_flight());
            self.drain()?;
        }
        Ok(())
    }
}

impl Buffer {
    /// Ends the engine's access to the memory of an answered request.
    pub(super) fn end(&mut self) {
        self.replied = true;
        if self.scribbles != Scribbles::NotIts {
            self.tags.fill(content::garbage(self.request.0));
        }
    }
}
