//! Membership of this host in a cluster: the host's lease in etcd, and the disks that the host owns
//! according to etcd (docs/decisions/0019).
//!
//! [`hob_engine::cluster`] makes the decisions. This module calls etcd and passes on its responses.
//! A separate thread renews the lease ([`keep`]), so that no other work of the daemon delays it.
//! Code that opens disks calls [`Cluster::take`] first.

mod acquisition;
mod batched_reader;
mod copies;
mod datastore_reports;
mod holding;
mod identity;
mod lease_renewal;
mod moves;
mod placement_data;
mod store;
mod view;
mod watcher;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::Context;
use hob_control::check_name;
use hob_control::etcd::{Etcd, EtcdError};
use hob_engine::cluster::{Found, LeaseId, Member, OwnershipRecord, OwnershipSnapshot, OwnershipState, Txn};
use hob_engine::units::Instant;
use tokio::sync::{Mutex as AsyncMutex, OwnedMutexGuard, Semaphore, watch};

pub(crate) use acquisition::{FailoverCandidate, OtherOwner, TakeError, Taken, Took};
use batched_reader::BatchedReader;
pub(crate) use copies::Unsaid;
pub(crate) use holding::Release;
pub(crate) use identity::{host_name, identity};
use lease_renewal::LeaseRenewal;
pub(crate) use moves::{Order, OrderFound};
pub(crate) use placement_data::{DiskPlacement, HostPlacement};
use store::{About, Names, StoreError};
use watcher::ClusterWatcher;

use super::config::ClusterConfig;
use super::lease_clock::LeaseClock;
use super::shard_api::ShardHandle;

/// Maximum time that an attempt to acquire a disk waits for this host to become a member of the
/// cluster.
const JOINING_MAX: Duration = Duration::from_secs(3);

/// Maximum time for an etcd request about one disk.
const QUESTION_MAX: Duration = Duration::from_secs(2);

/// Maximum time for an etcd request that lists keys.
const LIST_MAX: Duration = Duration::from_secs(10);

/// Maximum number of attempts to change the keys of a disk. An attempt fails if another host
/// changes the keys at the same time, or if a response of etcd is lost.
const GOES: usize = 5;

/// Maximum number of disks acquired at the same time, because many concurrent requests to etcd
/// would delay the renewal of the host's lease.
const COMMITS_MAX: usize = 16;

/// This host's lease in etcd while the host is a member of the cluster.
#[derive(Clone, Debug)]
pub(crate) struct Membership {
    lease: LeaseId,
    clock: Arc<LeaseClock>,
}

/// Cluster state of one disk.
#[derive(Debug)]
struct DiskMembership {
    seat: OwnershipState,
    /// The disk's ownership record, as last read or written, while this host has the ownership
    /// lock.
    title: Option<Found<OwnershipRecord>>,
    /// The lease in etcd that the ownership lock is bound to.
    lease: LeaseId,
    /// True if a request to etcd had no response. The request may still take effect until a later
    /// request has succeeded.
    in_doubt: bool,
    /// True if this host has asked etcd to record that the disk has no dirty data, and it is
    /// unknown whether etcd did so.
    clean_in_doubt: bool,
    /// True if another host has acquired the disk while it was served here. This process
    /// acknowledges no further request of the disk.
    lost: bool,
}

/// This host as a member of a cluster; see the module's text.
#[derive(Debug)]
pub(crate) struct Cluster {
    me: Member,
    config: ClusterConfig,
    names: Names,
    etcd: Arc<Etcd>,
    keeping: Arc<LeaseRenewal>,
    membership: watch::Receiver<Option<Membership>>,
    places: Mutex<BTreeMap<String, Arc<AsyncMutex<DiskMembership>>>>,
    /// Disks that this host may take from another host once, even if that loses acknowledged data.
    /// The key is the disk's name, and the value is the time when this permission ends.
    forced: Mutex<BTreeMap<String, Instant>>,
    /// Reports of other hosts about shared datastores.
    heard: datastore_reports::ReportAges,
    reader: BatchedReader,
    watcher: ClusterWatcher,
    commits: Semaphore,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Cluster {
    /// Joins the cluster. A file in `directory` has this host's identity. The host's lease in etcd
    /// is renewed while the `shards` respond.
    pub(crate) fn join(
        config: &ClusterConfig,
        directory: &Path,
        shards: &[ShardHandle],
    ) -> anyhow::Result<Arc<Cluster>> {
        let name = config.host.clone().unwrap_or_else(host_name);
        check_name(&name).with_context(|| {
            format!(
                "'{name}' cannot be this host's name in the cluster; set another name with host in [cluster]"
            )
        })?;
        let me = Member { name, id: identity(directory)? };
        let watcher = ClusterWatcher::new(&me, config.settle_seconds * 1_000_000_000);
        let etcd = Arc::new(Etcd::new(config.endpoints().map_err(anyhow::Error::msg)?, config.tls()?));
        let names = Names::new(&config.prefix);
        let about = About { address: config.address.clone(), ..About::default() };
        let (lease, settle) = (config.lease_seconds, config.settle_seconds);
        let (keeping, membership) = LeaseRenewal::start(
            me.clone(),
            (lease, settle),
            etcd.clone(),
            names.clone(),
            about,
            shards.to_vec(),
        )?;
        Ok(Arc::new(Cluster {
            me,
            config: config.clone(),
            names,
            etcd,
            keeping,
            membership,
            places: Mutex::default(),
            forced: Mutex::default(),
            heard: datastore_reports::ReportAges::default(),
            reader: BatchedReader::default(),
            watcher,
            commits: Semaphore::new(COMMITS_MAX),
        }))
    }

    /// Returns the identity of the cluster. Hosts are in one cluster if they get the same value.
    pub(crate) fn identity(&self) -> Option<String> {
        self.etcd.id().map(|id| format!("{id:x}{}", self.config.prefix.trim_end_matches('/')))
    }

    /// Returns a channel that reports changes of the membership.
    pub(crate) fn memberships(&self) -> watch::Receiver<Option<Membership>> {
        self.membership.clone()
    }

    /// Sets what this host publishes about its pools.
    pub(crate) fn set_pools(&self, pools: Vec<hob_control::ClusterPool>) {
        self.keeping.set_about(About { address: self.config.address.clone(), pools });
    }

    async fn place(&self, disk: &str) -> OwnedMutexGuard<DiskMembership> {
        let new = || {
            let seat = OwnershipState::new(disk.to_owned(), self.config.settle_seconds * 1_000_000_000);
            Arc::new(AsyncMutex::new(DiskMembership {
                seat,
                title: None,
                lease: LeaseId(0),
                in_doubt: false,
                clean_in_doubt: false,
                lost: false,
            }))
        };
        let place = lock(&self.places).entry(disk.to_owned()).or_insert_with(new).clone();
        place.lock_owned().await
    }

    async fn look(&self, disk: &str) -> Result<OwnershipSnapshot, StoreError> {
        self.reader.look(&self.names, &self.etcd, disk, QUESTION_MAX).await
    }

    async fn member(&self) -> Result<Membership, TakeError> {
        let mut membership = self.membership.clone();
        let joined = tokio::time::timeout(JOINING_MAX, membership.wait_for(Option::is_some)).await;
        match joined {
            Ok(Ok(joined)) => Ok(joined.clone().expect("waited for")),
            _ => {
                let why = self.keeping.trouble().unwrap_or_else(|| "etcd does not answer".to_owned());
                Err(TakeError::Unknown(format!("this host is not a member of its cluster yet: {why}")))
            }
        }
    }

    /// Reads the keys of a disk again. Keeps the ownership record if this host still has the
    /// ownership lock, and forgets it otherwise.
    async fn look_again(&self, place: &mut DiskMembership, disk: &str) -> Result<(), StoreError> {
        let look = self.look(disk).await?;
        let is_held = look.hold.is_some_and(|hold| hold.lease == place.lease && hold.value.id == self.me.id);
        // The record of a disk in failover is kept in the same way, although it still names the
        // failed owner.
        place.title = look.title.filter(|_| is_held);
        Ok(())
    }

    /// Commits a transaction about this disk. Each transaction writes again all keys that it
    /// depends on. So an earlier transaction of unknown result cannot take effect after this one.
    /// If the caller stops waiting, the result is also unknown.
    async fn commit(&self, place: &mut DiskMembership, txn: &Txn) -> Result<Option<u64>, EtcdError> {
        let (conditions, changes) = self.names.txn(txn, &About::default());
        let was_in_doubt = std::mem::replace(&mut place.in_doubt, true);
        let answer = self.etcd.txn(&conditions, &changes, QUESTION_MAX).await;
        match &answer {
            Ok(Some(_)) => (place.in_doubt, place.clean_in_doubt) = (false, false),
            Ok(None) => place.in_doubt = was_in_doubt,
            Err(_) => {}
        }
        answer
    }

    /// Ends the membership. The host's lease in etcd expires some time after the process has ended,
    /// or is revoked immediately if `is_over`.
    pub(crate) async fn end(&self, is_over: bool) {
        let keeping = self.keeping.clone();
        let ended = tokio::task::spawn_blocking(move || keeping.stop(is_over));
        let _ = tokio::time::timeout(Duration::from_secs(5), ended).await;
    }
}
