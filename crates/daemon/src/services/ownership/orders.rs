//! Orders to move disks, as last read from etcd, and the disks that this host is moving to another
//! host.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hob_control::ClusterMoveState;
use tokio::time::Instant;

use crate::cluster::OrderFound;

/// Time after the last update of an order during which no host but the order's new host acquires
/// the disk.
pub(in crate::services) const PROMISED_MAX: Duration = Duration::from_secs(45);

/// The orders to move disks that this host knows.
#[derive(Debug, Default)]
pub(in crate::services) struct Orders(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    /// The order for each disk as read last, with the time at which the order was first seen in
    /// this form.
    seen: BTreeMap<String, (OrderFound, Instant)>,
    /// Disks that this host is moving to another host, with the name of that host. This host must
    /// not acquire them.
    giving: BTreeMap<String, String>,
}

impl Orders {
    fn known(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns true if the latest read found no orders.
    pub(in crate::services) fn are_none(&self) -> bool {
        self.known().seen.is_empty()
    }

    /// Returns the host to which a disk is moving, if that is not this host and the order was
    /// updated within [`PROMISED_MAX`].
    pub(in crate::services) fn promised(&self, disk: &str, own_name: &str) -> Option<String> {
        let known = self.known();
        if let Some(to) = known.giving.get(disk) {
            return Some(to.clone());
        }
        let (found, since) = known.seen.get(disk)?;
        let is_moving = !matches!(found.order.state, ClusterMoveState::Asked) && !found.order.state.is_over();
        (is_moving && found.order.to != own_name && since.elapsed() < PROMISED_MAX)
            .then(|| found.order.to.clone())
    }

    /// Records that this host is moving a disk to host `to` and must not acquire the disk. `None`
    /// removes the record.
    pub(in crate::services) fn give(&self, disk: &str, to: Option<&str>) {
        let mut known = self.known();
        match to {
            Some(to) => known.giving.insert(disk.to_owned(), to.to_owned()),
            None => known.giving.remove(disk),
        };
    }

    /// Records the current orders. Returns each order with the time for which it has not changed.
    pub(in crate::services) fn note(&self, found: Vec<OrderFound>) -> Vec<(OrderFound, Duration)> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::Order;

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
    async fn a_moving_disk_is_not_acquired_by_other_hosts_for_a_while() {
        let orders = Orders::default();
        orders.note(vec![found(ClusterMoveState::Asked, 1)]);
        assert_eq!(orders.promised("d", "c"), None, "its owner has not seen that");
        assert!(!orders.are_none());
        orders.note(vec![found(ClusterMoveState::Given, 2)]);
        assert_eq!(orders.promised("d", "c").as_deref(), Some("b"));
        assert_eq!(orders.promised("d", "b"), None, "it is to take it");
        assert_eq!(orders.promised("e", "c"), None);
        tokio::time::advance(PROMISED_MAX).await;
        assert_eq!(orders.note(vec![found(ClusterMoveState::Given, 2)])[0].1, PROMISED_MAX);
        assert_eq!(orders.promised("d", "c"), None, "it was not taken");
        orders.note(vec![found(ClusterMoveState::Given, 3)]);
        assert!(orders.promised("d", "c").is_some(), "something happens");
        orders.note(vec![found(ClusterMoveState::Done, 4)]);
        assert_eq!(orders.promised("d", "c"), None);
        orders.note(Vec::new());
        assert!(orders.are_none());
    }

    #[test]
    fn a_disk_that_is_given_away_is_not_acquired_by_its_old_host() {
        let orders = Orders::default();
        orders.give("d", Some("b"));
        assert_eq!(orders.promised("d", "b").as_deref(), Some("b"));
        orders.give("d", None);
        assert_eq!(orders.promised("d", "a"), None);
    }
}
