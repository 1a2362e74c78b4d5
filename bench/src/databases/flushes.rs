//! The flush workload: the p99 latency of fdatasync while another thread writes so much that hob
//! destages all the time.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use conformance::data::Noise;

use super::disk::{Disk, Way};
use super::workload::Scale;

const BULK_BYTES: u64 = 64 << 10;
const LOG_BYTES: u64 = 1 << 20;
const SECTOR_BYTES: u64 = 4096;

/// Bytes that are aligned for direct I/O.
struct Aligned {
    memory: Vec<u8>,
    start: usize,
    len: usize,
}

impl Aligned {
    fn new(len: u64) -> Self {
        let memory = vec![0x5a; (len + SECTOR_BYTES) as usize];
        let start = memory.as_ptr().align_offset(SECTOR_BYTES as usize);
        Self { memory, start, len: len as usize }
    }

    fn bytes(&mut self, version: u64) -> &[u8] {
        let bytes = &mut self.memory[self.start..self.start + self.len];
        bytes
            .chunks_mut(SECTOR_BYTES as usize)
            .for_each(|it| it[..8].copy_from_slice(&version.to_ne_bytes()));
        bytes
    }
}

/// Returns the p99 latency of fdatasync, microseconds. Each fdatasync follows a direct write of 4
/// KiB to a log file. The concurrent writer writes to another file.
pub(super) fn p99(disk: &mut Disk, scale: &Scale) -> Result<f64> {
    disk.forget_page_cache()?;
    // The preset auto starts to destage when a tenth of the cache is dirty, so this file is larger
    // than that.
    let bulk = written(&disk.path("bulk"), scale.cache_bytes / 6)?;
    let log = written(&disk.path("log"), LOG_BYTES)?;
    let before = disk.destaged_bytes();
    let stop = AtomicBool::new(false);
    let mut latencies = std::thread::scope(|scope| {
        let writer = scope.spawn(|| overwrite(&bulk, &stop));
        let latencies = flush_often(&log, Duration::from_secs(scale.seconds.into()));
        stop.store(true, Ordering::Relaxed);
        writer.join().expect("a writer that does not panic").context("write beside the flushes")?;
        latencies
    })?;
    if disk.way == Way::Auto && disk.destaged_bytes() == before {
        bail!("hob destaged nothing during the flushes");
    }
    latencies.sort_unstable();
    let at = latencies.len().saturating_sub(1) * 99 / 100;
    latencies.get(at).map(|it| it.as_nanos() as f64 / 1e3).context("no flush ended")
}

/// Returns a new file of `bytes` bytes, so that later writes change no metadata.
fn written(path: &Path, bytes: u64) -> Result<File> {
    let _ = std::fs::remove_file(path);
    let mut options = OpenOptions::new();
    options.read(true).write(true).create_new(true).custom_flags(rustix::fs::OFlags::DIRECT.bits() as i32);
    let file = options.open(path).with_context(|| format!("create {}", path.display()))?;
    let mut data = Aligned::new(LOG_BYTES);
    for at in (0..bytes).step_by(LOG_BYTES as usize) {
        file.write_all_at(data.bytes(at), at)?;
    }
    file.sync_all()?;
    Ok(file)
}

fn overwrite(file: &File, stop: &AtomicBool) -> Result<()> {
    let blocks = file.metadata()?.len() / BULK_BYTES;
    let (mut data, mut dice, mut version) = (Aligned::new(BULK_BYTES), Noise::new(blocks), 0);
    while !stop.load(Ordering::Relaxed) {
        version += 1;
        file.write_all_at(data.bytes(version), dice.below(blocks) * BULK_BYTES)?;
    }
    Ok(())
}

fn flush_often(file: &File, time: Duration) -> Result<Vec<Duration>> {
    let (mut data, mut latencies) = (Aligned::new(SECTOR_BYTES), Vec::new());
    let end = Instant::now() + time;
    while Instant::now() < end {
        let number = latencies.len() as u64;
        file.write_all_at(data.bytes(number), number * SECTOR_BYTES % LOG_BYTES)?;
        let start = Instant::now();
        file.sync_data()?;
        latencies.push(start.elapsed());
    }
    Ok(latencies)
}
