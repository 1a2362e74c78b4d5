//! Recordings: the requests of a disk on their way to a client of the API.

use hob_control::TraceRecord;
use hob_engine::units::DiskId;

use super::Observe;
use crate::daemon::manager::api_error::ApiError;
use crate::daemon::request_recorder::{self, Reader};
use crate::daemon::shard_api::ShardHandle;

/// Recordings at once: each takes 3 MiB and one of the control socket's connections.
const RECORDINGS_MAX: usize = 16;

/// What a disk is asked, from now on. It ends when this is dropped, or when the disk goes.
#[derive(Debug)]
pub(crate) struct Recording {
    reader: Reader,
    shard: ShardHandle,
    disk: DiskId,
}

impl Observe {
    /// Records a disk's requests. A disk has one recording at a time.
    pub(crate) async fn record(&self, name: &str) -> Result<Recording, ApiError> {
        let (recorder, recording) = {
            let mut inner = self.0.registry.inner();
            let count = inner.disks.values().filter(|disk| disk.recording.read().is_some()).count();
            let disk = inner.disk_mut(name)?;
            if disk.recording.read().is_some() {
                return Err(ApiError::conflict(format!("the requests of {name} are being recorded already"))
                    .hint("end that recording first"));
            }
            if count >= RECORDINGS_MAX {
                return Err(ApiError::conflict(format!(
                    "{count} disks are being recorded, and more cannot be"
                ))
                .hint("end one of these recordings first"));
            }
            let shard = disk.shard()?;
            let (recorder, reader) = request_recorder::new();
            disk.recording = reader.counter();
            (recorder, Recording { reader, shard, disk: disk.id })
        };
        recording.shard.record(recording.disk, recorder).await?;
        tracing::info!("the requests of {name} are being recorded");
        Ok(recording)
    }
}

impl Recording {
    /// How long it has lasted.
    pub(crate) fn elapsed_ns(&self) -> u64 {
        self.reader.elapsed_ns()
    }

    /// Has the disk gone? What was recorded before can still be taken.
    pub(crate) fn has_ended(&self) -> bool {
        self.reader.has_ended()
    }

    /// Requests that were dropped since the start.
    pub(crate) fn dropped(&self) -> u64 {
        self.reader.dropped()
    }

    /// The next requests, at most `max` of them.
    pub(crate) fn take(&mut self, max: usize) -> Vec<TraceRecord> {
        self.reader.take(max)
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        self.reader.abandon();
        self.shard.end_recording(self.disk);
    }
}
