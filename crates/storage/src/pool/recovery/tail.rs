//! Proving the tail: what flash really holds where the last records before a crash say that something was written.
//!
//! These are as many sectors as were written in about a second, all over the cache; one
//! after the other they would take far longer than the rest of a recovery, so several threads read them.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};

use hob_engine::command::DataSegment;
use hob_engine::units::{DeviceId, SECTOR_BYTES};

use crate::checksum::sector_sums;
use crate::pool::reader::{AlignedBuffer, Devices};

/// Threads at most: enough for a flash device to show what it can do.
const THREADS_MAX: usize = 16;

/// Longest read, sectors.
const SECTORS_MAX: usize = 64;

/// Sectors that lie one after the other: a range of the sorted list.
struct Run {
    device: DeviceId,
    offset: u64,
    first: usize,
    sectors: usize,
}

/// For each of `wanted`, a place in `data` and a sector in that segment, the CRC-32C of what flash holds; `None` where it cannot
/// be read.
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
        // With no thread to be had it takes longer.
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
