//! `hob disk …`: the disks of the daemon.

use clap::Subcommand;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use hob_control::client::Client;
use hob_control::{
    BackingState, BackingTimeout, BackingTimeoutChange, Disk as DiskInfo, DiskAdd, DiskChanged, DiskPatch,
    DiskResize, DrainFor, EVENTS, Effect, LifeEvent, OnClients, PlannedChange, SharedLimits, Size,
    Verification,
};

use super::Global;
use super::cache::on_dirty;
use super::confirmation::{Confirmation, DryRun};
use super::drain::drain_first;
use super::options::options;
use super::output::{Format, pairs, print, table, with_notes, word};
use super::pool::absolute;
use super::remote::{ask, converse, explain};

/// Add, change, remove and show disks
#[derive(Debug, Subcommand)]
pub(crate) enum Disk {
    /// Serve a disk
    Add {
        #[command(flatten)]
        options: AddOptions,
    },
    /// Remove a disk after writing its dirty data to the backing; the backing keeps its data
    Remove {
        /// The disk
        disk: String,
        /// Discard dirty data: writes that were acknowledged to the guest are undone; needs --yes.
        /// Completes within 10 seconds, even if the backing hangs or is dead
        #[arg(long)]
        discard_dirty: bool,
        /// Disconnect clients and guests that use the disk; without --force, a disk in use is not
        /// removed
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        consent: Confirmation,
    },
    /// Change the settings of a disk while it is served
    Set {
        /// The disk
        disk: String,
        #[command(flatten)]
        options: SetOptions,
        #[command(flatten)]
        rehearsal: DryRun,
    },
    /// Grow a disk to the size of its backing, while the disk is served
    Resize {
        /// The disk
        disk: String,
        /// Grow a raw file to this size first; disks cannot shrink
        #[arg(long)]
        size: Option<Size>,
    },
    /// Report an event of a disk's VM, such as a snapshot: hob drains or empties the disk's cache
    /// as necessary; see docs/LIFECYCLE.md
    Event {
        /// The disk
        disk: String,
        /// The event
        #[arg(value_parser = event_parser())]
        event: LifeEvent,
        #[command(flatten)]
        consent: Confirmation,
    },
    /// List all disks
    List,
    /// Show one disk
    Show {
        /// The disk
        disk: String,
    },
}

options! {
    /// Options of `hob disk add`.
    #[derive(Debug, clap::Args)]
    pub(crate) struct AddOptions for DiskAdd {
        /// Name of the disk, which is also its NBD export name
        name: String,
        /// A raw file, a block device, nbd://host/export, nbd+unix:///export?socket=PATH,
        /// objects+file:///DIRECTORY or s3://BUCKET/PREFIX (see 'hob objects'), or a qcow2, VMDK,
        /// VDI, VHDX or VPC image
        #[arg(long, value_name = "SPEC")]
        backing: String,
        /// Image format of a file or block device: raw, qcow2, vmdk, vdi, vhdx or vpc; by its
        /// extension if absent, otherwise raw
        #[arg(long, value_name = "FORMAT")]
        format: Option<String>,
        /// Refuse changes
        #[arg(long)]
        read_only: bool,
        /// Time that requests wait for the backing during an outage before they fail: 500ms, 30s,
        /// 2m, 1h or forever [default: as in [limits] of hob.toml]
        #[arg(long, value_name = "DURATION")]
        backing_timeout: Option<BackingTimeout>,
        /// Size of a full stripe of the backing's storage, for example 192K: chunk size times the
        /// number of data disks of a RAID; a multiple of 4K, at most 16M [default: detected]
        #[arg(long, value_name = "SIZE")]
        stripe: Option<Size>,
        /// Datastore: name of the storage that the backing shares with other backings [default:
        /// detected]
        #[arg(long, value_name = "NAME")]
        datastore: Option<String>,
        /// Also make the disk available as a file (FUSE) for loop devices and other programs: a new
        /// name, or an existing regular file, which is hidden while the disk is served
        #[arg(long, value_name = "PATH")]
        fuse: Option<String>,
        /// Also make the disk a block device of this host, /dev/hob/NAME, through the kernel's NBD
        /// driver; see docs/DEVICE.md
        #[arg(long)]
        device: bool,
        /// Also serve the disk at this vhost-user socket
        #[arg(long, value_name = "PATH")]
        vhost_user: Option<String>,
        /// For a clone of an image or of an RBD snapshot: cache blocks of its parent only once for all
        /// clones; the cache belongs to an additional disk, which is created if necessary; see
        /// docs/GOLDEN_IMAGES.md
        #[arg(long)]
        share_parent: bool,
        /// Size of the cache for the parent, if this command creates the parent's disk
        #[arg(long, value_name = "SIZE", requires = "share_parent")]
        parent_cache: Option<Size>,
        /// Give the disk this cache, which belongs to no disk now, with its dirty data; 'hob pool show'
        /// lists such caches
        #[arg(long, value_name = "OWNER")]
        adopt_cache: Option<String>,
    }
}

options! {
    /// Options of `hob disk set`.
    #[derive(Debug, clap::Args)]
    pub(crate) struct SetOptions for DiskPatch {
        /// Time that requests wait for the backing during an outage before they fail: 500ms, 30s,
        /// 2m, 1h, forever, or default for the limit of the daemon; also applies to waiting
        /// requests
        #[arg(long, value_name = "DURATION")]
        backing_timeout: Option<BackingTimeoutChange>,
        /// Size of a full stripe of the backing's storage, for example 192K: chunk size times the
        /// number of data disks of a RAID; a multiple of 4K, at most 16M, or 0 for the detected size
        #[arg(long, value_name = "SIZE")]
        stripe: Option<Size>,
        /// Create or remove the block device of the disk on this host, /dev/hob/NAME
        #[arg(long, value_name = "STATE", value_parser = switch_parser())]
        device: Option<bool>,
        /// Refuse changes, or allow them; the disk is closed and opened again, so no client may be
        /// connected
        #[arg(long, value_name = "STATE", value_parser = switch_parser())]
        read_only: Option<bool>,
        /// Datastore of the backing, '' for the detected one; the disk is closed and opened again,
        /// so no client may be connected
        #[arg(long, value_name = "NAME")]
        datastore: Option<String>,
        /// Path of the disk's vhost-user socket, '' for none; refused while a guest is connected to
        /// the present socket
        #[arg(long, value_name = "PATH")]
        vhost_user: Option<String>,
        /// Path at which the disk appears as a file (FUSE), '' for none; refused while a program
        /// has the present file open
        #[arg(long, value_name = "PATH")]
        fuse: Option<String>,
    }
}

pub(super) fn run(command: Disk, global: &Global) -> anyhow::Result<()> {
    let changed = match command {
        Disk::List => {
            let disks = ask(global, async |client| client.disks().await)?;
            return print(global.output, &disks, |disks| list(disks));
        }
        Disk::Show { disk } => {
            let disk = ask(global, async |client| client.disk(&disk).await)?;
            return print(global.output, &disk, show);
        }
        Disk::Add { options } => {
            let add = DiskAdd::from(options);
            let backing = if is_uri(&add.backing) { add.backing } else { absolute(add.backing) };
            let (fuse, vhost_user) = (add.fuse.map(absolute), add.vhost_user.map(absolute));
            let add = DiskAdd { backing, fuse, vhost_user, ..add };
            ask(global, async |client| client.disk_add(&add).await)?
        }
        Disk::Set { disk, options, rehearsal } => {
            let patch = DiskPatch::from(options);
            let is_reopened = patch.read_only.is_some() || patch.datastore.is_some();
            let (vhost_user, fuse) =
                (patch.vhost_user.map(absolute_or_none), patch.fuse.map(absolute_or_none));
            let patch = DiskPatch { vhost_user, fuse, ..patch };
            converse(global, async |client| {
                if is_reopened || rehearsal.is_dry_run() {
                    let change = PlannedChange::SetDisk { patch: Box::new(patch.clone()) };
                    rehearsal.announce(&client, &disk, &change).await?;
                }
                client.disk_patch(&disk, &patch).await.map_err(explain)
            })?
        }
        Disk::Resize { disk, size } => {
            ask(global, async |client| client.disk_resize(&disk, &DiskResize { size }).await)?
        }
        Disk::Event { disk, event, consent } => converse(global, async |client| {
            let dirty = consent.check(&client, &disk, &PlannedChange::Event { event }).await?;
            let changed = client.disk_event(&disk, event, dirty).await.map_err(explain)?;
            if event.info().of_persistent == Effect::Drain {
                // The caller continues when the backing has all data.
                drain_first(&client, &disk, DrainFor::DiskEvent).await?;
            }
            let disk = Some(client.disk(&disk).await.map_err(explain)?);
            Ok(DiskChanged { disk, ..changed })
        })?,
        Disk::Remove { disk, discard_dirty, force, consent } => converse(global, async |client| {
            let change = PlannedChange::Remove { discard_dirty };
            if !force && !consent.is_dry_run() {
                check_unused(&client, &disk, &change).await?;
            }
            consent.preview(&client, &disk, &change).await?;
            let dirty = on_dirty(&client, &disk, discard_dirty, DrainFor::DiskRemove).await?;
            let clients = if force { OnClients::Disconnect } else { OnClients::Refuse };
            client.disk_remove(&disk, dirty, clients).await.map_err(explain)
        })?,
    };
    print_change(global.output, &changed)
}

/// Refuses a change that would disconnect clients of a disk.
async fn check_unused(client: &Client, disk: &str, change: &PlannedChange) -> anyhow::Result<()> {
    let users = match client.preview(disk, change).await.map_err(explain)?.clients {
        0 => return Ok(()),
        1 => "1 client".to_owned(),
        count => format!("{count} clients"),
    };
    anyhow::bail!(
        "{disk} is in use: {users} would be disconnected; stop its guest first, or pass --force to \
         disconnect it; '--dry-run' shows all effects; nothing was changed"
    )
}

/// Makes a path absolute. An empty path, which removes a setting, stays empty.
fn absolute_or_none(path: String) -> String {
    if path.is_empty() { path } else { absolute(path) }
}

/// Returns a parser of `on` and `off`.
fn switch_parser() -> impl TypedValueParser<Value = bool> {
    PossibleValuesParser::new(["on", "off"]).map(|word| word == "on")
}

/// Returns the names of life-cycle events as values for clap.
fn event_parser() -> impl TypedValueParser<Value = LifeEvent> {
    let names = EVENTS.iter().map(|row| PossibleValue::new(row.name).help(row.sentence));
    PossibleValuesParser::new(names)
        .map(|name| LifeEvent::from_name(&name).expect("one of the possible names"))
}

/// Returns true for a URI. `scheme:…` is not a path, but `./scheme:…` is.
fn is_uri(spec: &str) -> bool {
    spec.split_once(':').is_some_and(|(scheme, _)| {
        scheme.starts_with(|c: char| c.is_ascii_alphabetic())
            && scheme.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '+' | '-' | '.'))
    })
}

pub(super) fn print_change(format: Format, changed: &DiskChanged) -> anyhow::Result<()> {
    print(format, changed, |changed| {
        let text = changed.disk.as_ref().map_or_else(|| "removed".to_owned(), show);
        with_notes(text, &changed.notes)
    })
}

fn list(disks: &[DiskInfo]) -> String {
    let columns = "DISK|STATE|SIZE:|CACHE|ROOM:|POOL|BACKING";
    let row = |disk: &DiskInfo| {
        let cache = disk.cache.as_ref();
        vec![
            disk.name.clone(),
            state(disk),
            disk.size.human(),
            cache.map_or_else(|| "off".to_owned(), |cache| word(&cache.state)),
            cache.map_or_else(String::new, |cache| cache.room.human()),
            cache.map_or_else(String::new, |cache| cache.pool.clone()),
            disk.backing.clone(),
        ]
    };
    table(columns, disks.iter().map(row))
}

/// Returns the state of a disk, and the state of its backing unless the backing is connected:
/// `online, backing reconnecting for 12 s`.
fn state(disk: &DiskInfo) -> String {
    match disk.backing_state.as_ref().and_then(BackingState::brief) {
        Some(brief) => format!("{}, backing {brief}", word(&disk.state)),
        None => word(&disk.state),
    }
}

fn show(disk: &DiskInfo) -> String {
    let mut facts = vec![
        ("disk", disk.name.clone()),
        ("state", word(&disk.state)),
        ("backing", disk.backing.clone()),
        (
            "backing state",
            disk.backing_state.as_ref().map_or_else(|| "not open".to_owned(), BackingState::sentence),
        ),
        ("format", disk.format.clone().unwrap_or_else(|| "none".to_owned())),
        ("size", disk.size.human()),
        ("access", if disk.read_only { "read-only" } else { "read-write" }.to_owned()),
    ];
    let timeout = match (disk.backing_timeout, disk.backing_timeout_in_effect) {
        (Some(own), _) => own.to_string(),
        (None, Some(limit)) => format!("{limit} (the daemon's)"),
        (None, None) => "the daemon's".to_owned(),
    };
    let reason = disk.backing_timeout_reason.as_ref().map(|reason| format!("; {reason}"));
    facts.push(("backing timeout", timeout + &reason.unwrap_or_default()));
    let stripe = match (disk.stripe, disk.stripe_in_effect) {
        (Some(own), _) => own.human(),
        (None, Some(detected)) => format!("{} (detected)", detected.human()),
        (None, None) => "unknown".to_owned(),
    };
    facts.push(("stripe", stripe));
    facts.extend(disk.vhost_user.clone().map(|path| ("vhost-user", path)));
    facts.extend(disk.exports.iter().map(|export| ("export", super::export::words_of(export))));
    facts.extend(disk.parent.clone().map(|parent| ("parent", parent)));
    facts.extend(disk.parent_reason.clone().map(|reason| ("parent reason", reason)));
    if !disk.clones.is_empty() {
        facts.push(("clones", disk.clones.join(", ")));
    }
    facts.extend(disk.fuse.clone().map(|path| ("file", path)));
    facts.extend(disk.fuse_reason.clone().map(|reason| ("file reason", reason)));
    facts.extend(disk.device.clone().map(|path| ("device", path)));
    facts.extend(disk.device_reason.clone().map(|reason| ("device reason", reason)));
    facts.extend(disk.reason.clone().map(|reason| ("reason", reason)));
    facts.extend(disk.migration.as_ref().map(|migration| ("migration", super::migrate::sentence(migration))));
    match &disk.cache {
        None => facts.push(("cache", "off".to_owned())),
        Some(cache) => {
            facts.push(("cache", word(&cache.state)));
            facts.extend(cache.reason.clone().map(|reason| ("cache reason", reason)));
            facts.push(("cache pool", cache.pool.clone()));
            facts.push(("cache size", size(cache)));
            if cache.room != cache.size {
                facts.push(("cache room", cache.room.human()));
            }
            facts.extend(settings(cache));
            facts.extend(cache.verification.map(|it| ("cache verification", verification(it))));
        }
    }
    if let Some(recording) = &disk.recording {
        let (requests, dropped) = (recording.requests, recording.dropped);
        facts.push(("recording", format!("{requests} requests, {dropped} dropped")));
    }
    pairs(facts)
}

/// Returns the size of a cache, and its limits if hob chooses it.
fn size(cache: &hob_control::Cache) -> String {
    let Some(shared) = &cache.shared else { return cache.size.human() };
    let SharedLimits { min, max, shares, pin } = &shared.limits;
    let mut limits = vec!["shared".to_owned()];
    limits.extend((min.bytes() > 0).then(|| format!("at least {}", min.human())));
    limits.extend((max.bytes() > 0).then(|| format!("at most {}", max.human())));
    limits.extend((*shares != 1000).then(|| format!("{shares} shares")));
    limits.extend(pin.then(|| "pinned".to_owned()));
    format!("{} ({})", cache.size.human(), limits.join(", "))
}

/// Returns the configured write mode, and the mode in effect if it differs.
fn mode(cache: &hob_control::Cache) -> String {
    match &cache.mode_in_effect {
        Some(now) => format!("{} ({now})", cache.mode),
        None => cache.mode.clone(),
    }
}

/// Describes the progress of verifying the cache against the backing.
fn verification(Verification { left, total }: Verification) -> String {
    let done = Size(total.bytes().saturating_sub(left.bytes()));
    format!(
        "{} of {} compared with the backing; reads of the rest go to the backing",
        done.human(),
        total.human()
    )
}

fn settings(cache: &hob_control::Cache) -> Vec<(&'static str, String)> {
    let mut facts = vec![
        ("cache preset", cache.preset.clone().unwrap_or_else(|| "none".to_owned())),
        ("cache mode", mode(cache)),
        ("cache block size", cache.block_size.to_string()),
        ("cache policy", cache.policy.clone()),
        ("cache admission", cache.admission.clone()),
        ("cache fill", cache.fill.clone()),
        ("cache layout", cache.layout.clone()),
        ("cache memory", if cache.ram.bytes() == 0 { "none".to_owned() } else { cache.ram.human() }),
    ];
    if !cache.persistent {
        facts.push(("cache persistent", "no".to_owned()));
        return facts;
    }
    facts.extend([
        ("cache persistent", format!("yes, journal of {}", cache.journal.human())),
        ("cache copies", cache.copies.clone()),
        ("cache verify", cache.verify.clone()),
        ("cache destage", destage(cache)),
    ]);
    facts.extend(cache.dirty.as_ref().map(|dirty| ("cache dirty", super::drain::state(dirty))));
    facts
}

/// Describes when and in which order a cache destages. A cache that keeps the order of writes and
/// bounds their age destages them immediately.
fn destage(cache: &hob_control::Cache) -> String {
    let start = match (cache.ordered, cache.dirty_age_max) {
        (true, 1..) => "immediately".to_owned(),
        (false, age @ 1..) => {
            format!("from {} % dirty to {} %, within {age} s", cache.dirty_start, cache.dirty_stop)
        }
        (_, 0) => format!("from {} % dirty to {} %, no bound on age", cache.dirty_start, cache.dirty_stop),
    };
    let order = if cache.ordered { ", ordered" } else { "" };
    format!("{}, {start}, full at {} %{order}", cache.destage_order, cache.dirty_full)
}

#[cfg(test)]
mod tests {
    use hob_control::DiskState;

    use super::*;

    #[test]
    fn an_ordered_cache_with_a_bound_on_age_destages_immediately() {
        let said = |ordered, dirty_age_max| {
            destage(&hob_control::Cache {
                destage_order: "address".to_owned(),
                dirty_start: 60,
                dirty_stop: 50,
                dirty_full: 90,
                dirty_age_max,
                ordered,
                ..hob_control::Cache::default()
            })
        };
        assert_eq!(said(false, 30), "address, from 60 % dirty to 50 %, within 30 s, full at 90 %");
        assert_eq!(said(true, 30), "address, immediately, full at 90 %, ordered");
        assert_eq!(said(true, 0), "address, from 60 % dirty to 50 %, no bound on age, full at 90 %, ordered");
    }

    #[test]
    fn a_timeout_that_does_not_apply_to_the_backing_is_shown_with_the_reason() {
        let disk = DiskInfo {
            backing_timeout: Some("30s".parse().unwrap()),
            backing_timeout_reason: Some("does not apply to RBD images".to_owned()),
            ..DiskInfo::default()
        };
        assert!(show(&disk).contains("30s; does not apply to RBD images"), "{}", show(&disk));
        let disk = DiskInfo { backing_timeout_reason: None, ..disk };
        assert!(!show(&disk).contains("30s;"), "{}", show(&disk));
    }

    #[test]
    fn the_list_shows_a_backing_that_is_not_connected() {
        let disk = |name: &str, backing_state| DiskInfo {
            name: name.to_owned(),
            state: DiskState::Online,
            backing_state,
            ..DiskInfo::default()
        };
        let away = BackingState::Reconnecting {
            since_seconds: 12,
            last_error: "Connection refused".to_owned(),
            waiting_requests: 3,
        };
        let text = list(&[disk("db", Some(away)), disk("web", Some(BackingState::Connected))]);
        let line = |name: &str| text.lines().find(|line| line.starts_with(name)).unwrap();
        assert!(line("db").contains("  online, backing reconnecting for 12 s  "), "{text}");
        assert!(line("web").contains("  online  ") && !line("web").contains("connected"), "{text}");
    }

    #[test]
    fn the_progress_of_a_verification_is_said() {
        let said = verification(Verification { left: Size(256 << 20), total: Size(1 << 30) });
        assert_eq!(said, "768 MiB of 1 GiB compared with the backing; reads of the rest go to the backing");
    }

    #[test]
    fn uris_stay_and_paths_become_absolute() {
        for uri in ["nbd://h/e", "nbd+unix:///e?socket=/s"] {
            assert!(is_uri(uri), "{uri}");
        }
        for path in ["vm.img", "./nbd://x", "/a:b", "dir/a:b", ""] {
            assert!(!is_uri(path), "{path}");
        }
    }
}
