//! Export of an offline disk's dirty data into a file.
//!
//! The file is sparse and as large as the disk, and each dirty sector has the same offset as on the
//! disk. `FILE.map` lists the ranges as lines of text: `data OFFSET BYTES`, or `lost OFFSET BYTES`
//! for data that is unreadable on flash. Existing files are not overwritten.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use hob_control::{DiskChanged, ExportDirty, Size};
use hob_engine::units::SECTOR_BYTES;
use hob_storage::pool::OwnerId;

use super::Disks;
use super::dirty::{Dirty, Source};
use crate::api_error::{ApiError, Result, conflict, failed, invalid};
use crate::services::flash::blocking;
use crate::services::pools::no_cache;
use crate::services::registry::DiskPhase;

/// Number of bytes of dirty data that were written to the export file, and number that flash lost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::services) struct Exported {
    pub(in crate::services) bytes: u64,
    pub(in crate::services) lost_bytes: u64,
    /// Number of bytes of dirty data on missing devices, which could not be exported.
    pub(in crate::services) missing_bytes: u64,
    /// Number of the journal ring that was read.
    pub(in crate::services) ring: u32,
}

impl Disks {
    /// Writes the dirty data of an offline disk's cache into a file on this host.
    pub(crate) async fn export_dirty(&self, disk: String, export: ExportDirty) -> Result<DiskChanged> {
        let service = self.clone();
        self.tasks
            .run("cache export-dirty", disk.clone(), async move { service.export(&disk, &export.path).await })
            .await
    }

    async fn export(&self, name: &str, path: &str) -> Result<DiskChanged> {
        let path = PathBuf::from(path);
        if !path.is_absolute() {
            return Err(invalid!("{} is not an absolute path", path.display()));
        }
        let guard = if self.registry.inner().stop_offline_drain(name) {
            self.pools.guard_to_discard(name, "exported").await?
        } else {
            self.registry.guard_disk_for_command(name, "exported").await?
        };
        let (flash, owner, written) = {
            let inner = self.registry.inner();
            let disk = inner.disk(name)?;
            let spec = disk.cache().ok_or_else(|| no_cache(name))?;
            if !matches!(disk.phase, DiskPhase::Offline(_)) {
                return Err(conflict!("{name} is online: read its dirty data through the disk")
                    .hint(format!("'hob drain {name}' writes the dirty data to the backing")));
            }
            inner.check_left_by_shard(name)?;
            let journal = spec.journal.ok_or_else(|| {
                ApiError::conflict("this cache can have no dirty data: the backing has all data")
            })?;
            (inner.pool(&spec.pool)?.flash.clone(), OwnerId(journal.owner.0), journal.written)
        };
        // Other operations need the pool during the export.
        let source = flash.read(move |pool| Source::of(pool, owner)).await?;
        let to = path.clone();
        let exported = blocking(move || export_to(source, &to)).await??;
        let is_outdated = exported.ring < written;
        drop(guard);
        tracing::info!(
            "{name}: {} of dirty data were exported to {}",
            Size(exported.bytes).human(),
            path.display()
        );
        let mut notes = vec![format!(
            "{} of dirty data are in {path}, each sector at its position on the disk; {path}.map \
            lists the ranges with dirty data",
            Size(exported.bytes).human(),
            path = path.display()
        )];
        if is_outdated {
            notes.push(
                "the newest journal of the cache is not on flash: this data is of an earlier time, and the backing \
                 may have newer data"
                    .to_owned(),
            );
        }
        if exported.lost_bytes > 0 {
            notes.push(format!(
                "{} of dirty data cannot be read from flash",
                Size(exported.lost_bytes).human()
            ));
        }
        if exported.missing_bytes > 0 {
            notes.push(format!(
                "{} of dirty data are on missing devices of the pool and not in the file; connect these devices \
                 before you discard the data",
                Size(exported.missing_bytes).human()
            ));
        }
        self.observe.disk_changed(name, notes)
    }
}

/// Creates the data file and its map. After a failure, removes the files that it has created.
fn export_to(source: Source, path: &Path) -> Result<Exported> {
    let mut dirty = Dirty::of(source, |_, _| ())?;
    let mut map_path = path.as_os_str().to_owned();
    map_path.push(".map");
    // The files contain guest data.
    let create = |path: &Path| File::options().write(true).create_new(true).mode(0o600).open(path);
    let mut write = |file: &File, map_file: &File| -> io::Result<Exported> {
        let exported = write_files(&mut dirty, file, map_file)?;
        // An operator discards the data next, so the names should be durable too.
        let directory = path.parent().unwrap_or(Path::new("/"));
        if let Err(error) = File::open(directory).and_then(|directory| directory.sync_all()) {
            tracing::warn!("cannot sync the directory {}: {error}", directory.display());
        }
        Ok(exported)
    };
    let written = create(path).and_then(|file| {
        let written = create(Path::new(&map_path))
            .and_then(|map_file| write(&file, &map_file).inspect_err(|_| _ = fs::remove_file(&map_path)));
        written.inspect_err(|_| _ = fs::remove_file(path))
    });
    written.map_err(|error: io::Error| failed!("cannot write {}: {error}", path.display()))
}

/// Writes the dirty data and the map, durably.
fn write_files(dirty: &mut Dirty, file: &File, map_file: &File) -> io::Result<Exported> {
    let mut map = Map { to: io::BufWriter::new(map_file), run: None };
    file.set_len(dirty.summary().disk_bytes)?;
    let missing_bytes = dirty.summary().sectors_missing * SECTOR_BYTES;
    let ring = dirty.summary().ring;
    let mut exported = Exported { missing_bytes, ring, ..Exported::default() };
    dirty.each(|range, bytes| {
        let (offset, len) = (range.start, range.end - range.start);
        let kind = match bytes {
            Ok(bytes) => {
                file.write_all_at(bytes, offset)?;
                exported.bytes += len;
                "data"
            }
            Err(lost) => {
                tracing::warn!("the dirty sector at byte {offset} is unreadable on flash: {lost}");
                exported.lost_bytes += len;
                "lost"
            }
        };
        map.add(kind, offset, len)
    })?;
    map.end()?;
    file.sync_all()?;
    map_file.sync_all()?;
    Ok(exported)
}

/// Writer of a map file, which merges adjacent ranges of the same kind.
struct Map<W: Write> {
    to: W,
    run: Option<(&'static str, u64, u64)>,
}

impl<W: Write> Map<W> {
    fn add(&mut self, kind: &'static str, offset: u64, len: u64) -> io::Result<()> {
        match &mut self.run {
            Some((of, first, bytes)) if *of == kind && *first + *bytes == offset => *bytes += len,
            _ => {
                self.flush()?;
                self.run = Some((kind, offset, len));
            }
        }
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        match self.run.take() {
            Some((kind, offset, bytes)) => writeln!(self.to, "{kind} {offset} {bytes}"),
            None => Ok(()),
        }
    }

    fn end(mut self) -> io::Result<()> {
        self.flush()?;
        self.to.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_share_a_line() {
        let mut text = Vec::new();
        let mut map = Map { to: &mut text, run: None };
        for (kind, offset, len) in
            [("data", 0, 4096), ("data", 4096, 4096), ("lost", 8192, 4096), ("lost", 16384, 512)]
        {
            map.add(kind, offset, len).unwrap();
        }
        map.end().unwrap();
        assert_eq!(String::from_utf8(text).unwrap(), "data 0 8192\nlost 8192 4096\nlost 16384 512\n");
    }
}
