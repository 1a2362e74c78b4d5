//! Recording of the requests of a disk.
//!
//! A request is recorded when the engine accepts it: once and whole, even if the engine splits it.
//! At this time, the data of a write has already arrived. Requests that the protocol layer rejects,
//! prefetches and block status queries are not recorded.

use hob_control::{TraceOp, TraceRecord};
use hob_engine::io::Op;
use hob_engine::units::DiskId;
use hob_nbd::Command;

use crate::request_recorder::Recorder;

/// The recorder of each disk that is recorded.
#[derive(Default)]
pub(super) struct Recorders {
    recorders: Vec<Option<Recorder>>,
}

impl Recorders {
    /// Starts to record a disk's requests.
    pub(super) fn begin(&mut self, disk: DiskId, recorder: Recorder) {
        let index = disk.0 as usize;
        if self.recorders.len() <= index {
            self.recorders.resize_with(index + 1, || None);
        }
        self.recorders[index] = Some(recorder);
    }

    /// Ends the recording of a removed disk.
    pub(super) fn end(&mut self, disk: DiskId) {
        if let Some(recorder) = self.recorders.get_mut(disk.0 as usize) {
            *recorder = None;
        }
    }

    /// Ends a recording that no client reads any more. A recording that was started in the meantime
    /// continues.
    pub(super) fn end_if_abandoned(&mut self, disk: DiskId) {
        if let Some(slot) = self.recorders.get_mut(disk.0 as usize) {
            slot.take_if(|recorder| recorder.is_abandoned());
        }
    }

    /// Returns the recorder for new requests of a disk, if the disk is recorded.
    #[inline]
    pub(super) fn of(&mut self, disk: DiskId) -> Option<Noting<'_>> {
        let recorder = self.recorders.get_mut(disk.0 as usize)?.as_mut()?;
        Some(Noting { at_ns: recorder.now_ns(), recorder })
    }
}

/// A disk's recorder with the time of the requests.
pub(super) struct Noting<'a> {
    recorder: &'a mut Recorder,
    at_ns: u64,
}

impl Noting<'_> {
    /// Records a request of a vhost-user client or of a FUSE file, if its kind is recorded.
    pub(super) fn note_request(&mut self, op: Op, offset: u64, len: u64) {
        let op = match op {
            Op::Read => TraceOp::Read,
            Op::Write(_) => TraceOp::Write,
            Op::Discard(_) | Op::WriteZeroes(..) => TraceOp::Discard,
            Op::Flush => TraceOp::Flush,
            _ => return,
        };
        let len = u32::try_from(len).unwrap_or(u32::MAX);
        self.recorder.push(&TraceRecord { at_ns: self.at_ns, offset, len, op });
    }

    /// Records a request of an NBD client, if its kind is recorded.
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

    /// Records a request of a FUSE file, if its kind is recorded.
    pub(super) fn note_file(&mut self, command: &hob_frontends::fuse::Command) {
        self.note_request(command.op, command.offset, command.len);
    }
}
