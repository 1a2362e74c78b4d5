//! Renewal of this host's lease in etcd: the etcd calls of the lease state machine, in a separate
//! thread.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context;
use hob_control::etcd::{Etcd, EtcdError};
use hob_engine::cluster::{
    Answer, Ask, Event, Is, Key, LeaseId, LeaseManager, LeaseTerm, Member, Txn, Value,
};
use tokio::sync::{mpsc, watch};

use super::Membership;
use super::store::{About, Names};
use crate::lease_clock::{LeaseClock, now};
use crate::shard_api::ShardHandle;

/// Interval at which the published information about this host is compared with the current
/// information.
const ABOUT_EVERY: Duration = Duration::from_secs(5);

/// Maximum time to revoke the lease when the daemon ends.
const END_MAX: Duration = Duration::from_secs(2);

/// The thread that renews the lease.
#[derive(Debug)]
pub(super) struct LeaseRenewal {
    facts: Mutex<Facts>,
    /// Sending to this channel stops the thread. The sent value is true if the thread must revoke
    /// the lease.
    stop: mpsc::UnboundedSender<bool>,
    thread: Mutex<Option<std::thread::JoinHandle<()>>>,
}

#[derive(Debug)]
struct Facts {
    about: About,
    trouble: Option<String>,
}

impl LeaseRenewal {
    pub(super) fn start(
        me: Member,
        (lease_seconds, settle_seconds): (u64, u64),
        etcd: Arc<Etcd>,
        names: Names,
        about: About,
        shards: Vec<ShardHandle>,
    ) -> anyhow::Result<(Arc<LeaseRenewal>, watch::Receiver<Option<Membership>>)> {
        let (sender, membership) = watch::channel(None);
        let (stop, stopped) = mpsc::unbounded_channel();
        let facts = Mutex::new(Facts { about, trouble: None });
        let keeping = Arc::new(LeaseRenewal { facts, stop, thread: Mutex::new(None) });
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let keeper = LeaseManager::new(me, lease_seconds * 1_000_000_000);
        let mut task = Task {
            keeper,
            settle_ns: settle_seconds * 1_000_000_000,
            etcd,
            names,
            shards,
            shared: keeping.clone(),
            membership: sender,
            current: None,
            about_put: About::default(),
        };
        let thread = std::thread::Builder::new()
            .name("hob-lease".to_owned())
            .spawn(move || runtime.block_on(task.run(stopped)))
            .context("cannot start a thread")?;
        *keeping.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
        Ok((keeping, membership))
    }

    /// Stops the thread. Revokes the lease if `is_over`: no disk depends on the lease any more.
    pub(super) fn stop(&self, is_over: bool) {
        let _ = self.stop.send(is_over);
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            let _ = thread.join();
        }
    }

    pub(super) fn set_about(&self, about: About) {
        self.facts.lock().unwrap_or_else(PoisonError::into_inner).about = about;
    }

    /// Returns the error of the latest failed call to etcd, if no call has succeeded after it.
    pub(super) fn trouble(&self) -> Option<String> {
        self.facts.lock().unwrap_or_else(PoisonError::into_inner).trouble.clone()
    }

    fn set_trouble(&self, trouble: Option<String>) {
        let mut facts = self.facts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(why) = &trouble
            && facts.trouble.is_none()
        {
            tracing::warn!("cluster: {why}");
        }
        if trouble.is_none() && facts.trouble.is_some() {
            tracing::info!("cluster: etcd answers again");
        }
        facts.trouble = trouble;
    }

    fn about(&self) -> About {
        self.facts.lock().unwrap_or_else(PoisonError::into_inner).about.clone()
    }
}

struct Task {
    keeper: LeaseManager,
    settle_ns: u64,
    etcd: Arc<Etcd>,
    names: Names,
    shards: Vec<ShardHandle>,
    shared: Arc<LeaseRenewal>,
    membership: watch::Sender<Option<Membership>>,
    current: Option<Membership>,
    /// The information about this host that was published last.
    about_put: About,
}

impl Task {
    async fn run(&mut self, mut stopped: mpsc::UnboundedReceiver<bool>) {
        let mut about = tokio::time::interval(ABOUT_EVERY);
        about.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            // Events are handled before the next call to etcd, so that this host acknowledges no
            // requests after the end of its lease.
            self.tell();
            if let Some(call) = self.keeper.poll_call(now()) {
                let wait_max = Duration::from_nanos(self.keeper.call_ns_max());
                let answer = self.perform(&call.ask, wait_max).await;
                self.keeper.handle_answer(now(), call.number, answer);
                continue;
            }
            let due = self.keeper.poll_timeout().map_or(u64::MAX, |at| at.nanos_since(now()));
            let sleep = tokio::time::sleep(Duration::from_nanos(due.min(1_000_000_000)));
            tokio::select! {
                () = sleep => {}
                _ = about.tick() => self.put_about().await,
                is_over = stopped.recv() => return self.end(is_over.unwrap_or(false)).await,
            }
        }
    }

    fn tell(&mut self) {
        while let Some(event) = self.keeper.poll_event() {
            match event {
                Event::Joined(term) => {
                    tracing::info!("cluster: this host is a member, as {}", self.keeper.me().name);
                    let clock = Arc::new(LeaseClock::new(term.until, self.settle_ns));
                    self.set(Some(Membership { lease: term.lease, clock }));
                }
                Event::Renewed(LeaseTerm { lease, until }) => {
                    if let Some(current) = self.current.as_ref().filter(|current| current.lease == lease) {
                        let was_valid = current.clock.is_valid(now());
                        current.clock.extend(until);
                        if !was_valid && current.clock.is_valid(now()) {
                            tracing::warn!("cluster: the lease is valid again; waiting requests continue");
                        }
                    }
                }
                Event::Ended(lease) => {
                    if let Some(current) = self.current.as_ref().filter(|current| current.lease == lease) {
                        current.clock.end();
                        tracing::error!(
                            "cluster: the lease has ended; requests of the cluster's disks wait until this host \
                             acquires the disks again"
                        );
                        self.set(None);
                    }
                }
                Event::NameTaken(other) => self.shared.set_trouble(Some(format!(
                    "another host ({}) has the name {}; give one of them another name with host in [cluster]",
                    other.id, other.name
                ))),
            }
        }
    }

    fn set(&mut self, membership: Option<Membership>) {
        self.about_put = About::default();
        self.current = membership.clone();
        let _ = self.membership.send(membership);
    }

    /// Returns the first shard that does not respond within `wait_max`.
    async fn silent_shard(&self, wait_max: Duration) -> Option<usize> {
        let deadline = tokio::time::Instant::now() + wait_max;
        for (number, shard) in self.shards.iter().enumerate() {
            if !shard.responds(deadline.saturating_duration_since(tokio::time::Instant::now())).await {
                return Some(number);
            }
        }
        None
    }

    async fn perform(&mut self, ask: &Ask, wait_max: Duration) -> Answer {
        // The lease of a host with a hung shard is not renewed. The host cannot serve its disks, so
        // other hosts should acquire them.
        let begun = tokio::time::Instant::now();
        let needs_shards = matches!(ask, Ask::Grant(_) | Ask::Renew(_));
        if needs_shards && let Some(number) = self.silent_shard(wait_max / 2).await {
            self.shared
                .set_trouble(Some(format!("shard {number} does not respond; the lease is not renewed")));
            return Answer::Lost;
        }
        let wait_max = wait_max - begun.elapsed().min(wait_max / 2);
        let me = self.keeper.me().name.clone();
        let (etcd, names) = (&self.etcd, &self.names);
        let answer = match ask {
            Ask::Grant(lease_ns) => {
                etcd.grant(lease_ns / 1_000_000_000, wait_max).await.map(|(lease, seconds)| Answer::Granted {
                    lease: LeaseId(lease),
                    lease_ns: seconds.saturating_mul(1_000_000_000),
                })
            }
            Ask::LookUp => match names.look_up(etcd, &me, wait_max).await {
                Ok(found) => Ok(Answer::LookedUp(found)),
                Err(error) => {
                    self.shared.set_trouble(Some(error.to_string()));
                    return Answer::Lost;
                }
            },
            Ask::Register(txn) => {
                let about = self.shared.about();
                let (conditions, changes) = names.txn(txn, &about);
                let done = etcd.txn(&conditions, &changes, wait_max).await;
                if matches!(done, Ok(Some(_))) {
                    self.about_put = about;
                }
                done.map(|done| done.map_or(Answer::NotRegistered, |_| Answer::Registered))
            }
            Ask::Renew(LeaseId(lease)) => {
                let key = names.of(&Key::Host(me));
                let renewed = etcd.renew(*lease, &key, wait_max).await;
                renewed.map(|seconds| Answer::Renewed(seconds.saturating_mul(1_000_000_000)))
            }
            Ask::Revoke(LeaseId(lease)) => etcd.revoke(*lease, wait_max).await.map(|()| Answer::Done),
        };
        match answer {
            Ok(answer) => {
                if !matches!(ask, Ask::Grant(_) | Ask::LookUp) {
                    self.shared.set_trouble(None);
                }
                answer
            }
            Err(EtcdError::NoLease) => Answer::NoLease,
            Err(error) => {
                self.shared.set_trouble(Some(error.to_string()));
                Answer::Lost
            }
        }
    }

    /// Publishes the information about this host. A failure has no effect on the lease.
    async fn put_about(&mut self) {
        let about = self.shared.about();
        let Some(lease) = self.current.as_ref().map(|current| current.lease) else { return };
        if about == self.about_put {
            return;
        }
        let me = self.keeper.me().clone();
        let key = Key::Host(me.name.clone());
        let put = hob_engine::cluster::Change::Put(key.clone(), Value::Host(me), Some(lease));
        let txn = Txn { conditions: vec![(key, Is::Under(lease))], changes: vec![put] };
        let (conditions, changes) = self.names.txn(&txn, &about);
        let wait_max = Duration::from_nanos(self.keeper.call_ns_max()).min(Duration::from_millis(500));
        if matches!(self.etcd.txn(&conditions, &changes, wait_max).await, Ok(Some(_))) {
            self.about_put = about;
        }
    }

    async fn end(&mut self, is_over: bool) {
        if let Some(Membership { lease: LeaseId(lease), clock }) = self.current.take() {
            clock.end();
            if is_over && self.etcd.revoke(lease, END_MAX).await.is_err() {
                tracing::debug!("cannot revoke the lease; it expires by itself");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;
    use crate::fake_shard::FakeShard;

    fn task(address: &str, shards: Vec<ShardHandle>) -> Task {
        let me = Member { name: "a".to_owned(), id: "1".to_owned() };
        let (stop, _) = mpsc::unbounded_channel();
        let facts = Mutex::new(Facts { about: About::default(), trouble: None });
        Task {
            keeper: LeaseManager::new(me, 3_000_000_000),
            settle_ns: 1_000_000_000,
            etcd: Arc::new(Etcd::new(vec![address.parse().unwrap()], None)),
            names: Names::new("/test/"),
            shards,
            shared: Arc::new(LeaseRenewal { facts, stop, thread: Mutex::new(None) }),
            membership: watch::channel(None).0,
            current: None,
            about_put: About::default(),
        }
    }

    #[test]
    fn the_lease_is_asked_for_and_renewed_only_while_every_shard_responds() {
        let etcd = TcpListener::bind("127.0.0.1:0").unwrap();
        etcd.set_nonblocking(true).unwrap();
        crate::background::run_in_real_time(async {
            let ((first, _), (second, fake)) = (FakeShard::start(), FakeShard::start());
            let mut task = task(&format!("http://{}", etcd.local_addr().unwrap()), vec![first, second]);
            let wait_max = Duration::from_millis(300);
            fake.set_hangs(true);
            for ask in [Ask::Renew(LeaseId(1)), Ask::Grant(3_000_000_000)] {
                assert_eq!(task.perform(&ask, wait_max).await, Answer::Lost);
                assert!(etcd.accept().is_err(), "etcd was asked");
            }
            assert!(task.shared.trouble().unwrap().contains("shard 1 does not respond"));
            fake.set_hangs(false);
            // This etcd accepts the connection and does not answer. On a busy host, the shards may
            // answer later than `wait_max`, so the test tries longer limits.
            let mut is_asked = false;
            for factor in [1_u32, 10, 100] {
                if !is_asked {
                    let renewed = task.perform(&Ask::Renew(LeaseId(1)), factor * wait_max).await;
                    assert_eq!(renewed, Answer::Lost);
                    is_asked = etcd.accept().is_ok();
                }
            }
            assert!(is_asked, "etcd was not asked");
        });
    }
}
