//! Recordings of a disk's requests for a client of the API.

use hob_engine::units::DiskId;

use super::Observe;
use crate::api_error::{Result, conflict};
use crate::request_recorder::{self, Reader};
use crate::shard_api::ShardHandle;

/// Maximum number of concurrent recordings. A recording takes 3 MiB and one connection of the
/// control socket.
const RECORDINGS_MAX: usize = 16;

/// A recording of a disk's requests. The recording ends when this value is dropped or the disk is
/// removed.
#[derive(Debug)]
pub(crate) struct Recording {
    pub(crate) reader: Reader,
    shard: ShardHandle,
    disk: DiskId,
}

impl Observe {
    /// Starts to record a disk's requests. A disk has one recording at a time.
    pub(crate) async fn record(&self, name: &str) -> Result<Recording> {
        let (recorder, recording) = {
            let mut inner = self.registry.inner();
            let count = inner.disks.values().filter(|disk| disk.recording.read().is_some()).count();
            let disk = inner.disk_mut(name)?;
            if disk.recording.read().is_some() {
                return Err(conflict!("the requests of {name} are being recorded already")
                    .hint("end that recording first"));
            }
            if count >= RECORDINGS_MAX {
                return Err(conflict!("{count} disks are being recorded, which is the maximum")
                    .hint("end one of these recordings first"));
            }
            let shard = disk.shard()?;
            let (recorder, reader) = request_recorder::new();
            disk.recording = reader.counter();
            (recorder, Recording { reader, shard, disk: disk.id })
        };
        recording.shard.record(recording.disk, recorder).await?;
        tracing::info!("disk {name}: a recording of its requests has started");
        Ok(recording)
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        self.reader.abandon();
        self.shard.end_recording(self.disk);
    }
}
