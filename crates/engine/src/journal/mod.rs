//! The journal of a persistent cache: its pages, and the recovery of the index from them.
//!
//! docs/FORMAT.md specifies the bytes, and docs/decisions/0006-write-back.md gives the reasons. The
//! module does no I/O: its pages are bytes in memory. [`Writer`] writes pages. [`Survey`] reads
//! every page of a journal ring and determines which pages are valid. [`Replay`] applies the valid
//! pages and the [crash log](SurvivingMemory), and lists the sectors whose checksums must be
//! verified. The result is a [`Recovered`].

mod copies;
mod crash_log;
mod crc;
mod format;
mod proof;
mod recovered;
mod replay;
mod survey;
mod writer;

#[cfg(test)]
mod tests;

pub use crash_log::{CRASH_LOG_BYTES, SurvivingMemory};
pub use recovered::{DirtySector, FlashSector, Recovered, Summary};
pub use replay::{Replay, ReplayError};
pub use survey::{Plan, Ring, Survey};
pub use writer::ring_pages_min;
pub(crate) use writer::{Change, Descriptor, Writer};

/// Size of a page in bytes.
pub const PAGE_BYTES: usize = 4096;

/// Maximum number of change records per page. The rest of the page continues the dump.
pub const CHANGES_MAX: usize = 54;

/// Maximum number of zones of a disk.
pub const ZONES: usize = 4096;

/// Maximum number of devices with a failed flush that a page can name.
const FAILED_DEVICES_MAX: usize = 4;

/// Recovers from a journal ring of arbitrary bytes, 4096 per page, for fuzzers. The bytes after the
/// last whole page are records of a crash log. With `sealed`, each page gets the correct magic,
/// checksum and position first. Returns the summary of a successful recovery.
#[doc(hidden)]
pub fn replay_bytes(bytes: &[u8], sealed: bool) -> Option<Summary> {
    let (pages, logged) = bytes.as_chunks::<PAGE_BYTES>();
    let mut pages = pages.to_vec();
    let cache: [u8; 16] = *pages.first()?.get(0x10..)?.first_chunk()?;
    if sealed {
        pages.iter_mut().for_each(|page| format::seal_bytes(page, &cache));
    }
    let count = pages.len() as u64;
    let mut survey = Survey::new(cache, 3, 1, count);
    for page in &pages {
        let sequence = u64::from_le_bytes(*page[8..].first_chunk()?);
        survey.page(0, sequence % count, page);
    }
    let Ring::Whole(mut plan) = survey.finish() else { return None };
    // In the daemon the pool defines the size and number of segments.
    if plan.segment_frames > 1 << 12 {
        return None;
    }
    let (logged, _) = logged.as_chunks::<{ format::RECORD_BYTES }>();
    plan.continue_with_records(logged.iter().map_while(format::Record::read).collect());
    let segment_bytes = u64::from(plan.block_bytes) * u64::from(plan.segment_frames);
    let sequences = plan.begin..=plan.end;
    let mut replay = Replay::new(plan, segment_bytes, &[(0, crate::units::DeviceId(0))]).ok()?;
    for sequence in sequences {
        let page = pages.iter().find(|page| page[8..16] == sequence.to_le_bytes())?;
        replay.page(page).ok()?;
    }
    let sums: Vec<_> = replay.to_prove().iter().map(|(_, sector)| (sector % 3 > 0).then_some(9)).collect();
    let mut recovered = replay.finish(&sums);
    assert_eq!(recovered.dirty().count() as u64 >= 1, recovered.summary.sectors_dirty > 0);
    assert!(recovered.samples(4).len() <= 4);
    let found = recovered.summary;
    recovered.drop_clean();
    recovered.discard_dirty();
    assert_eq!(recovered.summary.sectors_valid, 0);
    Some(found)
}
