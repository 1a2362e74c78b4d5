//! Flash leases: this host lends flash to other hosts for their replicas. Each borrowing host gets
//! one file, which a shard serves to that host only, as an NBD export.
//!
//! A flash lease is bound to the certificate of its first request. An open flash lease has an
//! incarnation (field `epoch`), a random number that changes each time this host opens the lease's
//! file. A connection names the incarnation. Therefore a borrower never continues with a file that
//! lost unflushed writes in a crash of this host. A record file keeps the flash lease over
//! restarts.
//!
//! The flash leases of a host have at most `lend_max` bytes in total. A borrower gets no new flash
//! lease while the data of its old flash lease is needed. The file of a flash lease is always
//! opened as raw, whatever the borrower wrote.

mod record;
mod serving;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hob_control::{FlashLease, FlashLeaseRequest, FlashLeaseState, Size};
use hob_engine::cluster::Member;
use hob_storage::pool::{REMOTE_EXPORT, superblock_uuid};
use tokio::sync::Notify;
use tokio::time::Instant;

use super::RemoteFlash;
use crate::api_error::{ApiError, Result, conflict, invalid, not_found};
use crate::services::flash::blocking;
use crate::state::CacheOwner;
use record::{EndedBy, Kept, check_readable, failed, make_file, remove, remove_record, write_record};
pub(crate) use serving::Admitted;
#[cfg(test)]
pub(in crate::services) use serving::CONNECTIONS_MAX;
use serving::Open;

/// Minimum size of a flash lease in bytes.
const LEASE_BYTES_MIN: u64 = 64 << 20;

/// Interval between two checks whether the data of an ended flash lease is still needed.
const LOOK_EVERY: Duration = Duration::from_secs(30);

/// Maximum number of flash leases.
const LEASES_MAX: usize = 256;

/// The flash leases of this host.
#[derive(Debug)]
pub(crate) struct FlashExports {
    directory: PathBuf,
    bytes_max: u64,
    /// Flash leases by borrower. The lock is never held during I/O.
    leases: Mutex<BTreeMap<String, Entry>>,
    /// Borrowers whose flash leases are being changed.
    busy: Mutex<BTreeSet<String>>,
    /// Signals the end of a change of a flash lease.
    freed: Notify,
}

/// The exclusive right to create or change a borrower's flash lease, released when dropped.
struct ExportGuard<'a> {
    lending: &'a FlashExports,
    borrower: &'a str,
}

#[derive(Debug)]
struct Entry {
    kept: Kept,
    open: Option<Open>,
    /// Time before which an ended flash lease is not checked again.
    retry_after: Option<Instant>,
}

impl FlashExports {
    /// Loads the flash leases from a directory, which is created if missing.
    pub(crate) fn open(directory: &Path, bytes_max: u64) -> std::io::Result<FlashExports> {
        fs::create_dir_all(directory)?;
        let mut leases = BTreeMap::new();
        for file in fs::read_dir(directory)? {
            let path = file?.path();
            let stem = path.file_stem().and_then(|stem| stem.to_str()).map(str::to_owned);
            let (Some(borrower), true) = (stem, path.extension().is_some_and(|it| it == "json")) else {
                continue;
            };
            match fs::read(&path).ok().and_then(|text| serde_json::from_slice::<Kept>(&text).ok()) {
                Some(kept) => {
                    leases.insert(borrower, Entry::new(kept));
                }
                None => {
                    tracing::error!(
                        "{} is not a valid record of a flash lease; hob ignores that lease",
                        path.display()
                    )
                }
            }
        }
        Ok(FlashExports {
            directory: directory.to_owned(),
            bytes_max,
            leases: Mutex::new(leases),
            busy: Mutex::default(),
            freed: Notify::new(),
        })
    }

    fn leases(&self) -> MutexGuard<'_, BTreeMap<String, Entry>> {
        self.leases.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the guard of a borrower's flash lease. Returns `None` if another task has the guard.
    fn try_turn<'a>(&'a self, borrower: &'a str) -> Option<ExportGuard<'a>> {
        let mut busy = self.busy.lock().unwrap_or_else(PoisonError::into_inner);
        busy.insert(borrower.to_owned()).then(|| ExportGuard { lending: self, borrower })
    }

    /// Waits for the guard of a borrower's flash lease, and takes it.
    async fn turn<'a>(&'a self, borrower: &'a str) -> ExportGuard<'a> {
        loop {
            let freed = self.freed.notified();
            match self.try_turn(borrower) {
                Some(turn) => return turn,
                None => freed.await,
            }
        }
    }

    fn file(&self, borrower: &str) -> PathBuf {
        self.directory.join(format!("{borrower}.dev"))
    }

    fn view(&self, borrower: &str, entry: &Entry, lender: &str) -> FlashLease {
        FlashLease {
            borrower: borrower.to_owned(),
            name: entry.kept.name.clone(),
            lender: lender.to_owned(),
            size: entry.kept.size,
            state: match &entry.open {
                _ if entry.kept.ended.is_some() => FlashLeaseState::Ended,
                Some(_) => FlashLeaseState::Open,
                None => FlashLeaseState::Idle,
            },
            path: self.file(borrower).to_string_lossy().into_owned(),
            epoch: entry.open.as_ref().map(|open| open.epoch.clone()),
        }
    }
}

impl RemoteFlash {
    fn lending(&self) -> Result<&FlashExports> {
        self.exports.get().ok_or_else(|| {
            ApiError::conflict("this host lends no flash")
                .hint("set lend and lend_max in [peers] of hob.toml on the lending host")
        })
    }

    /// Returns all flash leases that this host has granted to other hosts.
    pub(in crate::services) fn lent(&self) -> Vec<FlashLease> {
        let Some(lending) = self.exports.get() else { return Vec::new() };
        let (leases, me) = (lending.leases(), self.peers.own_name());
        leases.iter().map(|(borrower, entry)| lending.view(borrower, entry, &me)).collect()
    }

    /// Creates or renews the flash lease that another host requests.
    pub(crate) async fn lend(
        &self,
        borrower: String,
        ask: FlashLeaseRequest,
        certificate: Option<String>,
    ) -> Result<FlashLease> {
        let service = self.clone();
        self.tasks
            .run(
                "peer lend",
                borrower.clone(),
                async move { service.lend_now(&borrower, ask, certificate).await },
            )
            .await
    }

    async fn lend_now(
        &self,
        borrower: &str,
        ask: FlashLeaseRequest,
        certificate: Option<String>,
    ) -> Result<FlashLease> {
        let lending = self.lending()?;
        let certificate = certificate.ok_or_else(no_certificate)?;
        if borrower.parse::<CacheOwner>().is_err() {
            return Err(invalid!("'{borrower}' is not a valid identity of a host"));
        }
        // Borrowers repeat their requests, which must not accumulate.
        let turn = lending.try_turn(borrower).ok_or_else(|| {
            ApiError::busy("the flash lease is being changed").hint("try again when the change is complete")
        })?;
        let known = lending.leases().get(borrower).map(|entry| entry.kept.clone());
        match known {
            Some(kept) => check_again(&kept, &ask, &certificate)?,
            None => turn.make(ask, certificate).await?,
        }
        let is_open = lending.leases().get(borrower).is_some_and(|entry| entry.open.is_some());
        let opened = if is_open { None } else { Some(self.open_export(lending.file(borrower)).await?) };
        let mut leases = lending.leases();
        let entry = leases.get_mut(borrower).ok_or_else(|| no_lease(borrower))?;
        entry.open = opened.or(entry.open.take());
        Ok(lending.view(borrower, entry, &self.peers.own_name()))
    }

    /// Checks whether a borrower may connect to this incarnation of its flash lease.
    pub(crate) fn admit(&self, borrower: &str, epoch: &str, certificate: Option<String>) -> Result<Admitted> {
        let lending = self.lending()?;
        let certificate = certificate.ok_or_else(no_certificate)?;
        let leases = lending.leases();
        let entry = leases.get(borrower).ok_or_else(|| no_lease(borrower))?;
        check_borrower(&entry.kept, &certificate)?;
        match &entry.open {
            Some(open) if open.epoch == epoch && entry.kept.ended.is_none() => Ok(Admitted(open.clone())),
            _ => Err(ApiError::conflict(
                "the request names an earlier incarnation of the flash lease: the lending host has \
                opened the file again since",
            )),
        }
    }

    /// Ends a flash lease for a failover, and returns the path of the leased file. From then on the
    /// borrower cannot access the file, and all the borrower's writes are in the file. The file is
    /// kept while its data is needed. `lease` is the UUID in the superblock of the file, which
    /// identifies the flash lease.
    pub(in crate::services) async fn end_for_failover(&self, borrower: &str, lease: &str) -> Result<PathBuf> {
        let turn = self.lending()?.turn(borrower).await;
        self.close_export(&turn, turn.kept()?.ended.unwrap_or(EndedBy::Adoption)).await?;
        let file = turn.lending.file(borrower);
        if uuid_of(file.clone()).await?.as_deref() != Some(lease) {
            return Err(conflict!("the flash lease of {borrower} is not {lease}"));
        }
        Ok(file)
    }

    async fn close_export(&self, turn: &ExportGuard<'_>, by: EndedBy) -> Result<()> {
        let kept = turn.kept()?;
        // The end is recorded first, so that a restart finds the lease ended.
        if kept.ended != Some(by) {
            turn.keep(Kept { ended: Some(by), ..kept.clone() }).await?;
        }
        let Some(open) = turn.entry(|entry| entry.open.take())? else { return Ok(()) };
        open.exports.remove(REMOTE_EXPORT).await;
        if let Err(error) = open.shard.remove_disk(open.disk).await {
            // The shard still has the file; the next attempt to end the lease tries again.
            turn.entry(|entry| entry.open = Some(open))?;
            return Err(error.into());
        }
        self.registry.inner().lease_disks.remove(&open.disk);
        tracing::warn!(
            "the flash lease of {} ({}) ended, so that host can no longer use this host's flash",
            kept.name,
            turn.borrower
        );
        Ok(())
    }

    /// Ends a flash lease by command of the operator or of the borrower. The leased file is removed
    /// when no disk of the cluster needs its data. After the operator's command, the borrower gets
    /// a new flash lease only after `--forget`.
    pub(crate) async fn end(
        &self,
        borrower: String,
        certificate: Option<String>,
        after: Ended,
    ) -> Result<Vec<String>> {
        let service = self.clone();
        self.tasks
            .run(
                "peer end",
                borrower.clone(),
                async move { service.end_now(&borrower, certificate, after).await },
            )
            .await
    }

    async fn end_now(
        &self,
        borrower: &str,
        certificate: Option<String>,
        after: Ended,
    ) -> Result<Vec<String>> {
        let turn = self.lending()?.turn(borrower).await;
        let borrowers = turn.kept()?.certificate;
        let gives_back = certificate.is_some_and(|certificate| certificate == borrowers);
        let by = if gives_back || after == Ended::Forgotten { EndedBy::Return } else { EndedBy::Operator };
        self.close_export(&turn, by).await?;
        if !self.free_export(&turn).await? {
            return Ok(vec![
                "the borrowing host may need the data: the file stays until no disk of the cluster needs it"
                    .to_owned(),
            ]);
        }
        if by == EndedBy::Return {
            return Ok(Vec::new());
        }
        Ok(vec![format!(
            "this host lends no more flash to that host; 'hob peer end {borrower} --forget' permits \
            a new lease"
        )])
    }

    /// Frees the space of an ended flash lease, and forgets the lease if the borrower may get a new
    /// one. Returns false, without a change, if the data may be needed.
    async fn free_export(&self, turn: &ExportGuard<'_>) -> Result<bool> {
        let (borrower, kept) = (turn.borrower, turn.kept()?);
        let is_named = match uuid_of(turn.lending.file(borrower)).await? {
            Some(uuid) => self.is_needed(&uuid).await,
            None => false,
        };
        // The borrower may need this data to recover its caches, while they have dirty data.
        if is_named || kept.ended == Some(EndedBy::Adoption) && self.has_dirty_data(borrower, &kept).await {
            return Ok(false);
        }
        if kept.ended == Some(EndedBy::Operator) {
            turn.remove_file().await?;
            turn.keep(Kept { size: Size(0), ..kept }).await?;
            tracing::info!(
                "the flash lease of {borrower} ended and its space is free; that host gets no new lease"
            );
        } else {
            turn.forget().await?;
            tracing::info!("the flash lease of {borrower} ended and its space is free");
        }
        Ok(true)
    }

    /// Returns true if an ownership record names this flash lease, or if that is unknown.
    async fn is_needed(&self, lease: &str) -> bool {
        match self.peers.cluster() {
            Some(cluster) => cluster.is_loan_named(lease).await,
            None => false,
        }
    }

    async fn has_dirty_data(&self, borrower: &str, kept: &Kept) -> bool {
        let Some(cluster) = self.peers.cluster() else { return false };
        cluster.may_have_dirty_data(&Member { name: kept.name.clone(), id: borrower.to_owned() }).await
    }

    /// Frees the space of ended flash leases whose data no disk of the cluster needs.
    pub(in crate::services) async fn free_ended(&self) {
        let Some(lending) = self.exports.get() else { return };
        let now = Instant::now();
        let waits = |entry: &Entry| {
            let has_room = entry.kept.ended != Some(EndedBy::Operator) || entry.kept.size > Size(0);
            let is_closed = entry.kept.ended.is_some() && entry.open.is_none();
            is_closed && has_room && entry.retry_after.is_none_or(|at| at <= now)
        };
        let ended: Vec<String> =
            lending.leases().iter().filter(|(_, entry)| waits(entry)).map(|(name, _)| name.clone()).collect();
        for borrower in ended {
            // A lease that is being ended is freed by that operation.
            let Some(turn) = lending.try_turn(&borrower) else { continue };
            let _ = turn.entry(|entry| entry.retry_after = Some(now + LOOK_EVERY));
            if let Err(error) = self.free_export(&turn).await {
                tracing::warn!("cannot free the space of the flash lease of {borrower} yet: {error}");
            }
        }
    }
}

impl Entry {
    fn new(kept: Kept) -> Entry {
        Entry { kept, open: None, retry_after: None }
    }
}

/// Files are accessed in tasks that may block, because one thread serves all flash leases and the
/// control API.
impl ExportGuard<'_> {
    /// Returns the result of `of` for the entry of the flash lease. Fails if there is no such
    /// lease.
    fn entry<T>(&self, of: impl FnOnce(&mut Entry) -> T) -> Result<T> {
        self.lending.leases().get_mut(self.borrower).map(of).ok_or_else(|| no_lease(self.borrower))
    }

    fn kept(&self) -> Result<Kept> {
        self.entry(|entry| entry.kept.clone())
    }

    /// Creates the flash lease: its entry, its file and its record.
    async fn make(&self, ask: FlashLeaseRequest, certificate: String) -> Result<()> {
        let kept = Kept { name: ask.name, certificate, size: ask.size, ended: None };
        {
            let mut leases = self.lending.leases();
            let lent: u64 = leases.values().map(|entry| entry.kept.size.bytes()).sum();
            check_room(self.lending, leases.len(), lent, kept.size)?;
            // The space is reserved from now on.
            leases.insert(self.borrower.to_owned(), Entry::new(kept.clone()));
        }
        let file = self.lending.file(self.borrower);
        let made = match blocking(move || make_file(&file, ask.size)).await.flatten() {
            Ok(()) => self.keep(kept.clone()).await,
            Err(error) => Err(error),
        };
        if made.is_err() {
            let _ = self.remove_file().await;
            self.lending.leases().remove(self.borrower);
        } else {
            tracing::info!("{} of flash is leased to {} ({})", kept.size, kept.name, self.borrower);
        }
        made
    }

    /// Saves this record of the flash lease durably.
    async fn keep(&self, kept: Kept) -> Result<()> {
        let (directory, borrower, written) =
            (self.lending.directory.clone(), self.borrower.to_owned(), kept.clone());
        blocking(move || write_record(&directory, &borrower, &written))
            .await?
            .map_err(|error| failed("save the record of the flash lease", &error))?;
        self.entry(|entry| entry.kept = kept)
    }

    /// Removes the flash lease, the file with its data, and its record.
    async fn forget(&self) -> Result<()> {
        self.remove_file().await?;
        let (directory, borrower) = (self.lending.directory.clone(), self.borrower.to_owned());
        blocking(move || remove_record(&directory, &borrower))
            .await?
            .map_err(|error| failed("remove the record of the flash lease", &error))?;
        self.lending.leases().remove(self.borrower);
        Ok(())
    }

    async fn remove_file(&self) -> Result<()> {
        let file = self.lending.file(self.borrower);
        blocking(move || remove(&file))
            .await?
            .map_err(|error| failed("remove the file of the flash lease", &error))
    }
}

impl Drop for ExportGuard<'_> {
    fn drop(&mut self) {
        self.lending.busy.lock().unwrap_or_else(PoisonError::into_inner).remove(self.borrower);
        self.lending.freed.notify_waiters();
    }
}

/// Whether this host, the lending host, keeps the record of a flash lease that has ended. If the
/// borrower itself returns the lease, this host always removes the record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// The record stays. This host refuses the borrower a new flash lease until an operator runs
    /// `hob peer end BORROWER --forget`.
    Known,
    /// The record is removed, so the borrower may request a new flash lease.
    Forgotten,
}

fn check_borrower(kept: &Kept, certificate: &str) -> Result<()> {
    if kept.certificate == certificate {
        return Ok(());
    }
    Err(conflict!("the flash lease belongs to {}, which has another certificate", kept.name))
}

/// Checks whether an existing flash lease fits a borrower's request.
fn check_again(kept: &Kept, ask: &FlashLeaseRequest, certificate: &str) -> Result<()> {
    check_borrower(kept, certificate)?;
    match kept.ended {
        None => {}
        Some(EndedBy::Operator) => {
            return Err(ApiError::conflict("the operator of the lending host has ended the flash lease")
                .hint("'hob peer end BORROWER --forget' on the lending host allows a new lease"));
        }
        Some(EndedBy::Adoption) => {
            return Err(ApiError::conflict(
                "the lending host ended the flash lease to fail over a disk of this host; it grants \
                a new lease when this host has no dirty data",
            ));
        }
        Some(EndedBy::Return) => {
            return Err(ApiError::conflict(
                "the flash lease was returned; its space is freed when no disk of the cluster needs the data in it",
            ));
        }
    }
    if kept.size != ask.size {
        return Err(conflict!("this host already lends {} to {}", kept.size, kept.name)
            .hint("first remove the device of that lease from its pool"));
    }
    Ok(())
}

fn check_room(lending: &FlashExports, leases: usize, lent: u64, size: Size) -> Result<()> {
    if size.bytes() < LEASE_BYTES_MIN {
        return Err(invalid!("a flash lease must have at least {}", Size(LEASE_BYTES_MIN)));
    }
    let left = lending.bytes_max.saturating_sub(lent);
    if size.bytes() > left || leases >= LEASES_MAX {
        return Err(conflict!(
            "this host can lend {} more, of {} in total",
            Size(left),
            Size(lending.bytes_max)
        ));
    }
    Ok(())
}

/// Returns the UUID in the superblock of a leased file; `None` for a file without superblock. An
/// unreadable file is an error, because it may have a superblock.
async fn uuid_of(file: PathBuf) -> Result<Option<String>> {
    blocking(move || match superblock_uuid(&file) {
        Some(uuid) => Ok(Some(uuid.to_string())),
        None => check_readable(&file)
            .map(|()| None)
            .map_err(|error| failed("read the file of the flash lease", &error)),
    })
    .await?
}

fn no_certificate() -> ApiError {
    ApiError::conflict("this host lends flash only over TLS, to hosts with a certificate")
}

fn no_lease(borrower: &str) -> ApiError {
    not_found!("{borrower} has no flash lease").hint("'hob peer list' shows all flash leases")
}
