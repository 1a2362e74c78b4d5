//! Flash that this host lends: a file for each borrower, which a shard serves to that borrower only, as an NBD export.
//!
//! A loan is bound to the certificate with which it was asked for first. While it is open it has an *epoch*, a random word that is new
//! each time its file is opened: a connection says which one it means, so that a borrower never goes on with a file of which a
//! crash of this host may have lost what was not flushed. What a loan is survives restarts in a file beside it.
//!
//! It refuses to lend more than `lend_max` in all, to make a loan anew while somebody needs its bytes, and to open as an image what a
//! borrower wrote: it is a plain file whatever it looks like.

mod record;
mod serving;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hob_control::{Loan, LoanAsk, LoanState, Size};
use hob_engine::cluster::Member;
use hob_storage::pool::{REMOTE_EXPORT, superblock_uuid};
use tokio::sync::Notify;
use tokio::time::Instant;

use super::RemoteFlash;
use crate::daemon::manager::api_error::ApiError;
use crate::daemon::manager::flash::blocking;
use crate::daemon::state::CacheOwner;
use record::{EndedBy, Kept, check_readable, failed, make_file, remove, remove_record, write_record};
pub(crate) use serving::Admitted;
#[cfg(test)]
pub(in crate::daemon::manager) use serving::CONNECTIONS_MAX;
use serving::Open;

/// Smallest loan, bytes.
const LOAN_BYTES_MIN: u64 = 64 << 20;

/// Pause between two looks whether an ended loan is needed still.
const LOOK_EVERY: Duration = Duration::from_secs(30);

/// Loans there can be.
const LOANS_MAX: usize = 256;

/// What this host may lend.
#[derive(Debug)]
pub(crate) struct FlashExports {
    directory: PathBuf,
    bytes_max: u64,
    /// By borrower. Locked for look-ups only.
    loans: Mutex<BTreeMap<String, Entry>>,
    /// Borrowers whose loans are being changed.
    busy: Mutex<BTreeSet<String>>,
    /// One of them is not any more.
    freed: Notify,
}

/// The right to change a loan, or to make it; given back when dropped.
struct ExportGuard<'a> {
    lending: &'a FlashExports,
    borrower: &'a str,
}

#[derive(Debug)]
struct Entry {
    kept: Kept,
    open: Option<Open>,
    /// It is ended, and whether it is needed still is not looked up before.
    retry_after: Option<Instant>,
}

impl FlashExports {
    /// Finds the loans that are in a directory, which is made if there is none.
    pub(crate) fn open(directory: &Path, bytes_max: u64) -> std::io::Result<FlashExports> {
        fs::create_dir_all(directory)?;
        let mut loans = BTreeMap::new();
        for file in fs::read_dir(directory)? {
            let path = file?.path();
            let stem = path.file_stem().and_then(|stem| stem.to_str()).map(str::to_owned);
            let (Some(borrower), true) = (stem, path.extension().is_some_and(|it| it == "json")) else {
                continue;
            };
            match fs::read(&path).ok().and_then(|text| serde_json::from_slice::<Kept>(&text).ok()) {
                Some(kept) => {
                    loans.insert(borrower, Entry::new(kept));
                }
                None => {
                    tracing::error!(
                        "{} is not a valid record of a flash lease; that lease is unavailable",
                        path.display()
                    )
                }
            }
        }
        Ok(FlashExports {
            directory: directory.to_owned(),
            bytes_max,
            loans: Mutex::new(loans),
            busy: Mutex::default(),
            freed: Notify::new(),
        })
    }

    fn loans(&self) -> MutexGuard<'_, BTreeMap<String, Entry>> {
        self.loans.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Nothing if somebody has it.
    fn try_turn<'a>(&'a self, borrower: &'a str) -> Option<ExportGuard<'a>> {
        let mut busy = self.busy.lock().unwrap_or_else(PoisonError::into_inner);
        busy.insert(borrower.to_owned()).then(|| ExportGuard { lending: self, borrower })
    }

    /// When nobody has it any more.
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

    fn view(&self, borrower: &str, entry: &Entry, lender: &str) -> Loan {
        Loan {
            borrower: borrower.to_owned(),
            name: entry.kept.name.clone(),
            lender: lender.to_owned(),
            size: entry.kept.size,
            state: match &entry.open {
                _ if entry.kept.ended.is_some() => LoanState::Ended,
                Some(_) => LoanState::Open,
                None => LoanState::Idle,
            },
            path: self.file(borrower).to_string_lossy().into_owned(),
            epoch: entry.open.as_ref().map(|open| open.epoch.clone()),
        }
    }
}

impl RemoteFlash {
    fn lending(&self) -> Result<&FlashExports, ApiError> {
        self.0.exports.get().ok_or_else(|| {
            ApiError::conflict("this host lends nothing")
                .hint("[peers] in its hob.toml says what it lends: lend and lend_max")
        })
    }

    /// What is lent.
    pub(in crate::daemon::manager) fn lent(&self) -> Vec<Loan> {
        let Some(lending) = self.0.exports.get() else { return Vec::new() };
        let (loans, me) = (lending.loans(), self.0.peers.own_name());
        loans.iter().map(|(borrower, entry)| lending.view(borrower, entry, &me)).collect()
    }

    /// Another host wants to use flash of this one, or to go on doing so.
    pub(crate) async fn lend(
        &self,
        borrower: String,
        ask: LoanAsk,
        certificate: Option<String>,
    ) -> Result<Loan, ApiError> {
        let service = self.clone();
        self.0
            .tasks
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
        ask: LoanAsk,
        certificate: Option<String>,
    ) -> Result<Loan, ApiError> {
        let lending = self.lending()?;
        let certificate = certificate.ok_or_else(no_certificate)?;
        if borrower.parse::<CacheOwner>().is_err() {
            return Err(ApiError::invalid(format!("'{borrower}' is no host's identity")));
        }
        // Whoever borrows asks again and again: that is not to pile up.
        let turn = lending
            .try_turn(borrower)
            .ok_or_else(|| ApiError::busy("the loan is being changed").hint("ask again when that is done"))?;
        let known = lending.loans().get(borrower).map(|entry| entry.kept.clone());
        match known {
            Some(kept) => check_again(&kept, &ask, &certificate)?,
            None => turn.make(ask, certificate).await?,
        }
        let is_open = lending.loans().get(borrower).is_some_and(|entry| entry.open.is_some());
        let opened = if is_open { None } else { Some(self.open_export(lending.file(borrower)).await?) };
        let mut loans = lending.loans();
        let entry = loans.get_mut(borrower).ok_or_else(|| no_loan(borrower))?;
        entry.open = opened.or(entry.open.take());
        Ok(lending.view(borrower, entry, &self.0.peers.own_name()))
    }

    /// May a borrower connect to what it knows by that epoch?
    pub(crate) fn admit(
        &self,
        borrower: &str,
        epoch: &str,
        certificate: Option<String>,
    ) -> Result<Admitted, ApiError> {
        let lending = self.lending()?;
        let certificate = certificate.ok_or_else(no_certificate)?;
        let loans = lending.loans();
        let entry = loans.get(borrower).ok_or_else(|| no_loan(borrower))?;
        check_borrower(&entry.kept, &certificate)?;
        match &entry.open {
            Some(open) if open.epoch == epoch && entry.kept.ended.is_none() => Ok(Admitted(open.clone())),
            _ => Err(ApiError::conflict("the loan is not the one that was meant: it was closed since")),
        }
    }

    /// Ends a loan: the borrower can read and write it no more, from when this returns, and all it has written is in the file, of which the
    /// path is returned. The file stays for as long as its bytes are needed. `loan` is the device's name in its superblock, to be
    /// certain that it is that loan.
    pub(in crate::daemon::manager) async fn end_for_failover(
        &self,
        borrower: &str,
        loan: &str,
    ) -> Result<PathBuf, ApiError> {
        let turn = self.lending()?.turn(borrower).await;
        self.close_export(&turn, turn.kept()?.ended.unwrap_or(EndedBy::Adoption)).await?;
        let file = turn.lending.file(borrower);
        if uuid_of(file.clone()).await?.as_deref() != Some(loan) {
            return Err(ApiError::conflict(format!("what is lent to {borrower} is not {loan}")));
        }
        Ok(file)
    }

    async fn close_export(&self, turn: &ExportGuard<'_>, by: EndedBy) -> Result<(), ApiError> {
        let kept = turn.kept()?;
        // Before it is opened again: a restart in between finds it ended.
        if kept.ended != Some(by) {
            turn.keep(Kept { ended: Some(by), ..kept.clone() }).await?;
        }
        let Some(open) = turn.entry(|entry| entry.open.take())? else { return Ok(()) };
        open.exports.remove(REMOTE_EXPORT);
        if let Err(error) = open.shard.remove_disk(open.disk).await {
            // The shard has the file still, and whoever ends the loan again tries that again.
            turn.entry(|entry| entry.open = Some(open))?;
            return Err(error.into());
        }
        self.0.registry.inner().lease_disks.remove(&open.disk);
        tracing::warn!("the flash lease of {} ({}) has ended", kept.name, turn.borrower);
        Ok(())
    }

    /// An operator ends a loan, or its borrower gives it back. Its file goes when nobody needs its bytes. A borrower whose loan an operator
    /// has ended gets no other one before that is forgotten.
    pub(crate) async fn end(
        &self,
        borrower: String,
        certificate: Option<String>,
        after: Ended,
    ) -> Result<Vec<String>, ApiError> {
        let service = self.clone();
        self.0
            .tasks
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
    ) -> Result<Vec<String>, ApiError> {
        let turn = self.lending()?.turn(borrower).await;
        let borrowers = turn.kept()?.certificate;
        let gives_back = certificate.is_some_and(|certificate| certificate == borrowers);
        let by = if gives_back || after == Ended::Forgotten { EndedBy::Return } else { EndedBy::Operator };
        self.close_export(&turn, by).await?;
        if !self.free_export(&turn).await? {
            return Ok(vec![
                "its borrower may need what it has there: the file stays until a disk of the cluster needs it no more".to_owned(),
            ]);
        }
        if by == EndedBy::Return {
            return Ok(Vec::new());
        }
        Ok(vec![format!(
            "nothing more is lent to that host; 'hob peer end {borrower} --forget' lets it ask again"
        )])
    }

    /// Frees what an ended loan has taken, and forgets the loan if its borrower may have another one. False, and nothing is done, where its bytes
    /// may be needed.
    async fn free_export(&self, turn: &ExportGuard<'_>) -> Result<bool, ApiError> {
        let (borrower, kept) = (turn.borrower, turn.kept()?);
        let is_named = match uuid_of(turn.lending.file(borrower)).await? {
            Some(uuid) => self.is_needed(&uuid).await,
            None => false,
        };
        // What it has elsewhere it may have to recover from here, until it has nothing dirty.
        if is_named || kept.ended == Some(EndedBy::Adoption) && self.has_dirty_data(borrower, &kept).await {
            return Ok(false);
        }
        if kept.ended == Some(EndedBy::Operator) {
            turn.remove_file().await?;
            turn.keep(Kept { size: Size(0), ..kept }).await?;
            tracing::info!("the flash of {borrower} is free, and no more flash is lent to it");
        } else {
            turn.forget().await?;
            tracing::info!("the flash of {borrower} is free");
        }
        Ok(true)
    }

    /// Does any ownership record name this lease? True also where that cannot be known.
    async fn is_needed(&self, lease: &str) -> bool {
        match self.0.peers.cluster() {
            Some(cluster) => cluster.is_loan_named(lease).await,
            None => false,
        }
    }

    async fn has_dirty_data(&self, borrower: &str, kept: &Kept) -> bool {
        let Some(cluster) = self.0.peers.cluster() else { return false };
        cluster.may_have_dirty_data(&Member { name: kept.name.clone(), id: borrower.to_owned() }).await
    }

    /// Frees the loans that have ended and were needed still, if they are not any more.
    pub(in crate::daemon::manager) async fn free_ended(&self) {
        let Some(lending) = self.0.exports.get() else { return };
        let now = Instant::now();
        let waits = |entry: &Entry| {
            let has_room = entry.kept.ended != Some(EndedBy::Operator) || entry.kept.size > Size(0);
            let is_closed = entry.kept.ended.is_some() && entry.open.is_none();
            is_closed && has_room && entry.retry_after.is_none_or(|at| at <= now)
        };
        let ended: Vec<String> =
            lending.loans().iter().filter(|(_, entry)| waits(entry)).map(|(name, _)| name.clone()).collect();
        for borrower in ended {
            // What is being ended now is freed by whoever does that.
            let Some(turn) = lending.try_turn(&borrower) else { continue };
            let _ = turn.entry(|entry| entry.retry_after = Some(now + LOOK_EVERY));
            if let Err(error) = self.free_export(&turn).await {
                tracing::warn!("the flash of {borrower} is not free yet: {error}");
            }
        }
    }
}

impl Entry {
    fn new(kept: Kept) -> Entry {
        Entry { kept, open: None, retry_after: None }
    }
}

/// File work is done where it may wait: this is a thread that serves all loans, and the control API.
impl ExportGuard<'_> {
    /// Something of the loan.
    fn entry<T>(&self, of: impl FnOnce(&mut Entry) -> T) -> Result<T, ApiError> {
        self.lending.loans().get_mut(self.borrower).map(of).ok_or_else(|| no_loan(self.borrower))
    }

    fn kept(&self) -> Result<Kept, ApiError> {
        self.entry(|entry| entry.kept.clone())
    }

    /// Makes a loan that is not there yet.
    async fn make(&self, ask: LoanAsk, certificate: String) -> Result<(), ApiError> {
        let kept = Kept { name: ask.name, certificate, size: ask.size, ended: None };
        {
            let mut loans = self.lending.loans();
            let lent: u64 = loans.values().map(|entry| entry.kept.size.bytes()).sum();
            check_room(self.lending, loans.len(), lent, kept.size)?;
            // Its room is nobody else's from now on.
            loans.insert(self.borrower.to_owned(), Entry::new(kept.clone()));
        }
        let file = self.lending.file(self.borrower);
        let made = match blocking(move || make_file(&file, ask.size)).await.flatten() {
            Ok(()) => self.keep(kept.clone()).await,
            Err(error) => Err(error),
        };
        if made.is_err() {
            let _ = self.remove_file().await;
            self.lending.loans().remove(self.borrower);
        } else {
            tracing::info!("{} is lent to {} ({})", kept.size, kept.name, self.borrower);
        }
        made
    }

    /// Keeps what the loan is, durably.
    async fn keep(&self, kept: Kept) -> Result<(), ApiError> {
        let (directory, borrower, written) =
            (self.lending.directory.clone(), self.borrower.to_owned(), kept.clone());
        blocking(move || write_record(&directory, &borrower, &written))
            .await?
            .map_err(|error| failed("keep the loan", &error))?;
        self.entry(|entry| entry.kept = kept)
    }

    /// Removes the loan, and what is kept of it.
    async fn forget(&self) -> Result<(), ApiError> {
        self.remove_file().await?;
        let (directory, borrower) = (self.lending.directory.clone(), self.borrower.to_owned());
        blocking(move || remove_record(&directory, &borrower))
            .await?
            .map_err(|error| failed("forget the loan", &error))?;
        self.lending.loans().remove(self.borrower);
        Ok(())
    }

    async fn remove_file(&self) -> Result<(), ApiError> {
        let file = self.lending.file(self.borrower);
        blocking(move || remove(&file)).await?.map_err(|error| failed("remove the loan's file", &error))
    }
}

impl Drop for ExportGuard<'_> {
    fn drop(&mut self) {
        self.lending.busy.lock().unwrap_or_else(PoisonError::into_inner).remove(self.borrower);
        self.lending.freed.notify_waiters();
    }
}

/// What becomes of a loan that is ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// Its borrower gets no other one.
    Known,
    /// It may ask again.
    Forgotten,
}

fn check_borrower(kept: &Kept, certificate: &str) -> Result<(), ApiError> {
    if kept.certificate == certificate {
        return Ok(());
    }
    Err(ApiError::conflict(format!("that loan is {}'s, which shows another certificate", kept.name)))
}

/// May a loan that is there be used as it is asked for?
fn check_again(kept: &Kept, ask: &LoanAsk, certificate: &str) -> Result<(), ApiError> {
    check_borrower(kept, certificate)?;
    match kept.ended {
        None => {}
        Some(EndedBy::Operator) => {
            return Err(ApiError::conflict("its operator has ended the loan")
                .hint("'hob peer end BORROWER --forget' there lets this host ask again"));
        }
        Some(EndedBy::Adoption) => {
            return Err(ApiError::conflict(
                "it ended the loan to take over a disk of this host, and lends again when nothing of this host is dirty",
            ));
        }
        Some(EndedBy::Return) => {
            return Err(ApiError::conflict(
                "the loan was given back, and its room is not free before no disk of the cluster needs what is there",
            ));
        }
    }
    if kept.size != ask.size {
        return Err(ApiError::conflict(format!("{} are lent to {} already", kept.size, kept.name))
            .hint("give that back first: take the device out of its pool"));
    }
    Ok(())
}

fn check_room(lending: &FlashExports, loans: usize, lent: u64, size: Size) -> Result<(), ApiError> {
    if size.bytes() < LOAN_BYTES_MIN {
        return Err(ApiError::invalid(format!("a loan has at least {}", Size(LOAN_BYTES_MIN))));
    }
    let left = lending.bytes_max.saturating_sub(lent);
    if size.bytes() > left || loans >= LOANS_MAX {
        return Err(ApiError::conflict(format!(
            "{} of the {} that this host lends are left",
            Size(left),
            Size(lending.bytes_max)
        )));
    }
    Ok(())
}

/// What the superblock in a loan's file calls it, if it has one. A file that cannot be read may have one.
async fn uuid_of(file: PathBuf) -> Result<Option<String>, ApiError> {
    blocking(move || match superblock_uuid(&file) {
        Some(uuid) => Ok(Some(uuid.to_string())),
        None => check_readable(&file).map(|()| None).map_err(|error| failed("read the loan's file", &error)),
    })
    .await?
}

fn no_certificate() -> ApiError {
    ApiError::conflict("flash is lent over TLS, to hosts that show a certificate")
}

fn no_loan(borrower: &str) -> ApiError {
    ApiError::not_found(format!("nothing is lent to {borrower}"))
        .hint("'hob peer list' shows all flash leases")
}
