//! System calls on a backing's file that may block for as long as its filesystem hangs: a thread makes them, never a shard.
//!
//! io_uring has no operation that finds holes, and closing a file of FUSE or NFS waits for its server. Each backing has at most one such
//! thread, which exists only while there is something to do. An eventfd says when something has ended.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hob_engine::io::IoError;
use rustix::event::{EventfdFlags, eventfd};

use super::Status;
use super::identity::ChangeMark;

/// Stack of the thread, bytes.
const STACK_BYTES: usize = 256 << 10;

/// Something that may block.
pub(super) enum Job {
    /// Answers a question about a range.
    Status(u64, Box<dyn FnOnce() -> Status + Send>),
    /// Closes the files, and returns when they were last changed.
    Close(Box<dyn FnOnce() -> Option<ChangeMark> + Send>),
}

/// A completed job.
pub(super) enum Ended {
    /// The answer to a question.
    Status(u64, Status),
    /// The files are closed.
    Closed(Option<ChangeMark>),
}

/// The thread of one backing.
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
    /// A helper with nothing to do.
    ///
    /// # Errors
    /// The system's, when it has no descriptor for the eventfd.
    pub(super) fn new() -> std::io::Result<Helper> {
        let event = Arc::new(eventfd(0, EventfdFlags::CLOEXEC)?);
        Ok(Helper { shared: Arc::new(Shared { event, state: Mutex::default() }) })
    }

    /// Counts what has ended. Reads of it wait.
    pub(super) fn event(&self) -> Arc<OwnedFd> {
        self.shared.event.clone()
    }

    /// Does a job after those before it.
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
            tracing::warn!("no thread for a file's holes: {error}");
            self.shared.give_up();
        }
    }

    /// The next job that has ended.
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
            };
            self.state().ended.push_back(ended);
            self.signal();
        }
    }

    /// Ends all jobs without a thread. Questions fail. Files are closed here, which may block: there is no other way left.
    fn give_up(&self) {
        let mut state = self.state();
        state.is_running = false;
        for job in std::mem::take(&mut state.jobs) {
            state.ended.push_back(match job {
                Job::Status(id, _) => Ended::Status(id, Err(IoError::Failed)),
                Job::Close(close) => Ended::Closed(close()),
            });
        }
        drop(state);
        self.signal();
    }

    fn signal(&self) {
        // Fails only when 2⁶⁴ − 2 jobs have ended unseen.
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
        for _ in 0..1000 {
            ended.extend(std::iter::from_fn(|| helper.poll()));
            if ended.len() == 2 {
                break;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(matches!(ended[..], [Ended::Status(1, Ok(_)), Ended::Closed(None)]));
    }
}
