//! mClock scheduler: serves reservations first, then shares, and never exceeds a limit.
//!
//! A *flow* is the waiting I/O of one disk, or the background I/O of all disks.
//!
//! Each flow has three tags (times) for its first waiting I/O. The *reservation* tag is the time at
//! which its reservation entitles it to service. The *limit* tag is the earliest time of service.
//! The reservation tag and the limit tag are in real time. The *share* tag is in a virtual time
//! that runs slower for flows with more shares. Flows whose reservation tag has passed are served
//! first, in the order of these tags. Otherwise the flow with the smallest share tag is served,
//! among those whose limit permits service. I/O that is served by its share tag does not use up the
//! reservation. I/O that is served by its reservation tag also moves the flow's share tag, but at
//! most a tenth of a second of reserved I/O ahead of the virtual time. So a flow whose reservation
//! exceeds its part by shares is hardly delayed later because of the I/O that its reservation gave
//! it.
//!
//! The implementation differs from the paper in three ways. A flow has tags for its first I/O only,
//! which gives the same order of service. The share tag of a new flow starts at the tag of the last
//! I/O that was served for shares (start-time fair queueing). The paper shifts all tags instead. A
//! flow may catch up on a tenth of a second of unused time, because a guest never sends as
//! regularly as tags are spaced.
//!
//! Every call takes O(log n) for n waiting flows, and allocates nothing once queues have grown.

use std::collections::VecDeque;

use super::Entitlement;
use super::heap::TagHeap;
use crate::units::Instant;

/// Number of a flow in one scheduler. A flow is the waiting I/O of one disk, or the background I/O
/// of all disks. The caller chooses small numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FlowId(pub u32);

/// Maximum time for which a flow may catch up later, if it sent less I/O than it may, nanoseconds.
/// The same time sets the burst that a limit permits: the amount of a tenth of a second, or one
/// I/O.
pub(super) const CREDIT_NS: u64 = 100_000_000;

const SECOND_NS: u64 = 1_000_000_000;

/// Virtual time of one unit for a flow with one share. In 64 bits, the virtual time would overflow
/// after 2³⁴ units of this flow, that is, after two days at 100 000 units per second.
const UNIT_OF_ONE_SHARE: u128 = 1 << 30;

#[derive(Debug)]
struct Flow<T> {
    entitlement: Entitlement,
    waiting: VecDeque<Waiting<T>>,
    /// Reservation tag of the first waiting I/O.
    reserved_at: u64,
    /// Limit tag of the first waiting I/O.
    allowed_at: u64,
    /// Share tag of the first waiting I/O, in virtual time.
    shared_at: u128,
    /// Number of I/O units (32 KiB by default) served since the last call of
    /// [`Scheduler::take_wanted_shares`].
    served: u64,
}

#[derive(Debug)]
struct Waiting<T> {
    units: u32,
    bytes: u64,
    item: T,
}

/// The scheduler of one datastore or flash device.
#[derive(Debug)]
pub struct Scheduler<T> {
    flows: Vec<Flow<T>>,
    /// Waiting flows that may be served, by share tag (virtual time of the next service).
    /// `by_reservation` has the flows with a reservation, by reservation tag (real time,
    /// nanoseconds).
    by_shares: TagHeap<u128>,
    by_reservation: TagHeap<u64>,
    /// Waiting flows that may not be served yet, by limit tag (earliest time of service,
    /// nanoseconds).
    held: TagHeap<u64>,
    /// Current virtual time.
    virtual_now: u128,
    waiting: usize,
}

impl<T> Default for Scheduler<T> {
    fn default() -> Self {
        Scheduler {
            flows: Vec::new(),
            by_shares: TagHeap::default(),
            by_reservation: TagHeap::default(),
            held: TagHeap::default(),
            virtual_now: 0,
            waiting: 0,
        }
    }
}

impl<T> Flow<T> {
    fn new() -> Self {
        let entitlement = Entitlement::default();
        Flow { entitlement, waiting: VecDeque::new(), reserved_at: 0, allowed_at: 0, shared_at: 0, served: 0 }
    }
}

impl<T> Scheduler<T> {
    /// Sets the shares, the reservation and the limits of a flow.
    pub fn set(&mut self, now: Instant, flow: FlowId, entitlement: Entitlement) {
        assert!((1..=super::SHARES_MAX).contains(&entitlement.shares), "{entitlement:?}");
        assert!(entitlement.reservation <= super::RATE_MAX, "{entitlement:?}");
        assert!(entitlement.limit != Some(0) && entitlement.bytes_limit != Some(0), "{entitlement:?}");
        let it = self.flow(flow);
        if it.entitlement == entitlement {
            return;
        }
        // Tags of the old entitlement do not apply to the new one.
        (it.entitlement, it.reserved_at, it.allowed_at) = (entitlement, now.0, now.0);
        if !it.waiting.is_empty() {
            self.place(now, flow);
        }
    }

    /// Queues an I/O behind the other I/Os of its flow.
    pub fn push(&mut self, now: Instant, flow: FlowId, units: u32, bytes: u64, item: T) {
        let virtual_now = self.virtual_now;
        self.waiting += 1;
        let it = self.flow(flow);
        it.waiting.push_back(Waiting { units, bytes, item });
        if it.waiting.len() == 1 {
            it.shared_at = it.shared_at.max(virtual_now);
            self.place(now, flow);
        }
    }

    /// Returns the next I/O, with its flow and its units. Returns `None` if no waiting I/O may be
    /// served now.
    pub fn pop(&mut self, now: Instant) -> Option<(FlowId, u32, T)> {
        while let Some((_, flow)) = self.held.first().filter(|(at, _)| *at <= now.0) {
            self.held.remove(flow);
            self.admit(FlowId(flow));
        }
        let reserved = self.by_reservation.first().filter(|(at, _)| *at <= now.0);
        let flow = match reserved {
            Some((_, flow)) => FlowId(flow),
            None => FlowId(self.by_shares.first()?.1),
        };
        let it = &mut self.flows[flow.0 as usize];
        let Waiting { units, bytes, item } = it.waiting.pop_front().expect("it waits");
        let step = u128::from(units) * UNIT_OF_ONE_SHARE / u128::from(it.entitlement.shares);
        if reserved.is_some() {
            let next = it.reserved_at.max(now.0.saturating_sub(CREDIT_NS));
            it.reserved_at = next + u64::from(units) * SECOND_NS / u64::from(it.entitlement.reservation);
            // A flow whose reservation exceeds the rate of its shares is not delayed later for
            // that. But it must stay behind the flows that have only shares.
            let credit = u128::from(it.entitlement.reservation) * u128::from(CREDIT_NS)
                / u128::from(SECOND_NS)
                * UNIT_OF_ONE_SHARE
                / u128::from(it.entitlement.shares);
            let ahead = credit.max(2 * step);
            it.shared_at = it.shared_at.max((it.shared_at + step).min(self.virtual_now + ahead));
        } else {
            self.virtual_now = it.shared_at;
            it.shared_at += step;
        }
        if it.entitlement.limit.is_some() || it.entitlement.bytes_limit.is_some() {
            let by_units =
                it.entitlement.limit.map_or(0, |limit| u64::from(units) * SECOND_NS / u64::from(limit));
            let by_bytes = it.entitlement.bytes_limit.map_or(0, |limit| {
                (u128::from(bytes) * u128::from(SECOND_NS) / u128::from(limit)).min(u128::from(u64::MAX / 4))
                    as u64
            });
            it.allowed_at = it.allowed_at.max(now.0.saturating_sub(CREDIT_NS)) + by_units.max(by_bytes);
        }
        it.served += u64::from(units);
        self.waiting -= 1;
        self.by_shares.remove(flow.0);
        self.by_reservation.remove(flow.0);
        if !self.flows[flow.0 as usize].waiting.is_empty() {
            self.place(now, flow);
        }
        Some((flow, units, item))
    }

    /// Returns the demand of all flows since the last call, in shares. The demand of a flow is the
    /// rate at which it was served, divided by `level`, but at most its entitlement. A flow whose
    /// I/O waits for other flows demands its entitlement. `level` is the rate per share in units
    /// per second, and `seconds` is the time since the last call. If the rate per share is not
    /// known yet (`None`), returns the sum of the shares of the flows that had I/O. See
    /// [`Report`](super::Report).
    pub fn take_wanted_shares(&mut self, now: Instant, level: Option<f64>, seconds: f64) -> f64 {
        let wanted = self.flows.iter_mut().map(|flow| {
            let served = std::mem::take(&mut flow.served) as f64;
            let is_held_up = !flow.waiting.is_empty() && flow.allowed_at <= now.0;
            let shares = f64::from(flow.entitlement.shares);
            match level {
                None => {
                    if is_held_up || served > 0.0 {
                        shares
                    } else {
                        0.0
                    }
                }
                Some(level) => {
                    let entitlement = shares.max(f64::from(flow.entitlement.reservation) / level);
                    if is_held_up { entitlement } else { entitlement.min(served / seconds / level) }
                }
            }
        });
        wanted.sum()
    }

    /// Returns the number of waiting I/Os.
    pub fn len(&self) -> usize {
        self.waiting
    }

    /// Returns true if no I/O waits.
    pub fn is_empty(&self) -> bool {
        self.waiting == 0
    }

    /// Returns the number of a flow's waiting I/Os.
    pub fn waiting(&self, flow: FlowId) -> usize {
        self.flows.get(flow.0 as usize).map_or(0, |flow| flow.waiting.len())
    }

    /// Returns the time from which `pop` will return an I/O; time 0 if it would return one now.
    /// Returns `None` if no I/O waits.
    pub fn next_at(&self) -> Option<Instant> {
        match self.by_shares.first() {
            Some(_) => Some(Instant(0)),
            None => self.held.first().map(|(at, _)| Instant(at)),
        }
    }

    /// Puts a flow into the heaps of its state, after its first I/O or its entitlement changed.
    fn place(&mut self, now: Instant, flow: FlowId) {
        let allowed_at = self.flows[flow.0 as usize].allowed_at;
        if allowed_at > now.0 {
            self.by_shares.remove(flow.0);
            self.by_reservation.remove(flow.0);
            self.held.set(flow.0, allowed_at);
        } else {
            self.held.remove(flow.0);
            self.admit(flow);
        }
    }

    fn admit(&mut self, flow: FlowId) {
        let it = &self.flows[flow.0 as usize];
        self.by_shares.set(flow.0, it.shared_at);
        if it.entitlement.reservation > 0 {
            self.by_reservation.set(flow.0, it.reserved_at);
        } else {
            self.by_reservation.remove(flow.0);
        }
    }

    fn flow(&mut self, flow: FlowId) -> &mut Flow<T> {
        let index = flow.0 as usize;
        if self.flows.len() <= index {
            self.flows.resize_with(index + 1, Flow::new);
        }
        &mut self.flows[index]
    }
}
