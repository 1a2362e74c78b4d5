//! `hob drain DISK`: writes dirty data to the backing, with progress. Commands that remove a cache
//! or a disk use this module too.
//!
//! The daemon drains the disk, and this command shows the progress. If interrupted, the command
//! prints that the drain continues, and exits.

use clap::Args;
use hob_control::client::Client;
use hob_control::{Dirty, DiskChanged, DiskState, DrainFor};

use super::Global;
use super::disk::print_change;
use super::remote::{converse, explain};
use super::watch::Watch;

/// Width of the progress bar in characters.
const BAR_CELLS: usize = 24;

/// Write a disk's dirty data to the backing; the data stays in the cache
#[derive(Debug, Args)]
pub(crate) struct Drain {
    /// The disk
    disk: String,
    /// Stop a drain, or the shrinking of a cache
    #[arg(long)]
    stop: bool,
    /// Start the drain, and do not wait for its end
    #[arg(long, conflicts_with = "stop")]
    no_wait: bool,
}

pub(super) fn run(args: &Drain, global: &Global) -> anyhow::Result<()> {
    let changed = converse(global, async |client| {
        if args.stop {
            return client.drain_stop(&args.disk).await.map_err(explain);
        }
        if args.no_wait {
            return client.drain(&args.disk, DrainFor::Drain).await.map_err(explain);
        }
        drain(&client, &args.disk, DrainFor::Drain).await
    })?;
    print_change(global.output, &changed)
}

/// Drains an online disk with dirty data before an operation, such as the removal of its cache. The
/// daemon itself drains the data of writes that arrive later.
pub(super) async fn drain_first(client: &Client, disk: &str, operation: DrainFor) -> anyhow::Result<()> {
    let shown = client.disk(disk).await.map_err(explain)?;
    let has_dirty = shown.cache.and_then(|cache| cache.dirty).is_some_and(|dirty| dirty.size.bytes() > 0);
    if shown.state != DiskState::Online || !has_dirty {
        return Ok(());
    }
    drain(client, disk, operation).await.map(drop)
}

/// Starts a drain and watches it to its end.
async fn drain(client: &Client, disk: &str, operation: DrainFor) -> anyhow::Result<DiskChanged> {
    let mut changed = client.drain(disk, operation).await.map_err(explain)?;
    let mut watch = Watch::new()?;
    // Highest amount of dirty data so far.
    let mut whole = 0;
    loop {
        let Some(dirty) = changed.disk.as_ref().and_then(|disk| disk.cache.as_ref()?.dirty.clone()) else {
            return Ok(changed);
        };
        if !dirty.draining {
            watch.end();
            let is_left = dirty.size.bytes() > 0;
            return match dirty.why.filter(|_| is_left) {
                Some(why) => Err(anyhow::anyhow!(
                    "{disk} is not drained, {} are dirty: {why}; 'hob drain {disk}' continues",
                    dirty.size.human()
                )),
                None => Ok(changed),
            };
        }
        whole = whole.max(dirty.size.bytes());
        watch.show(&bar(whole, &dirty), &sentence(&dirty));
        let goes_on = || {
            format!(
                "the drain of {disk} continues; 'hob drain {disk}' shows the progress, 'hob drain \
                {disk} --stop' stops it"
            )
        };
        changed.disk = Some(watch.wait(client.disk(disk), goes_on).await.map_err(explain)?);
    }
}

fn bar(whole: u64, dirty: &Dirty) -> String {
    let done = whole - dirty.size.bytes().min(whole);
    let filled =
        if whole == 0 { 0 } else { (u128::from(done) * BAR_CELLS as u128 / u128::from(whole)) as usize };
    format!("[{}{}]", "#".repeat(filled), ".".repeat(BAR_CELLS - filled))
}

/// Describes the progress of a drain.
pub(super) fn sentence(dirty: &Dirty) -> String {
    let mut text = format!("{} left", dirty.size.human());
    if dirty.rate.bytes() > 0 {
        text.push_str(&format!(", {}/s", dirty.rate.human()));
    }
    if let Some(seconds) = dirty.eta_seconds.filter(|_| dirty.size.bytes() > 0) {
        text.push_str(&format!(", {} to go", time(seconds)));
    }
    if let Some(why) = &dirty.why {
        text.push_str(&format!("; {why}"));
    }
    text
}

pub(super) fn time(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min {} s", seconds / 60, seconds % 60),
        _ => format!("{} h {} min", seconds / 3600, seconds / 60 % 60),
    }
}

/// Returns the dirty data as a line of `hob disk show`.
pub(super) fn state(dirty: &Dirty) -> String {
    match (dirty.size.bytes(), dirty.draining) {
        (0, false) => "nothing".to_owned(),
        (_, true) => format!("{} (draining)", sentence(dirty)),
        _ => sentence(dirty).replace(" left", ""),
    }
}

#[cfg(test)]
mod tests {
    use hob_control::Size;

    use super::*;

    fn dirty(mib: u64, rate_mib: u64, eta_seconds: Option<u64>, why: Option<&str>) -> Dirty {
        Dirty {
            size: Size(mib << 20),
            lost: Size(0),
            draining: true,
            rate: Size(rate_mib << 20),
            eta_seconds,
            why: why.map(str::to_owned),
        }
    }

    #[test]
    fn progress_is_said_with_rate_and_time_or_with_the_reason() {
        assert_eq!(sentence(&dirty(512, 8, Some(64), None)), "512 MiB left, 8 MiB/s, 1 min 4 s to go");
        assert_eq!(sentence(&dirty(512, 0, None, Some("it fails"))), "512 MiB left; it fails");
        assert_eq!(
            sentence(&dirty(1 << 20, 50, Some(20_972), None)),
            "1 TiB left, 50 MiB/s, 5 h 49 min to go"
        );
    }

    #[test]
    fn the_bar_shows_the_progress() {
        assert_eq!(bar(100 << 20, &dirty(100, 0, None, None)), format!("[{}]", ".".repeat(24)));
        assert_eq!(
            bar(100 << 20, &dirty(50, 0, None, None)),
            format!("[{}{}]", "#".repeat(12), ".".repeat(12))
        );
        assert_eq!(bar(100 << 20, &dirty(0, 0, None, None)), format!("[{}]", "#".repeat(24)));
        assert_eq!(bar(0, &dirty(0, 0, None, None)).len(), 26);
    }
}
