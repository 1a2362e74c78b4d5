//! The new host of an ordered move: reports whether it can serve the disk, and acquires the disk
//! when the former owner has released it.

use std::sync::Arc;
use std::time::Duration;

use hob_control::{Arrival, ClusterMoveState};
use hob_engine::command::Access;
use hob_engine::migration::Record;
use hob_storage::backing::Format;
use tokio::time::Instant;

use super::super::flash::blocking;
use super::super::migration::kept_dirty;
use super::super::registry::{ClusterWait, DiskPhase};
use super::Moves;
use crate::api_error::{ApiError, Result, conflict, open_error};
use crate::cluster::{Cluster, OrderFound};
use crate::hardware::{Backing, BackingOptions};
use crate::state::JournalSpec;

/// Maximum time to acquire a released disk. After this time, the former owner may acquire the disk
/// again.
const TAKE_MAX: Duration = Duration::from_secs(30);

/// Maximum time to wait for the end of an attempt to open a waiting disk.
const IDLE_MAX: Duration = Duration::from_secs(5);

/// Interval between two checks whether an attempt to open a waiting disk has ended.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Pause between two attempts to acquire a disk.
const RETRY_EVERY: Duration = Duration::from_millis(500);

impl Moves {
    /// Executes the new host's part of an order: reports whether this host can serve the disk, or
    /// acquires the released disk.
    pub(super) async fn meet_order(self: Arc<Self>, cluster: Arc<Cluster>, found: OrderFound) {
        use ClusterMoveState::{Done, Failed, Given, Welcome};
        let disk = found.disk.clone();
        let (good, result) = match found.order.state {
            Given => (Done, self.take_given(&found).await),
            _ => (Welcome, self.could_take(&found).await),
        };
        let (state, note) = match &result {
            Ok(()) => (good, String::new()),
            Err(error) => (Failed, format!("{}: {error}", found.order.to)),
        };
        match &result {
            Ok(()) if state == Done => tracing::info!("disk {disk}: moved here from {}", found.order.from),
            Ok(()) => tracing::debug!("disk {disk}: accepted its move from {}", found.order.from),
            Err(error) => tracing::warn!("disk {disk}: its move from {} failed: {error}", found.order.from),
        }
        super::end(&cluster, found, state, &note).await;
        self.end(&disk);
    }

    /// Checks that this host keeps no dirty data of the disk, has space for the disk's cache, and can
    /// open its backing.
    async fn could_take(self: &Arc<Self>, found: &OrderFound) -> Result<()> {
        let arrival = definition(found)?;
        self.let_rest_to_take(&found.disk).await;
        // Only an operator may discard this data, and the other host's data is newer.
        if self.migrations.keeps_dirty(&found.disk) {
            return Err(conflict!("this host {}", kept_dirty(&found.disk)));
        }
        let (wanted, size_bytes) = match self.is_waiting(&found.disk)? {
            // The local configuration takes precedence over the offer.
            true => (self.registry.inner().disk(&found.disk)?.wanted.clone(), arrival.size_bytes),
            false => (self.migrations.awaited_state(&found.disk, arrival)?, arrival.size_bytes),
        };
        let (options, ..) = self.disks.options_of(&wanted).await?;
        let options = BackingOptions { locked: false, ..options };
        let backing = wanted.backing;
        let of = backing.clone();
        let here = blocking(move || match Backing::kind(&of, Format::Raw).name {
            "file" | "nbd" | "rbd" | "qemu-nbd" => {
                Backing::open(&of, Access::ReadOnly, &options).map(|open| Some(open.info().size_bytes))
            }
            // A backing of another kind cannot be examined while another host writes to it.
            _ => Ok(None),
        })
        .await?
        .map_err(|error| open_error(&error))?;
        match here {
            Some(here) if here != size_bytes => Err(conflict!(
                "{backing} has {here} bytes on this host, and the disk has {size_bytes}: it is \
                another backing"
            )),
            _ => Ok(()),
        }
    }

    /// Waits until no attempt to open the disk is in progress.
    async fn let_rest_to_take(&self, name: &str) {
        let until = Instant::now() + IDLE_MAX;
        while self.registry.inner().disk(name).is_ok_and(|disk| disk.busy.is_some()) && Instant::now() < until
        {
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    fn is_online(&self, name: &str) -> bool {
        self.registry.inner().disk(name).is_ok_and(|disk| matches!(disk.phase, DiskPhase::Online(_)))
    }

    /// Returns true if the disk has an entry that waits for the cluster, and false if the disk has
    /// no entry. Any other entry of the disk is an error.
    fn is_waiting(&self, name: &str) -> Result<bool> {
        let record = self.registry.record_of(name);
        let inner = self.registry.inner();
        let Ok(disk) = inner.disk(name) else { return Ok(false) };
        let conflict = |why: &str| Err(conflict!("this host has a disk {name} that {why}"));
        match (&disk.phase, disk.busy, record) {
            (_, Some(busy), _) => conflict(&format!("is being {busy}")),
            _ if disk.wanted.read_only => conflict("is read-only"),
            (DiskPhase::Offline(_), None, _) => Ok(true),
            (DiskPhase::Away(_), None, Some(Record::Away { taken: true, .. })) => Ok(true),
            _ => conflict("does not wait for the cluster"),
        }
    }

    async fn take_given(self: &Arc<Self>, found: &OrderFound) -> Result<()> {
        let name = &found.disk;
        let arrival = definition(found)?;
        self.let_rest_to_take(name).await;
        // This host may have acquired the disk already while it waited for the cluster.
        if self.is_online(name) {
            return Ok(());
        }
        match self.is_waiting(name)? {
            true => self.revive(name)?,
            false => {
                let wanted = self.migrations.awaited_state(name, arrival)?;
                self.registry.inner().gone.retain(|gone| gone.name != *name);
                self.disks.add_state(wanted).await?;
            }
        }
        let until = Instant::now() + TAKE_MAX;
        loop {
            self.disks.bring_online(name).await;
            let why = match &self.registry.inner().disk(name)?.phase {
                DiskPhase::Online(_) => break,
                DiskPhase::Offline(why) | DiskPhase::Away(why) => why.clone(),
                DiskPhase::Removing => "the disk is being removed".to_owned(),
            };
            if Instant::now() > until {
                return Err(ApiError::failed(why));
            }
            tokio::time::sleep(RETRY_EVERY).await;
        }
        self.registry.save().await
    }

    /// Converts a tombstone into a disk that waits for the cluster.
    fn revive(&self, name: &str) -> Result<()> {
        self.migrations.forget(name);
        let mut inner = self.registry.inner();
        let disk = inner.disk_mut(name)?;
        if matches!(disk.phase, DiskPhase::Away(_)) {
            disk.wanted.migration = None;
            disk.wanted.generation = None;
            if let Some(cache) = disk.wanted.cache.as_mut().filter(|cache| cache.journal.is_some()) {
                cache.journal = Some(JournalSpec::new());
            }
            disk.phase = DiskPhase::Offline("the disk is already moving to this host".to_owned());
        }
        disk.cluster_wait = ClusterWait::Yes;
        disk.retry_after = None;
        Ok(())
    }
}

fn definition(found: &OrderFound) -> Result<&Arrival> {
    found
        .order
        .arrival
        .as_deref()
        .ok_or_else(|| ApiError::invalid("the order has no description of the disk"))
}
