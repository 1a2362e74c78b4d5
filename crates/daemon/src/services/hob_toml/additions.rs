//! Adds the new disks of hob.toml at the same time, because the backing of a disk may hang.
//!
//! A missing backing is an error at once, but a server that does not answer takes seconds. So at
//! most [`TURNS`] disks have a turn, and a disk that is not added within [`TURN_MAX`] continues
//! without one, while the next disk has its turn. The caller gets the results in the order of the
//! disks.
//!
//! The result must not depend on which backing answers first. So the disks get their QoS settings
//! and caches in the order of hob.toml. A clone waits for the earlier clones that have other
//! settings for the disk of a parent, because the first clone of a parent creates this disk. The
//! backing of a disk may be another new disk, through hob's own socket or file. So disks that could
//! not be added are tried once more after all others.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use hob_control::{ConfigDifference, Size};
use tokio::sync::{Semaphore, watch};
use tokio::task::{JoinError, JoinHandle};
use tokio::time::timeout;
use tracing::Instrument as _;

use super::changes::Change;
use super::differences::Found;
use super::path_order::Step;
use super::{Failure, HobToml};
use crate::api_error::failed;
use crate::background::spawn;
use crate::config::DiskEntry;

/// Maximum number of disks that have a turn. An opening without an answer takes a blocking thread
/// for 10 s, so 160 threads wait if no backing answers. Tokio has 512.
const TURNS: usize = 16;

/// Maximum length of a turn.
const TURN_MAX: Duration = Duration::from_secs(1);

/// A new disk.
#[derive(Clone)]
pub(super) struct Addition {
    difference: ConfigDifference,
    disk: Box<DiskEntry>,
}

/// The result of adding a disk without its QoS settings and its cache.
type Added = Result<(), Failure>;

/// The disks that are being added, in the order of their changes.
#[derive(Default)]
pub(super) struct Additions {
    running: VecDeque<(Addition, JoinHandle<Added>)>,
    /// The disks before those of `running` whose result the caller has not taken.
    ended: VecDeque<(Addition, Added)>,
    /// True if a disk was added.
    has_added: bool,
}

impl Additions {
    pub(super) fn is_empty(&self) -> bool {
        self.running.is_empty() && self.ended.is_empty()
    }

    /// Waits until the next disk is added or has failed. Returns false if there is no further disk.
    async fn end_next(&mut self) -> bool {
        let Some((addition, task)) = self.running.pop_front() else { return false };
        let added = result_of(task.await);
        self.has_added |= added.is_ok();
        self.ended.push_back((addition, added));
        true
    }
}

/// Returns the changes that add disks, up to the first change of another kind or the first change
/// for which `is_made` returns false.
pub(super) fn first_additions<'a>(
    steps: impl Iterator<Item = &'a Step>,
    is_made: impl Fn(&ConfigDifference) -> bool,
) -> Vec<Addition> {
    let addition = |step: &Step| match step {
        Step::Make(Found { difference, change: Some(Change::AddDisk(disk)) }) => {
            is_made(difference).then(|| Addition { difference: difference.clone(), disk: disk.clone() })
        }
        _ => None,
    };
    steps.map_while(addition).collect()
}

impl HobToml {
    /// Begins to add disks.
    pub(super) fn begin_additions(&self, additions: Vec<Addition>) -> Additions {
        let turns = Arc::new(Semaphore::new(TURNS));
        let mut parents = ParentOrder::default();
        let begin = |addition: Addition| {
            let (earlier, end) = parents.enter(&addition.disk);
            let (turns, added) = (turns.clone(), self.clone().add(addition.clone()));
            let work = async move {
                for mut earlier in earlier {
                    // An error tells that the sender was dropped.
                    let _ = earlier.changed().await;
                }
                let added = in_turn(turns, added).await;
                drop(end);
                added
            };
            // Log lines keep the id of the request that caused the change.
            (addition, spawn(work.in_current_span()))
        };
        Additions { running: additions.into_iter().map(begin).collect(), ..Additions::default() }
    }

    /// Waits until the next disk is added, gives the disk its QoS settings and its cache, and returns
    /// the result; `None` if there is no further disk.
    pub(super) async fn next_added(&self, additions: &mut Additions) -> Option<Result<(), Failure>> {
        if additions.ended.is_empty() {
            additions.end_next().await;
            if additions.ended.iter().any(|(_, added)| added.is_err()) {
                while additions.end_next().await {}
                self.add_again(additions).await;
            }
        }
        let (Addition { difference, disk }, added) = additions.ended.pop_front()?;
        Some(match added {
            Ok(()) => self.attempt(&difference, self.complete_defined(*disk)).await,
            Err(failure) => Err(failure),
        })
    }

    async fn add(self, addition: Addition) -> Added {
        let Addition { difference, disk } = addition;
        self.attempt(&difference, self.add_defined(*disk)).await
    }

    /// Tries once more, in order, to add the disks that could not be added. A disk that is not added
    /// within [`TURN_MAX`] continues while the next one is tried.
    async fn add_again(&self, additions: &mut Additions) {
        if !additions.has_added {
            return;
        }
        let mut running = Vec::new();
        for (addition, added) in &mut additions.ended {
            let Err(Failure { is_delayed: false, .. }) = added else { continue };
            if self.registry.inner().disk(&addition.disk.name).is_ok() {
                // Only an export of the disk could not be added.
                continue;
            }
            let mut task = spawn(self.clone().add(addition.clone()).in_current_span());
            match timeout(TURN_MAX, &mut task).await {
                Ok(ended) => *added = result_of(ended),
                Err(_) => running.push((added, task)),
            }
        }
        for (added, task) in running {
            *added = result_of(task.await);
        }
    }
}

/// Returns the result of a task that adds a disk.
fn result_of(ended: Result<Added, JoinError>) -> Added {
    ended.unwrap_or_else(|error| {
        let error = failed!("an internal task ended unexpectedly: {error}");
        Err(Failure { error, is_delayed: false })
    })
}

/// The order of clones that may have the same parent.
#[derive(Default)]
struct ParentOrder(Vec<(ParentSettings, Vec<watch::Receiver<()>>)>);

/// Settings of a clone that are used when the clone creates the disk of its parent.
type ParentSettings = (Option<Size>, Option<String>);

impl ParentOrder {
    /// Enters a new disk. If the disk shares its parent, returns the receivers of the earlier clones
    /// that have other settings, and a sender. The owner of the sender drops it when the disk is
    /// added.
    fn enter(&mut self, disk: &DiskEntry) -> (Vec<watch::Receiver<()>>, Option<watch::Sender<()>>) {
        if !disk.share_parent {
            return (Vec::new(), None);
        }
        let settings = (disk.parent_cache, disk.datastore.clone());
        let others = self.0.iter().filter(|(other, _)| *other != settings);
        let earlier = others.flat_map(|(_, clones)| clones.iter().cloned()).collect();
        let (sender, receiver) = watch::channel(());
        match self.0.iter_mut().find(|(other, _)| *other == settings) {
            Some((_, clones)) => clones.push(receiver),
            None => self.0.push((settings, vec![receiver])),
        }
        (earlier, Some(sender))
    }
}

/// Runs `work` when it has its turn, which ends after [`TURN_MAX`] at the latest.
async fn in_turn<T>(turns: Arc<Semaphore>, work: impl Future<Output = T>) -> T {
    let turn = turns.acquire_owned().await.expect("never closed");
    let mut work = std::pin::pin!(work);
    let early = timeout(TURN_MAX, work.as_mut()).await;
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

    #[test]
    fn a_clone_waits_for_earlier_clones_with_other_settings_of_their_parent() {
        let disk = |settings: &str| {
            let text = format!("name = \"vm\"\nbacking = \"vm.qcow2\"\n{settings}");
            toml::from_str::<DiskEntry>(&text).unwrap()
        };
        let mut order = ParentOrder::default();
        let mut enter = |settings: &str| order.enter(&disk(settings));
        let small = "share_parent = true\nparent_cache = \"1M\"";
        let (first, one) = enter(small);
        let (second, two) = enter(small);
        assert!(first.is_empty() && second.is_empty());
        let (other, end) = enter("datastore = \"1M\"");
        assert!(other.is_empty() && end.is_none());
        let (third, _three) = enter("share_parent = true");
        assert_eq!((third.len(), enter(small).0.len()), (2, 1));
        assert!(third.iter().all(|clone| clone.has_changed().is_ok()));
        drop((one, two));
        assert!(third.iter().all(|clone| clone.has_changed().is_err()));
    }

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
