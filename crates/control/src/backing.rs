//! The state of a disk's backing: whether it is connected and answers.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The state of a disk's backing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "state", rename_all = "kebab-case")]
pub enum BackingState {
    /// The backing is connected, and no request has waited longer than 2 s.
    #[default]
    Connected,
    /// The backing is connected, and its oldest request has waited longer than 2 s.
    Slow {
        /// Age of the oldest request, milliseconds.
        oldest_request_ms: u64,
        /// Requests that wait for the backing.
        waiting_requests: u64,
    },
    /// The backing is connected, and answered a request with an error within the last minute.
    Failing {
        /// Time since the first error of the present series, seconds. A minute without an error
        /// ends a series.
        since_seconds: u64,
        /// Requests that failed in the last minute.
        failed_last_minute: u64,
        /// Operation and error of the request that failed last.
        last_error: String,
    },
    /// The connection to the backing is lost, or an object store fails all calls, and hob tries
    /// again.
    Reconnecting {
        /// Length of the backing's outage so far, seconds.
        since_seconds: u64,
        /// Why the connection to the backing was lost, or why the last attempt to connect failed.
        last_error: String,
        /// Requests that wait for the backing.
        waiting_requests: u64,
    },
    /// The connection to the backing is lost for good, and every request fails.
    Failed {
        /// Length of the backing's outage so far, seconds.
        since_seconds: u64,
        /// Why hob does not use the backing again.
        last_error: String,
    },
}

impl BackingState {
    /// Names of all backing states.
    pub const NAMES: [&'static str; 5] = ["connected", "slow", "failing", "reconnecting", "failed"];

    /// Returns the state's name in the API and in metrics.
    pub fn name(&self) -> &'static str {
        match self {
            BackingState::Connected => Self::NAMES[0],
            BackingState::Slow { .. } => Self::NAMES[1],
            BackingState::Failing { .. } => Self::NAMES[2],
            BackingState::Reconnecting { .. } => Self::NAMES[3],
            BackingState::Failed { .. } => Self::NAMES[4],
        }
    }

    /// Returns the length of the backing's outage, seconds; 0 while the backing is connected.
    pub fn outage_seconds(&self) -> u64 {
        match self {
            BackingState::Connected | BackingState::Slow { .. } | BackingState::Failing { .. } => 0,
            BackingState::Reconnecting { since_seconds, .. } | BackingState::Failed { since_seconds, .. } => {
                *since_seconds
            }
        }
    }

    /// Returns the age of a slow backing's oldest request, milliseconds; 0 in other states.
    pub fn oldest_request_ms(&self) -> u64 {
        if let BackingState::Slow { oldest_request_ms, .. } = self { *oldest_request_ms } else { 0 }
    }

    /// Returns how many requests wait for a slow or disconnected backing; 0 in other states.
    pub fn waiting_requests(&self) -> u64 {
        match self {
            BackingState::Connected | BackingState::Failing { .. } | BackingState::Failed { .. } => 0,
            BackingState::Slow { waiting_requests, .. }
            | BackingState::Reconnecting { waiting_requests, .. } => *waiting_requests,
        }
    }

    /// Describes the backing's state: `reconnecting for 12 s: Connection refused; 3 requests wait`.
    pub fn sentence(&self) -> String {
        match self {
            BackingState::Connected => "connected".to_owned(),
            BackingState::Slow { oldest_request_ms, waiting_requests } => format!(
                "answers slowly: the oldest request has waited {:.1} s; {}",
                *oldest_request_ms as f64 / 1000.0,
                waiting(*waiting_requests)
            ),
            BackingState::Failing { since_seconds, failed_last_minute, last_error } => format!(
                "has failed requests for {}, {failed_last_minute} of them in the last minute; \
                 last error: {last_error}",
                seconds(*since_seconds)
            ),
            BackingState::Reconnecting { since_seconds, last_error, waiting_requests } => {
                let (since, waiting) = (seconds(*since_seconds), waiting(*waiting_requests));
                format!("reconnecting for {since}: {last_error}; {waiting}")
            }
            BackingState::Failed { since_seconds, last_error } => {
                format!("failed {} ago: {last_error}; every request fails", seconds(*since_seconds))
            }
        }
    }

    /// Describes the backing's state in a few words for a list of disks: `reconnecting for 12 s`.
    /// Returns `None` for a connected backing without a problem.
    pub fn brief(&self) -> Option<String> {
        match self {
            BackingState::Connected => None,
            BackingState::Slow { .. } => Some("answers slowly".to_owned()),
            BackingState::Failing { .. } => Some("fails requests".to_owned()),
            BackingState::Reconnecting { since_seconds, .. } => {
                Some(format!("reconnecting for {}", seconds(*since_seconds)))
            }
            BackingState::Failed { since_seconds, .. } => {
                Some(format!("failed {} ago", seconds(*since_seconds)))
            }
        }
    }
}

fn seconds(whole: u64) -> String {
    match whole {
        0 => "less than 1 s".to_owned(),
        more => format!("{more} s"),
    }
}

fn waiting(requests: u64) -> String {
    match requests {
        1 => "1 request waits".to_owned(),
        all => format!("{all} requests wait"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_have_the_names_that_json_gives_them() {
        let last_error = "Connection refused".to_owned();
        let all = [
            (BackingState::Connected, "connected", None),
            (
                BackingState::Slow { oldest_request_ms: 2500, waiting_requests: 1 },
                "answers slowly: the oldest request has waited 2.5 s; 1 request waits",
                Some("answers slowly"),
            ),
            (
                BackingState::Failing {
                    since_seconds: 90,
                    failed_last_minute: 4,
                    last_error: "read: I/O error (EIO)".to_owned(),
                },
                "has failed requests for 90 s, 4 of them in the last minute; last error: read: I/O error (EIO)",
                Some("fails requests"),
            ),
            (
                BackingState::Reconnecting {
                    since_seconds: 12,
                    last_error: last_error.clone(),
                    waiting_requests: 3,
                },
                "reconnecting for 12 s: Connection refused; 3 requests wait",
                Some("reconnecting for 12 s"),
            ),
            (
                BackingState::Failed { since_seconds: 5, last_error },
                "failed 5 s ago: Connection refused; every request fails",
                Some("failed 5 s ago"),
            ),
        ];
        for ((state, sentence, brief), name) in all.into_iter().zip(BackingState::NAMES) {
            let json = serde_json::to_value(&state).unwrap();
            assert_eq!((json["state"].as_str(), state.name()), (Some(name), name));
            assert_eq!(serde_json::from_value::<BackingState>(json).unwrap(), state);
            assert_eq!((state.sentence(), state.brief().as_deref()), (sentence.to_owned(), brief));
        }
    }

    #[test]
    fn a_state_that_has_just_begun_is_not_said_to_have_lasted_for_0_s() {
        let last_error = || "x".to_owned();
        let failing =
            BackingState::Failing { since_seconds: 0, failed_last_minute: 1, last_error: last_error() };
        let reconnecting =
            BackingState::Reconnecting { since_seconds: 0, last_error: last_error(), waiting_requests: 0 };
        let failed = BackingState::Failed { since_seconds: 0, last_error: last_error() };
        for (state, begin) in [
            (failing, "has failed requests for less than 1 s, 1 of them"),
            (reconnecting, "reconnecting for less than 1 s: x"),
            (failed, "failed less than 1 s ago: x"),
        ] {
            assert!(state.sentence().starts_with(begin), "{}", state.sentence());
        }
    }
}
