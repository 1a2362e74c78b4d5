//! Comparison of a persistent cache with its backing, before the cache is used again.

use hob_engine::io::IoError;
use hob_engine::journal::Recovered;
use hob_engine::preset::Verify;
use hob_engine::units::{DiskId, SECTOR_BYTES};

use super::fencing::{Changed, Same, Sample, Verdict, judge};
use crate::api_error::ApiError;
use crate::hardware::{Backing, BackingInfo, ChangeMark, Reader};
use crate::services::flash::blocking;
use crate::shard_api::ShardHandle;
use crate::state::{Closed, JournalSpec};

/// Number of clean sectors that are compared with the backing.
const SAMPLES: usize = 64;

/// Access to the backing for comparing it with the cache.
pub(in crate::services) enum Source {
    /// A backing that no shard serves yet.
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

/// Compares the backing with the size and the identity that the cache recorded.
pub(super) fn same_backing(info: &BackingInfo, disk_bytes: u64, identity: &[u8; 32]) -> Same {
    if info.size_bytes == disk_bytes && info.identity == *identity {
        Same::Yes
    } else if info.size_bytes > disk_bytes && info.identity_at(disk_bytes) == Some(*identity) {
        Same::Grown
    } else {
        Same::No
    }
}

/// Returns whether another program has changed the backing since the evidence was recorded or the
/// cache was closed.
pub(super) fn changed_since(clean: bool, journal: JournalSpec, info: &BackingInfo) -> Changed {
    if journal.evidence.is_some() && journal.evidence == info.evidence {
        return Changed::No;
    }
    match (clean, journal.closed, info.changed) {
        (true, Some(Closed { size_bytes, modified_ns }), Some(now))
            if now != (ChangeMark { size_bytes, modified_ns }) =>
        {
            Changed::Yes
        }
        _ => Changed::Unknown,
    }
}

/// Decides whether the cache's data matches the backing, with the reason if not. Sectors written
/// during recovery are skipped and invalidated.
pub(super) async fn compare(
    source: Source,
    mut recovered: Box<Recovered>,
    journal: JournalSpec,
    verify: Verify,
    foreign: Option<String>,
) -> Result<(Source, Box<Recovered>, Verdict, String), ApiError> {
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
    let changed = changed_since(summary.clean, journal, &info);
    let has_dirty = summary.sectors_dirty > 0;
    let (source, verdict) = match judge(same, changed, has_dirty, verify, || Err(())) {
        Ok(verdict) => (source, verdict),
        Err(()) => {
            let samples = recovered.samples(SAMPLES);
            let (source, sample) = look(source, samples).await?;
            (source, judge(same, changed, has_dirty, verify, || Ok::<_, ApiError>(sample))?)
        }
    };
    let why = match (info.size_bytes == summary.disk_bytes, same, changed) {
        _ if foreign.is_some() => format!("{} meanwhile", foreign.unwrap_or_default()),
        (_, Same::Grown, Changed::Yes) => {
            "its backing has grown while hob did not serve it, and may have been changed otherwise".to_owned()
        }
        (false, Same::No, _) => format!(
            "its backing has {} bytes and had {} when the cache was in use",
            info.size_bytes, summary.disk_bytes
        ),
        (_, Same::No, _) => {
            format!("its backing is another one than before: it is now {}", info.identity_text)
        }
        (_, _, Changed::Yes) => "its backing was changed while hob did not serve it".to_owned(),
        _ => "its backing does not match the cached data".to_owned(),
    };
    Ok((source, recovered, verdict, why))
}

/// Compares sampled sectors with the backing.
async fn look(source: Source, samples: Vec<(u64, u32)>) -> Result<(Source, Sample), ApiError> {
    let (source, mut differing) = blocking(move || differing(source, &samples)).await??;
    if let Source::Served(served) = &source
        && !differing.is_empty()
        && let Some(changed) = served.shard.changed_meanwhile(served.id).await?
    {
        // A write is recorded before it reaches the backing.
        differing.retain(|sector| !changed.contains(*sector));
    }
    Ok((source, if differing.is_empty() { Sample::Fits } else { Sample::Differs }))
}

/// Returns the sampled sectors whose checksum on the backing differs.
fn differing(mut source: Source, samples: &[(u64, u32)]) -> Result<(Source, Vec<u64>), ApiError> {
    let size = source.info().size_bytes;
    let mut bytes = vec![0; SECTOR_BYTES as usize];
    let (mut sums, mut differing) = (Vec::new(), Vec::new());
    for (sector, sum) in samples {
        let offset = sector * SECTOR_BYTES;
        // The disk may end within its last sector.
        let len = SECTOR_BYTES.min(size.saturating_sub(offset)) as usize;
        bytes.fill(0);
        source.read(offset, &mut bytes[..len]).map_err(|error| {
            ApiError::failed(format!("cannot compare the cache with the backing: sector {sector}: {error:?}"))
                .hint("repair the backing; hob retries every few seconds")
        })?;
        sums.clear();
        hob_storage::checksum::sector_sums(&bytes, &mut sums);
        if sums != [*sum] {
            differing.push(*sector);
        }
    }
    Ok((source, differing))
}
