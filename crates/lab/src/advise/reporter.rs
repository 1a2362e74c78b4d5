//! Reports the progress of the advice, and asks the caller whether to continue.

use std::cell::{Cell, RefCell};

use anyhow::{Result, ensure};

use super::Progress;

/// Number of requests between two progress reports.
const REQUESTS_A_REPORT: u64 = 4096;

/// Progress of all stages. Each stage consists of runs through the trace.
pub(super) struct Reporter<'a> {
    progress: RefCell<&'a mut Progress<'a>>,
    stage: Cell<&'static str>,
    /// Completed share of all work, and the share at the end of the stage.
    shares: Cell<(f64, f64)>,
    requests: Cell<u64>,
    is_stopped: Cell<bool>,
}

impl<'a> Reporter<'a> {
    pub(super) fn new(progress: &'a mut Progress<'a>) -> Reporter<'a> {
        Reporter {
            progress: RefCell::new(progress),
            stage: Cell::new(""),
            shares: Cell::new((0.0, 0.0)),
            requests: Cell::new(0),
            is_stopped: Cell::new(false),
        }
    }

    /// Starts a stage. `shares` are the completed shares of all work at the start and at the end of
    /// the stage.
    pub(super) fn start(&self, stage: &'static str, shares: (f64, f64)) -> Result<()> {
        self.stage.set(stage);
        self.shares.set(shares);
        self.report();
        self.check()
    }

    /// Reports the progress. Returns false if the caller has cancelled the work.
    pub(super) fn report(&self) -> bool {
        if !self.is_stopped.get() {
            let mut progress = self.progress.borrow_mut();
            let tell = &mut **progress;
            self.is_stopped.set(!tell(self.stage.get(), self.shares.get().0));
        }
        !self.is_stopped.get()
    }

    /// Counts a request of a run, and reports the progress every [`REQUESTS_A_REPORT`] requests.
    /// Returns false if the caller has cancelled the work.
    pub(super) fn next_request(&self) -> bool {
        let requests = self.requests.get();
        self.requests.set(requests + 1);
        match requests.is_multiple_of(REQUESTS_A_REPORT) {
            true => self.report(),
            false => !self.is_stopped.get(),
        }
    }

    /// Ends a run. The number of runs of a stage is unknown, so each run gets a tenth of the stage's
    /// remaining share.
    pub(super) fn end_run(&self) -> Result<()> {
        let (share, end) = self.shares.get();
        self.shares.set((share + (end - share) / 10.0, end));
        self.check()
    }

    fn check(&self) -> Result<()> {
        ensure!(!self.is_stopped.get(), "interrupted");
        Ok(())
    }
}
