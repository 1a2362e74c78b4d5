//! This host as a member of a cluster: its lease, and which disks it holds in etcd (docs/decisions/0019).
//!
//! The decisions are in [`hob_engine::cluster`]; here is what asks etcd and tells them what it said. The lease is kept by a thread of its
//! own ([`keep`]), so that nothing else the daemon does makes it late. Whoever opens disks asks here first ([`Cluster::take`]).

mod batched_reader;
mod clock;
mod copies;
mod holding;
mod identity;
mod keep;
mod learnt;
mod moves;
mod store;
mod taking;
mod view;
mod wants;
mod watcher;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::Context;
use hob_control::etcd::{Etcd, EtcdError};
use hob_control::{ClientTls, check_name};
use hob_engine::cluster::{Found, LeaseId, Member, OwnershipRecord, OwnershipSnapshot, OwnershipState, Txn};
use hob_engine::units::Instant;
use tokio::sync::{Mutex as AsyncMutex, Semaphore, watch};

use batched_reader::BatchedReader;
pub(crate) use clock::{LeaseClock, now};
pub(crate) use copies::Unsaid;
pub(crate) use identity::{host_name, identity};
use keep::Keeping;
pub(crate) use learnt::{DiskLearnt, HostLearnt};
pub(crate) use moves::{Order, OrderFound};
use store::{About, Names, StoreError};
pub(crate) use taking::{FailoverCandidate, OtherOwner, TakeError, Taken, Took};
use watcher::ClusterWatcher;

use super::config::ClusterConfig;
use super::shard_api::ShardHandle;

/// Who wants a disk waits so long for this host to become a member.
const JOINING_MAX: Duration = Duration::from_secs(3);

/// One question about a disk.
const QUESTION_MAX: Duration = Duration::from_secs(2);

/// A listing.
const LIST_MAX: Duration = Duration::from_secs(10);

/// Goes at a disk that others go at too, or after answers that were lost.
const GOES: usize = 5;

/// Disks that are being taken at a time: a thousand at once would make the lease's renewals wait.
const COMMITS_MAX: usize = 16;

/// The lease that this host has, for as long as it has it.
#[derive(Clone, Debug)]
pub(crate) struct Membership {
    lease: LeaseId,
    clock: Arc<LeaseClock>,
}

/// What is known of one disk.
#[derive(Debug)]
struct DiskMembership {
    seat: OwnershipState,
    /// As it was last seen or put, while this host holds it.
    title: Option<Found<OwnershipRecord>>,
    /// Under which lease that is.
    lease: LeaseId,
    /// Something was asked for and not answered: it may still happen, until something else has.
    in_doubt: bool,
    /// That nothing is dirty is among what was asked for so.
    clean_in_doubt: bool,
    /// It was served here, another host has it, and nothing more is acknowledged of it in this life.
    lost: bool,
}

/// See the module's text.
#[derive(Debug)]
pub(crate) struct Cluster {
    me: Member,
    config: ClusterConfig,
    names: Names,
    etcd: Arc<Etcd>,
    keeping: Arc<Keeping>,
    membership: watch::Receiver<Option<Membership>>,
    places: Mutex<BTreeMap<String, Arc<AsyncMutex<DiskMembership>>>>,
    /// Disks to be taken whatever is lost by it, once, and until when that counts.
    forced: Mutex<BTreeMap<String, Instant>>,
    /// Of datastores that are shared.
    heard: wants::Heard,
    reader: BatchedReader,
    watcher: ClusterWatcher,
    commits: Semaphore,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Cluster {
    /// Becomes a member, in time. `directory` is where this host's identity is kept. The lease is renewed while `shards` respond.
    pub(crate) fn join(
        config: &ClusterConfig,
        directory: &Path,
        shards: &[ShardHandle],
    ) -> anyhow::Result<Arc<Cluster>> {
        let name = config.host.clone().unwrap_or_else(host_name);
        check_name(&name).with_context(|| {
            format!("'{name}' cannot be this host's name in the cluster; name another with host in [cluster]")
        })?;
        let me = Member { name, id: identity(directory)? };
        let watcher = ClusterWatcher::new(&me, config.settle_seconds * 1_000_000_000);
        let tls = || -> anyhow::Result<Option<ClientTls>> {
            let Some(ca) = &config.ca else { return Ok(None) };
            let own = config.cert.as_deref().zip(config.key.as_deref());
            Ok(Some(ClientTls::load(ca, own)?))
        };
        let etcd = Arc::new(Etcd::new(config.endpoints().map_err(anyhow::Error::msg)?, tls()?));
        let names = Names::new(&config.prefix);
        let about = About { address: config.address.clone(), ..About::default() };
        let (lease, settle) = (config.lease_seconds, config.settle_seconds);
        let (keeping, membership) =
            Keeping::start(me.clone(), (lease, settle), etcd.clone(), names.clone(), about, shards.to_vec())?;
        Ok(Arc::new(Cluster {
            me,
            config: config.clone(),
            names,
            etcd,
            keeping,
            membership,
            places: Mutex::default(),
            forced: Mutex::default(),
            heard: wants::Heard::default(),
            reader: BatchedReader::default(),
            watcher,
            commits: Semaphore::new(COMMITS_MAX),
        }))
    }

    /// Tells two clusters apart, for hosts that want to know whether they are in one.
    pub(crate) fn identity(&self) -> Option<String> {
        self.etcd.id().map(|id| format!("{id:x}{}", self.config.prefix.trim_end_matches('/')))
    }

    /// Hears of memberships that come and go.
    pub(crate) fn memberships(&self) -> watch::Receiver<Option<Membership>> {
        self.membership.clone()
    }

    /// What this host says of itself from now on.
    pub(crate) fn set_pools(&self, pools: Vec<hob_control::ClusterPool>) {
        self.keeping.set_about(About { address: self.config.address.clone(), pools });
    }

    fn place(&self, disk: &str) -> Arc<AsyncMutex<DiskMembership>> {
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
        lock(&self.places).entry(disk.to_owned()).or_insert_with(new).clone()
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
                Err(TakeError::Unknown(format!("this host is no member of its cluster yet: {why}")))
            }
        }
    }

    /// What the title says now, of a disk that was held.
    async fn look_again(&self, place: &mut DiskMembership, disk: &str) -> Result<(), StoreError> {
        let look = self.look(disk).await?;
        let is_held = look.hold.is_some_and(|hold| hold.lease == place.lease && hold.value.id == self.me.id);
        // Also of a disk that is adopted, whose title is another's at first.
        place.title = look.title.filter(|_| is_held);
        Ok(())
    }

    /// Asks for something of this disk. Every such question puts what it depends on anew: once one has happened, those before do not any more.
    async fn commit(&self, place: &mut DiskMembership, txn: &Txn) -> Result<Option<u64>, EtcdError> {
        let (conditions, changes) = self.names.txn(txn, &About::default());
        let answer = self.etcd.txn(&conditions, &changes, QUESTION_MAX).await;
        match &answer {
            Ok(Some(_)) => (place.in_doubt, place.clean_in_doubt) = (false, false),
            Ok(None) => {}
            Err(_) => place.in_doubt = true,
        }
        answer
    }

    /// The lease ends with the process, or at once.
    pub(crate) async fn end(&self, is_over: bool) {
        let keeping = self.keeping.clone();
        let ended = tokio::task::spawn_blocking(move || keeping.stop(is_over));
        let _ = tokio::time::timeout(Duration::from_secs(5), ended).await;
    }
}
