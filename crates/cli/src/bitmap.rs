//! `hob bitmap …`: dirty bitmaps, which record the changed parts of a disk.

use clap::Subcommand;
use hob_control::{Bitmap as Shown, BitmapAdd, BitmapMerge, BitmapRotate, Bitmaps, Size};

use super::Global;
use super::output::{print, table, word};
use super::remote::{ask, converse, explain};

/// Manage dirty bitmaps, which record changed parts of a disk for incremental backups; see
/// docs/BACKUP.md
#[derive(Debug, Subcommand)]
pub(crate) enum Bitmap {
    /// Start to record changes of a disk. NBD clients see the bitmap as the metadata context
    /// qemu:dirty-bitmap:NAME
    Add {
        /// The disk
        disk: String,
        /// Name of the bitmap
        name: String,
        /// Bytes of the disk that one bit covers: a power of two from 4K to 64M [default: 64K, more on
        /// disks over 4 TiB]
        #[arg(long, value_name = "SIZE")]
        granularity: Option<Size>,
    },
    /// Forget a bitmap
    Remove {
        /// The disk
        disk: String,
        /// Name of the bitmap
        name: String,
    },
    /// Empty a bitmap; it continues to record
    Clear {
        /// The disk
        disk: String,
        /// Name of the bitmap
        name: String,
    },
    /// Freeze the recorded changes under another name, for a backup to read; the bitmap continues,
    /// empty
    Rotate {
        /// The disk
        disk: String,
        /// Name of the active bitmap
        name: String,
        /// Name of the frozen bitmap
        frozen: String,
    },
    /// Add a frozen bitmap's changes to an active bitmap, and remove the frozen one; use this when a backup failed
    Merge {
        /// The disk
        disk: String,
        /// Name of the bitmap
        name: String,
        /// Name of the active bitmap that gets the changes
        into: String,
    },
    /// List bitmaps
    List {
        /// List the bitmaps of this disk only
        disk: Option<String>,
    },
}

pub(super) fn run(command: Bitmap, global: &Global) -> anyhow::Result<()> {
    let bitmaps = match command {
        Bitmap::List { disk: None } => {
            let all = converse(global, async |client| {
                let client = client.with_liveness_check();
                let mut all = Vec::new();
                for disk in client.disks().await.map_err(explain)? {
                    all.push(client.bitmaps(&disk.name).await.map_err(explain)?);
                }
                Ok(all)
            })?;
            return print(global.output, &all, |all| list(all));
        }
        Bitmap::List { disk: Some(disk) } => ask(global, async |client| client.bitmaps(&disk).await)?,
        Bitmap::Add { disk, name, granularity } => {
            let add = BitmapAdd { name, granularity };
            ask(global, async |client| client.bitmap_add(&disk, &add).await)?
        }
        Bitmap::Remove { disk, name } => {
            ask(global, async |client| client.bitmap_remove(&disk, &name).await)?
        }
        Bitmap::Clear { disk, name } => ask(global, async |client| client.bitmap_clear(&disk, &name).await)?,
        Bitmap::Rotate { disk, name, frozen } => {
            let rotate = BitmapRotate { frozen };
            ask(global, async |client| client.bitmap_rotate(&disk, &name, &rotate).await)?
        }
        Bitmap::Merge { disk, name, into } => {
            let merge = BitmapMerge { into };
            ask(global, async |client| client.bitmap_merge(&disk, &name, &merge).await)?
        }
    };
    print(global.output, &bitmaps, |bitmaps| list(std::slice::from_ref(bitmaps)))
}

fn list(all: &[Bitmaps]) -> String {
    let columns = "DISK|BITMAP|STATE|GRANULARITY:|CHANGED:|NOTE";
    let size = |size: Option<Size>| size.map_or("-".to_owned(), Size::human);
    let row = |disk: &str, bitmap: &Shown| {
        let why =
            bitmap.everything_because.as_ref().map(|why| format!("the whole disk counts as changed: {why}"));
        vec![
            disk.to_owned(),
            bitmap.name.clone(),
            word(&bitmap.state),
            size(bitmap.granularity),
            size(bitmap.dirty),
            why.unwrap_or_default(),
        ]
    };
    let rows =
        all.iter().flat_map(|Bitmaps { disk, bitmaps }| bitmaps.iter().map(move |bitmap| row(disk, bitmap)));
    table(columns, rows)
}
