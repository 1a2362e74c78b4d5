//! Verifies the journal tail: reads from flash the sectors that the last records before a crash
//! describe as written.
//!
//! The journal tail has about as many sectors as are written in one second. Several threads read
//! them, because reading them one by one would take longer than the rest of the recovery.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};

use hob_engine::command::DataSegment;
use hob_engine::units::{DeviceId, SECTOR_BYTES};

use crate::checksum::sector_sums;
use crate::pool::reader::{AlignedBuffer, Devices};

/// Maximum number of threads, enough to fully use a flash device.
const THREADS_MAX: usize = 16;

/// Maximum length of a read in sectors.
const SECTORS_MAX: usize = 64;

/// Consecutive sectors on flash that one read can cover. In the list of wanted sectors, sorted by
/// device and offset, they are adjacent.
struct Run {
    device: DeviceId,
    offset: u64,
    /// Index of the first sector in the sorted list.
    first: usize,
    sectors: usize,
}

/// Returns the CRC-32C on flash of each sector in `wanted`; `None` if the sector cannot be read.
/// Each entry of `wanted` is a pair: an index into `data`, and a sector in that segment.
pub(super) fn sums(
    devices: &Devices,
    data: &[DataSegment],
    wanted: &[(u32, u64)],
) -> io::Result<Vec<Option<u32>>> {
    let mut sorted: Vec<(DeviceId, u64, usize)> = Vec::with_capacity(wanted.len());
    for (number, (segment, sector)) in wanted.iter().enumerate() {
        let place = data[*segment as usize].place;
        sorted.push((place.device, place.offset + sector * SECTOR_BYTES, number));
    }
    sorted.sort_unstable();
    let runs = runs(&sorted);
    let next = AtomicUsize::new(0);
    let work = || {
        let mut buffer = AlignedBuffer::new(SECTORS_MAX * SECTOR_BYTES as usize);
        let mut sums = Vec::new();
        let mut found = Vec::new();
        while let Some(run) = runs.get(next.fetch_add(1, Ordering::Relaxed)) {
            let bytes = &mut buffer.bytes_mut()[..run.sectors * SECTOR_BYTES as usize];
            if devices.read(run.device, run.offset, bytes).is_ok() {
                sector_sums(bytes, &mut sums);
                found.extend((run.first..).zip(sums.iter().copied()));
                continue;
            }
            for (place, sector) in bytes.chunks_exact_mut(SECTOR_BYTES as usize).enumerate() {
                let offset = run.offset + place as u64 * SECTOR_BYTES;
                if devices.read(run.device, offset, sector).is_ok() {
                    sector_sums(sector, &mut sums);
                    found.push((run.first + place, sums[0]));
                }
            }
        }
        found
    };
    let mut sums = vec![None; wanted.len()];
    let mut keep = |found: Vec<(usize, u32)>| {
        for (at, sum) in found {
            sums[sorted[at].2] = Some(sum);
        }
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (1..THREADS_MAX.min(runs.len()))
            .map_while(|_| {
                std::thread::Builder::new().name("hob-recovery".into()).spawn_scoped(scope, work).ok()
            })
            .collect();
        // This thread takes part, so that verification only takes longer if no thread can be
        // started.
        keep(work());
        for thread in threads {
            keep(thread.join().map_err(|_| io::Error::other("a thread of the recovery ended"))?);
        }
        Ok::<(), io::Error>(())
    })?;
    Ok(sums)
}

fn runs(sorted: &[(DeviceId, u64, usize)]) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for (at, (device, offset, _)) in sorted.iter().enumerate() {
        match runs.last_mut() {
            Some(run)
                if run.device == *device
                    && run.offset + run.sectors as u64 * SECTOR_BYTES == *offset
                    && run.sectors < SECTORS_MAX =>
            {
                run.sectors += 1;
            }
            _ => runs.push(Run { device: *device, offset: *offset, first: at, sectors: 1 }),
        }
    }
    runs
}
