//! Adds the new disks of hob.toml at the same time, because the backing of a disk may hang.
//!
//! A missing backing is an error at once, but a server that does not answer takes seconds. So at
//! most [`TURNS`] disks have a turn, and a disk that is not added within [`TURN_MAX`] continues
//! without one, while the next disk has its turn. The caller gets the results in the order of the
//! disks.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use hob_control::ConfigDifference;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tracing::Instrument as _;

use super::changes::Change;
use super::differences::Found;
use super::path_order::Step;
use super::{Failure, HobToml};
use crate::api_error::failed;
use crate::background::spawn;

/// Maximum number of disks that have a turn. An opening without an answer takes a blocking thread
/// for 10 s, so 160 threads wait if no backing answers. Tokio has 512.
const TURNS: usize = 16;

/// Maximum length of a turn.
const TURN_MAX: Duration = Duration::from_secs(1);

/// The disks that are being added, in the order of their changes.
#[derive(Default)]
pub(super) struct Additions(VecDeque<JoinHandle<Result<(), Failure>>>);

impl Additions {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Waits for the result of the next disk; `None` if there is no further disk.
    pub(super) async fn next(&mut self) -> Option<Result<(), Failure>> {
        let added = self.0.pop_front()?.await;
        Some(added.unwrap_or_else(|error| {
            let error = failed!("an internal task ended unexpectedly: {error}");
            Err(Failure { error, is_delayed: false })
        }))
    }
}

/// Returns the changes that add disks, up to the first change of another kind or the first change
/// for which `is_made` returns false.
pub(super) fn first_additions<'a>(
    steps: impl Iterator<Item = &'a Step>,
    is_made: impl Fn(&ConfigDifference) -> bool,
) -> Vec<(ConfigDifference, Change)> {
    let addition = |step: &Step| match step {
        Step::Make(Found { difference, change: Some(change @ Change::AddDisk(_)) }) => {
            is_made(difference).then(|| (difference.clone(), change.clone()))
        }
        _ => None,
    };
    steps.map_while(addition).collect()
}

impl HobToml {
    /// Begins to add disks.
    pub(super) fn begin_additions(&self, disks: Vec<(ConfigDifference, Change)>) -> Additions {
        let turns = Arc::new(Semaphore::new(TURNS));
        let add = |(difference, change): (ConfigDifference, Change)| {
            let (service, turns) = (self.clone(), turns.clone());
            let added = async move { service.make_step(change, None, &difference).await };
            // Log lines keep the id of the request that caused the change.
            spawn(in_turn(turns, added).in_current_span())
        };
        Additions(disks.into_iter().map(add).collect())
    }
}

/// Runs `work` when it has its turn, which ends after [`TURN_MAX`] at the latest.
async fn in_turn<T>(turns: Arc<Semaphore>, work: impl Future<Output = T>) -> T {
    let turn = turns.acquire_owned().await.expect("never closed");
    let mut work = std::pin::pin!(work);
    let early = tokio::time::timeout(TURN_MAX, work.as_mut()).await;
    drop(turn);
    match early {
        Ok(result) => result,
        Err(_) => work.await,
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::{Instant, sleep};

    use super::*;

    /// Returns the time from `start` to the begin of work that takes `length`.
    async fn work(start: Instant, length: Duration) -> Duration {
        let begun = start.elapsed();
        sleep(length).await;
        begun
    }

    #[test]
    fn work_that_hangs_delays_other_work_for_one_turn() {
        crate::background::run_in_virtual_time(async {
            let (start, turns) = (Instant::now(), Arc::new(Semaphore::new(TURNS)));
            let begin = |length| spawn(in_turn(turns.clone(), work(start, length)));
            let hung: Vec<_> = (0..3 * TURNS).map(|_| begin(10 * TURN_MAX)).collect();
            let begun = begin(Duration::ZERO).await.unwrap();
            assert!((3 * TURN_MAX..4 * TURN_MAX).contains(&begun), "{begun:?}");
            for (number, hung) in hung.into_iter().enumerate() {
                let begun = hung.await.unwrap();
                let wait = TURN_MAX * u32::try_from(number / TURNS).unwrap();
                assert!((wait..wait + TURN_MAX).contains(&begun), "{number}: {begun:?}");
            }
        });
    }
}
