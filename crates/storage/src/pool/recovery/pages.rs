//! Runs of journal pages, and a thread that reads runs while another thread interprets earlier
//! ones.

use std::io;
use std::sync::mpsc;

use hob_engine::command::Segment;
use hob_engine::journal::PAGE_BYTES;
use hob_engine::units::DeviceId;

use crate::pool::reader::{AlignedBuffer, Devices};

/// Maximum length of a run in pages: 1 MiB.
const RUN_PAGES_MAX: u64 = 256;

/// Number of buffers that the reading and the interpreting thread exchange.
const BUFFERS: usize = 4;

/// Maximum number of failed reads of single pages. A run that cannot be read at once is read page
/// by page. After this number of failed pages, hob reads no more single pages: all pages of a run
/// that cannot be read at once count as unreadable.
const SINGLE_FAILURES_MAX: u32 = 1024;

const PAGE: u64 = PAGE_BYTES as u64;

/// Consecutive pages of one copy on their device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) copy: usize,
    /// Number of the run's first page in the journal ring.
    pub(super) first_page: u64,
    pages: u64,
    device: DeviceId,
    offset: u64,
}

impl Run {
    pub(super) fn bytes(&self) -> u64 {
        self.pages * PAGE
    }
}

/// Returns the runs of all pages of a copy.
pub(super) fn runs_of_copy(
    copy: usize,
    segments: &[Segment],
    segment_bytes: u64,
) -> impl Iterator<Item = Run> {
    let pages = segments.len() as u64 * segment_bytes / PAGE;
    (0..pages).step_by(RUN_PAGES_MAX as usize).map(move |first_page| {
        // A segment is a multiple of the longest run: no run crosses its end.
        let (device, offset) = place(first_page, segments, segment_bytes);
        Run { copy, first_page, pages: RUN_PAGES_MAX, device, offset }
    })
}

/// Returns the runs of these pages, in this order.
pub(super) fn runs_of_pages(
    reads: impl Iterator<Item = (usize, u64)>,
    copies: &[Vec<Segment>],
    segment_bytes: u64,
) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for (copy, page) in reads {
        let (device, offset) = place(page, &copies[copy], segment_bytes);
        match runs.last_mut() {
            Some(run)
                if (run.copy, run.first_page + run.pages) == (copy, page)
                    && (run.device, run.offset + run.bytes()) == (device, offset)
                    && run.pages < RUN_PAGES_MAX =>
            {
                run.pages += 1;
            }
            _ => runs.push(Run { copy, first_page: page, pages: 1, device, offset }),
        }
    }
    runs
}

fn place(page: u64, segments: &[Segment], segment_bytes: u64) -> (DeviceId, u64) {
    let segment = segments[(page * PAGE / segment_bytes) as usize];
    (segment.device, segment.offset + page * PAGE % segment_bytes)
}

/// A run that has been read.
struct Filled {
    run: usize,
    buffer: AlignedBuffer,
    /// Pages of the run that could not be read; empty if all could.
    unreadable: Vec<bool>,
}

/// Reads runs in order. `take` gets the index of each page in its run, and its bytes if they could
/// be read. `take` returns whether to continue.
pub(super) fn read_runs(
    devices: &Devices,
    runs: &[Run],
    mut take: impl FnMut(&Run, u64, Option<&[u8]>) -> bool,
) -> io::Result<()> {
    let (give_back, empty) = mpsc::channel();
    let (pass_on, filled) = mpsc::channel::<Filled>();
    for _ in 0..BUFFERS.min(runs.len()) {
        let _ = give_back.send(AlignedBuffer::new((RUN_PAGES_MAX * PAGE) as usize));
    }
    std::thread::scope(|scope| {
        let reader = move || {
            let mut failures = 0;
            for (number, run) in runs.iter().enumerate() {
                // The interpreting thread returns no more buffers when it stops early.
                let Ok(mut buffer) = empty.recv() else { return };
                let unreadable = read_run(devices, run, buffer.bytes_mut(), &mut failures);
                if pass_on.send(Filled { run: number, buffer, unreadable }).is_err() {
                    return;
                }
            }
        };
        std::thread::Builder::new().name("hob-recovery".into()).spawn_scoped(scope, reader)?;
        // Moved into the closure, so that the channels close at its end and the reader does not
        // wait for ever.
        let (give_back, filled) = (give_back, filled);
        for Filled { run, buffer, unreadable } in filled.iter() {
            let run = &runs[run];
            for (place, bytes) in (0..run.pages).zip(buffer.bytes().chunks_exact(PAGE_BYTES)) {
                let is_there = unreadable.is_empty() || !unreadable[place as usize];
                if !take(run, place, is_there.then_some(bytes)) {
                    return Ok(());
                }
            }
            let _ = give_back.send(buffer);
        }
        Ok(())
    })
}

/// Reads one run, page by page if it cannot be read at once. `failures` counts the pages that
/// failed. Returns which pages could not be read.
fn read_run(devices: &Devices, run: &Run, buffer: &mut [u8], failures: &mut u32) -> Vec<bool> {
    let bytes = &mut buffer[..run.bytes() as usize];
    let Err(error) = devices.read(run.device, run.offset, bytes) else { return Vec::new() };
    tracing::warn!(device = %run.device, offset = run.offset, %error, "a part of a journal is unreadable");
    let mut unreadable = vec![true; run.pages as usize];
    for (place, page) in (0..run.pages).zip(bytes.chunks_exact_mut(PAGE_BYTES)) {
        if *failures >= SINGLE_FAILURES_MAX {
            break;
        }
        let read = devices.read(run.device, run.offset + place * PAGE, page);
        unreadable[place as usize] = read.is_err();
        *failures += u32::from(read.is_err());
    }
    unreadable
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segments(device: u16, offsets: &[u64]) -> Vec<Segment> {
        offsets.iter().map(|mib| Segment { device: DeviceId(device), offset: mib << 20 }).collect()
    }

    #[test]
    fn runs_are_long_and_stay_inside_segments() {
        let copy = segments(3, &[4, 2]);
        let runs: Vec<Run> = runs_of_copy(1, &copy, 2 << 20).collect();
        let found: Vec<_> = runs.iter().map(|run| (run.first_page, run.pages, run.offset >> 20)).collect();
        assert_eq!(found, [(0, 256, 4), (256, 256, 5), (512, 256, 2), (768, 256, 3)]);
        assert!(runs.iter().all(|run| (run.copy, run.device) == (1, DeviceId(3))));
    }

    #[test]
    fn pages_in_any_order_become_as_few_runs_as_there_can_be() {
        let copies = [segments(0, &[1, 2]), segments(1, &[7, 9])];
        // From the middle around to the start, with two pages of the other copy in between.
        let reads = (500..512).chain(0..300).map(|page| (usize::from((510..512).contains(&page)), page));
        let runs = runs_of_pages(reads, &copies, 1 << 20);
        let found: Vec<_> = runs.iter().map(|run| (run.copy, run.first_page, run.pages)).collect();
        assert_eq!(found, [(0, 500, 10), (1, 510, 2), (0, 0, 256), (0, 256, 44)]);
        assert_eq!(runs[0].offset, (2 << 20) + (500 - 256) * PAGE);
        assert_eq!(runs[1].offset, (9 << 20) + (510 - 256) * PAGE);
        assert_eq!(runs_of_pages(std::iter::empty(), &copies, 1 << 20), []);
    }
}
