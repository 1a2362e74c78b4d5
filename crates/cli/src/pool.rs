//! `hob pool …`: flash pools of this host.

use clap::Subcommand;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use hob_control::{
    Admission, Device, DeviceAdd, DevicePatch, FlashWrites, FlashWritesChange, FlashWritesUsage, Orphan,
    PlannedPoolChange, Pool as PoolInfo, PoolChanged, PoolCreate, PoolPatch, SharedCache, SharedCapacity,
    Size, SwapRoom,
};

use super::Global;
use super::confirmation::Confirmation;
use super::output::{Format, pairs, print, table, with_notes};
use super::remote::{ask, converse, explain};

/// Make, change and show pools of flash
#[derive(Debug, Subcommand)]
pub(crate) enum Pool {
    /// Create a pool of one or more devices
    Create {
        /// Name of the pool
        name: String,
        /// Block devices or files; hob creates files that do not exist
        #[arg(required = true, value_name = "DEVICE")]
        devices: Vec<String>,
        /// Size of each file; block devices are used completely
        #[arg(long)]
        size: Option<Size>,
        /// Unit in which caches grow and shrink, a power of two [default: a 64th of --size, from 1M to
        /// 16M; 16M without --size]
        #[arg(long, value_name = "SIZE")]
        segment_size: Option<Size>,
        /// Flash write budget: '1 DWPD', '500G/day' or '5 years at 600 TBW' [default: none]
        #[arg(long, value_name = "BUDGET")]
        flash_writes: Option<FlashWrites>,
        /// Use devices that contain other data; that data is lost
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        consent: Confirmation,
    },
    /// Change the settings of a pool
    Set {
        /// The pool
        pool: String,
        /// Flash write budget: '1 DWPD', '500G/day', '5 years at 600 TBW' or 'off'
        #[arg(long, value_name = "BUDGET", required = true)]
        flash_writes: Option<FlashWritesChange>,
    },
    /// Add a device to a pool, or connect a device of the pool that has another path now
    AddDevice {
        /// The pool
        pool: String,
        /// A block device or a file; hob creates a file that does not exist
        #[arg(required_unless_present = "peer")]
        device: Option<String>,
        /// Instead of a device: flash of another host for replicas (`--copies peer`), by the address of its control API
        #[arg(long, value_name = "HOST:PORT", conflicts_with_all = ["device", "force"], requires = "size")]
        peer: Option<String>,
        /// Size of the file, or of the peer's flash; a block device is used completely
        #[arg(long)]
        size: Option<Size>,
        /// Use a device that contains other data; that data is lost
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        consent: Confirmation,
    },
    /// Turn allocation on a device on or off; data on it stays
    SetDevice {
        /// The pool
        pool: String,
        /// The device, as shown by `pool show`
        device: String,
        /// Whether caches may allocate space on the device
        #[arg(long, value_parser = admissions())]
        admission: Admission,
    },
    /// Remove a device from a pool; its caches move to other devices, or shrink
    RemoveDevice {
        /// The pool
        pool: String,
        /// The device, as shown by `pool show`
        device: String,
        #[command(flatten)]
        consent: Confirmation,
    },
    /// Remove a pool without caches and swap areas
    Remove {
        /// The pool
        pool: String,
    },
    /// Free the flash of a persistent cache without a disk; its data is lost
    DiscardOrphan {
        /// The pool
        pool: String,
        /// Owner of the flash, as shown by `pool show`
        owner: String,
        #[command(flatten)]
        consent: Confirmation,
    },
    /// List all pools
    List,
    /// Show one pool and its devices
    Show {
        /// The pool
        pool: String,
    },
}

pub(super) fn run(command: Pool, global: &Global) -> anyhow::Result<()> {
    let changed = match command {
        Pool::List => {
            let pools = ask(global, async |client| client.pools().await)?;
            return print(global.output, &pools, |pools| list(pools));
        }
        Pool::Show { pool } => {
            let pool = ask(global, async |client| client.pool(&pool).await)?;
            return print(global.output, &pool, show);
        }
        Pool::Create { name, devices, size, segment_size, flash_writes, force, consent } => {
            let devices: Vec<String> = devices.into_iter().map(absolute).collect();
            let create = PoolCreate { name, devices, size, segment_size, force, flash_writes };
            converse(global, async |client| {
                let change = PlannedPoolChange::Create { create: Box::new(create.clone()) };
                let dirty = consent.check_overwritten(&client, &create.name, &change, force).await?;
                client.pool_create(&create, dirty).await.map_err(explain)
            })?
        }
        Pool::AddDevice { pool, device, peer, size, force, consent } => {
            let path = device.map(absolute).unwrap_or_default();
            let add = DeviceAdd { path, peer, size, force };
            converse(global, async |client| {
                let change = PlannedPoolChange::AddDevice { add: Box::new(add.clone()) };
                let dirty = consent.check_overwritten(&client, &pool, &change, force).await?;
                client.device_add(&pool, &add, dirty).await.map_err(explain)
            })?
        }
        Pool::Set { pool, flash_writes } => {
            let patch = PoolPatch { flash_writes };
            ask(global, async |client| client.pool_set(&pool, &patch).await)?
        }
        Pool::SetDevice { pool, device, admission } => {
            let path = absolute(device);
            let patch = DevicePatch { admission };
            ask(global, async |client| client.device_set(&pool, &path, &patch).await)?
        }
        Pool::RemoveDevice { pool, device, consent } => converse(global, async |client| {
            let path = absolute(device);
            let change = PlannedPoolChange::RemoveDevice { path: path.clone() };
            let dirty = consent.check_pool(&client, &pool, &change).await?;
            client.device_remove(&pool, &path, dirty).await.map_err(explain)
        })?,
        Pool::DiscardOrphan { pool, owner, consent } => converse(global, async |client| {
            let change = PlannedPoolChange::DiscardOrphan { owner: owner.clone() };
            let dirty = consent.check_pool(&client, &pool, &change).await?;
            client.orphan_discard(&pool, &owner, dirty).await.map_err(explain)
        })?,
        Pool::Remove { pool } => ask(global, async |client| client.pool_remove(&pool).await)?,
    };
    print_change(global.output, &changed)
}

fn admissions() -> impl TypedValueParser<Value = Admission> {
    PossibleValuesParser::new(["in", "out"])
        .map(|word| if word == "in" { Admission::In } else { Admission::Out })
}

/// Returns the absolute path, because the daemon has another working directory.
pub(super) fn absolute(path: String) -> String {
    match std::path::absolute(&path) {
        Ok(absolute) => absolute.to_string_lossy().into_owned(),
        Err(_) => path,
    }
}

fn print_change(format: Format, changed: &PoolChanged) -> anyhow::Result<()> {
    print(format, changed, |changed| {
        let text = changed.pool.as_ref().map_or_else(|| "removed".to_owned(), show);
        with_notes(text, &changed.notes)
    })
}

fn list(pools: &[PoolInfo]) -> String {
    let columns = "POOL|SIZE:|FREE:|DEVICES:|CACHES:";
    let row = |pool: &PoolInfo| {
        vec![
            pool.name.clone(),
            pool.size.human(),
            pool.free.human(),
            pool.devices.len().to_string(),
            pool.caches.len().to_string(),
        ]
    };
    table(columns, pools.iter().map(row))
}

fn show(pool: &PoolInfo) -> String {
    let facts = pairs([
        ("pool", pool.name.clone()),
        ("size", pool.size.human()),
        ("free", pool.free.human()),
        ("segment size", pool.segment_size.to_string()),
        ("caches", if pool.caches.is_empty() { "none".to_owned() } else { pool.caches.join(", ") }),
    ]);
    let columns = "DEVICE|STATE|ADMISSION|SIZE:|FREE:|I/O|REASON";
    let row = |device: &Device| {
        vec![
            device.path.clone(),
            super::output::word(&device.state),
            super::output::word(&device.admission),
            device.size.human(),
            device.free.human(),
            device.io.map_or_else(String::new, |io| super::output::word(&io)),
            device.reason.clone().unwrap_or_default(),
        ]
    };
    let mut text = format!("{facts}\n\n{}", table(columns, pool.devices.iter().map(row)));
    if let Some(writes) = &pool.flash_writes {
        text = format!("{text}\n\n{}", show_writes(writes));
    }
    if let Some(shared) = &pool.shared {
        text = format!("{text}\n\n{}", show_shared(shared));
    }
    if !pool.swap.is_empty() {
        let columns = "SWAP OF THE HOST|SIZE:";
        let row = |swap: &SwapRoom| vec![swap.name.clone(), swap.size.human()];
        text = format!("{text}\n\n{}", table(columns, pool.swap.iter().map(row)));
    }
    if !pool.orphans.is_empty() {
        let columns = "CACHE OF NO DISK|SIZE:|DIRTY:|BACKING OF DISK";
        let row = |orphan: &Orphan| {
            let dirty = orphan.dirty.map_or_else(|| "unknown".to_owned(), Size::human);
            vec![orphan.owner.clone(), orphan.size.human(), dirty, orphan.disk.clone().unwrap_or_default()]
        };
        text = format!("{text}\n\n{}", table(columns, pool.orphans.iter().map(row)));
    }
    text
}

/// Describes the flash writes of a pool, and their budget.
fn show_writes(writes: &FlashWritesUsage) -> String {
    let FlashWritesUsage { budget, bytes_per_day, written_day, covered_seconds, refused, .. } = writes;
    let hours = covered_seconds / 3600;
    let since = match covered_seconds {
        0..3600 => format!("in the last {} min", covered_seconds.div_ceil(60)),
        3600..86_000 => format!("in the last {hours} h"),
        _ => "in the last 24 h".to_owned(),
    };
    let Some(budget) = budget else {
        return pairs([
            ("flash writes", format!("{} {since}", written_day.human())),
            ("flash write budget", "none".to_owned()),
        ]);
    };
    let share = u128::from(written_day.bytes()) * 100 / u128::from(bytes_per_day.bytes().max(1));
    let left = match writes.debt.bytes() {
        0 => format!("{} can be written", writes.saved.human()),
        _ => format!("exceeded by {}", writes.debt.human()),
    };
    pairs([
        ("flash writes", format!("{} {since}, {share} % of a day's budget", written_day.human())),
        ("flash write budget", format!("{} a day ({budget})", bytes_per_day.human())),
        ("left of the budget", left),
        ("filled on loan", writes.loan.human()),
        ("kept from flash", format!("{} since the daemon started", refused.human())),
    ])
}

/// Describes the division of a pool among its shared caches.
fn show_shared(shared: &SharedCapacity) -> String {
    let facts = pairs([
        ("shared", format!("{}, divided by hob among {} caches", shared.size.human(), shared.caches.len())),
        ("moved", format!("{} since the daemon started", shared.moved.human())),
        ("destaged for moves", shared.destaged.human()),
    ]);
    let columns = "SHARED CACHE|SIZE:|TARGET:|READS/S:|HITS:|HITS/S WITH 1/16 MORE:|\
        HITS/S MORE THAN EQUAL PARTS:";
    let row = |cache: &SharedCache| {
        vec![
            cache.disk.clone(),
            cache.size.human(),
            cache.target.human(),
            cache.reads_per_second.to_string(),
            format!("{} %", (cache.hit_permille + 5) / 10),
            format!("+{}", cache.more_hits_per_second),
            format!("{:+}", cache.gained_hits_per_second),
        ]
    };
    format!("{facts}\n\n{}", table(columns, shared.caches.iter().map(row)))
}
