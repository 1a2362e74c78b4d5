//! The event service: handles events of shards, and retries offline objects periodically.

mod retry;

use std::sync::Arc;
use std::time::Duration;

use hob_control::{DeviceState, Size};
use hob_engine::units::{DiskId, SECTOR_BYTES};
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::time::Instant;

use super::disks::Disks;
use super::exports::ExportService;
use super::migration::Migrations;
use super::observe::{COUNT_EVERY, FILES_EVERY, JUDGE_EVERY, Observe, SPACE_EVERY};
use super::peer_access::PeerAccess;
use super::pools::{LOOK_EVERY, Pools, REPARTITION_EVERY, RETURN_EVERY};
use super::qos::{AGREE_EVERY, QosService};
use super::registry::{JOURNAL_LOST, Registry};
use super::remote_flash::RemoteFlash;
use crate::background::spawn;
use crate::shard_api::ShardEvent;

/// Interval between two attempts to open offline objects.
const RETRY_EVERY: Duration = Duration::from_secs(5);

service! {
    /// The event service; see the module.
    #[derive(Clone, Debug)]
    pub(crate) struct Events {
        registry: Arc<Registry>,
        peers: Arc<PeerAccess>,
        qos: QosService,
        exports: ExportService,
        observe: Observe,
        remote_flash: RemoteFlash,
        pools: Pools,
        disks: Disks,
        migrations: Arc<Migrations>,
    } with {}
}

impl Events {
    /// Handles shard events and retries offline objects, until dropped.
    pub(crate) async fn tend(self, mut events: UnboundedReceiver<ShardEvent>) {
        let mut retry = tokio::time::interval(RETRY_EVERY);
        retry.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut look = tokio::time::interval(LOOK_EVERY);
        look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut agree = tokio::time::interval(AGREE_EVERY);
        agree.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut judge = tokio::time::interval(JUDGE_EVERY);
        judge.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut repartition = tokio::time::interval(REPARTITION_EVERY);
        repartition.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut count = tokio::time::interval(COUNT_EVERY);
        count.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut space = tokio::time::interval(SPACE_EVERY);
        space.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut fenced = tokio::time::interval(RETURN_EVERY);
        fenced.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut files = tokio::time::interval(FILES_EVERY);
        files.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let evidence = self.disks.clone().record_evidence();
        let parents = self.disks.clone().watch_parents();
        let counting = self.pools.clone().count_flash_writes_forever();
        let served = self.disks.clone().record_served_disks();
        tokio::pin!(evidence, parents, counting, served);
        loop {
            tokio::select! {
                never = &mut evidence => match never {},
                never = &mut parents => match never {},
                never = &mut counting => match never {},
                never = &mut served => match never {},
                event = events.recv() => match event {
                    Some(event) => self.handle(event),
                    None => return,
                },
                _ = retry.tick() => self.retry(),
                _ = look.tick() => self.pools.look_at_dirty(),
                _ = fenced.tick() => self.pools.look_at_fenced(),
                _ = repartition.tick() => self.pools.repartition(),
                _ = judge.tick() => self.observe.judge(),
                _ = count.tick() => {
                    self.observe.count_mismatches();
                    self.observe.log_failing_backings();
                }
                _ = files.tick() => self.observe.look_at_open_files(),
                _ = space.tick() => self.observe.look_at_state_space(),
                _ = agree.tick() => self.qos.agree_on_datastores(self.peers.cluster()),
            }
        }
    }

    pub(super) fn handle(&self, event: ShardEvent) {
        match event {
            ShardEvent::Fenced { device, errors } => self.pools.fence(device, errors),
            ShardEvent::Lost { disk, segments } => {
                let mut inner = self.registry.inner();
                let Some(entry) = inner.disks.values_mut().find(|entry| entry.id == disk) else { return };
                let count = entry.held.len();
                entry.held.retain(|segment| !segments.contains(segment));
                entry.ring.retain(|segment| !segments.contains(segment));
                let lost = count - entry.held.len();
                let name = entry.wanted.name.clone();
                entry.cache_reason = Some(match entry.held.len() {
                    0 => "all flash of the cache is fenced after errors".to_owned(),
                    left => format!(
                        "the cache lost {lost} of its {count} segments with a fenced device, and \
                        has {left} left"
                    ),
                });
                for segment in segments {
                    inner.note_lost(segment);
                }
                tracing::error!(
                    "disk {name}: its cache lost {lost} of its {count} segments with a fenced device"
                );
            }
            ShardEvent::Stalled(device) if self.registry.inner().is_peer(device) => {
                self.pools.note_health(
                    device,
                    DeviceState::Stalled,
                    "the lending host does not answer in time, and writes wait for it",
                );
            }
            ShardEvent::Stalled(device) => {
                self.pools.note_health(
                    device,
                    DeviceState::Stalled,
                    "the device does not answer in time; requests that need it wait, and caches bypass it for \
                    other requests",
                );
            }
            ShardEvent::PeerSilent(device) => {
                // Short pauses are only counted, so the log may have no message about this device
                // yet.
                tracing::error!(
                    device = device.0,
                    "the host that lends a remote flash device does not answer; hob stops using the device"
                );
                self.pools.note_health(
                    device,
                    DeviceState::Stalled,
                    "the lending host does not answer, and hob stops using the device",
                );
                let pools = self.pools.clone();
                spawn(async move { pools.peer_silent(device).await });
            }
            ShardEvent::Resumed(device) => self.pools.note_health(device, DeviceState::Online, ""),
            ShardEvent::DirtyLost { disk, sectors } => {
                self.note_dirty_lost(disk, Size(sectors * SECTOR_BYTES))
            }
            ShardEvent::ChangeWaits(disk) if self.migrations.note_wanted(disk) => {}
            ShardEvent::ChangeWaits(disk) => {
                let disks = self.disks.clone();
                spawn(async move { disks.let_changes_pass(disk).await });
            }
            ShardEvent::WritesInDoubt(disk) => {
                let mut inner = self.registry.inner();
                let Some(entry) = inner.disks.values_mut().find(|entry| entry.id == disk) else { return };
                let Some(more) = entry.loss_message.is_due(Instant::now()) else { return };
                let (name, before) = (&entry.wanted.name, repeated(more));
                tracing::error!(
                    "disk {name}: its backing failed a flush or restarted{before}, so acknowledged writes may be lost; \
                     the next flush of each client fails once; check the backing and the guest's filesystem"
                );
            }
            ShardEvent::FailuresOwed { disk, count } => self.registry.note_owed(disk, count),
            ShardEvent::BackingLost { disk, why } => {
                let disks = self.disks.clone();
                spawn(async move { disks.backing_lost(disk, why).await });
            }
            ShardEvent::ParentUnchecked { parent, check } => {
                let disks = self.disks.clone();
                tokio::spawn(async move { disks.check_parent(parent, check).await });
            }
            ShardEvent::BackingClosed(disk) => self.disks.backing_closed(disk),
            ShardEvent::JournalLost(disk) => {
                self.note_cache(disk, JOURNAL_LOST);
                let pools = self.pools.clone();
                spawn(async move { pools.replace_journal(disk).await });
            }
            ShardEvent::DiscardUnrecorded(disk, ring) => {
                let pools = self.pools.clone();
                spawn(async move { pools.record_discard(disk, ring).await });
            }
            ShardEvent::JournalCopyLost(disk) => {
                let pools = self.pools.clone();
                spawn(async move { pools.replace_journal_copy(disk).await });
            }
        }
    }

    /// Records and logs that flash cannot return dirty data. Each failed read causes an event, so
    /// this function logs at most one message in ten seconds.
    fn note_dirty_lost(&self, disk: DiskId, lost: Size) {
        let mut inner = self.registry.inner();
        let Some(entry) = inner.disks.values_mut().find(|entry| entry.id == disk) else { return };
        let reason = format!(
            "{lost} of dirty data cannot be read from flash; reads of it fail until the data is written \
            again, or discarded with 'hob cache discard-dirty'"
        );
        if let Some(more) = entry.dirty_lost_message.is_due(Instant::now()) {
            tracing::error!("the cache of {}: {reason}{}", entry.wanted.name, repeated(more));
        }
        entry.cache_reason = Some(reason);
    }

    /// Records and logs a problem of a disk's cache.
    fn note_cache(&self, disk: DiskId, reason: &str) {
        let mut inner = self.registry.inner();
        let Some(entry) = inner.disks.values_mut().find(|entry| entry.id == disk) else { return };
        tracing::error!("the cache of {}: {reason}", entry.wanted.name);
        entry.cache_reason = Some(reason.to_owned());
    }
}

/// Returns text about the number of failures since the last log message; an empty text if there are
/// none.
fn repeated(more: u64) -> String {
    if more == 0 { String::new() } else { format!(" ({more} times more since the last message)") }
}
