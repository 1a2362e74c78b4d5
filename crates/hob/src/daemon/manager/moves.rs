//! Disks that go to another host of their cluster because somebody wants it (docs/decisions/0024).
//!
//! An order is a key in etcd, which any host writes; the host that has the disk and the one that is to have it hear of it from etcd, and look once
//! a second while there are orders, or if etcd does not tell. Where a machine uses the disk, or its cache is to go along, the order is carried out as a migration ([`leave`]);
//! otherwise the disk is drained, closed and given back, and the other host takes it ([`arrive`]). Whose the disk is at any moment, titles and
//! holds say as always: an order only keeps the hosts that it does not concern from taking the disk in between, for a while.

mod arrive;
mod leave;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hob_control::{ClusterDiskState, ClusterMove, ClusterMoveStart, ClusterMoveState, check_name};
use tokio::time::Instant;

use super::Manager;
use super::api_error::ApiError;
use crate::daemon::cluster::{Cluster, Order, OrderFound};
use crate::daemon::state::CacheOwner;

/// An order that its host has not seen after that long never will.
const ASKED_MAX: Duration = Duration::from_secs(20);

/// Whoever is not concerned leaves a disk alone for so long, after the order was written last.
const PROMISED_MAX: Duration = Duration::from_secs(45);

/// What became of an order can be seen for so long.
const KEPT: Duration = Duration::from_secs(120);

/// Looks because of what etcd tells are so far apart: each reads all orders, and what changes once often changes again.
const LOOKS_APART: Duration = Duration::from_millis(50);

/// Orders at which one host works at once.
const AT_ONCE_MAX: usize = 8;

/// What is known of orders.
#[derive(Debug, Default)]
pub(super) struct Moves(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    /// By disk: as they were last seen, and since when they have been so.
    seen: BTreeMap<String, (OrderFound, Instant)>,
    /// Disks at whose orders this host works.
    at_work: BTreeSet<String>,
    /// Of these, those that it is giving away: it must not take them itself.
    giving: BTreeMap<String, String>,
    /// A look at them is under way.
    is_looking: bool,
    /// Something has changed since it began.
    looks_again: bool,
}

impl Moves {
    fn known(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Were there none at the last look?
    pub(super) fn are_none(&self) -> bool {
        let known = self.known();
        known.seen.is_empty() && known.at_work.is_empty()
    }

    /// A look begins, unless one is under way: then another one follows that.
    fn begin_look(&self) -> bool {
        let mut known = self.known();
        known.looks_again = known.is_looking;
        !std::mem::replace(&mut known.is_looking, true)
    }

    /// A look is over; true if another one begins.
    fn end_look(&self) -> bool {
        let mut known = self.known();
        known.is_looking = std::mem::take(&mut known.looks_again);
        known.is_looking
    }

    /// To whom a disk is on its way, if not to this host, and not for too long.
    pub(super) fn promised(&self, disk: &str, own_name: &str) -> Option<String> {
        let known = self.known();
        if let Some(to) = known.giving.get(disk) {
            return Some(to.clone());
        }
        let (found, since) = known.seen.get(disk)?;
        let is_moving = !matches!(found.order.state, ClusterMoveState::Asked) && !found.order.state.is_over();
        (is_moving && found.order.to != own_name && since.elapsed() < PROMISED_MAX)
            .then(|| found.order.to.clone())
    }

    /// This host begins to work at an order; false if it does so already, or has enough to do.
    fn begin(&self, disk: &str) -> bool {
        let mut known = self.known();
        known.at_work.len() < AT_ONCE_MAX && known.at_work.insert(disk.to_owned())
    }

    fn end(&self, disk: &str) {
        let mut known = self.known();
        known.at_work.remove(disk);
        known.giving.remove(disk);
    }

    /// This host gives a disk away from now on, or not any more.
    fn give(&self, disk: &str, to: Option<&str>) {
        let mut known = self.known();
        match to {
            Some(to) => known.giving.insert(disk.to_owned(), to.to_owned()),
            None => known.giving.remove(disk),
        };
    }

    /// Takes note of how orders are; each comes back with how long it has been so.
    fn note(&self, found: Vec<OrderFound>) -> Vec<(OrderFound, Duration)> {
        let mut known = self.known();
        let now = Instant::now();
        known.seen.retain(|disk, _| found.iter().any(|one| one.disk == *disk));
        let one = |found: OrderFound| {
            let seen = known.seen.entry(found.disk.clone()).or_insert_with(|| (found.clone(), now));
            if seen.0.revision != found.revision {
                *seen = (found.clone(), now);
            }
            let since = seen.1;
            seen.0.is_ours = found.is_ours;
            (found, now - since)
        };
        found.into_iter().map(one).collect()
    }
}

impl Manager {
    /// All orders that are under way, or were not long ago.
    pub(crate) async fn cluster_moves(&self) -> Result<Vec<ClusterMove>, ApiError> {
        let orders = self.cluster_or_refuse()?.orders().await.map_err(lost)?;
        Ok(orders.iter().map(OrderFound::view).collect())
    }

    /// Orders a disk to another host, whoever has it.
    pub(crate) async fn cluster_move(
        &self,
        disk: String,
        start: ClusterMoveStart,
    ) -> Result<ClusterMove, ApiError> {
        let cluster = self.cluster_or_refuse()?;
        let ClusterMoveStart { to, cache, pool, bandwidth } = start;
        check_name(&to).map_err(|error| ApiError::invalid(format!("'{to}' is no host's name: {error}")))?;
        if let Some(pool) = &pool {
            check_name(pool)
                .map_err(|error| ApiError::invalid(format!("'{pool}' is no pool's name: {error}")))?;
        }
        let hosts = cluster.hosts().await.map_err(lost)?;
        if !hosts.iter().any(|host| host.name == to) {
            let names: Vec<&str> = hosts.iter().map(|host| host.name.as_str()).collect();
            return Err(ApiError::not_found(format!("'{to}' is no member of the cluster now"))
                .hint(format!("members are {}", names.join(", "))));
        }
        let disks = cluster.disks().await.map_err(lost)?;
        let known = disks.iter().find(|known| known.name == disk).ok_or_else(|| {
            ApiError::not_found(format!("no host of the cluster has or had a disk '{disk}'"))
                .hint("'hob cluster disks' shows all; one that is read-only has no owner, and needs none")
        })?;
        match known.state {
            ClusterDiskState::Held if known.host == to => {
                return Err(ApiError::conflict(format!("{to} has {disk} already")));
            }
            ClusterDiskState::Held => {}
            ClusterDiskState::Adopted => {
                return Err(ApiError::conflict(format!(
                    "{} is bringing to the backing what another host had dirty of {disk}",
                    known.host
                ))
                .hint("order it again when it serves the disk"));
            }
            ClusterDiskState::Free | ClusterDiskState::Vanished => {
                return Err(ApiError::conflict(format!("nobody serves {disk}: {} had it last", known.host))
                    .hint(format!("a host that was told of it takes it by itself; 'hob cluster take {disk}' there says why not")));
            }
        }
        let before = cluster.order_of(&disk).await.map_err(lost)?;
        if let Some(before) = before.as_ref().filter(|before| !before.order.state.is_over()) {
            return Err(ApiError::conflict(format!("{disk} is on its way to {} already", before.order.to))
                .hint(format!("'hob cluster move {disk}' shows how far it is, 'hob cluster move {disk} --cancel' calls it off")));
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
            None => Err(ApiError::conflict(format!("somebody else has just given an order about {disk}"))),
        }
    }

    /// Calls an order off.
    pub(crate) async fn cluster_move_cancel(&self, disk: &str) -> Result<ClusterMove, ApiError> {
        let cluster = self.cluster_or_refuse()?;
        loop {
            let found = cluster.order_of(disk).await.map_err(lost)?;
            let Some(found) = found.filter(|found| !found.order.state.is_over()) else {
                return Err(ApiError::conflict(format!("{disk} is not on its way anywhere")));
            };
            if found.order.state == ClusterMoveState::Given {
                return Err(ApiError::conflict(format!(
                    "it is too late for that: {} is taking {disk}",
                    found.order.to
                )));
            }
            let note = Some("it was cancelled".to_owned());
            let order = Order { state: ClusterMoveState::Failed, note, ..found.order };
            if let Some(revision) =
                cluster.put_order(disk, &order, Some(found.revision)).await.map_err(lost)?
            {
                return Ok(OrderFound { disk: disk.to_owned(), order, revision, is_ours: true }.view());
            }
        }
    }

    /// Looks at all orders, once more if a look is under way: nothing waits for that.
    pub(super) fn look_at_moves(self: &Arc<Self>, cluster: &Arc<Cluster>) {
        if !self.moves.begin_look() {
            return;
        }
        let (manager, cluster) = (self.clone(), cluster.clone());
        tokio::spawn(async move {
            loop {
                manager.tend_moves(&cluster).await;
                tokio::time::sleep(LOOKS_APART).await;
                if !manager.moves.end_look() {
                    return;
                }
            }
        });
    }

    /// Begins to do what orders want of this host.
    async fn tend_moves(self: &Arc<Self>, cluster: &Arc<Cluster>) {
        let orders = match cluster.orders().await {
            Ok(orders) => orders,
            Err(error) => return tracing::debug!("cannot read the requests to move disks: {error}"),
        };
        let own = cluster.own_name();
        for (found, since) in self.moves.note(orders) {
            let disk = found.disk.clone();
            let state = found.order.state;
            let leaves = state == ClusterMoveState::Asked && cluster.is_held(&disk).await;
            let comes =
                matches!(state, ClusterMoveState::Offered | ClusterMoveState::Given) && found.order.to == own;
            if (leaves || comes) && !self.moves.begin(&disk) {
                continue;
            }
            let (manager, cluster) = (self.clone(), cluster.clone());
            match leaves {
                true => drop(tokio::spawn(manager.leave_by_order(cluster, found))),
                false if comes => drop(tokio::spawn(manager.meet_order(cluster, found))),
                false if found.is_ours => manager.tidy(&cluster, found, since).await,
                false => {}
            }
        }
    }

    /// Ends an order of this host at which nobody works, and takes one away that has been over for long enough.
    async fn tidy(&self, cluster: &Cluster, found: OrderFound, since: Duration) {
        let is_idle = !self.moves.known().at_work.contains(&found.disk);
        match found.order.state {
            ClusterMoveState::Asked if since > ASKED_MAX => {
                let why = "the host that has the disk has not seen the order; is its hob an older one?";
                end(cluster, found, ClusterMoveState::Failed, why).await;
            }
            state if state.is_over() && since > KEPT => {
                let _ = cluster.drop_order(&found.disk, found.revision).await;
            }
            // Its task went with an earlier life of this process, or never began.
            state
                if !state.is_over()
                    && since > PROMISED_MAX
                    && is_idle
                    && found.order.from == cluster.own_name() =>
            {
                end(cluster, found, ClusterMoveState::Failed, "it was not gone on with").await;
            }
            _ => {}
        }
    }
}

/// Writes how an order ended. Whether that succeeds matters little: it ends with the lease, too.
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

    fn found(state: ClusterMoveState, revision: u64) -> OrderFound {
        let order = Order {
            id: "1".into(),
            from: "a".into(),
            to: "b".into(),
            state,
            cache: None,
            pool: None,
            bandwidth: None,
            note: None,
            arrival: None,
        };
        OrderFound { disk: "d".into(), order, revision, is_ours: false }
    }

    #[tokio::test(start_paused = true)]
    async fn a_disk_on_its_way_is_left_alone_by_others_for_a_while() {
        let moves = Moves::default();
        moves.note(vec![found(ClusterMoveState::Asked, 1)]);
        assert_eq!(moves.promised("d", "c"), None, "its owner has not seen that");
        moves.note(vec![found(ClusterMoveState::Given, 2)]);
        assert_eq!(moves.promised("d", "c").as_deref(), Some("b"));
        assert_eq!(moves.promised("d", "b"), None, "it is to take it");
        assert_eq!(moves.promised("e", "c"), None);
        tokio::time::advance(PROMISED_MAX).await;
        assert_eq!(moves.note(vec![found(ClusterMoveState::Given, 2)])[0].1, PROMISED_MAX);
        assert_eq!(moves.promised("d", "c"), None, "it was not taken");
        moves.note(vec![found(ClusterMoveState::Given, 3)]);
        assert!(moves.promised("d", "c").is_some(), "something happens");
        moves.note(vec![found(ClusterMoveState::Done, 4)]);
        assert_eq!(moves.promised("d", "c"), None);
        moves.note(Vec::new());
        assert!(moves.known().seen.is_empty());
    }

    #[test]
    fn what_changes_during_a_look_is_looked_at_after_it() {
        let moves = Moves::default();
        assert!(moves.begin_look() && !moves.end_look(), "nothing has changed");
        assert!(moves.begin_look() && !moves.begin_look() && !moves.begin_look());
        assert!(moves.end_look() && !moves.end_look(), "one more is enough");
        assert!(moves.begin_look());
        assert!(moves.are_none());
        moves.note(vec![found(ClusterMoveState::Asked, 1)]);
        assert!(!moves.are_none());
    }

    #[test]
    fn one_order_about_a_disk_at_a_time_and_not_too_many() {
        let moves = Moves::default();
        assert!(moves.begin("d") && !moves.begin("d"));
        moves.give("d", Some("b"));
        assert_eq!(moves.promised("d", "b").as_deref(), Some("b"), "whoever gives it away does not take it");
        moves.end("d");
        assert_eq!(moves.promised("d", "a"), None);
        assert!((0..AT_ONCE_MAX).all(|number| moves.begin(&number.to_string())));
        assert!(!moves.begin("one more"));
    }
}
