//! Detects sequential runs: a request that starts at the end of a recent run continues this run.

/// Number of sequential runs that are tracked.
const RUNS: usize = 16;

#[derive(Clone, Copy, Debug, Default)]
struct Run {
    /// Number of the sector that follows the run's last sector.
    end: u64,
    sectors: u64,
    /// Sequence number of the request that last continued the run.
    used: u64,
}

/// The sequential runs of one disk.
#[derive(Debug, Default)]
pub(crate) struct Streams {
    runs: [Run; RUNS],
    requests: u64,
}

impl Streams {
    /// Records a request for the sectors `first..end`. Returns the length of the request's run,
    /// including the request, in sectors.
    pub(crate) fn observe(&mut self, first: u64, end: u64) -> u64 {
        self.requests += 1;
        let sectors = end - first;
        // Requests that are smaller than a sector, or not aligned to one, touch the run's last
        // sector again.
        let continued = self
            .runs
            .iter_mut()
            .find(|run| run.sectors > 0 && (run.end == first || (run.end == first + 1 && end >= run.end)));
        let run = match continued {
            Some(run) => {
                run.sectors += end - run.end;
                run
            }
            None => {
                let run = self.runs.iter_mut().min_by_key(|run| run.used).expect("there are runs");
                run.sectors = sectors;
                run
            }
        };
        run.end = end;
        run.used = self.requests;
        run.sectors
    }
}
