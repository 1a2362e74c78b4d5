//! Incoming disks in standby. This module opens an incoming disk with an empty cache and with the
//! source host as its backing. Later it makes this host the owner of the disk, or closes the disk
//! again.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use hob_engine::command::{Access, DiskConfig, Role};
use hob_engine::migration::Record;
use hob_engine::units::DiskId;
use hob_storage::backing::Format;

use super::super::disks::Measure;
use super::super::disks::{Open, open_gateway};
use super::super::flash::blocking;
use super::super::qos::datastore_of;
use super::super::registry::DiskPhase;
use super::Migrations;
use super::data_socket::{DataSocket, ReadyConnections};
use crate::api_error::{Result, conflict, failed, open_error};
use crate::exports::export_info;
use crate::hardware::{Backing, BackingOptions};
use crate::shard_api::ShardHandle;
use crate::state::JournalSpec;
use crate::stripe;

/// Maximum time for the source to open a data connection, before this host asks the source again.
const CONNECT_MAX: Duration = Duration::from_secs(10);

/// Maximum time for an answer on a data connection. After this time, hob closes the connection.
const ANSWER_MAX: Duration = Duration::from_secs(10);

/// Maximum time that reads of a disk that is being closed wait for the source.
const CLOSING_WAIT_MAX: Duration = Duration::from_secs(1);

/// Pause before this host asks the source for a data connection again.
const RETRY_EVERY: Duration = Duration::from_millis(100);

impl Migrations {
    /// Opens an incoming disk in standby with an empty cache. A disk that is already fully open
    /// stays open for its clients, and its cache is invalidated.
    pub(super) async fn open_awaited(
        self: &Arc<Self>,
        name: &str,
        size_bytes: u64,
        ready: Arc<ReadyConnections>,
    ) -> Result<Option<DataSocket>> {
        // The export is the last step of opening, so its presence means that the disk is fully
        // open.
        if self.exports.table().get(name).is_some()
            && let Ok((shard, id)) = self.registry.shard_of(name)
        {
            shard.restart(id).await?;
            return Ok(None);
        }
        self.close_awaited(name).await?;
        let opened = self.open_standby(name, size_bytes, ready).await;
        if opened.is_err()
            && let Err(error) = self.close_awaited(name).await
        {
            tracing::warn!("disk {name}: cannot close it before the next attempt to open it: {error}");
        }
        opened.map(Some)
    }

    async fn open_standby(
        self: &Arc<Self>,
        name: &str,
        size_bytes: u64,
        ready: Arc<ReadyConnections>,
    ) -> Result<DataSocket> {
        let (wanted, id) = {
            let inner = self.registry.inner();
            let disk = inner.disk(name)?;
            (disk.wanted.clone(), disk.id)
        };
        self.exports.clear_stale_file(name).await?;
        let own = self.open_unlocked(name, &wanted.backing, wanted.read_only).await?;
        let here = own.info().size_bytes;
        if size_bytes > 0 && size_bytes < here {
            return Err(conflict!(
                "{} has {here} bytes on this host, and the disk has {size_bytes}: the backing has \
                grown, or it is another backing",
                wanted.backing
            )
            .hint("if the backing has grown, first run 'hob disk resize' on the host that owns the disk"));
        }
        if size_bytes > 0 && size_bytes != here {
            return Err(conflict!(
                "{} has {here} bytes on this host, and the disk has {size_bytes}: it is another backing",
                wanted.backing
            ));
        }
        let info = own.info().clone();
        let access = if wanted.read_only || info.read_only { Access::ReadOnly } else { Access::ReadWrite };
        let (lock, gauge, witness, monitor) = (own.lock(), own.size_probe(), own.witness(), own.monitor());
        let datastore = wanted.datastore.clone().unwrap_or_else(|| datastore_of(&wanted.backing));
        let (datastore_id, _use) = self.qos.datastore_id(&datastore, wanted.datastore.is_some())?;
        let shard = self.qos.shard_for(datastore_id);
        let config = DiskConfig { size_bytes: info.size_bytes, access, datastore: datastore_id };
        let wait_max = self.disks.wait_max_of(wanted.backing_timeout);
        shard.add_disk(id, config, Backing::handover(own, wait_max)).await?;
        shard.set_stripe(id, stripe::for_shard(wanted.stripe, &info));
        shard.owe_failures(id, wanted.flush_failures_owed)?;
        {
            let mut inner = self.registry.inner();
            let disk = inner.disk_mut(name)?;
            disk.identity = info.identity;
            disk.lock = lock;
            disk.measure = Some(Measure { gauge, witness, monitor, info: info.clone() });
            disk.phase = DiskPhase::Online(shard.clone());
            disk.memory = None;
            disk.offline_reason = None;
            disk.lost_dirty = None;
            disk.size_bytes = info.size_bytes;
            disk.datastore = Some(datastore);
        }
        self.exports.open_bitmaps(name, &shard, &info).await?;
        // An earlier daemon may have served the disk, and crashed before it recorded its ownership.
        shard.flush(id).await?;
        shard.own(id, Role::Standby).await?;
        let data_socket = self.read_peer(name, shard.clone(), id, "owner", ready)?;
        if wanted.qos.is_some() {
            self.qos.apply(name).await?;
        } else {
            self.qos.apply_control_of(name);
        }
        self.disks.fit_opened(name).await;
        if let Some(path) = &wanted.vhost_user {
            let place = self.exports.socket_at(path);
            let gateway = open_gateway(name, place, id, &shard, &info, access, Open::AtOnce)
                .await
                .map_err(|error| failed!("cannot open the vhost-user socket {path}: {error}"))?;
            self.exports.table().listen_vhost_user(name, name, gateway);
        }
        self.exports.offer(name, id, shard, export_info(&info, access)).await;
        if let Err(error) = self.exports.show_file(name).await {
            tracing::error!(
                "disk {name}: its file or block device is missing: {error}; hob tries again every few \
                seconds"
            );
        }
        tracing::info!("disk {name}: ready for its migration to this host: {}", info.description);
        Ok(data_socket)
    }

    /// Makes a shard read a disk from the source through data connections, as soon as a connection
    /// is ready.
    pub(super) fn read_peer(
        &self,
        name: &str,
        shard: ShardHandle,
        id: DiskId,
        role: &str,
        ready: Arc<ReadyConnections>,
    ) -> Result<DataSocket> {
        let socket = self.peers.transport()?.directory.join(format!("{role}-{}.sock", id.0));
        let mut data_socket = DataSocket::open(&socket, ready)
            .map_err(|error| failed!("no socket at {}: {error}", socket.display()))?;
        let (uri, of) = (data_socket.uri(name), name.to_owned());
        let options =
            BackingOptions { connect_max: CONNECT_MAX, wait_max: ANSWER_MAX, ..self.backing_options.clone() };
        data_socket.also(async move {
            loop {
                let (uri, options) = (uri.clone(), options.clone());
                match blocking(move || Backing::open(&uri, Access::ReadOnly, &options)).await {
                    Ok(Ok(peer)) => return shard.set_peer(id, peer),
                    Ok(Err(error)) => {
                        tracing::debug!("disk {of}: cannot read it from the other host yet: {error}")
                    }
                    Err(error) => tracing::debug!("{of}: {error}"),
                }
                tokio::time::sleep(RETRY_EVERY).await;
            }
        });
        Ok(data_socket)
    }

    /// Opens the disk's own backing without a lock, because the source may still be writing to it.
    async fn open_unlocked(self: &Arc<Self>, name: &str, spec: &str, read_only: bool) -> Result<Backing> {
        self.check_two_can_open(spec).await?;
        let access = if read_only { Access::ReadOnly } else { Access::ReadWrite };
        let options = BackingOptions { locked: false, ..self.disks.image_options(name).await? };
        let spec = spec.to_owned();
        blocking(move || Backing::open(&spec, access, &options)).await?.map_err(|error| open_error(&error))
    }

    /// Refuses backings that cannot be open on two hosts at the same time.
    pub(super) async fn check_two_can_open(&self, spec: &str) -> Result<()> {
        match Backing::kind(spec, Format::Raw).name {
            "file" | "nbd" | "rbd" | "qemu-nbd" => Ok(()),
            other => Err(conflict!("{spec} ({other}) cannot be open on two hosts at once").hint(
                "a disk that is moved needs a file, a block device, an RBD image or an NBD \
                    export as its backing",
            )),
        }
    }

    /// Makes this host, the destination, the owner of the disk and of its backing.
    pub(super) async fn activate(self: &Arc<Self>, name: &str) -> Result<()> {
        let (shard, id) = self.registry.shard_of(name)?;
        self.ownership.take_arrived(name).await?;
        self.exports.begin_recording(name).await?;
        let lock = self.registry.inner().disk(name)?.lock.clone();
        if let Some(lock) = lock {
            blocking(move || lock.take())
                .await?
                .map_err(|error| conflict!("another program still has the lock of the backing: {error}"))?;
        }
        shard.take_over(id).await?;
        Ok(())
    }

    /// Removes an incoming disk and its cache from its shard. The daemon keeps the disk's
    /// configuration.
    pub(super) async fn close_awaited(self: &Arc<Self>, name: &str) -> Result<()> {
        self.exports.table().remove_disk(name).await;
        self.exports.hide_file_at_end(name).await;
        if let Ok((shard, id)) = self.registry.shard_of(name) {
            // The cache is removed only after reads that wait for the source have ended.
            shard.set_wait_max(id, CLOSING_WAIT_MAX);
            self.pools.take_cache(name).await?;
            let gone = shard.remove_disk(id).await?;
            self.free_flash_of(name, gone).await?;
        }
        self.show_away(name, "the disk has not arrived yet".to_owned());
        // The disk's data on flash must not be used later.
        let spec = self.registry.inner().disk(name)?.cache().cloned();
        if let Some(spec) = spec.filter(|spec| spec.journal.is_some_and(|journal| journal.ring > 0)) {
            self.pools.forget_owner(&spec).await;
            // Data on missing devices must not be used later.
            self.forget_journal(name)?;
            self.registry.save_first().await?;
        }
        Ok(())
    }

    fn forget_journal(&self, name: &str) -> Result<()> {
        if let Some(cache) = self.registry.inner().disk_mut(name)?.wanted.cache.as_mut() {
            cache.journal = Some(JournalSpec::new());
        }
        Ok(())
    }

    /// Removes an incoming disk whose migration to this host does not take place. The caller
    /// updates the disk's record afterwards.
    pub(super) async fn remove_awaited(self: &Arc<Self>, name: &str) -> Result<()> {
        match self.registry.record_of(name) {
            Some(Record::Awaiting(_)) => self.close_awaited(name).await,
            _ => Ok(()),
        }
    }
}

/// Checks that the path of a socket in this directory is not longer than the kernel accepts.
pub(super) fn check_directory(directory: &Path) -> Result<()> {
    const SOCKET_CHARS_MAX: usize = 85;
    match directory.as_os_str().len() {
        0..=SOCKET_CHARS_MAX => Ok(()),
        _ => Err(failed!(
            "the path of the state directory, {}, is too long for sockets in it",
            directory.display()
        )),
    }
}
