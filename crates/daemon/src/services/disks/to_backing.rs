//! Writes the dirty data of a cache that no shard serves to the backing, with progress.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use hob_control::Size;
use hob_storage::backing::offline_writer::{OfflineWriter, WRITE_BYTES_MAX};
use hob_storage::ring::Gate;
use tokio::time::Instant;

use super::Dirty;
use crate::api_error::{ApiError, Result, failed};
use crate::hardware::Backing;
use crate::lease_clock::{LeaseClock, now};
use crate::services::registry::{DiskPhase, Registry};

/// Minimum interval between two progress reports.
const REPORT_EVERY: Duration = Duration::from_secs(1);

/// Progress of one pass over the dirty data of an offline disk, which checks the data or writes it
/// to the backing.
pub(in crate::services) struct DirtyPass<'a> {
    registry: &'a Registry,
    disk: &'a str,
    /// Subject of the report, such as "its replica".
    what: &'static str,
    doing: &'static str,
    began: Instant,
    reported: Instant,
    done: u64,
    all: u64,
}

impl<'a> DirtyPass<'a> {
    /// Starts a pass over `all` bytes, and reports the start.
    pub(in crate::services) fn new(
        registry: &'a Registry,
        disk: &'a str,
        what: &'static str,
        doing: &'static str,
        all: u64,
    ) -> Self {
        let now = Instant::now();
        let pass = DirtyPass { registry, disk, what, doing, began: now, reported: now, done: 0, all };
        pass.report();
        pass
    }

    /// Counts a range of dirty bytes as done.
    pub(in crate::services) fn advance(&mut self, range: &Range<u64>) {
        self.done += range.end - range.start;
        if self.reported.elapsed() >= REPORT_EVERY {
            self.reported = Instant::now();
            self.report();
        }
    }

    fn report(&self) {
        let left = left_text(self.done, self.all, self.began.elapsed());
        let (what, doing, all) = (self.what, self.doing, Size(self.all).human());
        let percent = (u128::from(self.done) * 100).checked_div(u128::from(self.all)).unwrap_or(100);
        let text = format!("{what} ({all} of dirty data) {doing}, {percent} %{left}");
        note_progress(self.registry, self.disk, text);
    }
}

/// Sets the reason why a disk is offline, if it is offline.
pub(in crate::services) fn note_progress(registry: &Registry, disk: &str, reason: String) {
    if let Ok(disk) = registry.inner().disk_mut(disk)
        && let DiskPhase::Offline(known) = &mut disk.phase
    {
        *known = reason;
    }
}

/// Returns a text with the estimated time to the end of a pass; an empty text without an estimate.
fn left_text(done: u64, all: u64, took: Duration) -> String {
    if done == 0 || took < Duration::from_secs(1) {
        return String::new();
    }
    let left = took.as_secs_f64() * (all.saturating_sub(done)) as f64 / done as f64;
    format!(", about {} s left", left.ceil())
}

/// Writes all dirty data to the backing, flushes the backing, and closes it. Adjacent sectors are
/// merged into one write. Writes are sent only while this host's `lease` is valid and `may_go_on`
/// returns true. If flash has lost some dirty data, writes the other dirty data and returns an
/// error. Blocks the calling thread.
pub(in crate::services) fn write_to_backing(
    dirty: &mut Dirty,
    backing: Backing,
    lease: Option<&Arc<LeaseClock>>,
    may_go_on: &dyn Fn() -> bool,
    advance: impl FnMut(&Range<u64>),
) -> Result<()> {
    let may_wait = || may_go_on() && lease.is_none_or(|lease| now() < lease.calls_back_at());
    let gate = lease.cloned().map(|lease| lease as Arc<dyn Gate>);
    let mut writer =
        OfflineWriter::new(backing, gate, &may_wait).map_err(|error| ApiError::failed(error.to_string()))?;
    let is_lost = || lease.is_some_and(|lease| !lease.is_valid(now()));
    let written = write_all(dirty, &mut writer, is_lost, advance);
    let flushed = written
        .and_then(|lost| writer.flush().map(|()| lost).map_err(|error| cannot_write(&error)))
        .map_err(|error| if may_go_on() { error } else { ApiError::failed("hob stopped writing") });
    writer.close();
    match flushed? {
        0 => Ok(()),
        lost => Err(failed!(
            "{} of dirty data cannot be read from flash; the other dirty data is on the backing",
            Size(lost).human()
        )
        .hint(
            "'hob cache discard-dirty' discards the lost data, and 'hob cache export-dirty' lists \
             its ranges",
        )),
    }
}

/// Writes all dirty data that flash has. Returns the number of bytes that flash has lost.
fn write_all(
    dirty: &mut Dirty,
    writer: &mut OfflineWriter<'_>,
    is_lease_lost: impl Fn() -> bool,
    mut advance: impl FnMut(&Range<u64>),
) -> Result<u64> {
    let mut lost_bytes = 0;
    let mut run: (u64, Vec<u8>) = (0, Vec::with_capacity(WRITE_BYTES_MAX));
    let mut put = |run: &mut (u64, Vec<u8>)| {
        if run.1.is_empty() {
            return Ok(());
        }
        if is_lease_lost() {
            return Err(ApiError::failed("this host's lease may have ended")
                .hint("hob tries again when etcd answers again"));
        }
        let written = writer.write(run.0, &run.1).map_err(|error| cannot_write(&error));
        run.1.clear();
        written
    };
    dirty.each(|range, found| {
        let bytes = match found {
            Ok(bytes) => bytes,
            Err(lost) => {
                tracing::error!("the dirty sector at byte {} of a disk cannot be read: {lost}", range.start);
                lost_bytes += range.end - range.start;
                return Ok(());
            }
        };
        let follows = run.0 + run.1.len() as u64 == range.start;
        if !follows || run.1.len() + bytes.len() > WRITE_BYTES_MAX {
            put(&mut run)?;
            run.0 = range.start;
        }
        run.1.extend_from_slice(bytes);
        advance(&range);
        Ok::<(), ApiError>(())
    })?;
    put(&mut run)?;
    Ok(lost_bytes)
}

fn cannot_write(error: &hob_engine::io::IoError) -> ApiError {
    failed!("cannot write the dirty data to the backing: {error:?}")
        .hint("repair the backing; hob retries by itself")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_remaining_time_is_reported_when_known() {
        assert_eq!(left_text(0, 100, Duration::from_secs(9)), "");
        assert_eq!(left_text(50, 100, Duration::from_millis(10)), "");
        assert_eq!(left_text(25, 100, Duration::from_secs(10)), ", about 30 s left");
        assert_eq!(left_text(100, 100, Duration::from_secs(10)), ", about 0 s left");
    }
}
