//! I/O on volatile files: carried out by the ring itself, in an order that nobody may rely on.
//!
//! An operation is held until the ring is asked to wait, and then some of those held are carried out, any of them.
//! So operations in flight overtake each other, a flush may pass the write that was started before it, and a kill
//! may come between the start of an operation and its effect, all of which real devices do too.

use std::os::fd::AsFd;
use std::sync::Arc;

use rustix::fs::FallocateFlags;

use super::op::Work;
use super::{Ring, Traffic};
use crate::volatile::{self, VolatileFile};

/// The cache of a file that is being attached.
pub(super) fn of(file: impl AsFd) -> Arc<VolatileFile> {
    volatile::known(file).expect("a volatile file went through the power-cut layer when it was opened")
}

impl Ring {
    /// Carries out some of the held operations, at least one if there are any.
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

    /// As the system call would end.
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
                // Nobody else fills these bytes; while we do, they are a buffer like any other.
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
