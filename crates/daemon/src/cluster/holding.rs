//! Disks that this host owns: changes of their ownership records, and their release.

use std::time::Duration;

use hob_engine::cluster::{Found, LeaseId, OwnershipRecord, OwnershipRequest};

use super::{Cluster, DiskMembership, GOES, Taken};

/// When other hosts may acquire a disk that this host releases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Release {
    AtOnce,
    /// After `settle_seconds`, as if this host had failed, because the disk's backing may still
    /// execute requests of this host.
    AfterSettling,
}

impl Cluster {
    /// Returns how long another host waits before it acquires a disk whose owner has failed.
    pub(crate) fn settle(&self) -> Duration {
        Duration::from_secs(self.config.settle_seconds)
    }

    /// Returns true if this host has the disk's ownership lock under its current lease.
    pub(crate) async fn is_held(&self, disk: &str) -> bool {
        let Some(membership) = self.membership.borrow().clone() else { return false };
        let place = self.place(disk).await;
        place.title.is_some() && place.lease == membership.lease
    }

    /// Releases a disk that is not served any more. `dirty` tells whether dirty data stays in this
    /// host's flash.
    pub(crate) async fn give_back(&self, disk: &str, dirty: bool, release: Release) -> Result<(), String> {
        let mut place = self.place(disk).await;
        self.give_back_at(&mut place, disk, dirty, release).await
    }

    async fn give_back_at(
        &self,
        place: &mut DiskMembership,
        disk: &str,
        dirty: bool,
        release: Release,
    ) -> Result<(), String> {
        let mut trouble = String::new();
        for _ in 0..GOES {
            let Some(title) = place.title.clone() else { return Ok(()) };
            let is_adopted = title.value.member.id == self.me.id && title.value.adopts.is_none();
            // Other hosts must see the end of the lock at a later revision than the record, as after a
            // failure of this host.
            let marks = is_adopted && release == Release::AfterSettling && title.value.dirty != dirty;
            let txn = match release {
                Release::AtOnce if is_adopted => place.seat.give_back(place.lease, &title, dirty),
                Release::AfterSettling if marks => place.seat.mark(place.lease, &title, dirty),
                // The record still says that this host serves the disk. A pending failover of the disk
                // stays pending.
                _ => place.seat.leave_alone(place.lease, &title),
            };
            match self.commit(place, &txn).await {
                Ok(Some(revision)) if marks => place.title = Some(marked(title.value, dirty, revision)),
                Ok(Some(_)) => {
                    tracing::info!("disk {disk}: released in generation {}", title.value.generation);
                    place.title = None;
                    return Ok(());
                }
                Ok(None) => self.look_again(place, disk).await.map_err(|error| error.to_string())?,
                Err(error) => {
                    trouble = error.to_string();
                    if let Err(error) = self.look_again(place, disk).await {
                        trouble = error.to_string();
                    }
                }
            }
        }
        Err(trouble)
    }

    /// Releases a disk that was acquired but could not be opened.
    pub(crate) async fn leave(&self, disk: &str, taken: &Taken, release: Release) {
        if let Err(why) = self.give_back(disk, taken.dirty_before, release).await {
            tracing::warn!(
                "disk {disk}: cannot release its ownership lock: {why}; the lock ends with the lease"
            );
        }
    }

    /// Releases a disk after a failed or interrupted failover.
    pub(crate) async fn leave_adopting(&self, disk: &str) {
        if let Err(why) = self.give_back(disk, false, Release::AtOnce).await {
            tracing::warn!(
                "disk {disk}: cannot release its ownership lock after a failover: {why}; the lock ends with the lease"
            );
        }
    }

    /// Releases a disk of which this host keeps no data. This host, or an earlier hob process on
    /// this host, may have the ownership lock of the disk. Otherwise, the ownership record may name
    /// this host as the last owner.
    pub(crate) async fn give_up(
        &self,
        disk: &str,
        known: Option<u64>,
        release: Release,
    ) -> Result<(), String> {
        // This host keeps its own task lock of the disk until the end, so that no other task of
        // this host acquires the disk during the release.
        let mut place = self.place(disk).await;
        self.give_back_at(&mut place, disk, false, release).await?;
        let look = self.look(disk).await.map_err(|error| error.to_string())?;
        let is_ours =
            |title: &Found<OwnershipRecord>| title.value.member.id == self.me.id && title.value.dirty;
        let is_free = look.hold.as_ref().is_none_or(|hold| hold.value.id == self.me.id);
        if is_free && look.title.as_ref().is_some_and(is_ours) {
            let wish = OwnershipRequest { known, dirty: false, force: false, keeps_copy: false };
            let membership = self.member().await.map_err(|error| error.to_string())?;
            let took = self.take_at(&membership, &mut place, disk, wish).await;
            took.map_err(|error| error.to_string())?;
            self.give_back_at(&mut place, disk, false, release).await?;
        }
        Ok(())
    }

    /// Records that this host's flash may have dirty data of the disk. The record is in effect when
    /// this returns.
    pub(crate) async fn mark(&self, disk: &str) -> Result<(), String> {
        self.say_dirty(disk, true, || true).await
    }

    /// Records that this host's flash has no dirty data of the disk, if `is_so` returns true. Code
    /// that is about to make data dirty first makes `is_so` return false, and then calls
    /// [`Cluster::mark`]. So the record that `mark` writes is the later of the two.
    pub(crate) async fn unmark(&self, disk: &str, is_so: impl Fn() -> bool) -> Result<(), String> {
        self.say_dirty(disk, false, is_so).await
    }

    async fn say_dirty(&self, disk: &str, dirty: bool, is_so: impl Fn() -> bool) -> Result<(), String> {
        let mut place = self.place(disk).await;
        let mut trouble = "this host does not have the ownership lock of the disk".to_owned();
        for _ in 0..GOES {
            let Some(title) = place.title.clone() else { return Err(trouble) };
            if !is_so() || title.value.dirty == dirty && !place.in_doubt {
                return Ok(());
            }
            let txn = place.seat.mark(place.lease, &title, dirty);
            match self.commit(&mut place, &txn).await {
                Ok(Some(revision)) => {
                    place.title = Some(marked(title.value, dirty, revision));
                    return Ok(());
                }
                Ok(None) => {}
                Err(error) => {
                    place.clean_in_doubt |= !dirty;
                    trouble = error.to_string();
                }
            }
            self.look_again(&mut place, disk).await.map_err(|error| error.to_string())?;
        }
        Err(trouble)
    }

    /// Returns true if the record says that this host may have dirty data. `None` without the
    /// ownership lock.
    pub(crate) async fn is_marked(&self, disk: &str) -> Option<bool> {
        let place = self.place(disk).await;
        place.title.as_ref().map(|title| title.value.dirty)
    }

    /// Returns true if the record says that this host may have dirty data, and no earlier etcd
    /// request of unknown result can still change that. `None` without the ownership lock.
    pub(crate) async fn stays_marked(&self, disk: &str) -> Option<bool> {
        let place = self.place(disk).await;
        place.title.as_ref().map(|title| title.value.dirty && !place.clean_in_doubt)
    }
}

/// Returns the record that [`OwnershipState::mark`](hob_engine::cluster::OwnershipState::mark) has
/// written at this revision.
fn marked(record: OwnershipRecord, dirty: bool, revision: u64) -> Found<OwnershipRecord> {
    // Without dirty data there is no replica.
    let copy = record.copy.clone().filter(|_| dirty);
    Found { value: OwnershipRecord { dirty, copy, ..record }, revision, lease: LeaseId(0) }
}
