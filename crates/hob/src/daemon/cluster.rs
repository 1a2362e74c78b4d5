//! This host as a member of a cluster: its lease, and which disks it holds in etcd (docs/decisions/0019).
//!
//! The decisions are in [`hob_engine::cluster`]; here is what asks etcd and tells them what it said. The lease is kept by a thread of its
//! own ([`keep`]), so that nothing else the daemon does makes it late. Whoever opens disks asks here first ([`Cluster::take`]).

mod clock;
mod copies;
mod keep;
mod learnt;
mod looks;
mod moves;
mod outlook;
mod store;
mod wants;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::Context;
use hob_control::etcd::{Etcd, EtcdError};
use hob_control::{
    ClientTls, Cluster as View, ClusterDisk, ClusterDiskState, ClusterHost, ClusterState, check_name,
};
use hob_engine::cluster::{
    Adopting, Found, LeaseId, Look, Member, Refusal as Why, Seat, SecondCopy, Taking, Title, Txn, Verdict,
    Wish,
};
use hob_engine::units::Instant;
use tokio::sync::{Mutex as AsyncMutex, Semaphore, watch};

pub(crate) use clock::{LeaseClock, now};
pub(crate) use copies::Unsaid;
use keep::Keeping;
pub(crate) use learnt::{DiskLearnt, HostLearnt};
use looks::Looks;
pub(crate) use moves::{Order, OrderFound};
use outlook::Outlook;
use store::{About, Names, StoreError};

use super::config::ClusterConfig;
use super::state::CacheOwner;

/// Who wants a disk waits so long for this host to become a member.
const JOINING_MAX: Duration = Duration::from_secs(3);

/// One question about a disk.
const QUESTION_MAX: Duration = Duration::from_secs(2);

/// The word of an operator counts no longer than settling and this, nanoseconds.
const FORCE_NS_MAX: u64 = 10_000_000_000;

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

/// A disk that this host holds.
#[derive(Debug)]
pub(crate) struct Taken {
    /// Kept with what flash has of the disk.
    pub(crate) generation: u64,
    /// Until when anything may be acknowledged.
    pub(crate) clock: Arc<LeaseClock>,
    /// Who had it since flash was filled: nothing there counts.
    pub(crate) foreign: Option<String>,
    /// Where it was dirty, the backing has had it since, and has newer things now: whoever saw to that.
    pub(crate) outdated_by: Option<String>,
    /// What the title said of dirty data here before.
    dirty_before: bool,
}

/// What became of an attempt to have a disk.
#[derive(Debug)]
pub(crate) enum Took {
    /// It is this host's.
    Taken(Taken),
    /// It is held, so that its second copy, which is here, is brought to the backing first.
    ToAdopt(ToAdopt),
}

/// A disk whose owner vanished and whose dirty data has a second copy here.
#[derive(Debug)]
pub(crate) struct ToAdopt {
    /// Where.
    pub(crate) copy: SecondCopy,
    /// Whose data it is.
    pub(crate) from: Member,
    /// Until when anything may be sent to the backing.
    pub(crate) clock: Arc<LeaseClock>,
}

/// Why a disk cannot be taken.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TakeError {
    /// Another host has it, or what it has cannot be done without.
    #[error("{why}")]
    Elsewhere {
        /// In words.
        why: String,
        /// What to do.
        hint: String,
        /// What there is to it.
        how: Elsewhere,
    },
    /// Nobody knows: ask again later.
    #[error("{0}")]
    Unknown(String),
}

/// How a disk is that cannot be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Elsewhere {
    /// Another host serves it: all is well.
    Served,
    /// Its owner vanished, and what that had sent may still be on its way.
    Settling,
    /// It cannot be done without what another host has of it.
    Needed,
}

/// What is known of one disk.
#[derive(Debug)]
struct Place {
    seat: Seat,
    /// As it was last seen or put, while this host holds it.
    title: Option<Found<Title>>,
    /// Under which lease that is.
    lease: LeaseId,
    /// Something was asked for and not answered: it may still happen, until something else has.
    in_doubt: bool,
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
    places: Mutex<BTreeMap<String, Arc<AsyncMutex<Place>>>>,
    /// Disks to be taken whatever is lost by it, once, and until when that counts.
    forced: Mutex<BTreeMap<String, Instant>>,
    /// Of datastores that are shared.
    heard: wants::Heard,
    looks: Looks,
    outlook: Outlook,
    commits: Semaphore,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Cluster {
    /// Becomes a member, in time. `directory` is where this host's identity is kept.
    pub(crate) fn join(config: &ClusterConfig, directory: &Path) -> anyhow::Result<Arc<Cluster>> {
        let name = config.host.clone().unwrap_or_else(host_name);
        check_name(&name).with_context(|| {
            format!("'{name}' cannot be this host's name in the cluster; name another with host in [cluster]")
        })?;
        let me = Member { name, id: identity(directory)? };
        let outlook = Outlook::new(&me, config.settle_seconds * 1_000_000_000);
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
            Keeping::start(me.clone(), lease, settle, etcd.clone(), names.clone(), about)?;
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
            looks: Looks::default(),
            outlook,
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

    /// A disk may be taken once, whatever is lost by it, now or when it has settled.
    pub(crate) fn force(&self, disk: &str) {
        let until = now() + self.config.settle_seconds * 1_000_000_000 + FORCE_NS_MAX;
        lock(&self.forced).insert(disk.to_owned(), until);
    }

    fn place(&self, disk: &str) -> Arc<AsyncMutex<Place>> {
        let new = || {
            let seat = Seat::new(disk.to_owned(), self.config.settle_seconds * 1_000_000_000);
            Arc::new(AsyncMutex::new(Place {
                seat,
                title: None,
                lease: LeaseId(0),
                in_doubt: false,
                lost: false,
            }))
        };
        lock(&self.places).entry(disk.to_owned()).or_insert_with(new).clone()
    }

    async fn look(&self, disk: &str) -> Result<Look, StoreError> {
        self.looks.look(&self.names, &self.etcd, disk, QUESTION_MAX).await
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

    /// Takes a disk. `known` is the generation that is kept with what flash has of it; `dirty`: something of it may be dirty, now or soon.
    pub(crate) async fn take(&self, disk: &str, known: Option<u64>, dirty: bool) -> Result<Took, TakeError> {
        let took = self.take_as_it_is(disk, known, dirty).await;
        self.outlook.tried(disk, &took);
        took
    }

    async fn take_as_it_is(&self, disk: &str, known: Option<u64>, dirty: bool) -> Result<Took, TakeError> {
        let membership = self.member().await?;
        let place = self.place(disk);
        let mut place = place.lock().await;
        place.lost = false;
        let force = lock(&self.forced).get(disk).is_some_and(|until| now() < *until);
        let wish = Wish { known, dirty, force, keeps_copy: false };
        let taken = self.go(&membership, &mut place, disk, wish, false).await;
        if !matches!(
            taken,
            Err(TakeError::Elsewhere { how: Elsewhere::Settling, .. } | TakeError::Unknown(_))
        ) {
            lock(&self.forced).remove(disk);
        }
        taken
    }

    /// Takes a disk that is served, under the lease that there is now.
    pub(crate) async fn take_again(
        &self,
        disk: &str,
        known: Option<u64>,
        dirty: bool,
    ) -> Result<Taken, TakeError> {
        let membership = self.member().await?;
        let place = self.place(disk);
        let mut place = place.lock().await;
        let wish = Wish { known, dirty, force: false, keeps_copy: true };
        let took = match self.go(&membership, &mut place, disk, wish, true).await {
            Ok(Took::Taken(taken)) => Ok(taken),
            Ok(Took::ToAdopt(to_adopt)) => Err(elsewhere(disk, Some(&to_adopt.from), "has had it")),
            Err(error) => Err(error),
        };
        place.lost = matches!(took, Err(TakeError::Elsewhere { .. }));
        took
    }

    /// Is a disk held under the lease that there is now?
    pub(crate) async fn is_held(&self, disk: &str) -> bool {
        let Some(membership) = self.membership.borrow().clone() else { return false };
        let place = self.place(disk);
        let place = place.lock().await;
        place.title.is_some() && place.lease == membership.lease
    }

    async fn go(
        &self,
        membership: &Membership,
        place: &mut Place,
        disk: &str,
        wish: Wish,
        goes_on: bool,
    ) -> Result<Took, TakeError> {
        let lost = |error: StoreError| TakeError::Unknown(error.to_string());
        let mut trouble = "others go at it too".to_owned();
        for _ in 0..GOES {
            let look = self.look(disk).await.map_err(lost)?;
            let before = look.title.as_ref().map(|title| title.value.clone());
            let had_it = before.as_ref().map(|title| &title.member);
            self.outlook.looked(disk, &look);
            if let Some((title_revision, at)) = self.outlook.gone(disk) {
                place.seat.saw_gone(title_revision, at);
            }
            let verdict = place.seat.decide(now(), &self.me, membership.lease, &look, wish);
            let mut outdated_by = None;
            let (title, continued) = match verdict {
                // Whatever was asked for and may still happen does not any more, once the title has been put anew.
                Verdict::Mine(title) if place.in_doubt => {
                    let txn = place.seat.mark(membership.lease, &title, title.value.dirty);
                    if let Err(error) = self.commit(place, &txn).await {
                        trouble = error.to_string();
                    }
                    continue;
                }
                Verdict::Mine(title) => {
                    let continued = wish.known == Some(title.value.generation);
                    (title, continued)
                }
                Verdict::Take(taking) if goes_on && !taking.continued => {
                    return Err(elsewhere(disk, had_it, "has had it"));
                }
                Verdict::Adopt(adopting) if goes_on => {
                    return Err(elsewhere(disk, Some(&adopting.title.value.member), "has had it"));
                }
                Verdict::Adopt(adopting) => {
                    let Adopting { txn, title, copy } = *adopting;
                    match self.commit(place, &txn).await {
                        Ok(Some(revision)) => {
                            let title = Found { revision, ..title };
                            let from = title.value.adopts.as_ref().map_or(&title.value.member, |it| &it.by);
                            let from = from.clone();
                            tracing::info!(
                                "{disk} is held for the second copy of what {} had dirty",
                                from.name
                            );
                            (place.title, place.lease) = (Some(title), membership.lease);
                            let clock = membership.clock.clone();
                            return Ok(Took::ToAdopt(ToAdopt { copy, from, clock }));
                        }
                        Ok(None) => continue,
                        Err(error) => {
                            trouble = error.to_string();
                            continue;
                        }
                    }
                }
                Verdict::Take(taking) => {
                    let Taking { txn, title, continued, lost_by, outdated_by: by } = *taking;
                    outdated_by = by.map(|by| by.name);
                    if let Some(by) = &lost_by {
                        tracing::error!(
                            "{disk} is taken by force: what {} has of it in flash and not on the backing is LOST",
                            by.name
                        );
                    }
                    let turn = self.commits.acquire().await;
                    let seen = look.title.as_ref().map_or(0, |title| title.revision);
                    if self.outlook.has_moved(disk, seen) {
                        // While others were waited for.
                        continue;
                    }
                    let committed = self.commit(place, &txn).await;
                    drop(turn);
                    match committed {
                        Ok(Some(revision)) => {
                            (Found { value: title, revision, lease: LeaseId(0) }, continued)
                        }
                        Ok(None) => continue,
                        Err(error) => {
                            // It may have happened: the next look tells.
                            trouble = error.to_string();
                            continue;
                        }
                    }
                }
                Verdict::Wait(until) => {
                    self.outlook.settles(disk, until);
                    let host = before.as_ref().map_or("?", |title| &title.member.name);
                    let seconds = self.config.settle_seconds;
                    let why =
                        format!("{host} had it and vanished; it is taken {seconds} s after that was seen");
                    return match goes_on {
                        true => Err(elsewhere(disk, had_it, "has had it")),
                        false => Err(TakeError::Elsewhere {
                            why,
                            hint: "wait".to_owned(),
                            how: Elsewhere::Settling,
                        }),
                    };
                }
                Verdict::Refused(why) => return Err(refused(disk, &why)),
            };
            if goes_on && !continued {
                return Err(elsewhere(disk, had_it, "has had it"));
            }
            let mine = before.as_ref().is_some_and(|title| title.member.id == self.me.id);
            let foreign = (!continued).then(|| match &before {
                Some(title) if title.member.id != self.me.id => format!("{} had it", title.member.name),
                _ => "other hosts may have had it".to_owned(),
            });
            let taken = Taken {
                generation: title.value.generation,
                clock: membership.clock.clone(),
                foreign,
                outdated_by,
                dirty_before: mine && before.is_some_and(|title| title.dirty),
            };
            if place.lease != membership.lease || place.title.is_none() {
                tracing::info!("{disk} is held in generation {}", taken.generation);
            }
            (place.title, place.lease) = (Some(title), membership.lease);
            return Ok(Took::Taken(taken));
        }
        Err(TakeError::Unknown(format!("it could not be taken: {trouble}")))
    }

    /// Gives a disk back that is not served any more. `dirty` says whether data of it stays in this host's flash.
    pub(crate) async fn give_back(&self, disk: &str, dirty: bool) -> Result<(), String> {
        let place = self.place(disk);
        let mut place = place.lock().await;
        let mut trouble = String::new();
        for _ in 0..GOES {
            let Some(title) = place.title.clone() else { return Ok(()) };
            let is_adopted = title.value.member.id == self.me.id && title.value.adopts.is_none();
            let txn = match is_adopted {
                true => place.seat.give_back(place.lease, &title, dirty),
                // What there is to adopt of it stays to be adopted.
                false => place.seat.leave_alone(place.lease, &title),
            };
            match self.commit(&mut place, &txn).await {
                Ok(Some(_)) => {
                    tracing::info!("{disk} is given back in generation {}", title.value.generation);
                    place.title = None;
                    return Ok(());
                }
                Ok(None) => self.look_again(&mut place, disk).await.map_err(|error| error.to_string())?,
                Err(error) => {
                    trouble = error.to_string();
                    if let Err(error) = self.look_again(&mut place, disk).await {
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

    /// Gives a disk back of which this host keeps nothing, whether it holds it now or only had it last.
    pub(crate) async fn give_up(&self, disk: &str, known: Option<u64>) -> Result<(), String> {
        self.give_back(disk, false).await?;
        let look = self.look(disk).await.map_err(|error| error.to_string())?;
        let is_ours = |title: &Found<Title>| title.value.member.id == self.me.id && title.value.dirty;
        if look.hold.is_none() && look.title.as_ref().is_some_and(is_ours) {
            self.take(disk, known, false).await.map_err(|error| error.to_string())?;
            self.give_back(disk, false).await?;
        }
        Ok(())
    }

    /// Says whether dirty data may be in this host's flash, if that is not said already. In effect when it returns.
    pub(crate) async fn mark(&self, disk: &str, dirty: bool) -> Result<(), String> {
        let place = self.place(disk);
        let mut place = place.lock().await;
        let mut trouble = "the disk is not held".to_owned();
        for _ in 0..GOES {
            let Some(title) = place.title.clone() else { return Err(trouble) };
            if title.value.dirty == dirty && !place.in_doubt {
                return Ok(());
            }
            let txn = place.seat.mark(place.lease, &title, dirty);
            match self.commit(&mut place, &txn).await {
                Ok(Some(revision)) => {
                    // Where nothing is dirty, nobody has a copy of it.
                    let copy = title.value.copy.clone().filter(|_| dirty);
                    let value = Title { dirty, copy, ..title.value };
                    place.title = Some(Found { value, revision, lease: LeaseId(0) });
                    return Ok(());
                }
                Ok(None) => {}
                Err(error) => trouble = error.to_string(),
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

    /// What the title says now, of a disk that was held.
    async fn look_again(&self, place: &mut Place, disk: &str) -> Result<(), StoreError> {
        let look = self.look(disk).await?;
        let is_held = look.hold.is_some_and(|hold| hold.lease == place.lease && hold.value.id == self.me.id);
        // Also of a disk that is adopted, whose title is another's at first.
        place.title = look.title.filter(|_| is_held);
        Ok(())
    }

    /// Asks for something of this disk. Every such question puts what it depends on anew: once one has happened, those before do not any more.
    async fn commit(&self, place: &mut Place, txn: &Txn) -> Result<Option<u64>, EtcdError> {
        let (conditions, changes) = self.names.txn(txn, &About::default());
        let answer = self.etcd.txn(&conditions, &changes, QUESTION_MAX).await;
        match &answer {
            Ok(Some(_)) => place.in_doubt = false,
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

    /// How this host is, as a member.
    pub(crate) fn view(&self) -> View {
        let membership = self.membership.borrow().clone();
        let left_ns = membership.as_ref().map_or(0, |membership| membership.clock.left_ns(now()));
        let held = |place: &Arc<AsyncMutex<Place>>| {
            // One that is being worked at is counted next time.
            place.try_lock().is_ok_and(|place| place.title.is_some())
        };
        View {
            state: match (&membership, left_ns) {
                (None, _) => ClusterState::Joining,
                (Some(_), 0) => ClusterState::Suspended,
                _ => ClusterState::Member,
            },
            host: self.me.name.clone(),
            id: self.me.id.clone(),
            etcd: self.etcd.endpoints().iter().map(ToString::to_string).collect(),
            prefix: self.config.prefix.clone(),
            lease_seconds: self.config.lease_seconds,
            left_ms: left_ns / 1_000_000,
            disks_held: lock(&self.places).values().filter(|place| held(place)).count() as u64,
            why: self.keeping.trouble(),
        }
    }

    /// All members, by name.
    pub(crate) async fn hosts(&self) -> Result<Vec<ClusterHost>, EtcdError> {
        let mut hosts = self.names.hosts(&self.etcd, LIST_MAX).await?;
        for (_, _, by) in self.names.disks(&self.etcd, LIST_MAX).await? {
            let by = by.and_then(|by| hosts.iter_mut().find(|host| host.id == by.id));
            by.into_iter().for_each(|host| host.disks += 1);
        }
        Ok(hosts)
    }

    /// All disks that any host has or had, by name.
    pub(crate) async fn disks(&self) -> Result<Vec<ClusterDisk>, EtcdError> {
        let disk = |(name, title, by): (String, Title, Option<Member>)| ClusterDisk {
            name,
            state: match (&by, title.taken) {
                (Some(by), _) if title.adopts.is_some() || by.id != title.member.id => {
                    ClusterDiskState::Adopted
                }
                (Some(_), _) => ClusterDiskState::Held,
                (None, false) => ClusterDiskState::Free,
                (None, true) => ClusterDiskState::Vanished,
            },
            copy: title.copy.map(|copy| copy.member.name),
            host: by.unwrap_or(title.member).name,
            generation: title.generation,
            dirty: title.dirty,
        };
        Ok(self.names.disks(&self.etcd, LIST_MAX).await?.into_iter().map(disk).collect())
    }
}

fn elsewhere(disk: &str, member: Option<&Member>, what: &str) -> TakeError {
    let host = member.map_or("another host", |member| &member.name);
    TakeError::Elsewhere {
        why: format!("{host} {what} meanwhile"),
        hint: format!("'hob cluster disks' shows who has {disk}; it comes back by itself when it is free"),
        how: Elsewhere::Needed,
    }
}

fn refused(disk: &str, why: &Why) -> TakeError {
    match why {
        Why::Held(by, generation) => TakeError::Elsewhere {
            why: format!("{} has it (generation {generation})", by.name),
            hint: "it comes by itself when that host gives it back or vanishes".to_owned(),
            how: Elsewhere::Served,
        },
        Why::Dirty(by, generation) => TakeError::Elsewhere {
            why: format!(
                "data of it that is not on the backing may be in the flash of {} (generation {generation})",
                by.name
            ),
            hint: format!(
                "start that host again; if it never comes back, 'hob cluster take {disk} --force' goes on without that data"
            ),
            how: Elsewhere::Needed,
        },
    }
}

pub(crate) fn host_name() -> String {
    let name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    name.trim().to_owned()
}

/// This host's random identity, made when it is needed first.
pub(crate) fn identity(directory: &Path) -> anyhow::Result<String> {
    let path = directory.join("member");
    match fs::read_to_string(&path) {
        Ok(text) => {
            let id = text.trim();
            id.parse::<CacheOwner>().map_err(|_| {
                anyhow::anyhow!(
                    "{} has no identity in it; remove it only if no disk of the cluster has dirty data here",
                    path.display()
                )
            })?;
            Ok(id.to_owned())
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            let id = CacheOwner::random().to_string();
            let temporary = directory.join("member.new");
            let written = || -> std::io::Result<()> {
                fs::write(&temporary, format!("{id}\n"))?;
                fs::File::open(&temporary)?.sync_all()?;
                fs::rename(&temporary, &path)?;
                fs::File::open(directory)?.sync_all()
            };
            written().with_context(|| format!("cannot write {}", path.display()))?;
            Ok(id)
        }
        Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
    }
}
