//! Disks that this host holds: what their titles say, and giving them back.

use hob_engine::cluster::{Found, LeaseId, OwnershipRecord, OwnershipRequest};

use super::{Cluster, DiskMembership, GOES, Taken};

impl Cluster {
    /// Is a disk held under the lease that there is now?
    pub(crate) async fn is_held(&self, disk: &str) -> bool {
        let Some(membership) = self.membership.borrow().clone() else { return false };
        let place = self.place(disk);
        let place = place.lock().await;
        place.title.is_some() && place.lease == membership.lease
    }

    /// Gives a disk back that is not served any more. `dirty` says whether data of it stays in this host's flash.
    pub(crate) async fn give_back(&self, disk: &str, dirty: bool) -> Result<(), String> {
        let place = self.place(disk);
        let mut place = place.lock().await;
        self.give_back_at(&mut place, disk, dirty).await
    }

    async fn give_back_at(&self, place: &mut DiskMembership, disk: &str, dirty: bool) -> Result<(), String> {
        let mut trouble = String::new();
        for _ in 0..GOES {
            let Some(title) = place.title.clone() else { return Ok(()) };
            let is_adopted = title.value.member.id == self.me.id && title.value.adopts.is_none();
            let txn = match is_adopted {
                true => place.seat.give_back(place.lease, &title, dirty),
                // What there is to adopt of it stays to be adopted.
                false => place.seat.leave_alone(place.lease, &title),
            };
            match self.commit(place, &txn).await {
                Ok(Some(_)) => {
                    tracing::info!("{disk} is given back in generation {}", title.value.generation);
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

    /// After a disk that was taken could not be opened.
    pub(crate) async fn leave(&self, disk: &str, taken: &Taken) {
        if let Err(why) = self.give_back(disk, taken.dirty_before).await {
            tracing::warn!("{disk} was not given back: {why}; that happens when the lease ends");
        }
    }

    /// After a disk that was held for the sake of its second copy could not be adopted, or not so far.
    pub(crate) async fn leave_adopting(&self, disk: &str) {
        if let Err(why) = self.give_back(disk, false).await {
            tracing::warn!("{disk} was not let go of: {why}; that happens when the lease ends");
        }
    }

    /// Gives a disk back of which this host keeps nothing, whether it holds it now, or an earlier life of it did, or it only had it last.
    pub(crate) async fn give_up(&self, disk: &str, known: Option<u64>) -> Result<(), String> {
        let place = self.place(disk);
        // Until the end: nobody here takes it meanwhile, to serve it.
        let mut place = place.lock().await;
        self.give_back_at(&mut place, disk, false).await?;
        let look = self.look(disk).await.map_err(|error| error.to_string())?;
        let is_ours =
            |title: &Found<OwnershipRecord>| title.value.member.id == self.me.id && title.value.dirty;
        let is_free = look.hold.as_ref().is_none_or(|hold| hold.value.id == self.me.id);
        if is_free && look.title.as_ref().is_some_and(is_ours) {
            let wish = OwnershipRequest { known, dirty: false, force: false, keeps_copy: false };
            let membership = self.member().await.map_err(|error| error.to_string())?;
            let took = self.take_at(&membership, &mut place, disk, wish).await;
            took.map_err(|error| error.to_string())?;
            self.give_back_at(&mut place, disk, false).await?;
        }
        Ok(())
    }

    /// Says that dirty data may be in this host's flash, if that is not said already. In effect when it returns.
    pub(crate) async fn mark(&self, disk: &str) -> Result<(), String> {
        self.say_dirty(disk, true, || true).await
    }

    /// Says that no dirty data is in this host's flash, for as long as that is so. Whoever wants some there makes it untrue first and then
    /// calls [`Cluster::mark`], which comes later than all that is said here.
    pub(crate) async fn unmark(&self, disk: &str, is_so: impl Fn() -> bool) -> Result<(), String> {
        self.say_dirty(disk, false, is_so).await
    }

    async fn say_dirty(&self, disk: &str, dirty: bool, is_so: impl Fn() -> bool) -> Result<(), String> {
        let place = self.place(disk);
        let mut place = place.lock().await;
        let mut trouble = "the disk is not held".to_owned();
        for _ in 0..GOES {
            let Some(title) = place.title.clone() else { return Err(trouble) };
            if !is_so() || title.value.dirty == dirty && !place.in_doubt {
                return Ok(());
            }
            let txn = place.seat.mark(place.lease, &title, dirty);
            match self.commit(&mut place, &txn).await {
                Ok(Some(revision)) => {
                    // Where nothing is dirty, nobody has a copy of it.
                    let copy = title.value.copy.clone().filter(|_| dirty);
                    let value = OwnershipRecord { dirty, copy, ..title.value };
                    place.title = Some(Found { value, revision, lease: LeaseId(0) });
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

    /// Does the title say that dirty data may be here? `None` for a disk that is not held.
    pub(crate) async fn is_marked(&self, disk: &str) -> Option<bool> {
        let place = self.place(disk);
        let place = place.lock().await;
        place.title.as_ref().map(|title| title.value.dirty)
    }

    /// The same, and nothing that this host has said can make it untrue any more.
    pub(crate) async fn stays_marked(&self, disk: &str) -> Option<bool> {
        let place = self.place(disk);
        let place = place.lock().await;
        place.title.as_ref().map(|title| title.value.dirty && !place.clean_in_doubt)
    }
}
