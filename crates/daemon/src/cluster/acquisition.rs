//! Acquires disks: repeats calls to etcd until the decision of
//! [`OwnershipState`](hob_engine::cluster::OwnershipState) is carried out or is impossible.

use std::sync::Arc;

use hob_engine::cluster::{
    Adopting, Found, LeaseId, Member, OwnershipRecord, OwnershipRequest, Refusal as Why, SecondCopy, Taking,
    Txn, Verdict,
};

use super::{Cluster, DiskMembership, GOES, Membership, lock};
use crate::lease_clock::{LeaseClock, now};

/// An operator's `--force` is valid for the settle time plus this time, in nanoseconds.
const FORCE_NS_MAX: u64 = 10_000_000_000;

/// A disk that this host has acquired.
#[derive(Debug)]
pub(crate) struct Taken {
    /// Generation to save with the disk's data in flash.
    pub(crate) generation: u64,
    /// Expiry time of the lease under which requests may be acknowledged.
    pub(crate) clock: Arc<LeaseClock>,
    /// Another host that owned the disk after this host's flash was filled. The disk's data in this
    /// host's flash is therefore outdated.
    pub(crate) foreign: Option<String>,
    /// Host that wrote this host's dirty data to the backing from a replica. The backing has newer
    /// data than this host's flash now.
    pub(crate) outdated_by: Option<String>,
    /// True if the ownership record, before this acquisition, said that this host may have dirty
    /// data of the disk.
    pub(super) dirty_before: bool,
}

/// Result of an attempt to take a disk.
#[derive(Debug)]
pub(crate) enum Took {
    /// This host owns the disk.
    Taken(Taken),
    /// This host has the ownership lock, and must first write the replica on this host to the
    /// backing.
    FailoverCandidate(FailoverCandidate),
}

/// A disk whose owner has failed and whose dirty data has a replica on this host.
#[derive(Debug)]
pub(crate) struct FailoverCandidate {
    pub(crate) copy: SecondCopy,
    pub(crate) from: Member,
    /// Expiry time of the lease under which the backing may be written.
    pub(crate) clock: Arc<LeaseClock>,
}

/// Why a disk cannot be acquired.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TakeError {
    /// Another host owns the disk, or has data without which it must not be served.
    #[error("{why}")]
    OtherOwner {
        why: String,
        /// Suggested action for the operator.
        hint: String,
        /// The reason why the other host prevents this host from taking the disk.
        how: OtherOwner,
    },
    /// It is unknown whether this host owns the disk. Try again later.
    #[error("{0}")]
    Unknown(String),
}

/// Why another host prevents the acquisition of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OtherOwner {
    /// Another host serves the disk, which is normal.
    Served,
    /// The owner has failed, and its last writes may still be in flight.
    Settling,
    /// Another host has data without which the disk must not be served.
    Needed,
}

impl Cluster {
    /// Allows this host to acquire a disk once even if that loses acknowledged data. The permission
    /// ends 10 seconds after the settle time.
    pub(crate) fn force(&self, disk: &str) {
        let until = now() + self.config.settle_seconds * 1_000_000_000 + FORCE_NS_MAX;
        lock(&self.forced).insert(disk.to_owned(), until);
    }

    /// Acquires a disk. `known` is the generation saved with the disk's data in this host's flash.
    /// `dirty` tells whether the disk may have dirty data now or soon.
    pub(crate) async fn take(&self, disk: &str, known: Option<u64>, dirty: bool) -> Result<Took, TakeError> {
        let took = self.take_as_it_is(disk, known, dirty).await;
        self.watcher.tried(disk, &took);
        took
    }

    async fn take_as_it_is(&self, disk: &str, known: Option<u64>, dirty: bool) -> Result<Took, TakeError> {
        let membership = self.member().await?;
        let mut place = self.place(disk).await;
        let force = lock(&self.forced).get(disk).is_some_and(|until| now() < *until);
        let wish = OwnershipRequest { known, dirty, force, keeps_copy: false };
        let taken = self.take_at(&membership, &mut place, disk, wish).await;
        if !matches!(
            taken,
            Err(TakeError::OtherOwner { how: OtherOwner::Settling, .. } | TakeError::Unknown(_))
        ) {
            lock(&self.forced).remove(disk);
        }
        taken
    }

    pub(super) async fn take_at(
        &self,
        membership: &Membership,
        place: &mut DiskMembership,
        disk: &str,
        wish: OwnershipRequest,
    ) -> Result<Took, TakeError> {
        place.lost = false;
        self.attempt(membership, place, disk, wish, false).settle().await
    }

    /// Acquires again a disk that this host already serves, under the host's current lease.
    pub(crate) async fn take_again(
        &self,
        disk: &str,
        known: Option<u64>,
        dirty: bool,
    ) -> Result<Taken, TakeError> {
        let membership = self.member().await?;
        let mut place = self.place(disk).await;
        let wish = OwnershipRequest { known, dirty, force: false, keeps_copy: true };
        let took = match self.attempt(&membership, &mut place, disk, wish, true).settle().await {
            Ok(Took::Taken(taken)) => Ok(taken),
            Ok(Took::FailoverCandidate(to_adopt)) => Err(elsewhere(disk, Some(&to_adopt.from))),
            Err(error) => Err(error),
        };
        place.lost = matches!(took, Err(TakeError::OtherOwner { .. }));
        took
    }

    fn attempt<'a>(
        &'a self,
        membership: &'a Membership,
        place: &'a mut DiskMembership,
        disk: &'a str,
        wish: OwnershipRequest,
        goes_on: bool,
    ) -> Attempt<'a> {
        let trouble = "other hosts try to acquire the disk too".to_owned();
        Attempt { cluster: self, membership, place, disk, wish, goes_on, trouble }
    }
}

/// An attempt to take a disk. The attempt reads the disk's keys and commits transactions until a
/// decision is carried out or is impossible.
struct Attempt<'a> {
    cluster: &'a Cluster,
    membership: &'a Membership,
    place: &'a mut DiskMembership,
    disk: &'a str,
    wish: OwnershipRequest,
    /// True if this host already serves the disk, so that no other host can have owned the disk in
    /// the meantime.
    goes_on: bool,
    /// Reason why the latest transaction failed.
    trouble: String,
}

impl Attempt<'_> {
    async fn settle(mut self) -> Result<Took, TakeError> {
        for _ in 0..GOES {
            if let Some(took) = self.go().await? {
                return Ok(took);
            }
        }
        Err(TakeError::Unknown(format!("the disk could not be acquired: {}", self.trouble)))
    }

    /// Reads the keys and acts on the decision. Returns `None` if the keys must be read again.
    async fn go(&mut self) -> Result<Option<Took>, TakeError> {
        let cluster = self.cluster;
        let look = cluster.look(self.disk).await.map_err(|error| TakeError::Unknown(error.to_string()))?;
        cluster.watcher.looked(self.disk, &look);
        if let Some((title_revision, at)) = cluster.watcher.gone(self.disk) {
            self.place.seat.saw_gone(title_revision, at);
        }
        let verdict = self.place.seat.decide(now(), &cluster.me, self.membership.lease, &look, self.wish);
        let before = look.title;
        let had_it = before.as_ref().map(|title| &title.value.member);
        match verdict {
            // A transaction of unknown result cannot take effect after the record was written
            // again. The record must also announce dirty data before the data exists, even for a
            // disk whose lock this host had all the time.
            Verdict::Mine(title) if self.place.in_doubt || self.wish.dirty && !title.value.dirty => {
                let dirty = self.wish.dirty || title.value.dirty;
                let txn = self.place.seat.mark(self.membership.lease, &title, dirty);
                self.commit(&txn).await;
                Ok(None)
            }
            Verdict::Mine(title) => {
                let continued = self.wish.known == Some(title.value.generation);
                self.has_it(before, title, continued, None).map(Some)
            }
            Verdict::Adopt(adopting) if self.goes_on => {
                Err(elsewhere(self.disk, Some(&adopting.title.value.member)))
            }
            Verdict::Adopt(adopting) => Ok(self.adopt(*adopting).await),
            Verdict::Take(taking) if self.goes_on && !taking.continued => Err(elsewhere(self.disk, had_it)),
            Verdict::Take(taking) => self.take(before, *taking).await,
            Verdict::Wait(until) => {
                cluster.watcher.settles(self.disk, until);
                Err(match self.goes_on {
                    true => elsewhere(self.disk, had_it),
                    false => settling(had_it, cluster.config.settle_seconds),
                })
            }
            Verdict::Refused(why) => Err(refused(self.disk, &why)),
        }
    }

    /// Acquires only the ownership lock. This host must write its replica to the backing before it
    /// may own the disk.
    async fn adopt(&mut self, adopting: Adopting) -> Option<Took> {
        let Adopting { txn, title, copy } = adopting;
        let revision = self.commit(&txn).await?;
        let from = title.value.adopts.as_ref().map_or(&title.value.member, |it| &it.by).clone();
        tracing::info!("disk {}: ownership lock acquired for a failover from {}", self.disk, from.name);
        self.place.title = Some(Found { revision, ..title });
        self.place.lease = self.membership.lease;
        Some(Took::FailoverCandidate(FailoverCandidate { copy, from, clock: self.membership.clock.clone() }))
    }

    async fn take(
        &mut self,
        before: Option<Found<OwnershipRecord>>,
        taking: Taking,
    ) -> Result<Option<Took>, TakeError> {
        let Taking { txn, title, continued, lost_by, outdated_by } = taking;
        if let Some(by) = &lost_by {
            tracing::error!(
                "disk {}: acquired with --force; dirty data in the flash of {} is LOST",
                self.disk,
                by.name
            );
        }
        let _turn = self.cluster.commits.acquire().await;
        let seen = before.as_ref().map_or(0, |title| title.revision);
        if self.cluster.watcher.has_moved(self.disk, seen) {
            // The ownership record has changed while this host waited for its turn.
            return Ok(None);
        }
        let Some(revision) = self.commit(&txn).await else { return Ok(None) };
        let title = Found { value: title, revision, lease: LeaseId(0) };
        self.has_it(before, title, continued, outdated_by).map(Some)
    }

    /// Commits a transaction and returns its revision, or `None` after a failure. A transaction
    /// without a response may have succeeded. The next read of the keys shows whether it did.
    async fn commit(&mut self, txn: &Txn) -> Option<u64> {
        self.cluster.commit(self.place, txn).await.unwrap_or_else(|error| {
            self.trouble = error.to_string();
            None
        })
    }

    /// Returns the acquired disk. The disk's record was `before` and is `title` now.
    fn has_it(
        &mut self,
        before: Option<Found<OwnershipRecord>>,
        title: Found<OwnershipRecord>,
        continued: bool,
        outdated_by: Option<Member>,
    ) -> Result<Took, TakeError> {
        let before = before.map(|title| title.value);
        if self.goes_on && !continued {
            return Err(elsewhere(self.disk, before.as_ref().map(|title| &title.member)));
        }
        let mine = before.as_ref().is_some_and(|title| title.member.id == self.cluster.me.id);
        let foreign = (!continued).then(|| match &before {
            Some(title) if !mine => format!("{} owned the disk", title.member.name),
            _ => "other hosts may have owned the disk".to_owned(),
        });
        let generation = title.value.generation;
        if self.place.lease != self.membership.lease || self.place.title.is_none() {
            tracing::info!("disk {}: acquired in generation {generation}", self.disk);
        }
        (self.place.title, self.place.lease) = (Some(title), self.membership.lease);
        Ok(Took::Taken(Taken {
            generation,
            clock: self.membership.clock.clone(),
            foreign,
            outdated_by: outdated_by.map(|by| by.name),
            dirty_before: mine && before.is_some_and(|title| title.dirty),
        }))
    }
}

fn settling(member: Option<&Member>, settle_seconds: u64) -> TakeError {
    let host = member.map_or("?", |member| &member.name);
    TakeError::OtherOwner {
        why: format!(
            "{host} owned the disk and vanished; this host acquires the disk {settle_seconds} s \
            after it noticed that {host} had vanished"
        ),
        hint: "wait".to_owned(),
        how: OtherOwner::Settling,
    }
}

fn elsewhere(disk: &str, member: Option<&Member>) -> TakeError {
    let host = member.map_or("another host", |member| &member.name);
    TakeError::OtherOwner {
        why: format!("{host} owned the disk in the meantime"),
        hint: format!(
            "'hob cluster disks' shows the owner of {disk}; this host acquires the disk by itself \
            when it has no owner"
        ),
        how: OtherOwner::Needed,
    }
}

fn refused(disk: &str, why: &Why) -> TakeError {
    match why {
        Why::Held(by, generation) => TakeError::OtherOwner {
            why: format!("{} has it (generation {generation})", by.name),
            hint: "this host acquires the disk by itself when that host releases it or vanishes".to_owned(),
            how: OtherOwner::Served,
        },
        Why::Dirty(by, generation) => TakeError::OtherOwner {
            why: format!(
                "the flash of {} may have dirty data of the disk (generation {generation})",
                by.name
            ),
            hint: format!(
                "start that host again; if it will never return, 'hob cluster take {disk} --force \
                --yes' takes the disk without that data"
            ),
            how: OtherOwner::Needed,
        },
    }
}
