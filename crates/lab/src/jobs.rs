//! Runs independent simulations in a few threads.
//!
//! Each simulation is single-threaded and deterministic, so the results do not depend on the number
//! of threads.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

/// Interval of progress reports.
const PROGRESS_EVERY: Duration = Duration::from_millis(100);

/// Runs `work` on each job, in up to `threads` threads. At intervals, `progress` is called on the
/// caller's thread with the number of completed jobs. Returns the results in the order of the jobs,
/// or `None` if `stop` was set.
///
/// # Panics
/// Panics if `work` panics.
pub(crate) fn run_all<T: Sync, R: Send>(
    jobs: &[T],
    threads: usize,
    stop: &AtomicBool,
    work: impl Fn(&T) -> R + Sync,
    mut progress: impl FnMut(usize),
) -> Option<Vec<R>> {
    let (next, results) = (AtomicUsize::new(0), Mutex::new(Vec::with_capacity(jobs.len())));
    let caller = std::thread::current();
    let worker = || {
        while !stop.load(Ordering::Relaxed) {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(job) = jobs.get(index) else { return };
            let result = work(job);
            let mut results = results.lock().expect("a run panicked");
            results.push((index, result));
            if results.len() == jobs.len() {
                caller.unpark();
            }
        }
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads.clamp(1, jobs.len().max(1))).map(|_| scope.spawn(worker)).collect();
        loop {
            let are_finished = workers.iter().all(|worker| worker.is_finished());
            let done = results.lock().map_or(0, |results| results.len());
            progress(done);
            if are_finished || done == jobs.len() {
                break;
            }
            std::thread::park_timeout(PROGRESS_EVERY);
        }
        // Reports a simulation that panicked.
        for worker in workers {
            worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        }
    });
    if stop.load(Ordering::Relaxed) {
        return None;
    }
    let mut results = results.into_inner().expect("a run panicked");
    results.sort_by_key(|(index, _)| *index);
    Some(results.into_iter().map(|(_, result)| result).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_have_the_order_of_the_jobs_with_any_number_of_threads() {
        let (jobs, stop): (Vec<u32>, _) = ((0..20).collect(), AtomicBool::new(false));
        for threads in [0, 1, 3, 50] {
            let mut told = Vec::new();
            let results = run_all(&jobs, threads, &stop, |job| job * 2, |runs| told.push(runs));
            assert_eq!(results, Some(jobs.iter().map(|job| job * 2).collect()));
            assert!(told.is_sorted() && told.last() == Some(&20), "{told:?}");
        }
        assert_eq!(run_all(&[], 2, &stop, |job: &u32| *job, |_| {}), Some(vec![]));
        stop.store(true, Ordering::Relaxed);
        assert_eq!(run_all(&jobs, 2, &stop, |job| *job, |_| {}), None);
    }
}
