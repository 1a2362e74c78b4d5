//! What this host borrows: devices of its pools that are on another host's flash (docs/decisions/0022).
//!
//! Such a device is a socket of this host, at which [`Line`] listens: whoever connects there is connected with the lender, inside
//! TLS, to the loan as it was when the device was opened. A lender that is silent, or fails, is given up in an order that no one may
//! change: first nobody believes what it has any more (the cluster's titles), then its I/Os fail. When it is back, the device is
//! made anew, and what is dirty gets second copies again.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hob_control::peer::{Peer, PeerError};
use hob_control::{
    Borrowed, ClientTls, DeviceState, Endpoint, Loan, LoanAsk, Peers, PoolChanged, Problem, Size,
};
use hob_engine::command::Segment;
use hob_engine::units::DeviceId;
use hob_storage::pool::{DeviceSpec, Overwrite};
use tokio::net::{UnixListener, UnixStream};

use super::api_error::{ApiError, ErrorKind};
use super::{DiskEntry, Manager};
use crate::daemon::nbd_listener::bind_socket;
use crate::daemon::relay;
use crate::daemon::socket_access::SocketAccess;
use crate::daemon::state::PeerState;

/// A lender answers a question within that, or is not there.
const ASK_MAX: Duration = Duration::from_secs(6);

/// Pause between two tries to have the cluster know that a copy is gone.
const SAY_EVERY: Duration = Duration::from_millis(500);

/// The sockets of borrowed devices, by their paths. Dropping a line ends it.
pub(super) type Lines = Mutex<BTreeMap<PathBuf, Line>>;

/// A socket that leads to a lender.
#[derive(Debug)]
pub(super) struct Line {
    to: PeerState,
    /// The loan that connections are to.
    pub(super) loan: Arc<Mutex<Option<Loan>>>,
    /// Held while the lender is asked whether it is back.
    asking: Arc<tokio::sync::Mutex<()>>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Line {
    fn drop(&mut self) {
        self.task.abort();
        let _ = std::fs::remove_file(&self.to.path);
    }
}

/// Where a lender's control API is, and what is shown to it.
#[derive(Clone, Debug)]
struct Lender {
    host: String,
    port: u16,
    tls: ClientTls,
    /// What this host is to it.
    me: String,
}

impl Lender {
    fn peer(&self) -> Peer {
        Peer::new(self.host.clone(), self.port, self.tls.clone())
    }

    /// Connects a shard, or whoever reads tables, with the loan. Ends when one of them leaves.
    async fn connect(self, loan: Arc<Mutex<Option<Loan>>>, here: UnixStream) {
        let epoch =
            loan.lock().unwrap_or_else(PoisonError::into_inner).as_ref().and_then(|loan| loan.epoch.clone());
        let Some(epoch) = epoch else { return };
        let path = format!("/v1/loans/{}/data?epoch={epoch}", self.me);
        match self.peer().data(&path).await {
            Ok(stream) => relay::relay(stream, here).await,
            Err(error) => tracing::debug!("no connection with {}:{}: {error}", self.host, self.port),
        }
    }
}

impl Manager {
    /// What this host calls itself to others.
    pub(super) fn own_name(&self) -> String {
        match self.cluster() {
            Some(cluster) => cluster.view().host,
            None => self.peer_name.get().cloned().unwrap_or_else(crate::daemon::cluster::host_name),
        }
    }

    /// What this host calls itself where it borrows, outside a cluster.
    pub(crate) fn set_peer_name(&self, name: Option<String>) {
        if let Some(name) = name {
            let _ = self.peer_name.set(name);
        }
    }

    fn lender(&self, to: &str) -> Result<Lender, ApiError> {
        let (host, port, tls) = self.other_daemon(to)?;
        let directory = &self.migration_transport()?.directory;
        let me = crate::daemon::cluster::identity(directory)
            .map_err(|error| ApiError::failed(error.to_string()))?;
        Ok(Lender { host, port, tls, me })
    }

    /// Where another host's daemon is, and what is shown to it.
    pub(super) fn other_daemon(&self, to: &str) -> Result<(String, u16, ClientTls), ApiError> {
        let Ok(Endpoint::Tcp { host, port }) = Endpoint::parse_control(&format!("tcp:{to}")) else {
            return Err(ApiError::invalid(format!("'{to}' is no HOST:PORT of a control API")));
        };
        let tls = self.migration_transport()?.tls.clone().ok_or_else(|| {
            ApiError::conflict("this host has no certificate to show to another one").hint(
                "name cert, key and ca in [migrate] of hob.toml, or cert, key and client_ca in [control.tls]",
            )
        })?;
        crate::daemon::tls::secret(&tls.key).map_err(|error| ApiError::failed(error.to_string()))?;
        let tls = ClientTls::load(&tls.ca, Some((&tls.cert, &tls.key)))
            .map_err(|error| ApiError::failed(error.to_string()))?;
        Ok((host, port, tls))
    }

    /// The socket that a device on that host has.
    pub(super) fn peer_socket(&self, to: &str) -> Result<PathBuf, ApiError> {
        Ok(self.migration_transport()?.directory.join("peers").join(to.replace('/', "_")))
    }

    /// Listens at the socket of a device on another host, unless that is done already.
    pub(super) fn open_line(&self, to: &PeerState) -> Result<(), ApiError> {
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        if lines.contains_key(&to.path) {
            return Ok(());
        }
        let lender = self.lender(&to.host)?;
        let failed = |error: std::io::Error| {
            ApiError::failed(format!("cannot listen at {}: {error}", to.path.display()))
        };
        let directory = to.path.parent().unwrap_or(Path::new("/"));
        std::fs::create_dir_all(directory).map_err(failed)?;
        std::fs::set_permissions(directory, std::fs::Permissions::from_mode(0o700)).map_err(failed)?;
        let listener = bind_socket(&to.path, SocketAccess::default())
            .and_then(UnixListener::from_std)
            .map_err(failed)?;
        let loan = Arc::new(Mutex::new(None));
        let known = loan.clone();
        let task = tokio::spawn(async move {
            // What it has connected ends with it.
            let mut joined = tokio::task::JoinSet::new();
            loop {
                while joined.try_join_next().is_some() {}
                match listener.accept().await {
                    Ok((here, _)) => drop(joined.spawn(lender.clone().connect(known.clone(), here))),
                    Err(error) => {
                        tracing::warn!(%error, "cannot connect with a lender");
                        tokio::time::sleep(Duration::from_millis(100)).await;
                    }
                }
            }
        });
        lines.insert(to.path.clone(), Line { to: to.clone(), loan, asking: Arc::default(), task });
        Ok(())
    }

    /// Where the socket of a device leads, if it leads anywhere.
    pub(super) fn line_to(&self, path: &Path) -> Option<PeerState> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner).get(path).map(|line| line.to.clone())
    }

    /// What a pool has borrowed.
    pub(super) fn lines_of(&self, pool: &str) -> Vec<PeerState> {
        let inner = self.inner();
        let Ok(entry) = inner.pool(pool) else { return Vec::new() };
        entry.devices.iter().filter_map(|device| device.peer.clone()).collect()
    }

    /// Takes flash of another host into a pool.
    pub(super) async fn borrow(
        self: &Arc<Self>,
        pool: &str,
        to: &str,
        size: Option<Size>,
    ) -> Result<PoolChanged, ApiError> {
        let size =
            size.ok_or_else(|| ApiError::invalid("say how much of the peer's flash is wanted: --size"))?;
        let path = self.peer_socket(to)?;
        let guard = self.guard_pool(pool, "changed")?;
        {
            let inner = self.inner();
            inner.check_device_is_new(&path)?;
            if inner.pool(pool)?.devices.iter().any(|device| device.peer.is_some()) {
                return Err(ApiError::conflict(format!(
                    "pool {pool} has a peer already; a second copy is at one"
                )));
            }
        }
        let to = PeerState { path: path.clone(), host: to.to_owned(), size };
        self.open_line(&to)?;
        if let Err(error) = self.ask_loan(&to).await {
            self.close_line(&path);
            return Err(error);
        }
        if let Err(error) = self.add_peer_device(pool, &to).await {
            self.give_loan_back(&to).await;
            self.close_line(&path);
            return Err(error);
        }
        drop(guard);
        tracing::info!("pool {pool} has {size} at {}", to.host);
        let notes = self.top_up(pool).await;
        self.save().await?;
        self.pool_changed(pool, notes)
    }

    /// Ends what listens at the socket of a device.
    pub(super) fn close_line(&self, path: &Path) {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner).remove(path);
    }

    /// Asks a lender for its loan: for the first time, or as it is now. Connections are to this one from now on.
    pub(super) async fn ask_loan(&self, to: &PeerState) -> Result<Loan, ApiError> {
        let lender = self.lender(&to.host)?;
        let ask = LoanAsk { name: self.own_name(), size: to.size };
        let path = format!("/v1/loans/{}", lender.me);
        let loan: Loan = lender.peer().ask(&path, &ask, ASK_MAX).await.map_err(|error| match error {
            PeerError::Refused { problem, .. } => {
                let what = Problem { error: format!("{}: {}", to.host, problem.error), ..problem };
                ApiError { kind: ErrorKind::Conflict, problem: what }
            }
            PeerError::Lost(why) => ApiError::failed(format!("{} lends nothing: {why}", to.host)),
        })?;
        let lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(line) = lines.get(&to.path) {
            *line.loan.lock().unwrap_or_else(PoisonError::into_inner) = Some(loan.clone());
        }
        Ok(loan)
    }

    /// Gives a loan back, as far as its lender can be told.
    pub(super) async fn give_loan_back(&self, to: &PeerState) {
        let Ok(lender) = self.lender(&to.host) else { return };
        let path = format!("/v1/loans/{}/end", lender.me);
        let told: Result<Vec<String>, _> = lender.peer().ask(&path, &(), ASK_MAX).await;
        match told {
            Ok(notes) => notes.iter().for_each(|note| tracing::info!("{}: {note}", to.host)),
            Err(error) => tracing::warn!("{} was not told that its loan is given back: {error}", to.host),
        }
    }

    /// What this host lends and borrows.
    pub(crate) fn peers(&self) -> Peers {
        let lent = self.lent();
        let inner = self.inner();
        let mut borrowed = Vec::new();
        for (pool, entry) in &inner.pools {
            for device in &entry.devices {
                let Some(to) = &device.peer else { continue };
                let on_it = |disk: &&DiskEntry| {
                    let has =
                        |segment: &Segment| device.ids.is_some_and(|ids| ids.on_shards == segment.device);
                    disk.apart.iter().any(has)
                };
                borrowed.push(Borrowed {
                    pool: pool.clone(),
                    peer: to.host.clone(),
                    path: device.path.to_string_lossy().into_owned(),
                    size: to.size,
                    state: device.state,
                    reason: device.reason.clone(),
                    disks: inner.disks.values().filter(on_it).map(|disk| disk.wanted.name.clone()).collect(),
                });
            }
        }
        Peers { lent, borrowed }
    }

    /// A lender does not answer: nobody is to believe what it has, and then it is given up.
    pub(super) async fn peer_silent(self: &Arc<Self>, device: DeviceId) {
        {
            let mut inner = self.inner();
            if !inner.given_up.insert(device) {
                return;
            }
        }
        let _word = self.copy_words.lock().await;
        for name in self.disks_at(device) {
            while let Err(error) = self.say_copy_is_gone(&name).await {
                tracing::warn!(
                    "{name}: its copy at a silent peer may count still, and its writes wait: {error}"
                );
                tokio::time::sleep(SAY_EVERY).await;
            }
        }
        let flash = {
            let mut inner = self.inner();
            let found = inner.device_on_shards(device).and_then(|(pool, entry)| Some((pool, entry.ids?)));
            found.map(|(pool, ids)| (inner.pools[&pool].flash.clone(), ids))
        };
        if let Some((flash, ids)) = flash {
            flash.give_up(ids.in_pool).await;
        }
        for shard in &self.shards {
            shard.give_up_device(device);
        }
    }

    /// Disks of which a device has anything.
    fn disks_at(&self, device: DeviceId) -> Vec<String> {
        let inner = self.inner();
        let on_it = |disk: &&DiskEntry| disk.apart.iter().chain(&disk.ring).any(|it| it.device == device);
        inner.disks.values().filter(on_it).map(|disk| disk.wanted.name.clone()).collect()
    }

    /// Makes the devices anew that are on hosts which were gone, where those are back.
    pub(super) async fn offer_again(self: &Arc<Self>, pool: &str) {
        let mut there = Vec::new();
        for to in self.gone_lenders(pool).into_iter().map(|(to, _)| to) {
            // Whoever does not answer must not keep the pool from others meanwhile.
            match self.ask_loan_once(&to).await {
                Some(Ok(_)) => there.push(to),
                Some(Err(error)) => {
                    tracing::debug!("pool {pool}: {} does not lend yet: {error}", to.host)
                }
                None => {}
            }
        }
        if there.is_empty() {
            return;
        }
        let Ok(guard) = self.guard_pool(pool, "given a peer's device again") else { return };
        let mut back = false;
        for (to, ids) in self.gone_lenders(pool).into_iter().filter(|(to, _)| there.contains(to)) {
            match self.make_anew(pool, &to, ids).await {
                Ok(()) => {
                    tracing::info!("pool {pool}: {} lends again", to.host);
                    back = true;
                }
                Err(error) => tracing::warn!("pool {pool}: {} cannot be used yet: {error}", to.host),
            }
        }
        drop(guard);
        if back {
            self.top_up(pool).await;
        }
    }

    /// The devices of a pool that are to be made anew when their hosts are back: nothing of them is needed.
    fn gone_lenders(&self, pool: &str) -> Vec<(PeerState, Option<super::DeviceIds>)> {
        let inner = self.inner();
        let Ok(entry) = inner.pool(pool) else { return Vec::new() };
        let all_there = inner.disks.values().all(|disk| disk.is_settled_in(pool));
        let is_used = |ids: super::DeviceIds| {
            let mut all = inner.disks.values().flat_map(|disk| disk.apart.iter().chain(&disk.ring));
            all.any(|segment| segment.device == ids.on_shards)
        };
        let gone = entry.devices.iter().filter(|device| match device.state {
            DeviceState::Fenced => !device.ids.is_some_and(is_used),
            // What is there may be needed for a cache that is not there yet.
            DeviceState::Offline => all_there,
            _ => false,
        });
        gone.filter_map(|device| Some((device.peer.clone()?, device.ids))).collect()
    }

    /// As [`Manager::ask_loan`], unless somebody is asking.
    async fn ask_loan_once(&self, to: &PeerState) -> Option<Result<Loan, ApiError>> {
        if let Err(error) = self.open_line(to) {
            return Some(Err(error));
        }
        let asking = {
            let lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
            lines.get(&to.path)?.asking.clone()
        };
        let _asking = asking.try_lock().ok()?;
        Some(self.ask_loan(to).await)
    }

    async fn make_anew(
        self: &Arc<Self>,
        pool: &str,
        to: &PeerState,
        ids: Option<super::DeviceIds>,
    ) -> Result<(), ApiError> {
        let flash = self.inner().pool(pool)?.flash.clone();
        if let Some(ids) = ids {
            for shard in &self.shards {
                shard.remove_device(ids.on_shards).await?;
            }
            let lost = {
                let mut inner = self.inner();
                let entry = inner.pool_mut(pool)?;
                let lost = entry.by_shard_id(ids.on_shards).map(|device| std::mem::take(&mut device.lost));
                let lost = entry.in_pool(&lost.unwrap_or_default());
                if let Some(device) = entry.by_shard_id(ids.on_shards) {
                    (device.ids, device.state) = (None, DeviceState::Offline);
                }
                lost
            };
            flash.remove_device(ids.in_pool, lost).await?;
        }
        self.add_peer_device(pool, to).await
    }

    /// Formats what a lender has, and gives it to the shards.
    pub(super) async fn add_peer_device(
        self: &Arc<Self>,
        pool: &str,
        to: &PeerState,
    ) -> Result<(), ApiError> {
        let flash = self.inner().pool(pool)?.flash.clone();
        let spec = DeviceSpec { path: to.path.clone(), size_bytes: None };
        let (id, devices) = flash.add_device(spec, Overwrite::Force).await?;
        self.connect_new_device(pool, id, devices).await
    }
}

impl super::Inner {
    /// Is it a device on another host?
    pub(super) fn is_peer(&mut self, device: DeviceId) -> bool {
        self.device_on_shards(device).is_some_and(|(_, entry)| entry.peer.is_some())
    }
}

impl super::PoolEntry {
    /// Does a peer lend to it now?
    pub(super) fn has_peer(&self) -> bool {
        self.devices.iter().any(|device| {
            device.peer.is_some() && device.state == DeviceState::Online && device.gives_segments()
        })
    }
}
