//! Disk ownership among hosts that share a backing. The hosts decide about ownership by
//! transactions on a key-value store (docs/decisions/0019-cluster.md). The store is linearizable
//! and has leases: it is etcd, or a model of etcd in a simulation. The comments of this module call
//! the store *etcd* in both cases. [`LeaseManager`] renews this host's lease, and determines until
//! when the host may acknowledge requests. [`OwnershipState`] decides about one disk. [`Waiting`]
//! schedules attempts to take disks of other hosts. [`LeaseManager`] and [`OwnershipState`] return
//! requests to etcd as values ([`Ask`], [`Txn`]) and handle etcd's answers. The caller sends the
//! requests to etcd. All times are times of the host's own clock.
//!
//! | key | lifetime | content |
//! |---|---|---|
//! | `Host` | the lease | a member |
//! | `OwnershipLock` (ownership lock) | the lease | the member that serves the disk now |
//! | `OwnershipRecord` (ownership record) | unlimited | the last owner of the disk |

mod lease;
mod ownership;
#[cfg(test)]
mod tests;
mod waiting;

pub use lease::{Answer, Ask, Call, Event, LeaseManager};
pub use ownership::{
    Adopting, OwnershipRequest, OwnershipSnapshot, OwnershipState, Refusal, Taking, Verdict,
};
pub use waiting::{CHECK_NS, ClusterEvent, LOOK_NS, LOOKS_PER_SECOND_MAX, SPREAD_NS, Tried, Waiting};

use crate::units::Instant;

/// Minimum length of a host's lease in etcd, nanoseconds. etcd with its default settings grants no
/// shorter lease.
pub const LEASE_NS_MIN: u64 = 3_000_000_000;

/// Maximum length of a host's lease in etcd, nanoseconds.
pub const LEASE_NS_MAX: u64 = 600_000_000_000;

/// Maximum time from the lease check to the sending of a reply, nanoseconds.
pub const SCHEDULING_NS_MAX: u64 = 500_000_000;

/// Maximum difference between the rates of two hosts' clocks: one part in this number.
pub const DRIFT_ONE_IN: u64 = 50;

/// Returns how long a host may rely on an etcd lease of this length after it sent the renewal,
/// nanoseconds.
pub const fn usable_ns(lease_ns: u64) -> u64 {
    (lease_ns - lease_ns / DRIFT_ONE_IN).saturating_sub(SCHEDULING_NS_MAX)
}

/// Identifies a host's lease in etcd. 0 means no lease.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct LeaseId(pub u64);

/// A host of the cluster.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Member {
    /// Name of the host for users. No two members have the same name at the same time.
    pub name: String,
    /// Random id, stored with the host's state. A host that lost its state is a new member.
    pub id: String,
}

/// The ownership record of a disk: its last owner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnershipRecord {
    /// The member.
    pub member: Member,
    /// Generation of the disk, which grows whenever the owner changes.
    pub generation: u64,
    /// True while the member owns the disk. False after the member has closed the disk and released
    /// its ownership (*given the disk back*), so that another member may take it. If `taken` is
    /// true and no member has the ownership lock, the owner failed.
    pub taken: bool,
    /// True if the member's flash may have data that the backing lacks.
    pub dirty: bool,
    /// The replica of all dirty data, if there is one.
    pub copy: Option<SecondCopy>,
    /// Former owner from whose replica the member is failing over. Until the failover is complete,
    /// the member's own flash has no valid data of the disk.
    pub adopts: Option<Served>,
    /// Former owners whose dirty data reached the backing by failover, so that their flash content
    /// is outdated.
    pub adopted: Vec<Served>,
}

/// A replica of all dirty data of a disk, in the flash of another member (docs/decisions/0023).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SecondCopy {
    /// The member whose flash has the replica.
    pub member: Member,
    /// Id of the flash lease on that member, which is never reused.
    pub loan: String,
    /// Id of the cache in the flash lease.
    pub cache: String,
}

/// A member that served a disk, with the disk's generation (number of hand-overs) at that time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Served {
    /// The member.
    pub by: Member,
    /// Generation of the disk.
    pub generation: u64,
}

/// Maximum number of former owners that a record remembers after failovers; the oldest is dropped
/// first. An operator must decide about the flash content of a former owner that was dropped.
pub const ADOPTED_MAX: usize = 16;

/// Value and revision of a key in etcd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found<T> {
    /// Value of the key.
    pub value: T,
    /// Revision of the key's last change. No two changes have the same revision.
    pub revision: u64,
    /// Lease that the key is bound to, if any.
    pub lease: LeaseId,
}

/// A key in etcd.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Key {
    /// Membership record of the host with this name.
    Host(String),
    /// The ownership lock of a disk.
    OwnershipLock(String),
    /// The ownership record of a disk.
    OwnershipRecord(String),
}

/// Value of a key in etcd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// This host as a member. The code that writes the key to etcd adds other properties.
    Host(Member),
    /// The member that holds the lock.
    OwnershipLock(Member),
    /// The ownership record.
    OwnershipRecord(OwnershipRecord),
}

/// A condition of a transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Is {
    /// The key does not exist.
    Absent,
    /// The key has this revision.
    At(u64),
    /// The key exists and is bound to this lease.
    Under(LeaseId),
}

/// A change of a transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(clippy::large_enum_variant, reason = "a transaction has two or three changes and is short-lived")]
pub enum Change {
    /// Writes a value. The key is bound to the lease, or is permanent without a lease.
    Put(Key, Value, Option<LeaseId>),
    /// Deletes a key, if it exists.
    Delete(Key),
}

/// A transaction: if all conditions hold, all changes are made; otherwise none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Txn {
    /// The conditions.
    pub conditions: Vec<(Key, Is)>,
    /// The changes.
    pub changes: Vec<Change>,
}

/// A lease of this host, and the time until which the host may rely on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseTerm {
    /// The lease.
    pub lease: LeaseId,
    /// Time from which the host must not rely on the lease.
    pub until: Instant,
}

impl LeaseTerm {
    /// Returns true if requests may be acknowledged.
    #[inline]
    pub fn is_valid(&self, now: Instant) -> bool {
        now < self.until
    }
}
