//! Decides when `hob attach` repeats a failed step or plan.

use std::time::{Duration, Instant};

use anyhow::bail;
use hob_control::client::ClientError;

use super::execution::tell;
use super::plan::{Goal, State, next};
use crate::remote::Explained;

/// Maximum time that a command waits for a daemon that restarts.
pub(super) const DAEMON_MAX: Duration = Duration::from_secs(30);
/// Maximum number of restarts of the daemon that a command tolerates on its way to one goal.
pub(super) const RESTARTS_MAX: u32 = 5;
/// Maximum number of times that the plan is carried out to its end.
const PASSES_MAX: usize = 4;
/// Maximum time for another program to release the image. The VM is paused meanwhile.
const LOCK_MAX: Duration = Duration::from_secs(5);
/// End of the daemon's error about a disk that it is opening after its start.
const OPENING: &str = " is being opened";

/// Counts the daemon's restarts during one operation of the command, and decides whether a failed
/// step may be tried again.
#[derive(Default)]
pub(super) struct Restarts {
    count: u32,
    /// Time of the last restart, or of the first reply that the daemon is opening the disk.
    last: Option<Instant>,
    is_told: bool,
}

impl Restarts {
    /// Counts a restart. Returns false if there are too many.
    pub(super) fn count(&mut self) -> bool {
        self.count += 1;
        self.last = Some(Instant::now());
        self.count <= RESTARTS_MAX
    }

    /// Returns true if a failed step may succeed later: the daemon ended during the step, or the
    /// daemon has restarted and is still opening the disk.
    pub(super) fn may_try_again(&mut self, error: &anyhow::Error) -> bool {
        match error.downcast_ref::<Explained>().map(|explained| &explained.error) {
            Some(ClientError::Unreachable { .. } | ClientError::BrokeOff { .. }) => self.count(),
            Some(ClientError::Refused { status: 404 | 409, problem }) => {
                // The daemon may have restarted before this command began.
                if problem.error.ends_with(OPENING) {
                    self.last.get_or_insert_with(Instant::now);
                    if !std::mem::replace(&mut self.is_told, true) {
                        tell("the hob daemon is opening the disk; waiting for it");
                    }
                }
                self.last.is_some_and(|at| at.elapsed() < DAEMON_MAX)
            }
            _ => false,
        }
    }
}

/// The states in which the plan was started. A recurring state means that the plan would repeat its
/// steps forever, so the command fails.
#[derive(Default)]
pub(super) struct Passes(Vec<State>);

impl Passes {
    /// Begins the plan at `state`.
    ///
    /// # Errors
    /// Returns an error if all steps of the plan were carried out, and did not change the state.
    pub(super) fn begin(&mut self, goal: Goal, state: State) -> anyhow::Result<()> {
        if let Ok(Some(step)) = next(goal, state)
            && (self.0.contains(&state) || self.0.len() == PASSES_MAX)
        {
            bail!("all steps succeeded, but the VM or hob is again in a state that needs the step '{step}'");
        }
        self.0.push(state);
        Ok(())
    }
}

/// Returns how long a request to lock or release the image is repeated after this error.
pub(super) fn lock_time_max(error: &ClientError) -> Duration {
    match error {
        ClientError::Unreachable { .. } | ClientError::BrokeOff { .. } => DAEMON_MAX,
        ClientError::Refused { status: 409, problem } if problem.error.ends_with(OPENING) => DAEMON_MAX,
        // A process of hob that was killed may still be ending.
        ClientError::Refused { status: 409, .. } => LOCK_MAX,
        _ => Duration::ZERO,
    }
}

#[cfg(test)]
mod tests {
    use hob_control::Problem;

    use super::super::plan::{Definition, HobDisk, Path, Spare};
    use super::*;
    use crate::remote::explain;

    fn refused(error: &str) -> anyhow::Error {
        explain(ClientError::Refused { status: 409, problem: Problem::new(error) })
    }

    #[test]
    fn a_command_waits_for_a_disk_that_the_daemon_opens() {
        let mut restarts = Restarts::default();
        assert!(!restarts.may_try_again(&refused("vm is being resized")));
        assert!(restarts.may_try_again(&refused("vm is being opened")));
        let endpoint = hob_control::Endpoint::Unix("/run/hob/control.sock".into());
        let mut restarts = Restarts::default();
        for count in 0..=RESTARTS_MAX {
            let ended = explain(ClientError::BrokeOff { endpoint: endpoint.clone() });
            assert_eq!(restarts.may_try_again(&ended), count < RESTARTS_MAX);
        }
    }

    /// The VM is paused while the command waits for the lock.
    #[test]
    fn a_command_waits_longer_for_a_daemon_than_for_another_program() {
        let refused = |status, error: &str| ClientError::Refused { status, problem: Problem::new(error) };
        assert_eq!(lock_time_max(&refused(409, "web is being opened")), DAEMON_MAX);
        assert_eq!(lock_time_max(&refused(409, "web: another program has the backing open")), LOCK_MAX);
        assert_eq!(lock_time_max(&refused(404, "there is no disk web")), Duration::ZERO);
    }

    #[test]
    fn a_plan_that_changes_nothing_ends() {
        let state = State {
            recorded: true,
            disk: HobDisk::Cached,
            node: true,
            path: Path::Image,
            spare: Spare::None,
            running: true,
            marked: false,
            job: false,
            definition: Definition::None,
        };
        let mut passes = Passes::default();
        passes.begin(Goal::Attached, state).unwrap();
        let error = passes.begin(Goal::Attached, state).unwrap_err().to_string();
        assert!(error.contains("disable the cache"), "{error}");
        // The plan ends here, so nothing is repeated.
        let attached = State { path: Path::Hob, ..state };
        passes.begin(Goal::Attached, attached).unwrap();
        passes.begin(Goal::Attached, attached).unwrap();
        passes.begin(Goal::Attached, State { disk: HobDisk::Absent, ..state }).unwrap();
        assert!(passes.begin(Goal::Attached, State { disk: HobDisk::Locked, ..state }).is_err());
    }
}
