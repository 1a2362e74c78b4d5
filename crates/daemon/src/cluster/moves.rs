//! Orders in etcd to move a disk. Each order is the key `move/DISK`, under the lease of the host
//! that wrote it last (docs/decisions/0024).
//!
//! The key has the order and its progress. An order gives no right to a disk. Only ownership
//! records and ownership locks give a right to a disk.

use hob_control::etcd::{EtcdChange, EtcdEntry, EtcdError, EtcdIs};
use hob_control::{Arrival, CarryMode, ClusterMove, ClusterMoveState, Size, check_name};
use serde::{Deserialize, Serialize};

use super::{Cluster, LIST_MAX, QUESTION_MAX};

/// Maximum length of a valid value in bytes.
const VALUE_BYTES_MAX: usize = 64 << 10;

/// Value of the key `move/DISK`: an order to move the disk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Order {
    /// Distinguishes the order from earlier and later orders about this disk.
    pub(crate) id: String,
    /// Name of the host that has or had the disk; empty until that host has seen the order.
    #[serde(default)]
    pub(crate) from: String,
    /// Name of the new host.
    pub(crate) to: String,
    /// Progress of the move.
    pub(crate) state: ClusterMoveState,
    /// How the disk's cache moves to the new host, if the order or the owner specified it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) cache: Option<CarryMode>,
    /// Pool on the new host, if the order names one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) pool: Option<String>,
    /// Bandwidth limit in bytes per second, if the order has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) bandwidth: Option<Size>,
    /// Condition for which the move waits, or the reason of its failure.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) note: Option<String>,
    /// Description of the disk, for a host that is not configured with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) arrival: Option<Box<Arrival>>,
}

/// An order that was read from etcd.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct OrderFound {
    pub(crate) disk: String,
    pub(crate) order: Order,
    /// Revision of etcd at the last write of the order.
    pub(crate) revision: u64,
    /// True if this host wrote the order last, under its current lease.
    pub(crate) is_ours: bool,
}

impl OrderFound {
    pub(crate) fn view(&self) -> ClusterMove {
        let Order { id, from, to, state, cache, note, .. } = self.order.clone();
        ClusterMove { disk: self.disk.clone(), id, from, to, state, cache, note }
    }
}

/// Parses an order; `None` if it is malformed.
fn order(entry: &EtcdEntry) -> Option<Order> {
    let small = Some(&entry.value).filter(|value| value.len() <= VALUE_BYTES_MAX)?;
    let order: Order = serde_json::from_slice(small).ok()?;
    let is_name = |name: &str| check_name(name).is_ok();
    (is_name(&order.to) && (order.from.is_empty() || is_name(&order.from))).then_some(order)
}

impl Cluster {
    /// This host's name.
    pub(crate) fn own_name(&self) -> &str {
        &self.me.name
    }

    fn found(&self, disk: &str, entry: &EtcdEntry) -> Option<OrderFound> {
        check_name(disk).ok()?;
        let own = self.membership.borrow().as_ref().map(|membership| membership.lease.0);
        let is_ours = own == Some(entry.lease);
        Some(OrderFound { disk: disk.to_owned(), order: order(entry)?, revision: entry.revision, is_ours })
    }

    pub(crate) async fn orders(&self) -> Result<Vec<OrderFound>, EtcdError> {
        let prefix = self.names.moves();
        let entries = self.etcd.list(&prefix, LIST_MAX).await?;
        let found = |entry: &EtcdEntry| self.found(entry.key.strip_prefix(&prefix)?, entry);
        Ok(entries.iter().filter_map(found).collect())
    }

    pub(crate) async fn order_of(&self, disk: &str) -> Result<Option<OrderFound>, EtcdError> {
        let key = format!("{}{disk}", self.names.moves());
        let entries = self.etcd.get(&[&key], QUESTION_MAX).await?;
        Ok(entries.first().and_then(|entry| self.found(disk, entry)))
    }

    /// Writes an order under this host's lease, if the disk's order in etcd still has the revision
    /// `known`. If `known` is `None`, the disk must have no order. Returns the new revision, or
    /// `None` if the order was not written.
    pub(crate) async fn put_order(
        &self,
        disk: &str,
        order: &Order,
        known: Option<u64>,
    ) -> Result<Option<u64>, EtcdError> {
        let Some(membership) = self.membership.borrow().clone() else { return Err(EtcdError::NoLease) };
        let json = serde_json::to_vec(order).unwrap_or_else(|error| panic!("plain values are JSON: {error}"));
        let key = format!("{}{disk}", self.names.moves());
        let is = known.map_or(EtcdIs::Absent, EtcdIs::At);
        let put = EtcdChange::Put(key.clone(), json, membership.lease.0);
        self.etcd.txn(&[(key, is)], &[put], QUESTION_MAX).await
    }

    /// Deletes an order that is not needed any more.
    pub(crate) async fn drop_order(&self, disk: &str, known: u64) -> Result<(), EtcdError> {
        let key = format!("{}{disk}", self.names.moves());
        self.etcd
            .txn(&[(key.clone(), EtcdIs::At(known))], &[EtcdChange::Delete(key)], QUESTION_MAX)
            .await
            .map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(value: &str) -> EtcdEntry {
        EtcdEntry { key: "/hob/move/d".to_owned(), value: value.as_bytes().to_vec(), revision: 3, lease: 7 }
    }

    #[test]
    fn orders_are_decoded_and_invalid_ones_are_skipped() {
        let asked = Order {
            id: "1".to_owned(),
            from: String::new(),
            to: "b".to_owned(),
            state: ClusterMoveState::Asked,
            cache: Some(CarryMode::Remote),
            pool: None,
            bandwidth: None,
            note: None,
            arrival: None,
        };
        let text = serde_json::to_string(&asked).unwrap();
        assert_eq!(order(&entry(&text)), Some(asked));
        let long = format!("{}{text}", " ".repeat(VALUE_BYTES_MAX));
        for wrong in ["", "{}", "7", &text.replace("asked", "told"), &text.replace("\"b\"", "\"a/b\""), &long]
        {
            assert_eq!(order(&entry(wrong)), None, "{wrong}");
        }
    }
}
