//! Thread for system calls on a backing's file that block while its filesystem hangs.
//!
//! io_uring cannot find holes, and closing a file on FUSE or NFS waits for its server. Each backing
//! has at most one such thread, which exists only while it has jobs. An eventfd signals ended jobs.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hob_engine::io::IoError;
use rustix::event::{EventfdFlags, eventfd};

use super::Status;
use super::identity::ChangeMark;

/// Stack size of the helper thread, bytes.
const STACK_BYTES: usize = 256 << 10;

/// A job with a system call that may block.
pub(super) enum Job {
    /// Queries the allocation of a range.
    Status(u64, Box<dyn FnOnce() -> Status + Send>),
    /// Closes the files, and returns the time of their last change.
    Close(Box<dyn FnOnce() -> Option<ChangeMark> + Send>),
    /// Opens the file again.
    Reopen(Box<dyn FnOnce() -> io::Result<()> + Send>),
}

/// A completed job.
pub(super) enum Ended {
    /// The reply to an allocation query.
    Status(u64, Status),
    /// The files are closed. The value is the time of their last change.
    Closed(Option<ChangeMark>),
    /// The file was opened again, or could not be.
    Reopened(io::Result<()>),
}

/// Handle to the helper thread of one backing.
#[derive(Debug)]
pub(super) struct Helper {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    event: Arc<OwnedFd>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    ended: VecDeque<Ended>,
    is_running: bool,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("State").field("jobs", &self.jobs.len()).finish_non_exhaustive()
    }
}

impl Helper {
    /// Creates a helper without jobs.
    ///
    /// # Errors
    /// Returns the system's error if the system has no descriptor for the eventfd.
    pub(super) fn new() -> io::Result<Helper> {
        let event = Arc::new(eventfd(0, EventfdFlags::CLOEXEC)?);
        Ok(Helper { shared: Arc::new(Shared { event, state: Mutex::default() }) })
    }

    /// Returns the eventfd that counts ended jobs.
    pub(super) fn event(&self) -> Arc<OwnedFd> {
        self.shared.event.clone()
    }

    /// Queues a job for the helper thread.
    pub(super) fn start(&self, job: Job) {
        let mut state = self.shared.state();
        state.jobs.push_back(job);
        if std::mem::replace(&mut state.is_running, true) {
            return;
        }
        drop(state);
        let shared = self.shared.clone();
        let thread = std::thread::Builder::new().name("hob-file".to_owned()).stack_size(STACK_BYTES);
        if let Err(error) = thread.spawn(move || shared.run()) {
            tracing::warn!("cannot start the thread that queries a file's holes: {error}");
            self.shared.give_up();
        }
    }

    /// Returns the next job that has ended; `None` if there is none.
    pub(super) fn poll(&self) -> Option<Ended> {
        self.shared.state().ended.pop_front()
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        loop {
            let mut state = self.state();
            let Some(job) = state.jobs.pop_front() else {
                state.is_running = false;
                return;
            };
            drop(state);
            let ended = match job {
                Job::Status(id, ask) => Ended::Status(id, ask()),
                Job::Close(close) => Ended::Closed(close()),
                Job::Reopen(open) => Ended::Reopened(open()),
            };
            self.state().ended.push_back(ended);
            self.signal();
        }
    }

    /// Ends all jobs if the thread cannot be started. Allocation queries fail. The files are closed
    /// on the calling thread, which may block.
    fn give_up(&self) {
        let mut state = self.state();
        state.is_running = false;
        for job in std::mem::take(&mut state.jobs) {
            state.ended.push_back(match job {
                Job::Status(id, _) => Ended::Status(id, Err(IoError::Failed)),
                Job::Close(close) => Ended::Closed(close()),
                Job::Reopen(_) => Ended::Reopened(Err(io::ErrorKind::OutOfMemory.into())),
            });
        }
        drop(state);
        self.signal();
    }

    fn signal(&self) {
        // The write fails only if 2⁶⁴ − 2 jobs have ended since the last read.
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_job_that_hangs_blocks_only_those_behind_it() {
        let helper = Helper::new().unwrap();
        let (go_on, hang) = mpsc::channel::<()>();
        helper.start(Job::Status(
            1,
            Box::new(move || {
                let _ = hang.recv();
                Ok(vec![])
            }),
        ));
        helper.start(Job::Close(Box::new(|| None)));
        assert!(helper.poll().is_none());
        go_on.send(()).unwrap();
        let mut ended = Vec::new();
        for _ in 0..12_000 {
            ended.extend(std::iter::from_fn(|| helper.poll()));
            if ended.len() == 2 {
                break;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(matches!(ended[..], [Ended::Status(1, Ok(_)), Ended::Closed(None)]));
    }
}
