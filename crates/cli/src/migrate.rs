//! `hob migrate DISK`: migrates a disk to another host with its cache; shows, changes and cancels
//! migrations.
//!
//! The daemons migrate the disk, and this command shows the progress. If interrupted, the command
//! prints that the migration continues, and exits.

use anyhow::bail;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Args, ValueEnum};
use hob_control::client::Client;
use hob_control::{CarryMode, Migration, MigrationStart, MigrationState, Side, Size, Switch, TakeBack};

use super::Global;
use super::confirmation::Confirmation;
use super::disk::print_change;
use super::output::print;
use super::remote::{converse, explain};
use super::watch::Watch;

/// Migrate a disk with its cache to another host, or show the progress of a migration
#[derive(Debug, Args)]
pub(crate) struct Migrate {
    /// The disk
    disk: String,
    /// Start a migration to this host: HOST:PORT of its control API, over TLS
    #[arg(long, value_name = "HOST:PORT")]
    to: Option<String>,
    /// What happens to the cache
    #[arg(long, value_parser = carry(COPIED), default_value = "copy", requires = "to")]
    cache: CarryMode,
    /// Maximum rate at which the cache is copied, bytes a second
    #[arg(long, value_name = "BYTES", requires = "to")]
    bandwidth: Option<Size>,
    /// What triggers the hand-over: the first write at the other host, or `--finish` alone
    #[arg(long, value_enum, default_value_t = When::OnWrite, requires = "to")]
    switch: When,
    /// Name of the backing on the other host [default: the same]
    #[arg(long, requires = "to")]
    backing: Option<String>,
    /// Pool on the other host [default: the pool of the same name, or the only pool]
    #[arg(long, requires = "to")]
    pool: Option<String>,
    /// Path of a vhost-user socket for the disk on the other host
    #[arg(long, value_name = "PATH", requires = "to")]
    vhost_user: Option<String>,
    /// Path on the other host at which the disk becomes a file
    #[arg(long, value_name = "PATH", requires = "to")]
    fuse: Option<String>,
    /// Hand the disk over now
    #[arg(long, conflicts_with_all = ["to", "cancel", "take_back"])]
    finish: bool,
    /// Cancel the migration, and keep the disk on this host
    #[arg(long, conflicts_with_all = ["to", "take_back"])]
    cancel: bool,
    /// Take back a disk that moved away, if its new host will never serve it again
    #[arg(long, conflicts_with = "to", requires = "force")]
    take_back: bool,
    /// Confirm that the new host will never serve the disk again. If that host still serves the
    /// disk, two hosts write to the disk and corrupt it
    #[arg(long, requires = "take_back")]
    force: bool,
    #[command(flatten)]
    consent: Confirmation,
    /// State of the migration at which the command returns [default: over, or arrived with --finish;
    /// at once if the command starts nothing]
    #[arg(long, value_enum, value_name = "STATE", conflicts_with = "take_back")]
    wait: Option<Until>,
}

/// Meaning of `--cache copy`.
const COPIED: &str = "Copy the cache while the VM runs, hottest data first, and the rest after the hand-over";

/// Returns the parser of `--cache`. `copied` is the meaning of its value `copy`.
pub(super) fn carry(copied: &'static str) -> impl TypedValueParser<Value = CarryMode> {
    let meaning = |mode| match mode {
        CarryMode::Copy => copied,
        CarryMode::HeatMap => "Send a list of the cached blocks; the other host reads them from the backing",
        CarryMode::Remote => {
            "Let the other host read misses from this host's flash until all cached data is copied"
        }
        CarryMode::Drop => "Do not move the cache; the other host starts with an empty cache",
    };
    let names = CarryMode::ALL.map(|mode| PossibleValue::new(mode.name()).help(meaning(mode)));
    PossibleValuesParser::new(names).map(|name| {
        let found = CarryMode::ALL.into_iter().find(|mode| mode.name() == name);
        found.expect("one of the possible names")
    })
}

/// The event that triggers the hand-over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum When {
    /// The first write on the other host: the VM runs there
    OnWrite,
    /// Only `hob migrate DISK --finish`
    Ask,
}

/// Step of the migration at which the command returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
enum Until {
    /// The migration is recorded, and dirty data is being written to the backing
    Begun,
    /// The other host has the disk in standby: a VM can be started there
    Awaited,
    /// The other host has all data that is copied before the hand-over
    Warm,
    /// The other host serves the disk
    Arrived,
    /// The other host needs no more data from this host
    Over,
}

pub(super) fn run(args: &Migrate, global: &Global) -> anyhow::Result<()> {
    let disk = &args.disk;
    if args.take_back {
        let back = TakeBack { force: args.force };
        let changed = converse(global, async |client| {
            let peer = client.migration(disk).await.map_err(explain)?.peer;
            args.consent.check_elsewhere(disk, &peer)?;
            client.migration_take_back(disk, back).await.map_err(explain)
        })?;
        return print_change(global.output, &changed);
    }
    let shown = converse(global, async |client| {
        let (begun, until) = begin(args, &client).await?;
        match until {
            Some(until) => watch(args, &client, begun, until).await,
            None => Ok(begun),
        }
    })?;
    print(global.output, &shown, describe)
}

/// Sends the change that the options ask for, if any. Returns the migration, and the state until
/// which the command watches it.
async fn begin(args: &Migrate, client: &Client) -> anyhow::Result<(Migration, Option<Until>)> {
    let disk = &args.disk;
    let is_kept = match (args.to.is_some(), args.finish) {
        (true, _) => matches!(args.cache, CarryMode::Copy | CarryMode::Remote),
        (_, true) => {
            let cache = client.migration(disk).await.map_err(explain)?.cache;
            matches!(cache, CarryMode::Copy | CarryMode::Remote)
        }
        _ => true,
    };
    args.consent.rehearsal().announce_move(client, disk, is_kept).await?;
    let (shown, until) = match (&args.to, args.finish, args.cancel) {
        (Some(to), ..) => (client.migrate(disk, &args.start(to)).await, Some(Until::Over)),
        (None, true, _) => (client.migration_finish(disk).await, Some(Until::Arrived)),
        (None, _, true) => (client.migration_cancel(disk).await, Some(Until::Over)),
        _ => (client.clone().with_liveness_check().migration(disk).await, None),
    };
    Ok((shown.map_err(explain)?, args.wait.or(until)))
}

impl Migrate {
    fn start(&self, to: &str) -> MigrationStart {
        MigrationStart {
            to: to.to_owned(),
            cache: self.cache,
            bandwidth: self.bandwidth,
            switch: match self.switch {
                When::OnWrite => Switch::OnWrite,
                When::Ask => Switch::Ask,
            },
            backing: self.backing.clone(),
            pool: self.pool.clone(),
            vhost_user: self.vhost_user.clone(),
            fuse: self.fuse.clone(),
        }
    }
}

/// Returns true if the migration has reached or passed this state.
fn is_reached(shown: &Migration, until: Until) -> bool {
    use MigrationState::*;
    let reached = match shown.state {
        Preparing | Announcing | Cancelling => Until::Begun,
        Copying | Awaiting if shown.warm => Until::Warm,
        Copying | Awaiting => Until::Awaited,
        // The guest is paused, so the next state follows soon.
        Frozen | HandingOver => Until::Warm,
        Serving | Arrived | Filling => Until::Arrived,
        Over | Kept | Away => Until::Over,
    };
    reached >= until
}

async fn watch(
    args: &Migrate,
    client: &Client,
    mut shown: Migration,
    until: Until,
) -> anyhow::Result<Migration> {
    let disk = &args.disk;
    let mut watch = Watch::new()?;
    while !is_reached(&shown, until) {
        watch.show("", &sentence(&shown));
        let goes_on = || {
            format!(
                "the migration of {disk} continues; 'hob migrate {disk}' shows the progress, 'hob \
                migrate {disk} --cancel' keeps the disk on this host"
            )
        };
        shown = watch.wait(client.migration(disk), goes_on).await.map_err(explain)?;
    }
    watch.end();
    if shown.state == MigrationState::Kept && !args.cancel {
        let why = shown.why.as_deref().unwrap_or("for an unknown reason");
        bail!("{disk} stays here: {why}");
    }
    Ok(shown)
}

/// Describes the progress in a sentence.
pub(super) fn sentence(migration: &Migration) -> String {
    use MigrationState::*;
    let Migration { peer, side, percent, .. } = migration;
    let mut text = match (migration.state, side) {
        (Preparing, Side::Source) => format!("leaving to {peer}: dirty data is written to the backing"),
        (Preparing, Side::Destination) => format!("awaited from {peer}: being opened"),
        (Announcing, _) => format!("leaving to {peer}: the other host prepares"),
        (Copying, _) if migration.cache == CarryMode::Copy => {
            format!("leaving to {peer}: {percent} % of the cache copied")
        }
        (Copying, _) => format!("leaving to {peer}: it can be handed over"),
        (Frozen, _) => format!("leaving to {peer}: the guest waits for the hand-over"),
        (HandingOver, _) => format!("handed to {peer}, which has not confirmed it yet"),
        (Serving, _) => format!("at {peer}, which still reads its cache here, {percent} %"),
        (Over, Side::Source) => format!("at {peer}"),
        (Over, Side::Destination) => format!("arrived from {peer}"),
        (Cancelling, _) => format!("stays here; telling {peer}"),
        (Kept, Side::Source) => "stayed here".to_owned(),
        (Kept, Side::Destination) => "did not arrive".to_owned(),
        (Awaiting, _) => format!("awaited from {peer}, {percent} % of the cache is here"),
        (Arrived, _) => format!("arrived from {peer}; that is being recorded"),
        (Filling, _) => format!("arrived from {peer}; {percent} % of the cache is here"),
        (Away, _) => format!("at {peer}"),
    };
    if let Some(seconds) = migration.eta_seconds {
        text.push_str(&format!(", {}/s, {} to go", migration.rate.human(), super::drain::time(seconds)));
    }
    if migration.wanted && matches!(migration.state, Copying | Awaiting) {
        let (at, on) = match side {
            Side::Source => ("on the other host", "here"),
            Side::Destination => ("here", "on the other host"),
        };
        text.push_str(&format!(
            "; a write waits {at} for the hand-over; if it does not begin, run 'hob migrate {} \
             --finish' {on}",
            migration.disk
        ));
    }
    if let Some(why) = &migration.why {
        text.push_str(&format!("; {why}"));
    }
    text
}

fn describe(migration: &Migration) -> String {
    let mut lines = vec![format!("{} {}", migration.disk, sentence(migration))];
    let mut line = |name: &str, value: String| lines.push(format!("  {:<12} {value}", format!("{name}:")));
    line("cache", migration.cache.name().to_owned());
    if migration.valid.bytes() > 0 || migration.sent.bytes() > 0 {
        let Migration { valid, sent, resent, .. } = migration;
        let sent = match migration.side {
            Side::Source => format!("{} of {}", sent.human(), valid.human()),
            Side::Destination => format!("{} of {} pulled", migration.pulled.human(), valid.human()),
        };
        let again = if resent.bytes() > 0 { format!(", {} again", resent.human()) } else { String::new() };
        line("sent", format!("{sent}{again}"));
    }
    if let Some(drain) = migration.drain_ms {
        line("drained in", format!("{drain} ms"));
    }
    if let Some(pause) = migration.pause_ms {
        line("pause", format!("{pause:.1} ms"));
    }
    if let Some(waited) = migration.waited_ms {
        line("write waited", format!("{waited:.1} ms"));
    }
    line("lasted", format!("{:.1} s", migration.total_ms as f64 / 1e3));
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_that_waits_for_the_hand_over_is_shown_on_both_hosts() {
        let size = Size(0);
        let waiting = |side, state, wanted| Migration {
            disk: "vm".to_owned(),
            side,
            peer: "b".to_owned(),
            cache: CarryMode::Drop,
            state,
            warm: true,
            wanted,
            generation: 0,
            attempt: 1,
            why: None,
            valid: size,
            sent: size,
            resent: size,
            pulled: size,
            left: size,
            rate: size,
            percent: 100,
            eta_seconds: None,
            drain_ms: None,
            pause_ms: None,
            waited_ms: None,
            total_ms: 0,
        };
        let source = sentence(&waiting(Side::Source, MigrationState::Copying, true));
        assert!(source.contains("a write waits on the other host") && source.ends_with("--finish' here"));
        let destination = sentence(&waiting(Side::Destination, MigrationState::Awaiting, true));
        assert!(destination.contains("a write waits here") && destination.ends_with("on the other host"));
        for (side, state, wanted) in [
            (Side::Destination, MigrationState::Awaiting, false),
            (Side::Source, MigrationState::Serving, true),
        ] {
            assert!(!sentence(&waiting(side, state, wanted)).contains("a write waits"));
        }
    }
}
