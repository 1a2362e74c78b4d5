//! I/O on volatile files: the I/O ring performs it itself, in random order.
//!
//! An operation is delayed until the I/O ring waits. Then some of the delayed operations are
//! performed, in random order. So operations in flight overtake each other, a flush may overtake an
//! earlier write, and a kill may occur between the start of an operation and its effect. Real
//! devices behave like this too.

use std::os::fd::AsFd;
use std::sync::Arc;

use rustix::fs::FallocateFlags;

use super::op::Work;
use super::{Ring, Traffic};
use crate::volatile::{self, VolatileFile};

/// Returns the cache of a volatile file that is being attached.
pub(super) fn of(file: impl AsFd) -> Arc<VolatileFile> {
    volatile::known(file).expect("a volatile file went through the power-cut layer when it was opened")
}

impl Ring {
    /// Performs some of the delayed operations, at least one if there are any.
    pub(super) fn run_held(&mut self) {
        if self.held.is_empty() {
            return;
        }
        for _ in 0..=self.rng.below(self.held.len()) {
            let at = self.rng.below(self.held.len());
            let index = self.held.swap_remove(at);
            let result = self.perform(index);
            self.advance(index, result);
        }
    }

    /// Performs an operation, and returns the result of its system call.
    fn perform(&mut self, index: u32) -> i32 {
        let op = &self.ops[index as usize];
        let entry = &self.fds[usize::from(op.fd.index)];
        let file = entry.volatile.as_ref().expect("only operations on volatile files are held");
        let arena = &mut self.arena;
        let (moved, result) = match &op.work {
            &Work::Read { slice, offset, parts: Some(_) } => {
                let mut bytes = vec![0; slice.len as usize];
                let result = file.read(offset, &mut bytes);
                arena.put_shared(slice, &bytes);
                (slice.len, result)
            }
            &Work::Read { slice, offset, parts: None } => {
                // No other operation fills these bytes, so until the delayed read is performed they
                // are a normal buffer.
                arena.retain(slice.id);
                arena.unpin(slice, Traffic::KernelWrites);
                let result = file.read(offset, arena.slice_mut(slice));
                arena.pin(slice, Traffic::KernelWrites);
                arena.release(slice.id);
                (slice.len, result)
            }
            &Work::Write { slice, offset, durability } => {
                (slice.len, file.write(offset, arena.slice(slice), durability))
            }
            Work::Fsync => (0, file.flush()),
            &Work::Fallocate { mode, offset, len } => {
                (0, file.fallocate(FallocateFlags::from_bits_retain(mode as u32), offset, len))
            }
            Work::Vacant
            | Work::Recv(_)
            | Work::RecvInto(_)
            | Work::Readable
            | Work::Send { .. }
            | Work::AwaitEvent
            | Work::Signal => {
                unreachable!("sockets, devices and events are never volatile")
            }
        };
        match result {
            Ok(()) => moved as i32,
            Err(error) => -volatile::errno(error).raw_os_error(),
        }
    }
}
