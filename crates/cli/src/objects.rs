//! `hob objects …`: disks in object stores. The `hob objects` commands use the store directly,
//! without a daemon.

use clap::Subcommand;
use hob_control::Size;
use hob_storage::backing::BackingOptions;
use hob_storage::backing::objects::{self, OBJECT_BYTES_DEFAULT, ObjectDisk};
use serde::Serialize;

use super::Global;
use super::confirmation::Confirmation;
use super::output::{pairs, print};

/// The owner of a disk that no host has open.
const NO_OWNER: &str = "no host";

/// Create, show and unlock disks that are stored as objects, in an object store such as S3 or in a
/// directory; see docs/OBJECTS.md
#[derive(Debug, Subcommand)]
pub(crate) enum Objects {
    /// Create a disk of zeroes. The disk takes up space only where it is written
    Create {
        /// objects+file:///DIRECTORY, s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or
        /// az://CONTAINER/PREFIX
        #[arg(value_name = "SPEC")]
        spec: String,
        /// Size of the disk
        #[arg(long)]
        size: Size,
        /// Size of each object, a power of two from 64K to 64M: small ones for scattered small
        /// writes
        #[arg(long, value_name = "SIZE", default_value_t = Size(OBJECT_BYTES_DEFAULT))]
        object_size: Size,
    },
    /// Show a disk's objects and its owner
    Show {
        /// Backing, as for 'create'
        #[arg(value_name = "SPEC")]
        spec: String,
    },
    /// Unlock a disk whose host will never return and did not close the disk. Unflushed writes and
    /// dirty data of that host are lost. If the host still runs, all its writes to the disk fail
    Unlock {
        /// Backing, as for 'create'
        #[arg(value_name = "SPEC")]
        spec: String,
        #[command(flatten)]
        consent: Confirmation,
    },
}

/// The JSON output.
#[derive(Debug, Serialize)]
struct Shown {
    backing: String,
    uuid: String,
    size: u64,
    object_size: u64,
    /// Number of present objects, if they were counted.
    objects: Option<u64>,
    manifest: u64,
    epoch: u64,
    /// The host that has the disk open, or did not close it.
    owner: Option<String>,
}

impl Shown {
    fn of(backing: String, disk: &ObjectDisk) -> Shown {
        Shown {
            backing,
            uuid: disk.uuid.to_string(),
            size: disk.size_bytes,
            object_size: disk.object_bytes,
            objects: disk.objects,
            manifest: disk.manifest,
            epoch: disk.epoch,
            owner: disk.owner.clone(),
        }
    }
}

pub(super) fn run(command: Objects, global: &Global) -> anyhow::Result<()> {
    let options = BackingOptions::default();
    match command {
        Objects::Create { spec, size, object_size } => {
            let made = objects::create(&spec, size.bytes(), object_size.bytes(), &options)?;
            print(global.output, &Shown::of(spec, &made), show)
        }
        Objects::Show { spec } => {
            let found = objects::show(&spec, &options)?;
            print(global.output, &Shown::of(spec, &found), show)
        }
        Objects::Unlock { spec, consent } => {
            let owner = objects::check_unlock(&spec, &options)?.owner;
            consent.check_unlock(&spec, owner.as_deref().unwrap_or(NO_OWNER))?;
            let before = objects::unlock(&spec, &options)?;
            print(global.output, &Shown::of(spec, &before), |before| {
                let owner = before.owner.as_deref().unwrap_or(NO_OWNER);
                format!("unlocked: {owner} had the disk, and can no longer write to it")
            })
        }
    }
}

fn show(disk: &Shown) -> String {
    let mut facts = vec![
        ("backing", disk.backing.clone()),
        ("uuid", disk.uuid.clone()),
        ("size", Size(disk.size).human()),
        ("object size", Size(disk.object_size).human()),
    ];
    if let Some(objects) = disk.objects {
        let most = Size(objects.saturating_mul(disk.object_size).min(disk.size)).human();
        facts.push(("objects", format!("{objects}, {most} at most")));
    }
    facts.push(("manifest", format!("{}, epoch {}", disk.manifest, disk.epoch)));
    facts.push(("in use by", disk.owner.clone().unwrap_or_else(|| NO_OWNER.to_owned())));
    pairs(facts)
}
