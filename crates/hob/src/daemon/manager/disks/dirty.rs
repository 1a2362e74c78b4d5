//! What is dirty in a cache that no shard runs, sector by sector: to be rescued into a file, or brought to a backing.

use std::ops::Range;

use hob_engine::units::SECTOR_BYTES;
use hob_storage::pool::recovery::{Found, RecoveredPool, Recovery};
use hob_storage::pool::{OwnerId, Pool, PoolError, SectorLost, SectorReader};

use crate::daemon::manager::api_error::ApiError;

/// Where it is. Made with the pool at hand; reading takes long, and needs the pool no more.
pub(in crate::daemon::manager) struct Source {
    recovery: Recovery,
    reader: SectorReader,
}

impl Source {
    /// Of a cache in a pool.
    pub(in crate::daemon::manager) fn of(pool: &Pool, owner: OwnerId) -> Result<Source, ApiError> {
        let failed = |error: PoolError| ApiError::failed(error.to_string());
        let recovery = Recovery::of(pool, owner).map_err(failed)?;
        Ok(Source { recovery, reader: SectorReader::new(pool).map_err(failed)? })
    }
}

/// All of it.
pub(in crate::daemon::manager) struct Dirty {
    recovered: Box<hob_engine::journal::Recovered>,
    remains: RecoveredPool,
    reader: SectorReader,
}

impl Dirty {
    /// Reads the journal. `progress` is told bytes of it that are read, and that are to be read.
    pub(in crate::daemon::manager) fn of(
        source: Source,
        progress: impl FnMut(u64, u64),
    ) -> Result<Dirty, ApiError> {
        let Source { recovery, reader } = source;
        let found = recovery.run(progress, |_| ()).map_err(|error| ApiError::failed(error.to_string()))?;
        let (recovered, remains) = match found {
            Found::Recovered(recovered, remains) => (recovered, remains),
            Found::Nothing(_) => return Err(ApiError::conflict("the cache holds nothing")),
            Found::Damaged { what, .. } => {
                return Err(ApiError::conflict(format!(
                    "the journal of the cache is damaged ({what}): what was dirty cannot be told from what was not"
                )));
            }
        };
        Ok(Dirty { recovered, remains, reader })
    }

    /// What the journal says of the whole.
    pub(in crate::daemon::manager) fn summary(&self) -> hob_engine::journal::Summary {
        self.recovered.summary
    }

    /// Reads each dirty sector, in the order of the disk: where it lies there, and its bytes, or why there are none. The first error of
    /// `take` ends it.
    pub(in crate::daemon::manager) fn each<E>(
        &mut self,
        mut take: impl FnMut(Range<u64>, Result<&[u8], SectorLost>) -> Result<(), E>,
    ) -> Result<(), E> {
        let disk_bytes = self.recovered.summary.disk_bytes;
        for sector in self.recovered.dirty() {
            let offset = sector.sector * SECTOR_BYTES;
            let len = SECTOR_BYTES.min(disk_bytes.saturating_sub(offset));
            let bytes = self.reader.read_dirty(&self.remains.data, &sector);
            take(offset..offset + len, bytes.map(|bytes| &bytes[..len as usize]))?;
        }
        Ok(())
    }
}
