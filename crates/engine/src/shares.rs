//! Divides a bounded resource (request slots, jobs, buffer bytes) among disks.
//!
//! A quarter of the resource is guaranteed: each disk can always have an equal part of that
//! quarter, whatever the other disks hold. The rest is allocated by demand. A disk's part of the
//! rest must not exceed the unused amount of the rest, and the same applies to all disks of a
//! datastore together. So a hung datastore keeps at most half of the amount that was free when it
//! hung. A hung datastore never keeps the guaranteed part of a disk on another datastore. One busy
//! disk among idle disks may use at least 3/8 of the resource, and a disk without other disks may
//! use 5/8.
//!
//! The rule for the rest is the dynamic threshold with α = 1 (Choudhury and Hahne, "Dynamic Queue
//! Length Thresholds for Shared-Memory Packet Switches", IEEE/ACM Transactions on Networking 6(2),
//! 1998).

use crate::units::{DatastoreId, DiskId};

/// The guaranteed part of the resource: one in this number.
const GUARANTEED_SHARE: u64 = 4;

/// Amounts of one resource that disks and datastores hold. The owner chooses the unit.
#[derive(Debug)]
pub struct Shares {
    total: u64,
    used: u64,
    /// Guaranteed amount of each disk.
    guaranteed: u64,
    /// Sum of the guaranteed amounts that disks do not use.
    reserved: u64,
    members: u64,
    /// Amounts of each disk.
    disks: Vec<Holder>,
    /// For each datastore, the amount that its disks hold beyond their guaranteed amounts.
    excess: Vec<u64>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Holder {
    datastore: DatastoreId,
    is_member: bool,
    held: u64,
}

impl Holder {
    fn guaranteed(&self, each: u64) -> u64 {
        if self.is_member { each } else { 0 }
    }

    fn excess(&self, each: u64) -> u64 {
        self.held.saturating_sub(self.guaranteed(each))
    }

    fn unclaimed(&self, each: u64) -> u64 {
        self.guaranteed(each).saturating_sub(self.held)
    }
}

impl Shares {
    /// Creates the state for `total` units, without disks.
    pub fn new(total: u64) -> Shares {
        Shares {
            total,
            used: 0,
            guaranteed: 0,
            reserved: 0,
            members: 0,
            disks: Vec::new(),
            excess: Vec::new(),
        }
    }

    /// Adds `amount` to the resource.
    pub fn enlarge(&mut self, amount: u64) {
        self.total += amount;
        self.recount();
    }

    /// Adds a disk of a datastore. Amounts that the disk has taken before are included.
    pub fn join(&mut self, disk: DiskId, datastore: DatastoreId) {
        let holder = self.holder_mut(disk);
        assert!(!holder.is_member, "disk {disk} joins once");
        (holder.is_member, holder.datastore) = (true, datastore);
        self.members += 1;
        self.recount();
    }

    /// Removes a disk. Amounts that the disk has taken stay used until they are returned.
    pub fn leave(&mut self, disk: DiskId) {
        let holder = self.holder_mut(disk);
        if std::mem::take(&mut holder.is_member) {
            self.members -= 1;
            self.recount();
        }
    }

    /// Returns true if a disk may take `amount` more. A disk that was not added has no guaranteed
    /// amount.
    #[inline]
    pub fn may_take(&self, disk: DiskId, amount: u64) -> bool {
        let free = self.free();
        if amount > free {
            return false;
        }
        let each = self.guaranteed;
        let holder = self.holder(disk);
        if holder.held + amount <= holder.guaranteed(each) {
            return true;
        }
        let more = amount - amount.min(holder.unclaimed(each));
        let rest = free.saturating_sub(self.reserved);
        let of_datastore = self.excess.get(usize::from(holder.datastore.0)).copied().unwrap_or(0);
        of_datastore.max(holder.excess(each)) + more <= rest
    }

    /// Returns the amount that a disk may take now, up to `wanted`.
    pub fn allowance(&self, disk: DiskId, wanted: u64) -> u64 {
        let each = self.guaranteed;
        let holder = self.holder(disk);
        let rest = self.free().saturating_sub(self.reserved);
        let of_datastore = self.excess.get(usize::from(holder.datastore.0)).copied().unwrap_or(0);
        let more = rest.saturating_sub(of_datastore.max(holder.excess(each)));
        (holder.unclaimed(each) + more).min(self.free()).min(wanted)
    }

    /// Records that a disk takes `amount`, even if that is not permitted.
    #[inline]
    pub fn take(&mut self, disk: DiskId, amount: u64) {
        self.change(disk, |held| held + amount);
        self.used += amount;
    }

    /// Records that a disk returns `amount`.
    #[inline]
    pub fn give_back(&mut self, disk: DiskId, amount: u64) {
        self.change(disk, |held| held.checked_sub(amount).expect("a disk gives back what it took"));
        self.used -= amount;
    }

    /// Records that `amount` is taken for no disk.
    pub fn take_unowned(&mut self, amount: u64) {
        self.used += amount;
    }

    /// Records that `amount`, which was taken for no disk, is returned.
    pub fn give_back_unowned(&mut self, amount: u64) {
        self.used -= amount;
    }

    /// Returns the unused amount.
    pub fn free(&self) -> u64 {
        self.total.saturating_sub(self.used)
    }

    /// Returns the amount that a disk has taken and not returned.
    pub fn held(&self, disk: DiskId) -> u64 {
        self.holder(disk).held
    }

    /// Returns the datastore with which a disk was added.
    pub fn datastore(&self, disk: DiskId) -> DatastoreId {
        self.holder(disk).datastore
    }

    fn holder(&self, disk: DiskId) -> Holder {
        self.disks.get(disk.0 as usize).copied().unwrap_or_default()
    }

    fn holder_mut(&mut self, disk: DiskId) -> &mut Holder {
        let index = disk.0 as usize;
        if self.disks.len() <= index {
            self.disks.resize(index + 1, Holder::default());
        }
        &mut self.disks[index]
    }

    #[inline]
    fn change(&mut self, disk: DiskId, new: impl FnOnce(u64) -> u64) {
        let each = self.guaranteed;
        let holder = self.holder_mut(disk);
        let before = *holder;
        holder.held = new(before.held);
        let after = *holder;
        self.reserved = self.reserved + after.unclaimed(each) - before.unclaimed(each);
        let excess = self.excess_mut(after.datastore);
        *excess = *excess + after.excess(each) - before.excess(each);
    }

    fn excess_mut(&mut self, datastore: DatastoreId) -> &mut u64 {
        let index = usize::from(datastore.0);
        if self.excess.len() <= index {
            self.excess.resize(index + 1, 0);
        }
        &mut self.excess[index]
    }

    /// Computes each disk's guaranteed amount again, after the number of disks changed.
    fn recount(&mut self) {
        self.guaranteed = match self.members {
            0 => 0,
            members => self.total / GUARANTEED_SHARE / members,
        };
        self.excess.fill(0);
        let each = self.guaranteed;
        self.reserved = self.disks.iter().map(|holder| holder.unclaimed(each)).sum();
        for index in 0..self.disks.len() {
            let holder = self.disks[index];
            *self.excess_mut(holder.datastore) += holder.excess(each);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn fill(shares: &mut Shares, disk: DiskId) -> u64 {
        let before = shares.held(disk);
        while shares.may_take(disk, 1) {
            shares.take(disk, 1);
        }
        shares.held(disk) - before
    }

    #[test]
    fn one_disk_alone_uses_five_eighths() {
        let mut shares = Shares::new(4000);
        shares.join(DiskId(0), DatastoreId(0));
        assert_eq!(fill(&mut shares, DiskId(0)), 2500);
        assert!(!shares.may_take(DiskId(9), 1), "no member: its datastore holds more than is left");
    }

    /// Disks hang one after the other, each after it has taken all that it could.
    #[test]
    fn any_number_of_hung_disks_leave_another_its_guaranteed_part() {
        let mut shares = Shares::new(4000);
        (0..100).for_each(|disk| shares.join(DiskId(disk), DatastoreId(disk as u16)));
        let held: Vec<u64> = (0..99).map(|disk| fill(&mut shares, DiskId(disk))).collect();
        assert!(held.iter().all(|held| *held >= 10), "{held:?}");
        assert!(fill(&mut shares, DiskId(99)) >= 10);
    }

    #[test]
    fn all_disks_of_a_datastore_together_leave_half_of_the_rest() {
        let mut shares = Shares::new(4000);
        (0..10).for_each(|disk| shares.join(DiskId(disk), DatastoreId(0)));
        shares.join(DiskId(10), DatastoreId(1));
        let hung: u64 = (0..10).map(|disk| fill(&mut shares, DiskId(disk))).sum();
        assert!(hung <= 900 + 1600, "{hung}");
        assert!(fill(&mut shares, DiskId(10)) >= 90 + 700);
    }

    #[test]
    fn a_number_can_be_another_disk_before_all_came_back() {
        let mut shares = Shares::new(400);
        shares.join(DiskId(0), DatastoreId(0));
        shares.take(DiskId(0), 120);
        shares.leave(DiskId(0));
        shares.join(DiskId(0), DatastoreId(1));
        assert_eq!((shares.held(DiskId(0)), shares.free()), (120, 280));
        shares.give_back(DiskId(0), 120);
        assert_eq!((shares.reserved, shares.excess.iter().sum::<u64>()), (100, 0));
    }

    proptest! {
        /// The counters agree with a recount, and no sequence of permitted takes breaks a
        /// guarantee.
        #[test]
        fn guarantees_hold(steps in prop::collection::vec((0u32..6, 1u64..90, any::<bool>()), 0..300)) {
            let mut shares = Shares::new(240);
            (0..6).for_each(|disk| shares.join(DiskId(disk), DatastoreId(disk as u16 / 2)));
            for (disk, amount, takes) in steps {
                let disk = DiskId(disk);
                let allowance = shares.allowance(disk, amount);
                prop_assert_eq!(allowance == amount, shares.may_take(disk, amount));
                prop_assert!(allowance == 0 || shares.may_take(disk, allowance));
                match takes {
                    true if shares.may_take(disk, amount) => shares.take(disk, amount),
                    true => {}
                    false => shares.give_back(disk, amount.min(shares.held(disk))),
                }
                let (reserved, excess) = (shares.reserved, shares.excess.clone());
                shares.recount();
                prop_assert_eq!((reserved, excess), (shares.reserved, shares.excess.clone()));
                prop_assert!(shares.free() >= shares.reserved, "{:?}", shares);
                for disk in 0..6 {
                    let unclaimed = shares.holder(DiskId(disk)).unclaimed(shares.guaranteed);
                    prop_assert!(unclaimed == 0 || shares.may_take(DiskId(disk), unclaimed));
                }
            }
        }
    }
}
