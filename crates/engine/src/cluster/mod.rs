//! Whose a disk is, among hosts that share its backing: decided with a store that all of them see (docs/decisions/0019).
//!
//! The store is linearizable and has leases: etcd, or its model in a simulation. [`Keeper`] keeps this host's lease and knows until when
//! it may acknowledge anything; [`Seat`] decides about one disk; [`Waiting`] says when disks of other hosts are worth a try. The first two say what is to be asked of the store, as values ([`Ask`], [`Txn`]), and are told
//! what it answered. Nothing here knows how the store is reached, and times are of the host's own clock, whatever that shows.
//!
//! | key | lives as long as | says |
//! |---|---|---|
//! | `Host` | the lease | a member |
//! | `Hold` | the lease | it serves the disk at present |
//! | `Title` | for ever | who had the disk last |

mod keeper;
mod seat;
#[cfg(test)]
mod tests;
mod waiting;

pub use keeper::{Answer, Ask, Call, Event, Keeper};
pub use seat::{Adopting, Look, Refusal, Seat, Taking, Verdict, Wish};
pub use waiting::{CHECK_NS, LOOK_NS, LOOKS_PER_SECOND_MAX, News, SPREAD_NS, Tried, Waiting};

use crate::units::Instant;

/// Shortest lease, nanoseconds: etcd grants none shorter with its usual settings.
pub const LEASE_NS_MIN: u64 = 3_000_000_000;

/// Longest lease, nanoseconds.
pub const LEASE_NS_MAX: u64 = 600_000_000_000;

/// From a look at the clock to the answer on the wire, at most, nanoseconds.
pub const SCHEDULING_NS_MAX: u64 = 500_000_000;

/// One in so many: how far the rates of two clocks may be apart.
pub const DRIFT_ONE_IN: u64 = 50;

/// How long a host may go on after it has sent what renewed a lease of that length.
pub const fn usable_ns(lease_ns: u64) -> u64 {
    (lease_ns - lease_ns / DRIFT_ONE_IN).saturating_sub(SCHEDULING_NS_MAX)
}

/// Names a lease in its store. 0 is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct LeaseId(pub u64);

/// A host of the cluster.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Member {
    /// For people, and taken once at a time.
    pub name: String,
    /// Random, kept with the host's state: a host that lost its state is another one.
    pub id: String,
}

/// Who had a disk last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Title {
    /// The member.
    pub member: Member,
    /// Grows whenever the disk changes hands.
    pub generation: u64,
    /// It was taken and not given back: where there is no hold, its owner vanished.
    pub taken: bool,
    /// Data that is not on the backing may be in that member's flash.
    pub dirty: bool,
    /// Who has a second copy of all of it, if somebody has.
    pub copy: Option<SecondCopy>,
    /// The member has taken the disk for the sake of that copy, and brings it to the backing: until that is done, its own flash has nothing.
    pub adopts: Option<Served>,
    /// Whose dirty data reached the backing that way: what those members have of it is outdated.
    pub adopted: Vec<Served>,
}

/// A second copy of everything that is dirty of a disk, in the flash of another member (docs/decisions/0023).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SecondCopy {
    /// In whose flash.
    pub member: Member,
    /// Which of its loans: a number that is never used again.
    pub loan: String,
    /// Which cache of the loan it is of.
    pub cache: String,
}

/// That a member served a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Served {
    /// Which member.
    pub by: Member,
    /// In which generation.
    pub generation: u64,
}

/// So many members are remembered that had dirty data which another one brought to the backing. An operator decides about that of
/// others.
pub const ADOPTED_MAX: usize = 16;

/// What a key has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found<T> {
    /// Its value.
    pub value: T,
    /// When it was changed last: no two changes have the same number.
    pub revision: u64,
    /// What it goes with, if anything.
    pub lease: LeaseId,
}

/// A key of the store.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Key {
    /// A member, by name.
    Host(String),
    /// Who serves a disk.
    Hold(String),
    /// Who had it last.
    Title(String),
}

/// What is put there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// This host. Whoever reaches the store adds what else there is to say of it.
    Host(Member),
    /// This host.
    Hold(Member),
    /// As it says.
    Title(Title),
}

/// What must be so for a transaction to happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Is {
    /// There is no such key.
    Absent,
    /// It has not been changed since.
    At(u64),
    /// It is there and goes with this lease.
    Under(LeaseId),
}

/// One change of a transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(clippy::large_enum_variant, reason = "a transaction has two or three, and lives for one question")]
pub enum Change {
    /// Puts a value, which goes with a lease or stays for ever.
    Put(Key, Value, Option<LeaseId>),
    /// Takes a key away, if it is there.
    Delete(Key),
}

/// All conditions hold and all changes happen, or none does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Txn {
    /// What must be so.
    pub conditions: Vec<(Key, Is)>,
    /// What happens then.
    pub changes: Vec<Change>,
}

/// A lease that this host has, and until when it may count on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tenure {
    /// The lease.
    pub lease: LeaseId,
    /// Not at this moment any more.
    pub until: Instant,
}

impl Tenure {
    /// May anything be acknowledged?
    #[inline]
    pub fn is_valid(&self, now: Instant) -> bool {
        now < self.until
    }
}
