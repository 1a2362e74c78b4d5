//! Comparison of a persistent cache with its backing, before the cache is used again.

use std::time::{Duration, Instant};

use hob_engine::io::IoError;
use hob_engine::journal::Recovered;
use hob_engine::preset::Verify;
use hob_engine::units::{DiskId, SECTOR_BYTES};

use super::fencing::{Changed, Same, Sample, Verdict, judge};
use super::last_served::LaterChange;
use crate::api_error::{ApiError, Result, failed};
use crate::hardware::{Backing, BackingInfo, ChangeMark, Reader};
use crate::services::flash::blocking;
use crate::shard_api::ShardHandle;
use crate::state::{Closed, JournalSpec};

/// Number of clean sectors of the cache in the sample that is compared with the backing.
const SAMPLES: usize = 64;

/// Maximum time for the comparison of a sample whose reads fail. Reads of unreadable sectors of a
/// damaged backing fail quickly. If hob has lost the connection to the backing, it compares the
/// sample again later.
const FAILING_MAX: Duration = Duration::from_secs(5);

/// The way in which the recovery reads the backing to compare it with the cache.
pub(in crate::services) enum Source {
    /// The backing itself, which no shard serves yet. The caller that opens the disk passes the
    /// backing, and gets the backing back with [`own`](Source::own).
    Own(Backing),
    /// A backing that a shard serves and guests may change.
    Served(Served),
}

/// A backing that a shard serves.
pub(in crate::services) struct Served {
    pub(in crate::services) info: BackingInfo,
    pub(in crate::services) reader: Box<dyn Reader>,
    pub(in crate::services) shard: ShardHandle,
    pub(in crate::services) id: DiskId,
}

impl Source {
    /// Returns the backing that no shard serves.
    pub(in crate::services) fn own(self) -> Backing {
        match self {
            Source::Own(backing) => backing,
            Source::Served(_) => panic!("the caller has the backing"),
        }
    }

    pub(super) fn info(&self) -> &BackingInfo {
        match self {
            Source::Own(backing) => backing.info(),
            Source::Served(served) => &served.info,
        }
    }

    fn read(&mut self, offset: u64, bytes: &mut [u8]) -> Result<(), IoError> {
        match self {
            Source::Own(backing) => backing.read_before_attach(offset, bytes),
            Source::Served(served) => served.reader.read(offset, bytes),
        }
    }
}

/// Returns whether the backing has the size and the identity that the cache's journal recorded, or
/// has grown.
pub(super) fn same_backing(info: &BackingInfo, disk_bytes: u64, identity: &[u8; 32]) -> Same {
    if info.size_bytes == disk_bytes && info.identity == *identity {
        Same::Yes
    } else if info.size_bytes > disk_bytes && info.identity_at(disk_bytes) == Some(*identity) {
        Same::Grown
    } else {
        Same::No
    }
}

/// Returns whether another program has changed the backing since hob recorded the backing's state
/// or closed the cache, or since hob served the disk last (`later`).
pub(super) fn changed_since(
    clean: bool,
    journal: JournalSpec,
    info: &BackingInfo,
    later: Option<LaterChange>,
) -> Changed {
    if journal.evidence.is_some() && journal.evidence == info.evidence {
        return Changed::No;
    }
    match (clean, journal.closed, info.changed) {
        (true, Some(Closed { size_bytes, modified_ns }), Some(now))
            if now != (ChangeMark { size_bytes, modified_ns }) =>
        {
            Changed::Yes
        }
        (false, ..) if later.is_some() => Changed::Later,
        _ => Changed::Unknown,
    }
}

/// Reason why a cache does not match its backing.
pub(super) struct Mismatch {
    pub(super) why: String,
    /// True if only the times of the backing's file show the mismatch, so that an operator can
    /// accept the cache with `verify = "trust"`.
    pub(super) can_be_trusted: bool,
}

/// Decides whether the cache's data matches the backing, and returns the reason if the data does
/// not match. First drops the cached data of regions to which guests wrote during the recovery.
pub(super) async fn compare(
    source: Source,
    mut recovered: Box<Recovered>,
    journal: JournalSpec,
    verify: Verify,
    foreign: Option<String>,
    later: Option<LaterChange>,
) -> Result<(Source, Box<Recovered>, Verdict, Mismatch)> {
    let info = source.info().clone();
    if let Source::Served(served) = &source
        && let Some(changed) = served.shard.changed_meanwhile(served.id).await?.filter(|it| !it.is_empty())
    {
        recovered = blocking(move || {
            recovered.drop_regions(&changed);
            recovered
        })
        .await?;
    }
    let summary = recovered.summary;
    let same = match foreign {
        Some(_) => Same::No,
        None => same_backing(&info, summary.disk_bytes, &summary.identity),
    };
    if same == Same::Grown {
        recovered = blocking(move || {
            recovered.grow(info.size_bytes);
            recovered
        })
        .await?;
    }
    let changed = changed_since(summary.clean, journal, &info, later);
    let has_dirty = summary.sectors_dirty > 0;
    let (source, verdict) = match judge(same, changed, has_dirty, verify, || Err(())) {
        Ok(verdict) => (source, verdict),
        Err(()) => {
            let samples = recovered.samples(SAMPLES);
            let (source, sample) = look(source, samples).await?;
            (source, judge(same, changed, has_dirty, verify, || Ok::<_, ApiError>(sample))?)
        }
    };
    let acceptable =
        later.filter(|_| changed == Changed::Later && same != Same::No && verify != Verify::Trust);
    let why = match (info.size_bytes == summary.disk_bytes, same, changed) {
        _ if foreign.is_some() => format!("{} meanwhile", foreign.unwrap_or_default()),
        _ if acceptable.is_some() => acceptable.map(LaterChange::reason).unwrap_or_default(),
        (_, Same::Grown, Changed::Yes) => {
            "its backing has grown while hob did not serve it, and may have been changed in other ways"
                .to_owned()
        }
        (false, Same::No, _) => format!(
            "its backing has {} bytes and had {} when the cache was in use",
            info.size_bytes, summary.disk_bytes
        ),
        (_, Same::No, _) => {
            format!("its backing is not the same as before: it is now {}", info.identity_text)
        }
        (_, _, Changed::Yes) => "its backing was changed while hob did not serve it".to_owned(),
        _ => "its backing does not match the cached data".to_owned(),
    };
    Ok((source, recovered, verdict, Mismatch { why, can_be_trusted: acceptable.is_some() }))
}

/// Compares sampled sectors with the backing.
async fn look(source: Source, samples: Vec<(u64, u32)>) -> Result<(Source, Sample)> {
    let (source, mut differing) = blocking(move || {
        let mut source = source;
        let size = source.info().size_bytes;
        let differing = differing(size, &samples, |offset, bytes| source.read(offset, bytes))?;
        Ok::<_, ApiError>((source, differing))
    })
    .await??;
    if let Source::Served(served) = &source
        && !differing.is_empty()
        && let Some(changed) = served.shard.changed_meanwhile(served.id).await?
    {
        // The shard records each write before the write reaches the backing, so `changed` includes
        // all sectors that have changed since.
        differing.retain(|sector| !changed.contains(*sector));
    }
    Ok((source, if differing.is_empty() { Sample::Fits } else { Sample::Differs }))
}

/// Returns the sampled sectors whose checksum on the backing differs. Sectors that the backing
/// cannot read are left out. Leaving them out is safe, because a cache whose sample matches is
/// still compared sector by sector before its data is used.
///
/// # Errors
/// Returns an error if the backing can read none of the sectors, or if a read fails more
/// than [`FAILING_MAX`] after the start.
fn differing(
    size_bytes: u64,
    samples: &[(u64, u32)],
    mut read: impl FnMut(u64, &mut [u8]) -> Result<(), IoError>,
) -> Result<Vec<u64>> {
    let mut bytes = vec![0; SECTOR_BYTES as usize];
    let (mut sums, mut differing) = (Vec::new(), Vec::new());
    let (begun, mut unreadable) = (Instant::now(), 0);
    for (sector, sum) in samples {
        let offset = sector * SECTOR_BYTES;
        // The disk may end within its last sector.
        let len = SECTOR_BYTES.min(size_bytes.saturating_sub(offset)) as usize;
        bytes.fill(0);
        if let Err(error) = read(offset, &mut bytes[..len]) {
            unreadable += 1;
            if unreadable == samples.len() || begun.elapsed() > FAILING_MAX {
                return Err(failed!("cannot compare the cache with the backing: sector {sector}: {error:?}")
                    .hint("repair the backing; hob tries to open the disk again every few seconds"));
            }
            continue;
        }
        sums.clear();
        hob_storage::checksum::sector_sums(&bytes, &mut sums);
        if sums != [*sum] {
            differing.push(*sector);
        }
    }
    if unreadable > 0 {
        tracing::warn!(unreadable, sampled = samples.len(), "the backing cannot read some sectors");
    }
    Ok(differing)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unreadable_sectors_do_not_prevent_a_comparison() {
        let mut sums = Vec::new();
        hob_storage::checksum::sector_sums(&[0; SECTOR_BYTES as usize], &mut sums);
        let samples: Vec<(u64, u32)> = (0..64).map(|sector| (sector, sums[0])).collect();
        let size = 64 * SECTOR_BYTES;
        let bad = |from: u64| {
            move |offset: u64, bytes: &mut [u8]| {
                bytes.fill(u8::from(offset == 3 * SECTOR_BYTES));
                if offset >= from * SECTOR_BYTES { Err(IoError::Failed) } else { Ok(()) }
            }
        };
        assert_eq!(differing(size, &samples, bad(64)).unwrap(), [3]);
        assert_eq!(differing(size, &samples, bad(8)).unwrap(), [3]);
        assert_eq!(differing(size, &samples, bad(2)).unwrap(), [0u64; 0]);
        assert!(differing(size, &samples, bad(0)).is_err());
    }
}
