//! Tracks whether a backing was flushed after its last change.

use hob_engine::io::{Io, IoError, IoOp};
use hob_engine::units::IoId;

/// The flushes of one backing.
#[derive(Debug)]
pub(super) struct FlushState {
    /// True unless a flush covers the last change. Only flushes that began after the end of the
    /// last change count, and the one of them that ended last must have succeeded.
    is_unflushed: bool,
    /// Changes in flight. A flush that begins while they are in flight does not cover them.
    changes: Vec<IoId>,
    /// Flushes in flight that began after the end of the last change.
    flushes: Vec<IoId>,
}

impl Default for FlushState {
    fn default() -> FlushState {
        // An earlier process may have changed the backing.
        FlushState { is_unflushed: true, changes: Vec::new(), flushes: Vec::new() }
    }
}

impl FlushState {
    pub(super) fn begin(&mut self, io: &Io) {
        match io.op {
            IoOp::Read => {}
            IoOp::Flush if self.changes.is_empty() => self.flushes.push(io.id),
            IoOp::Flush => {}
            _ => {
                self.is_unflushed = true;
                self.changes.push(io.id);
                self.flushes.clear();
            }
        }
    }

    pub(super) fn end(&mut self, id: IoId, result: Result<(), IoError>) {
        if let Some(at) = self.changes.iter().position(|change| *change == id) {
            self.changes.swap_remove(at);
        } else if let Some(at) = self.flushes.iter().position(|flush| *flush == id) {
            self.flushes.swap_remove(at);
            self.is_unflushed = result.is_err();
        }
    }

    pub(super) fn is_unflushed(&self) -> bool {
        self.is_unflushed
    }
}

#[cfg(test)]
mod tests {
    use hob_engine::io::{Durability, Target};
    use hob_engine::units::DiskId;

    use super::*;

    fn io(id: u32, op: IoOp) -> Io {
        Io { id: IoId(id), target: Target::Backing(DiskId(0)), op, offset: 0, len: 0, slice: None }
    }

    #[test]
    fn a_flush_counts_if_it_succeeds_and_no_change_follows() {
        let write = IoOp::Write(Durability::Volatile);
        let mut state = FlushState::default();
        assert!(state.is_unflushed(), "an earlier process may have changed it");
        state.begin(&io(1, IoOp::Flush));
        assert!(state.is_unflushed());
        state.end(IoId(1), Ok(()));
        state.begin(&io(2, IoOp::Read));
        state.end(IoId(2), Err(IoError::Failed));
        assert!(!state.is_unflushed());
        // A change that begins during a flush.
        state.begin(&io(3, IoOp::Flush));
        state.begin(&io(4, write));
        state.end(IoId(3), Ok(()));
        state.end(IoId(4), Ok(()));
        assert!(state.is_unflushed());
        // A change that is in flight when a flush begins, and ends before or after the flush.
        for ends in [[6, 7], [7, 6]] {
            state.begin(&io(6, write));
            state.begin(&io(7, IoOp::Flush));
            ends.into_iter().for_each(|id| state.end(IoId(id), Ok(())));
            assert!(state.is_unflushed(), "{ends:?}");
        }
        for (result, is_unflushed) in [(Err(IoError::Failed), true), (Ok(()), false)] {
            state.begin(&io(5, IoOp::Flush));
            state.end(IoId(5), result);
            assert_eq!(state.is_unflushed(), is_unflushed);
        }
    }
}
