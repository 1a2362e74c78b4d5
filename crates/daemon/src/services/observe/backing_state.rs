//! The state of each disk's backing, as shown by the API, health and metrics. The functions here
//! send no request to a shard or a backing.

use std::time::Duration;

use hob_control::{BackingState, ProblemKind};

use super::Observe;
use crate::hardware::Condition;
use crate::services::registry::{DiskEntry, DiskPhase};

/// If a request has waited for this time, hob concludes that the backing does not answer. A busy
/// backing answers late too, so this time is longer than the time after which `hob health` reports
/// a slow backing.
const SILENT_AFTER: Duration = Duration::from_secs(5);

impl DiskEntry {
    /// Returns the state of the backing; `None` while the disk is not served.
    pub(in crate::services) fn backing_state(&self) -> Option<BackingState> {
        let DiskPhase::Online(_) = self.phase else { return None };
        Some(state(self.measure.as_ref()?.monitor.condition()))
    }

    /// Returns why a change that needs the backing must wait: hob has no connection to the backing,
    /// or a request has waited for [`SILENT_AFTER`]. Returns `None` if the backing answers.
    pub(in crate::services) fn silent_backing(&self) -> Option<String> {
        let state = self.backing_state()?;
        is_silent(&state).then(|| format!("the backing {} {}", self.wanted.backing, state.sentence()))
    }

    /// Returns the health problem of a slow, failing, unreachable or failed backing: its kind and a
    /// message. Returns `None` if the backing has no problem, or if the disk is not served.
    pub(in crate::services) fn backing_problem(&self) -> Option<(ProblemKind, String)> {
        problem(&self.wanted.name, &self.wanted.backing, &self.backing_state()?)
    }
}

impl Observe {
    /// Logs once when a backing begins to answer requests with errors, and once when the errors
    /// have ended.
    pub(in crate::services) fn log_failing_backings(&self) {
        for (name, disk) in &mut self.registry.inner().disks {
            let (was_failing, state) = (disk.backing_was_failing, disk.backing_state());
            match state {
                Some(state @ BackingState::Failing { .. }) if !was_failing => {
                    disk.backing_was_failing = true;
                    tracing::warn!("disk {name}: backing {} {}", disk.wanted.backing, state.sentence());
                }
                Some(BackingState::Connected) if was_failing => {
                    disk.backing_was_failing = false;
                    tracing::info!(
                        "disk {name}: backing {} has failed no request for a minute",
                        disk.wanted.backing
                    );
                }
                _ => {}
            }
        }
    }
}

fn state(condition: Condition) -> BackingState {
    match condition {
        Condition::Connected => BackingState::Connected,
        Condition::Slow { oldest, waiting } => {
            BackingState::Slow { oldest_request_ms: oldest.as_millis() as u64, waiting_requests: waiting }
        }
        Condition::Failing { since, last_minute, error } => BackingState::Failing {
            since_seconds: since.as_secs(),
            failed_last_minute: last_minute,
            last_error: error,
        },
        Condition::Reconnecting { outage, error, waiting } => BackingState::Reconnecting {
            since_seconds: outage.as_secs(),
            last_error: error,
            waiting_requests: waiting,
        },
        Condition::Failed { outage, error } => {
            BackingState::Failed { since_seconds: outage.as_secs(), last_error: error }
        }
    }
}

fn is_silent(state: &BackingState) -> bool {
    match state {
        BackingState::Connected | BackingState::Failing { .. } => false,
        BackingState::Slow { oldest_request_ms, .. } => {
            u128::from(*oldest_request_ms) >= SILENT_AFTER.as_millis()
        }
        BackingState::Reconnecting { .. } | BackingState::Failed { .. } => true,
    }
}

fn problem(disk: &str, backing: &str, state: &BackingState) -> Option<(ProblemKind, String)> {
    let (kind, advice) = match state {
        BackingState::Connected => return None,
        BackingState::Slow { .. } => {
            (ProblemKind::BackingSlow, "check the storage of the backing and the network".to_owned())
        }
        BackingState::Failing { .. } => (
            ProblemKind::BackingErrors,
            "check the storage of the backing and the log of its server; this report ends after a minute \
             without a failed request"
                .to_owned(),
        ),
        BackingState::Reconnecting { .. } => (
            ProblemKind::BackingUnreachable,
            "hob reconnects by itself; check that the server runs, can be reached, and accepts the \
             credentials"
                .to_owned(),
        ),
        BackingState::Failed { .. } => (
            ProblemKind::BackingUnreachable,
            format!("let the server export the right disk, then remove {disk} and add it again"),
        ),
    };
    Some((kind, format!("backing {backing} {}; {advice}", state.sentence())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_waits_for_a_lost_connection_and_for_requests_without_answer() {
        let slow = |ms| state(Condition::Slow { oldest: Duration::from_millis(ms), waiting: 1 });
        assert!(!is_silent(&slow(2500)), "a busy backing answers");
        assert!(is_silent(&slow(5000)));
        assert!(!is_silent(&state(Condition::Connected)));
        let (outage, error) = (Duration::from_secs(1), "Connection refused".to_owned());
        assert!(is_silent(&state(Condition::Failed { outage, error: error.clone() })));
        assert!(is_silent(&state(Condition::Reconnecting { outage, error, waiting: 0 })));
    }

    #[test]
    fn a_problem_names_the_backing_the_reason_and_what_to_do() {
        let of = |condition| problem("web", "nbd://store/web", &state(condition));
        assert_eq!(of(Condition::Connected), None);
        let oldest = Duration::from_millis(4200);
        let (kind, reason) = of(Condition::Slow { oldest, waiting: 2 }).unwrap();
        assert_eq!(kind, ProblemKind::BackingSlow);
        assert_eq!(
            reason,
            "backing nbd://store/web answers slowly: the oldest request has waited 4.2 s; 2 requests wait; \
             check the storage of the backing and the network"
        );
        let since = Duration::from_secs(61);
        let failing = Condition::Failing { since, last_minute: 7, error: "read: I/O error (EIO)".to_owned() };
        let (kind, reason) = of(failing).unwrap();
        assert_eq!(kind, ProblemKind::BackingErrors);
        assert!(
            reason
                .contains("for 61 s, 7 of them in the last minute; last error: read: I/O error (EIO); check"),
            "{reason}"
        );
        let (outage, error) = (Duration::from_secs(9), "Connection refused".to_owned());
        let reconnecting = Condition::Reconnecting { outage, error: error.clone(), waiting: 1 };
        let (kind, reason) = of(reconnecting).unwrap();
        assert_eq!(kind, ProblemKind::BackingUnreachable);
        assert!(
            reason.contains("reconnecting for 9 s: Connection refused; 1 request waits; hob reconnects"),
            "{reason}"
        );
        let (kind, reason) = of(Condition::Failed { outage, error }).unwrap();
        assert_eq!(kind, ProblemKind::BackingUnreachable);
        assert!(reason.contains("remove web and add it again"), "{reason}");
    }
}
