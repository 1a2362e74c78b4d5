//! Asks a daemon: one HTTP/1.1 connection per question, over a Unix socket, or over TCP with TLS.

use std::io;
use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderName, HeaderValue};
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};

use crate::tls;
use crate::{
    BitmapAdd, BitmapMerge, BitmapRotate, Bitmaps, CacheEnable, CachePatch, ClientTls, Cluster,
    ClusterAdvice, ClusterDisk, ClusterHost, ClusterMove, ClusterMoveStart, ClusterTake, Datastore,
    DatastorePatch, DeviceAdd, DevicePatch, Disk, DiskAdd, DiskChanged, DiskCurve, DiskHistograms, DiskLoad,
    DiskQos, DiskResize, DiskStats, Endpoint, EventReport, Explanation, Export, ExportDirty, Health,
    LifeEvent, Migration, MigrationStart, OnDirty, Pool, PoolChanged, PoolCreate, Problem, QosPatch,
    StoragePolicy, Swap, SwapChanged, SwapCreate, SwapPatch, TakeBack, TraceDecoder, TraceFrame, Version,
};

/// Longest answer that is read, bytes.
const ANSWER_BYTES_MAX: usize = 64 << 20;

/// Longest wait for an answer. The daemon's own limits are shorter.
const ANSWER_SECONDS_MAX: u64 = 60;

/// Why a question has no answer. Each variant is one reaction of the caller.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nobody answers: start the daemon, or name another socket.
    #[error("cannot reach the daemon at {endpoint}: {source}")]
    Unreachable {
        /// Where.
        endpoint: Endpoint,
        /// Why.
        source: io::Error,
    },
    /// TCP, and nothing said about TLS: name the authority of the daemon's certificate.
    #[error("{endpoint} is on TCP, where the daemon speaks TLS only")]
    NoTls {
        /// Where.
        endpoint: Endpoint,
    },
    /// The two do not trust each other: the daemon's certificate, or the client's.
    #[error("no TLS with the daemon at {endpoint}: {why}")]
    Untrusted {
        /// Where.
        endpoint: Endpoint,
        /// What is wrong.
        why: String,
    },
    /// The daemon said no.
    #[error("{problem}")]
    Refused {
        /// HTTP status.
        status: u16,
        /// What it said.
        problem: Problem,
    },
    /// What answers does not speak this API.
    #[error("{endpoint} gave an answer that is not hob's: {what}")]
    Garbled {
        /// Who.
        endpoint: Endpoint,
        /// What was wrong.
        what: String,
    },
    /// An answer without end ended.
    #[error("{endpoint} ended the connection; the daemon was stopped or has failed")]
    BrokeOff {
        /// Who.
        endpoint: Endpoint,
    },
    /// No answer in time.
    #[error("{endpoint} did not answer within {ANSWER_SECONDS_MAX} s")]
    TimedOut {
        /// Who.
        endpoint: Endpoint,
    },
}

/// A daemon to ask. Cheap to make; connects when asked.
#[derive(Clone, Debug)]
pub struct Client {
    endpoint: Endpoint,
    token: Option<String>,
    tls: Option<ClientTls>,
}

impl Client {
    /// A client of the daemon at `endpoint`. TCP needs a token, or a certificate [with TLS](Self::with_tls).
    pub fn new(endpoint: Endpoint, token: Option<String>) -> Client {
        Client { endpoint, token, tls: None }
    }

    /// The same, able to speak TLS, which TCP needs.
    #[must_use]
    pub fn with_tls(self, tls: ClientTls) -> Client {
        Client { tls: Some(tls), ..self }
    }

    /// Where the daemon is.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Who answers.
    pub async fn version(&self) -> Result<Version, ClientError> {
        self.get("/v1/version").await
    }

    /// What is wrong, if anything is.
    pub async fn health(&self) -> Result<Health, ClientError> {
        self.get("/v1/health").await
    }

    /// What each disk has done so far.
    pub async fn load(&self) -> Result<Vec<DiskLoad>, ClientError> {
        self.get("/v1/load").await
    }

    /// All pools.
    pub async fn pools(&self) -> Result<Vec<Pool>, ClientError> {
        self.get("/v1/pools").await
    }

    /// One pool.
    pub async fn pool(&self, pool: &str) -> Result<Pool, ClientError> {
        self.get(&pool_path(pool)).await
    }

    /// Makes a pool.
    pub async fn pool_create(&self, create: &PoolCreate) -> Result<PoolChanged, ClientError> {
        self.send(Method::POST, "/v1/pools", Some(create)).await
    }

    /// Forgets a pool without caches.
    pub async fn pool_remove(&self, pool: &str) -> Result<PoolChanged, ClientError> {
        self.delete(&pool_path(pool)).await
    }

    /// Gives a pool another device.
    pub async fn device_add(&self, pool: &str, add: &DeviceAdd) -> Result<PoolChanged, ClientError> {
        self.send(Method::POST, &format!("{}/devices", pool_path(pool)), Some(add)).await
    }

    /// What the daemon's host lends and borrows.
    pub async fn peers(&self) -> Result<crate::Peers, ClientError> {
        self.get("/v1/peers").await
    }

    /// Ends a loan; with `forget`, the borrower may ask for another one.
    pub async fn loan_end(&self, borrower: &str, forget: bool) -> Result<Vec<String>, ClientError> {
        let path = format!("/v1/loans/{}/end?forget={forget}", percent_encode(borrower));
        self.send(Method::POST, &path, None::<&()>).await
    }

    /// Lets a device give new segments, or no more of them.
    pub async fn device_set(
        &self,
        pool: &str,
        path: &str,
        patch: &DevicePatch,
    ) -> Result<PoolChanged, ClientError> {
        self.send(Method::PATCH, &device_path(pool, path), Some(patch)).await
    }

    /// Takes a device from a pool.
    pub async fn device_remove(&self, pool: &str, path: &str) -> Result<PoolChanged, ClientError> {
        self.delete(&device_path(pool, path)).await
    }

    /// Gives a disk another export.
    pub async fn export_add(&self, disk: &str, export: &Export) -> Result<DiskChanged, ClientError> {
        self.send(Method::POST, &format!("{}/exports", disk_path(disk)), Some(export)).await
    }

    /// Takes one away.
    pub async fn export_remove(&self, disk: &str, export: &str) -> Result<DiskChanged, ClientError> {
        self.delete(&format!("{}/exports/{}", disk_path(disk), percent_encode(export))).await
    }

    /// A disk's bitmaps.
    pub async fn bitmaps(&self, disk: &str) -> Result<Bitmaps, ClientError> {
        self.get(&format!("{}/bitmaps", disk_path(disk))).await
    }

    /// Gives a disk another bitmap.
    pub async fn bitmap_add(&self, disk: &str, add: &BitmapAdd) -> Result<Bitmaps, ClientError> {
        self.send(Method::POST, &format!("{}/bitmaps", disk_path(disk)), Some(add)).await
    }

    /// Takes one away.
    pub async fn bitmap_remove(&self, disk: &str, bitmap: &str) -> Result<Bitmaps, ClientError> {
        self.delete(&bitmap_path(disk, bitmap)).await
    }

    /// Lets one forget what it has noted.
    pub async fn bitmap_clear(&self, disk: &str, bitmap: &str) -> Result<Bitmaps, ClientError> {
        self.send(Method::POST, &format!("{}/clear", bitmap_path(disk, bitmap)), None::<&()>).await
    }

    /// Freezes what one has noted under another name, and lets it go on empty.
    pub async fn bitmap_rotate(
        &self,
        disk: &str,
        bitmap: &str,
        rotate: &BitmapRotate,
    ) -> Result<Bitmaps, ClientError> {
        self.send(Method::POST, &format!("{}/rotate", bitmap_path(disk, bitmap)), Some(rotate)).await
    }

    /// Puts what one has noted into another, and takes it away.
    pub async fn bitmap_merge(
        &self,
        disk: &str,
        bitmap: &str,
        merge: &BitmapMerge,
    ) -> Result<Bitmaps, ClientError> {
        self.send(Method::POST, &format!("{}/merge", bitmap_path(disk, bitmap)), Some(merge)).await
    }

    /// What all disks are due.
    pub async fn qos_list(&self) -> Result<Vec<DiskQos>, ClientError> {
        self.get("/v1/qos").await
    }

    /// What a disk is due.
    pub async fn qos(&self, disk: &str) -> Result<DiskQos, ClientError> {
        self.get(&format!("{}/qos", disk_path(disk))).await
    }

    /// Says what a disk is due.
    pub async fn qos_set(&self, disk: &str, patch: &QosPatch) -> Result<DiskQos, ClientError> {
        self.send(Method::PATCH, &format!("{}/qos", disk_path(disk)), Some(patch)).await
    }

    /// All storage policies.
    pub async fn storage_policies(&self) -> Result<Vec<StoragePolicy>, ClientError> {
        self.get("/v1/storage-policies").await
    }

    /// Makes a storage policy, or changes it for all its disks.
    pub async fn storage_policy_set(
        &self,
        name: &str,
        patch: &QosPatch,
    ) -> Result<StoragePolicy, ClientError> {
        self.send(Method::PUT, &format!("/v1/storage-policies/{}", percent_encode(name)), Some(patch)).await
    }

    /// Removes a storage policy that no disk has.
    pub async fn storage_policy_remove(&self, name: &str) -> Result<StoragePolicy, ClientError> {
        self.delete(&format!("/v1/storage-policies/{}", percent_encode(name))).await
    }

    /// All datastores.
    pub async fn datastores(&self) -> Result<Vec<Datastore>, ClientError> {
        self.get("/v1/datastores").await
    }

    /// Says how a datastore is to be bounded, and what it can do.
    pub async fn datastore_set(&self, name: &str, patch: &DatastorePatch) -> Result<Datastore, ClientError> {
        self.send(Method::PATCH, &format!("/v1/datastores/{}", percent_encode(name)), Some(patch)).await
    }

    /// Swap areas of the host.
    pub async fn swaps(&self) -> Result<Vec<Swap>, ClientError> {
        self.get("/v1/swap").await
    }

    /// One swap area.
    pub async fn swap(&self, name: &str) -> Result<Swap, ClientError> {
        self.get(&swap_path(name)).await
    }

    /// Makes a swap area.
    pub async fn swap_create(&self, create: &SwapCreate) -> Result<SwapChanged, ClientError> {
        self.send(Method::POST, "/v1/swap", Some(create)).await
    }

    /// Turns a swap area on or off.
    pub async fn swap_set(&self, name: &str, patch: &SwapPatch) -> Result<SwapChanged, ClientError> {
        self.send(Method::PATCH, &swap_path(name), Some(patch)).await
    }

    /// Gives a swap area back to its pool.
    pub async fn swap_remove(&self, name: &str) -> Result<SwapChanged, ClientError> {
        self.send(Method::DELETE, &swap_path(name), None::<&()>).await
    }

    /// The daemon's host, as a member of its cluster.
    pub async fn cluster(&self) -> Result<Cluster, ClientError> {
        self.get("/v1/cluster").await
    }

    /// All members of its cluster.
    pub async fn cluster_hosts(&self) -> Result<Vec<ClusterHost>, ClientError> {
        self.get("/v1/cluster/hosts").await
    }

    /// All disks of its cluster.
    pub async fn cluster_disks(&self) -> Result<Vec<ClusterDisk>, ClientError> {
        self.get("/v1/cluster/disks").await
    }

    /// Has the daemon take a disk; by force even if data of a host that is gone is lost.
    pub async fn cluster_take(&self, disk: &str, force: bool) -> Result<Disk, ClientError> {
        let path = format!("/v1/cluster/disks/{}/take", percent_encode(disk));
        self.send(Method::POST, &path, Some(&ClusterTake { force })).await
    }

    /// Moves of disks between the cluster's hosts that are under way, or were not long ago.
    pub async fn cluster_moves(&self) -> Result<Vec<ClusterMove>, ClientError> {
        self.get("/v1/cluster/moves").await
    }

    /// Has a disk move to another host of the cluster, whoever has it.
    pub async fn cluster_move(
        &self,
        disk: &str,
        start: &ClusterMoveStart,
    ) -> Result<ClusterMove, ClientError> {
        let path = format!("/v1/cluster/disks/{}/move", percent_encode(disk));
        self.send(Method::POST, &path, Some(start)).await
    }

    /// Calls a disk's move off, if it is not too late.
    pub async fn cluster_move_cancel(&self, disk: &str) -> Result<ClusterMove, ClientError> {
        let path = format!("/v1/cluster/disks/{}/move", percent_encode(disk));
        self.send(Method::DELETE, &path, None::<&()>).await
    }

    /// Which disks had better be on other hosts; `leaving` names a host that is to have none.
    pub async fn cluster_advice(&self, leaving: Option<&str>) -> Result<ClusterAdvice, ClientError> {
        let query = leaving.map(|host| format!("?leaving={}", percent_encode(host))).unwrap_or_default();
        self.get(&format!("/v1/cluster/advice{query}")).await
    }

    /// All disks.
    pub async fn disks(&self) -> Result<Vec<Disk>, ClientError> {
        self.get("/v1/disks").await
    }

    /// One disk.
    pub async fn disk(&self, disk: &str) -> Result<Disk, ClientError> {
        self.get(&disk_path(disk)).await
    }

    /// Serves a disk.
    pub async fn disk_add(&self, add: &DiskAdd) -> Result<DiskChanged, ClientError> {
        self.send(Method::POST, "/v1/disks", Some(add)).await
    }

    /// Stops serving a disk: once it is drained, or with what is dirty lost. Its backing keeps its data.
    pub async fn disk_remove(&self, disk: &str, dirty: OnDirty) -> Result<DiskChanged, ClientError> {
        self.delete(&format!("{}{}", disk_path(disk), dirty.query())).await
    }

    /// Gives a disk a cache.
    pub async fn cache_enable(&self, disk: &str, enable: &CacheEnable) -> Result<DiskChanged, ClientError> {
        self.send(Method::PUT, &format!("{}/cache", disk_path(disk)), Some(enable)).await
    }

    /// Changes a cache.
    pub async fn cache_patch(&self, disk: &str, patch: &CachePatch) -> Result<DiskChanged, ClientError> {
        self.send(Method::PATCH, &format!("{}/cache", disk_path(disk)), Some(patch)).await
    }

    /// Takes a cache away: once it is drained, or with what is dirty lost.
    pub async fn cache_disable(&self, disk: &str, dirty: OnDirty) -> Result<DiskChanged, ClientError> {
        self.delete(&format!("{}/cache{}", disk_path(disk), dirty.query())).await
    }

    /// Lets a disk be larger.
    pub async fn disk_resize(&self, disk: &str, resize: &DiskResize) -> Result<DiskChanged, ClientError> {
        self.send(Method::POST, &format!("{}/resize", disk_path(disk)), Some(resize)).await
    }

    /// Reports what happened to a disk's machine.
    pub async fn disk_event(&self, disk: &str, event: LifeEvent) -> Result<DiskChanged, ClientError> {
        self.send(Method::POST, &format!("{}/events", disk_path(disk)), Some(&EventReport { event })).await
    }

    /// Begins to move a disk to another host.
    pub async fn migrate(&self, disk: &str, start: &MigrationStart) -> Result<Migration, ClientError> {
        self.send(Method::POST, &format!("{}/migration", disk_path(disk)), Some(start)).await
    }

    /// How far that is.
    pub async fn migration(&self, disk: &str) -> Result<Migration, ClientError> {
        self.get(&format!("{}/migration", disk_path(disk))).await
    }

    /// Hands the disk over now.
    pub async fn migration_finish(&self, disk: &str) -> Result<Migration, ClientError> {
        self.send(Method::POST, &format!("{}/migration/finish", disk_path(disk)), None::<&()>).await
    }

    /// Keeps the disk.
    pub async fn migration_cancel(&self, disk: &str) -> Result<Migration, ClientError> {
        self.delete(&format!("{}/migration", disk_path(disk))).await
    }

    /// Takes a disk back that is away, without the host that has it.
    pub async fn migration_take_back(&self, disk: &str, back: TakeBack) -> Result<DiskChanged, ClientError> {
        self.send(Method::POST, &format!("{}/migration/take-back", disk_path(disk)), Some(&back)).await
    }

    /// Begins to bring a cache's dirty data to the backing, or goes on doing so.
    pub async fn drain(&self, disk: &str) -> Result<DiskChanged, ClientError> {
        self.send(Method::POST, &format!("{}/drain", disk_path(disk)), None::<&()>).await
    }

    /// Ends a drain before it is done.
    pub async fn drain_stop(&self, disk: &str) -> Result<DiskChanged, ClientError> {
        self.delete(&format!("{}/drain", disk_path(disk))).await
    }

    /// Gives up what is dirty: acknowledged writes are lost.
    pub async fn discard_dirty(&self, disk: &str) -> Result<DiskChanged, ClientError> {
        self.send(Method::POST, &format!("{}/cache/discard-dirty", disk_path(disk)), None::<&()>).await
    }

    /// Has the daemon write what is dirty into a file on its host.
    pub async fn export_dirty(&self, disk: &str, export: &ExportDirty) -> Result<DiskChanged, ClientError> {
        self.send(Method::POST, &format!("{}/cache/export-dirty", disk_path(disk)), Some(export)).await
    }

    /// Frees the room of a persistent cache that belongs to no disk, and loses what is in it.
    pub async fn orphan_discard(&self, pool: &str, owner: &str) -> Result<PoolChanged, ClientError> {
        self.delete(&format!("{}/orphans/{}", pool_path(pool), percent_encode(owner))).await
    }

    /// Empties a cache.
    pub async fn cache_clear(&self, disk: &str) -> Result<DiskChanged, ClientError> {
        self.send(Method::POST, &format!("{}/cache/clear", disk_path(disk)), None::<&()>).await
    }

    /// A disk's figures.
    pub async fn stats(&self, disk: &str) -> Result<DiskStats, ClientError> {
        self.get(&format!("{}/stats", disk_path(disk))).await
    }

    /// What a disk is asked for.
    pub async fn histograms(&self, disk: &str) -> Result<DiskHistograms, ClientError> {
        self.get(&format!("{}/histograms", disk_path(disk))).await
    }

    /// Begins its histograms anew.
    pub async fn histograms_reset(&self, disk: &str) -> Result<DiskHistograms, ClientError> {
        self.delete(&format!("{}/histograms", disk_path(disk))).await
    }

    /// What caches of other sizes would do for a disk.
    pub async fn curve(&self, disk: &str) -> Result<DiskCurve, ClientError> {
        self.get(&format!("{}/curve", disk_path(disk))).await
    }

    /// Begins to learn that anew.
    pub async fn curve_reset(&self, disk: &str) -> Result<DiskCurve, ClientError> {
        self.delete(&format!("{}/curve", disk_path(disk))).await
    }

    /// Why a disk's I/O is or is not served from flash.
    pub async fn explain(&self, disk: &str) -> Result<Explanation, ClientError> {
        self.get(&format!("{}/explain", disk_path(disk))).await
    }

    /// Records a disk's requests from now on.
    pub async fn trace(&self, disk: &str) -> Result<Trace, ClientError> {
        let path = format!("{}/trace", disk_path(disk));
        let (answer, driver) = self.in_time(self.ask(Method::GET, &path, Vec::new())).await?;
        Ok(Trace {
            client: self.clone(),
            body: answer.into_body(),
            decoder: TraceDecoder::default(),
            over: false,
            _driver: driver,
        })
    }

    async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        self.send(Method::GET, path, None::<&()>).await
    }

    async fn delete<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        self.send(Method::DELETE, path, None::<&()>).await
    }

    async fn send<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Option<&impl Serialize>,
    ) -> Result<T, ClientError> {
        let body = match body {
            Some(body) => serde_json::to_vec(body).map_err(|error| self.garbled(error))?,
            None => Vec::new(),
        };
        let exchange = async {
            let (answer, _driver) = self.ask(method, path, body).await?;
            self.collect(answer).await
        };
        let answer = self.in_time(exchange).await?;
        serde_json::from_slice(&answer).map_err(|error| self.garbled(error))
    }

    /// Waits for a limited time.
    pub(crate) async fn in_time<T>(
        &self,
        work: impl Future<Output = Result<T, ClientError>>,
    ) -> Result<T, ClientError> {
        tokio::time::timeout(Duration::from_secs(ANSWER_SECONDS_MAX), work)
            .await
            .map_err(|_| ClientError::TimedOut { endpoint: self.endpoint.clone() })?
    }

    /// Connects, asks, and returns an answer that is a success, up to its body.
    async fn ask(
        &self,
        method: Method,
        path: &str,
        body: Vec<u8>,
    ) -> Result<(Response<Incoming>, Driver), ClientError> {
        let json = (CONTENT_TYPE, HeaderValue::from_static("application/json"));
        let headers = if body.is_empty() { Vec::new() } else { vec![json] };
        let (answer, driver) = self.exchange(method, path, headers, Bytes::from(body)).await?;
        let status = answer.status();
        if status.is_success() {
            return Ok((answer, driver));
        }
        match serde_json::from_slice::<Problem>(&self.collect(answer).await?) {
            Ok(problem) => Err(ClientError::Refused { status: status.as_u16(), problem }),
            Err(_) => Err(self.garbled(format!("HTTP status {status}"))),
        }
    }

    /// Connects, asks, and returns whatever comes, up to its body.
    pub(crate) async fn exchange(
        &self,
        method: Method,
        path: &str,
        headers: Vec<(HeaderName, HeaderValue)>,
        body: Bytes,
    ) -> Result<(Response<Incoming>, Driver), ClientError> {
        let mut request = Request::builder().method(method).uri(path).header(HOST, self.host());
        for (name, value) in headers {
            request = request.header(name, value);
        }
        if let Some(token) = &self.token {
            request = request.header(AUTHORIZATION, format!("Bearer {token}"));
        }
        let request = request.body(Full::new(body)).map_err(|error| self.garbled(error))?;
        match &self.endpoint {
            Endpoint::Unix(socket) => {
                let stream = UnixStream::connect(socket).await.map_err(|error| self.unreachable(error))?;
                self.exchange_over(stream, request).await
            }
            Endpoint::Tcp { host, port } => {
                let no_tls = || ClientError::NoTls { endpoint: self.endpoint.clone() };
                let tls = self.tls.as_ref().ok_or_else(no_tls)?;
                let stream = TcpStream::connect((host.as_str(), *port))
                    .await
                    .map_err(|error| self.unreachable(error))?;
                let stream = tls.connect(host, stream).await.map_err(|error| self.untrusted(&error))?;
                self.exchange_over(stream, request).await
            }
        }
    }

    async fn exchange_over(
        &self,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        request: Request<Full<Bytes>>,
    ) -> Result<(Response<Incoming>, Driver), ClientError> {
        let (mut sender, connection) =
            http1::handshake(TokioIo::new(stream)).await.map_err(|error| self.failed(error))?;
        let driver = Driver::start(connection);
        let answer = sender.send_request(request).await.map_err(|error| self.failed(error))?;
        Ok((answer, driver))
    }

    async fn collect(&self, answer: Response<Incoming>) -> Result<Bytes, ClientError> {
        let body = Limited::new(answer.into_body(), ANSWER_BYTES_MAX).collect().await;
        Ok(body.map_err(|error| self.garbled(error))?.to_bytes())
    }

    /// By which name the daemon is asked.
    fn host(&self) -> String {
        let endpoint = self.endpoint.to_string();
        endpoint.strip_prefix("tcp:").unwrap_or("hob").to_owned()
    }

    /// The exchange broke off: through TLS, or because the other side speaks something else.
    fn failed(&self, error: hyper::Error) -> ClientError {
        match tls::cause(&error) {
            Some(why) => ClientError::Untrusted { endpoint: self.endpoint.clone(), why },
            None => self.garbled(error),
        }
    }

    fn untrusted(&self, error: &io::Error) -> ClientError {
        ClientError::Untrusted { endpoint: self.endpoint.clone(), why: error.to_string() }
    }

    fn unreachable(&self, source: io::Error) -> ClientError {
        ClientError::Unreachable { endpoint: self.endpoint.clone(), source }
    }

    fn garbled(&self, what: impl ToString) -> ClientError {
        ClientError::Garbled { endpoint: self.endpoint.clone(), what: what.to_string() }
    }
}

/// The task that moves a connection's bytes. Dropping it closes the connection.
#[derive(Debug)]
pub(crate) struct Driver(Option<tokio::task::JoinHandle<hyper::Result<()>>>);

impl Driver {
    pub(crate) fn start(connection: impl Future<Output = hyper::Result<()>> + Send + 'static) -> Driver {
        Driver(Some(tokio::spawn(connection)))
    }

    /// Lets it end by itself.
    pub(crate) fn finish(mut self) {
        self.0.take();
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        if let Some(task) = &self.0 {
            task.abort();
        }
    }
}

/// A recording under way. Dropping it ends the recording.
#[derive(Debug)]
pub struct Trace {
    client: Client,
    body: Incoming,
    decoder: TraceDecoder,
    over: bool,
    _driver: Driver,
}

impl Trace {
    /// The next frame; `None` after the last one, which comes when the disk is gone. May be dropped and called
    /// again.
    pub async fn next(&mut self) -> Result<Option<TraceFrame>, ClientError> {
        while !self.over {
            if let Some(frame) = self.decoder.poll_frame().map_err(|error| self.client.garbled(error))? {
                self.over = frame.is_last;
                return Ok(Some(frame));
            }
            let broke_off = || ClientError::BrokeOff { endpoint: self.client.endpoint.clone() };
            let piece = self.client.in_time(async { Ok(self.body.frame().await) }).await?;
            let piece = piece.ok_or_else(broke_off)?.map_err(|_| broke_off())?;
            if let Ok(bytes) = piece.into_data() {
                self.decoder.handle_input(&bytes);
            }
        }
        Ok(None)
    }
}

fn pool_path(pool: &str) -> String {
    format!("/v1/pools/{}", percent_encode(pool))
}

fn device_path(pool: &str, path: &str) -> String {
    format!("{}/devices?path={}", pool_path(pool), percent_encode(path))
}

fn swap_path(name: &str) -> String {
    format!("/v1/swap/{}", percent_encode(name))
}

fn bitmap_path(disk: &str, bitmap: &str) -> String {
    format!("{}/bitmaps/{}", disk_path(disk), percent_encode(bitmap))
}

fn disk_path(disk: &str) -> String {
    format!("/v1/disks/{}", percent_encode(disk))
}

/// Escapes everything that has a meaning in a URI. A path of dots is escaped too, so that no
/// name becomes a step up.
pub(crate) fn percent_encode(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'~' | b'.') {
            encoded.push(byte as char);
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
    }
    if encoded.bytes().all(|byte| byte == b'.') { encoded.replace('.', "%2E") } else { encoded }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_leave_their_place_in_the_path() {
        assert_eq!(disk_path("vm-1.a"), "/v1/disks/vm-1.a");
        assert_eq!(disk_path("a/b?c d%ä"), "/v1/disks/a%2Fb%3Fc%20d%25%C3%A4");
        assert_eq!(disk_path(".."), "/v1/disks/%2E%2E");
    }

    #[test]
    fn nobody_home_is_said_with_the_address() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let endpoint = Endpoint::Unix("/nonexistent/hob.sock".into());
        let error = runtime.block_on(Client::new(endpoint, None).version()).unwrap_err();
        assert!(error.to_string().contains("unix:/nonexistent/hob.sock"), "{error}");
    }
}
