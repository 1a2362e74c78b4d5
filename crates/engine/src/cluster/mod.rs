//! Disk ownership among hosts that share a backing, decided with a store that all of them reach
//! (docs/decisions/0019).
//!
//! The store is linearizable and has leases: etcd, or its model in a simulation. [`LeaseManager`] keeps this
//! host's lease and knows until when the host may acknowledge requests. [`OwnershipState`] decides about one disk.
//! [`Waiting`] says when to try disks of other hosts. The first two return requests to the store as values
//! ([`Ask`], [`Txn`]) and handle its answers. How the store is reached is the caller's matter. Times are of
//! the host's own clock.
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

/// Shortest lease, nanoseconds: etcd with its default settings grants no shorter one.
pub const LEASE_NS_MIN: u64 = 3_000_000_000;

/// Longest lease, nanoseconds.
pub const LEASE_NS_MAX: u64 = 600_000_000_000;

/// Maximum time from the lease check to the answer on the wire, nanoseconds.
pub const SCHEDULING_NS_MAX: u64 = 500_000_000;

/// Maximum difference between the rates of two clocks, as a fraction: one in this number.
pub const DRIFT_ONE_IN: u64 = 50;

/// Returns how long a host may rely on a lease of this length after it sent the renewal, nanoseconds.
pub const fn usable_ns(lease_ns: u64) -> u64 {
    (lease_ns - lease_ns / DRIFT_ONE_IN).saturating_sub(SCHEDULING_NS_MAX)
}

/// Identifies a lease in its store. 0 means no lease.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct LeaseId(pub u64);

/// A host of the cluster.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Member {
    /// Name for users; unique at any time.
    pub name: String,
    /// Random id, kept with the host's state: a host that lost its state is a new member.
    pub id: String,
}

/// The ownership record of a disk: its last owner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnershipRecord {
    /// The member.
    pub member: Member,
    /// Generation: grows whenever the owner changes.
    pub generation: u64,
    /// The disk was taken and not given back. If there is no lock, its owner failed.
    pub taken: bool,
    /// That member's flash may hold data that is not on the backing.
    pub dirty: bool,
    /// The replica of all dirty data, if there is one.
    pub copy: Option<SecondCopy>,
    /// The member has taken the disk by failover from that replica and writes it to the backing. Until that
    /// is done, its own flash holds nothing valid.
    pub adopts: Option<Served>,
    /// Former owners whose dirty data reached the backing by failover: their flash content is outdated.
    pub adopted: Vec<Served>,
}

/// A replica of all dirty data of a disk, in the flash of another member (docs/decisions/0023).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SecondCopy {
    /// The member whose flash holds it.
    pub member: Member,
    /// Which of its exports: a number that is never used again.
    pub loan: String,
    /// The cache in the export.
    pub cache: String,
}

/// A record that a member served a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Served {
    /// The member.
    pub by: Member,
    /// The generation.
    pub generation: u64,
}

/// Maximum number of remembered members whose dirty data another member wrote to the backing. An operator
/// decides about further ones.
pub const ADOPTED_MAX: usize = 16;

/// The content of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found<T> {
    /// Its value.
    pub value: T,
    /// Revision of the last change: no two changes have the same number.
    pub revision: u64,
    /// The lease that the key is bound to, if any.
    pub lease: LeaseId,
}

/// A key of the store.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Key {
    /// A member, by name.
    Host(String),
    /// The ownership lock of a disk.
    OwnershipLock(String),
    /// The ownership record of a disk.
    OwnershipRecord(String),
}

/// Value of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// This host. The code that reaches the store adds its other properties.
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
#[expect(clippy::large_enum_variant, reason = "a transaction has two or three, and lives for one question")]
pub enum Change {
    /// Puts a value that is bound to a lease, or permanent.
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

/// A lease of this host, and until when the host may rely on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseTerm {
    /// The lease.
    pub lease: LeaseId,
    /// The first instant at which the host must not rely on it.
    pub until: Instant,
}

impl LeaseTerm {
    /// Returns true if requests may be acknowledged.
    #[inline]
    pub fn is_valid(&self, now: Instant) -> bool {
        now < self.until
    }
}
