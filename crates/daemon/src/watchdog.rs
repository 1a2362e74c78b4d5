//! Ends the process when a shard hangs, or after a panic in code on which other code depends.
//!
//! After the panic of a thread or task, a part of the daemon is dead: for example, disks do not
//! answer, a socket accepts no clients, or a change stays incomplete. A panic is a normal error
//! only in three cases. The first case is work that only reads flash or a file, or saves the copy
//! of hob.toml ([`contained`]). A journal that makes recovery panic must not end the daemon at each
//! start. The other cases are the connection of one client, and requests that change nothing
//! ([`contained_task`]).
//!
//! Many disks share a shard, and the disks of a dead shard would never answer. Therefore the
//! process aborts: systemd restarts it, caches are recovered, and guests reconnect. The recovery
//! after an abort is the same as after kill -9, which is tested most.
//!
//! # Time
//! A shard is silent while a ping to it has no answer. Each check adds the time since the previous
//! check to the silence, but at most [`TURN_COUNTED_MAX`]. A process that is stopped (SIGSTOP,
//! freezer, a suspended VM) stops the watchdog too, so it does not abort when it continues.

use std::cell::Cell;
use std::time::{Duration, Instant};

use anyhow::Context;
use tokio::sync::oneshot;
use tokio::sync::oneshot::error::TryRecvError;

use super::shard_api::{ShardError, ShardHandle};

/// Interval between two checks of the watchdog.
const TURN: Duration = Duration::from_millis(250);

/// Maximum time that one check adds to the silence of a shard, even if the previous check was
/// longer ago.
const TURN_COUNTED_MAX: Duration = Duration::from_millis(500);

/// Names of threads whose panic does not end the daemon. These threads only read: a cache on flash,
/// or properties of the files and devices that hob.toml names. Their callers handle a panic.
const CONTAINED: [&str; 2] = ["hob-recovery", "hob-check"];

thread_local! {
    static IS_CONTAINED: Cell<bool> = const { Cell::new(false) };
}

tokio::task_local! {
    static IS_TASK_CONTAINED: bool;
}

/// Runs `work` so that a panic does not end the process. The caller must handle the panic. `work`
/// must not leave incomplete changes after a panic: it only reads, or replaces a whole file.
pub(crate) fn contained<T>(work: impl FnOnce() -> T) -> T {
    /// Restores the previous value, also after a panic, because the thread is reused.
    struct Before(bool);

    impl Drop for Before {
        fn drop(&mut self) {
            IS_CONTAINED.set(self.0);
        }
    }

    let _before = Before(IS_CONTAINED.replace(true));
    work()
}

/// Runs a task. If `is_contained` is true, a panic ends only the task and not the process. A panic
/// of a task that the task has spawned ends the process.
pub(crate) async fn contained_task<T>(is_contained: bool, work: impl Future<Output = T>) -> T {
    IS_TASK_CONTAINED.scope(is_contained, work).await
}

/// Makes a panic end the process, unless it is contained.
pub(crate) fn abort_on_panic() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        report(panic);
        let thread = std::thread::current();
        let name = thread.name().unwrap_or("without a name");
        let is_contained = IS_CONTAINED.get()
            || CONTAINED.contains(&name)
            || IS_TASK_CONTAINED.try_with(|is_contained| *is_contained).unwrap_or(false);
        if is_contained {
            return tracing::error!("thread {name} panicked, and its task has ended: {panic}");
        }
        abort(&format!("thread {name} panicked: {panic}"));
    }));
}

/// Watches `shards` from now on, and ends the process when one is silent for `silence_max`. Zero
/// disables the watchdog.
pub(crate) fn start(shards: &[ShardHandle], silence_max: Duration) -> anyhow::Result<()> {
    if silence_max.is_zero() {
        return Ok(());
    }
    let mut watched: Vec<Watched> = shards.iter().cloned().map(Watched::new).collect();
    let run = move || {
        let mut last = Instant::now();
        while watched.iter().any(|shard| !shard.is_over) {
            std::thread::sleep(TURN);
            let passed = last.elapsed();
            last = Instant::now();
            for (number, shard) in watched.iter_mut().enumerate() {
                if shard.silence(passed) >= silence_max {
                    abort(&format!("shard {number} has not responded for {} s", silence_max.as_secs_f64()));
                }
            }
        }
    };
    std::thread::Builder::new()
        .name("hob-watchdog".to_owned())
        .spawn(run)
        .context("cannot start a thread")?;
    Ok(())
}

/// Writes the last line of the log, and ends the process as a crash, so that systemd restarts it.
fn abort(why: &str) -> ! {
    tracing::error!("{why}; the daemon aborts, and recovers its caches when it is started again");
    std::process::abort()
}

/// A shard under observation.
struct Watched {
    shard: ShardHandle,
    /// The outstanding ping.
    ping: Option<oneshot::Receiver<Result<(), ShardError>>>,
    /// Time for which the ping has had no answer.
    silent: Duration,
    /// True if the shard ended because the daemon is ending.
    is_over: bool,
}

impl Watched {
    fn new(shard: ShardHandle) -> Watched {
        Watched { shard, ping: None, silent: Duration::ZERO, is_over: false }
    }

    /// Checks the shard once, and returns how long it has not answered a ping. `passed` is the time
    /// since the previous check.
    fn silence(&mut self, passed: Duration) -> Duration {
        match self.ping.as_mut().map(oneshot::Receiver::try_recv) {
            Some(Err(TryRecvError::Empty)) => {
                self.silent += passed.min(TURN_COUNTED_MAX);
                return self.silent;
            }
            // A shard that panics ends the process by itself.
            Some(Err(TryRecvError::Closed)) => self.is_over = true,
            Some(Ok(_)) | None => {}
        }
        (self.silent, self.ping) = (Duration::ZERO, None);
        if !self.is_over {
            self.ping = self.shard.ping().ok();
            self.is_over = self.ping.is_none();
        }
        Duration::ZERO
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    use super::*;
    use crate::fake_shard::FakeShard;

    /// Environment variable that tells the child process of a test which case to run.
    const CASE: &str = "HOB_TEST_WATCHDOG";

    fn run(test: impl AsyncFnOnce(ShardHandle, FakeShard)) {
        crate::background::run_in_real_time(async {
            let (shard, fake) = FakeShard::start();
            test(shard, fake).await;
        });
    }

    /// Lets the shard's task run, so that it handles its calls.
    async fn pass() {
        for _ in 0..10 {
            tokio::task::yield_now().await;
        }
    }

    #[test]
    fn silence_is_counted_until_the_shard_responds() {
        run(async |shard, fake| {
            let mut watched = Watched::new(shard);
            for _ in 0..3 {
                assert_eq!(watched.silence(TURN), Duration::ZERO);
                pass().await;
            }
            fake.set_hangs(true);
            assert_eq!(watched.silence(TURN), Duration::ZERO, "the last ping was answered");
            pass().await;
            assert_eq!(watched.silence(TURN), TURN);
            assert_eq!(watched.silence(TURN), 2 * TURN);
            fake.set_hangs(false);
            pass().await;
            assert_eq!(watched.silence(TURN), Duration::ZERO);
        });
    }

    #[test]
    fn time_in_which_the_watchdog_was_stopped_too_does_not_count() {
        run(async |shard, fake| {
            let mut watched = Watched::new(shard);
            fake.set_hangs(true);
            watched.silence(TURN);
            pass().await;
            assert_eq!(watched.silence(Duration::from_secs(3600)), TURN_COUNTED_MAX);
            fake.set_hangs(false);
            pass().await;
            assert_eq!(watched.silence(TURN), Duration::ZERO);
        });
    }

    /// Runs this test again in a child process, where the test takes the other branch. Returns the
    /// exit code and the output of the child.
    fn in_child(test: &str, case: &str) -> (Option<i32>, String) {
        let program = std::env::current_exe().unwrap();
        let name = format!("{}::{test}", module_path!().split_once("::").unwrap().1);
        let output = Command::new(program)
            .args(["--exact", &name, "--nocapture", "--test-threads=1"])
            .env(CASE, case)
            .output()
            .unwrap();
        (output.status.signal(), String::from_utf8_lossy(&output.stderr).into_owned())
    }

    fn log_to_stderr() {
        tracing_subscriber::fmt().with_writer(std::io::stderr).with_ansi(false).init();
    }

    /// Panics in a way that `case` names.
    fn panic_as(case: &str) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let panics = async || panic!("out of tune");
        match case {
            "a task" => drop(runtime.block_on(runtime.spawn(panics()))),
            "a blocking task" => drop(runtime.block_on(runtime.spawn_blocking(|| panic!("out of tune")))),
            "a request that changes nothing" => {
                drop(runtime.block_on(runtime.spawn(contained_task(true, panics()))));
            }
            "a request that changes something" => {
                drop(runtime.block_on(runtime.spawn(contained_task(true, contained_task(false, panics())))));
            }
            "work that only reads" => {
                let reads = || contained(|| panic!("out of tune"));
                drop(runtime.block_on(runtime.spawn_blocking(reads)));
            }
            "what comes after work that only reads" => {
                let reads = || drop(std::panic::catch_unwind(|| contained(|| panic!("on purpose"))));
                let both = move || {
                    reads();
                    panic!("out of tune")
                };
                let _ = std::thread::spawn(both).join();
            }
            thread => {
                let named = std::thread::Builder::new().name(thread.to_owned());
                let _ = named.spawn(|| panic!("out of tune")).unwrap().join();
            }
        }
    }

    #[test]
    fn a_panic_ends_the_process_unless_it_is_contained() {
        if let Ok(case) = std::env::var(CASE) {
            log_to_stderr();
            abort_on_panic();
            return panic_as(&case);
        }
        let test = "a_panic_ends_the_process_unless_it_is_contained";
        for case in [
            "hob-shard-1",
            "hob-tls-0",
            "hob-vhost-user",
            "hob-file",
            "hob-watchdog",
            "a task",
            "a blocking task",
            "a request that changes something",
            "what comes after work that only reads",
        ] {
            let (signal, said) = in_child(test, case);
            assert_eq!(signal, Some(rustix::process::Signal::ABORT.as_raw()), "{case}: {said}");
            let last = said.lines().last().unwrap();
            assert!(last.contains("the daemon aborts"), "{case}: {said}");
            assert!(said.contains("panicked") && said.contains("out of tune"), "{case}: {said}");
        }
        for case in ["hob-recovery", "hob-check", "a request that changes nothing", "work that only reads"] {
            let (signal, said) = in_child(test, case);
            assert_eq!(signal, None, "{case}: {said}");
            assert!(said.contains("and its task has ended: "), "{case}: {said}");
        }
    }

    #[test]
    fn a_shard_that_hangs_ends_the_process() {
        if std::env::var(CASE).is_ok() {
            log_to_stderr();
            let (shard, _calls) = ShardHandle::new(|| {});
            start(&[shard], Duration::from_secs(1)).unwrap();
            std::thread::sleep(Duration::from_secs(120));
            return;
        }
        let (signal, said) = in_child("a_shard_that_hangs_ends_the_process", "hang");
        assert_eq!(signal, Some(rustix::process::Signal::ABORT.as_raw()), "{said}");
        assert!(said.contains("shard 0 has not responded for 1 s; the daemon aborts"), "{said}");
    }

    #[test]
    fn a_shard_that_ended_is_not_watched_any_more() {
        let (shard, calls) = ShardHandle::new(|| {});
        let mut watched = Watched::new(shard);
        watched.silence(TURN);
        drop(calls);
        assert_eq!(watched.silence(TURN), Duration::ZERO);
        assert!(watched.is_over);
    }
}
