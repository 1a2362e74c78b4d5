//! Limits how many backings are opened at the same time, because a backing may hang.
//!
//! An opening whose backing does not answer keeps a thread for up to 10 s. The runtime has 512 such
//! threads, which also save the state and use the pools. If thousands of hung backings had all
//! threads, all other operations would wait. So an opening needs a turn.
//!
//! A disk whose last opening was slow and failed has a turn of another kind. So disks that hang,
//! which hob opens again every few seconds, do not delay other disks. An opening that succeeds may
//! take seconds, as those of S3 and RBD do.

use std::time::Duration;

use tokio::sync::{Semaphore, SemaphorePermit};

/// Number of turns of disks whose last opening did not fail slowly.
const USUAL_TURNS: usize = 320;

/// Number of turns of disks whose last opening failed slowly.
const SLOW_TURNS: usize = 64;

/// An opening that fails after a longer time is slow.
const USUAL_MAX: Duration = Duration::from_secs(1);

/// How fast the last opening of a disk's backing failed, if it failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::services) enum OpeningSpeed {
    /// The opening succeeded, or failed within [`USUAL_MAX`], or there was none.
    #[default]
    Usual,
    /// The opening failed after more than [`USUAL_MAX`].
    Slow,
}

impl OpeningSpeed {
    /// Returns the speed of an opening with this result and length.
    pub(super) fn of<T, E>(opened: &Result<T, E>, length: Duration) -> OpeningSpeed {
        if opened.is_err() && length > USUAL_MAX { OpeningSpeed::Slow } else { OpeningSpeed::Usual }
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
    use std::path::Path;

    use tokio::time::timeout;

    use super::*;
    use crate::hardware::BackingOptions;
    use crate::services::tests::{Bench, services_with};
    use crate::state::DiskState;

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

    /// Opens a disk whose backing is an NBD export on this socket, and returns the speed.
    async fn open(socket: &Path) -> OpeningSpeed {
        let options = BackingOptions { connect_max: 2 * USUAL_MAX, ..BackingOptions::default() };
        let (services, _shard) = services_with(options);
        let backing = format!("nbd+unix:///vm?socket={}", socket.display());
        drop(services.disks.enter(DiskState::new("vm".to_owned(), backing, false), None).unwrap());
        let speed = || services.registry.inner().disk("vm").unwrap().opening_speed;
        assert_eq!(speed(), OpeningSpeed::Usual);
        services.disks.bring_online("vm").await;
        speed()
    }

    /// The server of the backing accepts the connection, and sends nothing.
    #[test]
    fn a_backing_that_does_not_answer_is_slow() {
        crate::background::run_in_real_time(async {
            let directory = tempfile::tempdir().unwrap();
            let socket = directory.path().join("silent.sock");
            let _silent = std::os::unix::net::UnixListener::bind(&socket).unwrap();
            assert_eq!(open(&socket).await, OpeningSpeed::Slow);
        });
    }

    /// Another operation has the only thread most of the time.
    #[test]
    fn a_backing_that_fails_after_a_wait_for_a_thread_is_not_slow() {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        runtime.max_blocking_threads(1).enable_all().build().unwrap().block_on(async {
            let busy = tokio::spawn(async {
                for _ in 0..60 {
                    let wait = || std::thread::sleep(USUAL_MAX + USUAL_MAX / 4);
                    tokio::task::spawn_blocking(wait).await.unwrap();
                }
            });
            let directory = tempfile::tempdir().unwrap();
            assert_eq!(open(&directory.path().join("missing.sock")).await, OpeningSpeed::Usual);
            busy.abort();
        });
    }

    #[test]
    fn only_a_failed_opening_is_slow() {
        let [opened, failed] = [Ok(()), Err(())];
        assert_eq!(OpeningSpeed::of(&opened, 20 * USUAL_MAX), OpeningSpeed::Usual);
        assert_eq!(OpeningSpeed::of(&failed, USUAL_MAX), OpeningSpeed::Usual);
        assert_eq!(OpeningSpeed::of(&failed, 2 * USUAL_MAX), OpeningSpeed::Slow);
    }

    #[test]
    fn disks_that_hang_leave_threads_and_turns_to_others() {
        crate::background::run_in_virtual_time(async {
            let hung = OpeningSpeed::Slow;
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
