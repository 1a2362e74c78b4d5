//! Delays the handling of successful flushes and durable writes (FUA) of a backing. If an
//! overlapping flush fails, the engine thus handles this failure first (see
//! [`backed`](super::backed) and [`flush_order`](crate::flush_order)).

use super::{Engine, Pending};
use crate::flush_order::FlushOrder;
use crate::io::{Durability, IoError, IoOp, Target};
use crate::units::{Instant, IoId};

/// Flushes and durable writes of one disk's backing, by serial number.
pub(super) type SyncOrder = FlushOrder<u64, (IoId, Pending)>;

/// Returns true for an operation that makes data of a backing durable.
pub(super) fn is_sync(target: Target, op: IoOp) -> bool {
    let is_durable = matches!(op, IoOp::Flush | IoOp::Write(Durability::Durable));
    is_durable && matches!(target, Target::Backing(_))
}

impl Engine {
    /// Handles the end of a flush or durable write, and of operations that waited for it.
    pub(super) fn sync_done(&mut self, now: Instant, id: IoId, io: Pending, result: Result<(), IoError>) {
        let disk = io.disk;
        let order = &mut self.disk_mut(disk).sync_order;
        match order.end(io.serial) && result.is_ok() {
            true => order.hold(io.serial, (id, io)),
            false => self.io_done(now, id, &io, result, &[]),
        }
        while let Some(disk) = &mut self.disks[disk.0 as usize]
            && let Some((_, (id, io))) = disk.sync_order.poll_released()
        {
            self.io_done(now, id, &io, Ok(()), &[]);
        }
    }
}
