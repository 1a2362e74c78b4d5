//! `hob swap …`: swap areas of this host on the flash of a pool.
//!
//! The daemon carries out a change. `create`, `on` and `off` start the change and show its progress
//! until it ends. If interrupted, they print that the change continues, and exit.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use hob_control::client::Client;
use hob_control::{Size, Swap as Area, SwapChanged, SwapCreate, SwapPatch, SwapState};
use hob_daemon::turn_off_as_child;

use super::Global;
use super::output::{Format, print, table, with_notes, word};
use super::pool::absolute;
use super::remote::{ask, converse, explain};
use super::watch::Watch;

/// Manage swap areas of this host on flash
#[derive(Debug, Subcommand)]
pub(crate) enum Swap {
    /// Create a swap area in a pool, and turn it on
    Create {
        /// Name of the swap area [default: swap0, swap1, …]
        name: Option<String>,
        /// Size of the swap area, rounded up to whole segments of the pool
        #[arg(long)]
        size: Size,
        /// The pool of the swap area; needed only if there are several pools
        #[arg(long)]
        pool: Option<String>,
        /// The device of the pool [default: the one with the most free space]
        #[arg(long)]
        device: Option<String>,
        /// Swap priority, 0 to 32767: swap of higher priority is filled first [default: after all
        /// swap with a priority]
        #[arg(long, value_name = "N")]
        priority: Option<u16>,
        /// Create the swap area, but do not turn it on
        #[arg(long)]
        off: bool,
        /// Do not wait until the swap area is on
        #[arg(long)]
        no_wait: bool,
    },
    /// Turn a swap area on, now and at each start of the daemon; also cancels turning it off
    On {
        /// Name of the swap area
        name: String,
        /// Do not wait until the swap area is on
        #[arg(long)]
        no_wait: bool,
    },
    /// Turn a swap area off, after swapping its pages in; also cancels turning it on
    Off {
        /// Name of the swap area
        name: String,
        /// Turn the area off even if memory may be too small for its pages; the kernel may then
        /// kill programs
        #[arg(long)]
        force: bool,
        /// Do not wait until the swap area is off
        #[arg(long)]
        no_wait: bool,
    },
    /// Return the space of a swap area that is off to its pool
    Remove {
        /// Name of the swap area
        name: String,
    },
    /// List all swap areas
    List,
}

/// Ends swapping to a device; the daemon runs this command as a child process
#[derive(Debug, Args)]
pub(crate) struct SwapOff {
    /// The device
    device: PathBuf,
}

pub(super) fn run(command: Swap, global: &Global) -> anyhow::Result<()> {
    match command {
        Swap::List => {
            let areas = ask(global, async |client| client.swaps().await)?;
            print(global.output, &areas, |areas| list(areas))
        }
        Swap::Remove { name } => {
            let changed = ask(global, async |client| client.swap_remove(&name).await)?;
            print_change(global.output, &changed)
        }
        Swap::Create { name, size, pool, device, priority, off, no_wait } => {
            let create = SwapCreate { name, size, pool, device: device.map(absolute), priority, off };
            follow(global, no_wait, async |client| client.swap_create(&create).await.map_err(explain))
        }
        Swap::On { name, no_wait } => {
            let patch = SwapPatch { on: true, force: false };
            follow(global, no_wait, async |client| client.swap_set(&name, &patch).await.map_err(explain))
        }
        Swap::Off { name, force, no_wait } => {
            let patch = SwapPatch { on: false, force };
            follow(global, no_wait, async |client| client.swap_set(&name, &patch).await.map_err(explain))
        }
    }
}

/// Turns off swap on a device, in a separate process.
pub(super) fn run_off(args: &SwapOff) -> ! {
    std::process::exit(turn_off_as_child(&args.device))
}

/// Starts a change and watches it to its end.
fn follow(
    global: &Global,
    no_wait: bool,
    begin: impl AsyncFnOnce(&Client) -> anyhow::Result<SwapChanged>,
) -> anyhow::Result<()> {
    let changed = converse(global, async |client| {
        let mut changed = begin(&client).await?;
        if !no_wait {
            watch(&client, &mut changed).await?;
        }
        Ok(changed)
    })?;
    print_change(global.output, &changed)
}

/// Waits until an area is in its final state.
async fn watch(client: &Client, changed: &mut SwapChanged) -> anyhow::Result<()> {
    let mut watch = Watch::new()?;
    // The final state, if there is one to wait for.
    let mut wanted = None;
    loop {
        let Some(area) = &mut changed.swap else { return Ok(()) };
        if !area.state.is_passing() {
            watch.end();
            return match (wanted, &area.reason) {
                (Some(wanted), why) if area.state != wanted => {
                    let why = why.as_deref().unwrap_or("that was cancelled");
                    Err(anyhow::anyhow!("{} is {}: {why}", area.name, word(&area.state)))
                }
                _ => Ok(()),
            };
        }
        let is_coming = area.state == SwapState::Preparing;
        wanted.get_or_insert(if is_coming { SwapState::On } else { SwapState::Off });
        let (name, left) = (&area.name, area.left.unwrap_or_default().human());
        let sentence = match is_coming {
            true => format!("{name}: {left} of {} must still be written", area.size.human()),
            false => format!("{name}: {left} must still be read back"),
        };
        watch.show("", &sentence);
        let (now, other) = if is_coming { ("on", "off") } else { ("off", "on") };
        let goes_on = || {
            format!(
                "{name} is still being turned {now}; 'hob swap list' shows it, 'hob swap {other} {name}' stops it"
            )
        };
        *area = watch.wait(client.swap(&area.name), goes_on).await.map_err(explain)?;
    }
}

fn print_change(format: Format, changed: &SwapChanged) -> anyhow::Result<()> {
    print(format, changed, |changed| {
        let text = changed
            .swap
            .as_ref()
            .map_or_else(|| "removed".to_owned(), |area| list(std::slice::from_ref(area)));
        with_notes(text, &changed.notes)
    })
}

fn list(areas: &[Area]) -> String {
    let columns = "SWAP|STATE|SIZE:|USED:|LEFT:|PRIORITY:|AT START|POOL|DEVICE|LOOP DEVICE|REASON";
    let row = |area: &Area| {
        let dash = || "-".to_owned();
        vec![
            area.name.clone(),
            word(&area.state),
            area.size.human(),
            area.used.human(),
            area.left.map_or_else(dash, Size::human),
            area.priority.map_or_else(dash, |priority| priority.to_string()),
            if area.at_start { "on" } else { "off" }.to_owned(),
            area.pool.clone(),
            area.device.clone(),
            area.loop_device.clone().unwrap_or_else(dash),
            area.reason.clone().unwrap_or_default(),
        ]
    };
    table(columns, areas.iter().map(row))
}
