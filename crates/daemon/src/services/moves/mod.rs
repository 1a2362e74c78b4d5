//! Moves of disks to another host of the cluster by order (docs/decisions/0024).
//!
//! An order is a key in etcd that any host may write. The disk's owner and the new host learn of
//! the order from etcd. Both hosts also check once a second while there are orders, in case etcd
//! sends no notification.
//!
//! If a VM uses the disk, or if the cached data is to move with the disk, the move is a migration
//! ([`leave`]). Otherwise the owner drains, closes and releases the disk, and the other host
//! acquires the disk ([`arrive`]). Ownership records and ownership locks decide which host owns the
//! disk, as they do when no disk is moved. An order only prevents other hosts from acquiring the
//! disk while it is being moved, for a limited time.

mod new_host;
mod old_host;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hob_control::{ClusterDiskState, ClusterMove, ClusterMoveStart, ClusterMoveState, check_name};

use super::disks::Disks;
use super::exports::ExportService;
use super::migration::{Migrations, check_bandwidth};
use super::observe::Observe;
use super::ownership::{Ownership, PROMISED_MAX};
use super::pools::Pools;
use super::registry::Registry;
use crate::api_error::{ApiError, Result, conflict, invalid, not_found};
use crate::background::spawn;
use crate::cluster::{Cluster, Order, OrderFound};
use crate::state::CacheOwner;

/// Time after which an order that no host has handled fails.
const ASKED_MAX: Duration = Duration::from_secs(20);

/// Time for which a finished order stays visible.
const KEPT: Duration = Duration::from_secs(120);

/// Minimum pause between two reads of all orders after a notification, because changes often arrive
/// in groups.
const LOOKS_APART: Duration = Duration::from_millis(50);

/// Maximum number of orders that a host executes at once.
const AT_ONCE_MAX: usize = 8;

service! {
    /// The move service; see the module.
    #[derive(Debug)]
    pub(crate) struct Moves {
        registry: Arc<Registry>,
        exports: ExportService,
        pools: Pools,
        disks: Disks,
        observe: Observe,
        ownership: Arc<Ownership>,
        migrations: Arc<Migrations>,
    } with {
        running: Running,
    }
}

/// The orders that this host executes.
#[derive(Debug, Default)]
struct Running(Mutex<Progress>);

#[derive(Debug, Default)]
struct Progress {
    disks: BTreeSet<String>,
    /// True while the orders are being read.
    is_looking: bool,
    /// True if the orders have changed since the read started.
    looks_again: bool,
}

impl Running {
    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a read of the orders. If a read is in progress, schedules another read after it.
    fn begin_look(&self) -> bool {
        let mut progress = self.progress();
        progress.looks_again = progress.is_looking;
        !std::mem::replace(&mut progress.is_looking, true)
    }

    /// Ends a read. Returns true if another read follows.
    fn end_look(&self) -> bool {
        let mut progress = self.progress();
        progress.is_looking = std::mem::take(&mut progress.looks_again);
        progress.is_looking
    }

    /// Starts to execute an order. Returns false if this host already executes it or executes the
    /// maximum number of orders.
    fn begin(&self, disk: &str) -> bool {
        let mut progress = self.progress();
        progress.disks.len() < AT_ONCE_MAX && progress.disks.insert(disk.to_owned())
    }

    fn end(&self, disk: &str) {
        self.progress().disks.remove(disk);
    }
}

impl Moves {
    /// Returns true if the latest read found no orders.
    pub(super) fn are_none(&self) -> bool {
        self.ownership.orders().are_none() && self.running.progress().disks.is_empty()
    }

    /// Records that this host does not execute the order for this disk any more.
    fn end(&self, disk: &str) {
        self.running.end(disk);
        self.ownership.orders().give(disk, None);
    }

    /// Returns all current orders, and those that ended within the last two minutes.
    pub(crate) async fn all(&self) -> Result<Vec<ClusterMove>> {
        let orders = self.ownership.cluster_or_refuse()?.orders().await.map_err(lost)?;
        Ok(orders.iter().map(OrderFound::view).collect())
    }

    /// Orders the move of a disk from its present owner, which may be any host, to another host.
    pub(crate) async fn order(&self, disk: String, start: ClusterMoveStart) -> Result<ClusterMove> {
        let cluster = self.ownership.cluster_or_refuse()?;
        let ClusterMoveStart { to, cache, pool, bandwidth } = start;
        check_name(&to).map_err(|error| invalid!("'{to}' is not a valid name of a host: {error}"))?;
        if let Some(pool) = &pool {
            check_name(pool).map_err(|error| invalid!("'{pool}' is not a valid name of a pool: {error}"))?;
        }
        check_bandwidth(bandwidth)?;
        let hosts = cluster.hosts().await.map_err(lost)?;
        if !hosts.iter().any(|host| host.name == to) {
            let names: Vec<&str> = hosts.iter().map(|host| host.name.as_str()).collect();
            return Err(not_found!("'{to}' is not a member of the cluster now")
                .hint(format!("members are {}", names.join(", "))));
        }
        let disks = cluster.disks().await.map_err(lost)?;
        let known = disks.iter().find(|known| known.name == disk).ok_or_else(|| {
            not_found!("no host of the cluster owns or owned a disk '{disk}'")
                .hint("'hob cluster disks' shows all disks with an owner; a read-only disk has none")
        })?;
        match known.state {
            ClusterDiskState::Held if known.host == to => {
                return Err(conflict!("{to} has {disk} already"));
            }
            ClusterDiskState::Held => {}
            ClusterDiskState::Adopted => {
                return Err(conflict!(
                    "{} is failing over {disk}: it writes the dirty data of the former owner to the backing",
                    known.host
                )
                .hint("request the move again when that host serves the disk"));
            }
            ClusterDiskState::Free | ClusterDiskState::Vanished => {
                return Err(conflict!("no host serves {disk}; its last owner was {}", known.host).hint(
                    format!(
                        "a host with this disk in its configuration acquires the disk by itself; 'hob \
                    cluster take {disk}' on that host shows why it does not"
                    ),
                ));
            }
        }
        let before = cluster.order_of(&disk).await.map_err(lost)?;
        if let Some(before) = before.as_ref().filter(|before| !before.order.state.is_over()) {
            return Err(conflict!("{disk} is already being moved to {}", before.order.to).hint(format!(
                "'hob cluster move {disk}' shows the progress, 'hob cluster move \
                    {disk} --cancel' cancels the move"
            )));
        }
        let order = Order {
            id: CacheOwner::random().to_string(),
            from: String::new(),
            to,
            state: ClusterMoveState::Asked,
            cache,
            pool,
            bandwidth,
            note: None,
            arrival: None,
        };
        match cluster.put_order(&disk, &order, before.map(|before| before.revision)).await.map_err(lost)? {
            Some(revision) => Ok(OrderFound { disk, order, revision, is_ours: true }.view()),
            None => Err(conflict!("another move of {disk} was requested at the same time")),
        }
    }

    pub(crate) async fn cancel(&self, disk: &str) -> Result<ClusterMove> {
        let cluster = self.ownership.cluster_or_refuse()?;
        loop {
            let found = cluster.order_of(disk).await.map_err(lost)?;
            let Some(found) = found.filter(|found| !found.order.state.is_over()) else {
                return Err(conflict!("{disk} is not being moved"));
            };
            if found.order.state == ClusterMoveState::Given {
                return Err(conflict!("it is too late: {} is acquiring {disk}", found.order.to));
            }
            let note = Some("the move was cancelled".to_owned());
            let order = Order { state: ClusterMoveState::Failed, note, ..found.order };
            if let Some(revision) =
                cluster.put_order(disk, &order, Some(found.revision)).await.map_err(lost)?
            {
                return Ok(OrderFound { disk: disk.to_owned(), order, revision, is_ours: true }.view());
            }
        }
    }

    /// Reads all orders in the background. If a read is in progress, another read follows it.
    pub(super) fn look(self: &Arc<Self>, cluster: &Arc<Cluster>) {
        if !self.running.begin_look() {
            return;
        }
        let (moves, cluster) = (self.clone(), cluster.clone());
        spawn(async move {
            loop {
                moves.tend(&cluster).await;
                tokio::time::sleep(LOOKS_APART).await;
                if !moves.running.end_look() {
                    return;
                }
            }
        });
    }

    /// Starts to execute the orders that concern this host.
    async fn tend(self: &Arc<Self>, cluster: &Arc<Cluster>) {
        let orders = match cluster.orders().await {
            Ok(orders) => orders,
            Err(error) => return tracing::debug!("cannot read the orders to move disks from etcd: {error}"),
        };
        let own = cluster.own_name();
        for (found, since) in self.ownership.orders().note(orders) {
            let disk = found.disk.clone();
            let state = found.order.state;
            let leaves = state == ClusterMoveState::Asked && cluster.is_held(&disk).await;
            let comes =
                matches!(state, ClusterMoveState::Offered | ClusterMoveState::Given) && found.order.to == own;
            if (leaves || comes) && !self.running.begin(&disk) {
                continue;
            }
            let (moves, cluster) = (self.clone(), cluster.clone());
            match leaves {
                true => drop(spawn(moves.leave_by_order(cluster, found))),
                false if comes => drop(spawn(moves.meet_order(cluster, found))),
                false if found.is_ours => moves.tidy(&cluster, found, since).await,
                false => {}
            }
        }
    }

    /// Ends an order that no host executes, and deletes an order that ended more than [`KEPT`] ago.
    async fn tidy(&self, cluster: &Cluster, found: OrderFound, since: Duration) {
        let is_idle = !self.running.progress().disks.contains(&found.disk);
        match found.order.state {
            ClusterMoveState::Asked if since > ASKED_MAX => {
                let why =
                    "the owner of the disk has not read the order; does it run an older version of hob?";
                end(cluster, found, ClusterMoveState::Failed, why).await;
            }
            state if state.is_over() && since > KEPT => {
                let _ = cluster.drop_order(&found.disk, found.revision).await;
            }
            // The task ended with an earlier daemon process, or never started.
            state
                if !state.is_over()
                    && since > PROMISED_MAX
                    && is_idle
                    && found.order.from == cluster.own_name() =>
            {
                end(cluster, found, ClusterMoveState::Failed, "the move was interrupted").await;
            }
            _ => {}
        }
    }
}

/// Writes the result of an order to etcd. A failure does no harm, because etcd deletes the key of
/// the order when the key's lease ends.
async fn end(cluster: &Cluster, found: OrderFound, state: ClusterMoveState, why: &str) {
    let note = Some(why.to_owned()).filter(|why| !why.is_empty());
    let arrival = found.order.arrival.filter(|_| !state.is_over());
    let order = Order { state, note, arrival, ..found.order };
    if let Err(error) = cluster.put_order(&found.disk, &order, Some(found.revision)).await {
        tracing::debug!("{}: {error}", found.disk);
    }
}

fn lost(error: impl std::fmt::Display) -> ApiError {
    ApiError::failed(error.to_string()).hint("try again when etcd answers")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_that_change_during_a_read_are_read_again() {
        let running = Running::default();
        assert!(running.begin_look() && !running.end_look(), "nothing has changed");
        assert!(running.begin_look() && !running.begin_look() && !running.begin_look());
        assert!(running.end_look() && !running.end_look(), "one more is enough");
        assert!(running.begin_look());
    }

    #[test]
    fn a_disk_has_one_running_order_and_a_host_not_too_many() {
        let running = Running::default();
        assert!(running.begin("d") && !running.begin("d"));
        running.end("d");
        assert!((0..AT_ONCE_MAX).all(|number| running.begin(&number.to_string())));
        assert!(!running.begin("one more"));
    }
}
