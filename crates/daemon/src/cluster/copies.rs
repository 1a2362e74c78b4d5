//! Replicas of dirty data on other members: their entries in the disks' ownership records, and
//! failover to a replica (docs/decisions/0023).

use hob_engine::cluster::{Found, LeaseId, Member, OwnershipRecord, SecondCopy};

use super::{Cluster, DiskMembership, GOES, LIST_MAX, QUESTION_MAX, Taken};

/// The reason why it is not certain that a change of an ownership record took effect.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Unsaid(pub(crate) String);

impl Cluster {
    /// Removes the replica from a disk's ownership record, and waits until the record certainly
    /// does not name the replica any more.
    pub(crate) async fn forget_copy(&self, disk: &str) -> Result<(), Unsaid> {
        let mut place = self.place(disk).await;
        let mut trouble = "this host does not have the ownership lock of the disk, and the \
            ownership record is unchanged"
            .to_owned();
        for _ in 0..GOES {
            if place.lost {
                return Ok(());
            }
            let Some(title) = place.title.clone() else { break };
            if title.value.copy.is_none() && !place.in_doubt {
                return Ok(());
            }
            match self.say(&mut place, disk, &title, None).await {
                Ok(true) => return Ok(()),
                Ok(false) => {}
                Err(why) => trouble = why,
            }
        }
        Err(Unsaid(trouble))
    }

    /// Records that member `host` has, in flash lease `loan`, a replica of all dirty data of this
    /// host's cache `cache`. Returns false if nothing is recorded: this host has no ownership lock
    /// of the disk, or the disk can have no dirty data.
    pub(crate) async fn note_copy(
        &self,
        disk: &str,
        host: &str,
        loan: &str,
        cache: &str,
    ) -> Result<bool, Unsaid> {
        let mut place = self.place(disk).await;
        let Some(title) = place.title.clone().filter(|title| title.value.dirty && !place.lost) else {
            return Ok(false);
        };
        let is_it = |copy: &SecondCopy| copy.member.name == host && copy.loan == loan && copy.cache == cache;
        if title.value.copy.as_ref().is_some_and(is_it) && !place.in_doubt {
            return Ok(true);
        }
        let found = self.names.look_up(&self.etcd, host, QUESTION_MAX).await;
        let member: Member = match found {
            Ok(Some((member, ..))) => member,
            Ok(None) => return Err(Unsaid(format!("{host} is not a member of the cluster now"))),
            Err(error) => return Err(Unsaid(error.to_string())),
        };
        if member.id == self.me.id {
            return Err(Unsaid(format!("{host} is this host, and a replica must be on another host")));
        }
        let copy = SecondCopy { member, loan: loan.to_owned(), cache: cache.to_owned() };
        self.say(&mut place, disk, &title, Some(copy)).await.map_err(Unsaid)
    }

    /// Tries once to change the record. Returns false if the record was not the expected one. The
    /// record is then read again.
    async fn say(
        &self,
        place: &mut DiskMembership,
        disk: &str,
        title: &Found<OwnershipRecord>,
        copy: Option<SecondCopy>,
    ) -> Result<bool, String> {
        let txn = place.seat.say_copy(place.lease, title, copy.clone());
        let mut trouble = None;
        match self.commit(place, &txn).await {
            Ok(Some(revision)) => {
                match &copy {
                    Some(copy) => {
                        tracing::info!(
                            "disk {disk}: host {} has a replica of its dirty data",
                            copy.member.name
                        )
                    }
                    None => tracing::info!("disk {disk}: no other host has a replica of its dirty data"),
                }
                let value = OwnershipRecord { copy, ..title.value.clone() };
                place.title = Some(Found { value, revision, lease: LeaseId(0) });
                return Ok(true);
            }
            Ok(None) => {}
            Err(error) => trouble = Some(error.to_string()),
        }
        let looked = self.look_again(place, disk).await.map_err(|error| error.to_string());
        trouble.map_or(looked.map(|()| false), Err)
    }

    /// Returns the cache on this host that has a replica on another host according to the disk's
    /// ownership record.
    pub(crate) async fn copied_cache(&self, disk: &str) -> Option<String> {
        let place = self.place(disk).await;
        place.title.as_ref()?.value.copy.as_ref().map(|copy| copy.cache.clone())
    }

    /// Returns true if an ownership record names this flash lease, or if that is unknown.
    pub(crate) async fn is_loan_named(&self, loan: &str) -> bool {
        match self.names.disks(&self.etcd, LIST_MAX).await {
            Ok(all) => {
                all.iter().any(|(_, title, _)| title.copy.as_ref().is_some_and(|copy| copy.loan == loan))
            }
            Err(_) => true,
        }
    }

    /// Returns true if an ownership record says that a member may have dirty data, or if that is
    /// unknown.
    pub(crate) async fn may_have_dirty_data(&self, member: &Member) -> bool {
        match self.names.disks(&self.etcd, LIST_MAX).await {
            Ok(all) => all.iter().any(|(_, title, _)| title.dirty && title.member.id == member.id),
            Err(_) => true,
        }
    }

    /// Records that from now on only the replica on this host is valid. Call this function before
    /// the first write to the backing, while this host has the ownership lock.
    pub(crate) async fn begin_adopting(&self, disk: &str) -> Result<(), Unsaid> {
        let mut place = self.place(disk).await;
        let mut trouble = "another host owned the disk in the meantime".to_owned();
        for _ in 0..GOES {
            let Some(title) = place.title.clone() else { break };
            let Some((txn, begun)) = place.seat.begin_adopting(&self.me, place.lease, &title) else {
                return Ok(());
            };
            match self.commit(&mut place, &txn).await {
                Ok(Some(revision)) => {
                    place.title = Some(Found { value: begun, revision, lease: LeaseId(0) });
                    return Ok(());
                }
                Ok(None) => {}
                Err(error) => trouble = error.to_string(),
            }
            self.look_again(&mut place, disk).await.map_err(|error| Unsaid(error.to_string()))?;
        }
        Err(Unsaid(trouble))
    }

    /// Completes a failover: records that the backing has all data of the replica and that this
    /// host owns the disk. `dirty` tells whether the disk may get dirty data as soon as it is
    /// served.
    pub(crate) async fn end_adopting(&self, disk: &str, dirty: bool) -> Result<Taken, Unsaid> {
        let Some(membership) = self.membership.borrow().clone() else {
            return Err(Unsaid("the lease of this host has ended".to_owned()));
        };
        let mut place = self.place(disk).await;
        let mut trouble = "another host owned the disk in the meantime".to_owned();
        let mut from = None;
        for _ in 0..GOES {
            let Some(title) = place.title.clone().filter(|_| place.lease == membership.lease) else { break };
            from = title.value.adopts.as_ref().map(|it| it.by.name.clone()).or(from);
            if title.value.adopts.is_none() && title.value.member.id == self.me.id {
                let by = from.unwrap_or_else(|| "another host".to_owned());
                return Ok(Taken {
                    generation: title.value.generation,
                    clock: membership.clock,
                    foreign: Some(format!("{by} owned the disk")),
                    outdated_by: None,
                    dirty_before: false,
                });
            }
            let (txn, ended) = place.seat.end_adopting(place.lease, &title, dirty);
            match self.commit(&mut place, &txn).await {
                Ok(Some(revision)) => {
                    place.title = Some(Found { value: ended, revision, lease: LeaseId(0) });
                    continue;
                }
                Ok(None) => {}
                Err(error) => trouble = error.to_string(),
            }
            self.look_again(&mut place, disk).await.map_err(|error| Unsaid(error.to_string()))?;
        }
        Err(Unsaid(trouble))
    }
}
