//! The order in which successes of operations that make a backing's data durable are believed.
//!
//! Flushes and durable writes of one backing may overlap, and a backing reports a failure to only one of them.
//! The success of another operation, which found nothing left to write, may arrive before the failure. So the
//! engine handles a success only when all operations have ended that were in flight when it arrived. If one of
//! them fails, the doubt (see [`backed`](super::backed)) comes first.

use std::collections::VecDeque;

use super::{Engine, Pending};
use crate::io::{Durability, IoError, IoOp, Target};
use crate::units::{DiskId, Instant, IoId};

/// The operations of one disk.
#[derive(Default)]
pub(super) struct SyncOrder {
    /// Serial numbers of the operations in flight.
    in_flight: Vec<u64>,
    /// Successes that wait, in the order of arrival.
    waiting: VecDeque<Waiting>,
}

/// A success that waits for other operations.
struct Waiting {
    id: IoId,
    io: Pending,
    /// The last serial number in flight when the success arrived.
    upto: u64,
}

impl SyncOrder {
    /// Records the end of an operation. Returns true if other operations are in flight.
    fn end(&mut self, serial: u64) -> bool {
        let at = self.in_flight.iter().position(|other| *other == serial).expect("it began");
        self.in_flight.swap_remove(at);
        !self.in_flight.is_empty()
    }

    /// Returns the next success that waits for no operation any more.
    fn release(&mut self) -> Option<Waiting> {
        let oldest = self.in_flight.iter().min();
        let first = self.waiting.front()?;
        oldest.is_none_or(|oldest| first.upto < *oldest).then(|| self.waiting.pop_front()).flatten()
    }
}

/// Returns true for an operation that makes data of a backing durable.
pub(super) fn is_sync(target: Target, op: IoOp) -> bool {
    let is_durable = matches!(op, IoOp::Flush | IoOp::Write(Durability::Durable));
    is_durable && matches!(target, Target::Backing(_))
}

impl Engine {
    /// Records the start of an operation.
    pub(super) fn begin_sync(&mut self, disk: DiskId, serial: u64) {
        self.disk_mut(disk).sync_order.in_flight.push(serial);
    }

    /// Handles the end of an operation, and the successes that waited for it.
    pub(super) fn sync_done(&mut self, now: Instant, id: IoId, io: Pending, result: Result<(), IoError>) {
        let disk = io.disk;
        let order = &mut self.disk_mut(disk).sync_order;
        match order.end(io.serial) && result.is_ok() {
            true => {
                let upto = *order.in_flight.iter().max().expect("others are in flight");
                order.waiting.push_back(Waiting { id, io, upto });
            }
            false => self.io_done(now, id, &io, result, &[]),
        }
        while let Some(disk) = &mut self.disks[disk.0 as usize]
            && let Some(Waiting { id, io, .. }) = disk.sync_order.release()
        {
            self.io_done(now, id, &io, Ok(()), &[]);
        }
    }
}
