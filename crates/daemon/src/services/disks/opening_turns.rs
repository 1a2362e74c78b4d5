//! Limits how many backings are opened at the same time, because a backing may hang.
//!
//! An opening whose backing does not answer keeps a thread for up to 10 s. The runtime has 512 such
//! threads, which also save the state and use the pools. If thousands of hung backings had all
//! threads, all other operations would wait. So an opening needs a turn.
//!
//! A disk whose last opening was slow has a turn of another kind. So disks that hang, which hob
//! opens again every few seconds, do not delay other disks.

use std::time::Duration;

use tokio::sync::{Semaphore, SemaphorePermit};

/// Number of turns of disks whose last opening was not slow.
const USUAL_TURNS: usize = 320;

/// Number of turns of disks whose last opening was slow.
const SLOW_TURNS: usize = 64;

/// An opening that takes longer is slow.
const USUAL_MAX: Duration = Duration::from_secs(1);

/// How fast the backing of a disk was opened last, or how fast the attempt failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::services) enum OpeningSpeed {
    /// The opening took at most [`USUAL_MAX`], or there was none.
    #[default]
    Usual,
    Slow,
}

impl OpeningSpeed {
    /// Returns the speed of an opening of this length.
    pub(super) fn of(length: Duration) -> OpeningSpeed {
        if length > USUAL_MAX { OpeningSpeed::Slow } else { OpeningSpeed::Usual }
    }
}

/// The turns of all disks.
#[derive(Debug)]
pub(super) struct OpeningTurns {
    usual: Semaphore,
    slow: Semaphore,
}

impl Default for OpeningTurns {
    fn default() -> OpeningTurns {
        OpeningTurns { usual: Semaphore::new(USUAL_TURNS), slow: Semaphore::new(SLOW_TURNS) }
    }
}

impl OpeningTurns {
    /// Waits for a turn. `speed` is that of the disk's last opening.
    pub(super) async fn take(&self, speed: OpeningSpeed) -> SemaphorePermit<'_> {
        let turns = match speed {
            OpeningSpeed::Usual => &self.usual,
            OpeningSpeed::Slow => &self.slow,
        };
        turns.acquire().await.expect("never closed")
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::timeout;

    use super::*;
    use crate::exports::Exports;
    use crate::fake_shard::FakeShard;
    use crate::hardware::BackingOptions;
    use crate::services::Services;
    use crate::services::tests::Bench;
    use crate::state::{DiskState, Store};

    #[test]
    fn an_opening_waits_for_a_turn_of_the_disks_speed() {
        crate::background::run_in_virtual_time(async {
            let bench = Bench::new();
            let disks = &bench.services.disks;
            for name in ["new", "hung"] {
                let path = bench.path(name);
                std::fs::File::create(&path).unwrap().set_len(8 << 20).unwrap();
                drop(disks.enter(DiskState::new(name.to_owned(), path, false), None).unwrap());
            }
            let registry = &bench.services.registry;
            registry.inner().disk_mut("hung").unwrap().opening_speed = OpeningSpeed::Slow;
            let is_online = |name: &str| registry.shard_of(name).is_ok();
            let turns = disks.opening_turns.usual.acquire_many(USUAL_TURNS as u32).await.unwrap();
            // Not even a start with thousands of new disks delays a disk that is opened again.
            disks.bring_online("hung").await;
            assert!(is_online("hung"));
            let opening = disks.bring_online("new");
            tokio::pin!(opening);
            assert!(timeout(Duration::from_secs(60), &mut opening).await.is_err());
            drop(turns);
            opening.await;
            assert!(is_online("new"));
        });
    }

    /// The server of the backing accepts the connection, and sends nothing.
    #[test]
    fn a_backing_that_does_not_answer_is_slow() {
        crate::background::run_in_real_time(async {
            let (handle, _shard) = FakeShard::start();
            let options = BackingOptions { connect_max: 2 * USUAL_MAX, ..BackingOptions::default() };
            let services = Services::new(vec![handle], Exports::default(), options, Store::Memory);
            services.registry.set_restored();
            let directory = tempfile::tempdir().unwrap();
            let socket = directory.path().join("silent.sock");
            let _silent = std::os::unix::net::UnixListener::bind(&socket).unwrap();
            let backing = format!("nbd+unix:///vm?socket={}", socket.display());
            drop(services.disks.enter(DiskState::new("vm".to_owned(), backing, false), None).unwrap());
            let speed = || services.registry.inner().disk("vm").unwrap().opening_speed;
            assert_eq!(speed(), OpeningSpeed::Usual);
            services.disks.bring_online("vm").await;
            assert_eq!(speed(), OpeningSpeed::Slow);
        });
    }

    #[test]
    fn disks_that_hang_leave_threads_and_turns_to_others() {
        crate::background::run_in_virtual_time(async {
            assert_eq!(OpeningSpeed::of(USUAL_MAX), OpeningSpeed::Usual);
            let hung = OpeningSpeed::of(2 * USUAL_MAX);
            let turns = OpeningTurns::default();
            let mut taken = Vec::new();
            while let Ok(turn) = timeout(Duration::from_secs(1), turns.take(hung)).await {
                taken.push(turn);
            }
            assert_eq!(taken.len(), SLOW_TURNS);
            while let Ok(turn) = timeout(Duration::from_secs(1), turns.take(OpeningSpeed::Usual)).await {
                taken.push(turn);
            }
            assert!((300..400).contains(&taken.len()), "of 512 threads: {}", taken.len());
        });
    }
}
