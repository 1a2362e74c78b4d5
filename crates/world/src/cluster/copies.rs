//! Simulates replicas of dirty data in the flash of another host (the *lending host*). The
//! ownership record names the replica while the replica is complete.
//!
//! The simulated replica of a disk is the set of the disk's dirty blocks. Journals and cache frames
//! are not modelled: all acknowledged writes are in the replica.

use std::collections::{BTreeMap, BTreeSet};

use hob_engine::cluster::SecondCopy;

use super::host::{Kind, Op, Phase, Purpose};
use super::plan::MS;
use super::store::Request;
use super::{Event, Sabotage, Simulation, trace};
use crate::Violation;

/// Maximum number of blocks that are replicated at the same time.
const DOUBLED_AT_ONCE: usize = 3;

/// A replica that a lending host stores for another host. The replica survives the lending host's
/// process.
#[derive(Clone, Debug, Default)]
pub(super) struct Lent {
    /// Unique number of the flash lease with which the lending host provides flash for this
    /// replica.
    pub(super) loan: u64,
    /// True if the owner does not write to the replica any more.
    pub(super) is_ended: bool,
    /// Dirty blocks in the replica, with their values.
    pub(super) dirty: BTreeMap<u32, u64>,
}

/// State of a disk's replica, as the owner's process knows it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Copying {
    /// The disk has no replica.
    #[default]
    Alone,
    /// The owner has requested remote flash.
    Asking,
    /// The owner writes new data to its own flash and to the replica, and copies earlier dirty data
    /// to the replica.
    Doubling,
    /// The replica has all acknowledged dirty data: the owner acknowledges a write only after the
    /// lending host has stored its data.
    Current,
    /// The lending host does not answer. Guest requests wait until the ownership record does not
    /// name the replica any more.
    Broken,
}

/// The replica of a disk, as the owner's process knows it.
#[derive(Clone, Debug, Default)]
pub(super) struct Copy {
    pub(super) state: Copying,
    pub(super) loan: u64,
    /// Blocks that the lending host has confirmed to be in the replica, with their values.
    pub(super) doubled: BTreeMap<u32, u64>,
    /// Replica requests in flight: the lending host, which stores the replica, has not answered
    /// them.
    pub(super) pending: BTreeSet<u64>,
    /// Requests that are complete at the owner, and wait only for the lending host's answer, with
    /// their values.
    pub(super) half_done: BTreeMap<u64, u64>,
    /// Writes in progress whose data was sent only to the owner's flash and not to the replica.
    pub(super) alone: BTreeSet<u64>,
    /// True if etcd has not answered a request to change the ownership record, so that the change
    /// may have been made.
    pub(super) in_doubt: bool,
}

/// Request of an owner to the lending host.
#[derive(Clone, Copy, Debug)]
pub(super) enum PeerOp {
    Lend,
    Dirty(u32, u64),
    Clean(u32),
}

impl Simulation<'_> {
    /// Returns the host that lends flash to this host.
    pub(super) fn lender_of(&self, host: usize) -> usize {
        (host + 1) % self.plan.hosts
    }

    /// Sends a change of dirty data to the replica. Returns false if the disk has no replica.
    pub(super) fn double(&mut self, host: usize, disk: usize, op: u64, what: PeerOp) -> bool {
        let copy = &mut self.hosts[host].local[disk].copy;
        if matches!(copy.state, Copying::Alone | Copying::Asking) {
            return false;
        }
        copy.pending.insert(op);
        if copy.state != Copying::Broken {
            self.tell_lender(host, disk, op, what);
        }
        true
    }

    fn tell_lender(&mut self, host: usize, disk: usize, op: u64, what: PeerOp) {
        let (life, loan) = (self.hosts[host].life, self.hosts[host].local[disk].copy.loan);
        let lender = self.lender_of(host);
        if self.hosts[host].no_peer_until <= self.now {
            let at = self.now + self.way();
            let event = Event::ToLender { host: lender, from: host, life, disk, loan, op, what };
            self.queue.push(at, event);
        }
        let at = self.now + self.plan.peer_wait_ns;
        self.queue.push(at, Event::LenderSilent { host, life, disk, loan, op });
    }

    /// Handles a replica request at the lending host.
    pub(super) fn reach_lender(
        &mut self,
        lender: usize,
        from: usize,
        disk: usize,
        loan: u64,
        what: PeerOp,
    ) -> bool {
        if !self.hosts[lender].up || self.hosts[from].no_peer_until > self.now {
            return false;
        }
        if let PeerOp::Lend = what {
            let known = self.hosts[lender].lent.get(&(from, disk)).map(|lent| lent.loan.to_string());
            let title = self.store.look(&disk.to_string()).title;
            let named = title.and_then(|title| title.value.copy).map(|copy| copy.loan);
            if known.is_some() && known == named {
                return false;
            }
            self.hosts[lender].lent.insert((from, disk), Lent { loan, ..Lent::default() });
            return true;
        }
        let lent = self.hosts[lender].lent.get_mut(&(from, disk));
        let Some(lent) = lent.filter(|lent| lent.loan == loan && !lent.is_ended) else { return false };
        match what {
            PeerOp::Lend => {}
            PeerOp::Dirty(block, value) => drop(lent.dirty.insert(block, value)),
            PeerOp::Clean(block) => drop(lent.dirty.remove(&block)),
        }
        true
    }

    /// Handles the lending host's reply.
    pub(super) fn lender_answered(
        &mut self,
        host: usize,
        disk: usize,
        loan: u64,
        op: u64,
        what: PeerOp,
    ) -> Result<(), Violation> {
        let copy = &mut self.hosts[host].local[disk].copy;
        if copy.loan != loan || copy.state == Copying::Broken || !copy.pending.remove(&op) {
            return Ok(());
        }
        match what {
            PeerOp::Lend => {
                copy.state = Copying::Doubling;
                trace!(self, "host {host} doubles disk {disk} in loan {loan}");
                return Ok(());
            }
            PeerOp::Dirty(block, value) => drop(copy.doubled.insert(block, value)),
            PeerOp::Clean(block) => drop(copy.doubled.remove(&block)),
        }
        self.other_half(host, disk, op)
    }

    /// Handles the completion of a request at the lending host, which stores the replica. Completes
    /// the request if it is also complete at this host.
    fn other_half(&mut self, host: usize, disk: usize, op: u64) -> Result<(), Violation> {
        let local = &mut self.hosts[host].local[disk];
        if let Some(Op { kind: Kind::Double(_), .. }) = local.ops.get(&op) {
            self.finish(host, disk, op);
            return Ok(());
        }
        match local.copy.half_done.remove(&op) {
            Some(value) => self.both_done(host, disk, op, value),
            None => Ok(()),
        }
    }

    /// Handles the timeout of a replica request.
    pub(super) fn lender_silent(
        &mut self,
        host: usize,
        disk: usize,
        loan: u64,
        op: u64,
    ) -> Result<(), Violation> {
        let copy = &mut self.hosts[host].local[disk].copy;
        if copy.loan != loan || !copy.pending.contains(&op) {
            return Ok(());
        }
        match copy.state {
            Copying::Asking => *copy = Copy { in_doubt: copy.in_doubt, ..Copy::default() },
            Copying::Doubling | Copying::Current => {
                trace!(self, "host {host} has lost the second copy of disk {disk}");
                copy.state = Copying::Broken;
                self.report.copies_broken += 1;
                if self.is(Sabotage::FailsEarly) {
                    return self.go_on_alone(host, disk);
                }
            }
            Copying::Alone | Copying::Broken => {}
        }
        Ok(())
    }

    /// Drops the replica after the ownership record has ceased to name it. Requests that waited for
    /// the lending host continue without the replica.
    pub(super) fn go_on_alone(&mut self, host: usize, disk: usize) -> Result<(), Violation> {
        let copy = std::mem::take(&mut self.hosts[host].local[disk].copy);
        trace!(self, "host {host} goes on alone with disk {disk}");
        // The data of requests in progress is in no valid replica on the lending host.
        let ops = self.hosts[host].local[disk].ops.iter();
        let writes = ops.filter(|(_, op)| matches!(op.kind, Kind::WriteBack(_))).map(|(number, _)| *number);
        let alone = writes.collect();
        self.hosts[host].local[disk].copy.alone = alone;
        for op in copy.pending {
            self.hosts[host].local[disk].copy.half_done.extend(copy.half_done.get_key_value(&op));
            self.other_half(host, disk, op)?;
        }
        Ok(())
    }

    /// Sends the next request that creates, completes or removes the replica of a disk that the
    /// host serves or gives back. Returns true if a request to etcd was sent.
    pub(super) fn tend_copy(&mut self, host: usize, disk: usize) -> Result<bool, Violation> {
        let Some(term) = self.hosts[host].term else { return Ok(false) };
        let writes_back = self.hosts[host].kept[disk].writes_back;
        let local = &self.hosts[host].local[disk];
        let Some(title) = local.title.clone() else { return Ok(false) };
        let is_serving = local.phase == Phase::Serving;
        match local.copy.state {
            Copying::Broken if title.value.copy.is_none() && !local.copy.in_doubt => {
                self.go_on_alone(host, disk)?;
            }
            Copying::Broken => {
                let txn = local.seat.say_copy(term.lease, &title, None);
                self.ask_about(host, disk, Purpose::SayCopy(None), Request::Txn(txn));
                return Ok(true);
            }
            #[expect(
                clippy::collapsible_match,
                reason = "random numbers are drawn only in a state that matches"
            )]
            Copying::Alone if is_serving && writes_back && !local.draining && self.plan.copies => {
                if self.rng.chance(300) {
                    let (op, loan) = (self.next(), self.next());
                    let in_doubt = self.hosts[host].local[disk].copy.in_doubt;
                    let alone = std::mem::take(&mut self.hosts[host].local[disk].copy.alone);
                    let state = Copying::Asking;
                    let pending = BTreeSet::from([op]);
                    let copy = Copy { state, loan, pending, alone, in_doubt, ..Copy::default() };
                    self.hosts[host].local[disk].copy = copy;
                    self.tell_lender(host, disk, op, PeerOp::Lend);
                }
            }
            Copying::Doubling | Copying::Current if is_serving => {
                self.begin_doubling(host, disk);
                let is_said =
                    |copy: &SecondCopy| copy.loan == self.hosts[host].local[disk].copy.loan.to_string();
                let is_due = title.value.dirty && !title.value.copy.as_ref().is_some_and(is_said);
                if is_due && (self.is_doubled(host, disk) || self.is(Sabotage::SaysCopyEarly)) {
                    let member = self.hosts[self.lender_of(host)].me.clone();
                    let local = &self.hosts[host].local[disk];
                    let loan = local.copy.loan.to_string();
                    let copy = Some(SecondCopy { member, loan, cache: host.to_string() });
                    let txn = local.seat.say_copy(term.lease, &title, copy.clone());
                    self.ask_about(host, disk, Purpose::SayCopy(copy), Request::Txn(txn));
                    return Ok(true);
                }
            }
            _ => {}
        }
        Ok(false)
    }

    /// Returns true if the replica has all dirty data, and later changes of dirty data are sent to
    /// the replica.
    fn is_doubled(&self, host: usize, disk: usize) -> bool {
        let copy = &self.hosts[host].local[disk].copy;
        let mut cache = self.hosts[host].kept[disk].cache.iter();
        copy.alone.is_empty()
            && cache.all(|(block, (value, dirty))| !dirty || copy.doubled.get(block) == Some(value))
    }

    fn begin_doubling(&mut self, host: usize, disk: usize) {
        let local = &self.hosts[host].local[disk];
        let is_due = |(block, (value, dirty)): &(&u32, &(u64, bool))| {
            *dirty && !local.busy.contains(*block) && local.copy.doubled.get(*block) != Some(value)
        };
        let due = self.hosts[host].kept[disk].cache.iter().filter(is_due).take(DOUBLED_AT_ONCE);
        let due: Vec<(u32, u64)> = due.map(|(block, (value, _))| (*block, *value)).collect();
        for (block, value) in due {
            let op = self.next();
            let local = &mut self.hosts[host].local[disk];
            local.busy.insert(block);
            local.ops.insert(op, Op { kind: Kind::Double(value), block });
            self.double(host, disk, op, PeerOp::Dirty(block, value));
        }
    }

    /// Handles the success of a transaction that names the replica in the ownership record or
    /// removes it.
    pub(super) fn copy_said(
        &mut self,
        host: usize,
        disk: usize,
        copy: Option<SecondCopy>,
        revision: u64,
    ) -> Result<(), Violation> {
        let local = &mut self.hosts[host].local[disk];
        local.copy.in_doubt = false;
        let Some(title) = &mut local.title else { return Ok(()) };
        let is_gone = copy.is_none();
        (title.value.copy, title.revision) = (copy, revision);
        if is_gone {
            return self.go_on_alone(host, disk);
        }
        self.report.copies_said += 1;
        if local.copy.state == Copying::Doubling {
            local.copy.state = Copying::Current;
        }
        Ok(())
    }

    /// Cuts the power of a host. If every disk with dirty data has this data on another host too,
    /// the function also destroys the host with all its data.
    pub(super) fn destroy(&mut self, host: usize, down_ns: u64) -> Result<(), Violation> {
        let is_spare = (0..self.plan.disks).all(|disk| {
            let title = self.store.look(&disk.to_string()).title.map(|title| title.value);
            let Some(title) = title.filter(|title| title.dirty) else { return true };
            let has = |other: usize| {
                let it = &self.hosts[other];
                let is_owner = it.me.id == title.member.id && title.adopts.is_none();
                let lends = title.copy.as_ref().is_some_and(|copy| {
                    let loans = it.lent.values().map(|lent| lent.loan.to_string());
                    it.me.id == copy.member.id && loans.into_iter().any(|loan| loan == copy.loan)
                });
                is_owner || lends
            };
            (0..self.plan.hosts).any(|other| other != host && has(other))
        });
        self.crash(host, down_ns + self.plan.settle_ns + self.plan.hesitation_ns_max + MS, true)?;
        if !is_spare {
            return Ok(());
        }
        trace!(self, "host {host} is destroyed");
        self.report.destroyed += 1;
        // The destroyed host's requests to etcd are lost.
        self.queue.retain(|event| !matches!(event, Event::ToStore { host: of, .. } if *of == host));
        self.hosts[host].be_new();
        Ok(())
    }
}
