//! Delays the handling of successful flushes and durable writes (FUA) of a backing, so that the
//! engine handles a failure that concerns the same data first.
//!
//! Flushes and durable writes of one backing may overlap. If the backing cannot write some data, it
//! may report the failure to only one of these operations. Another operation then finds no data
//! left to write and succeeds, and this success may arrive before the failure. So the engine
//! handles a success only after all operations have ended that were in flight when the success
//! arrived. If one of these operations fails, the engine handles that failure first (see
//! [`backed`](super::backed)).

use std::collections::VecDeque;

use super::{Engine, Pending};
use crate::io::{Durability, IoError, IoOp, Target};
use crate::units::{DiskId, Instant, IoId};

/// Flushes and durable writes of one disk's backing.
#[derive(Default)]
pub(super) struct SyncOrder {
    /// Serial numbers of the operations in flight.
    in_flight: Vec<u64>,
    /// Successful operations that wait for others, in the order of arrival.
    waiting: VecDeque<Waiting>,
}

/// A successful operation that waits for other operations.
struct Waiting {
    id: IoId,
    io: Pending,
    /// Largest serial number of an operation that was in flight when the success arrived.
    upto: u64,
}

impl SyncOrder {
    /// Records the end of an operation. Returns true if other operations are in flight.
    fn end(&mut self, serial: u64) -> bool {
        let at =
            self.in_flight.iter().position(|other| *other == serial).expect("the operation was in flight");
        self.in_flight.swap_remove(at);
        !self.in_flight.is_empty()
    }

    /// Returns the next successful operation whose wait is over.
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
    /// Records the start of a flush or durable write.
    pub(super) fn begin_sync(&mut self, disk: DiskId, serial: u64) {
        self.disk_mut(disk).sync_order.in_flight.push(serial);
    }

    /// Handles the end of a flush or durable write, and of operations that waited for it.
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
