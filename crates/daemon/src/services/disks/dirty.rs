//! Reads the dirty data of a cache that no shard serves. The callers rescue this data into a file
//! or write it to a backing ([`to_backing`](super::to_backing)).

use std::ops::Range;

use hob_engine::command::DataSegment;
use hob_engine::journal::Recovered;
use hob_engine::units::SECTOR_BYTES;
use hob_storage::pool::recovery::{Found, Recovery};
use hob_storage::pool::{OwnerId, Pool, PoolError, SectorLost, SectorReader};

use crate::api_error::{ApiError, Result, conflict};

/// A cache in a pool, prepared for reading its dirty data. Only the creation of this value needs
/// the pool. Other operations can use the pool while the dirty data is read, which is slow.
pub(in crate::services) struct Source {
    recovery: Recovery,
    reader: SectorReader,
}

impl Source {
    /// Locates the dirty data of an owner's cache in a pool.
    pub(in crate::services) fn of(pool: &Pool, owner: OwnerId) -> Result<Source> {
        let failed = |error: PoolError| ApiError::failed(error.to_string());
        let recovery = Recovery::of(pool, owner).map_err(failed)?;
        Ok(Source { recovery, reader: SectorReader::new(pool).map_err(failed)? })
    }
}

/// The dirty data of a cache whose journal was read.
pub(in crate::services) struct Dirty {
    recovered: Box<Recovered>,
    /// Data segments of the cache with the pool's device ids, in the order of the frame numbers.
    data: Vec<DataSegment>,
    reader: SectorReader,
}

impl Dirty {
    /// Returns the dirty data of a cache whose journal was read before.
    pub(super) fn of_recovered(
        recovered: Box<Recovered>,
        data: Vec<DataSegment>,
        reader: SectorReader,
    ) -> Dirty {
        Dirty { recovered, data, reader }
    }

    /// Reads the journal. Calls `progress` with the number of bytes read so far and with the total
    /// number.
    pub(in crate::services) fn of(source: Source, progress: impl FnMut(u64, u64)) -> Result<Dirty> {
        let Source { recovery, reader } = source;
        let found = recovery.run(progress, |_| ()).map_err(|error| ApiError::failed(error.to_string()))?;
        let (recovered, remains) = match found {
            Found::Recovered(recovered, remains) => (recovered, remains),
            Found::Nothing(_) => return Err(ApiError::conflict("the cache is empty")),
            Found::Damaged { what, .. } => {
                return Err(conflict!(
                    "the journal of the cache is damaged ({what}), so hob cannot determine which \
                    data is dirty"
                ));
            }
        };
        Ok(Dirty { recovered, data: remains.data, reader })
    }

    /// Returns the counts of valid and dirty sectors according to the journal.
    pub(in crate::services) fn summary(&self) -> hob_engine::journal::Summary {
        self.recovered.summary
    }

    /// Reads every dirty sector in disk order. Calls `take` with each dirty byte range of the
    /// sector and its data, or the reason why flash lost the data. Stops at the first error of
    /// `take`.
    pub(in crate::services) fn each<E>(
        &mut self,
        mut take: impl FnMut(Range<u64>, Result<&[u8], SectorLost>) -> Result<(), E>,
    ) -> Result<(), E> {
        let disk_bytes = self.recovered.summary.disk_bytes;
        for sector in self.recovered.dirty() {
            let offset = sector.sector * SECTOR_BYTES;
            let len = SECTOR_BYTES.min(disk_bytes.saturating_sub(offset));
            let bytes = self.reader.read_dirty(&self.data, &sector);
            for part in sector.dirty_bytes() {
                let part = part.start..part.end.min(len);
                let found = bytes.as_ref().map(|bytes| &bytes[part.start as usize..part.end as usize]);
                take(offset + part.start..offset + part.end, found.map_err(Clone::clone))?;
            }
        }
        Ok(())
    }
}
