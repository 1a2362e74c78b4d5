//! Watches etcd for disks that this host waits for, and for orders to move disks
//! ([`Cluster::hear`]). A host *waits for* a disk while the host is configured to serve the disk
//! and another host owns it. From time to time the host tries to take the disk. [`Waiting`]
//! determines the time of each attempt ([`Cluster::to_try`]).

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use hob_control::etcd::{EtcdError, EtcdEvent};
use hob_engine::cluster::{Member, OwnershipSnapshot, Tried, Waiting};
use hob_engine::units::Instant;
use tokio::sync::Notify;

use super::{Cluster, OtherOwner, QUESTION_MAX, TakeError, Took, lock};
use crate::lease_clock::now;

/// Pause before the next watch on etcd, if a watch has ended or could not start.
const AGAIN: Duration = Duration::from_secs(1);

/// Interval at which a host that is not a member of the cluster checks whether it has become one.
const IDLE: Duration = Duration::from_secs(1);

/// Maximum sleep before the next search for disks that this host should try to take, nanoseconds.
const SLEEP_NS_MAX: u64 = 60_000_000_000;

/// Watches etcd for waiting disks and orders; see the module's text.
#[derive(Debug)]
pub(super) struct ClusterWatcher {
    waiting: Mutex<Waiting>,
    /// Wakes [`Cluster::something_to_try`]: the next attempt to take a disk may be due earlier than
    /// before.
    sooner: Notify,
    /// True while etcd sends notifications.
    hears: AtomicBool,
    /// Wakes [`Cluster::orders_changed`]: orders to move disks may have changed.
    orders: Notify,
}

impl ClusterWatcher {
    pub(super) fn new(me: &Member, settle_ns: u64) -> ClusterWatcher {
        ClusterWatcher {
            waiting: Mutex::new(Waiting::new(me, settle_ns)),
            sooner: Notify::new(),
            hears: AtomicBool::new(false),
            orders: Notify::new(),
        }
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        lock(&self.waiting)
    }

    pub(super) fn gone(&self, disk: &str) -> Option<(u64, Instant)> {
        self.waiting().gone(disk)
    }

    pub(super) fn has_moved(&self, disk: &str, title_revision: u64) -> bool {
        self.waiting().has_moved(disk, title_revision)
    }

    pub(super) fn looked(&self, disk: &str, look: &OwnershipSnapshot) {
        self.waiting().handle_look(disk, look);
    }

    pub(super) fn tried(&self, disk: &str, taken: &Result<Took, TakeError>) {
        let tried = match taken {
            Ok(_) => Tried::Taken,
            Err(TakeError::Unknown(_)) => Tried::Unknown,
            // The acquisition has already recorded this result with its time, by `settles`.
            Err(TakeError::OtherOwner { how: OtherOwner::Settling, .. }) => return,
            Err(TakeError::OtherOwner { .. }) => Tried::OtherOwner,
        };
        self.waiting().handle_tried(now(), disk, tried);
        self.sooner.notify_one();
    }

    pub(super) fn settles(&self, disk: &str, at: Instant) {
        self.waiting().handle_tried(now(), disk, Tried::Settles(at));
        self.sooner.notify_one();
    }
}

impl Cluster {
    /// Returns the disks that this host should try to take now. `all` has the disks that this host
    /// waits for.
    pub(crate) fn to_try(&self, all: &[String]) -> Vec<String> {
        let mut waiting = self.watcher.waiting();
        let now = now();
        waiting.handle_waits(now, all.iter().map(String::as_str));
        std::iter::from_fn(|| waiting.poll(now)).collect()
    }

    /// Records that this host did not try to take a disk, because the disk is moving to another
    /// host.
    pub(crate) fn try_later(&self, disk: &str) {
        self.watcher.tried(disk, &Err(TakeError::Unknown(String::new())));
    }

    /// Waits until an attempt to take a disk is due.
    pub(crate) async fn something_to_try(&self) {
        loop {
            let due = self.watcher.waiting().poll_timeout();
            let left_ns = due.map_or(SLEEP_NS_MAX, |at| at.nanos_since(now()));
            if left_ns == 0 {
                return;
            }
            let sleep = tokio::time::sleep(Duration::from_nanos(left_ns.min(SLEEP_NS_MAX)));
            tokio::select! {
                () = sleep => {}
                () = self.watcher.sooner.notified() => {}
            }
        }
    }

    /// Returns true if etcd notifies this host of orders to move disks. Otherwise this host must
    /// read the orders regularly.
    pub(crate) fn hears_of_orders(&self) -> bool {
        self.watcher.hears.load(Ordering::Relaxed)
    }

    /// Waits until orders may have changed.
    pub(crate) async fn orders_changed(&self) {
        self.watcher.orders.notified().await;
    }

    /// Handles notifications of etcd while this host is a member. Never returns.
    pub(crate) async fn hear(&self) {
        let mut hears_not = None;
        loop {
            if self.membership.borrow().is_none() {
                tokio::time::sleep(IDLE).await;
                continue;
            }
            let why = match self.hear_until_it_ends(&mut hears_not).await {
                Ok(()) => continue,
                Err(error) => error.to_string(),
            };
            if hears_not.is_none() {
                tracing::info!(
                    "cluster: etcd sends no notifications: {why}; checking the disks periodically instead"
                );
            }
            hears_not = Some(why);
            tokio::time::sleep(AGAIN).await;
        }
    }

    async fn hear_until_it_ends(&self, hears_not: &mut Option<String>) -> Result<(), EtcdError> {
        let [titles, holds] = self.names.titles_and_holds();
        let moves = self.names.moves();
        let mut membership = self.membership.clone();
        membership.mark_unchanged();
        let mut watch = self.etcd.watch(&[&titles, &moves], &[&holds], QUESTION_MAX).await?;
        if hears_not.take().is_some() {
            tracing::info!("cluster: watching etcd for changes");
        }
        self.set_hearing(true);
        let ended = loop {
            let events = tokio::select! {
                events = watch.next() => events,
                // Etcd or this host was offline, so events may be missing.
                _ = membership.changed() => break Ok(()),
            };
            match events {
                Ok(events) => self.understand(&events),
                Err(error) => break Err(error),
            }
        };
        self.set_hearing(false);
        ended
    }

    fn set_hearing(&self, hears: bool) {
        self.watcher.waiting().handle_hearing(now(), hears);
        self.watcher.hears.store(hears, Ordering::Relaxed);
        self.watcher.sooner.notify_one();
        // Orders may have changed while etcd sent no notifications.
        self.watcher.orders.notify_one();
    }

    fn understand(&self, events: &[EtcdEvent]) {
        let now = now();
        let mut waiting = self.watcher.waiting();
        for event in events {
            if let Some((disk, news)) = self.names.news(event) {
                waiting.handle_news(now, disk, event.revision, news);
            }
        }
        drop(waiting);
        self.watcher.sooner.notify_one();
        if events.iter().any(|event| self.names.is_of_order(event)) {
            self.watcher.orders.notify_one();
        }
    }
}
