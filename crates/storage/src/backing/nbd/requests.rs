//! The requests of a job: which commands hob sends to the server, and what the end of a command
//! means for the job.

use hob_engine::io::{Io, IoError, Zeroing};
use hob_nbd::{CommandFlags, TransmissionFlags};

use super::jobs::{Asker, What};
use super::{COMMAND_BYTES_MAX, NbdBacking};

impl NbdBacking {
    pub(super) fn end_request(&mut self, slot: u32, result: Result<(), IoError>) {
        match self.jobs.request(slot).what {
            What::Flush { mark, .. } if result.is_ok() => {
                self.flushed = self.flushed.max(mark);
                self.unflushed.flushed(mark);
            }
            What::Write(_, flags) if flags.contains(CommandFlags::FUA) => {}
            What::Write(..) | What::WriteZeroData | What::WriteZeroes(_) | What::Trim => self.changes += 1,
            What::Read(_) | What::Flush { .. } | What::Status => {}
        }
        let (job, is_last) = self.jobs.end_request(slot, result);
        if is_last {
            self.end_or_flush(job);
        }
    }

    /// Handles a request that the server failed. If the request was the flush of a durable write, a
    /// flush has failed: unflushed writes may be lost, and the next successful flush does not cover
    /// them.
    pub(super) fn note_refused(&mut self, slot: u32) {
        let is_durable = match self.jobs.request(slot).what {
            What::Write(_, flags) => flags.contains(CommandFlags::FUA),
            What::Flush { of_write, .. } => of_write,
            _ => false,
        };
        if is_durable && self.changes > self.flushed {
            self.unflushed.forget(self.changes);
            (self.flushed, self.lost) = (self.changes, true);
        }
    }

    /// Handles the end of all requests of a job.
    pub(super) fn end_or_flush(&mut self, slot: u32) {
        let job = self.jobs.job(slot);
        if job.result.is_ok() && std::mem::take(&mut job.then_flush) {
            return self.jobs.ask(slot, What::Flush { mark: 0, of_write: true }, 0, 0);
        }
        let job = self.jobs.end_job(slot);
        match job.asker {
            Asker::Io(io) => self.done.push_back((io, job.result)),
            Asker::Repeat => self.is_flushing = false,
            Asker::Probe => self.options.monitor.note_answer(),
            Asker::Status(id) => self.statuses.push_back((id, job.result.map(|()| job.extents))),
        }
    }

    /// Adds requests to a job: splits the I/O's range by `bytes_max`.
    pub(super) fn ask_range(
        &mut self,
        job: u32,
        io: &Io,
        what: impl Fn(&Io, u64, u32) -> What,
        bytes_max: u64,
    ) {
        let mut from = io.offset;
        let end = io.offset + io.len;
        while from < end {
            let len = (end - from).min(bytes_max) as u32;
            self.jobs.ask(job, what(io, from, len), from, len);
            from += u64::from(len);
        }
    }

    pub(super) fn ask_zeroes(&mut self, job: u32, io: &Io, zeroing: Zeroing, payload_max: u64) {
        let keep = matches!(zeroing, Zeroing::KeepAllocated | Zeroing::FastKeepAllocated);
        let fast = matches!(zeroing, Zeroing::FastMayUnmap | Zeroing::FastKeepAllocated);
        if !self.can(TransmissionFlags::SEND_WRITE_ZEROES)
            || fast && !self.can(TransmissionFlags::SEND_FAST_ZERO)
        {
            if !fast {
                return self.ask_range(job, io, |_, _, _| What::WriteZeroData, payload_max);
            }
            self.jobs.job(job).result = Err(IoError::Unsupported);
            return self.end_or_flush(job);
        }
        let mut flags = CommandFlags::NONE;
        if keep {
            flags = flags | CommandFlags::NO_HOLE;
        }
        if fast {
            flags = flags | CommandFlags::FAST_ZERO;
        }
        self.ask_range(job, io, |_, _, _| What::WriteZeroes(flags), COMMAND_BYTES_MAX);
    }
}
