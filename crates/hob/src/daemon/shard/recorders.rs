//! Who records the requests of which disk.
//!
//! A request is recorded when the engine takes it: whole, as the guest sent it, and once, in however
//! many pieces the engine sees it. A write has its data by then. What the protocol refuses never
//! gets so far; prefetches and questions about allocation move no data and are left out.

use hob_control::{TraceOp, TraceRecord};
use hob_engine::io::Op;
use hob_engine::units::DiskId;
use hob_nbd::Command;

use crate::daemon::request_recorder::Recorder;

/// The recorders, by disk.
#[derive(Default)]
pub(super) struct Recorders {
    recorders: Vec<Option<Recorder>>,
}

impl Recorders {
    /// Records a disk's requests from now on.
    pub(super) fn begin(&mut self, disk: DiskId, recorder: Recorder) {
        let index = disk.0 as usize;
        if self.recorders.len() <= index {
            self.recorders.resize_with(index + 1, || None);
        }
        self.recorders[index] = Some(recorder);
    }

    /// Ends it, for the disk goes.
    pub(super) fn end(&mut self, disk: DiskId) {
        if let Some(recorder) = self.recorders.get_mut(disk.0 as usize) {
            *recorder = None;
        }
    }

    /// Ends it if nobody reads what is recorded. A recording that was begun since goes on.
    pub(super) fn end_if_abandoned(&mut self, disk: DiskId) {
        if let Some(slot) = self.recorders.get_mut(disk.0 as usize) {
            slot.take_if(|recorder| recorder.is_abandoned());
        }
    }

    /// For requests of that disk that come now, if they are recorded.
    #[inline]
    pub(super) fn of(&mut self, disk: DiskId) -> Option<Noting<'_>> {
        let recorder = self.recorders.get_mut(disk.0 as usize)?.as_mut()?;
        Some(Noting { at_ns: recorder.now_ns(), recorder })
    }
}

/// A disk's recorder at one time.
pub(super) struct Noting<'a> {
    recorder: &'a mut Recorder,
    at_ns: u64,
}

impl Noting<'_> {
    /// Records what a machine asked for, if it is of a recorded kind.
    pub(super) fn note_request(&mut self, op: Op, offset: u64, len: u64) {
        let op = match op {
            Op::Read => TraceOp::Read,
            Op::Write(_) => TraceOp::Write,
            Op::Discard(_) | Op::WriteZeroes(..) => TraceOp::Discard,
            Op::Flush => TraceOp::Flush,
            _ => return,
        };
        self.recorder.push(&TraceRecord { at_ns: self.at_ns, offset, len: len as u32, op });
    }

    /// Records a command of a guest, if it is of a recorded kind.
    pub(super) fn note(&mut self, command: Option<&hob_nbd::Request>) {
        let Some(command) = command else { return };
        let op = match command.command {
            Command::Read => TraceOp::Read,
            Command::Write => TraceOp::Write,
            Command::Trim | Command::WriteZeroes => TraceOp::Discard,
            Command::Flush => TraceOp::Flush,
            _ => return,
        };
        let (offset, len) = (command.offset, command.length);
        self.recorder.push(&TraceRecord { at_ns: self.at_ns, offset, len, op });
    }

    /// Records what was asked of a file.
    pub(super) fn note_file(&mut self, command: &hob_frontends::fuse::Command) {
        let op = match command.op {
            Op::Read => TraceOp::Read,
            Op::Write(_) => TraceOp::Write,
            Op::Discard(_) | Op::WriteZeroes(..) => TraceOp::Discard,
            Op::Flush => TraceOp::Flush,
            _ => return,
        };
        let len = u32::try_from(command.len).unwrap_or(u32::MAX);
        self.recorder.push(&TraceRecord { at_ns: self.at_ns, offset: command.offset, len, op });
    }
}
