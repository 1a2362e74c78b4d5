//! Detects sequential readers of one disk, and decides how far to read ahead.
//!
//! The design follows Linux's on-demand readahead (Fengguang Wu et al., "On the Design of a New
//! Linux Readahead Framework", ACM SIGOPS Operating Systems Review 42(5), 2008). Read-ahead needs
//! no timers and no settings. Sequential requests make a run, whose read-ahead window doubles while
//! the reader continues. The window shrinks if pages were evicted before they were read.

/// Number of sequential runs that are tracked.
const RUNS: usize = 16;

/// Number of consecutive adjacent requests that make a run. Two requests may be adjacent by chance.
const REQUESTS_MIN: u32 = 3;

/// Minimum length of a run's first read-ahead window, sectors. The window is as long as four
/// requests if that is more.
const WINDOW_MIN: u64 = 16;

/// Maximum length of a read-ahead window, sectors (1 MiB).
const WINDOW_MAX: u64 = 256;

/// Maximum length of a window, as a part of the memory area: one in this number, but at least a
/// page.
const SHARE_MAX: u64 = 8;

#[derive(Clone, Copy, Debug, Default)]
struct Run {
    /// Number of the sector that follows the run's last sector.
    end: u64,
    requests: u32,
    /// Sequence number of the request that last continued the run.
    used: u64,
    /// Sector up to which data was read ahead or is being read ahead.
    ahead: u64,
    /// Number of sectors in the last read-ahead window; 0 before the first.
    window: u64,
}

/// Sectors to read ahead, or sectors of a read that read-ahead should have fetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ahead {
    pub(crate) first: u64,
    pub(crate) end: u64,
}

/// Result of the detection for one read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Seen {
    /// True if the read belongs to a sequential run.
    pub(crate) is_run: bool,
    /// True if read-ahead should have fetched the data of the read.
    pub(crate) expected: bool,
    /// Sectors that the caller should read ahead now; `None` if there are none.
    pub(crate) wanted: Option<Ahead>,
}

/// The sequential readers of one disk.
#[derive(Debug)]
pub(crate) struct Readers {
    runs: [Run; RUNS],
    requests: u64,
    window_min: u64,
    window_max: u64,
}

impl Readers {
    /// Creates the state for an area of `sectors` sectors in pages of `page_sectors`.
    pub(crate) fn new(sectors: u64, page_sectors: u64) -> Readers {
        let window_max = (sectors / SHARE_MAX).clamp(page_sectors.min(sectors), WINDOW_MAX.max(page_sectors));
        let window_min = WINDOW_MIN.min(window_max);
        Readers { runs: [Run::default(); RUNS], requests: 0, window_min, window_max }
    }

    /// Records a read of the sectors `first..end`.
    pub(crate) fn observe(&mut self, first: u64, end: u64) -> Seen {
        self.requests += 1;
        // Requests that are smaller than a sector, or not aligned to one, touch the run's last
        // sector again.
        let continues =
            |run: &&mut Run| run.requests > 0 && (run.end == first || run.end == first + 1 && end >= run.end);
        let Some(run) = self.runs.iter_mut().find(continues) else {
            let run = self.runs.iter_mut().min_by_key(|run| run.used).expect("there are runs");
            *run = Run { end, requests: 1, used: self.requests, ahead: 0, window: 0 };
            return Seen::default();
        };
        let expected = run.ahead >= end;
        (run.end, run.used) = (end, self.requests);
        run.requests = run.requests.saturating_add(1);
        if run.requests < REQUESTS_MIN {
            return Seen::default();
        }
        let left = run.ahead.saturating_sub(end);
        let mut wanted = None;
        if run.window == 0 || left <= run.window / 2 {
            let grown = if run.window == 0 { 4 * (end - first) } else { 2 * run.window };
            run.window = grown.clamp(self.window_min, self.window_max);
            let start = run.ahead.max(end);
            wanted = Some(Ahead { first: start, end: start + run.window });
            run.ahead = start + run.window;
        }
        Seen { is_run: true, expected, wanted }
    }

    /// Records that sectors were not read ahead in time, or were evicted before they were read. The
    /// window of their reader shrinks.
    pub(crate) fn missed(&mut self, what: Ahead) {
        let reads_there = |run: &&mut Run| {
            let behind = run.ahead.saturating_sub(2 * self.window_max);
            run.window > 0 && behind <= what.first && what.end <= run.ahead
        };
        if let Some(run) = self.runs.iter_mut().find(reads_there) {
            run.window = (run.window / 2).max(self.window_min);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(readers: &mut Readers, first: u64, count: u64) -> Option<(u64, u64)> {
        readers.observe(first, first + count).wanted.map(|ahead| (ahead.first, ahead.end))
    }

    #[test]
    fn random_reads_want_nothing() {
        let mut readers = Readers::new(1 << 16, 16);
        for i in 0..1000u64 {
            let first = i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
            // Pairs of adjacent requests do not make a run.
            assert_eq!(read(&mut readers, first, 8), None);
            assert_eq!(read(&mut readers, first + 8, 8), None);
        }
    }

    #[test]
    fn a_run_is_read_ahead_and_its_window_doubles_up_to_a_bound() {
        let mut readers = Readers::new(1 << 16, 16);
        let wanted: Vec<_> = (0..200).filter_map(|i| read(&mut readers, 100 + i * 8, 8)).collect();
        let windows: Vec<u64> = wanted.iter().map(|(first, end)| end - first).collect();
        assert_eq!(windows[..4], [32, 64, 128, 256]);
        assert!(windows[4..].iter().all(|window| *window == WINDOW_MAX));
        assert_eq!(wanted[0], (124, 156), "from where the third request ended");
        assert!(wanted.windows(2).all(|pair| pair[0].1 == pair[1].0), "without gaps: {wanted:?}");
    }

    #[test]
    fn a_small_area_has_small_windows() {
        let mut readers = Readers::new(64, 4);
        let most = (0..100).filter_map(|i| read(&mut readers, i, 1)).map(|(first, end)| end - first).max();
        assert_eq!(most, Some(8));
    }

    #[test]
    fn windows_shrink_when_pages_were_gone() {
        let mut readers = Readers::new(1 << 16, 16);
        (0..200).for_each(|i| _ = read(&mut readers, i * 8, 8));
        for _ in 0..10 {
            readers.missed(Ahead { first: 1592, end: 1600 });
        }
        assert_eq!(readers.runs.iter().map(|run| run.window).max(), Some(WINDOW_MIN));
    }

    #[test]
    fn many_simultaneous_runs_are_distinguished() {
        let mut readers = Readers::new(1 << 16, 16);
        for i in 0..10u64 {
            for run in 0..RUNS as u64 {
                let seen = readers.observe(run * 100_000 + i * 8, run * 100_000 + i * 8 + 8);
                assert_eq!(seen.is_run, i >= 2, "run {run}, request {i}");
            }
        }
    }
}
