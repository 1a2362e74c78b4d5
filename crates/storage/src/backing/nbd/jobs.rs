//! The jobs of an NBD backing and their requests.
//!
//! A job is one I/O or one status query. A request is one NBD command. A job has several requests
//! if it exceeds the server's limit. A job has one more request if a flush must follow because the
//! server has no FUA. Cookies contain a generation, so that replies to old requests are detected.

use std::collections::VecDeque;

use hob_engine::io::{BufferSlice, IoError};
use hob_engine::units::{Instant, IoId};
use hob_nbd::client::reply::Expected;
use hob_nbd::{Command, CommandFlags};

use crate::backing::StatusExtent;

/// Number of ended jobs whose deadlines may stay in the list behind an older unfinished job.
const DEADLINES_SPARE: usize = 1024;

/// The component that asked for a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Asker {
    Io(IoId),
    Status(u64),
    /// The backing itself, which flushes the server so that fewer changes need to be repeated.
    Repeat,
    /// The backing itself, to find out whether the server still answers.
    Probe,
}

/// The command of a request.
#[derive(Clone, Copy, Debug)]
pub(super) enum What {
    Read(BufferSlice),
    Write(BufferSlice, CommandFlags),
    /// A write of zeroes that are sent as data.
    WriteZeroData,
    WriteZeroes(CommandFlags),
    Trim,
    /// A flush that covers the changes acknowledged before it; `mark` is the number of these
    /// changes.
    Flush {
        mark: u64,
        /// Whether the flush makes a write durable, because the server has no FUA.
        of_write: bool,
    },
    Status,
}

#[derive(Debug)]
pub(super) struct Request {
    pub(super) job: u32,
    pub(super) what: What,
    pub(super) offset: u64,
    pub(super) len: u32,
    pub(super) sent: bool,
    generation: u32,
    live: bool,
}

impl Request {
    pub(super) fn is_flush(&self) -> bool {
        matches!(self.what, What::Flush { .. })
    }

    /// Returns true if the server has to make data durable before it answers.
    pub(super) fn is_durable(&self) -> bool {
        match self.what {
            What::Flush { .. } => true,
            What::Write(_, flags) => flags.contains(CommandFlags::FUA),
            _ => false,
        }
    }

    pub(super) fn is_change(&self) -> bool {
        matches!(self.what, What::Write(..) | What::WriteZeroData | What::WriteZeroes(_) | What::Trim)
    }

    fn command(&self) -> Command {
        match self.what {
            What::Read(_) => Command::Read,
            What::Write(..) | What::WriteZeroData => Command::Write,
            What::WriteZeroes(_) => Command::WriteZeroes,
            What::Trim => Command::Trim,
            What::Flush { .. } => Command::Flush,
            What::Status => Command::BlockStatus,
        }
    }
}

#[derive(Debug)]
pub(super) struct Job {
    pub(super) asker: Asker,
    /// Number of the job's unanswered requests.
    pub(super) requests: u32,
    pub(super) result: Result<(), IoError>,
    /// Whether a flush must follow if all requests succeed.
    pub(super) then_flush: bool,
    /// The range of the disk that a status query asks for.
    pub(super) range: (u64, u64),
    pub(super) extents: Vec<StatusExtent>,
    number: u64,
    live: bool,
}

/// All jobs of an NBD backing and their requests.
#[derive(Debug, Default)]
pub(super) struct Jobs {
    jobs: Vec<Job>,
    free_jobs: Vec<u32>,
    requests: Vec<Request>,
    free_requests: Vec<u32>,
    /// Requests to send, in order.
    queue: VecDeque<u32>,
    /// Deadlines of the jobs, in order; ended jobs are skipped.
    deadlines: VecDeque<(Instant, u32, u64)>,
    count: u64,
    live: usize,
}

impl Jobs {
    /// Adds a job without requests.
    pub(super) fn add(
        &mut self,
        asker: Asker,
        deadline: Instant,
        then_flush: bool,
        range: (u64, u64),
    ) -> u32 {
        self.count += 1;
        self.live += 1;
        let job = Job {
            asker,
            requests: 0,
            result: Ok(()),
            then_flush,
            range,
            extents: Vec::new(),
            number: self.count,
            live: true,
        };
        let slot = place(&mut self.jobs, &mut self.free_jobs, job);
        self.deadlines.push_back((deadline, slot, self.count));
        if self.deadlines.len() > 2 * self.live + DEADLINES_SPARE {
            let jobs = &self.jobs;
            self.deadlines.retain(|(_, slot, number)| is_live(jobs, *slot, *number));
        }
        slot
    }

    /// Adds a request to a job and queues it for sending.
    pub(super) fn ask(&mut self, job: u32, what: What, offset: u64, len: u32) {
        self.jobs[job as usize].requests += 1;
        let old = self.free_requests.last().map(|slot| self.requests[*slot as usize].generation);
        let generation = old.unwrap_or(0).wrapping_add(1);
        let request = Request { job, what, offset, len, sent: false, generation, live: true };
        let slot = place(&mut self.requests, &mut self.free_requests, request);
        self.queue.push_back(slot);
    }

    pub(super) fn job(&mut self, slot: u32) -> &mut Job {
        &mut self.jobs[slot as usize]
    }

    pub(super) fn request(&mut self, slot: u32) -> &mut Request {
        &mut self.requests[slot as usize]
    }

    /// Returns the cookie of a request.
    pub(super) fn cookie(&self, slot: u32) -> u64 {
        u64::from(self.requests[slot as usize].generation) << 32 | u64::from(slot)
    }

    /// Returns the request with this cookie if it was sent and not answered.
    pub(super) fn find(&self, cookie: u64) -> Option<u32> {
        let slot = cookie as u32;
        let request = self.requests.get(slot as usize)?;
        let matches = request.live && request.sent && request.generation == (cookie >> 32) as u32;
        matches.then_some(slot)
    }

    /// Returns the properties of the request with this cookie that the reply decoder needs.
    pub(super) fn expected(&self, cookie: u64) -> Option<Expected> {
        let request = &self.requests[self.find(cookie)? as usize];
        Some(Expected { command: request.command(), offset: request.offset, length: request.len })
    }

    pub(super) fn next_to_send(&mut self) -> Option<u32> {
        let slot = self.queue.pop_front()?;
        self.requests[slot as usize].sent = true;
        Some(slot)
    }

    /// Records that the server completed a request that hob does not end yet. A second reply to
    /// this request is a protocol error. If the connection is lost, the request is sent again.
    pub(super) fn hold(&mut self, slot: u32) {
        self.requests[slot as usize].sent = false;
    }

    pub(super) fn has_to_send(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Ends a request. Returns its job, and whether it was the job's last request.
    pub(super) fn end_request(&mut self, slot: u32, result: Result<(), IoError>) -> (u32, bool) {
        let request = &mut self.requests[slot as usize];
        assert!(request.live, "a request ends once");
        request.live = false;
        let job_slot = request.job;
        self.free_requests.push(slot);
        let job = &mut self.jobs[job_slot as usize];
        job.requests -= 1;
        job.result = job.result.and(result);
        (job_slot, job.requests == 0)
    }

    /// Ends a job and removes it.
    pub(super) fn end_job(&mut self, slot: u32) -> Job {
        let ended = Job { live: false, extents: Vec::new(), ..self.jobs[slot as usize] };
        let job = std::mem::replace(&mut self.jobs[slot as usize], ended);
        assert!(job.live && job.requests == 0, "a job ends once, after its requests");
        self.free_jobs.push(slot);
        self.live -= 1;
        while self.deadlines.front().is_some_and(|(_, slot, number)| !is_live(&self.jobs, *slot, *number)) {
            self.deadlines.pop_front();
        }
        job
    }

    /// Returns the deadline of the oldest job.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.deadlines.front().map(|(deadline, ..)| *deadline)
    }

    /// Describes the oldest unanswered request for the log: what it is, whether it was sent, and
    /// how many later jobs have ended before it.
    pub(super) fn describe_oldest(&self) -> Option<String> {
        let (_, slot, number) =
            self.deadlines.iter().find(|(_, slot, number)| is_live(&self.jobs, *slot, *number))?;
        let request = self.requests.iter().find(|request| request.live && request.job == *slot)?;
        let waiting = self.jobs.iter().filter(|job| job.live && job.number > *number).count() as u64;
        Some(format!(
            "{:?} of {} bytes at {}, {}; {} later ones have ended, {waiting} have not",
            request.command(),
            request.len,
            request.offset,
            if request.sent { "sent" } else { "not sent" },
            self.count - number - waiting,
        ))
    }

    /// Changes the deadlines of all jobs from a wait of `before_ns` to `wait_ns`, from the same
    /// start. No deadline becomes earlier than `now`.
    pub(super) fn move_deadlines(&mut self, now: Instant, before_ns: u64, wait_ns: u64) {
        for (deadline, ..) in &mut self.deadlines {
            let moved = Instant(deadline.0.saturating_sub(before_ns).saturating_add(wait_ns));
            *deadline = moved.max(now);
        }
    }

    /// Returns the unanswered requests of jobs whose deadline has passed at `now`.
    pub(super) fn expired(&self, now: Instant) -> Vec<u32> {
        let old: Vec<u32> = self
            .deadlines
            .iter()
            .take_while(|(deadline, ..)| *deadline <= now)
            .filter(|(_, slot, number)| is_live(&self.jobs, *slot, *number))
            .map(|(_, slot, _)| *slot)
            .collect();
        self.live_requests().filter(|slot| old.contains(&self.requests[*slot as usize].job)).collect()
    }

    pub(super) fn live_requests(&self) -> impl Iterator<Item = u32> + '_ {
        (0..self.requests.len() as u32).filter(|slot| self.requests[*slot as usize].live)
    }

    /// Returns true if a request is in flight.
    pub(super) fn awaits_replies(&self) -> bool {
        self.requests.iter().any(|request| request.live && request.sent)
    }

    /// Returns true if a change of the disk is in flight.
    pub(super) fn awaits_changes(&self) -> bool {
        self.requests.iter().any(|request| request.live && request.sent && request.is_change())
    }

    /// Returns true if a change of the disk is unanswered.
    pub(super) fn has_changes(&self) -> bool {
        self.requests.iter().any(|request| request.live && request.is_change())
    }

    /// Removes requests from the send queue, so that they end unsent.
    pub(super) fn unqueue(&mut self, slots: &[u32]) {
        self.queue.retain(|slot| !slots.contains(slot));
    }

    /// Queues all unanswered requests for sending again, after the connection was lost.
    pub(super) fn send_all_again(&mut self) {
        let slots: Vec<u32> = self.live_requests().collect();
        for slot in &slots {
            self.requests[*slot as usize].sent = false;
        }
        self.queue = slots.into();
    }

    /// Prepares durable writes to be sent again to a server without FUA, which could ignore the FUA
    /// flag. A flush follows each of these writes, if the server can flush.
    pub(super) fn replace_fua(&mut self, can_flush: bool) {
        for request in self.requests.iter_mut().filter(|request| request.live) {
            if let What::Write(_, flags) = &mut request.what
                && flags.contains(CommandFlags::FUA)
            {
                *flags = CommandFlags::NONE;
                self.jobs[request.job as usize].then_flush = can_flush;
            }
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.live == 0
    }
}

fn is_live(jobs: &[Job], slot: u32, number: u64) -> bool {
    let job = &jobs[slot as usize];
    job.live && job.number == number
}

/// Stores an item in a free place of the table, or in a new one.
fn place<T>(table: &mut Vec<T>, free: &mut Vec<u32>, item: T) -> u32 {
    match free.pop() {
        Some(slot) => {
            table[slot as usize] = item;
            slot
        }
        None => {
            table.push(item);
            table.len() as u32 - 1
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_describes_the_oldest_unanswered_request() {
        let mut jobs = Jobs::default();
        assert_eq!(jobs.describe_oldest(), None);
        let slots: Vec<u32> = (0..3)
            .map(|_| {
                let job = jobs.add(Asker::Probe, Instant(1), false, (0, 0));
                jobs.ask(job, What::Trim, 8192, 4096);
                jobs.queue[jobs.queue.len() - 1]
            })
            .collect();
        assert_eq!(jobs.next_to_send(), Some(slots[0]));
        let (job, _) = jobs.end_request(slots[1], Ok(()));
        jobs.end_job(job);
        let text = "Trim of 4096 bytes at 8192, sent; 1 later ones have ended, 1 have not";
        assert_eq!(jobs.describe_oldest().as_deref(), Some(text));
    }
}
